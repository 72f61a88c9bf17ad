# SPDX-License-Identifier: Apache-2.0
"""Detect instances with a trained run, in image files or a data set's split, into a folder.

The folder has COCO's results as JSON, overlays, and a manifest of what was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from keymix.arguments import checked
from keymix.data.decode import Pixels
from keymix.data.instances import RunLengths
from keymix.data.record import DataRecord
from keymix.data.sample import Size
from keymix.errors import UserError
from keymix.tasks.detection.facts import TASK
from keymix.tasks.detection.matching import Found, decoded, encoded, wide
from keymix.tasks.detection.pictures import overlay
from keymix.train import files
from keymix.train.evaluation import SplitName
from keymix.train.folder import Which
from keymix.train.parts import Prediction, Wanted
from keymix.train.predict_folder import (
    OVERLAYS,
    FolderManifest,
    FolderWriter,
    Item,
    write_picture,
)
from keymix.train.recipe import as_name
from keymix.train.runs import Run

if TYPE_CHECKING:
    from keymix.data.dataset import Split

AT_ONCE = 4
"""Images that a model is given together."""
SURE = 0.5
"""Score from which on a detection is drawn and counted, unless another is asked for."""
RESULTS = "detections.json"
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
    segmentation: NotRequired[ResultMask]


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
        runs: Its mask as COCO's run lengths, ``size`` and ``counts``; empty of a run that finds
            boxes alone.
        score_threshold: Score from which on a detection is drawn and counted.
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
    score_threshold: float = SURE

    @property
    def masks(self) -> NDArray[np.bool_]:
        """The masks at the image's own size, ``[n, h, w]``; none if boxes alone are found."""
        return decoded(self.runs, self.size or (0, 0)).astype(bool)

    def surely(self) -> list[int]:
        """List the detections that are drawn and counted, the surest first."""
        return [i for i, score in enumerate(self.scores) if score >= self.score_threshold]

    def results(self) -> list[Result]:
        """Return the detections as entries of COCO's results."""
        boxes = wide(self.boxes.astype(np.float64)).round(2).tolist()
        found: list[Result] = [
            {
                "image_id": self.image_id,
                "category_id": self.category_ids[i],
                "bbox": boxes[i],
                "score": round(score, 5),
            }
            for i, score in enumerate(self.scores)
        ]
        for each, run in zip(found, self.runs, strict=False):
            counts = run["counts"].decode("ascii")
            each["segmentation"] = {"size": list(run["size"]), "counts": counts}
        return found


def found_at(output: Mapping[str, Tensor], size: Size) -> Found:
    """Bring what a detector returned for an image to the image's own height and width."""
    output = {name: each.detach().cpu() for name, each in output.items()}
    shown = output["size"].tolist()
    scale = output["boxes"].new_tensor([size[1] / shown[1], size[0] / shown[0]] * 2)
    boxes = (output["boxes"] * scale).float()
    boxes[:, 0::2] = boxes[:, 0::2].clamp(0, size[1])
    boxes[:, 1::2] = boxes[:, 1::2].clamp(0, size[0])
    runs: list[RunLengths] = []
    for start in range(0, len(boxes) if "masks" in output else 0, _PASTED):
        some = slice(start, start + _PASTED)
        likely = paste_masks_in_image(output["masks"][some, None].float(), boxes[some], size)
        runs += encoded((likely[:, 0] >= _PROBABLE).byte().numpy())
    return Found(
        boxes=boxes.double().numpy(),
        labels=output["labels"].numpy().astype(np.int64),
        masks=runs if "masks" in output else None,
        scores=output["scores"].double().numpy(),
    )


@dataclass(frozen=True, kw_only=True)
class PredictedImage:
    """An image of a manifest: its file, what results and its overlay call it, or its error."""

    path: str
    image_id: int | str | None
    overlay: str
    detections: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest(FolderManifest):
    """What was predicted by which run: ``predictions.json``.

    Args:
        classes: The classes.
        category_ids: The data's own number of each.
        score_threshold: Score from which on detections are drawn; all are in the results.
        images: The images.
    """

    classes: tuple[str, ...]
    category_ids: tuple[int, ...] | None
    score_threshold: float
    images: tuple[PredictedImage, ...]


class InstanceWriter(FolderWriter[InstancePrediction]):
    """Writes detections as COCO's results, and draws those with a score or more."""

    task = TASK
    what = "detections"
    content = "detections in {images} as COCO's results, and overlays"
    results = RESULTS

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self.sure = SURE if wanted.score_threshold is None else wanted.score_threshold
        if not 0 <= self.sure <= 1:
            raise UserError(f"score_threshold = {self.sure!r}: must lie in [0, 1].")

    @staticmethod
    def named(path: str, seen: DataRecord) -> InstancePrediction:
        """Call a file by the number that its name is, as COCO's are, or by its name."""
        del seen
        stem = Path(path).stem
        return InstancePrediction(path=path, image_id=int(stem) if stem.isdecimal() else stem)

    @staticmethod
    def name(named: InstancePrediction) -> str:
        """Name an overlay."""
        return as_name(str(named.image_id))

    @staticmethod
    def answer(
        named: InstancePrediction, size: Size, output: Any, seen: DataRecord
    ) -> InstancePrediction:
        """Add what a model found."""
        found = found_at(output, size)
        found = found.chosen(np.argsort(-found.scores, kind="stable"))
        numbers = tuple(found.labels.tolist())
        ids = seen.class_ids or tuple(range(1, len(seen.classes) + 1))
        return replace(
            named,
            size=size,
            boxes=found.boxes.astype(np.float32),
            labels=tuple(seen.classes[number - 1] for number in numbers),
            numbers=numbers,
            category_ids=tuple(ids[number - 1] for number in numbers),
            scores=tuple(found.scores.tolist()),
            runs=tuple(found.masks or ()),
        )

    def of_split(self, split: Split) -> list[Item[InstancePrediction]]:
        """List images by the data's number."""
        return [
            Item(
                named=InstancePrediction(path=row.id, image_id=row.target.image_id),
                pixels=partial(split.own, i),
            )
            for i, row in enumerate(split.rows)
        ]

    def manifest(self, about: FolderManifest, found: Sequence[InstancePrediction]) -> Manifest:
        """Add the classes and the images."""
        return Manifest(
            **vars(about),
            classes=self.seen.classes,
            category_ids=self.seen.class_ids,
            score_threshold=self.sure,
            images=tuple(
                PredictedImage(
                    path=each.path,
                    image_id=each.image_id,
                    overlay=f"{self.name(each)}.jpg",
                    detections=None if each.size is None else len(each.scores),
                    error=each.error,
                )
                for each in found
            ),
        )

    def write(
        self, found: InstancePrediction, image: Pixels, truth: Pixels | None
    ) -> InstancePrediction:
        """Draw what is found."""
        del truth
        found = replace(found, score_threshold=self.sure)
        place = self.folder / OVERLAYS / f"{self.name(found)}.jpg"
        write_picture(place, drawn(found, image), "JPEG")
        return found

    def write_results(self, found: Sequence[InstancePrediction]) -> None:
        """Write what COCO's tools take."""
        entries = [entry for each in found for entry in each.results()]
        files.write_json(self.folder / RESULTS, entries)


def drawn(found: InstancePrediction, pixels: Pixels) -> Image.Image:
    """Draw sure detections over their image."""
    sure = found.surely()
    return overlay(
        pixels,
        found.boxes[sure],
        found.masks[sure] if found.runs else None,
        [found.numbers[i] for i in sure],
        [f"{found.labels[i]} {found.scores[i]:.2f}" for i in sure],
    )


@checked
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
        score_threshold: Score from which on detections are drawn and counted, probability.
        overwrite: Replace predictions that the folder holds.

    Raises:
        UserError: If the run detects no instances, the folder holds something, a path does not
            exist, two images have one name, a number is out of range, weights or data are unfit, or
            the model, or the memory, cannot take the image size.
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
        score_threshold=score_threshold,
        overwrite=overwrite,
    )
    return InstanceWriter(wanted).predict()
