# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the test of latencies counts verdicts, and fails if too many are wrong."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from keymix.analysis.timing import Paired

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "self_comparison.py"


def bench(wrong: set[int]) -> Any:
    """Make the script's main measure what is made up: these comparisons of copies are wrong."""
    script = runpy.run_path(str(SCRIPT))
    calls = 0

    def paired(base: Any, other: Any, size: Any, *, repeats: int) -> Paired:
        nonlocal calls
        number, kind = divmod(calls, 3)
        calls += 1
        called = kind == 2 or (kind == 1 and number in wrong)
        ratio = len(other.blocks) / len(base.blocks)
        assert ratio == (1 if kind < 2 else 1.5)
        return Paired(
            base_ms=2.0,
            other_ms=2.0 * ratio,
            ratio=ratio,
            ratio_q1=ratio,
            ratio_q3=ratio,
            rounds=repeats,
            quiet_share=1.0,
            p=0.0,
            verdict="different" if called else "not distinguishable",
        )

    script["main"].__globals__["measure_paired"] = paired
    return script["main"]


def test_it_counts_what_is_called_different(capsys: pytest.CaptureFixture[str]) -> None:
    main = bench(wrong={1})
    assert main(["--count", "50", "--depths", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["next_to"] for row in rows] == ["itself", "a copy", "slower"]
    assert [row["different"] for row in rows] == [0, 1, 50]
    assert rows[2]["called"] == [1.5, 1.5]


def test_too_many_wrong_ones_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(wrong={0, 7})(["--count", "50", "--depths", "2"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "copy" in line]
    assert lines[0][:6] == ["2", "a", "copy", "2.00", "50", "2"]


def test_the_busy_processes_are_its_own_and_end_with_it() -> None:
    script = runpy.run_path(str(SCRIPT))
    done: list[str] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            done.append(Path(command[0]).name)

        def kill(self) -> None:
            done.append("kill")

        def wait(self) -> None:
            done.append("wait")

    class Subprocess:
        Popen = Process

    script["main"].__globals__["subprocess"] = Subprocess
    with script["busy"](2):
        assert len(done) == 2
    assert done[2:] == ["kill", "wait"] * 2
