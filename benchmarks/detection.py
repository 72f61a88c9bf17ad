# SPDX-License-Identifier: Apache-2.0
"""What detectors cost at 800x1333: multiply-adds next to the paper's, time and peak memory.

    python benchmarks/detection.py
    python benchmarks/detection.py --parts inference --backbones caformer_s18,cskaformer_s18
    python benchmarks/detection.py --parts training,memory --models mask_rcnn --threads 2

The part ``count`` splits the multiply-adds of an image so that the numbers of Static Key Attention
in Vision, Table 3, can be told apart: the products that form dynamic attention maps and apply them,
which are no layer of their own and which counters of layers leave out, and the query-key
convolution. The others time the backbones in turns on one image, and measure the growth of a fresh
process. Every proposal is scored as an instance, so that an image has as many detections as it may
have.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from keymix.analysis.counting import Count, count
from keymix.analysis.memory import PHASES, Build, peak_memory, run_pass
from keymix.analysis.passes import Passes, example_for
from keymix.analysis.timing import quartiles
from keymix.hosts.base import called_attention, find_mixers
from keymix.mixers.conv_static_key import ConvStaticKeyAttention
from keymix.mixers.resize import GridBound
from keymix.models import create_model
from measured import begin, in_turns, options, table

MODELS = ("mask_rcnn", "cascade_mask_rcnn")
BACKBONES = ("resnet50", "caformer_s18", "skaformer_s18", "cskaformer_s18")
PARTS = ("count", "inference", "training", "memory")
PRINTED = {"resnet50": "376G", "caformer_s18": "508G", "cskaformer_s18": "512G"}
"""FLOPs of Mask R-CNN in Static Key Attention in Vision, Table 3."""
TASK = "detection"
COUNTED, SIZE = ((800, 1280), (800, 1333)), (800, 1333)
SURE = 10.0  # logit of the first class


def counts(models: Sequence[str], backbones: Sequence[str]) -> Iterator[list[str]]:
    """Count each detector at each size."""
    for name, backbone, size in itertools.product(models, backbones, COUNTED):
        with torch.device("meta"):
            model = create_model(name, backbone=backbone)
        counted = count(model, (3, *size), task=TASK)
        maps, convolution = parts_of(model, counted)
        flops = 2 * counted.macs, 2 * (counted.macs - maps), 2 * (counted.macs - maps - convolution)
        yield [
            *(name, backbone, f"{size[0]}x{size[1]}"),
            f"{counted.params / 1e6:.2f}",
            *(f"{number / 1e9:.1f}" for number in (counted.macs, *flops)),
            PRINTED.get(backbone, "") if name == MODELS[0] else "",
        ]


def parts_of(model: nn.Module, counted: Count) -> tuple[int, int]:
    """Return the multiply-adds of dynamic attention maps, and those of query-key convolutions."""
    maps = convolution = 0
    convolutions = tuple(
        f"{path}.key_conv"
        for path, mixer in find_mixers(model).items()
        if isinstance(mixer, ConvStaticKeyAttention)
    )
    for layer in counted.layers:
        module = model.get_submodule(layer.path)
        if called_attention(module) and not isinstance(module, GridBound):
            maps += layer.macs  # projections are modules of their own
        if layer.path.startswith(convolutions):
            convolution += layer.macs
    return maps, convolution


def detector(name: str, backbone: str) -> nn.Module:
    """Make a detector that takes every proposal for an instance of the first class."""
    model: Any = create_model(name, backbone=backbone)
    for stage in model.decoder.stages:
        bias = stage.box_predictor.cls_score.bias
        nn.init.constant_(bias.detach()[1:2], SURE)
    return model


def measured(
    models: Sequence[str], backbones: Sequence[str], parts: Sequence[str], rounds: int
) -> dict[str, list[str]]:
    """Measure times and memory on one image; by column, in the order of models and backbones."""
    builds = {
        f"{name} {backbone}": Build(
            kwargs={"name": name, "backbone": backbone}, factory="detection:detector", task=TASK
        )
        for name, backbone in itertools.product(models, backbones)
    }
    passes, columns = Passes(TASK), {}
    for phase in (phase for phase in PHASES if phase in parts):
        calls = {}
        for name, build in builds.items():
            model = build.make().train(phase == "training")
            x = example_for(model, passes, (3, *SIZE), 1)
            calls[name] = functools.partial(run_pass, model, x, phase, passes=passes)
        found = in_turns(calls, rounds=rounds, what=phase)
        medians = [quartiles(each.kept())[1] for each in found.values()]
        columns[f"{phase}, s per image"] = [f"{seconds:.2f}" for seconds in medians]
        columns[f"{phase}, images per second"] = [f"{1 / seconds:.3f}" for seconds in medians]
    if "memory" in parts:
        peaks = peak_memory(builds, (3, *SIZE), batch_size=1).values()
        for phase in PHASES:
            known: list[Any] = [getattr(peak, f"{phase}_mib") for peak in peaks]
            columns[f"peak of {phase}, GiB"] = [
                peak.note if mib is None else f"{mib / 1024:.2f}"
                for peak, mib in zip(peaks, known, strict=True)
            ]
    return columns


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = options(__doc__)
    parser.add_argument("--models", default=MODELS[0], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--backbones", default=",".join(BACKBONES))
    parser.add_argument("--parts", default=PARTS[0], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    given = begin(parser, argv)
    models, backbones, parts = (
        text.split(",") for text in (given.models, given.backbones, given.parts)
    )
    if "count" in parts:
        heads = ["model", "backbone", "image", "parameters (M)", "GMAC", "FLOPs (G)"]
        heads += ["without attention products", "and query-key convolution", "printed"]
        table(heads, counts(models, backbones), names=3)
    columns = measured(models, backbones, parts, given.rounds)
    if columns:
        names = itertools.product(models, backbones)
        rows = ([*name, *cells] for name, *cells in zip(names, *columns.values(), strict=True))
        table(["model", "backbone", *columns], rows, names=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
