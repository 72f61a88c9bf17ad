# SPDX-License-Identifier: Apache-2.0
"""What was computed, in Python: printed, in a notebook, as frames, figures and files."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from synthetic import make_record, typed

import keymix
from keymix.errors import UserError
from keymix.records import to_json
from keymix.report.charts import Chart
from keymix.report.comparison import RESULTS, Comparison
from keymix.report.frames import DIFFERENCES, SCORES
from keymix.report.record import CostRow
from keymix.report.result import Result
from keymix.report.tables import Table, text_table


@pytest.fixture
def compared(tmp_path: Path) -> Comparison:
    return Comparison(out=tmp_path, record=typed(make_record(2)))


def test_it_prints_about_ten_lines_that_begin_with_the_table(compared: Comparison) -> None:
    lines = str(compared).splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines[:10])) <= 100
    for label in compared.record.labels:
        assert any(line.startswith(label) for line in lines[3:10])


def test_a_notebook_escapes_what_it_shows(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    shown = Comparison(
        out=tmp_path, record=typed(make_record(accuracy={"softmax": 0.9, evil: 0.8}))
    )
    html = shown._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert "<table" in html


def test_scores_are_one_row_per_number(compared: Comparison) -> None:
    scores = compared.scores
    assert tuple(scores.columns) == SCORES
    assert len(scores) == 6 * 2 * 2 * 2  # mixers, seeds, epochs, splits
    run = compared.record.finished("static_key")[1]
    (found,) = scores.query(
        "mixer == 'static_key' and seed == 1 and epoch == 'last' and split == 'test'"
    )["value"]
    assert found == run.last.test["top1"]


def test_curves_have_every_epoch(compared: Comparison) -> None:
    run = compared.record.finished("softmax")[0]
    found = compared.curves.query("mixer == 'softmax' and seed == 0 and metric == 'top1'")
    assert list(found["epoch"]) == list(range(1, 13))
    assert list(found["value"]) == [line.values["val_top1"] for line in run.history]
    assert set(found["split"]) == {"val"}


def test_differences_are_those_of_the_outcome(compared: Comparison) -> None:
    found = compared.differences
    assert tuple(found.columns) == DIFFERENCES
    row = compared.record.outcome.last[1]
    assert row.interval is not None
    ours = found.query(f"mixer == '{row.mixer}' and epoch == 'last'").iloc[0]
    assert (ours["difference"], ours["low"], ours["high"], ours["degree"]) == (
        row.interval.difference, row.interval.low, row.interval.high, row.degree,
    )  # fmt: skip
    assert not set(found["mixer"]) & {compared.record.baseline}


def test_costs_are_one_row_per_mixer_also_where_they_are_unknown(compared: Comparison) -> None:
    costs = {**compared.record.costs, "identity": CostRow(params=7)}
    frame = Comparison(out=compared.out, record=replace(compared.record, costs=costs)).costs
    assert list(frame["mixer"]) == compared.record.labels
    assert frame["macs"].isna().sum() == 1
    assert frame["macs"][0] == compared.record.costs["softmax"].macs


def test_a_finished_folder_opens_as_it_was(compared: Comparison) -> None:
    stored = json.dumps(to_json(compared.record))
    (compared.out / RESULTS).write_text(stored, encoding="utf-8")
    opened = keymix.load_results(compared.out)
    assert opened.record == compared.record
    assert opened.scores.equals(compared.scores)


@pytest.mark.parametrize(
    ("text", "culprit"), [(None, RESULTS), ("{", RESULTS), ("{}", "format"), ("[]", "format")]
)
def test_a_folder_without_results_is_named(tmp_path: Path, text: str | None, culprit: str) -> None:
    if text is not None:
        (tmp_path / RESULTS).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=culprit) as caught:
        keymix.load_results(tmp_path)
    assert str(tmp_path) in str(caught.value)


class Counted(Result):
    """A result as an analysis makes it."""

    name, answer = "counted", "Yes."

    @property
    def tables(self) -> dict[str, Table]:
        return {"counts": text_table(["mixer", "n"], [["a", "1"], ["=b", "2"]])}

    @property
    def figures(self) -> dict[str, Chart]:
        return {"line": Chart("line", "A line.", lambda ax: ax.plot([1, 2]))}


def test_any_result_draws_saves_and_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counted()
    assert len(found.plot("line").lines) == 1
    with pytest.raises(UserError, match="'lin'"):
        found.plot("lin")
    with pytest.raises(UserError, match="'count'"):
        found.frame("count")
    found.save(tmp_path / "made")
    saved = json.loads((tmp_path / "made" / "counted.json").read_text())
    assert saved["answer"] == "Yes."
    assert set(saved) == {"answer", "command", "created", "environment"}
    with (tmp_path / "made" / "counted-counts.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [["mixer", "n"], ["a", "1"], ["'=b", "2"]]
    assert "<svg" in (tmp_path / "made" / "counted-line.svg").read_text()
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda where: not shown.append(where))
    found.open()
    page = Path(url2pathname(urlsplit(shown[0]).path)).read_text(encoding="utf-8")
    for text in ("<h1>Yes.</h1>", "A line.", "<svg", "<dt>machine</dt>"):
        assert text in page


def test_a_result_that_says_nothing_has_its_name_as_heading() -> None:
    assert "<h1>result</h1>" in Result().html()
