# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for a GPU, on a machine without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shapes_checked: bool) -> list[Any]:
    """What every launch was compiled to, in order."""
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if sys.platform != "linux" or not ptxas.exists():
        pytest.skip("this build of Triton brings no assembler for NVIDIA GPUs")

    class Hopper:
        """A driver that knows its GPU and has none."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    made: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        made.append(run(kernel, *args, warmup=True, **kwargs))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Hopper())
    return made
