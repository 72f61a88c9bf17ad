# SPDX-License-Identifier: Apache-2.0
"""Projections of attention modules by the names that libraries give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from keymix.hosts.attention_inputs import Reading
from keymix.hosts.blocks import Facts
from keymix.hosts.head_norms import HeadNorms

ROWS = (  # of queries, keys, values and the output; one name twice is one map of both
    *((*(f"{role}_proj" for role in "qkv"), out) for out in ("o_proj", "out_proj", "proj")),
    *(
        (*(f"{at}.{role}" for role in ("query", "key", "value")), "output.dense")
        for at in ("attention", "self")
    ),
    *(("qkv", "qkv", "qkv", out) for out in ("proj", "out_proj", "out")),
    *(("to_qkv", "to_qkv", "to_qkv", out) for out in ("to_out.0", "to_out", "proj")),
    *(("to_q", keys, values, "to_out.0") for keys, values in (("to_k", "to_v"), ("to_kv",) * 2)),
    *(("q", keys, values, "proj") for keys, values in (("k", "v"), ("kv", "kv"))),
    *(("query", "key", "value", out) for out in ("proj", "out", "dense")),
    ("wq", "wk", "wv", "wo"),
)


def row_of(attention: nn.Module) -> tuple[str, ...] | None:
    """Return the names of queries, keys, values and output, None where no row is there."""
    there = dict(attention.named_modules())
    return next((row for row in ROWS if all(name in there for name in row)), None)


def facts_of(
    attention: nn.Module,
    row: tuple[str, ...],
    heads: int,
    options: Mapping[str, Any],
    norms: HeadNorms | None = None,
    extras: tuple[str, ...] = (),
) -> Facts:
    """Describe an attention with the biases and widths of its projections."""
    q, k, v, out = (attention.get_submodule(name) for name in row)
    assert isinstance(q, nn.Linear)
    assert isinstance(out, nn.Linear)
    options = {
        **options,
        "qkv_bias": any(linear.bias is not None for linear in (q, k, v)),
        "proj_bias": out.bias is not None,
    }
    if out.in_features != q.in_features:
        options["head_dim"] = out.in_features // heads
    return Facts(dim=q.in_features, num_heads=heads, options=options, norms=norms, extras=extras)


def read_row(
    attention: nn.Module, row: tuple[str, ...], x: Tensor, width: int, scale: float
) -> Reading:
    """Return queries, keys and values of tokens ``[B, N, C]``, with heads of some width."""
    outs = {name: attention.get_submodule(name)(x) for name in dict.fromkeys(row[:3])}
    parts = [_part(outs[name], row, i) for i, name in enumerate(row[:3])]
    q, k, v = (t.reshape(*t.shape[:-1], -1, width).transpose(-3, -2) for t in parts)
    return Reading(q=q, k=k, v=v, scale=scale)


def weights_of(attention: nn.Module, row: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the projections by their role in a mixer."""
    return {
        f"{role}.{part}": _part(tensor.detach(), row, i, 0)
        for i, (role, name) in enumerate(zip(("q", "k", "v", "proj"), row, strict=True))
        for part, tensor in attention.get_submodule(name).named_parameters()
    }


def _part(joint: Tensor, row: tuple[str, ...], i: int, axis: int = -1) -> Tensor:
    """Return a role's part of what may serve several."""
    return joint.chunk(row.count(row[i]), axis)[row[:i].count(row[i])]
