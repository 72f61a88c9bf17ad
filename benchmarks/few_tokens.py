# SPDX-License-Identifier: Apache-2.0
"""Whole maps against fused attention where maps are small: what ``backend="auto"`` rests on.

    python benchmarks/few_tokens.py --quick
    python benchmarks/few_tokens.py
    python benchmarks/few_tokens.py --op --threads 1
    python benchmarks/few_tokens.py --autocast

Modules, or with ``--op`` attention between the projections, are timed in turns, forward and
forward with backward. A line is one of them: the median [quartiles] of whole maps over fused
attention in the same round, and what ``auto`` takes. The last lines are what each choice costs
against the faster path, as geometric mean, and how often it is more than a tenth. Shapes whose
quartiles lie apart by more than 1.6 are left out of them: other programs disturbed these.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from keymix.analysis.memory import Phase
from keymix.analysis.timing import Pass, Turns, compare
from keymix.mixers.map_mixer import MapMixer
from machine import machine
from performance import PHASES, Row, Shape, _passing, build, takes

MIXERS = ("softmax", "static_key", "static_key(key_grid=1/4)", "static_key(key_grid=1/16)")
LARGEST_MAP, LARGEST_INPUT = 16 * 2**18, 64 * 64 * 384  # entries
STEADY, SLOW = 1.6, 1.1


class Measured(NamedTuple):
    """Whole maps over fused attention at a shape, and whether ``auto`` takes them."""

    ratio: float
    steady: bool
    whole: bool


def shapes(*, quick: bool) -> list[tuple[str, Shape]]:
    """List what is measured, in random order."""
    sides, batches = ((4,), (2,)) if quick else ((7, 8, 12, 14, 20, 28), (1, 4, 16, 64))
    found = []
    for side, (heads, width), batch in itertools.product(sides, ((4, 32), (6, 64)), batches):
        shape = Shape(side, heads * width, heads, batch)
        for mixer in MIXERS:
            share = 1 if "/" not in mixer else int(mixer.rstrip(")").split("/")[1])
            entries = batch * heads * side**4 // share
            if entries <= LARGEST_MAP and batch * side**2 * shape.dim <= LARGEST_INPUT:
                found.append((mixer, shape))
    random.Random(0).shuffle(found)
    return found


def measured(mixer: str, shape: Shape, phase: Phase, *, op: bool, rounds: int) -> Measured:
    """Time both paths at a shape, and print them."""
    rows: list[Row] = [(mixer, path) for path in ("sdpa", "reference")]
    modules = {row[1]: build(row, shape, projected=not op).make() for row in rows}
    training = phase == "training"
    calls = {name: _passing(m.train(training), shape, phase) for name, m in modules.items()}
    turns = Turns({name: Pass(call) for name, call in calls.items()})
    for _ in range(rounds):
        turns.round()
    fused, whole = (turns.samples[name] for name in modules)
    found = compare(fused, whole)
    auto = takes(modules["sdpa"], shape, training=training)
    made = modules["sdpa"].get_submodule("mixer")
    assert isinstance(made, MapMixer)
    entries = shape.batch * shape.heads * shape.tokens * made.site.num_keys
    print(
        f"{phase:9} {mixer:26} {shape!s:22} width {shape.dim // shape.heads} {entries:9,} "
        f"{found.ratio:.2f} [{found.ratio_q1:.2f}, {found.ratio_q3:.2f}] {auto}",
        flush=True,
    )
    steady = found.ratio_q3 <= STEADY * found.ratio_q1
    return Measured(found.ratio, steady=steady, whole=auto == "reference")


def regret(found: list[Measured], whole: Callable[[Measured], bool]) -> str:
    """Write what a choice costs against the faster path."""
    costs = [(each.ratio if whole(each) else 1.0) / min(1.0, each.ratio) for each in found]
    mean = math.exp(math.fsum(map(math.log, costs)) / len(costs))
    slow = sum(cost > SLOW for cost in costs)
    return f"{mean:.3f} on average, above {SLOW} at {slow} of {len(costs)}"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--op", action="store_true", help="without projections")
    parser.add_argument("--autocast", action="store_true", help="to bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    print(machine(args.threads))
    torch.empty(31 * 2**18).fill_(0)  # as in any process with larger tensors, malloc keeps memory
    narrow = torch.autocast("cpu", torch.bfloat16) if args.autocast else contextlib.nullcontext()
    with narrow:
        found = [
            measured(mixer, shape, phase, op=args.op, rounds=args.rounds)
            for mixer, shape in shapes(quick=args.quick)
            for phase in PHASES.values()
        ]
    kept = [each for each in found if each.steady] or found
    print(f"{len(kept)} of {len(found)} steady")
    print(f"fused: {regret(kept, lambda each: False)}")
    print(f"auto:  {regret(kept, lambda each: each.whole)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
