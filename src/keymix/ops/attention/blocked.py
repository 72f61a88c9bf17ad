# SPDX-License-Identifier: Apache-2.0
"""The same functions, a block of query rows at a time: the N x M map never stands in memory.

The backward pass is written by hand. It keeps what the forward pass was given and forms each block
of the map again, so that memory is linear in the number of queries, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keymix.ops.tracing import batched

BLOCK = 2**21
"""Entries of the map that are in memory at a time: 8 MiB in float32."""

Mix = Callable[..., tuple[Tensor, Tensor | None]]
"""From logits, or weights, ``[X, h, Y]`` and learned tensors to the map, and a sum over blocks."""


@dataclass(frozen=True, kw_only=True)
class _How:
    """What a call computes besides its tensors.

    Tensors have heads that do not share keys first, G of them, then what shares them, B: queries
    ``[G, B, N, d]``, keys ``[G, M, D]``, values ``[G, B, M, e]``.
    """

    heads: int  # of G, the last part: those that `mix` mixes
    neighbours: Tensor | None  # [N, k * k], rows of the padded queries that a query is made of
    diagonal: int | None  # a query n does not see key n + diagonal
    softmax: bool
    mix: Mix | None

    def count(self, q: Tensor) -> int:
        """Number of queries."""
        return q.shape[2] if self.neighbours is None else len(self.neighbours)

    def blocks(self, q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
        """Cut the queries into blocks, each of some rows."""
        count = self.count(q)
        rows = max(1, BLOCK // max(1, q.shape[0] * q.shape[1] * k.shape[1]))
        return ((start, min(count, start + rows)) for start in range(0, count, rows))

    def queries(self, q: Tensor, start: int, stop: int) -> Tensor:
        """Queries of a block as the keys meet them, ``[G, B * n, D]``."""
        heads, shared, _, width = q.shape
        if self.neighbours is None:
            return q[:, :, start:stop].reshape(heads, -1, width)
        near = q.index_select(2, self.neighbours[start:stop].flatten())
        near = near.view(heads, shared * (stop - start), -1)
        return F.pad(near, (0, 1), value=1.0)  # the bias of the convolution is one more channel

    def give_back(self, grad: Tensor, du: Tensor, start: int, stop: int) -> None:
        """Add the gradient of a block's queries to that of all."""
        heads, shared, _, width = grad.shape
        if self.neighbours is None:
            grad[:, :, start:stop] = du.view(heads, shared, -1, width)
            return
        near = du[..., :-1].reshape(heads, shared, -1, width)
        grad.index_add_(2, self.neighbours[start:stop].flatten(), near)

    def scores(
        self, u: Tensor, k: Tensor, bias: Tensor | None, shared: int, start: int, stop: int
    ) -> Tensor:
        """Logits of a block, or the softmax's weights, ``[G, B, n, M]``."""
        a = (u @ k.transpose(1, 2)).view(len(k), shared, stop - start, -1)
        if bias is not None:
            a += _rows(bias, start, stop)
        if self.diagonal is not None:
            own = a.diagonal(start + self.diagonal, -2, -1)
            own.fill_(torch.finfo(a.dtype).min)
        return a.softmax(-1) if self.softmax else a

    def mixed(self, p: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn scores into the map ``[G * B, n, M]``, and a sum over its entries."""
        total = None
        if self.mix is not None:
            groups = p.shape[0] // self.heads
            made, total = self.mix(p.view(groups, self.heads, -1), *learned)
            p = made.view(p.shape)
        return p.flatten(0, 1), total


def _rows(t: Tensor, start: int, stop: int) -> Tensor:
    return t if t.shape[-2] == 1 else t[..., start:stop, :]


def _whole(
    how: _How, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *learned: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute all rows at once, by operations that have gradients of gradients."""
    count = how.count(q)
    p = how.scores(how.queries(q, 0, count), k, bias, q.shape[1], 0, count)
    maps, total = how.mixed(p, *learned)
    return (maps @ v.flatten(0, 1)).view(*v.shape[:2], count, -1), total


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: _How,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        out = v.new_empty(*v.shape[:2], how.count(q), v.shape[-1])
        values, total = v.flatten(0, 1), None
        for start, stop in how.blocks(q, k):
            p = how.scores(how.queries(q, start, stop), k, bias, q.shape[1], start, stop)
            maps, part = how.mixed(p, *learned)
            out[:, :, start:stop] = torch.bmm(maps, values).view(*v.shape[:2], stop - start, -1)
            if part is not None:
                total = part if total is None else total.add_(part)
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, out if how.mix is None else None, *learned)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Any, ...]:
        q, k, v, bias, out, *learned = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        inputs = (q, k, v, bias, *learned)
        if torch.is_grad_enabled() or batched(grad, grad_total):
            return (None, *_differentiable(ctx.how, inputs, needs, (grad, grad_total)))
        if grad is None:
            grad = v.new_zeros(*v.shape[:2], ctx.how.count(q), v.shape[-1])
        sums = [
            torch.zeros_like(t) if need and t is not None else None
            for t, need in zip(inputs, needs, strict=True)
        ]
        way = _WayBack(ctx.how, q, k, v.flatten(0, 1), bias, learned, grad_total, sums)
        if out is not None and ctx.how.softmax:
            # of a plain softmax the sum of p dp over a row is that of dy y: as one more channel of
            # dy, against a one in v, it is taken off by the product itself
            grad = torch.cat((grad, -(grad * out).sum(-1, keepdim=True)), -1)
            way = replace(way, v=F.pad(way.v, (0, 1), value=1.0))
        for start, stop in ctx.how.blocks(q, k):
            way.through(grad[:, :, start:stop].flatten(0, 1), start, stop)
        return (None, *sums)


def _differentiable(
    how: _How,
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, from all rows at once."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [t if t is None else t.view_as(t) for t in inputs]
        made = _whole(how, *given)  # type: ignore[arg-type]
        pairs = [
            (y, g) for y, g in zip(made, grads, strict=True) if y is not None and g is not None
        ]
        wanted = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
        outputs, given_back = [y for y, _ in pairs], [g for _, g in pairs]
        found = iter(
            torch.autograd.grad(outputs, wanted, given_back, create_graph=again, allow_unused=True)
        )
    return [next(found) if need else None for need in needs]


@dataclass(frozen=True)
class _WayBack:
    """What the backward pass of a block reads, and the sums over blocks that it adds to."""

    how: _How
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    learned: Sequence[Tensor]
    grad_total: Tensor | None
    sums: Sequence[Tensor | None]

    def through(self, dy: Tensor, start: int, stop: int) -> None:
        """Add the gradients that come through the rows of a block."""
        how, shared = self.how, self.q.shape[1]
        dq, dk, dv, db, *_ = self.sums
        u = how.queries(self.q, start, stop)
        p = how.scores(u, self.k, self.bias, shared, start, stop)
        dmaps = dy @ self.v.transpose(1, 2)
        if how.mix is None:
            maps, ds = p.flatten(0, 1), dmaps.view_as(p)
            ds = ds.mul_(p) if how.softmax else ds
        else:
            maps, ds = self._through_mix(p, dmaps)
            if how.softmax:
                ds = torch.ops.aten._softmax_backward_data(ds, p, -1, p.dtype)
        if dv is not None:
            dv.flatten(0, 1).baddbmm_(maps.transpose(1, 2), dy[..., : dv.shape[-1]])
        if how.diagonal is not None:
            ds.diagonal(start + how.diagonal, -2, -1).zero_()
        if db is not None:
            there = _rows(db, start, stop)
            there.add_(ds.sum_to_size(there.shape))
        ds = ds.view(len(ds), -1, ds.shape[-1])
        if dk is not None:
            dk.baddbmm_(ds.transpose(1, 2), u)
        if dq is not None:
            how.give_back(dq, ds @ self.k, start, stop)

    def _through_mix(self, p: Tensor, dmaps: Tensor) -> tuple[Tensor, Tensor]:
        """The map, and the gradient of the scores by autograd of what mixes them."""
        leaf = p.detach().requires_grad_()
        sums = self.sums[4:]
        leaves = [
            t.detach().requires_grad_(total is not None)
            for t, total in zip(self.learned, sums, strict=True)
        ]
        with torch.enable_grad():
            maps, total = self.how.mixed(leaf, *leaves)
        outputs, grads = [maps], [dmaps]
        if total is not None and self.grad_total is not None:
            outputs, grads = [maps, total], [dmaps, self.grad_total]
        wanted = [t for t in leaves if t.requires_grad]
        ds, *found = torch.autograd.grad(outputs, [leaf, *wanted], grads)
        for sum_, each in zip([t for t in sums if t is not None], found, strict=True):
            sum_.add_(each)
        return maps.detach(), ds


# ---- a call ---------------------------------------------------------------------------------


def attention(
    q: Float[Tensor, "*batch h N d"],
    k: Float[Tensor, "*keys h M D"],
    v: Float[Tensor, "*batch h M e"],
    *,
    bias: Tensor | None = None,
    diagonal: int | None = None,
    neighbours: tuple[tuple[int, int], int] | None = None,
    softmax: bool = True,
    mix: Mix | None = None,
    learned: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "*batch h N e"], Tensor | None]:
    r"""Compute :math:`\mathrm{mix}(\mathrm{softmax}(Q K^\top + b))\,V` by blocks of rows of Q.

    The scale is in q. Leading axes that keys lack are shared by all that has them. b broadcasts to
    ``[*, h, N, M]``; a query n does not see key n + ``diagonal``. Narrower dtypes than float32 are
    computed in float32. Gradients of gradients form the whole map.

    With ``neighbours``, the grid (H, W) of the queries and an odd side k, keys meet the k x k
    queries around a query, row by row, zero beyond the edge, and then a one: D = k^2 d + 1.

    ``mix`` turns ``[X, h, Y]``, the heads of entries in any order, and the ``learned`` tensors,
    which get gradients, into the map, entry by entry, and may return a sum over entries, which is
    returned, summed over all, next to the output. Without the ``softmax`` it gets the logits.
    """
    lead, heads, dtype = q.shape[:-3], q.shape[-3], q.dtype
    at = len(lead) - (k.ndim - 3)  # axes before this one share the keys
    if k.shape[:-3] != lead[at:]:
        k = k.expand(*lead[at:], *k.shape[-3:])
    groups, shared = math.prod(lead[at:]) * heads, math.prod(lead[:at])
    wide = torch.promote_types(dtype, torch.float32)

    def first(t: Tensor) -> Tensor:
        """Bring ``[*, h, R, D]`` to ``[G, B, R, D]``."""
        return t.to(wide).reshape(shared, groups, *t.shape[-2:]).transpose(0, 1).contiguous()

    index = None
    queries = first(q)
    if neighbours is not None:
        queries, index = _padded(queries, *neighbours)
    how = _How(heads=heads, neighbours=index, diagonal=diagonal, softmax=softmax, mix=mix)
    keys = k.to(wide).reshape(groups, *k.shape[-2:])
    with torch.autocast(q.device.type, enabled=False):
        out, total = _Attention.apply(
            how, queries, keys, first(v), _fitted(bias, lead, heads, at, wide), *learned
        )
    out = out.transpose(0, 1).reshape(*lead, heads, *out.shape[-2:])
    return out.to(dtype), total


def _padded(q: Tensor, grid: tuple[int, int], side: int) -> tuple[Tensor, Tensor]:
    """Put zeros around the grid of the queries; return them and the rows that make a query."""
    (height, width), edge = grid, side // 2
    image = q.view(*q.shape[:2], height, width, q.shape[-1])
    padded = F.pad(image, (0, 0, edge, edge, edge, edge)).flatten(2, 3)
    row, column = torch.arange(height, device=q.device), torch.arange(width, device=q.device)
    step = torch.arange(side, device=q.device)
    at = (row[:, None, None, None] + step[:, None]) * (width + 2 * edge)
    at = at + column[:, None, None] + step
    return padded, at.reshape(height * width, side * side)


def _fitted(
    bias: Tensor | None, lead: torch.Size, heads: int, at: int, dtype: torch.dtype
) -> Tensor | None:
    """Bring a bias that broadcasts to ``[*, h, N, M]`` to ``[G or 1, B or 1, N or 1, M or 1]``."""
    if bias is None:
        return None
    full = (*lead, heads)
    axes = len(full) + 2
    bias = bias.to(dtype)[(None,) * (axes - bias.ndim)]
    sizes = [*bias.shape[:-2]]
    for part in (slice(0, at), slice(at, len(full))):
        if sizes[part] != [1] * len(sizes[part]):
            sizes[part] = full[part]
    bias = bias.expand(*sizes, *bias.shape[-2:])
    return bias.reshape(math.prod(sizes[:at]), math.prod(sizes[at:]), *bias.shape[-2:]).transpose(
        0, 1
    )
