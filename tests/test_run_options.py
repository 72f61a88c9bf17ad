# SPDX-License-Identifier: Apache-2.0
"""Options of the contract tests that cannot be followed end the run in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("test_each.py", ["--device", "cuda"], "--device cuda: PyTorch finds no CUDA device here"),
        (
            "test_each.py",
            ["--precision", "32"],
            "--device and --precision are for tests/contract, not for tests/test_each.py",
        ),
    ],
)
def test_option_that_cannot_be_followed_is_one_line(
    path: str, options: list[str], said: str
) -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", TESTS / path, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=TESTS.parent
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert last.startswith(f"ERROR: {said}")
