# SPDX-License-Identifier: Apache-2.0
"""The papers' tables of cost, each formula next to what is counted of the mixer itself.

    python benchmarks/paper_costs.py
    python benchmarks/paper_costs.py --dim 768 --heads 12 --at 196 --pos-dim 50

Prints, as Markdown, Tables 6 and 7 of Static Key Attention in Vision, Table 1 of key-value
attention and Table 1 of QKFormer; docs/analyze.md holds the output. Every formula of Table 6 and of
QKFormer's is compared with counts at all sizes of the study's figure; the exit code is 1 if one
differs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from keymix.analysis.attention_operation import Work, work
from keymix.analysis.complexity import Ledger, complexity
from keymix.analysis.complexity_record import (
    Complexity,
    FormulaRow,
    KeyValueRow,
    OrderRow,
    RatioPoint,
    Setting,
    WeightRow,
)
from keymix.analysis.complexity_sites import Counted, SizedMixer, sized_mixers
from keymix.analysis.complexity_weights import GLOBAL, NOT_SHARED
from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class
from keymix.studies.complexity.tables import tables

TABLES = ("formulas", "weights", "key_value", "orders")


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


OrderCount = Callable[[int, int, int], int]  # of N, D, h


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
    macs: OrderCount
    macs_text: str
    entries: OrderCount
    entries_text: str
    formed: OrderCount
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


def formula_rows(ledger: Ledger, sizes: Setting) -> tuple[FormulaRow, ...]:
    """Compare the formulas of Table 6 with counts at the tables' site and all of the figure's."""
    return tuple(_formula_row(ledger, sizes, formula) for formula in TABLE_6)


def _formula_row(ledger: Ledger, sizes: Setting, formula: Formula) -> FormulaRow:
    sized = _named(formula.mixer, sizes)
    here = _count(ledger, sized, sizes.at)
    pairs = [(sizes.at, sizes.dim)]
    pairs += [(n, sizes.dim) for n in sizes.sweep_tokens]
    pairs += [(sizes.at, d) for d in sizes.sweep_dims]
    pairs = list(dict.fromkeys(pairs))
    disagree = []
    for n, d in pairs:
        found = _count(ledger, sized, n, dim=d)
        if (found.macs, _weights(found)) != (formula.macs(n, d), formula.params(n, d)):
            disagree.append((n, d))
    return FormulaRow(
        mixer=formula.mixer,
        printed=formula.printed,
        macs_text=formula.macs_text,
        params_text=formula.params_text,
        ratio_text=formula.ratio_text,
        macs=formula.macs(sizes.at, sizes.dim),
        params=formula.params(sizes.at, sizes.dim),
        ratio=float(formula.ratio(sizes.at, sizes.dim)),
        macs_counted=here.macs,
        params_counted=_weights(here),
        biases=here.biases,
        sites=len(pairs),
        disagree=tuple(disagree),
    )


def _count(ledger: Ledger, sized: SizedMixer, tokens: int, dim: int | None = None) -> Counted:
    """Return the count of one of the papers' mixers."""
    found, reason = ledger.look(sized, tokens, dim=dim)
    if found is None:
        raise UserError(f"mixer {sized.label!r} at {tokens} tokens: {reason}")
    return found


def _weights(count: Counted) -> int:
    return count.params - sum(count.biases.values())


def _named(name: str, sizes: Setting) -> SizedMixer:
    return sized_mixers(name, dim=sizes.dim, num_heads=sizes.num_heads)[0]


def key_value_rows(ledger: Ledger, sizes: Setting) -> tuple[KeyValueRow, ...]:
    """Compare the formulas of Table 1 with counts."""
    return tuple(_key_value_row(ledger, sizes, formula) for formula in KEY_VALUE_TABLE_1)


def _key_value_row(ledger: Ledger, sizes: Setting, formula: KeyValueFormula) -> KeyValueRow:
    plain = _named(formula.mixer, sizes)
    label = f"{formula.mixer}(pos_dim={sizes.pos_dim})" if formula.positions else formula.mixer
    sized = _named(label, sizes)
    base, whole = (_count(ledger, each, sizes.at) for each in (plain, sized))
    params, macs = _queries_and_keys(plain, base)
    return KeyValueRow(
        mixer=label,
        printed=formula.printed,
        macs_text=formula.macs_text,
        params_text=formula.params_text,
        macs=formula.macs(sizes.at, sizes.dim, sizes.pos_dim),
        params=formula.params(sizes.dim, sizes.pos_dim),
        macs_counted=macs + whole.macs - base.macs,
        params_counted=params + _weights(whole) - _weights(base),
        biases=whole.biases,
        macs_total=whole.macs,
        params_total=whole.params,
    )


def _queries_and_keys(sized: SizedMixer, count: Counted) -> tuple[int, int]:
    """Take the share of V out of the joint projection's parameters and multiply-adds."""
    cls = get_mixer_class(sized.name)
    if not issubclass(cls, MapMixer) or cls.joint is None:
        raise UserError(f"mixer {sized.label!r} has no joint projection of its roles")
    params, macs = count.layers[cls.joint]
    kept = len([role for role in cls.roles if role != "v"])
    return params * kept // len(cls.roles), macs * kept // len(cls.roles)


def with_papers(study: Complexity, *, pos_dim: int = 50) -> Complexity:
    """Put the papers' formulas and what they print next to a study's counts."""
    study = replace(study, setting=replace(study.setting, pos_dim=pos_dim))
    ledger, printed = Ledger(), {formula.mixer: formula for formula in TABLE_6}

    def point(found: RatioPoint) -> RatioPoint:
        formula = printed.get(found.mixer)
        if formula is None:
            return found
        return replace(found, formula=float(formula.ratio(found.tokens, found.dim)))

    def weights(row: WeightRow) -> WeightRow:
        formula = printed.get(row.mixer)
        if formula is None:
            return row
        return replace(
            row,
            printed=formula.printed,
            printed_sharing=formula.sharing,
            printed_dynamic=formula.dynamic,
        )

    return replace(
        study,
        formulas=formula_rows(ledger, study.setting),
        by_tokens=tuple(map(point, study.by_tokens)),
        by_dim=tuple(map(point, study.by_dim)),
        weights=tuple(map(weights, study.weights)),
        key_value=key_value_rows(ledger, study.setting),
        orders=order_rows(study.setting),
    )


def main(argv: list[str]) -> int:
    """Print the tables; return 1 if a formula is not what is counted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=256, help="width D of the tokens")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--at", type=int, default=256, help="tokens N of the tables")
    parser.add_argument("--pos-dim", type=int, default=50, help="channels of the code of positions")
    given = parser.parse_args(argv)
    counted = complexity(dim=given.dim, num_heads=given.heads, at=given.at, tokens=())
    study = with_papers(counted, pos_dim=given.pos_dim)
    for table in tables(study):
        if table.key in TABLES:
            sys.stdout.write(f"{table.title}\n\n{table.markdown()}\n")
    return int(any(row.disagree for row in (*study.formulas, *study.orders)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
