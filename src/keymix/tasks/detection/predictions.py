# SPDX-License-Identifier: Apache-2.0
"""Detect instances with a trained run, in image files or a data set's split, into a folder.

The folder has COCO's results as JSON, overlays, and a manifest of what was predicted.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from keymix._version import __version__
from keymix.analysis.answers import IntArray
from keymix.data.decode import Size, convert, to_array
from keymix.data.detection.outlines import RunLengths
from keymix.data.detection.table import InstanceTargets
from keymix.data.record import DataRecord
from keymix.data.shown import file_pixels
from keymix.data.specs import parse
from keymix.errors import UserError
from keymix.tasks.detection.facts import TASK
from keymix.tasks.detection.matching import Found, decoded, encoded, wide
from keymix.tasks.detection.pictures import overlay
from keymix.train import files
from keymix.train.evaluation import SplitName, data_for
from keymix.train.folder import Which
from keymix.train.model import enough_memory
from keymix.train.parts import Answered, Prediction
from keymix.train.predict import TrainedModel, load
from keymix.train.recipe import as_name, is_part
from keymix.train.runs import Run, image_files, load_run, refuse_lone

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

AT_ONCE = 4
"""Images that a model is given together."""
SURE = 0.5
"""Score from which on a detection is drawn and counted, unless another is asked for."""
RESULTS, OVERLAYS, MANIFEST = "detections.json", "overlays", "predictions.json"
_PASTED = 16  # masks that are brought to an image's size together
_PROBABLE = 0.5  # from which on a pixel belongs to a mask


class ResultMask(TypedDict):
    """The mask of an entry of COCO's results: height and width, compressed run lengths."""

    size: list[int]
    counts: str


class Result(TypedDict):
    """An entry of COCO's results; the box is left, top, width and height in pixels."""

    image_id: int | str | None
    category_id: int
    bbox: list[float]
    score: float
    segmentation: ResultMask


@dataclass(frozen=True, kw_only=True)
class InstancePrediction(Prediction):
    """What a run detects in an image, the surest first.

    Args:
        path: The image's file.
        image_id: Its number in the data, else the name of its file; None of an image in memory.
        size: Its height and width, pixels.
        boxes: Left, top, right and bottom of each detection in pixels of the image, ``[n, 4]``.
        labels: Name of the class of each.
        numbers: Number of the class of each among the run's classes, from 1 on, ``[n]``.
        category_ids: The data's own number of the class of each.
        scores: Its probability, ``[n]``.
        runs: Its mask as COCO's run lengths, ``size`` and ``counts``.
        error: Why there is no answer, or None.
    """

    image_id: int | str | None = None
    size: Size | None = None
    boxes: NDArray[np.float32] = field(
        default_factory=lambda: np.zeros((0, 4), dtype=np.float32), compare=False, repr=False
    )
    labels: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    category_ids: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    runs: tuple[RunLengths, ...] = field(default=(), repr=False)

    @property
    def masks(self) -> NDArray[np.bool_]:
        """The masks at the image's own size, ``[n, h, w]``."""
        return decoded(self.runs, self.size or (0, 0)).astype(bool)

    def surely(self, score: float) -> list[int]:
        """List the detections with a score or more, the surest first."""
        return [i for i, each in enumerate(self.scores) if each >= score]

    def results(self) -> list[Result]:
        """Return the detections as entries of COCO's results."""
        boxes = wide(self.boxes.astype(np.float64)).round(2).tolist()
        return [
            {
                "image_id": self.image_id,
                "category_id": self.category_ids[i],
                "bbox": boxes[i],
                "score": round(self.scores[i], 5),
                "segmentation": {
                    "size": list(run["size"]),
                    "counts": run["counts"].decode("ascii"),
                },
            }
            for i, run in enumerate(self.runs)
        ]


def found_at(output: Mapping[str, Tensor], size: Size) -> Found:
    """Bring what a detector returned for an image to the image's own height and width."""
    output = {name: each.detach().cpu() for name, each in output.items()}
    shown = output["size"].tolist()
    scale = output["boxes"].new_tensor([size[1] / shown[1], size[0] / shown[0]] * 2)
    boxes = (output["boxes"] * scale).float()
    boxes[:, 0::2] = boxes[:, 0::2].clamp(0, size[1])
    boxes[:, 1::2] = boxes[:, 1::2].clamp(0, size[0])
    runs: list[RunLengths] = []
    for start in range(0, len(boxes), _PASTED):
        some = slice(start, start + _PASTED)
        likely = paste_masks_in_image(output["masks"][some, None].float(), boxes[some], size)
        runs += encoded((likely[:, 0] >= _PROBABLE).byte().numpy())
    return Found(
        boxes=boxes.double().numpy(),
        labels=output["labels"].numpy().astype(np.int64),
        masks=runs,
        scores=output["scores"].double().numpy(),
    )


def with_found(named: InstancePrediction, output: Any, seen: DataRecord) -> InstancePrediction:
    """Add to an image's prediction what a model returned for it."""
    assert named.size is not None
    found = found_at(output, named.size)
    order: IntArray = np.argsort(-found.scores, kind="stable")
    found = found.chosen(order)
    numbers = tuple(found.labels.tolist())
    ids = seen.class_ids or tuple(range(1, len(seen.classes) + 1))
    return replace(
        named,
        boxes=found.boxes.astype(np.float32),
        labels=tuple(seen.classes[number - 1] for number in numbers),
        numbers=numbers,
        category_ids=tuple(ids[number - 1] for number in numbers),
        scores=tuple(found.scores.tolist()),
        runs=tuple(found.masks),
    )


def predictions_of(
    outputs: Sequence[Mapping[str, Tensor]], inputs: Sequence[Answered], seen: DataRecord
) -> Iterator[InstancePrediction]:
    """Say what a model found in some images, at their own sizes."""
    for output, each in zip(outputs, inputs, strict=True):
        name = image_id_of(each.path) if each.path else None
        named = InstancePrediction(path=each.path, image_id=name, size=each.size)
        yield with_found(named, output, seen)


def image_id_of(path: str) -> int | str:
    """Say what a file's image is called in results: COCO's files are called by their number."""
    stem = Path(path).stem
    return int(stem) if stem.isdecimal() else stem


@dataclass(frozen=True, kw_only=True)
class PredictedImage:
    """An image of a manifest: its file, what results and its overlay call it, or its error."""

    path: str
    image_id: int | str | None
    overlay: str
    detections: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was predicted by which run: ``predictions.json``.

    Args:
        keymix: Version of keymix.
        run: The run's folder.
        weights: Weights of the ``last`` or the ``best`` epoch.
        data: Spec of the data; None of image files.
        split: Split of the data; None of image files.
        image_size: Short and long side of the images as the model sees them, pixels.
        classes: The classes.
        category_ids: The data's own number of each.
        score_threshold: Score from which on detections are drawn; all are in the results.
        complete: Whether all is written.
        images: The images.
    """

    keymix: str
    run: str
    weights: str
    data: str | None
    split: str | None
    image_size: Size
    classes: tuple[str, ...]
    category_ids: tuple[int, ...] | None
    score_threshold: float
    complete: bool = False
    images: tuple[PredictedImage, ...]


@dataclass(frozen=True)
class _Item:
    """An image to be answered, and how to read it at its own size."""

    path: str
    image_id: int | str
    pixels: Callable[[], NDArray[np.uint8]]

    @property
    def name(self) -> str:
        """Name of its overlay."""
        return as_name(str(self.image_id))


def predict_instances(
    run: Run | str | Path,
    paths: Sequence[str | Path] = (),
    *,
    out: str | Path,
    data: str | None = None,
    split: SplitName | None = None,
    which: Which = "last",
    image_size: int | tuple[int, int] | None = None,
    resize: str | None = None,
    score_threshold: float = SURE,
    overwrite: bool = False,
) -> list[InstancePrediction]:
    """Detect instances into a folder. A broken image gets its error, others are answered.

    - ``detections.json``: all detections as COCO's results, a list of ``image_id``,
      ``category_id``, ``bbox``, ``score`` and ``segmentation``, in pixels of the images;
    - ``overlays/<image_id>.jpg``: the image with boxes, masks, classes and scores;
    - ``predictions.json``, the manifest: what was predicted by which run.

    Args:
        run: The run, or its folder.
        paths: Image files and folders. An image is called by the number that its file's name is,
            as in COCO, else by the name.
        out: The folder to write.
        data: A data spec of which a split is predicted in place of files; without both, the run's
            own data. Images and classes have the numbers of the data.
        split: The split of the data; ``test`` if None.
        which: Weights of the ``last`` or the ``best`` epoch.
        image_size: As in `keymix.train.runs.evaluate`.
        resize: As in `keymix.train.runs.evaluate`.
        score_threshold: Score from which on detections are drawn, probability.
        overwrite: Replace predictions that the folder holds.

    Raises:
        UserError: If the run detects no instances, the folder holds something, a path does not
            exist, two images have one name, a number is out of range, weights or data are unfit, or
            the model, or the memory, cannot take the image size.
    """
    refuse_lone(resize, image_size)
    if not 0 <= score_threshold <= 1:
        raise UserError(f"score_threshold = {score_threshold!r}: must lie in [0, 1].")
    run = run if isinstance(run, Run) else load_run(run)
    if parse(run.recipe.data.spec)[0].task != TASK.name:
        raise UserError(f"the run {str(run.folder)!r} does not detect instances.")
    if paths and (data is not None or split is not None):
        raise UserError("give either image files or a data set and its split, not both.")
    folder = files.checked_output(
        Path(out), manifest=MANIFEST, what="detections", overwrite=overwrite
    )
    trained = load(run, which=which, image_size=image_size, resize=resize)
    seen, chosen = trained.data, split or "test"
    with enough_memory(image_size):
        loaded = None if paths else data_for(run.recipe.data, seen, data, trained.image_size)[0]
        items = _of_files(paths, seen) if loaded is None else _of_split(loaded, chosen)
        _refuse_same_names(items)
        manifest = Manifest(
            keymix=__version__,
            run=str(run.folder),
            weights=which,
            data=None if loaded is None else loaded.spec,
            split=None if loaded is None else chosen,
            image_size=trained.image_size,
            classes=seen.classes,
            category_ids=seen.class_ids,
            score_threshold=score_threshold,
            images=tuple(_planned(item) for item in items),
        )
        _begin(folder, manifest)
        found = [
            each
            for start in range(0, len(items), AT_ONCE)
            for each in _written(trained, items[start : start + AT_ONCE], folder, score_threshold)
        ]
    files.write_json(folder / RESULTS, [entry for each in found for entry in each.results()])
    images = tuple(
        replace(_planned(item), error=each.error, detections=None if each.error else len(each.runs))
        for item, each in zip(items, found, strict=True)
    )
    files.write_json(folder / MANIFEST, replace(manifest, complete=True, images=images))
    return found


def _planned(item: _Item) -> PredictedImage:
    return PredictedImage(path=item.path, image_id=item.image_id, overlay=f"{item.name}.jpg")


def _begin(folder: Path, manifest: Manifest) -> None:
    """Make the folder, take out the predictions of before, and note what will be written."""
    if (folder / MANIFEST).exists():
        rows = files.read_json(folder / MANIFEST).get("images")
        for row in rows if isinstance(rows, list) else []:
            name = row.get("overlay") if isinstance(row, dict) else None
            if is_part(name):
                (folder / OVERLAYS / str(name)).unlink(missing_ok=True)
        (folder / RESULTS).unlink(missing_ok=True)
    files.make_folder(folder / OVERLAYS)
    files.write_json(folder / MANIFEST, manifest)


def _written(
    trained: TrainedModel, items: Sequence[_Item], folder: Path, score: float
) -> Iterator[InstancePrediction]:
    """Answer some images and draw what is found."""
    read: list[NDArray[np.uint8] | str] = []
    for item in items:
        try:
            read.append(item.pixels())
        except UserError as error:
            read.append(str(error))
    shown = [trained.prepare(each) for each in read if not isinstance(each, str)]
    outputs = iter(trained.outputs(shown) if shown else ())
    for item, pixels in zip(items, read, strict=True):
        named = InstancePrediction(path=item.path, image_id=item.image_id)
        if isinstance(pixels, str):
            yield replace(named, error=pixels)
            continue
        size = (pixels.shape[-2], pixels.shape[-1])
        found = with_found(replace(named, size=size), next(outputs), trained.data)
        files.write_bytes(folder / OVERLAYS / f"{item.name}.jpg", drawn(found, pixels, score))
        yield found


def drawn(found: InstancePrediction, pixels: NDArray[np.uint8], score: float) -> bytes:
    """Draw the detections with a score or more over their image, as a JPEG."""
    sure = found.surely(score)
    picture = overlay(
        pixels,
        found.boxes[sure],
        found.masks[sure],
        [found.numbers[i] for i in sure],
        [f"{found.labels[i]} {found.scores[i]:.2f}" for i in sure],
    )
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def _of_files(paths: Sequence[str | Path], seen: DataRecord) -> list[_Item]:
    found = dict.fromkeys(image_files(paths))
    return [_Item(str(p), image_id_of(str(p)), partial(file_pixels, p, seen)) for p in found]


def _of_split(data: ImageData, name: str) -> list[_Item]:
    if name not in ("train", "val", "test"):
        raise UserError(f"split {name!r}: choose 'train', 'val' or 'test'.")
    split = getattr(data, name)
    targets = split.targets
    assert isinstance(targets, InstanceTargets)
    return [
        _Item(split.ids(i), targets.image_id(i), partial(_decoded, data, name, i))
        for i in range(len(split))
    ]


def _decoded(data: ImageData, name: str, i: int) -> NDArray[np.uint8]:
    """Read an image of a split at its own size."""
    return to_array(convert(getattr(data, name).decoded(i), data.in_chans))


def _refuse_same_names(items: Sequence[_Item]) -> None:
    """Refuse two images of one name: results could not tell them apart."""
    first: dict[str, str] = {}
    for item in items:
        if item.name in first:
            raise UserError(
                f"{first[item.name]} and {item.path} have the same name {item.name!r}. Predict "
                "them apart, each into its own --out."
            )
        first[item.name] = item.path
