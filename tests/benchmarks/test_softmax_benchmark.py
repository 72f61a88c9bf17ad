# SPDX-License-Identifier: Apache-2.0
"""The benchmark of softmax attention prints a row per width and pass."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "softmax.py"


def test_it_prints_a_row_per_width_and_pass(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(SCRIPT))
    assert bench["main"](["--batch", "1", "--side", "2", "--rounds", "3"]) == 0
    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {width}", what] for width in bench["WIDTHS"] for what in ("forward", "training")
    ]
