# SPDX-License-Identifier: Apache-2.0
"""The same functions, a block of query rows at a time: the N x M map never stands in memory.

The backward pass is written by hand. It keeps what the forward pass was given and forms each block
of the map again, so that memory is linear in the number of queries, forward and backward.

In here G are the heads that do not share keys and B what shares them: queries ``[G, B, N, d]``,
values ``[G, B, M, e]``, blocks of the map ``[G, b, n, M]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keymix.ops.tracing import batched, gradients_of

BLOCK = 2**21
"""Entries of the map that are formed at a time, 8 MiB in float32; a quarter where heads mix."""

Mix = Callable[..., tuple[Tensor, Tensor | None]]
"""From logits, or weights, ``[X, h, Y]`` and learned tensors to the map, and a sum over blocks."""

Block = tuple[slice, int, int]
"""Which of B, and from which query row to which."""


# ---- where scores come from -----------------------------------------------------------------


class _Products:
    """Scores that are products: queries ``[G, B, N, D]`` and keys ``[G, D, M]``."""

    def blocks(self, q: Tensor, k: Tensor, entries: int) -> Iterator[Block]:
        """Cut the queries into blocks of rows."""
        count = q.shape[2]
        rows = max(1, entries // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
        return ((slice(None), i, min(count, i + rows)) for i in range(0, count, rows))

    def count(self, q: Tensor, k: Tensor) -> int:
        """Number of queries N."""
        return q.shape[2]

    def scores(self, q: Tensor, k: Tensor, shift: Tensor | None, block: Block) -> Tensor:
        """Logits of a block."""
        rows = self._rows(q, block)
        return (rows.flatten(1, 2) @ k).view(*rows.shape[:3], k.shape[2])

    def back(
        self, q: Tensor, k: Tensor, ds: Tensor, block: Block, sums: Sequence[Tensor | None]
    ) -> None:
        """Add the gradients of queries and keys that the scores of a block have."""
        (at, start, stop), (dq, dk, _) = block, sums
        ds = ds.flatten(1, 2)
        if dk is not None:
            dk.baddbmm_(self._rows(q, block).flatten(1, 2).transpose(1, 2), ds)
        if dq is not None:
            there = dq[:, at, start:stop]
            there.copy_((ds @ k.transpose(1, 2)).view(there.shape))

    @staticmethod
    def _rows(q: Tensor, block: Block) -> Tensor:
        at, start, stop = block
        return q[:, at, start:stop]


@dataclass(frozen=True)
class _Convolutions:
    """Scores that a convolution of the query image gives, one image of B at a time.

    The image is ``[B, G * d, H + k - 1, W]`` with the channels last in memory and zeros above and
    below it; keys are the filters ``[G * M, d, k, k]``, and the shift is their bias.
    """

    heads: int  # G
    width: int  # W

    def blocks(self, q: Tensor, k: Tensor, entries: int) -> Iterator[Block]:
        """Cut every image into strips of whole rows of the grid."""
        count, rows = self.count(q, k), max(1, entries // (len(k) * self.width)) * self.width
        return (
            (slice(image, image + 1), i, min(count, i + rows))
            for image in range(len(q))
            for i in range(0, count, rows)
        )

    def count(self, q: Tensor, k: Tensor) -> int:
        """Number of queries H W."""
        return (q.shape[2] - k.shape[-1] + 1) * self.width

    def scores(self, q: Tensor, k: Tensor, shift: Tensor | None, block: Block) -> Tensor:
        """Logits of a block; their axis n comes before G in memory."""
        edge = k.shape[-1] // 2
        strip = self._strip(q, k, block)
        a = F.conv2d(strip, k, shift, padding=(0, edge), groups=self.heads)
        a = a.permute(0, 2, 3, 1).reshape(len(strip), -1, self.heads, len(k) // self.heads)
        return a.permute(2, 0, 1, 3)

    def back(
        self, q: Tensor, k: Tensor, ds: Tensor, block: Block, sums: Sequence[Tensor | None]
    ) -> None:
        """Add the gradients of image, filters and bias that the scores of a block have."""
        dq, dk, dshift = sums
        strip, edge = self._strip(q, k, block), k.shape[-1] // 2
        if dk is not None:
            # PyTorch's gradient of a convolution makes filters three times a call, and these are
            # larger than the block
            filters = dk.permute(0, 2, 3, 1).view(self.heads, -1, dk[0].numel())
            filters.baddbmm_(ds[:, 0].transpose(1, 2), self._neighbourhoods(strip, k))
        ds = ds.permute(1, 2, 0, 3).flatten(2)  # [1, n, G * M], as it lies in memory
        if dshift is not None:
            dshift.add_(ds.sum((0, 1)))
        if dq is not None:
            ds = ds.view(1, -1, self.width, ds.shape[-1]).permute(0, 3, 1, 2)
            how = ([1, 1], [0, edge], [1, 1], False, [0, 0], self.heads)
            found = torch.ops.aten.convolution_backward(
                ds, strip, k, None, *how, [True, False, False]
            )
            self._strip(dq, k, block).add_(found[0])

    def _neighbourhoods(self, strip: Tensor, k: Tensor) -> Tensor:
        """Queries of a strip as the filters meet them, ``[G, n, k * k * d]``."""
        side = k.shape[-1]
        image = F.pad(strip[0].permute(1, 2, 0), (0, 0, side // 2, side // 2))
        near = image.unfold(0, side, 1).unfold(1, side, 1)  # [rows, W, G * d, k, k]
        near = near.view(*near.shape[:2], self.heads, -1, side, side).permute(2, 0, 1, 4, 5, 3)
        return near.reshape(self.heads, -1, k[0].numel())

    def _strip(self, image: Tensor, k: Tensor, block: Block) -> Tensor:
        at, start, stop = block
        first, last = start // self.width, stop // self.width
        return image[at, :, first : last + k.shape[-1] - 1]


# ---- all blocks -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _How:
    """What a call computes besides its tensors."""

    source: _Products | _Convolutions
    heads: int  # the last part of G: those that `mix` mixes
    diagonal: int | None  # a query n does not see key n + diagonal
    softmax: bool
    mix: Mix | None

    def blocks(self, q: Tensor, k: Tensor) -> Iterator[Block]:
        """Cut the map into blocks."""
        return self.source.blocks(q, k, BLOCK if self.mix is None else BLOCK // 4)

    def weights(
        self, q: Tensor, k: Tensor, shift: Tensor | None, bias: Tensor | None, block: Block
    ) -> Tensor:
        """Logits of a block, or the softmax of them."""
        a = self.source.scores(q, k, shift, block)
        if bias is not None:
            a += _part(bias, block)
        if self.diagonal is not None:
            a.diagonal(block[1] + self.diagonal, -2, -1).fill_(torch.finfo(a.dtype).min)
        if not self.softmax:
            return a
        lies = a if a.is_contiguous() else a.permute(1, 2, 0, 3)  # as it lies in memory
        # in place where no gradient follows: fresh memory per block costs page faults
        p = torch.softmax(lies, -1, out=None if torch.is_grad_enabled() else lies)
        return p if a.is_contiguous() else p.permute(2, 0, 1, 3)

    def mixed(self, p: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn logits or weights into the map, and a sum over its entries."""
        if self.mix is None:
            return p, None
        made, total = self.mix(
            p.reshape(len(p) // self.heads, self.heads, math.prod(p.shape[1:])), *learned
        )
        return made.view(p.shape), total


def _part(t: Tensor, block: Block) -> Tensor:
    """Take a block's part of a bias ``[G or 1, B or 1, N or 1, M or 1]``."""
    at, start, stop = block
    t = t if t.shape[1] == 1 else t[:, at]
    return t if t.shape[2] == 1 else t[:, :, start:stop]


def _times(maps: Tensor, v: Tensor) -> Tensor:
    """Multiply ``[G, b, n, M]`` by ``[G, b, M, e]``, wherever an axis lies in memory."""
    return (maps.flatten(0, 1) @ v.flatten(0, 1)).view(*v.shape[:2], maps.shape[2], v.shape[-1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: _How,
        q: Tensor,
        k: Tensor,
        shift: Tensor | None,
        v: Tensor,
        bias: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        out, total = v.new_empty(*v.shape[:2], how.source.count(q, k), v.shape[-1]), None
        for block in how.blocks(q, k):
            at, start, stop = block
            maps, part = how.mixed(how.weights(q, k, shift, bias, block), *learned)
            out[:, at, start:stop] = _times(maps, v[:, at])
            if part is not None:
                total = part if total is None else total.add_(part)
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, shift, v, bias, out if how.mix is None else None, *learned)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Any, ...]:
        how: _How = ctx.how
        q, k, shift, v, bias, out, *learned = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        inputs = (q, k, shift, v, bias, *learned)
        if torch.is_grad_enabled() or batched(grad, grad_total):
            return (None, *gradients_of(partial(_whole, how), inputs, needs, (grad, grad_total)))
        if grad is None:
            grad = v.new_zeros(*v.shape[:2], how.source.count(q, k), v.shape[-1])
        sums = [
            torch.zeros_like(t) if need and t is not None else None
            for t, need in zip(inputs, needs, strict=True)
        ]
        way = _WayBack(how, q, k, shift, v, bias, learned, grad_total, sums)
        if out is not None and how.softmax:
            # of a plain softmax the sum of p dp over a row is that of dy y: as one more channel of
            # dy, against a one in v, it is taken off by the product itself
            grad = torch.cat((grad, -(grad * out).sum(-1, keepdim=True)), -1)
            way = replace(way, v=F.pad(v, (0, 1), value=1.0))
        for block in how.blocks(q, k):
            at, start, stop = block
            way.through(grad[:, at, start:stop], block)
        return (None, *sums)


def _whole(
    how: _How,
    q: Tensor,
    k: Tensor,
    shift: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    *learned: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Compute all rows at once, by operations that have gradients of gradients."""
    block = (slice(None), 0, how.source.count(q, k))
    maps, total = how.mixed(how.weights(q, k, shift, bias, block), *learned)
    return _times(maps, v), total


@dataclass(frozen=True)
class _WayBack:
    """What the backward pass of a block reads, and the sums over blocks that it adds to."""

    how: _How
    q: Tensor
    k: Tensor
    shift: Tensor | None
    v: Tensor
    bias: Tensor | None
    learned: Sequence[Tensor]
    grad_total: Tensor | None
    sums: Sequence[Tensor | None]

    def through(self, dy: Tensor, block: Block) -> None:
        """Add the gradients that come through the rows of a block."""
        how, (at, start, _) = self.how, block
        dv, db = self.sums[3:5]
        p = how.weights(self.q, self.k, self.shift, self.bias, block)
        dmaps = torch.empty_like(p)  # with the axes of p in memory
        torch.bmm(
            dy.flatten(0, 1),
            self.v[:, at].flatten(0, 1).transpose(1, 2),
            out=dmaps.flatten(0, 1),
        )
        if how.mix is None:
            maps, ds = p, dmaps.mul_(p) if how.softmax else dmaps
        else:
            maps, ds = self._through_mix(p, dmaps)
            if how.softmax:
                ds = torch.ops.aten._softmax_backward_data(ds, p, -1, p.dtype)
        if dv is not None:
            there = dv[:, at]
            there += _times(maps.transpose(-2, -1), dy[..., : there.shape[-1]])
        if how.diagonal is not None:
            ds.diagonal(start + how.diagonal, -2, -1).zero_()
        if db is not None:
            there = _part(db, block)
            there += ds.sum_to_size(there.shape)
        how.source.back(self.q, self.k, ds, block, self.sums[:3])

    def _through_mix(self, p: Tensor, dmaps: Tensor) -> tuple[Tensor, Tensor]:
        """The map, and the gradient of the scores by autograd of what mixes them."""
        leaf = p.detach().requires_grad_()
        sums = self.sums[5:]
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


# ---- calls ----------------------------------------------------------------------------------


class _Axes:
    """Leading axes as two: G, the heads and the axes that have keys of their own, and B, the rest.

    ``lead`` are the sizes of the axes before the heads, of which the last ``own``, such as
    windows, have keys of their own.
    """

    def __init__(self, lead: torch.Size, heads: int, own: int) -> None:
        self.sizes, self._at = (*lead, heads), len(lead) - own
        self.own = lead[self._at :]

    def split(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Bring ``[*, h, R, D]`` to ``[G, B, R, D]``."""
        shape = (math.prod(self.sizes[: self._at]), math.prod(self.sizes[self._at :]))
        return t.to(dtype).reshape(*shape, *t.shape[-2:]).transpose(0, 1).contiguous()

    def joined(self, t: Tensor) -> Tensor:
        """Bring ``[G, B, R, D]`` to ``[*, h, R, D]``."""
        return t.transpose(0, 1).reshape(*self.sizes, *t.shape[-2:])

    def bias(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Bring what broadcasts to ``[*, h, N, M]`` to ``[G or 1, B or 1, N or 1, M or 1]``."""
        if bias is None:
            return None
        bias = bias.to(dtype)[(None,) * (len(self.sizes) + 2 - bias.ndim)]
        parts = []
        for part in (slice(self._at), slice(self._at, None)):
            given = tuple(bias.shape[:-2][part])
            parts.append(given if set(given) <= {1} else self.sizes[part])
        bias = bias.expand(*parts[0], *parts[1], *bias.shape[-2:])
        return bias.reshape(*map(math.prod, parts), *bias.shape[-2:]).transpose(0, 1)


def attention(
    q: Float[Tensor, "*batch h N d"],
    k: Float[Tensor, "*keys h M d"],
    v: Float[Tensor, "*batch h M e"],
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    diagonal: int | None = None,
    softmax: bool = True,
    mix: Mix | None = None,
    learned: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "*batch h N e"], Tensor | None]:
    r"""Compute :math:`\mathrm{mix}(\mathrm{softmax}(s\,Q K^\top + b))\,V` by blocks of rows of Q.

    Leading axes that keys lack are shared by all that has them. b broadcasts to
    ``[*, h, N, M]``; a query n does not see key n + ``diagonal``. Narrower dtypes than float32 are
    computed in float32. Gradients of gradients form the whole map.

    ``mix`` turns ``[X, h, Y]``, the heads of entries in any order, and the ``learned`` tensors,
    which get gradients, into the map, entry by entry, and may return a sum over entries, which is
    returned, summed over all, next to the output. Without the ``softmax`` it gets the logits.
    """
    axes, dtype = _Axes(q.shape[:-3], q.shape[-3], k.ndim - 3), _wide(q)
    keys = k.expand(*axes.own, *k.shape[-3:]).flatten(0, -3).to(dtype).transpose(1, 2)
    how = _How(source=_Products(), heads=q.shape[-3], diagonal=diagonal, softmax=softmax, mix=mix)
    rows, values = axes.split(q * scale, dtype), axes.split(v, dtype)
    given = (rows, keys.contiguous(), None, values, axes.bias(bias, dtype), *learned)
    return _computed(axes, how, q, given)


def conv_attention(
    q: Float[Tensor, "*batch h N d"],
    weight: Float[Tensor, "filters d k k"],
    shift: Float[Tensor, " filters"],
    v: Float[Tensor, "*batch h M e"],
    *,
    grid: tuple[int, int],
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    diagonal: int | None = None,
    softmax: bool = True,
    mix: Mix | None = None,
    learned: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "*batch h N e"], Tensor | None]:
    """Compute :func:`attention` whose logits a convolution of the queries on ``grid`` gives.

    Filters are one for each head and key; where there are as many as for several times the heads,
    the last leading axis of q, such as windows, has filters of its own. ``mix`` acts on single
    entries.
    """
    heads = len(weight) // v.shape[-2]
    axes, dtype = _Axes(q.shape[:-3], q.shape[-3], int(heads > q.shape[-3])), _wide(q)
    height, width = grid
    edge = weight.shape[-1] // 2
    image = axes.split(q, dtype).permute(1, 2, 0, 3)
    image = image.reshape(len(image), height, width, -1)
    image = F.pad(image, (0, 0, 0, 0, edge, edge)).permute(0, 3, 1, 2)
    filters = (weight * scale).to(dtype).contiguous(memory_format=torch.channels_last)
    added = (shift * scale).to(dtype)
    how = _How(
        source=_Convolutions(heads, width),
        heads=q.shape[-3],
        diagonal=diagonal,
        softmax=softmax,
        mix=mix,
    )
    values = axes.split(v, dtype)
    given = (image, filters, added, values, axes.bias(bias, dtype), *learned)
    return _computed(axes, how, q, given)


def _computed(
    axes: _Axes, how: _How, q: Tensor, given: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Run, and bring the output to ``[*, h, N, e]`` in the dtype of the queries."""
    with torch.autocast(q.device.type, enabled=False):
        out, total = _Attention.apply(how, *given)
    return axes.joined(out).to(q.dtype), total


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
