# SPDX-License-Identifier: Apache-2.0
"""What dropping the query saves in SETR: latency, throughput and memory next to multiply-adds.

    python benchmarks/setr_kv.py
    python benchmarks/setr_kv.py --models setr_qkv setr_kv --size 112 --repeats 10

Each encoder of the KV paper's Table 2 with softmax attention and with key-value attention, timed
in turns in one process, at batch 1 for latency and at ``--batch`` for throughput; peak memory is
the growth of a fresh process over a forward pass, and over forward and backward, of one batch.
Ratios are to the same encoder with softmax attention: below 1 is faster, or smaller. One of
latencies is given where a paired test shows a difference (1 % an encoder): n.d. is not
distinguishable, busy is a machine that was too busy to tell, few is less than ten rounds.
"""

from __future__ import annotations

import argparse

import torch

import keymix
from keymix.analysis.counting import count
from keymix.analysis.measure import Cost, measure_models
from keymix.analysis.memory import Build
from keymix.models.match import trainable
from machine import machine

BASELINES = {
    "setr_kv": "setr_qkv",
    "setr_kv_pos": "setr_qkv",
    "setr_kv_ce": "setr_qkv_ce",
    "setr_kv_cvt": "setr_qkv_cvt",
}
ENCODERS = (
    ("setr_qkv", "setr_kv", "setr_kv_pos"),
    ("setr_qkv_ce", "setr_kv_ce"),
    ("setr_qkv_cvt", "setr_kv_cvt"),
)
PRINTED = {  # multiply-adds of Table 2 in G
    "setr_qkv": 21.07,
    "setr_kv": 19.68,
    "setr_kv_pos": 19.97,
    "setr_qkv_ce": 25.02,
    "setr_kv_ce": 23.68,
    "setr_qkv_cvt": 9.86,
    "setr_kv_cvt": 9.49,
}
HEADS = (
    *("model", "params", "MACs", "paper's", "latency ms", "[quartiles]", "latency"),
    *("images/s", "memory MiB", "memory", "training MiB", "training"),
)
LINE = "{:<13} {:>7} {:>6} {:>8} {:>11} {:>19} {:>8} {:>9} {:>11} {:>7} {:>13} {:>9}"


def ratio(value: float | None, base: float | None) -> str:
    """Return a quotient in digits; a dash where either is unknown."""
    return "-" if value is None or not base else f"{value / base:.3f}"


def report(costs: dict[str, Cost], sizes: dict[str, tuple[int, int]]) -> None:
    """Print one line per model; columns named after a measure alone are ratios."""
    for name, cost in costs.items():
        first = BASELINES.get(name, name)
        base, (params, macs) = costs[first], sizes[name]
        memory, training = cost.peak_inference_mib, cost.peak_training_mib
        print(
            LINE.format(
                name,
                ratio(params, sizes[first][0]),
                ratio(macs, sizes[first][1]),
                ratio(PRINTED[name], PRINTED[first]),
                f"{cost.latency_ms:.1f}",
                f"[{cost.latency_q1_ms:.1f}, {cost.latency_q3_ms:.1f}]",
                "1.000" if cost.against is None else cost.against.ratio_text(3),
                ratio(cost.images_per_s, base.images_per_s),
                "-" if memory is None else f"{memory:.1f}",
                ratio(memory, base.peak_inference_mib),
                "-" if training is None else f"{training:.1f}",
                ratio(training, base.peak_training_mib),
            )
        )
    print(f"  memory: {next(iter(costs.values())).peak_note}")


def sizes_of(names: list[str], shape: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Return parameters and multiply-adds of models, without building them in memory."""
    found = {}
    for name in names:
        with torch.device("meta"):
            model = keymix.create_model(name, img_size=shape[1:])
        found[name] = (trainable(model), count(model, shape).macs)
    return found


def bench(names: list[str], size: int, *, batch: int, repeats: int, threads: int) -> None:
    """Measure the models of one encoder in turns and print them."""
    shape = (3, size, size)
    builds = {name: Build(kwargs={"name": name, "img_size": size}) for name in names}
    costs = measure_models(
        builds, shape, batch_size=batch, repeats=repeats, threads=threads, baseline=names[0]
    )
    report(costs, sizes_of(names, shape))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(PRINTED), default=list(PRINTED))
    parser.add_argument("--size", type=int, default=224, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=4, help="images per batch (default 4)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    print(machine(args.threads))
    print(f"images of {args.size}x{args.size}, batch {args.batch}, {args.repeats} rounds\n")
    print(LINE.format(*HEADS))
    for row in ENCODERS:
        names = [name for name in row if name in args.models]
        if names and row[0] not in names:
            parser.error(f"--models {names[0]}: give {row[0]} too, which it is compared with")
        if names:
            bench(names, args.size, batch=args.batch, repeats=args.repeats, threads=args.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
