# SPDX-License-Identifier: Apache-2.0
"""What share of a training step is spent waiting for data: keymix and a torchvision DataLoader.

    python benchmarks/data_path.py                            # embedded digits, resized to 32x32
    python benchmarks/data_path.py --data parquet:PATH        # CIFAR-10

All train the same model on the same images of 32x32 pixels with the same augmentation: RandAugment
(2, 9), flip and a crop after 4 pixels of padding. torchvision's transforms run on single images, in
the training process and in two workers. Epochs of ``--steps`` batches take turns in one process,
their starts included. Then RandAugment alone, per image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from keymix import recipes
from keymix.data.augment import Augment
from keymix.data.dataset import ImageData
from keymix.data.loaders import InMemoryBatches, Loader
from keymix.train.model import build_model, load_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.step import make_optimizer
from measured import begin, options, spread, table

AUGMENT = Augment(crop_padding=4, flip=True, rand_augment=(2, 9))
OURS = "keymix"
RAND_AUGMENT_IMAGES = 2048
LEAST_IMAGES = 200  # two per class for a hundred classes


class Torchvision(Dataset[tuple[Tensor, Tensor]]):
    """Single images through torchvision's transforms, as its references train with."""

    def __init__(self, data: ImageData) -> None:
        self.split = data.train
        self.transform = v2.Compose(
            [
                v2.RandomCrop(data.image_size, padding=AUGMENT.crop_padding),
                v2.RandomHorizontalFlip(),
                v2.RandAugment(*AUGMENT.rand_augment),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(data.mean, data.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.split.images[i]), self.split.labels[i]


class Trainer:
    """The fewest lines that train the recipe's model on batches, with two clocks.

    Args:
        recipe: The run.
        data: Its images.
        epoch: Gives the batches of an epoch by its number.
    """

    def __init__(
        self, recipe: Recipe, data: ImageData, epoch: Callable[[int], Iterable[Any]]
    ) -> None:
        self.epoch, self.clip = epoch, recipe.optim.clip_grad
        self.model = build_model(
            recipe,
            num_classes=len(data.classes),
            in_chans=data.in_chans,
            image_size=data.image_size,
        ).train()
        self.optimizer = make_optimizer(recipe.optim, self.model)

    def run(self, number: int, steps: int) -> tuple[float, float]:
        """Train for ``steps`` batches of an epoch; seconds waited and seconds in all."""
        waited, start = 0.0, time.perf_counter()
        batches = iter(self.epoch(number))
        for _ in range(steps):
            before = time.perf_counter()
            images, targets, *_ = next(batches)
            waited += time.perf_counter() - before
            self.step(images, targets)
        return waited, time.perf_counter() - start

    def step(self, images: Tensor, targets: Tensor) -> None:
        """Take a training step."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), targets).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


def served(data: ImageData, **how: Any) -> Callable[[int], Loader]:
    """Give keymix's batches of an epoch by its number."""
    loader = Loader(data.train, data, train=True, **how)

    def epoch(number: int) -> Loader:
        loader.set_epoch(number)
        return loader

    return epoch


def trainers(recipe: Recipe, data: ImageData, batch_size: int) -> dict[str, Trainer]:
    """Ours, and torchvision's in this process and with two workers."""
    epoch = served(data, batch_size=batch_size, augment=AUGMENT, drop_last=True)
    made = {OURS: Trainer(recipe, data, epoch)}
    for workers in (0, 2):
        loader: DataLoader[Any] = DataLoader(
            Torchvision(data),
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        name = f"DataLoader, {workers} workers"
        made[name] = Trainer(recipe, data, lambda _, loader=loader: loader)  # type: ignore[misc]
    return made


def waiting(contenders: dict[str, Trainer], steps: int, repeats: int) -> list[list[str]]:
    """Take epochs in turns, after one of each that warms up; shares waited and times of a step."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(repeats + 1):
        for name, contender in contenders.items():
            measured = contender.run(number, steps if number else 1)
            if number:
                seconds[name].append(measured)
    ours, rows = seconds[OURS], []
    for name, epochs in seconds.items():
        ratios = [all_ / own for (_, all_), (_, own) in zip(epochs, ours, strict=True)]
        rows += [
            [f"{name}: waiting", *spread([waited / all_ for waited, all_ in epochs], ".2%")],
            [f"{name}: step, ms", *spread([1e3 * all_ / steps for _, all_ in epochs], ".1f")],
            [f"{name}: step / {OURS}", *spread(ratios, ".3f")],
        ]
    return rows


def rand_augment(images: Tensor, repeats: int) -> list[list[str]]:
    """Time RandAugment alone, in batches and image by image; milliseconds an image."""
    ours = InMemoryBatches(
        images, Augment(rand_augment=AUGMENT.rand_augment), 0, torch.device("cpu")
    )
    order, theirs = np.arange(len(images)), v2.RandAugment(*AUGMENT.rand_augment)
    milliseconds: list[tuple[float, float]] = []
    for epoch in range(repeats + 1):
        start = time.perf_counter()
        for _ in ours.batches(order, 128, epoch=epoch):
            pass
        middle = time.perf_counter()
        for image in images:
            theirs(image)
        took = middle - start, time.perf_counter() - middle
        if epoch:
            milliseconds.append((1e3 * took[0] / len(images), 1e3 * took[1] / len(images)))
    own, other = zip(*milliseconds, strict=True)
    return [
        [f"{OURS}: RandAugment, ms per image", *spread(own, ".4f")],
        ["torchvision: RandAugment, ms per image", *spread(other, ".4f")],
        [f"torchvision / {OURS}", *spread([b / a for a, b in milliseconds], ".1f")],
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--model", default="vit_small_p4_32", help="default vit_small_p4_32")
    parser.add_argument("--data", default="digits", metavar="SPEC", help="default digits")
    parser.add_argument("--batch-size", type=int, default=32, help="default 32")
    parser.add_argument("--steps", type=int, default=4, help="batches per epoch; default 4")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each; default 5")
    given = begin(parser, argv)
    recipe = recipes.get("small_images_vit")
    # an epoch of just the batches that are timed, so that its start has its due weight
    wanted = given.steps * given.batch_size / (1 - recipe.data.val_fraction)
    changed = {
        "model.name": given.model,
        "data.spec": given.data,
        "data.image_size": 32,
        "data.limit": max(LEAST_IMAGES, math.ceil(wanted) + 1),
    }
    recipe = replace_path(recipe, changed)
    data = load_data(recipe.data)
    steps = min(given.steps, len(data.train) // given.batch_size)
    rows = waiting(trainers(recipe, data, given.batch_size), steps, given.repeats)
    images = data.train.images
    rows += rand_augment(images[torch.arange(RAND_AUGMENT_IMAGES) % len(images)], given.repeats)
    table((f"{given.model}, epochs of {steps} steps", "median", "smallest", "largest"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
