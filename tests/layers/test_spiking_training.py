# SPDX-License-Identifier: Apache-2.0
"""A spiking step in training: less is kept, and everything is what the parts would give."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.layers import spiking_block
from keymix.layers.neurons import IF, LIF, ParametricLIF
from keymix.layers.spiking_block import plain_steps, spiking_conv, spiking_linear, why_plain
from keymix.ops.spikes import packed
from tolerances import close

D = torch.float64
NEURONS = {
    "lif": lambda: LIF(v_threshold=0.3),
    "if": lambda: IF(v_threshold=0.5, v_reset=None, detach_reset=False, surrogate="atan"),
    "plif": lambda: ParametricLIF(v_threshold=0.3, dtype=D),
}
NORMS = {
    "training": lambda norm: norm.train(),
    "evaluation": lambda norm: norm.eval(),
    "mean of all": lambda norm: setattr(norm, "momentum", None),
    "coarse": lambda norm: setattr(norm, "eps", 0.5),
}


def counts(*shape: int) -> Tensor:
    """Whole numbers such as sums of spikes are."""
    return torch.randint(0, 3, shape).double().requires_grad_()


def outcome(run: Callable[..., Tensor], parts: list[nn.Module], x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers after two passes."""
    found: dict[str, Tensor] = {}
    for _ in range(2):
        for part in parts:
            part.zero_grad()
        out = run(x, *parts)
        weigh = torch.linspace(-1, 1, out.numel(), dtype=D).view(out.shape)
        grad = torch.autograd.grad((out * weigh).sum(), x, retain_graph=True)[0]
        (out * weigh).sum().backward()
        found |= {"out": out.detach(), "x": grad}
    for at, part in enumerate(parts):
        found |= {f"{at}.{name}": p.grad for name, p in part.named_parameters()}
        found |= {f"{at}.{name}": buffer for name, buffer in part.named_buffers()}
    return found


def same(run: Callable[..., Tensor], parts: list[nn.Module], x: Tensor, monkeypatch) -> None:
    assert why_plain(x, *parts) is None
    other = copy.deepcopy(parts)
    found = outcome(run, parts, x)
    monkeypatch.setattr(spiking_block, "why_plain", lambda *_: "as a test")
    wanted = outcome(run, other, x)
    assert 0 < wanted["out"].mean() < 1
    assert torch.equal(found.pop("out"), wanted.pop("out"))
    for name, value in wanted.items():
        assert value is not None, name
        close(found[name].double(), value.double())


@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("mode", NORMS)
@pytest.mark.parametrize("lead", [(3, 2, 7), (2, 7)])
def test_a_linear_step_is_that_of_its_parts(neuron, mode, lead, monkeypatch) -> None:
    norm = nn.BatchNorm1d(4, dtype=D)
    NORMS[mode](norm)
    parts = [nn.Linear(6, 4, dtype=D), norm, NEURONS[neuron]()]
    same(spiking_linear, parts, counts(*lead, 6), monkeypatch)


@pytest.mark.parametrize("pool", [None, nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)])
@pytest.mark.parametrize("mode", NORMS)
@pytest.mark.parametrize("last", [True, False])
def test_a_convolutional_step_is_that_of_its_parts(pool, mode, last, monkeypatch) -> None:
    norm = nn.BatchNorm2d(4, dtype=D)
    NORMS[mode](norm)
    conv = nn.Conv2d(4, 4, 3, stride=(2, 1), padding=1, groups=2, dtype=D)
    x = counts(3, 2, 4, 7, 6)
    if last:
        x = counts(3, 2, 7, 6, 4).detach().permute(0, 1, 4, 2, 3).requires_grad_()
    parts = [conv, norm, LIF(v_threshold=0.3), *([] if pool is None else [pool])]
    same(spiking_conv, parts, x, monkeypatch)


@together
@pytest.mark.parametrize(
    "value",
    [0.5, -129.0, 128.0, 256.0, 1e20, float("nan"), float("inf"), 1 + 2**-40],
)
def test_what_a_byte_does_not_hold_is_kept_whole(value) -> None:
    x = counts(5, 7).detach()
    assert packed.pack(x).dtype == torch.int8
    assert torch.equal(packed.pack(x).double(), x)
    x = x.clone()
    x[3, 2] = value
    assert packed.pack(x) is x


def test_maps_of_one_tensor_keep_it_once_and_another_call_looks_again() -> None:
    x = counts(5, 7).detach()
    kept = packed.Kept()
    assert kept.of(x) is kept.of(x)
    weight = torch.randn(3, 7, dtype=D, requires_grad=True)
    packed.linear(x, weight, None).sum().backward()
    x.numpy()[:] = 2.0  # past PyTorch's count of changes
    (found,) = torch.autograd.grad(packed.linear(x, weight, None).sum(), weight)
    assert torch.equal(found, torch.full_like(found, 10.0))


@pytest.mark.parametrize("view", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:, :0]])
def test_any_memory_format_is_packed(view) -> None:
    x = view(counts(5, 8).detach())
    assert torch.equal(packed.pack(x).double(), x)
    assert packed.pack(x).dtype == (torch.int8 if x.numel() else D)


def test_pixels_are_trained_on_as_they_are(monkeypatch) -> None:
    parts = [nn.Linear(6, 4, dtype=D), nn.BatchNorm1d(4, dtype=D), LIF(v_threshold=0.3)]
    x = torch.randn(3, 2, 5, 6, dtype=D, requires_grad=True)
    same(spiking_linear, parts, x, monkeypatch)


def test_a_step_keeps_bytes_and_the_output_of_its_map() -> None:
    parts = [nn.Linear(6, 4), nn.BatchNorm1d(4), LIF()]
    x = counts(3, 2, 50, 6).detach().float().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        spiking_linear(x, *parts)
    large = sorted(t.numel() * t.element_size() for t in kept if t.numel() > 24)
    assert large == [300 * 6, 4 * 300 * 4]


def test_frozen_parts_get_no_gradient() -> None:
    linear, norm, neuron = nn.Linear(6, 4), nn.BatchNorm1d(4), LIF()
    linear.requires_grad_(False)
    spiking_linear(counts(3, 5, 6).detach().float(), linear, norm, neuron).sum().backward()
    assert linear.weight.grad is None
    assert norm.weight.grad is not None
    bare = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
    conv = nn.Conv2d(2, 4, 1)
    conv.weight.requires_grad_(False)
    spiking_conv(counts(3, 2, 2, 5, 5).detach().float(), conv, bare, neuron).sum().backward()
    assert conv.weight.grad is None
    assert conv.bias.grad is not None


def test_a_step_with_borrowed_weights_has_their_gradients() -> None:
    parts = nn.ModuleList([nn.Linear(6, 4), nn.BatchNorm1d(4), ParametricLIF(v_threshold=0.3)])
    parts = parts.double().requires_grad_(False)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            return spiking_linear(x, *self.parts)

    step, x = Step(), counts(3, 5, 6)
    borrowed = {
        name: (p * 3 + 0.2).requires_grad_() for name, p in dict(step.named_parameters()).items()
    }
    weigh = torch.linspace(-1, 1, 60, dtype=D).view(3, 5, 4)
    found = []
    for way in (plain_steps, contextlib.nullcontext):
        with way():
            out = torch.func.functional_call(step, borrowed, (x,))
        found.append(torch.autograd.grad((out * weigh).sum(), [x, *borrowed.values()]))
    for plain, lean in zip(*found, strict=True):
        assert plain.any()
        close(lean, plain)


CHANGES = {
    "threshold": lambda norm, neuron: setattr(neuron, "v_threshold", 2.0),
    "mode": lambda norm, neuron: setattr(neuron, "step_mode", "s"),
    "eps": lambda norm, neuron: setattr(norm, "eps", 9.0),
    "hook": lambda norm, neuron: neuron.register_forward_hook(lambda *_: 1 / 0),
    "frozen": lambda norm, neuron: norm.requires_grad_(False),
    "norm": lambda norm, neuron: norm.eval(),
}


@together
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_set_on_a_module_afterwards_does_not_count(change: str) -> None:
    x, found = counts(3, 5, 6), []
    linear = nn.Linear(6, 4, dtype=D)
    for change_it in (None, CHANGES[change]):
        norm, neuron = nn.BatchNorm1d(4, dtype=D), LIF(v_threshold=0.3)
        out = spiking_linear(x, linear, norm, neuron)
        if change_it is not None:
            change_it(norm, neuron)
        weigh = torch.linspace(-1, 1, 60, dtype=D).view(3, 5, 4)
        found.append(torch.autograd.grad((out * weigh).sum(), x)[0])
    assert found[0].any()
    assert torch.equal(*found)


def test_statistics_that_changed_before_the_backward_pass_are_an_error() -> None:
    norm = nn.BatchNorm1d(4, dtype=D).eval()
    out = spiking_linear(counts(3, 5, 6), nn.Linear(6, 4, dtype=D), norm, LIF())
    norm.running_var.mul_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_gradients_are_refused_not_wrong() -> None:
    parts = [nn.Linear(6, 4, dtype=D), nn.BatchNorm1d(4, dtype=D), LIF(v_threshold=0.2)]
    x = counts(3, 5, 6)
    with pytest.raises(UserError, match="plain_steps"):
        torch.autograd.grad(spiking_linear(x, *parts).sum(), x, create_graph=True)
    y = packed.linear(x, parts[0].weight, None)
    with pytest.raises(UserError, match="plain_steps"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with plain_steps():
        assert "plain_steps" in why_plain(x, *parts)
        out = spiking_linear(x, *parts)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert all(g.any() for g in torch.autograd.grad(grad.square().sum(), (parts[0].weight, x)))


def test_autocast_goes_the_plain_way_and_trains() -> None:
    parts = [nn.Linear(6, 4), nn.BatchNorm1d(4), ParametricLIF()]
    x = counts(3, 2, 5, 6).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in why_plain(x, *parts)
        spiking_linear(x, *parts).float().sum().backward()
    assert all(p.grad.isfinite().all() for part in parts for p in part.parameters())


class OwnLinear(nn.Linear):
    pass


def hooked(part: nn.Module) -> nn.Module:
    part.register_forward_hook(lambda *_: None)
    return part


def single(neuron: LIF) -> LIF:
    neuron.step_mode = "s"
    return neuron


@together
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((OwnLinear(6, 4), LIF()), "OwnLinear"),
        ((nn.Linear(6, 4), nn.ReLU()), "ReLU"),
        ((nn.Linear(6, 4), hooked(LIF())), "listens"),
        ((hooked(nn.Linear(6, 4)), LIF()), "listens"),
        ((nn.Linear(6, 4), single(LIF())), "single steps"),
        ((nn.Conv2d(2, 2, 3, padding="same"), LIF()), "padding"),
        ((nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), LIF()), "padding"),
        ((nn.Linear(6, 4), nn.MaxPool2d(2, return_indices=True), LIF()), "indices"),
        ((nn.Linear(6, 4), LIF()), None),
    ],
)
def test_whose_backward_pass_is_not_known_is_called_as_it_is(parts, words) -> None:
    x = counts(3, 5, 6)
    why = why_plain(x, *parts)
    assert why is None if words is None else words in why


def test_without_gradients_a_step_computes_the_same_and_keeps_nothing() -> None:
    parts = [nn.Linear(6, 4, dtype=D), nn.BatchNorm1d(4, dtype=D).eval(), LIF(v_threshold=0.2)]
    x = counts(3, 5, 6)
    wanted = spiking_linear(x, *parts)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            found = spiking_linear(x, *parts)
            assert why_plain(x, *parts) is None
        assert torch.equal(found, wanted)
        assert found.grad_fn is None


@pytest.mark.parametrize("lead", [(2, 3, 64), (257,)])
@pytest.mark.parametrize("biased", [True, False])
def test_large_products_in_float32_are_those_of_linear_maps(lead, biased) -> None:
    linear = nn.Linear(200, 90, bias=biased)
    x = torch.randint(0, 3, (*lead, 200)).float().requires_grad_()
    assert packed._by_convolution(x)
    y = packed.linear(x, linear.weight, linear.bias)
    weigh = torch.randn(y.shape)
    found = torch.autograd.grad((y * weigh).sum(), [x, *linear.parameters()])
    exact = copy.deepcopy(linear).double()
    inputs = x.detach().double().requires_grad_()
    out = exact(inputs)
    wanted = torch.autograd.grad((out * weigh.double()).sum(), [inputs, *exact.parameters()])
    close(y, out, torch.float32)
    for grad, reference in zip(found, wanted, strict=True):
        assert grad.shape == reference.shape
        close(grad, reference, torch.float32)


def test_a_hook_on_all_modules_is_served() -> None:
    parts = (nn.Linear(6, 4, dtype=D), nn.BatchNorm1d(4, dtype=D), LIF())
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part))
    try:
        spiking_linear(counts(3, 5, 6), *parts)
    finally:
        handle.remove()
    assert seen == list(parts)
