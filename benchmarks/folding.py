# SPDX-License-Identifier: Apache-2.0
"""Latency of models folded for inference, as a ratio of the same models before.

    python benchmarks/folding.py
    python benchmarks/folding.py --models 'cvt*' --batch 1 --rounds 41

Model and folded copy take turns in one process, in random order within a round, with weights and
running statistics away from their start. Times are those of the processor in one thread, which
other programs disturb little. The ratio is the median over rounds, with quartiles, and next to it
that of a plain copy of the model, which is the machine's own spread.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keymix import create_mixer, create_model, fold_for_inference
from keymix.mixers.contract import stir
from softmax import ratio


@dataclass(frozen=True)
class Case:
    """A model or mixer to build, and the shape of one of its inputs."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


def model(name: str, side: int, channels: int = 3, **options: Any) -> Case:
    """Take a model at a side in pixels."""
    options |= {"img_size": side, "in_chans": channels}
    return Case(lambda: create_model(name, **options), (channels, side, side))


def mixer(name: str, side: int, **options: Any) -> Case:
    """Take a mixer of ViT-S's width on a square grid."""
    site: dict[str, Any] = {"dim": 384, "num_heads": 6, "grid": (side, side)}
    return Case(lambda: create_mixer(name, **site, **options), (side * side, 384))


CASES = {
    "re_attention": mixer("re_attention", 14),
    "re_attention, 784 tokens": mixer("re_attention", 28),
    "key_value(pos_dim=16)": mixer("key_value", 14, pos_dim=16),
    "static_key": mixer("static_key", 14),
    "static_key, 16 keys": mixer("static_key", 14, key_grid=(4, 4)),
    "static_key, 49 keys": mixer("static_key", 28, key_grid=(7, 7)),
    "vit_nano_p4_12, static_key": model("vit_nano_p4_12", 12, 1, mixer="static_key"),
    "deepvit_micro_p4_32": model("deepvit_micro_p4_32", 32, mixer="re_attention"),
    "cvt_13_32": model("cvt_13_32", 32),
    "qkformer_hst_4_384": model("qkformer_hst_4_384", 32),
    "spikformer_4_384": model("spikformer_4_384", 32),
    "plain_convnet": model("plain_convnet", 32),
}


def ready(case: Case, x: Tensor) -> nn.Module:
    """Build, and let running statistics move."""
    torch.manual_seed(0)
    built = case.build()
    stir(built, 0.02)
    with torch.no_grad():
        built.train()(x)
    return built.eval()


def timed(models: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Time all in turns; return each one's seconds, one a round."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 2):  # the first two warm up
        for name in random.sample(list(models), len(models)):
            start = time.process_time()
            models[name](x)
            if turn > 1:
                seconds[name].append(time.process_time() - start)
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of cases")
    parser.add_argument("--batch", type=int, default=8, help="images per batch (default 8)")
    parser.add_argument("--rounds", type=int, default=21, help="rounds (default 21)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, float32, batch {args.batch}")
    print("| case | ms | folded / before | before / itself | modules | folded |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, case in CASES.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in args.models):
            continue
        x = torch.randn(args.batch, *case.shape)
        before = ready(case, x)
        models = {
            "before": before,
            "itself": copy.deepcopy(before),
            "folded": fold_for_inference(before),
        }
        with torch.inference_mode():
            seconds = timed(models, x, args.rounds)
        cells = [ratio(seconds[other], seconds["before"]) for other in ("folded", "itself")]
        parts = [_parts(models[each]) for each in ("before", "folded")]
        took = 1e3 * statistics.median(seconds["before"])
        print(f"| {name} | {took:.1f} | {cells[0]} | {cells[1]} | {parts[0]} | {parts[1]} |")
    return 0


def _parts(module: nn.Module) -> int:
    """Count modules that compute something."""
    return sum(not isinstance(m, nn.Identity) and not list(m.children()) for m in module.modules())


if __name__ == "__main__":
    raise SystemExit(main())
