# SPDX-License-Identifier: Apache-2.0
"""How often the test of latencies calls a model different from itself, and from a slower one.

    python benchmarks/self_comparison.py
    python benchmarks/self_comparison.py --busy 2
    python benchmarks/self_comparison.py --busy 2 --count 20 --depths 10 --json

Small ViTs are measured in turns with themselves, with a copy of themselves and with a ViT of 1.3
times as many blocks, each ``--count`` times, as ``keymix swap`` measures a model and its original.
With ``--busy N`` next to N processes that do nothing but count, which this script starts and ends.
Of 100 comparisons of a model with itself or its copy at most 2 may be called different (exit code 1
if more than 2 % are): the test's level is 1 %. Apart from that the machine should be idle. One of
the two ViTs is quicker than the slice that a scheduler grants, about 3 ms, so that many samples
stay undisturbed; the other is not, and next to busy processes every sample of it is disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import keymix
from keymix.analysis.measure import measure_paired
from keymix.analysis.timing import Paired, quartiles
from keymix.swap.search import ROUNDS

SIZE = (1, 12, 12)
SLOWER = 1.3
COUNT = """
import os
parent = os.getppid()
while os.getppid() == parent:  # to end with it, however it ends
    for _ in range(10**6):
        pass
"""
VERDICTS = ("different", "not distinguishable", "busy")
LINE = "{:<6} {:<8} {:>8} {:>5} {:>10} {:>20} {:>5} {:>22} {:>22} {:>7} {:>9}"
HEADS = (
    *("blocks", "next to", "pass, ms", "count", "different", "not distinguishable", "busy"),
    *("ratio [quartiles]", "called different", "quiet", "seconds"),
)


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Run processes that do nothing but count."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        while len(started) < number:
            started.append(subprocess.Popen([sys.executable, "-c", COUNT]))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def models(depth: int) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Make the model, and those that it is compared with."""
    torch.manual_seed(0)
    base = keymix.create_model("vit_nano_p2_12", num_classes=10, depth=depth)
    slower = keymix.create_model("vit_nano_p2_12", num_classes=10, depth=round(SLOWER * depth))
    return base, {"itself": base, "a copy": copy.deepcopy(base), "slower": slower}


def row(depth: int, name: str, found: list[Paired], seconds: float) -> dict[str, Any]:
    """Summarise the comparisons with one model."""
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in VERDICTS}
    called = [each.ratio for each in found if each.verdict == "different"]
    return {
        "blocks": depth,
        "next_to": name,
        "ms": statistics.median(each.base_ms for each in found),
        "count": len(found),
        **counts,
        "ratio": quartiles([each.ratio for each in found]),
        "called": [min(called), max(called)] if called else None,
        "quiet": statistics.fmean(each.quiet_share for each in found),
        "seconds": seconds,
    }


def bench(depths: list[int], count: int) -> list[dict[str, Any]]:
    """Compare, one with each in turns, so that all meet the same conditions."""
    made = {depth: models(depth) for depth in depths}
    pairs = {
        (depth, name): (base, other)
        for depth, (base, others) in made.items()
        for name, other in others.items()
    }
    found: dict[tuple[int, str], list[Paired]] = {key: [] for key in pairs}
    seconds = dict.fromkeys(pairs, 0.0)
    for _ in range(count):
        for key, (base, other) in pairs.items():
            start = time.perf_counter()
            found[key].append(measure_paired(base, other, SIZE, repeats=ROUNDS))
            seconds[key] += time.perf_counter() - start
    return [row(*key, each, seconds[key]) for key, each in found.items()]


def report(rows: list[dict[str, Any]]) -> None:
    """Print one line for each model."""
    print(LINE.format(*HEADS))
    for each in rows:
        low, middle, high = each["ratio"]
        called = "-" if each["called"] is None else "{:.3f} to {:.3f}".format(*each["called"])
        print(
            LINE.format(
                each["blocks"],
                each["next_to"],
                f"{each['ms']:.2f}",
                each["count"],
                *(each[verdict] for verdict in VERDICTS),
                f"{middle:.3f} [{low:.3f}, {high:.3f}]",
                called,
                f"{each['quiet']:.0%}",
                f"{each['seconds']:.0f}",
            )
        )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="comparisons of each (default 100)")
    parser.add_argument("--busy", type=int, default=0, help="busy processes (default none)")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[6, 30], help="blocks of the models (default 6 30)"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    with busy(args.busy):
        rows = bench(args.depths, args.count)
    if args.json:
        print(json.dumps({"busy": args.busy, "threads": args.threads, "rows": rows}))
    else:
        print(
            f"keymix {keymix.__version__}, torch {torch.__version__}, {args.threads} thread(s), "
            f"{ROUNDS} rounds, {args.busy} busy processes\n"
        )
        report(rows)
    wrong = max(each["different"] for each in rows if each["next_to"] != "slower")
    return int(wrong > math.ceil(0.02 * args.count))


if __name__ == "__main__":
    raise SystemExit(main())
