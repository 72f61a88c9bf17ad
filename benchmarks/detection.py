# SPDX-License-Identifier: Apache-2.0
"""What detectors cost at 800x1333: multiply-adds next to the paper's, time and peak memory.

    python benchmarks/detection.py
    python benchmarks/detection.py --parts inference --backbones caformer_s18,cskaformer_s18
    python benchmarks/detection.py --parts training,memory --models mask_rcnn --threads 2

Prints Markdown; docs/detection.md holds the output. The part ``count`` splits the multiply-adds of
an image so that the numbers of Static Key Attention in Vision, Table 3, can be told apart: the
products that form dynamic attention maps and apply them, which are no layer of their own and which
counters of layers leave out, and the query-key convolution. The others time the backbones in turns
on one image, and measure the growth of a fresh process. Every proposal is scored as an instance, so
that an image has as many detections as it may have.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keymix.analysis.counting import Count, count
from keymix.analysis.memory import PHASES, Build, Phase, peak_memory, run_pass
from keymix.analysis.passes import example_for, passes_of
from keymix.analysis.timing import Samples
from keymix.cli.console import parse_size
from keymix.errors import UserError
from keymix.hosts.base import called_attention, find_mixers
from keymix.mixers.conv_static_key import ConvStaticKeyAttention
from keymix.mixers.resize import GridBound
from keymix.models import create_model
from machine import BUSY, Watch, machine

MODELS = ("mask_rcnn", "cascade_mask_rcnn")
BACKBONES = ("resnet50", "caformer_s18", "skaformer_s18", "cskaformer_s18")
PARTS = ("count", "inference", "training", "memory")
PRINTED = {"resnet50": 376, "caformer_s18": 508, "cskaformer_s18": 512}
"""FLOPs (G) of Mask R-CNN in Static Key Attention in Vision, Table 3."""
TASK = "detection"
GIGA = 1e9
SURE = 10.0  # logit of the first class
WARM = (3, 224, 320)  # image on which kernels and threads start


@dataclass(frozen=True, kw_only=True)
class Split:
    """Multiply-adds of one image.

    Attributes:
        whole: All.
        maps: Of them, the products that form dynamic attention maps and apply them.
        convolution: The query-key convolutions.
    """

    whole: int
    maps: int
    convolution: int


def split(model: nn.Module, counted: Count) -> Split:
    """Split what was counted of a detector."""
    maps = convolution = 0
    mixers = find_mixers(model)
    convolutions = tuple(
        f"{path}.key_conv" for path, m in mixers.items() if isinstance(m, ConvStaticKeyAttention)
    )
    for layer in counted.layers:
        module = model.get_submodule(layer.path)
        if called_attention(module) and not isinstance(module, GridBound):
            maps += layer.macs  # projections are modules of their own
        if layer.path.startswith(convolutions):
            convolution += layer.macs
    return Split(whole=counted.macs, maps=maps, convolution=convolution)


def counts(
    models: Sequence[str], backbones: Sequence[str], sizes: Sequence[tuple[int, int]]
) -> str:
    """Return the table of multiply-adds."""
    heads = ["model", "backbone", "image", "parameters (M)", "GMAC", "FLOPs (G)"]
    heads += ["without dynamic maps", "and the q-k convolution", "printed"]
    rows = [heads, ["---"] * len(heads)]
    for name in models:
        for backbone in backbones:
            for size in sizes:
                with torch.device("meta"):
                    model = create_model(name, backbone=backbone)
                counted = count(model, (3, *size), task=TASK)
                of = split(model, counted)
                layers = 2 * (of.whole - of.maps)
                shown = str(PRINTED.get(backbone, "")) if name == MODELS[0] else ""
                rows.append(
                    [
                        *(name, backbone, f"{size[0]}x{size[1]}"),
                        f"{counted.params / 1e6:.2f}",
                        f"{of.whole / GIGA:.1f}",
                        f"{2 * of.whole / GIGA:.1f}",
                        f"{layers / GIGA:.1f}",
                        f"{(layers - 2 * of.convolution) / GIGA:.1f}",
                        f"{shown}G" if shown else "",
                    ]
                )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def detector(name: str, backbone: str) -> nn.Module:
    """Make a detector that takes every proposal for an instance of the first class."""
    model: Any = create_model(name, backbone=backbone)
    for stage in model.decoder.stages:
        bias = stage.box_predictor.cls_score.bias
        nn.init.constant_(bias.detach()[1:2], SURE)
    return model


def times(
    builds: Mapping[str, Build], shape: tuple[int, ...], phase: Phase, rounds: int
) -> tuple[dict[str, float], bool]:
    """Time passes over one image on the CPU, in turns; medians in seconds, and whether busy.

    A pass takes so long that kernels and threads are started on a smaller image.
    """
    passes, calls = passes_of(TASK), {}
    for name, build in builds.items():
        model = build.make().train(phase == "training")
        run_pass(model, example_for(model, passes, WARM, 1), phase, passes=passes)
        x = example_for(model, passes, shape, 1)
        calls[name] = functools.partial(run_pass, model, x, phase, passes=passes)
    samples = {name: Samples() for name in calls}
    watch = Watch()
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.thread_time()
            call()
            samples[name].wall.append(time.perf_counter() - wall)
            samples[name].cpu.append(time.thread_time() - cpu)
    medians = {name: statistics.median(found.wall) for name, found in samples.items()}
    return medians, watch.busy(samples.values())


def measured(given: argparse.Namespace, shape: tuple[int, ...], parts: Sequence[str]) -> str:
    """Return the table of times and memory."""
    builds = {
        f"{name} | {backbone}": Build(
            kwargs={"name": name, "backbone": backbone}, factory="detection:detector", task=TASK
        )
        for name in given.models
        for backbone in given.backbones
    }
    columns: dict[str, dict[str, str]] = {}
    busy = False
    for phase in PHASES:
        if phase not in parts:
            continue
        found, disturbed = times(builds, shape, phase, given.rounds)
        busy = busy or disturbed
        columns[f"{phase}, s per image"] = {n: f"{s:.2f}" for n, s in found.items()}
        if phase == "inference":
            columns["images per second"] = {n: f"{1 / s:.3f}" for n, s in found.items()}
    if "memory" in parts:
        peaks = peak_memory(builds, shape, batch_size=1, threads=given.threads)
        for phase in PHASES:
            known: dict[str, Any] = {n: getattr(p, f"{phase}_mib") for n, p in peaks.items()}
            columns[f"peak of {phase}, GiB"] = {
                n: peaks[n].note if mib is None else f"{mib / 1024:.2f}" for n, mib in known.items()
            }
    lines = [BUSY, ""] if busy else []
    lines.append(f"| model | backbone | {' | '.join(columns)} |")
    lines.append("|" + " --- |" * (2 + len(columns)))
    lines += [f"| {n} | {' | '.join(c[n] for c in columns.values())} |" for n in builds]
    return "\n".join(lines)


def listed(known: Sequence[str] | None) -> Any:
    """Read words with commas between, of those known if given, for argparse."""

    def read(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if known is not None and word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return read


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--models", type=listed(MODELS), default=[MODELS[0]])
    made.add_argument("--backbones", type=listed(None), default=[*BACKBONES])
    made.add_argument("--parts", type=listed(PARTS), default=["count"])
    made.add_argument("--image-size", default="800x1333", help="of what is timed")
    made.add_argument("--count-sizes", type=listed(None), default=["800x1280", "800x1333"])
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--rounds", type=int, default=3)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    given = parser().parse_args(argv)
    torch.set_num_threads(given.threads)
    write = sys.stdout.write
    try:
        if "count" in given.parts:
            sizes = [parse_size(text) for text in given.count_sizes]
            write(counts(given.models, given.backbones, sizes) + "\n")
        others = [part for part in given.parts if part != "count"]
        if others:
            shape = (3, *parse_size(given.image_size))
            write(f"{machine(given.threads)}\n\n{measured(given, shape, others)}\n")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
