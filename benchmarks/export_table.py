# SPDX-License-Identifier: Apache-2.0
"""Exported files of all families with several mixers: how near they are, and how large.

    python benchmarks/export_table.py
    python benchmarks/export_table.py --models 'vit*' 'swin*' --mixers softmax static_key

Models are small, with random weights and the BatchNorm statistics of a few batches. A cell has the
largest difference of an output from the model's (share of the largest), the operations in the ONNX
file and its size in kB. ``other sizes`` is of a second file with ``dynamic="size"``, in which
static keys are interpolated: the pixels of which height and width may be multiples, or the number
of the reason below the table. ``own`` is the attention that the model comes with.
"""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import keymix
from keymix.errors import UserError
from keymix.hosts.base import find_mixers
from keymix.mixers.contract import stir
from keymix.mixers.resize import GridBound
from keymix.mixers.spec import parse_mixer
from measured import begin, options, table

OWN = "own"
MIXERS = (
    *("softmax", "static_key", "static_key(key_grid=1/4)", "conv_static_key"),
    *("re_attention", "key_value", OWN),
)
MODELS: dict[str, tuple[int, dict[str, Any]]] = {  # side of the images, what makes it small
    "vit_micro_p4_32": (32, {"depth": 2}),
    "deepvit_micro_p4_32": (32, {"depth": 2}),
    "cait_micro_p4_32": (32, {"depth": 2}),
    "swin_micro_p2_32": (32, {}),
    "cvt_micro_32": (32, {}),
    "caformer_micro_32": (32, {}),
    "qkformer_micro_32": (32, {"depths": (1, 1, 1)}),
    "setr_micro": (32, {}),
    "plain_unet": (32, {"width": 8}),
    "deit_tiny_patch16_224": (64, {"depth": 2}),
    "swin_tiny_patch4_window7_224": (56, {"depths": (1, 2), "embed_dim": 48, "num_heads": (2, 4)}),
    "vit_small_patch16_dinov3": (64, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
}


def made(name: str, mixer: str) -> nn.Module:
    """Make a model in evaluation mode whose answers vary from image to image."""
    side, small = MODELS[name]
    chosen = {} if mixer == OWN else parse_mixer(mixer).model_kwargs()
    torch.manual_seed(0)
    model = keymix.create_model(name, img_size=side, num_classes=10, **small, **chosen)
    stir(model, 0.05)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # all batches count alike
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.randn(16, 3, side, side))
    return model.eval()


def other_sizes(model: nn.Module, path: Path) -> str:
    """Export with dynamic size; say of how many pixels sides may be multiples, or why not."""
    bound = any(isinstance(each, GridBound) for each in find_mixers(model).values())
    try:
        found = keymix.export(model, path, dynamic="size", resize="interpolate" if bound else None)
    except UserError as error:
        return str(error)
    return f"{found.step[0]} px" if found.step else "none"


def rows(models: Sequence[str], mixers: Sequence[str], reasons: list[str]) -> Iterator[list[str]]:
    """Export each model with each mixer, and collect the reasons of what is refused."""

    def noted(error: UserError | str, mixer: str) -> str:
        why = re.sub(r" with \S+=.*? cannot sit", " cannot sit", str(error))
        why = why if mixer == OWN else why.replace(repr(parse_mixer(mixer).names[0]), "…")
        if why not in reasons:
            reasons.append(why)
        return f"[{reasons.index(why) + 1}]"

    for name in [each for each in MODELS if any(fnmatch.fnmatch(each, one) for one in models)]:
        cells: list[str] = []
        sizes: dict[str, list[str]] = {}
        built: dict[str, str] = {}  # what was exported, by what it is made of
        for mixer in mixers:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    model = made(name, mixer)
                    if mixer == OWN and repr(model) in built:
                        cells.append(f"= {built[repr(model)]}")
                        continue
                    built[repr(model)] = mixer
                    found = keymix.export(model, Path(folder, "batch.onnx"))
                except UserError as error:
                    cells.append(noted(error, mixer))
                    continue
                kb = found.bytes / 1000
                cells.append(f"{found.difference:.0e} · {found.nodes} · {kb:,.0f}")
                step = other_sizes(model, Path(folder, "size.onnx"))
                size = step if step.endswith(" px") else noted(step, mixer)
                sizes.setdefault(size, []).append(mixer)
        per = [step if len(sizes) == 1 else f"{step}: {', '.join(m)}" for step, m in sizes.items()]
        yield [name, *cells, "; ".join(per) or "–"]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of models")
    parser.add_argument("--mixers", nargs="+", default=MIXERS, help="default: all of the table")
    given = begin(parser, argv)
    reasons: list[str] = []
    table(("model", *given.mixers, "other sizes"), rows(given.models, given.mixers, reasons))
    for number, reason in enumerate(reasons, 1):
        print(f"[{number}] {reason}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
