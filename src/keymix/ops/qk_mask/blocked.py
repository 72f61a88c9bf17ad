# SPDX-License-Identifier: Apache-2.0
"""The same function behind a batch norm on a CPU, a chunk of rows at a time.

Neither the queries' currents nor their spikes are ever whole: a chunk of them is summed while it
is in cache. The norm's input is kept for the backward pass, the sums, and the keys in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keymix.ops.neuron import blocked
from keymix.ops.neuron.autograd import save_coefficients, saved_coefficients
from keymix.ops.neuron.multi_step import gradients, integrate_and_fire
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.qk_mask.reference import Neuron
from keymix.ops.spikes.normed import Normed, Statistics
from keymix.ops.spikes.packed import mark_whole, pack
from keymix.ops.spikes.recompute import refuse_unkept


@dataclass(frozen=True)
class _Sums:
    """Sums of rows ``[T, n, D]`` over the channels of each head, or over the tokens of each image.

    They are ``[T, n, h]``, or ``[T, images, D]``.
    """

    tokens: int
    heads: int
    width: int
    of_heads: bool

    @classmethod
    def of(cls, keys: Tensor, axis: int) -> _Sums:
        tokens, heads, head_dim = keys.shape[-3:]
        return cls(tokens, heads, heads * head_dim, axis == -1)

    def empty(self, rows: Tensor) -> Tensor:
        """Make room for the sums of rows; zeros where they are added to."""
        steps, count = rows.shape[:2]
        if self.of_heads:
            return rows.new_empty(steps, count, self.heads)
        return rows.new_zeros(steps, count // self.tokens, self.width)

    def gather(self, part: slice, rows: Tensor, into: Tensor) -> None:
        """Sum the rows ``[T, r, D]`` of a part into the sums of all."""
        if self.of_heads:
            apart = rows.reshape(*rows.shape[:2], self.heads, -1)
            into[:, part] = apart.sum(-1)
            return
        for image, here in self._images(part):
            into[:, image] += rows[:, here].sum(1)

    def spread(self, part: slice, values: Tensor) -> Tensor:
        """Give every number of the rows of a part its sum's value, ``[T, r, D]``."""
        if self.of_heads:
            return values[:, part].repeat_interleave(self.width // self.heads, -1)
        pieces = [
            values[:, image, None].expand(-1, here.stop - here.start, -1)
            for image, here in self._images(part)
        ]
        return torch.cat(pieces, 1)

    def _images(self, part: slice) -> list[tuple[int, slice]]:
        """Images that have rows in a part, and which rows of the part these are."""
        start, stop, tokens = part.start, part.stop, self.tokens
        return [
            (i, slice(max(i * tokens, start) - start, min((i + 1) * tokens, stop) - start))
            for i in range(start // tokens, -(-stop // tokens))
        ]


def _rows_of(part: slice, width: int) -> slice:
    return slice(part.start // width, part.stop // width)


def _parts(rows: Tensor) -> list[slice]:
    count, width = rows.shape[1:]
    return [_rows_of(slice(*cut), width) for cut in blocked.chunks(count * width, width)]


class _MaskedKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        keys: Tensor,
        keep: Any,
        gain: Any,
        attn_keep: Any,
        attn_gain: Any,
        statistics: Statistics,
        hows: tuple[Dynamics, Dynamics],
        axis: int,
    ) -> Tensor:
        steps, width = keys.shape[0], y.shape[1]
        normed = Normed.of(y.view(steps, -1, width), statistics, weight, bias)
        over = _Sums.of(keys, axis)
        sums = over.empty(normed.rows)

        def add(part: slice, spikes: Tensor) -> None:
            over.gather(_rows_of(part, width), spikes.view(steps, -1, width), sums)

        blocked.visit_spikes(normed.neurons(steps, keep, gain, hows[0]), add)
        mask, _ = integrate_and_fire(
            sums, keep=attn_keep, gain=attn_gain, how=hows[1], backend="blocked", last=False
        )
        masked = torch.empty_like(keys, memory_format=torch.contiguous_format)
        rows, into = keys.reshape(normed.rows.shape), masked.view(normed.rows.shape)
        for part in _parts(rows):
            torch.mul(rows[:, part], over.spread(part, mask), out=into[:, part])
        packed = pack(keys)
        ctx.over, ctx.hows, ctx.eps, ctx.of_batch = over, hows, statistics.eps, statistics.of_batch
        ctx.save_for_backward(
            *(y, weight, bias, statistics.mean, statistics.variance, packed, sums, mask),
            *save_coefficients(ctx, keep, gain, attn_keep, attn_gain),
        )
        return masked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_unkept(grad)
        y, weight, bias, mean, variance, keys, sums, mask, *tensors = ctx.saved_tensors
        keep, gain, attn_keep, attn_gain = saved_coefficients(ctx, tensors)
        over: _Sums = ctx.over
        width = y.shape[1]
        statistics = Statistics(mean, variance, ctx.eps, ctx.of_batch)
        normed = Normed.of(y.view(len(keys), -1, width), statistics, weight, bias)
        needs_y, needs_weight, needs_bias, needs_keys, *learned = ctx.needs_input_grad[:8]
        grad_keys = torch.empty_like(grad, memory_format=torch.contiguous_format)
        given, rows = grad.reshape(normed.rows.shape), keys.reshape(normed.rows.shape)
        into, grad_mask = grad_keys.view(normed.rows.shape), over.empty(normed.rows)
        for part in _parts(rows):
            # as floats first: a product with bytes takes twice as long
            over.gather(part, given[:, part] * rows[:, part].to(grad.dtype), grad_mask)
            if needs_keys:
                torch.mul(given[:, part], over.spread(part, mask), out=into[:, part])
        grad_sums, *of_attention = gradients(
            *(sums, grad_mask), keep=attn_keep, gain=attn_gain, how=ctx.hows[1], backend="blocked"
        )
        found, total, product, *of_queries = normed.backward(
            normed.neurons(len(keys), keep, gain, ctx.hows[0]),
            lambda part: over.spread(_rows_of(part, width), grad_sums).flatten(1),
            (learned[0], learned[1]),
        )
        grad_weight, grad_bias = normed.of_learned(total, product)
        if needs_y:
            normed.through_norm(found.view(-1), y.view(-1), total, product)
        return (
            found.view(y.shape) if needs_y else None,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            grad_keys if needs_keys else None,
            *(
                each if need else None
                for each, need in zip((*of_queries, *of_attention), learned, strict=True)
            ),
            *(None, None, None),
        )


def masked_keys(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Statistics,
    keys: Tensor,
    *,
    queries: Neuron,
    attention: Neuron,
    axis: int,
    whole: bool = False,
) -> Tensor:
    """Mask keys ``[T, *, N, h, d]`` by queries whose currents are the norm of y ``[T * N, h d]``.

    y is what ``ops/spikes/normed.py`` serves; ``whole`` says that the keys are spikes for certain.
    Gradients of gradients are refused.
    """
    out: Tensor = _MaskedKeys.apply(
        *(y, weight, bias, keys),
        *(queries.keep, queries.gain, attention.keep, attention.gain),
        *(statistics, (queries.how, attention.how), axis),
    )
    if whole:
        mark_whole(out)
    return out
