# SPDX-License-Identifier: Apache-2.0
"""The neurons' benchmark runs, checks its paths against SpikingJelly's and compares their times."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "neurons.py"


def test_the_benchmark_prints_ratios_to_spikingjelly(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
    bench = runpy.run_path(str(SCRIPT))
    words = "--steps 3 --sizes 2,5 --backends blocked --rounds 2"
    assert bench["main"](words.split()) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[3, 2, 5]")]
    assert [row.split()[3] for row in rows] == ["SpikingJelly", "blocked"]
    assert rows[0].endswith("1.00")
