# SPDX-License-Identifier: Apache-2.0
"""QKFormer's Table 1: orders of growth as printed, beside counts of the attention alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keymix.analysis.attention_operation import attention_operation
from keymix.analysis.complexity_record import OrderRow, Setting
from keymix.analysis.complexity_sites import near_square
from keymix.mixers.base import Site
from keymix.mixers.registry import build

Formula = Callable[[int, int, int], int]  # of N, D, h


@dataclass(frozen=True, kw_only=True)
class OrderFormula:
    """A row of QKFormer's Table 1, and what the attention of our mixer takes exactly.

    Attributes:
        mixer: The mixer's name here, with options.
        printed: Its name in the paper.
        time: Time complexity, as printed.
        space: Space complexity, as printed; empty where the paper gives none.
        name: The mixer's canonical name.
        options: Its options.
        macs: Multiply-adds of matrix products from (N, D, h).
        macs_text: The formula in words.
        entries: Numbers added up, masked or scaled entry by entry, from (N, D, h).
        entries_text: The formula in words.
        formed: Numbers formed between the roles and what is gathered, from (N, D, h).
        formed_text: The formula in words.
    """

    mixer: str
    printed: str
    time: str
    space: str
    name: str
    options: dict[str, Any]
    macs: Formula
    macs_text: str
    entries: Formula
    entries_text: str
    formed: Formula
    formed_text: str


def _none(n: int, d: int, h: int) -> int:
    return 0


TABLE_1 = (
    OrderFormula(
        mixer="softmax",
        printed="VSA",
        time="O(N²D)",
        space="O(N² + ND)",
        name="softmax",
        options={},
        macs=lambda n, d, h: 2 * n * n * d,
        macs_text="2N²D",
        entries=lambda n, d, h: h * n * n,
        entries_text="hN²",
        formed=lambda n, d, h: 3 * h * n * n,
        formed_text="3hN²",
    ),
    OrderFormula(
        mixer="spiking_self(order=quadratic)",
        printed="SSA",
        time="O(N²D)",
        space="O(N² + ND)",
        name="spiking_self",
        options={"order": "quadratic"},
        macs=lambda n, d, h: 2 * n * n * d,
        macs_text="2N²D",
        entries=lambda n, d, h: n * d,
        entries_text="ND",
        formed=lambda n, d, h: h * n * n + n * d,
        formed_text="hN² + ND",
    ),
    OrderFormula(
        mixer="spiking_self(order=linear)",
        printed="SSA, Sec. 3.2",
        time="O(ND²)",
        space="",
        name="spiking_self",
        options={"order": "linear"},
        macs=lambda n, d, h: 2 * n * d * d // h,
        macs_text="2ND²/h",
        entries=lambda n, d, h: n * d,
        entries_text="ND",
        formed=lambda n, d, h: d * d // h + n * d,
        formed_text="D²/h + ND",
    ),
    OrderFormula(
        mixer="spike_driven",
        printed="SDSA",
        time="O(ND)",
        space="O(ND)",
        name="spike_driven",
        options={},
        macs=_none,
        macs_text="0",
        entries=lambda n, d, h: 3 * n * d,
        entries_text="3ND",
        formed=lambda n, d, h: n * d + d,
        formed_text="ND + D",
    ),
    OrderFormula(
        mixer="qk_token",
        printed="QKTA",
        time="O(D)",
        space="O(N)",
        name="qk_token",
        options={},
        macs=_none,
        macs_text="0",
        entries=lambda n, d, h: 2 * n * d,
        entries_text="2ND",
        formed=lambda n, d, h: h * n,
        formed_text="hN",
    ),
    OrderFormula(
        mixer="qk_channel",
        printed="QKCA",
        time="O(N)",
        space="O(D)",
        name="qk_channel",
        options={},
        macs=_none,
        macs_text="0",
        entries=lambda n, d, h: 2 * n * d,
        entries_text="2ND",
        formed=lambda n, d, h: d,
        formed_text="D",
    ),
)
"""Table 1 of QKFormer, https://arxiv.org/abs/2403.16552; N tokens, D channels, h heads of ours."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an attention does for one image in one step, neurons and softmax left out.

    Attributes:
        macs: Multiply-adds of matrix products.
        entries: Numbers added up, masked or scaled entry by entry.
        formed: Numbers formed between the roles and what is gathered.
    """

    macs: int
    entries: int
    formed: int

    @property
    def operations(self) -> int:
        """All of them together."""
        return self.macs + self.entries


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the arithmetic of what runs under it; views and copies are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = self.entries = 0
        self.formed: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.macs += out.numel() * args[0].shape[-1]
        elif name == "sum":
            self.entries += args[0].numel()
        elif name == "mul":
            self.entries += out.numel()
        if name in ("mm", "bmm", "sum", "mul", "_softmax"):
            self.formed.append(out.numel())
        return out


def work(name: str, options: dict[str, Any], tokens: int, dim: int, num_heads: int) -> Work:
    """Count the attention of a mixer alone.

    Args:
        name: The mixer.
        options: Its options.
        tokens: N.
        dim: D.
        num_heads: h.
    """
    grid = near_square(tokens)
    site = Site(dim=dim, num_heads=num_heads, grid=grid, neuron=lambda **factory: nn.Identity())
    with torch.device("meta"):
        operation = attention_operation(build(name, site, options), tokens)
        parts: dict[str, Tensor] = {r: torch.empty(s) for r, s in operation.shapes.items()}
    watch = _Watch()
    with torch.no_grad(), watch:
        operation.run(parts)
    return Work(macs=watch.macs, entries=watch.entries, formed=sum(watch.formed[:-1]))


def order_rows(sizes: Setting) -> tuple[OrderRow, ...]:
    """Compare the orders of Table 1 with counts at the tables' site and all of the figure's."""
    return tuple(_row(formula, sizes) for formula in TABLE_1)


def _row(formula: OrderFormula, sizes: Setting) -> OrderRow:
    n, d, h = sizes.at, sizes.dim, sizes.num_heads

    def at(tokens: int, dim: int) -> Work:
        return work(formula.name, formula.options, tokens, dim, h)

    here, tokens, width = at(n, d), at(2 * n, d), at(n, 2 * d)
    pairs = [(n, d), *((m, d) for m in sizes.sweep_tokens), *((n, e) for e in sizes.sweep_dims)]
    pairs = list(dict.fromkeys(pairs))
    disagree = []
    for m, e in pairs:
        wanted = Work(
            macs=formula.macs(m, e, h),
            entries=formula.entries(m, e, h),
            formed=formula.formed(m, e, h),
        )
        if at(m, e) != wanted:
            disagree.append((m, e))
    return OrderRow(
        mixer=formula.mixer,
        printed=formula.printed,
        time=formula.time,
        space=formula.space,
        macs_text=formula.macs_text,
        entries_text=formula.entries_text,
        formed_text=formula.formed_text,
        macs=here.macs,
        entries=here.entries,
        formed=here.formed,
        time_by_tokens=math.log2(tokens.operations / here.operations),
        time_by_dim=math.log2(width.operations / here.operations),
        space_by_tokens=math.log2(tokens.formed / here.formed),
        space_by_dim=math.log2(width.formed / here.formed),
        sites=len(pairs),
        disagree=tuple(disagree),
    )
