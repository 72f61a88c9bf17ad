# SPDX-License-Identifier: Apache-2.0
"""What share of a training step is spent waiting for data: keymix and a torchvision DataLoader.

    python benchmarks/data_path.py                            # embedded digits, resized to 32x32
    python benchmarks/data_path.py --data parquet:PATH        # CIFAR-10
    python benchmarks/data_path.py --data folder:PATH --image-size 224 --workers 8 --model vit_...

All train the same model on the same images with the same augmentation: RandAugment (2, 9) and flip,
with a crop after 4 pixels of padding where images are held in memory and a random resized crop
where they are not. torchvision's transforms run on single images, in the training process and in
``--workers`` processes; keymix takes the workers for images read one by one only. Epochs of
``--steps`` batches take turns in one process, their starts included. On a GPU both clocks wait for
it: what the data path computes there counts as waiting, too. Then RandAugment alone, per image.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from device_option import device_name
from keymix import recipes
from keymix.data.augment import Augment
from keymix.data.dataset import ImageData
from keymix.data.loaders import InMemoryBatches, Loader
from keymix.train.environment import cpu_model
from keymix.train.model import build_model, load_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.scoring import autocast
from keymix.train.step import make_optimizer

AUGMENT = Augment(crop_padding=4, flip=True, rand_augment=(2, 9))
OURS = "keymix"
RAND_AUGMENT_IMAGES = 2048
LEAST_IMAGES = 200  # two per class for a hundred classes


class Torchvision(Dataset[tuple[Tensor, Tensor]]):
    """Single images through torchvision's transforms, as its references train with.

    Args:
        data: The images; those of the training split are served.
    """

    def __init__(self, data: ImageData) -> None:
        self.split = data.train
        height, width = data.image_size
        in_memory = self.split.images is not None
        crop: v2.Transform = (
            v2.RandomCrop((height, width), padding=AUGMENT.crop_padding)
            if in_memory
            else v2.RandomResizedCrop((height, width))
        )
        self.transform = v2.Compose(
            [
                crop,
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
        images = self.split.images
        image = self.split.decoded(i) if images is None else images[i]
        return self.transform(image), self.split.labels[i]


class Trainer:
    """Trains the recipe's model on one source of batches and keeps two clocks.

    Args:
        recipe: The run.
        data: Its images.
        device: Where it trains.
        epoch: Gives the batches of an epoch by its number.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: ImageData,
        device: torch.device,
        epoch: Callable[[int], Iterable[Any]],
    ) -> None:
        self.device, self.epoch = device, epoch
        self.model = build_model(
            recipe,
            num_classes=len(data.classes),
            in_chans=data.in_chans,
            image_size=data.image_size,
        )
        self.model.to(device).train()
        self.optimizer = make_optimizer(recipe.optim, self.model)

    def run(self, number: int, steps: int) -> tuple[float, float]:
        """Train for ``steps`` batches of an epoch; seconds waited and seconds in all."""
        waited = 0.0
        start = self._now()
        batches = self._served(number)
        for _ in range(steps):
            before = self._now()
            images, targets = next(batches)
            waited += self._now() - before
            self._step(images, targets)
        return waited, self._now() - start

    def _served(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets, *_ in self.epoch(number):
            yield (
                images.to(self.device, non_blocking=True),
                targets.to(self.device, non_blocking=True),
            )

    def _step(self, images: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        with autocast(self.device, "auto"):
            logits = self.model(images)
        F.cross_entropy(logits.float(), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def trainers(
    recipe: Recipe, data: ImageData, device: torch.device, workers: Sequence[int]
) -> dict[str, Trainer]:
    """Ours, and torchvision's with each number of workers."""
    size = recipe.data.batch_size
    ours = Loader(
        data.train,
        data,
        batch_size=size,
        train=True,
        augment=AUGMENT,
        workers=max(workers),
        drop_last=True,
        device=device,
    )

    def epoch(number: int) -> Loader:
        ours.set_epoch(number)
        return ours

    made = {OURS: Trainer(recipe, data, device, epoch)}
    for count in sorted(set(workers)):
        loader: DataLoader[Any] = DataLoader(
            Torchvision(data),
            batch_size=size,
            shuffle=True,
            drop_last=True,
            num_workers=count,
            persistent_workers=count > 0,
            pin_memory=device.type == "cuda",
        )
        name = f"torchvision, {count} worker{'s' * (count != 1)}"
        made[name] = Trainer(recipe, data, device, lambda _, loader=loader: loader)  # type: ignore[misc]
    return made


def in_turns(
    contenders: dict[str, Trainer], steps: int, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds waited and in all, of every epoch; one epoch of each warms up."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(repeats + 1):
        for name, contender in contenders.items():
            measured = contender.run(number, steps if number else 1)
            if number:
                seconds[name].append(measured)
    return seconds


def rand_augment_seconds(
    images: Tensor, device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Seconds an image of RandAugment alone: batched on the device, and image by image."""
    augment = Augment(rand_augment=AUGMENT.rand_augment)
    batches, order = (
        InMemoryBatches(images, augment, 0, device),
        np.arange(len(images), dtype=np.int64),
    )
    theirs = v2.RandAugment(*augment.rand_augment)
    seconds: dict[str, list[float]] = {OURS: [], "torchvision": []}
    for epoch in range(repeats + 1):
        start = time.perf_counter()
        for _ in batches.batches(order, min(128, len(images)), epoch=epoch):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        middle = time.perf_counter()
        for image in images:
            theirs(image)
        if epoch:
            seconds[OURS].append((middle - start) / len(images))
            seconds["torchvision"].append((time.perf_counter() - middle) / len(images))
    return seconds


def row(name: str, values: Sequence[float], form: str) -> str:
    """One line: median, smallest, largest."""
    numbers = (statistics.median(values), min(values), max(values))
    return f"{name:<38}" + "".join(f"{format(number, form):>10}" for number in numbers)


def table(seconds: dict[str, list[tuple[float, float]]], steps: int) -> list[str]:
    """Share waited, time of a step, and how much slower torchvision's steps are."""
    lines = []
    for name, epochs in seconds.items():
        lines.append(row(f"{name}: waiting", [waited / all_ for waited, all_ in epochs], ".2%"))
        lines.append(row(f"{name}: step, ms", [1e3 * all_ / steps for _, all_ in epochs], ".1f"))
    for name, epochs in seconds.items():
        if name != OURS:
            pairs = zip(epochs, seconds[OURS], strict=True)
            ratios = [theirs / ours for (_, theirs), (_, ours) in pairs]
            lines.append(row(f"step, {name} / {OURS}", ratios, ".3f"))
    return lines


def machine(device: torch.device, threads: int) -> str:
    """Say where this runs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{threads} thread(s)"
    return f"{cpu_model()}, {name}, torch {torch.__version__}"


def parser() -> argparse.ArgumentParser:
    """Say which options there are."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--model", default="vit_small_p4_32", help="default vit_small_p4_32")
    made.add_argument("--data", default="digits", metavar="SPEC", help="default digits")
    made.add_argument("--image-size", type=int, default=32, help="pixels per side; default 32")
    made.add_argument("--batch-size", type=int, default=32, help="default 32")
    made.add_argument("--steps", type=int, default=4, help="batches per epoch; default 4")
    made.add_argument("--repeats", type=int, default=5, help="epochs of each; default 5")
    made.add_argument("--workers", type=int, default=2, help="torchvision's; also tried with 0")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", type=device_name, default=here)
    made.add_argument("--threads", type=int, default=1, help="of the training process; default 1")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print two tables."""
    given = parser().parse_args(arguments)
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    recipe = replace_path(
        recipes.get("small_images_vit"),
        {
            "model.name": given.model,
            "data.spec": given.data,
            "data.image_size": given.image_size,
            "data.batch_size": given.batch_size,
        },
    )
    # an epoch of just the batches that are timed, so that its start has its due weight
    wanted = given.steps * given.batch_size
    fraction = recipe.data.val_fraction
    limit = max(LEAST_IMAGES, math.ceil(wanted / (1 - fraction)) + 1)
    recipe = replace(recipe, data=replace(recipe.data, limit=limit))
    data = load_data(recipe.data)
    steps = min(given.steps, len(data.train) // given.batch_size)
    print(machine(device, given.threads))
    print(
        f"{given.model}, {given.data}, {given.image_size}x{given.image_size}, batch "
        f"{given.batch_size}, {given.repeats} epochs of {steps} steps each, in turns"
    )
    head = f"{'median':>10}{'smallest':>10}{'largest':>10}"
    print(f"{'training':<38}{head}")
    contenders = trainers(recipe, data, device, (0, given.workers))
    print("\n".join(table(in_turns(contenders, steps, given.repeats), steps)))
    images = data.train.images
    if images is not None:
        images = images[torch.arange(RAND_AUGMENT_IMAGES) % len(images)]
        alone = rand_augment_seconds(images, device, given.repeats)
        print(f"{'RandAugment alone':<38}{head}")
        for name, seconds in alone.items():
            print(row(f"{name}, ms per image", [1e3 * s for s in seconds], ".4f"))
        pairs = zip(alone["torchvision"], alone[OURS], strict=True)
        print(row(f"torchvision / {OURS}", [theirs / ours for theirs, ours in pairs], ".1f"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
