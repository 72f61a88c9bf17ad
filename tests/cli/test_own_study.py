# SPDX-License-Identifier: Apache-2.0
"""An analysis of one's own, that of the documentation, beside keymix's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keymix.cli import analyze, console
from keymix.errors import UserError
from keymix.studies import study as studying
from keymix.studies.study import get_study, list_studies, register_study

DOCS = Path(__file__).parents[2] / "docs"
NAME = "vit_nano_p2_12"


@pytest.fixture
def norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example of the page, in a file."""
    monkeypatch.setattr(studying, "_OWN", {})
    text = (DOCS / "own-study.md").read_text(encoding="utf-8")
    file = tmp_path / "norms.py"
    file.write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    before = {*sys.modules}
    yield str(file)
    for name in {*sys.modules} - before:
        if name.startswith("norms"):
            del sys.modules[name]


def test_it_is_listed_and_has_a_command_a_page_and_files(
    norms: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze.main(["--help", "--import", norms]) in (0, None)
    assert "norms       how large the weights" in capsys.readouterr().out
    out = tmp_path / "out"
    assert analyze.main(["norms", NAME, f"--import={norms}", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "model\tlayer\tnorm"
    assert said.err.splitlines()[-1].startswith("The largest weights are in ")
    assert {p.name for p in out.iterdir()} == {"norms.json", "norms.html", "norms-norms.csv"}
    kept = json.loads((out / "norms.json").read_text())
    assert kept["answer"] in (out / "norms.html").read_text()
    assert kept["command"].startswith("keymix analyze norms")
    assert all(norm >= 0 for norm in kept["norms"].values())
    assert "Norms of weights" in (out / "norms.html").read_text()
    assert analyze.main(["norms", NAME, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("Norms of weights\n\n| model | layer | norm |")
    assert analyze.main(["norms", NAME, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["answer"] == kept["answer"]
    assert "largest weights" not in said.err


def test_the_last_line_at_a_terminal_is_the_answer(
    norms: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "_force_terminal", True)
    assert analyze.main(["norms", NAME, "--import", norms]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("The largest weights are in ")


def test_names_of_keymixs_own_are_refused_and_unknown_ones_named(norms: str) -> None:
    del norms
    with pytest.raises(UserError, match="'collapse'"):
        register_study(get_study("collapse"))
    with pytest.raises(UserError, match="'norms'"):
        get_study("norms")


def test_every_analysis_is_reported_in_the_docs() -> None:
    pages = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    for name in list_studies():
        assert get_study(name).name == name
        assert f"keymix analyze {name}" in pages
