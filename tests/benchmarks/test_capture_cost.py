# SPDX-License-Identifier: Apache-2.0
"""The benchmark of capturing runs, and rows cost less memory than whole maps."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from keymix.analysis.memory import cpu_peak_unknown

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "capture.py"


@pytest.mark.slow
@pytest.mark.skipif(cpu_peak_unknown() is not None, reason="this system tells no peak")
def test_the_benchmark_prints_ratios_to_the_plain_pass(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(SCRIPT))
    words = "--side 24 --queries 2 --dim 64 --heads 2 --depth 2 --repeats 1 --mixers own"
    assert bench["main"](words.split()) == 0
    first, _, row = capsys.readouterr().out.splitlines()
    assert "576 tokens, 2 queries in each of 2 layers" in first
    name, plain, rows, ratio, whole, *_ = row.split()
    assert name == "own"
    # two whole maps of two heads: 2 * 2 * 576 * 576 * 4 bytes = 5.1 MiB
    assert float(whole) > float(rows) + 4
    assert float(ratio) == pytest.approx(float(rows) / float(plain), rel=0.1)
