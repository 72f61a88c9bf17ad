# SPDX-License-Identifier: Apache-2.0
"""Masks by Q-K attention, by kernels and by the reference; as a program, Triton's interpreter."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from keymix.mixers.registry import create_mixer
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.neuron.surrogate import Surrogate
from keymix.ops.qk_mask import reference
from keymix.ops.qk_mask.reference import Neuron
from tolerances import close


def neurons(
    v_reset: float | None = 0.0, *, detach_reset: bool = True, surrogate: str = "sigmoid"
) -> tuple[Neuron, Neuron]:
    """Those of the queries and of the attention; the latter from two spikes on."""
    made = (
        Neuron(
            0.7,
            0.4,
            Dynamics(
                v_threshold=threshold,
                v_reset=v_reset,
                detach_reset=detach_reset,
                surrogate=Surrogate(surrogate),
            ),
        )
        for threshold in (0.6, 0.7)
    )
    first, second = made
    return first, second


def every_case() -> Iterator[tuple[tuple[Neuron, Neuron], int]]:
    """Neurons of all kinds, and both axes."""
    for reset, detach, surrogate, axis in itertools.product(
        (0.0, -0.3, None), (True, False), ("sigmoid", "atan"), (-1, -3)
    ):
        yield neurons(reset, detach_reset=detach, surrogate=surrogate), axis


def weights(masked: Tensor) -> Tensor:
    """Gradients to pass backward, the same in every call."""
    return torch.randn(masked.shape, generator=torch.Generator().manual_seed(1)).to(masked)


def outcome(
    run, x: Tensor, keys: Tensor, pair: tuple[Neuron, Neuron], axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Masked keys, and the gradients of currents and keys."""
    x, keys = (each.detach().requires_grad_() for each in (x, keys))
    masked = run(x, keys, *pair, axis)
    masked.backward(weights(masked))
    return masked.detach(), x.grad, keys.grad


def agrees(pair: tuple[Neuron, Neuron], axis: int, shape: tuple[int, ...], dtype=torch.float64):
    """Hold the kernels to the reference: numbers, and both gradients."""
    from keymix.ops.qk_mask import triton

    torch.manual_seed(0)
    x = 2.5 * torch.randn(shape, dtype=torch.float64)
    keys = torch.randint(0, 3, shape).double()
    x, keys = x.to(dtype), keys.to(dtype)
    found = outcome(triton.masked_keys, x, keys, pair, axis)
    wanted = outcome(reference.masked_keys, x, keys, pair, axis)
    assert torch.equal(found[0], wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        close(one, other)
    return wanted[0]


def a_named_kernel_runs(name: str) -> None:
    """Hold a mixer whose neurons name Triton to one whose neurons do not."""
    torch.manual_seed(0)
    mixer = create_mixer(name, dim=12, num_heads=3, grid=(1, 7), dtype=torch.float64)
    for norm in (mixer.q_bn, mixer.k_bn, mixer.proj_bn):
        nn.init.constant_(norm.bias, 0.8)
    x = (torch.rand(3, 2, 7, 12) < 0.4).double().requires_grad_()
    seen, results = [], []
    for backend in ("triton", "reference"):
        for neuron in (mixer.q_sn, mixer.attn_sn):
            neuron.backend = backend
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t, _same):
            y = mixer(x)
        found = torch.autograd.grad((y * weights(y)).sum(), [x, *mixer.parameters()])
        results.append((y, *found))
        assert (torch.int8 in seen) == (backend == "triton")  # the kernel keeps keys in bytes
        seen.clear()
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][0].any()
    for one, other in zip(*results, strict=True):
        close(one, other)


def _same(kept: Tensor) -> Tensor:
    return kept


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    for pair, axis in every_case():
        wanted = agrees(pair, axis, (3, 2, 5, 3, 7))
        assert wanted.mean() > 0
    a_named_kernel_runs("qk_token")
    a_named_kernel_runs("qk_channel")
    for axis in (-1, -3):
        agrees(neurons(), axis, (1, 1, 1, 1))
        agrees(neurons(), axis, (4, 2, 1, 150, 2, 3))  # more tokens than a block has
        agrees(neurons(), axis, (2, 1, 2, 3, 140))
        agrees(neurons(), axis, (4, 0, 5, 2, 3))
        agrees(neurons(), axis, (4, 2, 9, 2, 8), torch.float32)
