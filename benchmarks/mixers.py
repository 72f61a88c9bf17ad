# SPDX-License-Identifier: Apache-2.0
"""Latency and peak memory of every dense mixer next to softmax attention, fused and reference.

    python benchmarks/mixers.py
    python benchmarks/mixers.py --tokens 196 784 --dim 384 --heads 6 --mixers 'softmax' '*key*'
    python benchmarks/mixers.py --tokens 784 --mixers static_key 'static_key(key_grid=1/16)'

All mixers are timed in turns in one process, at batch 1 for latency and at ``--batch`` for
throughput; peak memory is the growth of a fresh process over forward and backward of one batch.
A ratio below 1 is faster, or smaller, than fused softmax attention. One of latencies is given where
a paired test shows a difference (1 % for all mixers at one number of tokens): n.d. is not
distinguishable, busy is a machine that was too busy to tell, few is too few rounds. Twelve are the
fewest that can show one for 14 mixers.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
from typing import Any

import torch

from keymix.analysis.counting import count
from keymix.analysis.measure import Cost, measure_interleaved, with_peak
from keymix.analysis.memory import Build, peak_memory
from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, list_mixers
from keymix.mixers.spec import parse_mixer
from machine import machine

BASELINE = "softmax"


def chosen(patterns: list[str]) -> list[str]:
    """List the mixers that patterns mean, softmax among them, and those named with options."""
    dense = list_mixers(domain="dense")
    named = [n for n in dense if n == BASELINE or any(fnmatch.fnmatch(n, p) for p in patterns)]
    return [*named, *(parse_mixer(text).label for text in patterns if "(" in text)]


def builds(tokens: int, dim: int, heads: int, patterns: list[str]) -> dict[str, Build]:
    """Say how each mixer is made; those that ``auto`` fuses stand a second time, not fused."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise UserError(f"--tokens {tokens}: give squares, since tokens lie on a square grid")
    made = {}
    for text in chosen(patterns):
        spec = parse_mixer(text)
        site: dict[str, Any] = {"dim": dim, "num_heads": heads, "grid": [side, side]}
        site = {"name": spec.names[0], **site, **dict(spec.options[0])}
        made[text] = Build(factory="keymix.mixers.registry:create_mixer", kwargs=site)
        mixer = create_mixer(**site)
        if isinstance(mixer, MapMixer) and mixer.choose_backend().name != "reference":
            made[f"{text} (reference)"] = Build(
                factory="keymix.mixers.registry:create_mixer",
                kwargs={**site, "backend": "reference"},
            )
    return made


def bench(
    made: dict[str, Build], shape: tuple[int, int], *, batch: int, repeats: int, threads: int
) -> tuple[dict[str, Cost], dict[str, int]]:
    """Measure and count the mixers at one number of tokens."""
    models = {name: build.make() for name, build in made.items()}
    costs = measure_interleaved(
        models, shape, batch_size=batch, repeats=repeats, threads=threads, baseline=BASELINE
    )
    peaks = peak_memory(made, shape, batch_size=batch, threads=threads, phases=("training",))
    return (
        {name: with_peak(cost, peaks[name]) for name, cost in costs.items()},
        {name: count(model, shape).macs for name, model in models.items()},
    )


def report(costs: dict[str, Cost], macs: dict[str, int]) -> None:
    """Print one table."""
    heads = (
        "mixer",
        "MMACs",
        "latency ms",
        "[quartiles]",
        "ratio",
        "tokens/s ratio",
        "MiB",
        "ratio",
    )
    line = "{:<36} {:>9} {:>11} {:>19} {:>7} {:>15} {:>9} {:>7}"
    print(line.format(*heads))
    base = costs[BASELINE]
    for name, cost in costs.items():
        peak = peak_ratio = "-"
        if cost.peak_mib is not None:
            peak = f"{cost.peak_mib:.1f}"
            peak_ratio = f"{cost.peak_mib / base.peak_mib:.2f}" if base.peak_mib else "-"
        print(
            line.format(
                name,
                f"{macs[name] / 1e6:.1f}",
                f"{cost.latency_ms:.3f}",
                f"[{cost.latency_q1_ms:.3f}, {cost.latency_q3_ms:.3f}]",
                "1.00" if cost.against is None else cost.against.ratio_text(),
                f"{cost.images_per_s / base.images_per_s:.2f}",
                peak,
                peak_ratio,
            )
        )
    print(f"peak memory: {base.peak_note}\n")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 784], help="squares")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="images per batch (default 8)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--mixers",
        nargs="+",
        default=["*"],
        help="patterns, or name(option=value)",
    )
    args = parser.parse_args(argv)
    print(machine(args.threads))
    print(f"width {args.dim}, {args.heads} heads, batch {args.batch}, {args.repeats} rounds\n")
    for tokens in args.tokens:
        made = builds(tokens, args.dim, args.heads, args.mixers)
        print(f"{tokens} tokens")
        report(
            *bench(
                made,
                (tokens, args.dim),
                batch=args.batch,
                repeats=args.repeats,
                threads=args.threads,
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
