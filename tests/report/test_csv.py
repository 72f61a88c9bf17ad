# SPDX-License-Identifier: Apache-2.0
"""CSV that keymix writes: no spreadsheet computes a class's or a mixer's name."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from synthetic import make_record, typed

from keymix.cli.predict import _csv
from keymix.compare.folder import COLUMNS, write_csv
from keymix.report import csv_cells
from keymix.tasks.classification.answers import ANSWERS, ClassPrediction

HARMFUL = ["=1+1", "+1", "-2", "@SUM(A1)", "\t=1", "\r=1", '=HYPERLINK("http://x","y")']


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("name", HARMFUL)
def test_formulas_are_neutralised_in_predictions(name):
    answer = ClassPrediction(path=name, classes=(name, "cat"), probabilities=(0.75, 0.25))
    first, second = rows_of(_csv(ANSWERS.csv([answer])))
    assert first["class"] == first["image"] == f"'{name}"
    assert first["probability"] == "0.750000"
    assert second["class"] == "cat"


@pytest.mark.parametrize("name", HARMFUL)
def test_formulas_are_neutralised_in_results(name, tmp_path: Path):
    scores = {"top1": 0.5, "top5": None, "loss": -1.25}
    record = make_record(seeds=1, accuracy={name: 0.5})
    (run,) = record["runs"]
    run["last"] = run["best"] = {**run["last"], "val": scores, "test": scores}
    record["costs"][name] |= {"params": 7, "macs": None, "latency_ms": -0.5}
    write_csv(tmp_path / "results.csv", typed(record))
    text = (tmp_path / "results.csv").read_bytes().decode()
    rows = rows_of(text)
    assert tuple(rows[0]) == COLUMNS
    assert {row["mixer"] for row in rows} == {f"'{name}"}
    assert {row["value"] for row in rows} == {"0.5", "-1.25"}  # numbers stay numbers
    assert {(row["params"], row["macs"], row["latency_ms"]) for row in rows} == {("7", "", "-0.5")}
    assert len(rows) == 8


def test_plain_text_and_numbers_pass():
    for value in ("cat", "5", "a=b", "", "'quoted", 3, -1.5, None):
        assert csv_cells.safe(value) is value
