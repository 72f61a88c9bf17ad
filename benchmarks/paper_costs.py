# SPDX-License-Identifier: Apache-2.0
"""The papers' tables of cost, each formula next to what is counted of the mixer itself.

    python benchmarks/paper_costs.py
    python benchmarks/paper_costs.py --dim 768 --heads 12 --at 196
    python benchmarks/paper_costs.py --sides 10-200:10

Prints, as Markdown, Tables 6 and 7 of Static Key Attention in Vision, Table 1 of key-value
attention, and Tables 1 and 8 of QKFormer; docs/analyze.md holds the output. Every formula of Table
6 and of QKFormer's Table 1 is compared with counts at all sizes of the study's figure; the exit
code is 1 if one differs. Memory is measured at the ``--sides`` of QKFormer's Table 8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

import torch

from keymix.analysis.counting import Count
from keymix.analysis.mixer_alone import (
    GLOBAL,
    NOT_SHARED,
    SizedMixer,
    Work,
    counted,
    make,
    near_square,
    sized_mixers,
    work,
)
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class
from keymix.mixers.spec import parse_mixer
from keymix.report.tables import Column, Table
from keymix.studies.complexity.measure import complexity
from keymix.studies.complexity.result import Complexity, Setting
from keymix.studies.memory.measure import memory_growth
from keymix.studies.memory.result import MemoryGrowth
from keymix.studies.study import whole_numbers
from measured import begin, options

Taken = Callable[[int, int], Work]


class Formula(NamedTuple):
    """A row of SKA Table 6 with its row of Table 7, from tokens N and width D."""

    mixer: str
    printed: str
    macs: str  # multiply-adds
    params: str  # weights
    ratio: str  # multiply-adds a weight
    sharing: str  # Table 7, "Weight Sharing"
    dynamic: int  # Table 7, "Dynamic Weights"; its "No" is 0


TABLE_6 = (
    Formula("sep_conv", "SepConv", "N(9D + 2D²)", "9D + 2D²", "N", GLOBAL, 0),
    Formula("softmax", "Self-Attn", "N(2ND + 4D²)", "4D²", "N + N²/(2D)", NOT_SHARED, 2),
    Formula("static_key", "SKA", "N(2ND + 3D²)", "ND + 3D²", "N + N²/(N + 3D)", NOT_SHARED, 1),
    Formula("conv_static_key", "CSKA", "N(10ND + 3D²)", "9ND + 3D²", "N + N²/(9N + 3D)", GLOBAL, 1),
)
"""Tables 6 and 7 of Static Key Attention in Vision, https://arxiv.org/abs/2412.07049, Sec. 6.4."""

KEY_VALUE_TABLE_1 = (
    ("softmax", "QKV", "2nd²", "2d²"),
    ("key_value", "KV", "nd²", "d²"),
    ("key_value(pos_dim=50)", "KV+pos", "nd² + n²m", "d² + m"),
)
"""Table 1 of https://doi.org/10.1007/978-3-658-47422-5_71, after https://arxiv.org/abs/2305.19129.

Only the projections of Q and K and the code of positions are counted: the product of queries and
keys, V and the output projection are left out.
"""
POS_DIM = 50  # channels m of the code of positions


class Order(NamedTuple):
    """A row of QKFormer's Table 1, and what the attention of our mixer takes exactly."""

    mixer: str
    printed: str
    time: str  # complexity as printed
    space: str  # the same; empty where the paper gives none
    macs: str  # multiply-adds of matrix products from N, D and heads h
    entries: str  # numbers added up, masked or scaled entry by entry
    formed: str  # numbers formed between the roles and what is gathered


TABLE_1 = (
    Order("softmax", "VSA", "O(N²D)", "O(N² + ND)", "2N²D", "hN²", "3hN²"),
    Order(
        *("spiking_self(order=quadratic)", "SSA", "O(N²D)", "O(N² + ND)"),
        *("2N²D", "ND", "hN² + ND"),
    ),
    Order(
        *("spiking_self(order=linear)", "SSA, Sec. 3.2", "O(ND²)", ""),
        *("2ND²/h", "ND", "D²/h + ND"),
    ),
    Order("spike_driven", "SDSA", "O(ND)", "O(ND)", "0", "3ND", "ND + D"),
    Order("qk_token", "QKTA", "O(D)", "O(N)", "0", "2ND", "hN"),
    Order("qk_channel", "QKCA", "O(N)", "O(D)", "0", "2ND", "D"),
)
"""Table 1 of QKFormer, https://arxiv.org/abs/2403.16552; N tokens, D channels, h heads of ours."""


TABLE_8: dict[int, tuple[float, float, float]] = {
    10: (0.10, 0.14, 1.37),
    20: (0.40, 1.00, 2.53),
    30: (0.89, 3.97, 4.46),
    40: (1.58, 12.19, 7.71),
    50: (2.47, 26.44, 10.70),
    60: (3.56, 53.52, 15.04),
    70: (4.84, 97.64, 20.17),
    80: (6.32, 162.50, 25.70),
    90: (8.18, 258.19, 31.55),
    100: (10.35, 391.77, 37.85),
    110: (12.14, 570.69, 47.01),
    120: (14.23, 806.06, 56.66),
    130: (16.70, 1107.50, 66.33),
    140: (20.22, 1485.14, 73.43),
    150: (22.26, 1954.03, 87.79),
    160: (26.29, 2525.00, 96.03),
    170: (28.55, 3214.30, 112.57),
    180: (32.37, 4036.88, 124.71),
    190: (36.41, 5007.25, 137.51),
    200: (40.46, 6143.06, 151.84),
}
"""Table 8 of QKFormer: "M" of QKTA and of SSA, and their quotient, by sqrt(N).

At C = 256, T = B = 1, float32. The numbers fit MiB.
"""


def value(formula: str, **letters: int) -> Fraction:
    """Compute a formula as it is printed, such as ``N(2ND + 4D²)``."""
    product = re.sub(r"(?<=[\w²)])(?=[A-Za-z(])", "*", formula).replace("²", "**2")
    names = {letter: Fraction(number) for letter, number in letters.items()}
    return Fraction(eval(product, {"__builtins__": {}}, names))


def gives(formula: str, **letters: int) -> str:
    """Write a formula and what it gives: ``N(2ND + 4D²) = 100,663,296``."""
    number = value(formula, **letters)
    text = f"{int(number):,}" if number.denominator == 1 else f"{float(number):,.1f}"
    return f"{formula} = {text.removesuffix('.0')}"


def sites(sizes: Setting) -> list[tuple[int, int]]:
    """List the pairs of N and D of the tables and of the figure."""
    pairs = [(sizes.at, sizes.dim), *((n, sizes.dim) for n in sizes.sweep_tokens)]
    return list(dict.fromkeys([*pairs, *((sizes.at, d) for d in sizes.sweep_dims)]))


def agreeing(sizes: Setting, equal: Callable[[int, int], bool]) -> str:
    """Count the pairs of N and D where a formula is what is counted."""
    pairs = sites(sizes)
    return f"{sum(equal(n, d) for n, d in pairs)} of {len(pairs)}"


class Counted(NamedTuple):
    """What one of the papers' mixers costs, without biases that options switch off."""

    whole: Count
    biases: int  # that no option switches off

    @property
    def weights(self) -> int:
        """Return the parameters without any biases."""
        return self.whole.params - self.biases


def count(sized: SizedMixer, tokens: int, dim: int) -> Counted:
    """Count one of the papers' mixers."""
    return _count(*(sized.label, sized.num_heads), tokens, dim)


@cache
def _count(label: str, num_heads: int, tokens: int, dim: int) -> Counted:
    (sized,) = sized_mixers(label, dim=dim, num_heads=num_heads)
    arguments = sized.arguments(near_square(tokens), biases=False)
    with torch.device("meta"):
        named = [*make(**arguments).named_parameters()]
    biases = sum(p.numel() for name, p in named if name.rpartition(".")[2].endswith("bias"))
    return Counted(counted(arguments), biases)


def sized_mixer(name: str, sizes: Setting) -> SizedMixer:
    """Name a mixer at the width and the heads of the tables."""
    return sized_mixers(name, dim=sizes.dim, num_heads=sizes.num_heads)[0]


def formulas(sizes: Setting) -> Table:
    """Compare Table 6 with counts at the tables' site and all of the figure's."""
    columns = (
        Column("mixer", "mixer", "name"),
        Column("in the paper", "printed"),
        Column("multiply-adds by formula", "macs"),
        Column("counted", "macs_counted", "whole"),
        Column("parameters by formula", "params"),
        Column("counted", "params_counted", "whole"),
        Column("biases left", "biases_left", "whole"),
        Column("multiply-adds per parameter", "ratio"),
        Column("sizes where formula = count", "sites"),
    )
    rows, at = [], {"N": sizes.at, "D": sizes.dim}
    for each in TABLE_6:
        sized = sized_mixer(each.mixer, sizes)
        here = count(sized, sizes.at, sizes.dim)

        def equal(n: int, d: int, each: Formula = each, sized: SizedMixer = sized) -> bool:
            found = count(sized, n, d)
            wanted = value(each.macs, N=n, D=d), value(each.params, N=n, D=d)
            return (found.whole.macs, found.weights) == wanted

        macs, params, ratio = (gives(text, **at) for text in (each.macs, each.params, each.ratio))
        here_so = here.whole.macs, params, here.weights, here.biases, ratio
        rows.append((each.mixer, each.printed, macs, *here_so, agreeing(sizes, equal)))
    return Table("formulas", f"SKA Table 6 at N = {sizes.at}, D = {sizes.dim}", columns, rows)


def sharing(study: Complexity) -> Table:
    """Put Table 7 next to what is read off the mixers' operations."""
    ours = study.tables["weights"]
    there = (
        Column("in the paper", "printed"),
        Column("shared there", "printed_sharing"),
        Column("dynamic there", "printed_dynamic", "whole"),
    )
    printed = {each.mixer: (each.printed, each.sharing, each.dynamic) for each in TABLE_6}
    columns = [*ours.columns[:-1], *there]  # without the reason, which only files have
    rows = [(*row[:-1], *printed.get(row[0], (None,) * 3)) for row in ours.rows]
    return replace(ours, columns=columns, rows=rows)


def key_value(sizes: Setting) -> Table:
    """Compare Table 1 of key-value attention with counts of the same parts."""
    columns = (
        Column("in the paper", "printed"),
        Column("mixer", "mixer", "name"),
        Column("multiply-adds by formula", "macs"),
        Column("counted so", "macs_counted", "whole"),
        Column("whole mixer", "macs_total", "whole"),
        Column("parameters by formula", "params"),
        Column("counted so", "params_counted", "whole"),
        Column("biases left", "biases_left", "whole"),
        Column("whole mixer", "params_total", "whole"),
    )
    rows, at = [], {"n": sizes.at, "d": sizes.dim, "m": POS_DIM}
    for mixer, printed, macs, params in KEY_VALUE_TABLE_1:
        plain = sized_mixer(mixer.partition("(")[0], sizes)
        base = count(plain, sizes.at, sizes.dim)
        whole = count(sized_mixer(mixer, sizes), sizes.at, sizes.dim)
        own_params, own_macs = queries_and_keys(plain, base.whole)
        own_macs += whole.whole.macs - base.whole.macs
        own_params += whole.weights - base.weights
        cells = own_macs, whole.whole.macs, gives(params, **at), own_params, whole.biases
        rows.append((printed, mixer, gives(macs, **at), *cells, whole.whole.params))
    here = f"N = {sizes.at}, D = {sizes.dim}, m = {POS_DIM}"
    return Table("key_value", f"Table 1 of key-value attention at {here}", columns, rows)


def queries_and_keys(sized: SizedMixer, whole: Count) -> tuple[int, int]:
    """Take the share of V out of the joint projection's parameters and multiply-adds."""
    cls = get_mixer_class(sized.name)
    assert issubclass(cls, MapMixer)
    joint = next(layer for layer in whole.layers if layer.path == cls.joint)
    kept = len([role for role in cls.roles if role != "v"])
    return joint.params * kept // len(cls.roles), joint.macs * kept // len(cls.roles)


def orders(sizes: Setting) -> Table:
    """Compare the orders of QKFormer's Table 1 with counts at all sites."""
    columns = (
        Column("in the paper", "printed"),
        Column("mixer", "mixer", "name"),
        Column("time there", "time"),
        Column("multiply-adds here", "macs"),
        Column("added, masked, scaled here", "entries"),
        Column("time grows as", "time_grows"),
        Column("space there", "space"),
        Column("formed on the way here", "formed"),
        Column("space grows as", "space_grows"),
        Column("sizes where formula = count", "sites"),
    )
    h, rows, at = sizes.num_heads, [], {"N": sizes.at, "D": sizes.dim, "h": sizes.num_heads}
    for each in TABLE_1:
        spec = parse_mixer(each.mixer)

        taken = partial(work, spec.names[0], dict(spec.options[0]), num_heads=h)

        def equal(n: int, d: int, each: Order = each, taken: Taken = taken) -> bool:
            texts = each.macs, each.entries, each.formed
            macs, entries, formed = (int(value(text, N=n, D=d, h=h)) for text in texts)
            return taken(n, d) == Work(macs=macs, entries=entries, formed=formed)

        n, d = sizes.at, sizes.dim
        grown = taken(n, d), taken(2 * n, d), taken(n, 2 * d)
        time = growth([g.macs + g.entries for g in grown])
        space = growth([g.formed for g in grown])
        macs = "none" if each.macs == "0" else gives(each.macs, **at)
        cells = each.time, macs, gives(each.entries, **at), time
        cells += each.space or None, gives(each.formed, **at), space
        rows.append((each.printed, each.mixer, *cells, agreeing(sizes, equal)))
    title = f"QKFormer Table 1, T = 1, at N = {sizes.at}, D = {sizes.dim}, h = {h}"
    return Table("orders", title, columns, rows)


def growth(at: Sequence[int]) -> str:
    """Write the exponents of N and of D, of numbers at (N, D), (2 N, D) and (N, 2 D)."""
    tokens, dim = (math.log2(more / at[0]) for more in at[1:])
    return f"N^{tokens:.2f} D^{dim:.2f}"


def memory(measured: MemoryGrowth) -> Table:
    """Put Table 8 next to the memory of attention that was measured."""
    ours = measured.tables["mixers"]
    there = (
        Column("QKTA, paper", "qkta", "mib"),
        Column("SSA, paper", "ssa", "mib"),
        Column("× in the paper", "times", "ratio"),
    )
    columns = [*ours.columns, *there]
    rows = [(*row, *TABLE_8.get(row[0], (None,) * 3)) for row in ours.rows]
    return replace(ours, columns=columns, rows=rows)


def tables(study: Complexity) -> Iterator[Table]:
    """Make the tables, at the sizes of a study and with its mixers."""
    yield formulas(study.setting)
    yield sharing(study)
    yield key_value(study.setting)
    yield orders(study.setting)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if a formula is not what is counted."""
    parser = options(__doc__)
    parser.add_argument("--dim", type=int, default=256, help="width D of the tokens")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--at", type=int, default=256, help="tokens N of the tables")
    parser.add_argument(
        "--sides", type=whole_numbers, default=(10, 20, 50), help="square roots of N"
    )
    given = begin(parser, argv)
    study = complexity(dim=given.dim, num_heads=given.heads, at=given.at, tokens=())
    wrong = False
    for table in tables(study):
        print(f"{table.title}\n\n{table.markdown()}")
        if table.key in ("formulas", "orders"):
            whole = len(sites(study.setting))
            wrong |= any(row[-1] != f"{whole} of {whole}" for row in table.rows)
    *_, measured = memory_growth("qkta,ssa,ssa(order=linear)", sides=given.sides)
    table = memory(measured)
    print(f"QKFormer Table 8, in MiB: {table.title}\n\n{table.markdown()}")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
