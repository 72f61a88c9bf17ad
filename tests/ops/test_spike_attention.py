# SPDX-License-Identifier: Apache-2.0
"""Attention between spikes: gradients are those of its parts, and what is kept are bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import keymix
from keymix.errors import UserError
from keymix.layers.neurons import LIF, ParametricLIF
from keymix.layers.spiking_block import plain_steps, spiking_attention
from keymix.ops.spikes import attention, packed
from keymix.ops.spikes.packed import added, mark_whole, pack, viewed, whole_to

D = torch.float64
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "quadratic": ("spiking_self", {"order": "quadratic"}),
    "linear": ("spiking_self", {"order": "linear"}),
    "learned leak": ("spiking_self", {"neuron": "plif"}),
    "driven": ("spike_driven", {}),
    "talking heads": ("spike_driven", {"talking_heads": True, "neuron": "plif"}),
}


def made(name: str, dtype: torch.dtype = D, **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    kind, options = MIXERS[name]
    mixer = keymix.create_mixer(kind, dim=12, num_heads=3, dtype=dtype, **options, **more)
    for norm in (m for m in mixer.modules() if isinstance(m, torch.nn.BatchNorm1d)):
        torch.nn.init.uniform_(norm.bias, 0.0, 5.0)  # so that something fires
    return mixer


def outcome(run: Any, inputs: list[Tensor], learned: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *learned], grad)]


def saved_by(run: Any) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return saved


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("shape", [(3, 2, 7, 12), (2, 7, 12), (1, 2, 1, 12), (2, 1, 3, 5, 12)])
def test_gradients_are_those_of_the_parts(
    name: str, shape: tuple[int, ...], poisoned_memory: None
) -> None:
    mixer = made(name)
    x = torch.randint(0, 3, shape).to(D).requires_grad_()
    grad = torch.randn(shape, dtype=D)
    learned = list(mixer.parameters())
    with plain_steps():
        parts = outcome(mixer, [x], learned, grad)
    for found, expected in zip(outcome(mixer, [x], learned, grad), parts, strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)
    assert 0 < float(parts[0].mean()) < 1


@pytest.mark.parametrize("name", MIXERS)
def test_the_spikes_of_a_mixer_are_kept_in_bytes(name: str) -> None:
    mixer = made(name, torch.float32)
    x = torch.randint(0, 2, (2, 3, 40, 12)).float().requires_grad_()
    saved = saved_by(lambda: mixer(x))
    large = [t for t in saved if t.is_floating_point() and t.numel() >= x.numel()]
    assert {tuple(t.shape) for t in large} == {(2 * 3 * 40, 12)}  # what the norms take
    with plain_steps():
        plain = saved_by(lambda: mixer(x))
    size = [sum(t.numel() * t.element_size() for t in each) for each in (saved, plain)]
    assert size[0] < 0.5 * size[1]


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("neuron", [LIF(), ParametricLIF(init_tau=3.0, dtype=D)])
def test_what_bytes_do_not_hold_is_kept_as_it_is(linear: bool, neuron: Any) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(3, 2, 5, 2, 4, dtype=D, requires_grad=True) for _ in range(3)]
    grad, learned = torch.randn(3, 2, 5, 2, 4, dtype=D), list(neuron.parameters())

    def run(*parts: Tensor) -> Tensor:
        return spiking_attention(*parts, neuron, scale=0.5, linear=linear)

    with plain_steps():
        plain = outcome(run, parts, learned, grad)
    for found, expected in zip(outcome(run, parts, learned, grad), plain, strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("most", "dtype"), [(20, torch.int16), (19, torch.float32)])
def test_counts_are_kept_in_two_bytes_as_far_as_these_reach(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_COUNTS", most)
    parts = [torch.ones(2, 5, 1, 4, requires_grad=True) for _ in range(3)]  # N d = 20
    for each in parts:
        mark_whole(each)
    saved = saved_by(lambda: spiking_attention(*parts, LIF(), scale=1.0, linear=True))
    assert [t.dtype for t in saved] == [torch.int8] * 3 + [dtype] * 2


@pytest.mark.parametrize("name", ["linear", "driven"])
def test_gradients_of_gradients_say_what_to_do(name: str) -> None:
    x = torch.randint(0, 2, (2, 1, 7, 12)).to(D).requires_grad_()
    with pytest.raises(UserError, match="plain_steps"):
        torch.autograd.grad(made(name)(x).sum(), x, create_graph=True)


def test_sums_and_views_of_marked_tensors_are_marked_as_far_as_a_byte_reaches() -> None:
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    assert whole_to(added(x, y)) is None
    mark_whole(x)
    assert whole_to(added(x, y)) is None
    mark_whole(y, 127)
    both = added(x, y)
    assert whole_to(both) == 128
    assert whole_to(viewed(both, both.view(4, 3))) == 128
    assert torch.equal(pack(both), both.char())  # looked through, as a byte might not hold it
    both.fill_(128.0)
    mark_whole(both, 128)
    assert pack(both) is both


@pytest.mark.parametrize("name", ["linear", "driven"])
def test_nothing_is_kept_where_nothing_is_differentiated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer, x = made(name), torch.randint(0, 2, (2, 1, 7, 12)).to(D)
    expected = mixer(x).detach()
    for module in (attention, packed):
        monkeypatch.setattr(module, "pack", lambda x: pytest.fail("packed"))
    with torch.no_grad():
        assert torch.equal(mixer(x), expected)
