# SPDX-License-Identifier: Apache-2.0
"""Q-K attention whose queries are never whole is that of its parts, with every gradient."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from triton_interpreter import interpreted

from each import together
from keymix.errors import UserError
from keymix.layers.neurons import LIF, ParametricLIF, SpikingNeuron
from keymix.layers.spiking_block import masked_keys, plain_steps, why_plain
from keymix.ops.neuron import blocked
from keymix.ops.qk_mask import blocked as qk_mask
from keymix.ops.spikes.packed import mark_whole, whole_to
from tolerances import close

D = torch.float64


def layers(dim: int, heads: int, neuron: Any, train: bool) -> nn.ModuleList:
    """Linear map, norm that has seen other numbers, neurons of queries and attention."""
    linear, norm = nn.Linear(dim, 4 * heads, dtype=D), nn.BatchNorm1d(4 * heads, dtype=D)
    nn.init.uniform_(norm.weight, -0.5, 1.5)
    nn.init.uniform_(norm.bias, 0.2, 1.8)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.1, 0.5)
    made = nn.ModuleList([linear, norm, neuron(v_threshold=0.4), neuron(v_threshold=0.3)])
    return made.to(D).train(train)


def run(
    made: nn.ModuleList, x: Tensor, keys: Tensor, heads: int, axis: int, plain: bool
) -> list[Tensor]:
    """Masked keys, every gradient, and the statistics of the norm."""
    made = copy.deepcopy(made)
    x, keys = (each.detach().clone().requires_grad_() for each in (x, keys))
    if plain:
        with plain_steps():
            out = masked_keys(x, *made, heads, axis, keys)
    else:
        out = masked_keys(x, *made, heads, axis, keys)
    assert ("_MaskedKeys" in type(out.grad_fn).__name__) != plain
    weigh = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [x, keys, *made.parameters()]
    grads = torch.autograd.grad((out * weigh).sum(), wanted)
    return [out, *grads, *(each.double() for each in made.buffers())]


@together
@pytest.mark.parametrize("shape", [(3, 2, 7, 5), (2, 7, 5), (4, 1, 1, 5), (2, 1, 3, 40, 5)])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("axis", [-1, -3])
@pytest.mark.parametrize(
    "neuron",
    [LIF, ParametricLIF, lambda **more: LIF(tau=3.0, v_reset=None, detach_reset=False, **more)],
)
def test_masked_keys_are_those_of_the_parts(
    shape: tuple[int, ...], train: bool, axis: int, neuron: Any
) -> None:
    torch.manual_seed(0)
    made = layers(5, 3, neuron, train)
    x = (torch.rand(shape) < 0.4).double()
    keys = (torch.rand(*shape[:-1], 12) < 0.5).double()
    wanted = run(made, x, keys, 3, axis, plain=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "CHUNK", 12 * 5)  # rows of five tokens: images are cut
        found = run(made, x, keys, 3, axis, plain=False)
    assert torch.equal(found[0], wanted[0])
    assert 0 < wanted[0].mean() < 1
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize("axis", [-1, -3])
def test_no_images_give_no_keys(axis: int) -> None:
    made = layers(5, 3, LIF, False)
    x, keys = torch.ones(2, 0, 7, 5, dtype=D), torch.ones(2, 0, 7, 12, dtype=D)
    assert masked_keys(x, *made, 3, axis, keys).shape == (2, 0, 7, 3, 4)


def test_currents_that_lie_elsewhere_in_memory_change_nothing() -> None:
    torch.manual_seed(0)
    made = layers(5, 2, LIF, True)
    x = (torch.rand(3, 5, 2, 7) < 0.4).double().movedim(1, -1)
    keys = (torch.rand(8, 3, 2, 7) < 0.5).double().movedim(0, -1)
    found, wanted = (run(made, x, keys, 2, -1, plain) for plain in (False, True))
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


def test_keys_are_kept_in_bytes_and_queries_are_not_kept(monkeypatch) -> None:
    torch.manual_seed(0)
    made = layers(5, 3, LIF, True).float()
    x = (torch.rand(3, 2, 64, 5) < 0.4).float().requires_grad_()
    keys = (torch.rand(3, 2, 64, 12) < 0.5).float().requires_grad_()
    kept: list[Tensor] = []
    monkeypatch.setattr(qk_mask, "pack", lambda x: kept.append(x) or x.to(torch.int8))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        masked_keys(x, *made, 3, -1, keys)
    assert len(kept) == 1
    floats = [t for t in saved if t.is_floating_point() and t.numel() >= keys.numel()]
    assert [tuple(t.shape) for t in floats] == [(3 * 2 * 64, 12)]  # what the norm takes


def test_masked_spikes_are_known_to_be_whole() -> None:
    made = layers(5, 3, LIF, True).float()
    x, keys = torch.ones(2, 1, 7, 5), torch.ones(2, 1, 7, 12)
    assert whole_to(masked_keys(x, *made, 3, -1, keys)) is None
    mark_whole(keys)
    masked = masked_keys(x, *made, 3, -1, keys)
    assert whole_to(masked) == 1
    masked += 0.5
    assert whole_to(masked) is None


@pytest.mark.parametrize("of", [2, 3])
def test_hooks_on_either_neuron_see_its_spikes(of: int) -> None:
    made = layers(5, 3, LIF, True)
    seen: list[Tensor] = []
    handle = made[of].register_forward_hook(lambda module, args, out: seen.append(out))
    x, keys = torch.ones(2, 1, 7, 5, dtype=D), torch.ones(2, 1, 7, 12, dtype=D)
    masked_keys(x, *made, 3, -1, keys)
    assert [tuple(each.shape) for each in seen] == [[(2, 1, 7, 12)], [(2, 1, 7, 3, 1)]][of - 2]
    assert why_plain(x, made[of]) is not None
    handle.remove()


def test_gradients_of_gradients_say_what_to_do() -> None:
    made = layers(5, 3, LIF, True)
    x = torch.ones(2, 1, 7, 5, dtype=D, requires_grad=True)
    out = masked_keys(x, *made, 3, -1, torch.ones(2, 1, 7, 12, dtype=D))
    with pytest.raises(UserError, match="plain_steps"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


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
    assert isinstance(learned, SpikingNeuron)
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
