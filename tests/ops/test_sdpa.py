# SPDX-License-Identifier: Apache-2.0
"""Fused attention against its reference: output and every gradient, any shape, poisoned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from each import together
from keymix.ops.attention import reference, sdpa
from tolerances import close

LEADS = [(), (2,), (2, 3)]
SHAPES = {  # h, N, M, d, e
    "odd": (3, 7, 5, 4, 4),
    "one head": (1, 5, 5, 3, 3),
    "one token": (2, 1, 1, 4, 4),
    "one query": (2, 1, 9, 4, 4),
    "wider keys": (2, 6, 5, 9, 2),
    "wider values": (2, 6, 5, 2, 9),
    "unaligned": (2, 3, 17, 5, 7),
}


def random_(*shape: int, seed: int) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise, dtype=torch.float64).requires_grad_()


def both(
    lead: tuple[int, ...], shape: tuple[int, ...], *, shared: bool = False, **call: Any
) -> None:
    """Compare the two, with the gradient of every tensor among the arguments."""
    h, n, m, d, e = shape
    q = random_(*lead, h, n, d, seed=1)
    k = random_(*(() if shared else lead), h, m, d, seed=2)
    v = random_(*lead, h, m, e, seed=3)
    tensors = [q, k, v, *(t for t in call.values() if isinstance(t, Tensor) and t.requires_grad)]
    results = []
    for op in (reference, sdpa):
        y = op.attention(q, k, v, **call)
        assert y.shape == (*lead, h, n, e)
        weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
        results.append((y, torch.autograd.grad((y * weight).sum(), tensors)))
    close(results[1][0], results[0][0])
    for mine, wanted in zip(results[1][1], results[0][1], strict=True):
        close(mine, wanted)


@together
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("shared", [True, False], ids=["one key for all", "own keys"])
def test_fused_is_the_reference(lead, shape, shared, poisoned_memory) -> None:
    both(lead, shape, shared=shared, scale=0.3)


def test_reference_is_the_equation_in_numpy() -> None:
    q, k, v = (random_(2, 3, 5, 4, seed=s) for s in (1, 2, 3))
    bias = random_(3, 5, 5, seed=4)
    y = reference.attention(q, k, v, scale=0.7, bias=bias)
    for b in range(2):
        for h in range(3):
            Q, K, V, extra = (t.detach().numpy() for t in (q[b, h], k[b, h], v[b, h], bias[h]))
            logits = 0.7 * Q @ K.T + extra
            weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            close(y[b, h], torch.from_numpy(weights @ V))


# leading axes and the bias' shape for h = 3, N = 4, M = 5
BIASES = [
    ((2,), (4, 5)),
    ((2,), (5,)),
    ((2,), (1, 5)),
    ((2,), (4, 1)),
    ((2,), (3, 4, 5)),
    ((2,), (3, 1, 5)),
    ((2,), (1, 4, 5)),
    ((2,), (2, 3, 4, 5)),
    ((2,), (2, 1, 4, 5)),
    ((2,), (1, 3, 4, 5)),
    ((2, 3), (3, 3, 4, 5)),
    ((2, 3), (3, 1, 4, 5)),
    ((2, 3), (1, 3, 4, 5)),
    ((2, 3), (3, 4, 5)),
    ((2, 3), (2, 3, 3, 4, 5)),
    ((2, 3), (2, 1, 1, 4, 5)),
    ((2, 3), (2, 1, 1, 1, 5)),
    ((), (3, 4, 5)),
    ((), (4, 5)),
]


@together
@pytest.mark.parametrize(("lead", "shape"), BIASES, ids=str)
@pytest.mark.parametrize("learned", [True, False])
def test_any_bias_that_broadcasts_is_served(lead, shape, learned, poisoned_memory) -> None:
    bias = random_(*shape, seed=5).detach().requires_grad_(learned)
    both(lead, (3, 4, 5, 4, 6), scale=0.5, bias=bias)


@pytest.mark.parametrize("lead", LEADS)
def test_masked_keys_have_no_weight(lead) -> None:
    mask = torch.zeros(4, 5, dtype=torch.float64)
    mask[1, 2:] = -torch.inf
    mask[3, 0] = -torch.inf
    both(lead, (3, 4, 5, 4, 4), scale=0.5, bias=mask)
    q, k, v = (random_(*lead, 3, n, 4, seed=s) for s, n in ((1, 4), (2, 5), (3, 5)))
    y = sdpa.attention(q, k, v, scale=0.5, bias=mask)
    (grad,) = torch.autograd.grad(y[..., 1, :].sum(), v)
    assert (grad[..., 2:, :] == 0).all()
    assert (grad[..., :2, :] > 0).all()


def test_a_learned_scale_has_its_gradient() -> None:
    both((2,), (3, 4, 5, 4, 4), scale=torch.tensor(0.4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("widths", [(2, 2), (3, 2), (2, 3)])
def test_derivatives_meet_finite_differences(widths) -> None:
    d, e = widths
    q, k, v = random_(1, 2, 3, d, seed=1), random_(2, 3, d, seed=2), random_(1, 2, 3, e, seed=3)
    bias = random_(2, 3, 3, seed=4)
    scale = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)

    def fused(*args: Tensor) -> Tensor:
        return sdpa.attention(*args[:3], scale=args[3], bias=args[4])

    assert torch.autograd.gradcheck(fused, (q, k, v, scale, bias))
    assert torch.autograd.gradgradcheck(fused, (q, k, v, scale, bias))


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    q, k = random_(1, 2, 3, 4, seed=1), random_(1, 2, 3, 4, seed=2)
    v = torch.ones(1, 2, 3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    many = torch.stack([sdpa.attention(q, k, v, scale=0.5, dropout=0.5) for _ in range(400)])
    assert (many != 1).any()
    assert abs(float(many.detach().mean()) - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_float64(dtype) -> None:
    q, k, v = (random_(2, 3, 9, 8, seed=s).detach() for s in (1, 2, 3))
    bias = random_(3, 9, 9, seed=4).detach()
    wanted = reference.attention(q, k, v, scale=0.35, bias=bias)
    y = sdpa.attention(*(t.to(dtype) for t in (q, k, v)), scale=0.35, bias=bias)
    assert y.dtype == dtype
    close(y, wanted)


@pytest.mark.parametrize("widths", [(8, 8), (8, 24), (24, 8)])
def test_the_map_never_stands_in_memory(widths) -> None:
    """Widths that differ are padded, since the CPU's fused kernel serves equal ones only."""
    q, k = (torch.randn(1, 2, 96, widths[0]) for _ in range(2))
    v = torch.randn(1, 2, 96, widths[1])
    with torch.profiler.profile() as profile:
        sdpa.attention(q, k, v, scale=0.3)
    names = {event.name for event in profile.events()}
    assert any("flash" in name for name in names), names
    assert not any("softmax" in name for name in names)


def test_only_an_export_copies_the_result(shapes_checked: bool) -> None:
    """PyTorch 2.7 to 2.11 call it an export too where torch.compile looks; a copy costs time."""
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    compiled: list[Any] = []

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sdpa.attention(x, x, x, scale=0.3)

    def backend(graph: Any, examples: Any) -> Any:
        compiled.append(graph)
        return graph

    def copies(program: Any) -> bool:
        return any("clone" in str(node.target) for node in program.graph.nodes)

    torch._dynamo.reset()
    x = random_(2, 3, 5, 4, seed=1)
    torch.compile(Attention(), fullgraph=True, backend=backend)(x)
    assert [copies(graph) for graph in compiled] == [False]
    for strict in (False, True):
        assert copies(torch.export.export(Attention(), (x,), strict=strict))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (3, 197, 197, 64, 64)], ids=str)
def test_fused_on_cuda_is_the_reference_in_float64(shape, dtype) -> None:
    h, n, m, d, e = shape
    for lead, bias_shape in (((2,), None), ((2,), (n, m)), ((2, 3), (h, n, m)), ((), (1, m))):
        shapes = [(*lead, h, n, d), (*lead, h, m, d), (*lead, h, m, e)]
        shapes += [bias_shape] if bias_shape else []
        # numbers that the narrow type has, so that computing is all that differs
        given = [random_(*s, seed=i).detach().to(dtype) for i, s in enumerate(shapes)]
        results = []
        for op, exact in ((reference, True), (sdpa, False)):
            tensors = [t.double() if exact else t.cuda() for t in given]
            q, k, v, *bias = (t.requires_grad_() for t in tensors)
            y = op.attention(q, k, v, scale=0.3, bias=bias[0] if bias else None)
            weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
            grads = torch.autograd.grad((y * weight.to(dtype).to(y)).sum(), [q, k, v, *bias])
            results.append([t.cpu() for t in (y, *grads)])
        for found, wanted in zip(results[1], results[0], strict=True):
            close(found, wanted, dtype)
