# SPDX-License-Identifier: Apache-2.0
"""Instances in pictures: test images with the truth, and with what each model detects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keymix.analysis.answers import Arrays, FloatArray, IntArray
from keymix.data.instances import RunLengths
from keymix.report.formats import percent
from keymix.report.gallery import WIDTH, Box, Gallery, Kind, Panel, Scene
from keymix.report.part import ImageOutputs
from keymix.report.pictures import hex_colour, image_uri, layer_uri
from keymix.tasks.detection.matching import decoded, matched, unpacked
from keymix.tasks.detection.pictures import colour_of
from keymix.tasks.detection.predictions import SURE, found_at

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.data.dataset import ImageData
    from keymix.tasks.detection.answers import DetectionAnswers

MOST = 540
"""Most pixels per side of a picture."""
PICTURES = 6
"""Test images of each gallery at most."""
MOST_BOXES = 40
"""Boxes that are drawn over a picture at most, the surest."""


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
    about = {"seed": given.seed, "sure": SURE}
    return Gallery(scenes=tuple(scenes), about=about, missing=given.missing, names=names)


def differing(data: ImageData, tested: Mapping[str, DetectionAnswers]) -> Gallery | None:
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
    return Gallery(scenes=tuple(scenes), about={"sure": SURE}) if scenes else None


def _surest(scores: FloatArray) -> IntArray:
    """Choose the detections that are drawn, the surest first."""
    order = np.argsort(-scores, kind="stable")
    return order[scores[order] >= SURE]


class _Drawing:
    """A test image, and how instances in its own pixels are drawn over its picture."""

    def __init__(self, data: ImageData, i: int) -> None:
        from keymix.tasks.detection.answers import instances_of

        self.id, self.own, self.classes = data.test.ids(i), data.test.size(i), data.classes
        self.instances = instances_of(data.test.rows[i])
        pixels = data.test.own(i).numpy()
        self.uri = image_uri(pixels, most=min(MOST, WIDTH * max(self.own) // self.own[1]))
        self.size = (max(1, round(WIDTH * self.own[0] / self.own[1])), WIDTH)

    def made(self, panels: Sequence[Panel]) -> Scene:
        """Put panels together."""
        return Scene(id=self.id, picture=self.uri, size=self.size, panels=tuple(panels))

    def truth(self, *, masks: bool = True) -> Panel:
        """Draw the true instances."""
        true = self.instances
        crowds = int(true.crowd.sum())
        number = len(true.labels) - crowds
        text = "no instance" if not number else f"{number} instance{'s' * (number != 1)}"
        if crowds:
            text += f", {crowds} crowd{'s' * (crowds != 1)}"
        boxes = [self._box(box, label) for box, label in zip(true.boxes, true.labels, strict=True)]
        layers = self._masks(true.masks, true.labels) if masks else {}
        return Panel(text=text, layers=layers, boxes=tuple(boxes[:MOST_BOXES]))

    def of_model(self, label: str, output: Mapping[str, Tensor]) -> Panel:
        """Draw what a model returned."""
        found, bits = matched(self.instances, found_at(output, self.own))
        stored: Arrays = {
            "label": found.labels,
            "score": found.scores,
            "boxes": found.boxes,
            **bits,
        }
        sure = _surest(found.scores)
        masks = self._masks(found.chosen(sure).masks, found.labels[sure])
        return self._panel(label, self._boxes(stored, sure), layers=masks)

    def of_answers(self, label: str, answers: DetectionAnswers, row: int) -> Panel:
        """Draw the stored boxes of a model."""
        mine = np.flatnonzero(answers.found["image"] == answers.index[row])
        boxes = self._boxes(answers.found, mine[_surest(answers.found["score"][mine])])
        share = f"AP50 {percent(float(answers.images[row]), 0)}\u00a0%; "
        return self._panel(label, boxes, before=share)

    def _panel(
        self,
        label: str,
        boxes: Sequence[Box],
        *,
        layers: Mapping[str, str] | None = None,
        before: str = "",
    ) -> Panel:
        """Put boxes together, and say how many instances are found and how many boxes are wrong."""
        number = int((~self.instances.crowd).sum())
        kinds = [box.kind for box in boxes]
        right, wrong = kinds.count("right"), kinds.count("wrong")
        text = f"{right} of {number} found" if number else "nothing to find"
        text = f"{before}{text}, {wrong} wrong" if wrong else f"{before}{text}"
        return Panel(
            mixers={label: ""},
            text=text,
            layers=layers or {},
            boxes=tuple(boxes[:MOST_BOXES]),
        )

    def _boxes(self, found: Arrays, rows: IntArray) -> list[Box]:
        """Make the boxes of detections, which are right, wrong, or count neither way."""
        hit, ignored = (
            unpacked(found[f"box_{kind}"][rows], "all")[0] for kind in ("matched", "ignored")
        )
        kinds: list[Kind] = [
            "crowd" if out else "right" if right else "wrong"
            for right, out in zip(hit, ignored, strict=True)
        ]
        return [
            self._box(found["boxes"][row], found["label"][row], f" {found['score'][row]:.2f}", kind)
            for row, kind in zip(rows, kinds, strict=True)
        ]

    def _box(
        self, box: NDArray[np.float64], label: int, score: str = "", kind: Kind = "right"
    ) -> Box:
        scale = np.array([self.size[1] / self.own[1], self.size[0] / self.own[0]] * 2)
        left, top, width, height = (np.concatenate([box[:2], box[2:] - box[:2]]) * scale).round(1)
        return Box(
            place=(float(left), float(top), float(width), float(height)),
            text=f"{self.classes[int(label) - 1]}{score}",
            colour=hex_colour(colour_of(int(label))),
            kind=kind,
        )

    def _masks(self, runs: Sequence[RunLengths] | None, labels: NDArray[Any]) -> dict[str, str]:
        """Draw masks as one transparent PNG, the first ones on top."""
        if not runs:
            return {}
        planes = decoded(runs, self.own)[::-1].astype(bool)
        paint = [colour_of(int(label)) for label in labels[::-1]]
        return {"masks": layer_uri(planes, paint, most=WIDTH)}
