# SPDX-License-Identifier: Apache-2.0
"""The papers' closed forms of what token mixers cost, as they are printed.

They count multiply-adds, whatever the papers call them, and leave out every bias, the softmax, the
scale and the class token. N tokens, D wide; the number of heads does not enter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A row of SKA Table 6, with its row of Table 7.

    Attributes:
        mixer: The mixer's name here.
        printed: Its name in the paper.
        macs: Multiply-adds from (N, D).
        params: Weights from (N, D).
        ratio: Multiply-adds a weight, as printed, from (N, D).
        macs_text: The formula in words.
        params_text: The formula in words.
        ratio_text: The formula in words.
        sharing: Table 7, "Weight Sharing".
        dynamic: Table 7, "Dynamic Weights"; its "No" is 0.
    """

    mixer: str
    printed: str
    macs: Callable[[int, int], int]
    params: Callable[[int, int], int]
    ratio: Callable[[int, int], Fraction]
    macs_text: str
    params_text: str
    ratio_text: str
    sharing: str
    dynamic: int


GLOBAL, NOT_SHARED = "spatially global", "no"

TABLE_6 = (
    Formula(
        mixer="sep_conv",
        printed="SepConv",
        macs=lambda n, d: n * (9 * d + 2 * d * d),
        params=lambda n, d: 9 * d + 2 * d * d,
        ratio=lambda n, d: Fraction(n),
        macs_text="N(9D + 2D²)",
        params_text="9D + 2D²",
        ratio_text="N",
        sharing=GLOBAL,
        dynamic=0,
    ),
    Formula(
        mixer="softmax",
        printed="Self-Attn",
        macs=lambda n, d: n * (2 * n * d + 4 * d * d),
        params=lambda n, d: 4 * d * d,
        ratio=lambda n, d: n + Fraction(n * n, 2 * d),
        macs_text="N(2ND + 4D²)",
        params_text="4D²",
        ratio_text="N + N²/(2D)",
        sharing=NOT_SHARED,
        dynamic=2,
    ),
    Formula(
        mixer="static_key",
        printed="SKA",
        macs=lambda n, d: n * (2 * n * d + 3 * d * d),
        params=lambda n, d: n * d + 3 * d * d,
        ratio=lambda n, d: n + Fraction(n * n, n + 3 * d),
        macs_text="N(2ND + 3D²)",
        params_text="ND + 3D²",
        ratio_text="N + N²/(N + 3D)",
        sharing=NOT_SHARED,
        dynamic=1,
    ),
    Formula(
        mixer="conv_static_key",
        printed="CSKA",
        macs=lambda n, d: n * (10 * n * d + 3 * d * d),
        params=lambda n, d: 9 * n * d + 3 * d * d,
        ratio=lambda n, d: n + Fraction(n * n, 9 * n + 3 * d),
        macs_text="N(10ND + 3D²)",
        params_text="9ND + 3D²",
        ratio_text="N + N²/(9N + 3D)",
        sharing=GLOBAL,
        dynamic=1,
    ),
)
"""Tables 6 and 7 of Static Key Attention in Vision, https://arxiv.org/abs/2412.07049, Sec. 6.4."""


@dataclass(frozen=True, kw_only=True)
class KeyValueFormula:
    """A row of Table 1 of the paper on key-value attention in SETR.

    Attributes:
        mixer: The mixer's name here.
        printed: Its name in the paper.
        positions: Whether it codes index pairs, with m channels.
        macs: Multiply-adds from (n, d, m), as printed.
        params: Weights from (d, m), as printed.
        macs_text: The formula in words.
        params_text: The formula in words.
    """

    mixer: str
    printed: str
    positions: bool = False
    macs: Callable[[int, int, int], int]
    params: Callable[[int, int], int]
    macs_text: str
    params_text: str


KEY_VALUE_TABLE_1 = (
    KeyValueFormula(
        mixer="softmax",
        printed="QKV",
        macs=lambda n, d, m: 2 * n * d * d,
        params=lambda d, m: 2 * d * d,
        macs_text="2nd²",
        params_text="2d²",
    ),
    KeyValueFormula(
        mixer="key_value",
        printed="KV",
        macs=lambda n, d, m: n * d * d,
        params=lambda d, m: d * d,
        macs_text="nd²",
        params_text="d²",
    ),
    KeyValueFormula(
        mixer="key_value",
        printed="KV+pos",
        positions=True,
        macs=lambda n, d, m: n * d * d + n * n * m,
        params=lambda d, m: d * d + m,
        macs_text="nd² + n²m",
        params_text="d² + m",
    ),
)
"""Table 1 of https://doi.org/10.1007/978-3-658-47422-5_71, after https://arxiv.org/abs/2305.19129.

Only the projections of Q and K and the code of positions are counted: the product of queries and
keys, V and the output projection are left out.
"""
