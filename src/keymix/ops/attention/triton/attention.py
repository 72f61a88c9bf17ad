# SPDX-License-Identifier: Apache-2.0
"""Attention of each head by itself: queries, or their neighbourhoods on a grid, against keys.

A key has one row of channels for each tap of a k x k filter; a plain key has one tap. A query
meets tap (y, x) with the query that lies there relative to it, zeros outside the image: the
neighbourhood is read, never copied.

In here B are the leading axes and G the heads: queries ``[B, G, N, d]``, values ``[B, G, M, e]``,
keys ``[B or 1, G, M, taps, d]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from jaxtyping import Float
from torch import Tensor

from keymix.ops.attention.axes import Axes
from keymix.ops.attention.triton import kernels
from keymix.ops.attention.triton.launch import (
    check_dtype,
    launch,
    padded,
    readable,
    steps,
    sum_dtype,
    tile,
)
from keymix.ops.tracing import batched, gradients_of

Activation = Literal["softmax", "gelu", "relu", "star_relu"]

_REGISTERS = 96 * 2**10  # bytes of sums that a program keeps at most, of the 256 KiB of a processor
_PROGRAMS = 512  # of a GPU: about four for each of its processors


@dataclass(frozen=True, kw_only=True)
class _How:
    """What a call computes besides its tensors."""

    activation: Activation
    scale: float
    diagonal: int | None  # a query n does not see key n + diagonal
    width: int  # W of the image, which matters from 3 x 3 taps on


@dataclass(frozen=True)
class _Call:
    """Tensors of a call as kernels read them."""

    how: _How
    q: Tensor
    k: Tensor
    shift: Tensor | None
    v: Tensor
    bias: Tensor | None
    numbers: Tensor | None

    @classmethod
    def of(cls, how: _How, q: Tensor, k: Tensor, shift: Any, v: Tensor, *rest: Any) -> _Call:
        """Make the channels of queries, keys and values adjacent in memory."""
        keys = readable(k.flatten(-2)).view(k.shape)
        return cls(how, readable(q), keys, shift, readable(v), *rest)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, G, N and M."""
        return (*self.q.shape[:3], self.v.shape[2])

    @property
    def taps(self) -> int:
        """Number of taps of a key."""
        return self.k.shape[3]

    def tiles(self, *, backward: bool) -> dict[str, int]:
        """Return tiles and warps, by what fits on the chip; which are fastest is not measured."""
        _, _, N, M = self.sizes
        width = max(padded(self.q.shape[-1]), padded(self.v.shape[-1]))
        narrow, near = self.q.element_size() == 2, self.taps > 1
        rows = 64 if narrow else 32
        if width > (64 if near else 128):
            rows //= 2
        long = narrow and width <= 64 and not (backward or near)
        return {
            "BN": tile(N, 2 * rows if long else rows),
            "BM": tile(M, rows),
            "num_warps": 8 if backward or near else 4,
            "num_stages": 1 if near else 2,
        }

    def taps_at_once(self, rows: int, *, alone: bool = False) -> int:
        """Return of how many taps a program keeps the sums over ``rows`` rows."""
        each = rows * padded(self.q.shape[-1]) * sum_dtype(self.q).itemsize
        most = 1 if alone else max(1, min(self.taps, _REGISTERS // each))
        return math.ceil(self.taps / math.ceil(self.taps / most))

    def run(
        self,
        kernel: Any,
        programs: int,
        tensors: Sequence[Tensor | None],
        more: Tensor,
        *numbers: int,
        **options: int,
    ) -> None:
        """Run a kernel, its own tensors and strides of the last of them after those of all."""
        q, k, v = self.q, self.k, self.v
        how, side = self.how, math.isqrt(self.taps)
        launch(
            kernel,
            programs,
            q,
            *(k, self.shift, v, self.bias, self.numbers, *tensors),
            *steps(q)[:3],
            *steps(k[..., 0, :])[:3],
            *steps(v)[:3],
            *steps(self.bias),
            *steps(more)[:3],
            *self.sizes,
            how.width,
            *numbers,
            D=q.shape[-1],
            E=v.shape[-1],
            SIDE=side,
            SCALE=how.scale,
            DIAGONAL=how.diagonal,
            ACTIVATION=how.activation,
            DP=padded(q.shape[-1]),
            EP=padded(v.shape[-1]),
            **options,
        )


def _forward(call: _Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, G, N, e]``, and the logarithms of the softmax's sums."""
    B, G, N, _ = call.sizes
    # heads next to channels in memory, as the output projection reads them
    out = call.v.new_empty(B, N, G, call.v.shape[-1]).transpose(1, 2)
    lse = call.q.new_empty(B, G, N, dtype=sum_dtype(call.q))
    tiles = call.tiles(backward=False)
    call.run(kernels.forward_kernel, triton.cdiv(N, tiles["BN"]) * B * G, (out, lse), out, **tiles)
    return out, lse


def _query_gradient(call: _Call, grad: Tensor, sums: Sequence[Tensor]) -> Tensor:
    B, G, N, _ = call.sizes
    q, tiles = call.q, call.tiles(backward=True)
    shape = (B, G, N, q.shape[-1])
    plain = call.taps == 1
    found = q.new_empty(shape) if plain else q.new_zeros(shape, dtype=sum_dtype(q))
    # programs of several taps add to the same rows, in an order that is never the same
    alone = torch.are_deterministic_algorithms_enabled()
    most = call.taps_at_once(tiles["BN"], alone=alone)
    for first in range(0, call.taps, most):
        call.run(
            kernels.query_kernel,
            triton.cdiv(N, tiles["BN"]) * B * G,
            (grad, *sums, found),
            grad,
            FIRST=first,
            TAPS=min(most, call.taps - first),
            **tiles,
        )
    return found.to(q.dtype)


def _key_gradients(
    call: _Call, grad: Tensor, sums: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of keys, shift, values and the activation's numbers."""
    B, G, _, M = call.sizes
    q, k, v, tiles = call.q, call.k, call.v, call.tiles(backward=True)
    blocks, wide = triton.cdiv(M, tiles["BM"]), sum_dtype(call.q)
    shared = len(k) == 1
    # images that share keys are dealt to some programs, whose sums are added up in order
    splits = max(1, min(B, _PROGRAMS // max(1, blocks * G))) if shared else B
    of_keys = q.new_empty(splits, *k.shape[1:], dtype=wide)
    of_shift = None if call.shift is None else q.new_empty(splits, G, M, dtype=wide)
    of_values = v.new_empty(v.shape)
    of_numbers = None if call.numbers is None else q.new_empty(splits, G, M, 2, dtype=wide)
    most = call.taps_at_once(tiles["BM"])
    for first in range(0, call.taps, most):
        call.run(
            kernels.key_kernel,
            blocks * splits * G,
            (grad, *sums, of_keys, of_shift, of_values, of_numbers),
            grad,
            splits,
            FIRST=first,
            TAPS=min(most, call.taps - first),
            **tiles,
        )
    return (
        (of_keys.sum(0, keepdim=True) if shared else of_keys).to(k.dtype),
        None if of_shift is None else of_shift.sum(0),
        of_values,
        None if of_numbers is None else of_numbers.sum((0, 1, 2)),
    )


def _bias_gradient(call: _Call, bias: Tensor, grad: Tensor, sums: Sequence[Tensor]) -> Tensor:
    B, G, N, M = call.sizes
    tiles = call.tiles(backward=True)
    down, across = triton.cdiv(N, tiles["BN"]), triton.cdiv(M, tiles["BM"])
    kept_b, kept_g, rows, columns = bias.shape
    kept = kept_b * kept_g
    sharing = B * G // max(1, kept)
    splits = max(1, min(sharing, _PROGRAMS // max(1, kept * down * across)))
    whole = (rows > 1 or N == 1, columns > 1 or M == 1)
    shape = (N if whole[0] else down, M if whole[1] else across)
    found = grad.new_empty(kept_b, kept_g, splits, *shape, dtype=sum_dtype(call.q))
    call.run(
        kernels.bias_kernel,
        kept * splits * down * across,
        (grad, *sums, found),
        grad,
        *(splits, kept_b, kept_g),
        ROWS=whole[0],
        COLUMNS=whole[1],
        **tiles,
    )
    return found.sum(2).sum_to_size(bias.shape).to(bias.dtype)


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
        numbers: Tensor | None,
    ) -> Tensor:
        call = _Call.of(how, q, k, shift, v, bias, numbers)
        out, lse = _forward(call)
        ctx.how = how
        ctx.save_for_backward(q, k, shift, v, bias, numbers, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        how: _How = ctx.how
        *inputs, out, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or batched(grad):
            return (None, *gradients_of(partial(_plain, how), inputs, needs, (grad,)))
        call, bias, grad = _Call.of(how, *inputs), inputs[4], readable(grad)
        # of a softmax the sum of p dp over a row is that of dy y
        sums = (lse, (grad.to(lse.dtype) * out).sum(-1))
        of_queries = _query_gradient(call, grad, sums) if needs[0] else None
        of_keys = of_shift = of_values = of_numbers = None
        if any((*needs[1:4], needs[5])):
            of_keys, of_shift, of_values, of_numbers = _key_gradients(call, grad, sums)
        of_bias = _bias_gradient(call, bias, grad, sums) if needs[4] else None
        return None, of_queries, of_keys, of_shift, of_values, of_bias, of_numbers


def _plain(
    how: _How,
    q: Tensor,
    k: Tensor,
    shift: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    numbers: Tensor | None,
) -> tuple[Tensor]:
    """Compute the same with the whole map, by operations that have gradients of gradients."""
    given, wide = v.dtype, sum_dtype(q)
    q, k, v = (t.to(wide) for t in (q, k, v))
    side = math.isqrt(k.shape[3])
    if side > 1:
        edge, width = side // 2, how.width
        height = q.shape[2] // width
        image = F.pad(q.reshape(*q.shape[:2], height, width, -1), (0, 0, edge, edge, edge, edge))
        near = [
            image[:, :, y : y + height, x : x + width] for y in range(side) for x in range(side)
        ]
        q = torch.stack(near, -2).flatten(2, 3).flatten(-2)
    s = q @ k.flatten(-2).transpose(-2, -1)
    if shift is not None:
        s = s + shift[:, None, :]
    s = s * how.scale
    if bias is not None:
        s = s + bias
    if how.diagonal is not None:
        n, m = (torch.arange(size, device=s.device) for size in s.shape[-2:])
        s = s.masked_fill(n[:, None] + how.diagonal == m, torch.finfo(s.dtype).min)
    if how.activation == "softmax":
        maps = s.softmax(-1)
    elif how.activation == "gelu":
        maps = F.gelu(s)
    else:
        maps = F.relu(s)
        if numbers is not None:
            maps = numbers[0] * maps.square() + numbers[1]
    return ((maps @ v).to(given),)


# ---- calls ----------------------------------------------------------------------------------


def attention(
    q: Float[Tensor, "*batch h N d"],
    k: Float[Tensor, "*keys h M d"],
    v: Float[Tensor, "*batch h M e"],
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    diagonal: int | None = None,
    activation: Activation = "softmax",
    learned: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "*batch h N e"], None]:
    r"""Compute :math:`\mathrm{softmax}(s\,Q K^\top + b)\,V`, or another activation's, by kernels.

    Leading axes that keys lack are shared by all that has them, without a copy. b broadcasts to
    ``[*, h, N, M]``; a query n does not see key n + ``diagonal``. ``learned`` are scale and bias
    of StarReLU. Sums are in float32. Gradients of gradients form the whole map. float64 is
    refused on a GPU.
    """
    lead, own = q.shape[:-3], k.ndim - 3
    each = 0 < own == len(lead)  # keys of every image
    axes = Axes(lead, q.shape[-3], 0 if each else own)
    keys = k.expand(*lead[len(lead) - own :], *k.shape[-3:])
    keys = axes.split(keys) if each else keys.reshape(1, axes.sizes[1], *k.shape[-2:])
    return _computed(
        axes, q, keys[..., None, :], None, v, scale, bias, diagonal, 1, activation, learned
    )


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
    activation: Activation = "softmax",
    learned: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "*batch h N e"], None]:
    """Compute :func:`attention` whose logits a convolution of the queries on ``grid`` gives.

    Filters are one for each head and key; where there are as many as for several times the heads,
    the last leading axis of q, such as windows, has filters of its own.
    """
    heads = len(weight) // v.shape[-2]
    axes = Axes(q.shape[:-3], q.shape[-3], int(heads > q.shape[-3]))
    keys = weight.flatten(2).transpose(1, 2).contiguous()
    keys = keys.view(1, heads, v.shape[-2], *keys.shape[1:])
    added = shift.view(heads, v.shape[-2])
    return _computed(axes, q, keys, added, v, scale, bias, diagonal, grid[1], activation, learned)


def _computed(
    axes: Axes,
    q: Tensor,
    keys: Tensor,
    shift: Tensor | None,
    v: Tensor,
    scale: float | Tensor,
    bias: Tensor | None,
    diagonal: int | None,
    width: int,
    activation: Activation,
    learned: Sequence[Tensor],
) -> tuple[Tensor, None]:
    """Run, and bring the output to ``[*, h, N, e]``."""
    check_dtype(q)
    wide = sum_dtype(q)
    if isinstance(scale, Tensor):
        q = q * scale.to(q.dtype)
        shift = None if shift is None else shift * scale
        scale = 1.0
    how = _How(activation=activation, scale=scale, diagonal=diagonal, width=width)
    out = _Attention.apply(
        how,
        axes.split(q),
        keys.to(q.dtype),
        None if shift is None else shift.to(wide).contiguous(),
        axes.split(v.to(q.dtype)),
        None if bias is None else axes.bias(bias),
        torch.cat([t.to(wide).flatten() for t in learned]) if learned else None,
    )
    return axes.joined(out), None
