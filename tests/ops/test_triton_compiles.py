# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of neurons compiles for a Hopper GPU, on a machine without one.

The interpreter runs what a compiler refuses, and knows nothing of the width of a load. Calls are
made as on a GPU; each launch ends behind the compiler.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from neuron_cases import Case
from torch import Tensor


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


def call(case: Case, dtype: torch.dtype) -> None:
    """Run neurons forward and backward."""
    from keymix.ops.neuron import triton
    from keymix.ops.neuron.autograd import run_kernel

    x, v, keep, gain = (
        each.to(dtype).requires_grad_() if isinstance(each, Tensor) else each
        for each in case.inputs()
    )
    spikes, last = run_kernel(triton, x, v, keep, gain, case.how, case.last)
    (spikes.sum() + (0 if last is None else last.sum())).backward()


EVERY = Case(starts=True, last=True, detach_reset=False, learned="neuron", v_reset=None)
CASES = {
    "as in QKFormer": (Case(steps=4, shape=(2, 64, 16)), torch.float32),
    "bfloat16": (Case(steps=4, shape=(2, 64, 16)), torch.bfloat16),
    "float16": (Case(steps=4, shape=(2, 64, 16)), torch.float16),
    "float64": (Case(steps=4, shape=(2, 64, 16)), torch.float64),
    "parametric": (Case(steps=4, shape=(2, 64, 16), learned="layer"), torch.bfloat16),
    "every option": (EVERY, torch.float32),
    "atan, hard reset": (Case(surrogate="atan", v_reset=-0.3, learned="layer"), torch.float16),
    "odd sizes": (Case(shape=(3, 5)), torch.bfloat16),
    "one neuron, one step": (Case(steps=1, shape=(), last=True), torch.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_a_gpu(name: str, compiled: list[Any]) -> None:
    call(*CASES[name])
    assert [kernel.metadata.name for kernel in compiled] == ["_forward_kernel", "_backward_kernel"]
    for kernel in compiled:
        assert kernel.asm["cubin"]
        # T steps of a large batch are more than 2^31 numbers: no offset is made of 32 bits
        assert not re.findall(r"muli.*: i32", kernel.asm["ttir"])
    # the reference rounds every product
    assert not re.findall(r"\bfma\b", compiled[0].asm["ptx"])


@pytest.mark.slow
def test_loads_and_stores_are_wide(compiled: list[Any]) -> None:
    for learned in ("", "layer"):
        call(Case(steps=4, shape=(2, 64, 16), learned=learned), torch.float32)
    for kernel in compiled:
        moves = re.findall(r"(?:ld|st)\.global\.\S+", kernel.asm["ptx"])
        narrow = [move for move in moves if not move.endswith(".v4.b32")]
        assert len(narrow) <= 2, moves  # keep and gain of a layer, which are one number each
