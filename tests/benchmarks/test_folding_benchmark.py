# SPDX-License-Identifier: Apache-2.0
"""The benchmark of folding prints a ratio, and fewer modules."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "folding.py"


def test_it_prints_a_row_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(SCRIPT))
    words = ["--models", "re_attention", "plain*", "--batch", "2", "--rounds", "2"]
    assert bench["main"](words) == 0
    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row.split(" | ")[0] for row in rows] == ["| re_attention", "| plain_convnet"]
    for row in rows:
        *_, before, after = (cell.strip() for cell in row.strip("|").split("|"))
        assert int(after) < int(before)
