# SPDX-License-Identifier: Apache-2.0
"""A folder in `keymix.studies` is an analysis: nothing else names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from keymix import studies
from keymix.cli import analyze, console
from keymix.studies.study import get_study, list_studies

STUDY = """
from dataclasses import dataclass
from keymix.analysis.study_record import StudyRecord, joined
from keymix.report.tables import Column, Table
from keymix.report.page import render_page
from keymix.studies.study import Study, saved_tables

@dataclass(frozen=True, kw_only=True)
class Record(StudyRecord):
    numbers: tuple[int, ...]

class Toy(Study):
    summary, description, examples = "counts", "Count.", ""
    writes, also_written, markdown = "a page", "toy.json", True

    def add_options(self, add):
        add("--to", type=int, default=2)

    def run(self, given, session):
        yield tuple(range(given.to))

    def record(self, found, session):
        return joined(Record, session.frame(), numbers=found)

    def answer(self, record):
        return f"There are {len(record.numbers)} numbers"

    def tables(self, record):
        column = Column("n", "n", "whole")
        return [Table("numbers", "Numbers", [column], [[n] for n in record.numbers])]

    def files(self, record):
        view = {"r": record, "table": self.tables(record)[0]}
        page = render_page("own/page.html.j2", view, package=__package__)
        return {**saved_tables(self.name, self.tables(record)), self.page_file: page}

STUDY = Toy()
"""
PAGE = """{% extends "page.html.j2" %}{% import "macros.html.j2" as m with context %}
{% block title %}Toy{% endblock %}{% block main %}{{ m.sheet(table) }}{% endblock %}"""


@pytest.fixture
def _toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own" / "toy" / "templates").mkdir(parents=True)
    (tmp_path / "own" / "toy" / "__init__.py").write_text("")
    (tmp_path / "own" / "toy" / "study.py").write_text(STUDY)
    (tmp_path / "own" / "toy" / "templates" / "page.html.j2").write_text(PAGE)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(tmp_path / "own")])
    list_studies.cache_clear()
    yield
    list_studies.cache_clear()


@pytest.mark.usefixtures("_toy")
def test_a_folder_is_an_analysis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "toy" in list_studies()
    assert analyze.main(["--help"]) == 0
    assert "toy         counts" in capsys.readouterr().out
    out = tmp_path / "out"
    assert analyze.main(["toy", "--to", "3", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"numbers\t{n}" for n in ("n", 0, 1, 2)]
    assert said.err.splitlines()[-1] == "There are 3 numbers"
    assert {path.name for path in out.iterdir()} == {"toy.json", "toy.html", "toy-numbers.csv"}
    kept = json.loads((out / "toy.json").read_text())
    assert (kept["numbers"], kept["answer"]) == ([0, 1, 2], "There are 3 numbers")
    assert "<title>Toy" in (out / "toy.html").read_text()
    assert analyze.main(["toy", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("Numbers\n\n| n |")
    assert analyze.main(["toy", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["answer"] == "There are 2 numbers"
    assert "There are" not in said.err


@pytest.mark.usefixtures("_toy")
def test_the_last_line_at_a_terminal_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(console.out, "_force_terminal", True)
    assert analyze.main(["toy", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "There are 2 numbers"


def test_every_analysis_is_reported_in_the_docs() -> None:
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join(page.read_text("utf-8") for page in docs.glob("*.md"))
    for name in list_studies():
        assert get_study(name).name == name
        assert f"keymix analyze {name}" in pages
