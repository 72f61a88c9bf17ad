# SPDX-License-Identifier: Apache-2.0
"""Predict image files, or a split of data, into a folder: what all tasks that write one share.

A task's `FolderWriter` says which images there are and what is written of each.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from keymix._version import __version__
from keymix.data.decode import Pixels
from keymix.data.record import DataRecord
from keymix.data.sample import BadSampleError, Size
from keymix.data.shown import file_pixels, image_files, takes_volumes
from keymix.errors import UserError
from keymix.task import Task
from keymix.train import files
from keymix.train.evaluation import data_for
from keymix.train.model import enough_memory
from keymix.train.parts import Answered, AnswersPart, Prediction, Wanted
from keymix.train.predict import TrainedModel, load
from keymix.train.recipe import is_part

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split

MANIFEST, OVERLAYS, VOLUMES = "predictions.json", "overlays", "volumes"


@dataclass(frozen=True, kw_only=True)
class FolderManifest:
    """What was predicted by which run, ``predictions.json``; a task's own has more fields.

    Args:
        keymix: Version of keymix.
        run: The run's folder, or the exported file.
        weights: Weights of the ``last`` or the ``best`` epoch.
        data: Spec of the data; None of image files.
        split: Split of the data; None of image files.
        image_size: Height and width of the images as the model sees them, pixels; of images that
            keep their proportions short and long side.
        overlap: Share by which windows of that size overlap; None of images seen whole.
        flips: Mirror images that were answered too.
        complete: Whether all is written.
    """

    keymix: str
    run: str
    weights: str
    data: str | None
    split: str | None
    image_size: Size
    overlap: float | None = None
    flips: str | None = None
    complete: bool = False


PredictionT = TypeVar("PredictionT", bound=Prediction)


@dataclass(frozen=True, kw_only=True)
class Item(Generic[PredictionT]):
    """An image to be answered: what is said before it is read, and its pixels at its own size.

    `pixels` are uint8 ``[C, h, w]``; `truth` is what is true of it, if that is drawn.
    """

    named: PredictionT
    pixels: Callable[[], Pixels | Tensor]
    truth: Callable[[], Tensor] | None = None


class FolderWriter(ABC, Generic[PredictionT]):
    """Predicts into a folder: what images are called and how they are answered and written.

    `what` the folder holds, such as ``predicted masks``; `content` says with ``{images}`` what is
    written, `results` is the file of what is of all images together. `seen` is the record of the
    data that the run was trained on.
    """

    task: Task
    what: str
    content: str
    results: str
    folder: Path
    seen: DataRecord
    items: Sequence[Item[PredictionT]]

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    @staticmethod
    @abstractmethod
    def named(path: str, seen: DataRecord) -> PredictionT:
        """Say of a file what is known before it is read."""

    @staticmethod
    @abstractmethod
    def name(named: PredictionT) -> str:
        """Name an image in the folder, as no other may be named."""

    @staticmethod
    @abstractmethod
    def answer(named: PredictionT, size: Size, output: Any, seen: DataRecord) -> PredictionT:
        """Add what a model returned for an image, at the image's own height and width."""

    def of_files(self, paths: Sequence[Path]) -> list[Item[PredictionT]]:
        """List image files."""
        seen = self.seen
        return [
            Item(named=self.named(str(path), seen), pixels=partial(file_pixels, path, seen))
            for path in paths
        ]

    @abstractmethod
    def of_split(self, split: Split) -> list[Item[PredictionT]]:
        """List the images of a split."""

    @abstractmethod
    def manifest(self, about: FolderManifest, found: Sequence[PredictionT]) -> FolderManifest:
        """Make the manifest of what is predicted, or of what will be, before it is."""

    def folders(self) -> Sequence[str]:
        """Name the folders of pictures besides that of the overlays."""
        return ()

    @abstractmethod
    def write(self, found: PredictionT, image: Pixels, truth: Pixels | None) -> PredictionT:
        """Write and draw an answer; return what is kept of it."""

    @abstractmethod
    def write_results(self, found: Sequence[PredictionT]) -> None:
        """Write what is of all images together."""

    def predict(self) -> list[PredictionT]:
        """Predict by the run; a broken image is answered by its error.

        Nothing is written before task, folder, names, weights and memory are known to fit.
        """
        wanted, size = self.wanted, self.wanted.image_size
        trained = load(
            wanted.run,
            which=wanted.which,
            image_size=size,
            resize=wanted.resize,
            overlap=wanted.overlap,
            flips=wanted.flips,
        )
        self.seen, task = (seen := trained.data), trained.task
        if task.name != self.task.name:
            raise UserError(
                f"the run {trained.place!r} {task.does}: name one that {self.task.does}."
            )
        if wanted.paths and (wanted.data is not None or wanted.split is not None):
            raise UserError("give either image files or a data set and its split, not both.")
        trained.check_answers()
        self.folder = files.checked_output(
            wanted.out, manifest=MANIFEST, what=self.what, overwrite=wanted.overwrite
        )
        data, split = None, None
        with enough_memory(size):
            if wanted.paths:
                paths = image_files(wanted.paths, volumes=takes_volumes(seen))
                self.items = self.of_files([*dict.fromkeys(paths)])
            else:
                data = data_for(trained.recipe.data, seen, wanted.data, trained.image_size)
                split = wanted.split or "test"
                splits = {each.name: each for each in data.splits}
                if split not in splits:
                    raise UserError(f"split {split!r}: choose 'train', 'val' or 'test'.")
                self.items = self.of_split(splits[split])
            self._refuse_names()
            folders = [OVERLAYS, *self.folders()]
            self._clear()
            for name in folders:
                files.make_folder(self.folder / name)
            about = FolderManifest(
                keymix=__version__,
                run=trained.place,
                weights=wanted.which,
                data=None if data is None else data.spec,
                split=split,
                image_size=trained.image_size,
                overlap=seen.window_overlap,
                flips=wanted.flips,
            )
            planned = self.manifest(about, [item.named for item in self.items])
            files.write_json(self.folder / MANIFEST, planned)
            found = [
                each
                for start in range(0, len(self.items), trained.at_once)
                for each in self._written(trained, self.items[start : start + trained.at_once])
            ]
        self.write_results(found)
        whole = self.manifest(replace(about, complete=True), found)
        files.write_json(self.folder / MANIFEST, whole)
        return found

    def _written(
        self, trained: TrainedModel, items: Sequence[Item[PredictionT]]
    ) -> Iterator[PredictionT]:
        """Answer some images."""
        read = [_read(item) for item in items]
        shown = [trained.prepare(image) for image, _ in read if not isinstance(image, str)]
        outputs = iter(trained.outputs(shown) if shown else ())
        for item, (image, truth) in zip(items, read, strict=True):
            if isinstance(image, str):
                yield replace(item.named, error=image)
            else:
                size = (image.shape[-2], image.shape[-1])
                found = self.answer(item.named, size, next(outputs), self.seen)
                yield self.write(found, image, truth)

    def _refuse_names(self) -> None:
        """Refuse names of images that lead out of the folder, or that two of them have."""
        first: dict[str, str] = {}
        for named in (item.named for item in self.items):
            name = self.name(named)
            if not is_part(name):
                raise UserError(f"the image {name!r} cannot be the name of a file: rename it.")
            if name in first:
                raise UserError(
                    f"{first[name]} and {named.path} have the same name {name!r}. Predict them "
                    "apart, each into its own --out."
                )
            first[name] = named.path

    def _clear(self) -> None:
        """Take out the results of an earlier prediction, and the pictures that it names."""
        before = self.folder / MANIFEST
        written = files.read_json(before) if before.exists() else {}
        known = [row for row in written.get("images") or () if isinstance(row, dict)]
        names = {str(row.get(key)) for row in known for key in ("id", "overlay")}
        for name in map(str, written.get("volumes") or ()):
            if is_part(name):
                files.remove(self.folder / VOLUMES / name)
        for path in self.folder.glob("*/**/*"):
            if path.is_file() and {path.name, path.stem} & names:
                path.unlink()
        (self.folder / self.results).unlink(missing_ok=True)


def _read(item: Item[Any]) -> tuple[Pixels | str, Pixels | None]:
    """Read an image and its truth; the error's text if one cannot be read."""
    try:
        truth = None if item.truth is None else np.asarray(item.truth())
        return np.asarray(item.pixels()), truth
    except BadSampleError as error:
        return error.faults[0].message, None  # leaving images out is training's remedy
    except UserError as error:
        return str(error), None


def write_picture(path: Path, picture: Image.Image, kind: str = "PNG") -> None:
    """Write a picture whole or not at all."""
    stream = io.BytesIO()
    picture.save(stream, kind, quality=90)
    files.write_bytes(path, stream.getvalue())


class FolderAnswers(AnswersPart, Generic[PredictionT]):
    """Answers of a task whose predictions a `folder_writer` writes, with numbers of classes."""

    prediction: type[PredictionT]
    folder_writer: type[FolderWriter[PredictionT]]
    predict_options = frozenset({"data", "per_image", "split"})

    def write(self, wanted: Wanted) -> tuple[Sequence[PredictionT], str]:
        """Write predictions as the public function that is named as ``writer``."""
        writer = self.folder_writer(wanted)
        found = writer.predict()
        good = sum(each.error is None for each in found)
        content = writer.content.format(images=f"{good} image{'s' * (good != 1)}")
        return found, f"{content}: {wanted.out}"

    def predicted(
        self, outputs: Any, inputs: Sequence[Answered], seen: DataRecord, *, top: int
    ) -> Iterator[PredictionT]:
        """Say what a model gave for some inputs at their own sizes."""
        del top
        writer = self.folder_writer
        for output, each in zip(outputs, inputs, strict=True):
            named = writer.named(each.path, seen) if each.path else self.prediction(path="")
            yield writer.answer(named, each.size, output, seen)

    def check_data(self, data: ImageData, seen: DataRecord) -> None:
        """Refuse other classes, and the same in another order."""
        if data.classes != seen.classes:
            ours, theirs = (
                ", ".join(each[:5]) + " …" * (len(each) > 5)
                for each in (data.classes, seen.classes)
            )
            raise UserError(
                f"data {data.spec!r} has the classes {ours}; the run was trained on {theirs}, in "
                "this order. Rename or reorder its classes, or name data with the same."
            )

    def known(self, found: Sequence[Prediction]) -> list[PredictionT]:
        """Return the predictions that are this task's."""
        return [each for each in found if isinstance(each, self.prediction)]
