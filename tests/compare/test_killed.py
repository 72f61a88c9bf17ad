# SPDX-License-Identifier: Apache-2.0
"""A comparison that is struck while it runs ends as one that was not: benchmarks/kill_resume.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.timeout(900)
def test_killed_while_it_saves_it_ends_with_the_same_results() -> None:
    """Its parent; the other strikes are the benchmark's."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--comparison", "--only", "7"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = done.stdout.splitlines()[1].split()
    assert row[-4:] == ["-9", "0", "True", "0"]
