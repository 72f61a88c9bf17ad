# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of every dense mixer next to softmax attention, fused and reference.

    python benchmarks/mixers.py
    python benchmarks/mixers.py --tokens 784 --mixers static_key 'static_key(key_grid=1/16)'

All mixers are timed in turns in one process, at batch 1: a forward pass in inference mode, and a
training step, forward and backward with gradients of tokens and weights. Peak memory is the growth
of a fresh process over a training step of a batch of 8. Ratios are medians of the rounds with
quartiles; below 1 is faster, or smaller, than fused softmax attention. A star says that a paired
test shows no difference (1 % for all mixers at one number of tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from keymix.analysis.memory import Build, peak_memory
from keymix.analysis.timing import compare
from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, list_mixers
from keymix.mixers.spec import parse_mixer
from measured import begin, in_turns, options, table

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


def passes(
    made: Mapping[str, Build], tokens: int, *, step: bool
) -> dict[str, Callable[[], object]]:
    """Return a forward pass of each mixer, or with `step` also its backward pass."""
    x = torch.randn(1, tokens, DIM, requires_grad=step)

    def run(mixer: nn.Module) -> None:
        with torch.inference_mode(not step):
            y = mixer(x)
        if step:
            y.sum().backward()

    mixers = {name: build.make().train(step) for name, build in made.items()}
    return {name: partial(run, mixer) for name, mixer in mixers.items()}


def rows(made: Mapping[str, Build], tokens: int, repeats: int) -> Iterator[list[str]]:
    """Measure the mixers at one number of tokens."""
    timed = [
        in_turns(passes(made, tokens, step=step), rounds=repeats, what=f"{tokens} tokens")
        for step in (False, True)
    ]
    peaks = peak_memory(made, (tokens, DIM), batch_size=BATCH, phases=("training",))
    base = peaks[BASELINE].training_mib
    for name in made:
        cells = []
        for samples in timed:
            found = compare(samples[BASELINE], samples[name], comparisons=len(made) - 1)
            star = "" if found.verdict == "different" else "*"
            spread = f"{found.ratio:.2f}{star} [{found.ratio_q1:.2f}, {found.ratio_q3:.2f}]"
            own = f"{found.other_ms:.2f}"
            cells += [own, "1" if name == BASELINE else spread]
        mib = peaks[name].training_mib
        memory = [f"{mib:.1f}", f"{mib / base:.2f}"] if mib and base else [peaks[name].note, ""]
        yield [name, *cells, *memory]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[196, 784, 3136], help="squares")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    dense = list_mixers(domain="dense")
    parser.add_argument("--mixers", nargs="+", default=dense, help="name, or name(option=value)")
    given = begin(parser, argv)
    for tokens in given.tokens:
        print(f"\n{tokens} tokens, width {DIM}, {HEADS} heads")
        made = builds(tokens, given.mixers)
        heads = ("mixer", "forward, ms", "ratio", "step, ms", "ratio", "peak, MiB", "ratio")
        table(heads, rows(made, tokens, given.repeats))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
