# SPDX-License-Identifier: Apache-2.0
"""The folder of predicted masks: PNG masks, overlays, run lengths as CSV, and what was done."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.analysis import mask_pictures
from keymix.data.decode import Size
from keymix.data.segmentation import rle
from keymix.errors import UserError
from keymix.train import files
from keymix.train.parts import Prediction
from keymix.train.recipe import is_part

MASKS, OVERLAYS = "masks", "overlays"
RUN_LENGTHS, MANIFEST = "predictions.csv", "predictions.json"
COLUMNS = ("id", "class", "segmentation")


@dataclass(frozen=True, kw_only=True)
class MaskPrediction(Prediction):
    """What a run says of an image.

    Args:
        path: The image's file.
        id: Its name among the predictions.
        size: Its height and width, pixels.
        spacing: Its millimetres from row to row and from column to column; None where unknown.
        pixels: Predicted pixels of each class but the background.
        area: Square millimetres of each; None where the spacing is unknown.
        error: Why there is no answer, or None.
    """

    id: str
    size: Size | None = None
    spacing: tuple[float, float] | None = None
    pixels: Mapping[str, int] | None = None
    area: Mapping[str, float] | None = None

    def omitted(self) -> tuple[str, ...]:
        """The fields that stand in no manifest: what there is not."""
        return tuple(name for name, value in vars(self).items() if value is None)


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """An image of which the mask is not written yet.

    Args:
        id: Its name among the predictions.
    """

    id: str


@dataclass(frozen=True, kw_only=True)
class ClassColour:
    """The colour of a class.

    Args:
        name: The class.
        colour: Red, green and blue, 0..255; None for the background.
    """

    name: str
    colour: mask_pictures.Colour | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was predicted by which run: ``predictions.json``.

    Args:
        keymix: Version of keymix.
        run: The run's folder.
        weights: Weights of the ``last`` or the ``best`` epoch.
        data: Spec of the data; None of image files.
        split: Split of the data; None of image files.
        image_size: Height and width of the images as the model sees them, pixels.
        multilabel: Whether a pixel may have several classes.
        classes: The classes.
        answered: Number of images with an answer; None before the end.
        broken: Number of images without one.
        complete: Whether all is written.
        images: The images.
    """

    keymix: str
    run: str
    weights: str
    data: str | None
    split: str | None
    image_size: Size
    multilabel: bool
    classes: tuple[ClassColour, ...]
    answered: int | None = None
    broken: int | None = None
    complete: bool = False
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
        checked(self.path, overwrite=True)
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
    ) -> dict[str, int]:
        """Write an image's mask and overlay, and keep its run lengths.

        Args:
            name: The image's id.
            image: ``[C, h, w]``, as it is drawn.
            mask: What is predicted: ``[h, w]`` of class numbers, or ``[K, h, w]`` of 0 and 1.
            truth: What is true, likewise; None where it is unknown.

        Returns:
            Pixels of each class but the background.

        Raises:
            WriteError: If the disk does not take it.
        """
        planes = mask_pictures.planes(mask, len(self.classes))
        if self.multilabel:
            for k in self.organs:
                plane = Image.fromarray(planes[k].astype(np.uint8) * 255)
                _write_picture(self.path / MASKS / self.classes[k] / f"{name}.png", plane)
        else:
            picture = mask_pictures.mask_picture(mask, self.colours)
            _write_picture(self.path / MASKS / f"{name}.png", picture)
        drawn = Image.fromarray(mask_pictures.overlay(image, mask, self.colours, truth))
        _write_picture(self.path / OVERLAYS / f"{name}.png", drawn)
        self.rows += [(name, self.classes[k], rle.encode(planes[k])) for k in self.organs]
        return {self.classes[k]: int(planes[k].sum()) for k in self.organs}

    def finish(self, manifest: Manifest) -> None:
        """Write the run lengths of all, and the manifest.

        Args:
            manifest: Of what was predicted.

        Raises:
            WriteError: If the disk does not take it.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(self.rows)
        files.write_text(self.path / RUN_LENGTHS, text.getvalue())
        files.write_json(self.path / MANIFEST, manifest)


def checked(path: Path, *, overwrite: bool) -> Path:
    """Check where predictions go, before any work.

    Args:
        path: The folder.
        overwrite: Whether predictions there may be replaced.

    Raises:
        UserError: If it is a file, or a folder with other things or predictions in it.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {str(path)!r} is a file. Masks need a folder: name one.")
    if not path.exists() or not any(path.iterdir()):
        return path
    if not (path / MANIFEST).exists():
        raise UserError(
            f"the folder {str(path)!r} is not empty and holds no predicted masks ({MANIFEST}). "
            "Name another with --out."
        )
    if not overwrite:
        raise UserError(
            f"--out {str(path)!r} holds predicted masks: name another or add --overwrite."
        )
    return path


def _of_before(path: Path) -> list[Path]:
    """List the files of an earlier prediction, as its manifest tells them."""
    if not (path / MANIFEST).exists():
        return []
    told = files.read_json(path / MANIFEST)
    names = _names(told.get("images"), "id")
    classes = _names(told.get("classes"), "name")
    folders = [path / OVERLAYS, path / MASKS, *(path / MASKS / name for name in classes)]
    inside = [folder / f"{name}.png" for name in names for folder in folders]
    return [*inside, path / RUN_LENGTHS]


def _names(rows: object, key: str) -> list[str]:
    """The names that the rows of a manifest tell; what could lead out of the folder is left out."""
    told = rows if isinstance(rows, list) else []
    return [row[key] for row in told if isinstance(row, dict) and is_part(row.get(key))]


def _write_picture(path: Path, picture: Image.Image) -> None:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    files.write_bytes(path, stream.getvalue())
