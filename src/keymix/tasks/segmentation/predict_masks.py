# SPDX-License-Identifier: Apache-2.0
"""Predict masks with a trained run, of image files or of a data set's split, into a folder.

The folder has PNG masks, overlays, run lengths as CSV, and a manifest of what was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.analysis import mask_pictures
from keymix.data.decode import Size
from keymix.data.record import DataRecord
from keymix.data.segmentation import rle
from keymix.data.segmentation.table import Pixels
from keymix.data.shown import scan_file
from keymix.errors import UserError
from keymix.report.tables import csv_text
from keymix.tasks.segmentation.facts import TASK
from keymix.tasks.segmentation.scoring import predicted_masks
from keymix.train import files
from keymix.train.evaluation import SplitName
from keymix.train.folder import Which
from keymix.train.parts import Prediction, Wanted
from keymix.train.predict_folder import (
    MANIFEST,
    OVERLAYS,
    FolderManifest,
    FolderWriter,
    Item,
    of_before,
    write_picture,
)
from keymix.train.recipe import is_part
from keymix.train.runs import Run, load_run

if TYPE_CHECKING:
    from keymix.data.dataset import Split

AT_ONCE = 8
"""Images that a model is given together."""
MASKS = "masks"
WHAT = "predicted masks"
RUN_LENGTHS = "predictions.csv"
COLUMNS = ("id", "class", "segmentation")


@dataclass(frozen=True, kw_only=True)
class MaskPrediction(Prediction):
    """What a run says of an image.

    Args:
        path: The image's file.
        id: Its name among the predictions; empty of an image in memory.
        size: Its height and width, pixels.
        spacing: Its millimetres from row to row and from column to column; None where unknown.
        pixels: Predicted pixels of each class but the background.
        area: Square millimetres of each; None where the spacing is unknown.
        mask: The mask at its own size: uint8 ``[h, w]`` of class numbers, or ``[K, h, w]`` of 0
            and 1 where a pixel may have several classes; None where it was written into a folder.
        error: Why there is no answer, or None.
    """

    id: str = ""
    size: Size | None = None
    spacing: tuple[float, float] | None = None
    pixels: Mapping[str, int] | None = None
    area: Mapping[str, float] | None = None
    mask: NDArray[np.uint8] | None = field(default=None, compare=False, repr=False)

    def omitted(self) -> tuple[str, ...]:
        """The fields that are in no manifest: the mask, and what there is not."""
        return tuple(name for name, value in vars(self).items() if value is None or name == "mask")


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """An image by its name among the predictions, of which the mask is not written yet."""

    id: str


@dataclass(frozen=True, kw_only=True)
class ClassColour:
    """The colour of a class: red, green and blue, 0..255; None for the background."""

    name: str
    colour: mask_pictures.Colour | None


@dataclass(frozen=True, kw_only=True)
class Manifest(FolderManifest):
    """What was predicted by which run: ``predictions.json``.

    Args:
        multilabel: Whether a pixel may have several classes.
        classes: The classes.
        answered: Number of images with an answer; None before the end.
        broken: Number of images without one.
        images: The images.
    """

    multilabel: bool
    classes: tuple[ClassColour, ...]
    answered: int | None = None
    broken: int | None = None
    images: tuple[MaskPrediction | PlannedImage, ...]

    def omitted(self) -> tuple[str, ...]:
        """The fields that are not written: the counts before the end."""
        return () if self.complete else ("answered", "broken")


@dataclass
class MaskFolder:
    """Writes masks as they are predicted; every file is whole or not there.

    - ``masks/<id>.png``: class numbers with a palette, or ``masks/<class>/<id>.png`` of 0 and 255
      where a pixel may have several classes;
    - ``overlays/<id>.png``: the image in grey, predicted organs filled, true ones outlined;
    - ``predictions.csv``: ``id,class,segmentation``, run lengths of each class but the background;
    - ``predictions.json``, the manifest: what was predicted by which run.

    Args:
        path: The folder.
        classes: Names of the classes.
        organs: Numbers of those that are no background.
        multilabel: Whether a pixel may have several classes.
    """

    path: Path
    classes: Sequence[str]
    organs: Sequence[int]
    multilabel: bool
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def colours(self) -> list[mask_pictures.Colour | None]:
        """A colour for each class, None for the background."""
        number = len(self.classes)
        left = [k for k in range(number) if k not in self.organs]
        return mask_pictures.class_colours(number, left[0] if left else None)

    def begin(self, manifest: Manifest) -> None:
        """Make the folder, take out the predictions of before, and note what will be written.

        Args:
            manifest: With all images that will be written.

        Raises:
            UserError: If something else is in the folder, or the disk does not take it.
        """
        files.checked_output(self.path, manifest=MANIFEST, what=WHAT, overwrite=True)
        self._refuse_paths([image.id for image in manifest.images])
        for file in _of_before(self.path):
            file.unlink(missing_ok=True)
        inside = [f"{MASKS}/{self.classes[k]}" for k in self.organs] if self.multilabel else [MASKS]
        for name in (OVERLAYS, *inside):
            files.make_folder(self.path / name)
        files.write_json(self.path / MANIFEST, manifest)

    def _refuse_paths(self, ids: Sequence[str]) -> None:
        """Refuse names of classes and images that would lead out of the folder."""
        classes = [self.classes[k] for k in self.organs] if self.multilabel else []
        for what, names in (("class", classes), ("image", ids)):
            bad = next((name for name in names if not is_part(name)), None)
            if bad is not None:
                raise UserError(
                    f"the {what} {bad!r} cannot be the name of a file of masks: rename it in the "
                    "data" + (", and train again" if what == "class" else "")
                )

    def write(
        self,
        name: str,
        image: NDArray[np.uint8],
        mask: NDArray[np.uint8],
        truth: NDArray[np.uint8] | None,
    ) -> None:
        """Write an image's mask and overlay, and keep its run lengths.

        Args:
            name: The image's id.
            image: ``[C, h, w]``, as it is drawn.
            mask: What is predicted: ``[h, w]`` of class numbers, or ``[K, h, w]`` of 0 and 1.
            truth: What is true, likewise; None where it is unknown.

        Raises:
            WriteError: If the disk does not take it.
        """
        planes = mask_pictures.planes(mask, len(self.classes))
        if self.multilabel:
            for k in self.organs:
                plane = Image.fromarray(planes[k].astype(np.uint8) * 255)
                write_picture(self.path / MASKS / self.classes[k] / f"{name}.png", plane)
        else:
            picture = mask_pictures.mask_picture(mask, self.colours)
            write_picture(self.path / MASKS / f"{name}.png", picture)
        drawn = Image.fromarray(mask_pictures.overlay(image, mask, self.colours, truth))
        write_picture(self.path / OVERLAYS / f"{name}.png", drawn)
        self.rows += [(name, self.classes[k], rle.encode(planes[k])) for k in self.organs]

    def finish(self, manifest: Manifest) -> None:
        """Write the run lengths of all, and the manifest.

        Args:
            manifest: Of what was predicted.

        Raises:
            WriteError: If the disk does not take it.
        """
        files.write_text(self.path / RUN_LENGTHS, csv_text(COLUMNS, self.rows))
        files.write_json(self.path / MANIFEST, manifest)


def _of_before(path: Path) -> list[Path]:
    """List the files of an earlier prediction, by its manifest."""
    classes = of_before(path, "classes", "name")
    folders = [path / OVERLAYS, path / MASKS, *(path / MASKS / name for name in classes)]
    names = of_before(path, "images", "id")
    inside = [folder / f"{name}.png" for name in names for folder in folders]
    return [*inside, path / RUN_LENGTHS]


class MaskWriter(FolderWriter[MaskPrediction]):
    """Writes masks into a `MaskFolder`."""

    task = TASK
    what = WHAT
    content = "masks of {images}, overlays and predictions.csv with run lengths"
    at_once = AT_ONCE

    @staticmethod
    def named(path: str, seen: DataRecord) -> MaskPrediction:
        """Call a file as the data would."""
        file = scan_file(Path(path), seen)
        return MaskPrediction(path=path, id=file.id, spacing=file.spacing)

    @staticmethod
    def name(named: MaskPrediction) -> str:
        """Name a mask."""
        return named.id

    @staticmethod
    def answer(
        named: MaskPrediction, size: Size, output: Tensor, seen: DataRecord
    ) -> MaskPrediction:
        """Add the mask of logits ``[K, H, W]``, with its pixels and areas."""
        mask = at_native_size(output.float().cpu(), size, multilabel=bool(seen.multilabel))
        planes = mask_pictures.planes(mask, len(seen.classes))
        pixels = {seen.classes[k]: int(planes[k].sum()) for k in seen.scored_classes}
        area = None
        if named.spacing is not None:
            pixel = named.spacing[0] * named.spacing[1]
            area = {name: number * pixel for name, number in pixels.items()}
        return replace(named, size=size, mask=mask, pixels=pixels, area=area)

    def of_split(self, split: Split) -> list[Item[MaskPrediction]]:
        """List images with their truth."""
        scans = split.scans
        assert scans is not None
        return [
            Item(
                named=MaskPrediction(
                    path=scans.name(i), id=scans.scan_id(i), spacing=scans.spacing(i)
                ),
                pixels=partial(scans.pixels, i),
                truth=partial(scans.mask, i),
            )
            for i in range(len(scans))
        ]

    def begin(self, about: FolderManifest) -> None:
        """Begin the folder."""
        seen = self.seen
        self.masks = MaskFolder(
            self.folder, seen.classes, seen.scored_classes, bool(seen.multilabel)
        )
        self.manifest = Manifest(
            **vars(about),
            multilabel=self.masks.multilabel,
            classes=tuple(
                ClassColour(name=name, colour=colour)
                for name, colour in zip(seen.classes, self.masks.colours, strict=True)
            ),
            images=tuple(PlannedImage(id=item.named.id) for item in self.items),
        )
        self.masks.begin(self.manifest)

    def write(self, found: MaskPrediction, image: Pixels, truth: Pixels | None) -> MaskPrediction:
        """Write the mask; of a stack the middle slice is drawn."""
        stacked = (self.seen.stack or 1) > 1
        shown = image[len(image) // 2][None] if stacked else image
        if found.mask is not None:
            self.masks.write(found.id, shown, found.mask, truth)
        return replace(found, mask=None)

    def finish(self, found: Sequence[MaskPrediction]) -> None:
        """Write the run lengths and the whole manifest."""
        good = sum(each.error is None for each in found)
        counted = replace(self.manifest, answered=good, broken=len(found) - good)
        self.masks.finish(replace(counted, complete=True, images=tuple(found)))


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
    (bilinear), and there each pixel takes its class. `MaskFolder` lists the
    files.

    Args:
        run: The run, or its folder.
        paths: Image files and folders. A run on stacks of slices finds a file's neighbours
            next to it, by the number in its name.
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
    run = run if isinstance(run, Run) else load_run(run)
    wanted = Wanted(
        run=run.folder,
        paths=paths,
        out=Path(out),
        data=data,
        split=split,
        which=which,
        image_size=image_size,
        resize=resize,
        overwrite=overwrite,
    )
    return MaskWriter(wanted).predict(run)


def at_native_size(logits: Tensor, size: Size, *, multilabel: bool) -> Pixels:
    """Resize the logits of an image to its own size (bilinear), and give each pixel its class.

    Shape: ``[K, H, W]`` -> uint8 ``[h, w]`` of class numbers, ``[K, h, w]`` of 0 and 1 if
    ``multilabel``.
    """
    if logits.shape[-2:] != size:
        logits = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
    mask: Pixels = predicted_masks(logits[None], multilabel=multilabel)[0].to(torch.uint8).numpy()
    return mask
