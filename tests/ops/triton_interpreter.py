# SPDX-License-Identifier: Apache-2.0
"""Runs cases of Triton kernels in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import keymix


def interpreted(cases: str, seconds: float = 300) -> str:
    """Run a file of this folder under the interpreter and return what it prints.

    It must end without an error. Triton is imported once a process, as kernels or as Python.
    """
    triton = pytest.importorskip("triton")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version <= (3, 6) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 breaks with NumPy from 2.4 on")
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(Path(keymix.__file__).parents[1]), str(tests)])
    done = subprocess.run(
        [sys.executable, str(tests / "ops" / cases)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
