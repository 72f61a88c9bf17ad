# SPDX-License-Identifier: Apache-2.0
"""Attention whose maps are formed a block of rows at a time, against whole maps, on a CPU.

    python benchmarks/blocked_attention.py
    python benchmarks/blocked_attention.py --case conv_static_key:28:128:4:8 --rounds 9

Times of a forward pass and of forward and backward, in turns in one process, as ratios of the
reference in the same round: median [quartiles]. Peak memory is what a fresh process grows by.
``softmax`` is PyTorch's fused attention of the same width. A case is mixer:side:dim:heads:batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from keymix.analysis.memory import Build, peak_memory
from mixers import machine

CASES = (
    "conv_static_key:56:128:4:2",
    "conv_static_key:28:128:4:8",
    "conv_static_key:14:192:6:16",
    "conv_static_key:8:128:4:32",
    "re_attention:32:384:12:4",
    "re_attention:14:384:12:16",
    "re_attention:8:128:4:32",
)
PATHS = ("reference", "blocked", "softmax")


def build(case: str, path: str) -> tuple[Build, tuple[int, int], int]:
    """Say how a module is made, for which tokens ``(N, C)`` and batch."""
    name, *numbers = case.split(":")
    side, dim, heads, batch = map(int, numbers)
    kwargs: dict[str, Any] = {"dim": dim, "num_heads": heads, "grid": [side, side]}
    kwargs |= {"name": "softmax"} if path == "softmax" else {"name": name, "backend": path}
    made = Build(factory="keymix.mixers.registry:create_mixer", kwargs=kwargs)
    return made, (side * side, dim), batch


def forward(module: nn.Module, x: torch.Tensor) -> None:
    """Run the module as in evaluation."""
    with torch.inference_mode():
        module.eval()(x)


def step(module: nn.Module, x: torch.Tensor) -> None:
    """Run forward and backward as in training."""
    module.train()(x).sum().backward()
    module.zero_grad()


def seconds(run: Callable[[nn.Module, torch.Tensor], None], *args: Any) -> float:
    """Time one pass."""
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> str:
    """Write a median with its quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def timed(case: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds by pass and path; all paths in turns, another first in every round."""
    modules, found = {}, {}
    for path in PATHS:
        made, shape, batch = build(case, path)
        modules[path] = made.make()
    x = torch.randn(batch, *shape)
    for run in (forward, step):
        given = x.clone().requires_grad_(run is step)
        found[run.__name__] = {path: [] for path in PATHS}
        for turn in range(rounds + 1):
            order = PATHS[turn % len(PATHS) :] + PATHS[: turn % len(PATHS)]
            for path in order:
                taken = seconds(run, modules[path], given)
                if turn:  # the first round warms up
                    found[run.__name__][path].append(taken)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", default=CASES, help="mixer:side:dim:heads:batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    print(machine(args.threads), f"\n{args.rounds} rounds\n")
    line = "{:<28} {:<10} {:>20} {:>20} {:>10} {:>7} {:>10} {:>7}"
    heads = ("case", "path", "forward", "training", "MiB", "ratio", "MiB train", "ratio")
    print(line.format(*heads))
    for case in args.case:
        times = timed(case, args.rounds)
        builds = {path: build(case, path) for path in PATHS}
        shape, batch = next((shape, batch) for _, shape, batch in builds.values())
        peaks = peak_memory(
            {path: made for path, (made, _, _) in builds.items()},
            shape,
            batch_size=batch,
            threads=args.threads,
        )
        whole = peaks["reference"]
        for path in PATHS:
            ratios = [
                spread([t / r for t, r in zip(by[path], by["reference"], strict=True)])
                for by in times.values()
            ]
            cells = []
            for kind in ("inference_mib", "training_mib"):
                mine, theirs = getattr(peaks[path], kind), getattr(whole, kind)
                known = mine and theirs
                cells += [f"{mine:.1f}", f"1/{theirs / mine:.1f}"] if known else ["-", "-"]
            print(line.format(case, path, *ratios, *cells), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
