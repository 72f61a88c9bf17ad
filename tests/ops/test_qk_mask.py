# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels of Q-K attention are its equation, with every gradient."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from triton_interpreter import interpreted

from keymix.errors import UserError
from keymix.layers.neurons import ParametricLIF


@pytest.mark.slow
def test_triton_is_the_reference_in_its_interpreter() -> None:
    interpreted("qk_mask_cases.py")


def test_neurons_unlike_each_other_are_not_for_the_kernels() -> None:
    pytest.importorskip("triton")
    from qk_mask_cases import neurons

    from keymix.ops.qk_mask import triton

    one, other = neurons()
    assert triton.why_not(one, other) is None
    assert "threshold" in str(triton.why_not(one, neurons(None)[1]))
    learned = ParametricLIF()
    made = type(one)(*learned.coefficients(), one.how)
    assert "learn" in str(triton.why_not(made, made))
    with pytest.raises(UserError, match="cannot run here"):
        triton.masked_keys(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), made, made, -1)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernels_compile_for_a_gpu(axis: int, dtype: torch.dtype, compiled: list[Any]) -> None:
    from qk_mask_cases import neurons

    from keymix.ops.qk_mask import triton

    x, keys = (torch.ones(4, 2, 64, 6, 16, dtype=dtype, requires_grad=True) for _ in range(2))
    triton.masked_keys(x, keys, *neurons(), axis).sum().backward()
    assert [kernel.metadata.name for kernel in compiled] == ["_forward_kernel", "_backward_kernel"]
    for kernel in compiled:
        assert kernel.asm["cubin"]
        assert not re.findall(r"muli.*: i32", kernel.asm["ttir"])
    assert not re.findall(r"\bfma\b", compiled[0].asm["ptx"])  # the reference rounds every product
