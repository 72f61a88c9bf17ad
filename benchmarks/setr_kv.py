# SPDX-License-Identifier: Apache-2.0
"""What dropping the query saves in SETR: latency, throughput and memory next to multiply-adds.

    python benchmarks/setr_kv.py

Each encoder of the KV paper's Table 2 with softmax attention and with key-value attention, timed
in turns in one process, at batch 1 for latency and at batch 4 for throughput; peak memory is
the growth of a fresh process over a forward pass, and over forward and backward, of one batch.
Ratios are to the same encoder with softmax attention: below 1 is faster, or smaller. One of
latencies is given where a paired test shows a difference (1 % an encoder): n.d. is not
distinguishable, busy is a machine that was too busy to tell, few is less than ten rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

import keymix
from keymix.analysis.counting import count
from keymix.analysis.measure import measure_interleaved
from keymix.analysis.memory import Build
from keymix.models.match import trainable
from measured import begin, options, table

ENCODERS = {
    "vit": ("setr_qkv", "setr_kv", "setr_kv_pos"),
    "ce": ("setr_qkv_ce", "setr_kv_ce"),
    "cvt": ("setr_qkv_cvt", "setr_kv_cvt"),
}
HEADS = (
    *("model", "parameters", "multiply-adds", "latency, ms [quartiles]", "latency"),
    *("images/s", "memory", "memory, training"),
)


def ratio(value: float | None, base: float | None) -> str:
    """Return a quotient in digits; a dash where either is unknown."""
    return "-" if value is None or not base else f"{value / base:.3f}"


def sizes(name: str, size: int) -> tuple[int, int]:
    """Count parameters and multiply-adds, without building the model in memory."""
    with torch.device("meta"):
        model = keymix.create_model(name, img_size=size)
    return trainable(model), count(model, (3, size, size)).macs


def rows(names: Sequence[str], size: int, repeats: int) -> Iterator[list[str]]:
    """Measure the models of one encoder in turns; columns named after a measure are ratios."""
    builds = {name: Build(kwargs={"name": name, "img_size": size}) for name in names}
    costs = measure_interleaved(
        builds, (3, size, size), batch_size=4, repeats=repeats, baseline=names[0]
    )
    base, counted = costs[names[0]], sizes(names[0], size)
    for name, cost in costs.items():
        yield [
            name,
            *(ratio(own, of) for own, of in zip(sizes(name, size), counted, strict=True)),
            f"{cost.latency_ms:.1f} [{cost.latency_q1_ms:.1f}, {cost.latency_q3_ms:.1f}]",
            "1.000" if cost.against is None else cost.against.ratio_text(3),
            ratio(cost.images_per_s, base.images_per_s),
            ratio(cost.peak_inference_mib, base.peak_inference_mib),
            ratio(cost.peak_training_mib, base.peak_training_mib),
        ]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--size", type=int, default=224, help="side of the images, pixels")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--encoders", nargs="*", choices=ENCODERS, default=[*ENCODERS])
    given = begin(parser, argv)
    names = (ENCODERS[each] for each in given.encoders)
    table(HEADS, (row for each in names for row in rows(each, given.size, given.repeats)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
