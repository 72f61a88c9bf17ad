# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for a Hopper GPU, on a machine without one.

The interpreter runs what a compiler refuses, and knows nothing of the width of a load. Calls are
made as on a GPU; each launch ends behind the compiler.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from neuron_cases import Case
from torch import Tensor


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


SHARED = 227 * 2**10  # bytes that a program may have on that GPU
SIZES = {
    "convolution": ("conv_static_key", {}, 2, 32, torch.bfloat16),
    "wide convolution": ("conv_static_key", {"activation": "gelu"}, 1, 128, torch.float16),
    "static keys in float32": ("static_key", {"activation": "star_relu"}, 3, 64, torch.float32),
    "position code": ("key_value", {"pos_dim": 4}, 2, 64, torch.bfloat16),
    "mixed heads": ("re_attention", {}, 12, 64, torch.bfloat16),
    "mixed heads in float32": ("re_attention", {"norm": "layer"}, 6, 64, torch.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_attention_kernels_compile_for_a_gpu_and_fit_on_its_processors(
    name: str, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from keymix.mixers import map_mixer
    from keymix.mixers.registry import create_mixer

    monkeypatch.setattr(map_mixer, "no_triton", lambda device: None)
    mixer, options, heads, width, dtype = SIZES[name]
    site = {"dim": heads * width, "num_heads": heads, "grid": (12, 12), "num_prefix_tokens": 1}
    made = create_mixer(mixer, **site, **options, backend="triton", dtype=dtype)
    x = torch.randn(2, 145, heads * width, dtype=dtype, requires_grad=True)
    made(x).sum().backward()
    assert {"forward_kernel", "query_kernel", "key_kernel"} <= {k.metadata.name for k in compiled}
    for kernel in compiled:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED, kernel.metadata.name
