# SPDX-License-Identifier: Apache-2.0
"""Whole maps against fused attention where maps are small: what ``backend="auto"`` rests on.

    python benchmarks/few_tokens.py
    python benchmarks/few_tokens.py --threads 1 --rounds 1
    python benchmarks/few_tokens.py --autocast --rounds 1

Modules are timed in turns, forward and forward with backward. A row has the median [quartiles],
over the sizes, of the time of whole maps over that of fused attention in the same round. The last
lines are what each choice costs against the faster path, as geometric mean, and how often it is
more than a tenth. Shapes whose quartiles lie apart by more than 1.6 are left out: other programs
disturbed these.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from keymix.analysis.timing import compare, quartiles
from measured import begin, in_turns, options, table
from performance import PHASES, Shape, build, entries, passing, takes

MIXERS = ("softmax", "static_key", "static_key(key_grid=1/4)", "static_key(key_grid=1/16)")
SIDES, BATCHES, WIDTHS = (7, 8, 12, 14, 20, 28), (1, 4, 16, 64), ((4, 32), (6, 64))
BINS = (49_152, 2**20, 2**21, 2**22)  # entries of the maps of a batch, up to so many
LARGEST_INPUT = 64 * 64 * 384  # entries
STEADY, SLOW = 1.6, 1.1


class Measured(NamedTuple):
    """Whole maps over fused attention at a shape, and whether ``auto`` takes them."""

    phase: str
    entries: int
    ratio: float
    steady: bool
    whole: bool


def measured(mixer: str, shape: Shape, rounds: int) -> list[Measured]:
    """Time both paths at a shape, unless its maps are too large."""
    builds = {path: build((mixer, path), shape, projected=True) for path in ("sdpa", "reference")}
    modules = {path: made.make() for path, made in builds.items()}
    size, found = entries(modules["sdpa"], shape), []
    if size > BINS[-1] or shape.batch * shape.tokens * shape.dim > LARGEST_INPUT:
        return []
    for name, phase in PHASES.items():
        calls = {path: passing(module, shape, phase) for path, module in modules.items()}
        samples = in_turns(calls, rounds=rounds, what=f"{mixer}, {shape}, {name}")
        paired = compare(samples["sdpa"], samples["reference"])
        steady = paired.ratio_q3 <= STEADY * paired.ratio_q1
        auto = takes(modules["sdpa"], shape, training=name == "training")
        found.append(Measured(name, size, paired.ratio, steady, auto == "reference"))
    return found


def rows(found: Sequence[Measured]) -> Iterator[list[str]]:
    """Sum up the sizes, by the entries of their maps."""
    for low, high in itertools.pairwise((0, *BINS)):
        here = [each for each in found if low < each.entries <= high]
        ratios = [[each.ratio for each in here if each.phase == phase] for phase in PHASES]
        if all(ratios):
            spreads = [quartiles(each) for each in ratios]
            yield [f"to {high:,}", *(f"{mid:.2f} [{q1:.2f}, {q3:.2f}]" for q1, mid, q3 in spreads)]


def regret(found: Sequence[Measured], whole: Callable[[Measured], bool]) -> str:
    """Write what a choice costs against the faster path."""
    costs = [(each.ratio if whole(each) else 1.0) / min(1.0, each.ratio) for each in found]
    mean = math.exp(math.fsum(map(math.log, costs)) / len(costs))
    slow = sum(cost > SLOW for cost in costs)
    return f"{mean:.3f} on average, above {SLOW} at {slow} of {len(costs)}"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--autocast", action="store_true", help="to bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, help="of the grid of tokens")
    given = begin(parser, argv)
    torch.empty(31 * 2**18).fill_(0)  # as in any process with larger tensors, malloc keeps memory
    narrow = torch.autocast("cpu", torch.bfloat16) if given.autocast else contextlib.nullcontext()
    cases = list(itertools.product(MIXERS, given.sides, WIDTHS, BATCHES))
    random.Random(0).shuffle(cases)
    found = []
    with narrow:
        for mixer, side, (heads, width), batch in cases:
            found += measured(mixer, Shape(side, heads * width, heads, batch), given.rounds)
    kept = [each for each in found if each.steady] or found
    table(("entries", *PHASES), rows(kept))
    print(f"{len(kept)} of {len(found)} steady")
    print(f"fused: {regret(kept, lambda each: False)}")
    print(f"auto:  {regret(kept, lambda each: each.whole)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
