# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a spiking step as others ask for them: many at once, forward, with hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from each import together
from keymix.errors import UserError
from keymix.layers.neurons import IF, LIF, Neurons, ParametricLIF, SpikingNeuron
from keymix.layers.spiking_block import plain_steps, spiking_conv, spiking_linear, why_plain
from keymix.layers.spiking_stage import SpikingTransformerBlock
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
    with plain_steps():
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


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_that_keeps_little_takes_one_gradient_at_a_time(frozen: bool) -> None:
    parts = linear_parts(LIF())
    if frozen:  # then the map alone, or norm and neuron alone, have something to say
        parts[0].requires_grad_(False)
    x = spikes(3, 5, 6).detach().requires_grad_(not frozen)
    out = spiking_linear(x, *parts)
    assert why_plain(x, *parts) is None
    asked = [p for part in parts for p in part.parameters() if p.requires_grad]
    with pytest.raises(UserError, match=r"is_grads_batched.*plain_steps"):
        torch.autograd.grad(out, asked, torch.ones(2, *out.shape), is_grads_batched=True)


def test_a_graph_of_the_gradients_leaves_them_as_they_are() -> None:
    """The leak and the gain of a parametric neuron hang on one number, which counts once."""
    x, parts = spikes(3, 5, 6), linear_parts(ParametricLIF(v_threshold=0.3, dtype=D))
    with plain_steps():
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
        assert "forward" in why_plain(x, *parts)
        del parts[0].weight
        parts[0].weight = forward_ad.make_dual(weight.detach(), along)
        dual = spiking_linear(forward_ad.make_dual(x.detach(), ahead), *parts)
        primal, tangent = forward_ad.unpack_dual(dual)
        assert torch.equal(primal, out)
        assert tangent.any()
        close((tangent * weigh).sum(), (grad_x * ahead).sum() + (grad_weight * along).sum())
    assert why_plain(x, *parts) is None


# ---- hooks --------------------------------------------------------------------------------------


def block() -> SpikingTransformerBlock:
    made = SpikingTransformerBlock(6, neuron=Neurons(), dtype=D)
    made.attn = _Through()
    for norm in (made.mlp.bn1, made.mlp.bn2):
        nn.init.constant_(norm.bias, 0.8)
    return made


class _Through(nn.Module):
    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x


@together
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("path", ["mlp.fc1", "mlp.bn1", "mlp.sn1", "mlp.fc2", "mlp.bn2", "mlp.sn2"])
def test_backward_hooks_on_parts_of_a_block_see_its_gradients(kind: str, path: str) -> None:
    torch.manual_seed(3)
    plain, x = block(), spikes(3, 2, 6, 6)
    hooked = copy.deepcopy(plain)
    seen: list[Tensor] = []
    part = hooked.get_submodule(path)
    handle = getattr(part, kind)(lambda module, *grads: seen.append(grads[-1][0]))
    results = []
    for model in (plain, hooked):
        out = model(x, (2, 3))
        weigh = torch.linspace(-1, 1, out.numel(), dtype=D).view(out.shape)
        grads = torch.autograd.grad((out * weigh).sum(), [x, *model.parameters()])
        results.append((out, *grads))
    assert len(seen) == 1
    assert seen[0].any()
    for ours, wanted in zip(*results, strict=True):
        close(ours, wanted)
    neuron = hooked.get_submodule(path.replace("fc", "sn").replace("bn", "sn"))
    assert "listens" in why_plain(x, part, neuron)
    handle.remove()
    assert why_plain(x, part, neuron) is None


# ---- convolutions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dilation", "groups", "padding"), [(2, 1, 2), ((1, 3), 1, (1, 0)), (2, 4, 1), (1, 2, 0)]
)
def test_dilated_and_grouped_convolutions_are_those_of_their_parts(
    dilation: Any, groups: int, padding: Any
) -> None:
    conv = nn.Conv2d(4, 8, 3, padding=padding, dilation=dilation, groups=groups, dtype=D)
    parts = [conv, nn.BatchNorm2d(8, dtype=D), LIF(v_threshold=0.3)]
    x = spikes(3, 2, 4, 8, 9)
    assert why_plain(x, *parts) is None
    lean = spiking_conv(x, *copy.deepcopy(parts))
    flat = parts[1](conv(x.flatten(0, 1)))
    wanted = parts[2](flat.unflatten(0, (3, 2)))
    assert torch.equal(lean, wanted)
    assert 0 < wanted.mean() < 1
    weigh = torch.randn_like(wanted)
    again = copy.deepcopy(parts)
    found = torch.autograd.grad(
        (spiking_conv(x, *again) * weigh).sum(), [x, *(p for m in again for p in m.parameters())]
    )
    grads = torch.autograd.grad(
        (wanted * weigh).sum(), [x, *(p for m in parts for p in m.parameters())]
    )
    for ours, theirs in zip(found, grads, strict=True):
        close(ours, theirs)
