# SPDX-License-Identifier: Apache-2.0
"""One table in every form: the same cells, escaped as each form needs it."""

from __future__ import annotations

import csv
import io

import pytest
from synthetic import make_record, typed

from keymix.cli.predict import _csv
from keymix.report import formats
from keymix.report.frames import RESULTS, results_table
from keymix.report.page import environment
from keymix.report.tables import Cell, Column, Table, safe, text_table
from keymix.tasks.classification.answers import ANSWERS, ClassPrediction

FORMULAS = ["=1+1", "+1", "-2", "@SUM(A1)", '=HYPERLINK("http://x","y")']
CONTROLS = {"\t=1": "\\t=1", "\r=1": "\\r=1", "a\nb": "a\\nb", "\x1b[31m": "\\x1b[31m"}
HARMFUL = [*((name, f"'{name}") for name in FORMULAS), *CONTROLS.items()]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize(("name", "written"), HARMFUL)
def test_harmful_names_are_neutralised_in_predictions(name: str, written: str) -> None:
    answer = ClassPrediction(path=name, classes=(name, "cat"), probabilities=(0.75, 0.25))
    first, second = rows_of(_csv(ANSWERS.csv([answer])))
    assert first["class"] == first["image"] == written
    assert first["probability"] == "0.750000"
    assert second["class"] == "cat"


@pytest.mark.parametrize(("name", "written"), HARMFUL)
def test_harmful_names_are_neutralised_in_results(name: str, written: str) -> None:
    scores = {"top1": 0.5, "top5": None, "loss": -1.25}
    record = make_record(seeds=1, accuracy={name: 0.5})
    (run,) = record["runs"]
    run["last"] = run["best"] = {**run["last"], "val": scores, "test": scores}
    record["costs"][name] |= {"params": 7, "macs": None, "latency_ms": -0.5}
    rows = rows_of(results_table(typed(record)).csv())
    assert tuple(rows[0]) == RESULTS
    assert {row["mixer"] for row in rows} == {written}
    assert {row["value"] for row in rows} == {"0.5", "-1.25"}  # numbers stay numbers
    assert {(row["params"], row["macs"], row["latency_ms"]) for row in rows} == {("7", "", "-0.5")}
    assert len(rows) == 8


def test_plain_text_and_numbers_pass():
    for value in ("cat", "5", "a=b", "", "'quoted", 3, -1.5, None):
        assert safe(value) is value


EVIL = "a|b & 50 % <i>[red]\x1b"
TABLE = Table(
    "costs",
    "What it costs",
    (
        Column("mixer", "mixer"),
        Column("latency, ms", "latency_ms", "ms", most_first=True),
        Column("change", "change", "percent", write=formats.points),
        Column("", "seed", "whole", where="csv"),
        Column("note", "note", where="people", style="soft", sort="none"),
    ),
    [
        (EVIL, 1.2345678, -0.0123, 0, "short"),
        ("identity", None, Cell(0.0, "baseline"), 1000, Cell(None, "", style="soft")),
    ],
)


def test_people_read_cells_as_their_column_writes_them() -> None:
    assert TABLE.headings() == ["mixer", "latency, ms", "change", "note"]
    assert TABLE.cells() == [[EVIL, "1.23", "−1.2", "short"], ["identity", "–", "baseline", ""]]


def test_files_hold_values_as_they_are_and_scripts_get_six_digits() -> None:
    assert TABLE.plain()[0] == ["mixer", "latency_ms", "change", "seed"]
    assert rows_of(TABLE.csv())[1] == {
        "mixer": "identity",
        "latency_ms": "",
        "change": "0.0",
        "seed": "1000",
    }
    assert TABLE.piped()[1] == [EVIL.replace("\x1b", "\\x1b"), "1.23457", "-0.0123", "0"]
    assert TABLE.piped()[2] == ["identity", "", "0", "1000"]


def test_markdown_and_latex_escape_what_would_end_a_cell() -> None:
    lines = TABLE.markdown().splitlines()
    assert lines[1] == "| --- | --: | --: | --- |"
    assert lines[2].count(" | ") == 3
    assert "a\\|b" in lines[2]
    latex = TABLE.latex()
    assert latex.startswith("\\begin{tabular}{lrrl}")
    assert "a|b \\& 50 \\% <i>[red]" in latex


def test_at_a_terminal_no_name_is_markup_and_text_stands_on_the_left() -> None:
    title, head, _, rule, first, second = TABLE.text(120).splitlines()
    assert (title, set(rule)) == ("What it costs", {"─"})
    assert "[red]\\x1b" in first
    assert first.index("1.23") + len("1.23") == head.index("latency,") + len("latency,")
    assert second.startswith("identity ")
    texts = text_table(["a", "b", "c"], [["x", "", "1"], ["long", "y", "100"]], left=2)
    assert texts.cells()[0] == ["x", "", "1"]
    assert texts.text(80).splitlines()[2:] == ["x          1", "long  y  100"]


def test_a_page_sorts_by_values_and_shows_texts() -> None:
    source = '{% import "macros.html.j2" as m with context %}{{ m.sheet(table) }}'
    drawn = environment().from_string(source).render(table=TABLE, looks={}, r=None)
    assert '<th scope="col" data-sort="number" data-first="descending">latency, ms</th>' in drawn
    assert '<td data-label="latency, ms" data-value="1.2345678">1.23</td>' in drawn
    assert '<td data-label="change" data-value="0.0">baseline</td>' in drawn
    assert '<th scope="col">note</th>' in drawn
    assert "<i>" not in drawn


def test_a_page_marks_rows_and_leaves_on_a_phone_what_says_something() -> None:
    source = '{% import "macros.html.j2" as m with context %}{{ m.sheet(table) }}'
    columns = (Column("a", "a", sort="none"), Column("b", "b", "count", sort="none"))
    rows = [("x", Cell(None, formats.MISSING, "soft")), ("y", Cell(None, "why", "state"))]
    table = Table("t", "T", columns, rows, marked=frozenset({1}))
    drawn = environment().from_string(source).render(table=table, looks={}, r=None)
    assert '<table class="numbers t-t">' in drawn
    assert '<td data-label="b" class="soft wide">–</td></tr>' in drawn
    assert '<tr class="met"><th scope="row" data-value="y"><bdi>y</bdi></th>' in drawn
    assert '<td data-label="b" class="state">why</td>' in drawn
