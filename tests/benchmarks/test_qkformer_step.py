# SPDX-License-Identifier: Apache-2.0
"""The benchmark of QKFormer's training step takes steps of both libraries and compares them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "qkformer_step.py"
SMALL = ["--batch", "2", "--side", "32"]


@pytest.mark.slow
def test_the_benchmark_prints_ratios_to_spikingjelly(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
    bench = runpy.run_path(str(SCRIPT))
    peaks = dict(zip(bench["NAMES"], (200.0, 100.0, 50.0), strict=True))
    bench["main"].__globals__["peak"] = lambda name, argv: peaks[name]  # no fresh processes
    assert bench["main"]([*SMALL, "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    rows = {row[0]: row for row in cells if row and row[0] in peaks}
    assert list(rows) == list(peaks)
    assert [row[3:] for row in rows.values()] == [["200", "1.00"], ["100", "0.50"], ["50", "0.25"]]
    assert all(float(row[1].split()[0]) >= 0 for row in rows.values())


def test_a_fresh_process_reports_its_peak(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(SCRIPT))
    assert bench["main"]([*SMALL, "--peak-of", "keymix"]) == 0
    assert float(capsys.readouterr().out.splitlines()[-1]) >= 0
