# SPDX-License-Identifier: Apache-2.0
"""Instances in pictures: test images with the truth, and with what each model detects.

An image is stored once; boxes lie over it as vectors, masks as a transparent picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.analysis.mask_pictures import rim
from keymix.data.detection.outlines import RunLengths
from keymix.errors import UserError
from keymix.report.formats import percent
from keymix.report.part import ImageOutputs
from keymix.report.pictures import check_pictures, hex_colour, image_uri, png_uri
from keymix.report.record import ComparisonRecord, Sparse
from keymix.tasks.detection.matching import decoded, matched, unpacked
from keymix.tasks.detection.pictures import colour_of
from keymix.tasks.detection.predictions import SURE, found_at, split_pixels

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.data.dataset import ImageData
    from keymix.tasks.detection.answers import DetectionAnswers

WIDTH, MOST = 360, 540
"""Width of a picture in the units of its boxes, and most of its pixels per side."""
PICTURES = 6
"""Test images of each gallery at most."""
MOST_BOXES = 40
"""Boxes that are drawn over a picture at most, the surest."""
FILL = 105
"""Opacity of a mask, of 255."""
TRUTH = "truth"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box over a picture, in units of which its width has `WIDTH`: left, top, width, height.

    `label` is the class from 0 on, `score` None of the truth, and `right` whether the box finds an
    instance, or is found, at an IoU of 0.5; None where that says nothing, as of a crowd.
    """

    place: tuple[float, float, float, float]
    label: int
    score: float | None
    right: bool | None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """An image with instances over it: whose they are, boxes, masks as a PNG, and what is said."""

    who: str
    boxes: tuple[Box, ...]
    masks: str | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A test image as a data URI, height and width in units of boxes; the truth's panel first."""

    id: str
    picture: str
    size: tuple[int, int]
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """What each mixer's model of one seed detects in a few test images, or why it could not run.

    `names` are of all test images.
    """

    seed: int
    scenes: tuple[Scene, ...]
    missing: Mapping[str, str]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Differing:
    """The test images on which two models differ most, the most first; of each mixer one model."""

    scenes: tuple[Scene, ...]


@dataclass(frozen=True, kw_only=True)
class OfPictures(Sparse):
    """What is kept of the models' answers in pictures."""

    gallery: Gallery | None = None
    differing: Differing | None = None


# ---- how it is made --------------------------------------------------------------------------


def representative(answers: DetectionAnswers) -> list[int]:
    """Choose images by the truth alone: evenly over those with instances, and one without."""
    counts = np.bincount(answers.true_row, minlength=answers.units)
    empty = np.flatnonzero(counts == 0)[:1].tolist()
    full = np.flatnonzero(counts)
    number = min(PICTURES - len(empty), len(full))
    chosen = [full[i * len(full) // number] for i in range(number)] if number else []
    return [int(answers.index[row]) for row in (*chosen, *empty)]


def draw(data: ImageData, given: ImageOutputs) -> Gallery:
    """Draw what each mixer's model detects in some test images, next to the truth."""
    scenes = []
    for at, i in enumerate(given.chosen):
        scene = _Drawing(data, i)
        panels = [scene.of_model(label, found[at]) for label, found in given.outputs.items()]
        scenes.append(scene.made([scene.truth(), *panels]))
    names = tuple(Path(data.test.ids(i)).name for i in range(len(data.test)))
    return Gallery(seed=given.seed, scenes=tuple(scenes), missing=given.missing, names=names)


def differing(data: ImageData, tested: Mapping[str, DetectionAnswers]) -> Differing | None:
    """Draw the test images on which two mixers' models differ most in AP at an IoU of 0.5.

    None where no two differ.
    """
    if len(tested) < 2:
        return None
    pairs = {
        (a, b): np.nan_to_num(np.abs(tested[a].images - tested[b].images))
        for a, b in combinations(tested, 2)
    }
    most = np.max([*pairs.values()], axis=0)
    rows = [int(row) for row in np.argsort(-most, kind="stable")[:PICTURES] if most[row] > 0]
    scenes = []
    for row in rows:
        pair = max(pairs, key=lambda each: float(pairs[each][row]))
        order = sorted(pair, key=lambda label: -float(tested[label].images[row]))
        scene = _Drawing(data, int(tested[pair[0]].index[row]))
        panels = [scene.of_answers(label, tested[label], row) for label in order]
        scenes.append(scene.made([scene.truth(masks=False), *panels]))
    return Differing(scenes=tuple(scenes)) if scenes else None


class _Drawing:
    """A test image, and how instances in its own pixels are drawn over its picture."""

    def __init__(self, data: ImageData, i: int) -> None:
        from keymix.tasks.detection.answers import instance_targets, instances_of

        targets = instance_targets(data.test)
        self.id, self.own = Path(data.test.ids(i)).name, targets.size(i)
        self.instances = instances_of(targets, i)
        pixels = split_pixels(data.test, i)
        self.uri = image_uri(pixels, most=min(MOST, WIDTH * max(self.own) // self.own[1]))
        self.size = (max(1, round(WIDTH * self.own[0] / self.own[1])), WIDTH)

    def made(self, panels: Sequence[Panel]) -> Scene:
        """Put panels together."""
        return Scene(id=self.id, picture=self.uri, size=self.size, panels=tuple(panels))

    def truth(self, *, masks: bool = True) -> Panel:
        """Draw the true instances."""
        true = self.instances
        labels = (true.labels - 1).tolist()
        boxes = self._boxes(true.boxes, labels, None, [None] * len(labels))
        crowds = int(true.crowd.sum())
        number = len(labels) - crowds
        text = "no instance" if not number else f"{number} instance{'s' * (number != 1)}"
        if crowds:
            text += f", {crowds} crowd{'s' * (crowds != 1)}"
        drawn = self._masks(true.masks, labels) if masks else None
        return Panel(who=TRUTH, boxes=boxes, masks=drawn, text=text)

    def of_model(self, label: str, output: Mapping[str, Tensor]) -> Panel:
        """Draw what a model returned."""
        made = matched(self.instances, found_at(output, self.own))
        right = unpacked(made.matched["box"], "all")[0] & ~self._ignored(made.ignored["box"])
        found = made.found
        rows = np.argsort(-found.scores, kind="stable")
        rows = rows[found.scores[rows] >= SURE]
        names = (found.labels[rows] - 1).tolist()
        ignored = self._ignored(made.ignored["box"])[rows]
        flags = [None if out else bool(hit) for hit, out in zip(right[rows], ignored, strict=True)]
        boxes = self._boxes(found.boxes[rows], names, found.scores[rows].tolist(), flags)
        masks = self._masks([found.masks[row] for row in rows], names)
        return Panel(who=label, boxes=boxes, masks=masks, text=self._said(flags))

    def of_answers(self, label: str, answers: DetectionAnswers, row: int) -> Panel:
        """Draw the stored boxes of a model."""
        found = answers.detections
        mine = np.flatnonzero((found.image == answers.index[row]) & (found.score >= SURE))
        mine = mine[np.argsort(-found.score[mine], kind="stable")]
        hit = unpacked(found.matched["box"][mine], "all")[0]
        ignored = self._ignored(found.ignored["box"][mine])
        flags = [None if out else bool(yes) for yes, out in zip(hit, ignored, strict=True)]
        names = (found.label[mine] - 1).tolist()
        boxes = self._boxes(found.boxes[mine], names, found.score[mine].tolist(), flags)
        share = f"AP50 {percent(float(answers.images[row]), 0)}\u00a0%"
        return Panel(who=label, boxes=boxes, masks=None, text=f"{share}; {self._said(flags)}")

    def _ignored(self, bits: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which detections count neither as right nor as wrong."""
        first: NDArray[np.bool_] = unpacked(bits, "all")[0]
        return first

    def _said(self, flags: Sequence[bool | None]) -> str:
        """Say how many instances are found, and how many detections are wrong."""
        number = int((~self.instances.crowd).sum())
        right, wrong = flags.count(True), flags.count(False)
        found = f"{right} of {number} found" if number else "nothing to find"
        return f"{found}, {wrong} wrong" if wrong else found

    def _boxes(
        self,
        boxes: NDArray[np.float64],
        labels: Sequence[int],
        scores: Sequence[float] | None,
        right: Sequence[bool | None],
    ) -> tuple[Box, ...]:
        scale = np.array([self.size[1] / self.own[1], self.size[0] / self.own[0]] * 2)
        placed = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1) * scale
        return tuple(
            Box(
                place=(place[0], place[1], place[2], place[3]),
                label=labels[k],
                score=None if scores is None else round(scores[k], 3),
                right=right[k],
            )
            for k, place in enumerate(placed.round(1).tolist()[:MOST_BOXES])
        )

    def _masks(self, runs: Sequence[RunLengths], labels: Sequence[int]) -> str | None:
        """Draw masks as one transparent PNG, the first ones on top."""
        if not runs:
            return None
        rgba = np.zeros((*self.size, 4), dtype=np.uint8)
        rows, columns = (
            (np.arange(small) * own // small)
            for small, own in zip(self.size, self.own, strict=True)
        )
        for mask, label in reversed(list(zip(decoded(runs, self.own), labels, strict=True))):
            small = mask[rows[:, None], columns].astype(bool)
            rgba[small] = (*colour_of(label + 1), FILL)
            rgba[rim(small)] = (*colour_of(label + 1), 255)
        return png_uri(Image.fromarray(rgba))


# ---- what the page shows ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScenesView:
    """A gallery: its scenes, and names and colours, ``#rrggbb``, of all classes."""

    scenes: tuple[Scene, ...]
    names: tuple[str, ...]
    colours: list[str]
    sure: float = SURE
    seed: int | None = None
    missing: Mapping[str, str]
    prefix: str
    """Of the rules that show each image."""


def scenes_view(record: ComparisonRecord, name: str) -> ScenesView | None:
    """Make a gallery, the field `name` of `OfPictures`; None without pictures.

    Only data URIs of images are taken.
    """
    stored = getattr(record.own.read(OfPictures), name)
    if stored is None or not stored.scenes:
        return None
    pictures = [scene.picture for scene in stored.scenes]
    panels = [panel for scene in stored.scenes for panel in scene.panels]
    pictures += [panel.masks for panel in panels if panel.masks is not None]
    check_pictures(pictures)
    names = record.data.classes
    if any(not 0 <= box.label < len(names) for panel in panels for box in panel.boxes):
        raise UserError("a box of the record's gallery has no class of the data")
    return ScenesView(
        scenes=stored.scenes,
        names=names,
        colours=[hex_colour(colour_of(k + 1)) for k in range(len(names))],
        seed=getattr(stored, "seed", None),
        missing=getattr(stored, "missing", {}),
        prefix=name[0],
    )
