# SPDX-License-Identifier: Apache-2.0
"""Predict masks with a trained run, of image files or of a data set's split, into a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix._version import __version__
from keymix.data.decode import Size, resized_image
from keymix.data.loaders import Normaliser
from keymix.data.record import DataRecord
from keymix.data.segmentation.slices import ScanFile
from keymix.data.segmentation.table import Pixels
from keymix.data.specs import parse
from keymix.errors import UserError
from keymix.tasks.segmentation.facts import TASK
from keymix.tasks.segmentation.mask_files import (
    ClassColour,
    Manifest,
    MaskFolder,
    MaskPrediction,
    PlannedImage,
    checked,
)
from keymix.tasks.segmentation.scoring import predicted_masks
from keymix.train.damage import Which
from keymix.train.memory import enough_memory
from keymix.train.model import device_of_this_machine
from keymix.train.run_data import data_for
from keymix.train.runs import Run, SplitName, at_size, image_files, load_run, refuse_lone
from keymix.train.scoring import autocast

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_BATCH = 8


@dataclass(frozen=True)
class _Item:
    """An image to be answered, and how to read it at its own size."""

    path: str
    id: str
    spacing: tuple[float, float] | None
    pixels: Callable[[], Pixels]
    truth: Callable[[], Pixels] | None = None


def predict_masks(
    run: Run | str | Path,
    paths: Sequence[str | Path] = (),
    *,
    out: str | Path,
    data: str | None = None,
    split: SplitName | None = None,
    which: Which = "last",
    image_size: int | tuple[int, int] | None = None,
    resize: str | None = None,
    overwrite: bool = False,
) -> list[MaskPrediction]:
    """Predict masks into a folder. A broken image gets its error as an answer, others are answered.

    The model sees an image at its own image size; its logits are brought back to the image's
    (bilinear), and there each pixel takes its class. `MaskFolder` tells
    what is written.

    Args:
        run: The run, or its folder.
        paths: Image files and folders. A run on stacks of slices finds the neighbours beside a
            file, by the number in its name.
        out: The folder to write.
        data: A data spec of which a split is predicted in place of files; without both, the run's
            own data.
        split: The split of the data; ``test`` if None.
        which: Weights of the ``last`` or the ``best`` epoch.
        image_size: As in `keymix.train.runs.evaluate`.
        resize: As in `keymix.train.runs.evaluate`.
        overwrite: Replace predictions that the folder holds.

    Raises:
        UserError: If the run predicts no masks, the folder holds something, a path does not exist,
            two images have one name, weights or data are unfit, or the model, or the memory,
            cannot take the image size.
    """
    refuse_lone(resize, image_size)
    run = run if isinstance(run, Run) else load_run(run)
    if parse(run.recipe.data.spec)[0].task != TASK.name:
        raise UserError(f"the run {str(run.folder)!r} classifies images and predicts no masks.")
    if paths and (data is not None or split is not None):
        raise UserError("give either image files or a data set and its split, not both.")
    folder = checked(Path(out), overwrite=overwrite)
    with enough_memory(image_size):
        model, seen, size = at_size(run, which, image_size, resize)
        loaded = None if paths else data_for(run.recipe.data, seen, data, size)[0]
        chosen = split or "test"
        items = _of_files(paths, run, seen) if loaded is None else _of_split(loaded, chosen)
        _refuse_twins(items)
        mask_folder = MaskFolder(folder, seen.classes, seen.scored_classes, bool(seen.multilabel))
        manifest = Manifest(
            keymix=__version__,
            run=str(run.folder),
            weights=which,
            data=None if loaded is None else loaded.spec,
            split=None if loaded is None else chosen,
            image_size=size,
            multilabel=mask_folder.multilabel,
            classes=tuple(
                ClassColour(name=name, colour=colour)
                for name, colour in zip(seen.classes, mask_folder.colours, strict=True)
            ),
            images=tuple(PlannedImage(id=item.id) for item in items),
        )
        mask_folder.begin(manifest)
        answer = _Answering(model.to(device_of_this_machine()), seen, size, run.recipe.precision)
        told = [
            each
            for start in range(0, len(items), _BATCH)
            for each in answer.batch(items[start : start + _BATCH], mask_folder)
        ]
    good = sum(each.error is None for each in told)
    mask_folder.finish(
        replace(
            manifest,
            answered=good,
            broken=len(told) - good,
            complete=True,
            images=tuple(told),
        )
    )
    return told


@dataclass(frozen=True)
class _Answering:
    """A run's model with all that it takes to answer images.

    Args:
        model: The model, on its device.
        seen: The record of the data that it was trained on.
        size: Height and width of the images that it sees.
        precision: The recipe's.
    """

    model: nn.Module
    seen: DataRecord
    size: Size
    precision: str

    def batch(self, items: Sequence[_Item], folder: MaskFolder) -> Iterator[MaskPrediction]:
        """Answer some images and write what is predicted."""
        read = [_read(item) for item in items]
        shown = [resized_image(image, self.size) for image, _ in read if not isinstance(image, str)]
        logits = iter(self._logits(torch.stack(shown)) if shown else ())
        for item, (image, truth) in zip(items, read, strict=True):
            if isinstance(image, str):
                yield MaskPrediction(path=item.path, id=item.id, error=image)
                continue
            size = (image.shape[-2], image.shape[-1])
            mask = at_native_size(next(logits), size, multilabel=folder.multilabel)
            drawn = image
            if (self.seen.stack or 1) > 1:
                drawn = image[len(image) // 2][None]
            pixels = folder.write(item.id, drawn, mask, truth)
            area = None
            if item.spacing is not None:
                pixel = item.spacing[0] * item.spacing[1]
                area = {name: number * pixel for name, number in pixels.items()}
            yield MaskPrediction(
                path=item.path,
                id=item.id,
                size=size,
                spacing=item.spacing,
                pixels=pixels,
                area=area,
            )

    @torch.inference_mode()
    def _logits(self, pixels: Tensor) -> Tensor:
        """Ask the model: uint8 ``[B, C, H, W]`` -> ``[B, K, H, W]``."""
        device = device_of_this_machine()
        normalised = Normaliser(self.seen.mean, self.seen.std, device)
        with autocast(device, self.precision):
            logits: Tensor = self.model(normalised(pixels.to(device)))
        return logits.float().cpu()


def at_native_size(logits: Tensor, size: Size, *, multilabel: bool) -> Pixels:
    """Bring the logits of an image to its own size (bilinear), and give each pixel its class.

    Args:
        logits: Of the model, at the size that it sees.
        size: Height and width of the image, pixels.
        multilabel: Whether a pixel may have several classes.

    Shape: ``[K, H, W]`` -> uint8 ``[h, w]`` of class numbers, ``[K, h, w]`` of 0 and 1 if
    ``multilabel``.
    """
    if logits.shape[-2:] != size:
        logits = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
    mask: Pixels = predicted_masks(logits[None], multilabel=multilabel)[0].to(torch.uint8).numpy()
    return mask


def _read(item: _Item) -> tuple[Pixels | str, Pixels | None]:
    """Read an image and its truth; the error's text if one cannot be read."""
    try:
        return item.pixels(), None if item.truth is None else item.truth()
    except UserError as error:
        return str(error), None


def _of_files(paths: Sequence[str | Path], run: Run, seen: DataRecord) -> list[_Item]:
    slices = parse(run.recipe.data.spec)[0].name == "uwgi"
    found = [
        ScanFile(path=path, slices=slices, channels=seen.in_chans)
        for path in dict.fromkeys(image_files(paths))
    ]
    return [_Item(str(each.path), each.id, each.spacing, each.pixels) for each in found]


def _of_split(data: ImageData, split: str) -> list[_Item]:
    if split not in ("train", "val", "test"):
        raise UserError(f"split {split!r}: choose 'train', 'val' or 'test'.")
    scans = getattr(data, split).scans
    return [
        _Item(
            scans.name(i),
            scans.scan_id(i),
            scans.spacing(i),
            partial(scans.pixels, i),
            partial(scans.mask, i),
        )
        for i in range(len(scans))
    ]


def _refuse_twins(items: Sequence[_Item]) -> None:
    """Refuse two images of one name: one's masks would replace the other's."""
    first: dict[str, str] = {}
    for item in items:
        if item.id in first:
            raise UserError(
                f"{first[item.id]} and {item.path} have the same name {item.id!r}. Predict them "
                "apart, each into its own --out."
            )
        first[item.id] = item.path
