# SPDX-License-Identifier: Apache-2.0
"""Predict image files, or a split of data, into a folder: what all tasks that write one share.

A task's `FolderWriter` says which images there are and what is written of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from keymix._version import __version__
from keymix.data.decode import Size
from keymix.data.record import DataRecord
from keymix.data.segmentation.table import Pixels
from keymix.data.specs import task_name
from keymix.errors import UserError
from keymix.task import Task, get_task
from keymix.train import files
from keymix.train.evaluation import data_for
from keymix.train.model import enough_memory
from keymix.train.parts import AnswersPart, Prediction, Wanted
from keymix.train.predict import TrainedModel, load
from keymix.train.recipe import is_part
from keymix.train.runs import Run, image_files, load_run, refuse_lone

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split

MANIFEST, OVERLAYS = "predictions.json", "overlays"


@dataclass(frozen=True, kw_only=True)
class FolderManifest:
    """What was predicted by which run, ``predictions.json``; a task's own has more fields.

    Args:
        keymix: Version of keymix.
        run: The run's folder.
        weights: Weights of the ``last`` or the ``best`` epoch.
        data: Spec of the data; None of image files.
        split: Split of the data; None of image files.
        image_size: Height and width of the images as the model sees them, pixels; of images that
            keep their proportions short and long side.
        complete: Whether all is written.
    """

    keymix: str
    run: str
    weights: str
    data: str | None
    split: str | None
    image_size: Size
    complete: bool = False


PredictionT = TypeVar("PredictionT", bound=Prediction)


@dataclass(frozen=True, kw_only=True)
class Item(Generic[PredictionT]):
    """An image to be answered: its name in the folder, what is said before it is read, its pixels.

    `pixels` are uint8 ``[C, h, w]`` at its own size, `truth` what is true of it, if that is drawn.
    """

    name: str
    named: PredictionT
    pixels: Callable[[], Pixels]
    truth: Callable[[], Pixels] | None = None


class FolderWriter(ABC, Generic[PredictionT]):
    """Predicts into a folder: items, `begin`, `write` of each, `finish` are a task's.

    `what` the folder holds, such as ``predicted masks``; `content` says with ``{images}`` what is
    written; `at_once` images are given to the model together. `seen` is the record of the data that
    the run was trained on.
    """

    task: Task
    what: str
    content: str
    at_once: int
    folder: Path
    seen: DataRecord
    items: Sequence[Item[PredictionT]]

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    @abstractmethod
    def of_files(self, paths: Sequence[Path]) -> list[Item[PredictionT]]:
        """List image files."""

    @abstractmethod
    def of_split(self, split: Split) -> list[Item[PredictionT]]:
        """List the images of a split."""

    @abstractmethod
    def begin(self, about: FolderManifest) -> None:
        """Take out what was predicted before, and note in the manifest what will be written."""

    @abstractmethod
    def write(
        self, item: Item[PredictionT], image: Pixels, truth: Pixels | None, output: Any
    ) -> PredictionT:
        """Say what the model's output means for an image, and write it."""

    @abstractmethod
    def finish(self, found: Sequence[PredictionT]) -> None:
        """Write what is of all images together, and the whole manifest."""

    def predict(self, run: Run) -> list[PredictionT]:
        """Predict by a run; a broken image is answered by its error.

        Nothing is written before task, folder, names, weights and memory are known to fit.
        """
        wanted = self.wanted
        refuse_lone(wanted.resize, wanted.image_size)
        task = get_task(task_name(run.recipe.data.spec))
        if task.name != self.task.name:
            folder = str(run.folder)
            raise UserError(f"the run {folder!r} {task.does}: name one that {self.task.does}.")
        if wanted.paths and (wanted.data is not None or wanted.split is not None):
            raise UserError("give either image files or a data set and its split, not both.")
        self.folder = files.checked_output(
            wanted.out, manifest=MANIFEST, what=self.what, overwrite=wanted.overwrite
        )
        size = wanted.image_size
        trained = load(run, which=wanted.which, image_size=size, resize=wanted.resize)
        self.seen, data, split = trained.data, None, None
        with enough_memory(size):
            if wanted.paths:
                self.items = self.of_files([*dict.fromkeys(image_files(wanted.paths))])
            else:
                data = data_for(run.recipe.data, self.seen, wanted.data, trained.image_size)[0]
                split = wanted.split or "test"
                self.items = self.of_split(_split(data, split))
            _refuse_same_names(self.items)
            about = FolderManifest(
                keymix=__version__,
                run=str(run.folder),
                weights=wanted.which,
                data=None if data is None else data.spec,
                split=split,
                image_size=trained.image_size,
            )
            self.begin(about)
            found = [
                each
                for start in range(0, len(self.items), self.at_once)
                for each in self._written(trained, self.items[start : start + self.at_once])
            ]
        self.finish(found)
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
                yield self.write(item, image, truth, next(outputs))


def _split(data: ImageData, name: str) -> Split:
    if name not in ("train", "val", "test"):
        raise UserError(f"split {name!r}: choose 'train', 'val' or 'test'.")
    split: Split = getattr(data, name)
    return split


def _refuse_same_names(items: Sequence[Item[Any]]) -> None:
    """Refuse two images of one name: what is written could not tell them apart."""
    first: dict[str, str] = {}
    for item in items:
        if item.name in first:
            raise UserError(
                f"{first[item.name]} and {item.named.path} have the same name {item.name!r}. "
                "Predict them apart, each into its own --out."
            )
        first[item.name] = item.named.path


def _read(item: Item[Any]) -> tuple[Pixels | str, Pixels | None]:
    """Read an image and its truth; the error's text if one cannot be read."""
    try:
        return item.pixels(), None if item.truth is None else item.truth()
    except UserError as error:
        return str(error), None


def of_before(folder: Path, field: str, key: str) -> list[str]:
    """List the names, each under `key`, in a field of an earlier prediction's manifest.

    Without those that lead out of the folder; none without a manifest.
    """
    if not (folder / MANIFEST).exists():
        return []
    rows = files.read_json(folder / MANIFEST).get(field)
    found = rows if isinstance(rows, list) else []
    return [row[key] for row in found if isinstance(row, dict) and is_part(row.get(key))]


class FolderAnswers(AnswersPart, Generic[PredictionT]):
    """Answers of a task whose predictions a `folder_writer` writes."""

    prediction: type[PredictionT]
    folder_writer: type[FolderWriter[PredictionT]]
    predict_options = frozenset({"data", "per_image", "split"})

    def write(self, wanted: Wanted) -> tuple[Sequence[PredictionT], str]:
        """Write predictions as the public function that is named as ``writer``."""
        writer = self.folder_writer(wanted)
        found = writer.predict(load_run(wanted.run))
        good = sum(each.error is None for each in found)
        content = writer.content.format(images=f"{good} image{'s' * (good != 1)}")
        return found, f"{content}: {wanted.out}"

    def known(self, found: Sequence[Prediction]) -> list[PredictionT]:
        """Return the predictions that are this task's."""
        return [each for each in found if isinstance(each, self.prediction)]
