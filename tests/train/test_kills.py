# SPDX-License-Identifier: Apache-2.0
"""Five kills, one of them at a random moment: see benchmarks/kill_resume.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


@pytest.mark.slow
def test_killed_runs_end_with_the_same_weights() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "5"],
        capture_output=True,
        text=True,
        check=False,
        timeout=590,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line.rsplit(maxsplit=3) for line in done.stdout.splitlines()[1:-1]]
    rows = {place: numbers for place, *numbers in table}
    assert set(rows) == {
        "any moment",
        "step",
        "checkpoint, half written",
        "metrics, half written",
        "weights, half written",
        "all",
    }
    assert rows["all"] == ["5", "5", "0"]
