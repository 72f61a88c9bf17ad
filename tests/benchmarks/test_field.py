# SPDX-License-Identifier: Apache-2.0
"""The field page's two stages on a few digits, run and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

import field
from costs import cheap_costs

WORDS = (
    "--data digits --limit 80 --epochs 1 --processes 1 --threads 1 --mixers softmax identity linear"
)


def test_the_three_best_on_validation_join_those_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"softmax": 9.0, "linear": 4.0, "xca": 6.0, "gated": 5.0, "agent": 7.0}
    monkeypatch.setattr(field, "means", lambda result, split: found if split == "val" else {})
    assert field.best(None, field.KEPT) == ["agent", "xca", "gated"]


@pytest.mark.slow
def test_it_ranks_all_and_gives_the_best_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(field, "RANKING", (0,))
    monkeypatch.setattr(field, "FURTHER", (2, 3))
    monkeypatch.setattr(field, "BEST", 1)
    monkeypatch.setattr("keymix.report.svg._drawn", lambda draw, size, attributes: "<svg></svg>")
    monkeypatch.setattr("keymix.compare.budget.TRIAL_SECONDS", 0.01)
    argv = [*WORDS.split(), "--out", str(tmp_path / "field")]
    with cheap_costs():
        assert field.main(argv) == 0
        first = capsys.readouterr().out
        assert field.main(argv) == 0
    again = capsys.readouterr().out
    assert "both stages: about" in first
    assert first.count("seed 1000: done") == 2 * 3  # softmax and linear, at three rates
    assert ": done" not in again  # nothing trained anew
    for text in (first, again):
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
        assert {row[0].strip("| `") for row in rows} == {"softmax", "identity", "linear"}
        assert all(float(row[2]) > 0 for row in rows)
        further = [row[0].strip("| `") for row in rows if row[4].strip()]
        assert "softmax" in further
        assert len(further) == 2
        assert sum("[" in row[5] for row in rows) == 1
    assert (tmp_path / "field" / "field.svg").stat().st_size > 1_000
