# SPDX-License-Identifier: Apache-2.0
"""What keymix's training costs over a bare PyTorch loop on the same work.

    python benchmarks/training_loop.py                       # embedded digits, resized to 32x32
    python benchmarks/training_loop.py --data parquet:PATH   # CIFAR-10

Both train vit_micro_p4_32 on the same batches (same loader, crop and flip), with the same optimiser
and clipping. keymix adds Fabric, seeding, the schedule and the record of every loss; epochs of
the two alternate in one process, and validation and checkpoints, which the bare loop has none of,
lie outside the clock and are reported apart. A ratio of 1.00 is no loss.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from keymix import recipes
from keymix.data.loaders import Loader
from keymix.train.engine import train
from keymix.train.environment import cpu_model
from keymix.train.model import build_model, load_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.step import make_optimizer


class BareLoop:
    """The fewest lines that train the recipe's model.

    Args:
        recipe: The run.
        data: Its images, loaded.
    """

    def __init__(self, recipe: Recipe, data: Any) -> None:
        self.recipe = recipe
        self.model = build_model(
            recipe,
            num_classes=len(data.classes),
            in_chans=data.in_chans,
            image_size=data.image_size,
        ).train()
        self.optimizer = make_optimizer(recipe.optim, self.model)
        self.loader = Loader(
            data.train,
            data,
            batch_size=recipe.data.batch_size,
            train=True,
            augment=recipe.augment,
            seed=recipe.seed,
        )

    def epoch(self, number: int) -> float:
        """Train for an epoch; seconds."""
        self.loader.set_epoch(number)
        start = time.perf_counter()
        for images, targets, _ in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optim.clip_grad)
            self.optimizer.step()
        return time.perf_counter() - start


def compare(recipe: Recipe, warm_up: int) -> dict[str, list[float]]:
    """Seconds of every epoch: ``keymix``, ``bare``, and ``besides`` (validation, checkpoint)."""
    data = load_data(recipe.data)
    bare = BareLoop(recipe, data)
    seconds: dict[str, list[float]] = {"keymix": [], "bare": [], "besides": []}

    def after(line: Mapping[str, Any]) -> None:
        """Keymix ended an epoch: the bare loop's turn."""
        trained = len(data.train) / line["images_per_s"]
        alone = bare.epoch(line["epoch"])
        if line["epoch"] >= warm_up:
            seconds["keymix"].append(trained)
            seconds["bare"].append(alone)
            seconds["besides"].append(line["seconds"] - trained)

    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run", progress=after, data=data)
    return seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="digits", metavar="SPEC")
    parser.add_argument("--limit", type=int, default=1280, help="images; default 1280")
    parser.add_argument("--repeats", type=int, default=7, help="epochs of each; default 7")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warm_up = 1
    recipe = replace_path(
        recipes.get("small_images_vit"),
        {
            "data.spec": given.data,
            "data.limit": given.limit,
            "precision": "32",
            "schedule.epochs": given.repeats + warm_up,
        },
    )
    seconds = compare(recipe, warm_up)
    ratios = [k / b for k, b in zip(seconds["keymix"], seconds["bare"], strict=True)]
    print(f"{cpu_model()}, {given.threads} thread(s), torch {torch.__version__}")
    print(f"{given.data}, {given.repeats} epochs of each in turns, one epoch of warm-up")
    print(f"{'epoch, seconds':<28}{'median':>9}{'fastest':>9}{'slowest':>9}")
    for name, values in seconds.items():
        low, high = min(values), max(values)
        print(f"{name:<28}{statistics.median(values):>9.3f}{low:>9.3f}{high:>9.3f}")
    print(f"{'keymix / bare':<28}{statistics.median(ratios):>9.3f}{min(ratios):>9.3f}", end="")
    print(f"{max(ratios):>9.3f}")


if __name__ == "__main__":
    main()
