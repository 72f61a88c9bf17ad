# SPDX-License-Identifier: Apache-2.0
"""Test accuracy at other resolutions than the training's, for both policies of learned positions.

    python benchmarks/resolutions.py --data parquet:data/cifar10 --out resolutions

Trains a small ViT with each mixer at 32 pixels, then scores each on the same 2,000 test images at
every size: the model takes the size through ``set_input_size``, under each policy its mixer has. A
run that is done is not trained again.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a process, two processes

import torch
from torch import nn

import keymix
from keymix.cli.console import parse_size
from keymix.data.loaders import Loader
from keymix.hosts import find_mixers
from keymix.mixers.resize import GridBound
from keymix.mixers.spec import parse_mixers
from keymix.models.image_size import POLICIES, set_image_size
from keymix.recipes.small import small_images_vit
from keymix.tasks.classification.answers import ANSWERS
from keymix.train.model import load_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.runs import load_run
from measured import begin, options, table

MIXERS = "softmax,static_key,conv_static_key,key_value,key_value(pos_dim=16)"
SIDE, DEPTH, IMAGES, TESTED = 32, 4, 10_000, 2_000
SIZES = ("24", "32", "40", "48", "64", "32x48")

Row = tuple[str, str]  # mixer and policy


def recipe_of(data: str, mixer: str, seed: int, epochs: int, limit: int) -> Recipe:
    """The run of a mixer at a seed: ``small_images_vit`` with the sizes asked for."""
    return replace_path(
        small_images_vit(),
        {
            "data.spec": data,
            "data.limit": limit,
            "data.image_size": SIDE,
            "model.mixer": mixer,
            "model.options": {"depth": DEPTH},
            "schedule.epochs": epochs,
            "schedule.warmup_epochs": min(1.0, epochs / 6),
            "seed": seed,
        },
    )


def policies(model: nn.Module) -> tuple[str | None, ...]:
    """The policies that matter to a model: both where a mixer holds something per position."""
    mixers = find_mixers(model).values()
    holds = any(isinstance(m, GridBound) and m.bound for m in mixers)
    return POLICIES if holds else (None,)


def train(job: tuple[Recipe, Path]) -> None:
    """Train one run, unless it is done."""
    torch.set_num_threads(1)
    keymix.train(*job)


def score_at(job: tuple[Sequence[Path], str]) -> dict[Row, list[float]]:
    """Score all runs at one size on the same images; accuracies of the seeds."""
    torch.set_num_threads(1)
    folders, size = job[0], parse_size(job[1])
    runs = [load_run(folder) for folder in folders]
    data = load_data(replace(runs[0].recipe.data, limit=TESTED), image_size=size)
    found: dict[Row, list[float]] = {}
    for run in runs:
        facts = run.weights()[1].data
        seen = replace(data, mean=facts.mean, std=facts.std)
        for resize in policies(run.model()):
            model = run.model()
            set_image_size(model, size, resize=resize)
            batches = Loader(seen.test, seen, batch_size=100, train=False)
            scored = ANSWERS.evaluate(model, batches, seen.test, seen, device=torch.device("cpu"))
            row = run.recipe.model.mixer or "softmax", resize or "–"
            found.setdefault(row, []).append(100 * float(scored.scores["top1"] or 0.0))
    return found


def cell(scores: Sequence[float]) -> str:
    """Write mean ± standard deviation."""
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--data", required=True, help="data spec, e.g. parquet:data/cifar10")
    parser.add_argument("--out", type=Path, default="resolutions", help="folder of the runs")
    parser.add_argument("--mixers", default=MIXERS, help=f"default: {MIXERS}")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="pixels in test: a side or HxW")
    parser.add_argument("--limit", type=int, default=IMAGES, help="training images (default 10000)")
    parser.add_argument("--epochs", type=int, default=6, help="default 6")
    parser.add_argument("--seeds", type=int, default=1, help="default 1")
    given = begin(parser, argv)
    runs = {
        given.out / f"{spec.slug}-seed{seed}": recipe_of(
            given.data, spec.label, seed, given.epochs, given.limit
        )
        for seed in range(given.seeds)
        for spec in parse_mixers(given.mixers)
    }
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(train, ((recipe, folder) for folder, recipe in runs.items())))
        found = list(pool.map(score_at, ((list(runs), size) for size in given.sizes)))
    names = [f"**{size}**" if size == str(SIDE) else size for size in given.sizes]
    rows = [[f"`{row[0]}`", row[1], *(cell(at[row]) for at in found)] for row in found[0]]
    table(("mixer", "`resize`", *names), rows, names=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
