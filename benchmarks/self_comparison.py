# SPDX-License-Identifier: Apache-2.0
"""How often the test of latencies calls a model different from itself, and from a slower one.

    python benchmarks/self_comparison.py
    python benchmarks/self_comparison.py --busy 2

Small ViTs are measured in turns with themselves, with a copy of themselves and with a ViT of 1.3
times as many blocks, each ``--count`` times, as ``keymix swap`` measures a model and its original.
With ``--busy N`` next to N processes that do nothing but count, which this script starts and ends.
Of 100 comparisons of a model with itself or its copy at most 2 may be called different (exit code 1
if more than 2 % are): the test's level is 1 %. Apart from that the machine should be idle. One of
the two ViTs is quicker than the slice that a scheduler grants, about 3 ms, so that many samples
stay undisturbed; the other is not, and next to busy processes every sample of it is disturbed.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

import keymix
from keymix.analysis.measure import measure_paired
from keymix.analysis.timing import Paired, Verdict
from keymix.swap.held_out import ROUNDS
from measured import begin, options, table

SLOWER = 1.3
DEPTHS = (6, 30)  # blocks of the models
COUNT = """
import os
parent = os.getppid()
while os.getppid() == parent:  # to end with it, however it ends
    for _ in range(10**6):
        pass
"""
VERDICTS: tuple[Verdict, ...] = ("different", "not distinguishable", "busy")


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Run processes that do nothing but count."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", COUNT])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def pairs() -> dict[tuple[int, str], tuple[nn.Module, nn.Module]]:
    """Make each model, and those that it is compared with."""
    made = {}
    for depth in DEPTHS:
        torch.manual_seed(0)
        base, slower = (
            keymix.create_model("vit_nano_p2_12", num_classes=10, depth=blocks)
            for blocks in (depth, round(SLOWER * depth))
        )
        made |= {(depth, "itself"): (base, base), (depth, "slower"): (base, slower)}
        made[depth, "a copy"] = base, copy.deepcopy(base)
    return made


def main(argv: list[str] | None = None) -> int:
    """Compare, one with each in turns, so that all meet the same conditions."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--count", type=int, default=100, help="comparisons of each (default 100)")
    parser.add_argument("--busy", type=int, default=0, help="busy processes (default none)")
    given = begin(parser, argv)
    models = pairs()
    found: dict[tuple[int, str], list[Paired]] = {key: [] for key in models}
    with busy(given.busy):
        for _ in range(given.count):
            for key, (base, other) in models.items():
                found[key].append(measure_paired(base, other, (1, 12, 12), repeats=ROUNDS))
    counts = {key: Counter(each.verdict for each in paired) for key, paired in found.items()}
    rows = [
        [
            *key,
            f"{statistics.median(p.base_ms for p in each):.2f}",
            *(counts[key][verdict] for verdict in VERDICTS),
            f"{statistics.median(p.ratio for p in each):.3f}",
            f"{statistics.fmean(p.quiet_share for p in each):.0%}",
        ]
        for key, each in found.items()
    ]
    table(("blocks", "next to", "pass, ms", *VERDICTS, "ratio", "quiet"), rows, names=2)
    wrong = max(each["different"] for (_, name), each in counts.items() if name != "slower")
    return int(wrong > math.ceil(0.02 * given.count))


if __name__ == "__main__":
    raise SystemExit(main())
