# SPDX-License-Identifier: Apache-2.0
"""Latency of models folded for inference, as a ratio of the same models before.

    python benchmarks/folding.py
    python benchmarks/folding.py --models 'cvt*' --rounds 41

Model and folded copy take turns in one process, with weights and running statistics away from their
start. Times are those of the processor in one thread, which other programs disturb little. The
ratio is the median over rounds, with quartiles, and next to it that of a plain copy of the model,
which is the machine's own spread. Modules are those that compute something.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from keymix import create_mixer, create_model, fold_for_inference
from keymix.analysis.timing import quartiles
from keymix.mixers.contract import stir
from measured import begin, in_turns, options, ratio, table

BATCH = 8
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # name, side, options; mixers of ViT-S
    "re_attention": ("re_attention", 14, {}),
    "re_attention, 784 tokens": ("re_attention", 28, {}),
    "key_value(pos_dim=16)": ("key_value", 14, {"pos_dim": 16}),
    "static_key": ("static_key", 14, {}),
    "static_key, 16 keys": ("static_key", 14, {"key_grid": (4, 4)}),
    "static_key, 49 keys": ("static_key", 28, {"key_grid": (7, 7)}),
    "vit_nano_p4_12, static_key": ("vit_nano_p4_12", 12, {"in_chans": 1, "mixer": "static_key"}),
    "deepvit_micro_p4_32": ("deepvit_micro_p4_32", 32, {"mixer": "re_attention"}),
    "cvt_13_32": ("cvt_13_32", 32, {}),
    "qkformer_hst_4_384": ("qkformer_hst_4_384", 32, {}),
    "spikformer_4_384": ("spikformer_4_384", 32, {}),
    "plain_convnet": ("plain_convnet", 32, {}),
}
MIXERS = ("re_attention", "key_value", "static_key")


def made(name: str, side: int, how: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    """Make a mixer, or a model by its side in pixels; and the shape of an input."""
    torch.manual_seed(0)
    if name in MIXERS:
        site: dict[str, Any] = {"dim": 384, "num_heads": 6, "grid": (side, side)}
        return create_mixer(name, **site, **how), (side * side, 384)
    return create_model(name, img_size=side, **how), (how.get("in_chans", 3), side, side)


def rows(patterns: Sequence[str], rounds: int) -> Iterator[list[object]]:
    """Time each case before and after."""
    for case, spec in CASES.items():
        if not any(fnmatch.fnmatch(case, pattern) for pattern in patterns):
            continue
        before, shape = made(*spec)
        x = torch.randn(BATCH, *shape)
        stir(before, 0.02)
        with torch.no_grad():
            before.train()(x)  # so that running statistics move
        before.eval()
        models = {
            "before": before,
            "itself": copy.deepcopy(before),
            "folded": fold_for_inference(before),
        }
        with torch.inference_mode():
            calls = {name: partial(model, x) for name, model in models.items()}
            found = in_turns(calls, rounds=rounds, processor=True)
        ratios = [ratio(found["before"], found[other], 3) for other in ("folded", "itself")]
        ms = 1e3 * quartiles(found["before"].wall)[1]
        yield [case, f"{ms:.1f}", *ratios, parts(before), parts(models["folded"])]


def parts(module: nn.Module) -> int:
    """Count modules that compute something."""
    return sum(not isinstance(m, nn.Identity) and not list(m.children()) for m in module.modules())


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of cases")
    parser.add_argument("--rounds", type=int, default=21, help="rounds (default 21)")
    given = begin(parser, argv)
    heads = ("case", "ms", "folded / before", "before / itself", "modules", "folded")
    table(heads, rows(given.models, given.rounds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
