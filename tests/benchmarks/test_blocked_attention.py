# SPDX-License-Identifier: Apache-2.0
"""The benchmark of blocked attention runs all paths and compares them with the reference."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "blocked_attention.py"


@pytest.mark.slow
def test_the_benchmark_prints_ratios_to_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    bench = runpy.run_path(str(SCRIPT))
    words = "--case conv_static_key:4:16:2:2 --rounds 2 --threads 1"
    assert bench["main"](words.split()) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:4] == "conv"]
    assert [row[1] for row in rows] == list(bench["PATHS"])
    assert rows[0][2:6] == ["1.00", "[1.00,", "1.00]", "1.00"]
