# SPDX-License-Identifier: Apache-2.0
"""Latency and peak memory of every dense mixer next to softmax attention, fused and reference.

    python benchmarks/mixers.py
    python benchmarks/mixers.py --tokens 784 --mixers static_key 'static_key(key_grid=1/16)'

All mixers are timed in turns in one process, at batch 1; peak memory is the growth of a fresh
process over forward and backward of a batch of 8. A ratio below 1 is faster, or smaller, than fused
softmax attention. One of latencies is given where a paired test shows a difference (1 % for all
mixers at one number of tokens): n.d. is not distinguishable, busy is a machine that was too busy to
tell, few is too few rounds. Twelve are the fewest that can show one for 14 mixers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keymix.analysis.measure import measure_interleaved
from keymix.analysis.memory import Build
from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, list_mixers
from keymix.mixers.spec import parse_mixer
from measured import begin, options, table

BASELINE = "softmax"
DIM, HEADS, BATCH = 128, 4, 8


def builds(tokens: int, mixers: Sequence[str]) -> dict[str, Build]:
    """Say how each mixer is made; those that ``auto`` fuses stand a second time, not fused."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise UserError(f"--tokens {tokens}: give squares, since tokens lie on a square grid")
    made = {}
    for text in dict.fromkeys([BASELINE, *mixers]):
        spec = parse_mixer(text)
        site: dict[str, Any] = {"dim": DIM, "num_heads": HEADS, "grid": [side, side]}
        site = {"name": spec.names[0], **site, **dict(spec.options[0])}
        made[text] = Build(factory="keymix.mixers.registry:create_mixer", kwargs=site)
        mixer = create_mixer(**site)
        if isinstance(mixer, MapMixer) and mixer.choose_backend().name != "reference":
            site = {**site, "backend": "reference"}
            made[f"{text} (reference)"] = Build(factory=made[text].factory, kwargs=site)
    return made


def rows(made: Mapping[str, Build], tokens: int, repeats: int) -> Iterator[list[str]]:
    """Measure the mixers at one number of tokens."""
    costs = measure_interleaved(
        made, (tokens, DIM), batch_size=BATCH, repeats=repeats, baseline=BASELINE
    )
    base = costs[BASELINE].peak_training_mib
    for name, cost in costs.items():
        quartiles = f"{cost.latency_ms:.3f} [{cost.latency_q1_ms:.3f}, {cost.latency_q3_ms:.3f}]"
        times = "1.00" if cost.against is None else cost.against.ratio_text()
        mib = cost.peak_training_mib
        memory = [f"{mib:.1f}", f"{mib / base:.2f}"] if mib and base else [cost.peak_note, ""]
        yield [name, quartiles, times, *memory]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 784], help="squares")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    dense = list_mixers(domain="dense")
    parser.add_argument("--mixers", nargs="+", default=dense, help="name, or name(option=value)")
    given = begin(parser, argv)
    for tokens in given.tokens:
        print(f"\n{tokens} tokens, width {DIM}, {HEADS} heads")
        made = builds(tokens, given.mixers)
        heads = ("mixer", "latency, ms [quartiles]", "ratio", "peak, MiB", "ratio")
        table(heads, rows(made, tokens, given.repeats))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
