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
from keymix.arguments import checked
from keymix.data import rle
from keymix.data.decode import Pixels, open_image
from keymix.data.record import DataRecord
from keymix.data.sample import BadSampleError, Size
from keymix.data.shown import named, takes_volumes
from keymix.data.volumes import VolumeSlices, case_of, is_volume, open_volume
from keymix.errors import UserError
from keymix.report.tables import csv_text
from keymix.tasks.segmentation.facts import TASK
from keymix.tasks.segmentation.scoring import predicted_masks
from keymix.train import files
from keymix.train.evaluation import SplitName
from keymix.train.folder import Which
from keymix.train.parts import Prediction, Wanted
from keymix.train.predict_folder import (
    OVERLAYS,
    VOLUMES,
    FolderManifest,
    FolderWriter,
    Item,
    write_picture,
)
from keymix.train.recipe import is_part
from keymix.train.runs import Run
from keymix.train.scoring import Flips

if TYPE_CHECKING:
    from keymix.data.dataset import Split

AT_ONCE = 8
"""Images that a model is given together."""
MASKS = "masks"
WHAT = "predicted masks"
ARRAYS = ("mask", "source")
"""Fields of a prediction that are in no file."""
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
        source: What `probabilities` and `overlay` are made of: the model's logits, the image's
            pixels, and the record of the data; None where the mask is.
        error: Why there is no answer, or None.
    """

    id: str = ""
    size: Size | None = None
    spacing: tuple[float, float] | None = None
    pixels: Mapping[str, int] | None = None
    area: Mapping[str, float] | None = None
    mask: NDArray[np.uint8] | None = field(default=None, compare=False, repr=False)
    source: tuple[Tensor, Pixels | None, DataRecord] | None = field(
        default=None, compare=False, repr=False
    )

    @property
    def probabilities(self) -> NDArray[np.float32] | None:
        """Of each class at each pixel of the image, ``[K, h, w]``; None where the mask is."""
        if self.source is None or self.size is None:
            return None
        logits, _, seen = self.source
        logits = at_native_size(logits, self.size)
        return np.asarray(logits.sigmoid() if seen.multilabel else logits.softmax(0))

    @property
    def overlay(self) -> Pixels | None:
        """The mask over the image, uint8 ``[h, w, 3]``, as ``keymix predict`` draws it.

        None where the mask is, and of what was prepared before.
        """
        if self.source is None or self.mask is None or self.source[1] is None:
            return None
        return _drawn(self.source[1], self.mask, self.source[2])

    def omitted(self) -> tuple[str, ...]:
        """The fields that are in no manifest: arrays, and what there is not."""
        return tuple(name for name, value in vars(self).items() if value is None or name in ARRAYS)


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
        images: The images.
        volumes: Names of the volumes that their masks make.
    """

    multilabel: bool
    classes: tuple[ClassColour, ...]
    images: tuple[MaskPrediction, ...]
    volumes: tuple[str, ...] = ()


class MaskWriter(FolderWriter[MaskPrediction]):
    """Writes masks, overlays and run lengths; `predict_masks` lists the files."""

    task = TASK
    what = WHAT
    content = "masks of {images}, overlays and predictions.csv with run lengths"
    results = RUN_LENGTHS

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self.rows: list[tuple[str, str, str]] = []
        self.volumes: dict[Path, dict[int, str]] = {}  # name of each slice, by volume and place

    @staticmethod
    def named(path: str, seen: DataRecord) -> MaskPrediction:
        """Call a file as the data would."""
        own, spacing = named(Path(path), seen)
        return MaskPrediction(path=path, id=own, spacing=spacing)

    @staticmethod
    def name(named: MaskPrediction) -> str:
        """Name a mask."""
        return named.id

    @staticmethod
    def answer(
        named: MaskPrediction, size: Size, output: Tensor, seen: DataRecord
    ) -> MaskPrediction:
        """Add the mask of logits ``[K, H, W]``, with its pixels and areas."""
        logits = at_native_size(output.float().cpu(), size)[None]
        mask = predicted_masks(logits, multilabel=bool(seen.multilabel))[0].to(torch.uint8).numpy()
        planes = mask_pictures.planes(mask, len(seen.classes))
        pixels = {seen.classes[k]: int(planes[k].sum()) for k in seen.scored_classes}
        area = None
        if named.spacing is not None:
            pixel = named.spacing[0] * named.spacing[1]
            area = {name: number * pixel for name, number in pixels.items()}
        return replace(named, size=size, mask=mask, pixels=pixels, area=area)

    def of_files(self, paths: Sequence[Path]) -> list[Item[MaskPrediction]]:
        """List images, and of volumes the slices."""
        items = []
        for path in paths:
            if not (takes_volumes(self.seen) and is_volume(path)):
                items += super().of_files([path])
                continue
            slices = partial(
                VolumeSlices, path, count=self.seen.in_chans, window=self.seen.intensity_window
            )
            try:
                volume = open_volume(path)
            except BadSampleError:
                broken = MaskPrediction(path=str(path), id=case_of(path))
                items.append(Item(named=broken, pixels=slices(0)))  # which says what is wrong
                continue
            for z in range(volume.depth):
                name = f"{case_of(path)}_slice_{z:04d}"
                named = MaskPrediction(path=f"{path} slice {z}", id=name, spacing=volume.spacing)
                items.append(Item(named=named, pixels=slices(z)))
                self.volumes.setdefault(path, {})[z] = name
        return items

    def of_split(self, split: Split) -> list[Item[MaskPrediction]]:
        """List images with their truth."""
        for row in split.rows:
            if isinstance(at := row.image, VolumeSlices):
                self.volumes.setdefault(at.path, {})[at.place] = row.name
        return [
            Item(
                named=MaskPrediction(path=row.id, id=row.name, spacing=row.spacing),
                pixels=partial(split.own, i),
                truth=row.read_target,
            )
            for i, row in enumerate(split.rows)
        ]

    def folders(self) -> Sequence[str]:
        """Name the folder of masks, or that of each class."""
        if not self.seen.multilabel:
            return [MASKS]
        names = [self.seen.classes[k] for k in self.seen.scored_classes]
        bad = next((name for name in names if not is_part(name)), None)
        if bad is not None:
            raise UserError(
                f"the class {bad!r} cannot be the name of a folder of masks: rename it in the "
                "data, and train again"
            )
        return [f"{MASKS}/{name}" for name in names]

    def manifest(self, about: FolderManifest, found: Sequence[MaskPrediction]) -> Manifest:
        """Add the classes and the images."""
        return Manifest(
            **vars(about),
            multilabel=bool(self.seen.multilabel),
            classes=tuple(
                ClassColour(name=name, colour=colour)
                for name, colour in zip(self.seen.classes, _colours(self.seen), strict=True)
            ),
            images=tuple(found),
            volumes=tuple(map(_volume, self._answered(found))),
        )

    def _answered(self, found: Sequence[MaskPrediction]) -> list[Path]:
        """List the volumes of which every slice is answered, or will be."""
        good = {each.id for each in found if each.error is None}
        return [
            path
            for path, names in self.volumes.items()
            if len(names) == open_volume(path).depth and good.issuperset(names.values())
        ]

    def write(self, found: MaskPrediction, image: Pixels, truth: Pixels | None) -> MaskPrediction:
        """Write the mask and the overlay; keep run lengths."""
        mask, seen = found.mask, self.seen
        assert mask is not None
        planes = mask_pictures.planes(mask, len(seen.classes))
        if seen.multilabel:
            whites = planes.astype(np.uint8) * 255
            pictures = [Image.fromarray(whites[k]) for k in seen.scored_classes]
        else:
            pictures = [mask_pictures.mask_picture(mask, _colours(seen))]
        pictures.append(Image.fromarray(_drawn(image, mask, seen, truth)))
        for folder, picture in zip((*self.folders(), OVERLAYS), pictures, strict=True):
            write_picture(self.folder / folder / f"{found.id}.png", picture)
        self.rows += [
            (found.id, seen.classes[k], rle.encode(planes[k])) for k in seen.scored_classes
        ]
        return replace(found, mask=None)

    def write_results(self, found: Sequence[MaskPrediction]) -> None:
        """Write the run lengths, and the masks of volumes of which all slices were answered."""
        files.write_text(self.folder / RUN_LENGTHS, csv_text(COLUMNS, self.rows))
        labels = np.array(self.seen.class_ids or range(len(self.seen.classes)))
        answered = self._answered(found)
        if answered:
            self.content = f"{len(answered)} volume{'s' * (len(answered) > 1)}, {self.content}"
        for path in answered:
            names, planes = self.volumes[path], []
            for z in sorted(names):
                with open_image(self.folder / MASKS / f"{names[z]}.png") as image:
                    planes.append(labels[np.asarray(image)])
            place = self.folder / VOLUMES / _volume(path)
            part = files.part_of(place)
            files.remove(part)
            for end, content in open_volume(path).like(planes).items():
                file = Path(f"{part}{end}" if end.startswith("/") else part)
                files.make_folder(file.parent)
                files.write_bytes(file, content)
            files.replace_folder(part, place)


def _colours(seen: DataRecord) -> list[mask_pictures.Colour | None]:
    """A colour for each class, None for the background."""
    number = len(seen.classes)
    left = [k for k in range(number) if k not in seen.scored_classes]
    return mask_pictures.class_colours(number, left[0] if left else None)


def _drawn(image: Pixels, mask: Pixels, seen: DataRecord, truth: Pixels | None = None) -> Pixels:
    """Draw a mask over its image, of a stack over the middle slice."""
    shown = image[len(image) // 2][None] if (seen.stack or 1) > 1 else image
    return mask_pictures.overlay(shown, mask, _colours(seen), truth)


def _volume(path: Path) -> str:
    return f"{case_of(path)}{open_volume(path).suffix}"


@checked
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
    overlap: float | None = None,
    flips: Flips | None = None,
    overwrite: bool = False,
) -> list[MaskPrediction]:
    """Predict masks into a folder. A broken image gets its error as an answer, others are answered.

    The model sees an image at its own image size; its logits are brought back to the image's
    (bilinear), and there each pixel takes its class. With ``overlap`` windows of the model's image
    size slide over the image instead.

    - ``masks/<id>.png``: class numbers with a palette, or ``masks/<class>/<id>.png`` of 0 and 255
      where a pixel may have several classes;
    - ``overlays/<id>.png``: the image in grey, predicted classes filled, true ones outlined;
    - ``volumes/<case>.nii.gz``, a folder ``<case>`` of DICOM files or ``<case>.tif``, as the
      volume's own format is, of volumes of which all slices are answered: the values of the labels
      that the run was trained on, where the volume lies;
    - ``predictions.csv``: ``id,class,segmentation``, run lengths of each class but the background;
    - ``predictions.json``, the manifest: what was predicted by which run.

    Args:
        run: The run, or its folder; or an exported file, of which image files alone are
            predicted.
        paths: Image files and folders. A run on stacks of slices finds a file's neighbours
            next to it, by the number in its name.
        out: The folder to write.
        data: A data spec of which a split is predicted in place of files; without both, the run's
            own data.
        split: The split of the data; ``test`` if None.
        which: Weights of the ``last`` or the ``best`` epoch.
        image_size: As in `keymix.train.runs.evaluate`.
        resize: As in `keymix.train.runs.evaluate`.
        overlap: As in `keymix.train.runs.evaluate`.
        flips: As in `keymix.train.runs.evaluate`.
        overwrite: Replace predictions that the folder holds.

    Raises:
        UserError: If the run predicts no masks, the folder holds something, a path does not exist,
            two images have one name, weights or data are unfit, or the model, or the memory,
            cannot take the image size.
    """
    wanted = Wanted(
        run=run.folder if isinstance(run, Run) else Path(run),
        paths=paths,
        out=Path(out),
        data=data,
        split=split,
        which=which,
        image_size=image_size,
        resize=resize,
        overlap=overlap,
        flips=flips,
        overwrite=overwrite,
    )
    return MaskWriter(wanted).predict()


def at_native_size(logits: Tensor, size: Size) -> Tensor:
    """Resize the logits of an image to its own size (bilinear): ``[K, H, W]`` -> ``[K, h, w]``."""
    if logits.shape[-2:] == size:
        return logits
    return F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
