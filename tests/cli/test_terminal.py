# SPDX-License-Identifier: Apache-2.0
"""What a person sees at a terminal: tables that fit, the answer last, the page in the browser."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from keymix.analysis.certainty import Decision
from keymix.cli import console, main
from keymix.cli.analyze import main as analyze
from keymix.cli.comparison import print_result
from keymix.compare.run import Comparison
from keymix.errors import UserError
from keymix.report.answer import Next, answer
from keymix.report.record import Results, opened

RECORD = Path(__file__).parents[2] / "docs/results/cifar10-20-epochs/results.json"


@pytest.fixture(scope="module")
def record() -> Results:
    return opened(json.loads(RECORD.read_text("utf-8")), where="it")


def screen(monkeypatch: pytest.MonkeyPatch, record: Results, width: int) -> list[str]:
    """Return the lines that a terminal of a width gets at the end of a comparison."""
    stream = io.StringIO()
    drawn = Console(file=stream, width=width, soft_wrap=True, highlight=False, emoji=False)
    drawn._force_terminal = True
    drawn._color_system = None
    monkeypatch.setattr(console, "out", drawn)
    monkeypatch.setattr(console, "err", drawn)
    print_result(Comparison(out=Path("out"), record=record))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_final_screen_fits_and_cuts_no_name_and_no_score(
    width: int, record: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = screen(monkeypatch, record, width)
    assert max(map(len, lines)) <= width
    head = next(i for i, line in enumerate(lines) if line.startswith("mixer "))
    rule = next(i for i, line in enumerate(lines) if line.startswith("───"))
    assert rule in (head + 1, head + 2)
    words = " ".join(" ".join(lines[max(0, rule - 3) : rule]).split())
    for heading in ("difference", "interval", "certainty"):
        assert heading in words
    for row in record.outcome.last:
        at = next(i for i in range(rule + 1, len(lines)) if lines[i].startswith(row.mixer[:5]))
        name, rest = lines[at].partition("  ")[0], lines[at + 1].strip()
        assert row.mixer in (name, name + rest, f"{name} {rest}")  # one that is too long folds
        score = record.task_kind.score
        assert score.digits(row.scores[score.key].mean) in lines[at].split()


@pytest.mark.parametrize("width", [60, 140])
def test_the_last_lines_are_the_answer_and_the_report(
    width: int, record: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Decision(verdict="undecided", reason="seeds", best="softmax", seeds=1, margin=0.02)
    record = replace(record, recommendation=found)
    lines = screen(monkeypatch, record, width)
    assert lines[-1].split() == ["report", "out/report.html"]
    found_out = answer(record)
    more = f"Next: {found_out.next.text}. {found_out.next.command}" if found_out.next else ""
    last = f"{found_out.title}. {found_out.certainty}. {found_out.decision} {more}".split()
    assert " ".join(lines[:-1]).split()[-len(last) :] == last
    assert found_out.decision


def test_the_next_command_is_whole_however_narrow_the_terminal(
    record: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "keymix compare --data folder:photos --mixers softmax,static_key --seeds 5"
    advised = replace(answer(record), next=Next(text="train 5 seeds", command=command))
    monkeypatch.setattr("keymix.report.answer.answer", lambda record: advised)
    lines = screen(monkeypatch, record, 40)
    assert lines[lines.index("Next: train 5 seeds.") + 1] == f"  {command}"


def test_open_shows_the_page_once_it_is_written(
    record: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda page: not shown.append(page))
    monkeypatch.setattr(
        "keymix.compare.run.rebuild", lambda out, **_: Comparison(out=Path(out), record=record)
    )
    assert main(["report", "/some/where"]) == 0
    assert not shown
    assert main(["report", "/some/where", "--open", "--json"]) == 0
    assert shown == ["file:///some/where/report.html"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["report"].endswith("report.html")


def test_without_a_browser_the_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda page: False)
    console.open_page(tmp_path / "report.html")
    assert str(tmp_path / "report.html") in capsys.readouterr().err


def test_open_needs_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "complexity", "--tokens", "none", "--open"]) == 2
    assert "--out" in capsys.readouterr().err
    with pytest.raises(UserError):
        analyze(["memory", "--open"])


def test_an_analysis_opens_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda page: not shown.append(page))
    words = ["--tokens", "none", "--mixers", "ska", "--out", str(tmp_path / "out"), "--open"]
    assert main(["analyze", "complexity", *words]) == 0
    assert shown == [(tmp_path / "out" / "complexity.html").as_uri()]
