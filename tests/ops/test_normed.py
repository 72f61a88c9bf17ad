# SPDX-License-Identifier: Apache-2.0
"""Norm, max pooling and neurons in chunks: as one after the other, with every gradient."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.layers.neurons import IF, LIF, ParametricLIF
from keymix.layers.spiking_block import plain_steps, spiking_conv, spiking_linear
from keymix.ops.neuron import blocked
from keymix.ops.spikes import normed, packed
from keymix.ops.spikes.packed import mark_whole, pack, whole_to
from tolerances import close

D = torch.float64
NEURONS = {
    "LIF": lambda: LIF(v_threshold=0.5),
    "IF": lambda: IF(v_threshold=0.8),
    "PLIF": lambda: ParametricLIF(v_threshold=0.5, dtype=D),
    "soft": lambda: LIF(tau=3.0, v_threshold=0.5, v_reset=None, detach_reset=False),
    "hard": lambda: LIF(tau=4.0, v_threshold=0.5, detach_reset=False, surrogate="atan"),
    "below": lambda: LIF(v_threshold=0.5, v_reset=-0.2, detach_reset=False),
}


def outcome(
    parts: list[nn.Module | None], x: Tensor, plain: bool, steps: int | None = None
) -> list[Tensor]:
    """Spikes, every gradient, and the statistics of the norm."""
    linear, norm, pool, neuron = copy.deepcopy(parts)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with plain_steps() if plain else contextlib.nullcontext():
        if isinstance(linear, nn.Conv2d):
            out = spiking_conv(x, linear, norm, neuron, pool, steps)
        else:
            out = spiking_linear(x, linear, norm, neuron)
    if x.shape[:2] != (1, 1):  # a single image's channels do not come last
        assert (type(out.grad_fn).__name__ == "_NormedNeuronsBackward") != plain
    weigh = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [x, *linear.parameters(), *norm.parameters(), *neuron.parameters()]
    grads = torch.autograd.grad((out * weigh).sum(), wanted)
    return [out, *grads, *(each.to(out.dtype) for each in norm.buffers())]


def agree(parts: list[nn.Module | None], x: Tensor, steps: int | None = None) -> None:
    """Hold chunks of odd sizes to the parts, one after the other."""
    wanted = outcome(parts, x, True, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "CHUNK", 30)
        found = outcome(parts, x, False, steps)
    assert torch.equal(found[0], wanted[0])
    assert 0 < wanted[0].mean() < 1
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


def norm_of(kind: type[nn.Module], width: int, how: dict[str, Any], train: bool) -> nn.Module:
    """A norm that has seen other numbers, with positive weights."""
    norm = kind(width, dtype=D, **how).train(train)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.4, 1.5)
        nn.init.normal_(norm.bias)
    if norm.track_running_stats:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.1, 0.5)
    return norm


def images(*shape: int) -> Tensor:
    """Spikes ``[T, B, C, H, W]``, channels last."""
    return (torch.rand(shape) < 0.3).double().movedim(2, -1).contiguous().movedim(-1, 2)


@together
@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "how", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
)
def test_linear_steps_are_those_of_their_parts(
    neuron: str, train: bool, how: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    norm = norm_of(nn.BatchNorm1d, 7, how, train)
    parts = [nn.Linear(6, 7, dtype=D), norm, None, NEURONS[neuron]()]
    agree(parts, (torch.rand(3, 2, 5, 6) < 0.4).double())


@together
@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("lead", [(3, 2, None), (1, 2, 4), (1, 1, 1)])
@pytest.mark.parametrize("pooling", [None, (3, 2, 1), (2, 2, 0), ((3, 2), (1, 2), 1)])
def test_convolutional_steps_are_those_of_their_parts(
    neuron: str, train: bool, lead: tuple[int, int, int | None], pooling: Any
) -> None:
    torch.manual_seed(0)
    first, batch, steps = lead
    norm = norm_of(nn.BatchNorm2d, 4, {}, train)
    pool = None if pooling is None else nn.MaxPool2d(*pooling)
    conv = nn.Conv2d(3, 4, 3, padding=1, bias=False, dtype=D)
    agree([conv, norm, pool, NEURONS[neuron]()], images(first, batch, 3, 7, 5), steps)


def test_float32_spikes_are_to_the_bit_those_of_the_parts() -> None:
    torch.manual_seed(0)
    for train in (True, False):
        norm = norm_of(nn.BatchNorm2d, 48, {}, train)
        parts = [nn.Conv2d(9, 48, 3, padding=1, bias=False), norm, nn.MaxPool2d(3, 2, 1), LIF()]
        parts = [each.float() for each in parts]
        x = images(4, 2, 9, 33, 31).float()
        found, wanted = (outcome(parts, x, plain) for plain in (False, True))
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[-3], wanted[-3])  # statistics
        for one, other in zip(found, wanted, strict=True):
            close(one, other)


def test_fresh_memory_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(6, 7, dtype=D), norm_of(nn.BatchNorm1d, 7, {}, True), None, LIF()]
    x = (torch.rand(3, 2, 5, 6) < 0.4).double()
    wanted = outcome(parts, x, plain=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = outcome(parts, x, plain=False)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


def test_a_pool_behind_negative_weights_is_taken_from_the_normed() -> None:
    torch.manual_seed(0)
    norm = norm_of(nn.BatchNorm2d, 4, {}, True)
    nn.init.constant_(norm.weight[:1], -1.0)
    y = torch.randn(2, 4, 6, 5, dtype=D).contiguous(memory_format=torch.channels_last)
    assert normed.fits(y, norm.weight, None)
    pool = normed.MaxPool(3, 2, 1, 1, False)
    assert not normed.fits(y, norm.weight, pool)
    assert normed.fits(y, norm.weight.abs(), pool)
    conv = nn.Conv2d(3, 4, 3, padding=1, bias=False, dtype=D)
    x = images(2, 2, 3, 6, 5)
    out = []
    for around in (contextlib.nullcontext(), plain_steps()):
        with around:
            out.append(spiking_conv(x, conv, copy.deepcopy(norm), LIF(), nn.MaxPool2d(3, 2, 1)))
    assert torch.equal(*out)


def test_steps_that_do_not_fit_are_refused() -> None:
    conv, norm = nn.Conv2d(3, 4, 1, dtype=D), nn.BatchNorm2d(4, dtype=D)
    with pytest.raises(RuntimeError, match="expand"):
        spiking_conv(images(2, 2, 3, 6, 5), conv, norm, LIF(), steps=4)


def test_only_the_numbers_of_the_map_and_bytes_are_kept() -> None:
    linear, norm = nn.Linear(64, 96), nn.BatchNorm1d(96)
    x = (torch.rand(4, 50, 64) < 0.4).float().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        spiking_linear(x, linear, norm, LIF())
    large = [(tuple(t.shape), t.dtype) for t in saved if t.numel() > 64 * 96]
    assert large == [((4, 50, 64), torch.int8), ((200, 96), torch.float32)]


def test_marked_tensors_are_packed_unseen_until_they_change() -> None:
    x = torch.randint(0, 2, (3, 4)).float()
    mark_whole(x)
    assert whole_to(x) == 1
    assert torch.equal(pack(x), x.char())
    x += 0.5
    assert whole_to(x) is None
    assert pack(x) is x
    before = len(packed._WHOLE)
    mark_whole(x)
    del x
    assert len(packed._WHOLE) <= before
