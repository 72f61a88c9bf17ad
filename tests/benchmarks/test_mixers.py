# SPDX-License-Identifier: Apache-2.0
"""The mixers' benchmark runs and compares with softmax."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mixers.py"


@pytest.mark.slow
def test_the_benchmark_prints_ratios_to_softmax(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(SCRIPT))
    words = "--tokens 16 --dim 16 --heads 2 --batch 2 --repeats 1 --threads 1 --mixers pooling"
    assert bench["main"]([*words.split(), "static_key(key_grid=1/4)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("keymix ")
    rows = {line[:36].strip(): line[36:].split() for line in lines if line[:1].isalpha()}
    few = "static_key(key_grid=1/4)"
    assert {"softmax", "softmax (reference)", "pooling", few} <= set(rows)
    assert rows["softmax"][4] == "1.00"
    assert rows["pooling"][4] in ("few", "n.d.", "busy")  # never different
    # 4 N C^2 + 2 N^2 C, and nothing for the mean of neighbours
    assert rows["softmax"][0] == f"{(4 * 16 * 16 * 16 + 2 * 16 * 16 * 16) / 1e6:.1f}"
    assert rows["pooling"][0] == "0.0"
