# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a spiking step as others ask for them: many at once, of gradients, forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from each import together
from keymix.layers.neurons import IF, LIF, ParametricLIF, SpikingNeuron
from keymix.layers.spiking_block import spiking_linear
from tolerances import close

D = torch.float64


def spikes(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape).to(D).requires_grad_()


def linear_parts(neuron: SpikingNeuron) -> list[nn.Module]:
    return [nn.Linear(6, 4, dtype=D), nn.BatchNorm1d(4, dtype=D), neuron]


# ---- many gradients at once ---------------------------------------------------------------------


@together
@pytest.mark.parametrize(
    "make",
    [
        lambda: LIF(v_threshold=0.3),
        lambda: IF(v_reset=None, detach_reset=False),
        lambda: ParametricLIF(v_threshold=0.3, dtype=D),
    ],
)
@pytest.mark.parametrize("vmap", [False, True])
def test_many_gradients_at_once_are_each_of_them(make: Any, vmap: bool) -> None:
    x, parts = spikes(3, 5, 6), linear_parts(make())
    out = spiking_linear(x, *parts)
    asked = [x, *(p for part in parts for p in part.parameters())]
    many = torch.randn(2, *out.shape, dtype=D)
    each = [torch.autograd.grad(out, asked, one, retain_graph=True) for one in many]
    if vmap:
        found = torch.func.vmap(lambda g: torch.autograd.grad(out, asked, g, retain_graph=True))(
            many
        )
    else:
        found = torch.autograd.grad(out, asked, many, is_grads_batched=True)
    for at_once, *singly in zip(found, *each, strict=True):
        assert singly[0].any()
        close(at_once, torch.stack(singly))


def test_a_graph_of_the_gradients_leaves_them_as_they_are() -> None:
    """The leak and the gain of a parametric neuron hang on one number, which counts once."""
    x, parts = spikes(3, 5, 6), linear_parts(ParametricLIF(v_threshold=0.3, dtype=D))
    out = spiking_linear(x, *parts)
    asked = [x, *(p for part in parts for p in part.parameters())]
    weigh = torch.randn_like(out)
    found = torch.autograd.grad((out * weigh).sum(), asked, create_graph=True)
    wanted = torch.autograd.grad((out * weigh).sum(), asked)
    assert all(grad.any() for grad in wanted[-1:])
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs)


# ---- forward ------------------------------------------------------------------------------------


@together
@pytest.mark.parametrize("backend", ["auto", "blocked", "reference"])
@pytest.mark.parametrize("v_reset", [0.0, None])
def test_forward_mode_is_the_transpose_of_the_backward_pass(
    backend: Any, v_reset: float | None
) -> None:
    neuron = LIF(v_threshold=0.3, v_reset=v_reset, detach_reset=False, backend=backend)
    parts = linear_parts(neuron)
    x = spikes(3, 5, 6)
    weight, along = parts[0].weight, torch.randn(4, 6, dtype=D)
    out = spiking_linear(x, *parts)
    weigh = torch.randn_like(out)
    grad_x, grad_weight = torch.autograd.grad((out * weigh).sum(), [x, weight])
    ahead = torch.randn_like(x)
    with forward_ad.dual_level():
        del parts[0].weight
        parts[0].weight = forward_ad.make_dual(weight.detach(), along)
        dual = spiking_linear(forward_ad.make_dual(x.detach(), ahead), *parts)
        primal, tangent = forward_ad.unpack_dual(dual)
        assert torch.equal(primal, out)
        assert tangent.any()
        close((tangent * weigh).sum(), (grad_x * ahead).sum() + (grad_weight * along).sum())
