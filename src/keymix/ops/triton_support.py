# SPDX-License-Identifier: Apache-2.0
"""Whether Triton kernels can run on a device."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

import torch


def no_triton(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"its kernels are for CUDA, not {device.type!r}"
    if not finds_c_compiler():
        return (
            "Triton finds no C compiler, with which it builds what launches a kernel; install one "
            "(gcc) or name it in the variable CC"
        )
    return None


@functools.cache
def finds_c_compiler() -> bool:
    """Whether Triton would find one; asked once, as a path is chosen in every call."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
