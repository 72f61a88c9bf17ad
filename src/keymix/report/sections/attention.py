# SPDX-License-Identifier: Apache-2.0
"""Where the models look: the packed maps of a record, and the sheet that needs no script."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keymix.errors import UserError
from keymix.report import pictures
from keymix.report.part import Section, Shown
from keymix.report.record import ComparisonRecord, PackedMaps

PLACE = 60

LEVELS = 65535
"""A stored weight of this many is the map's ``scale``."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A map as a picture, its largest weight, and that of even attention."""

    heat: str
    peak: float
    even: float


Blocks = Mapping[str, Mapping[str, list[Cell]]]
"""Maps of all images by layer and mixer; of a mixer without maps, none."""


def sections(shown: Shown) -> Iterator[Section]:
    """Show the maps, where the record has images."""
    view = sheet(shown.record)
    if view is not None:
        template = "sections/attention.html.j2"
        yield Section(
            name="Attention", template=template, view=view, styles="sections/attention.css.j2"
        )


def unpack(stored: PackedMaps, images: int, layers: int) -> npt.NDArray[np.float64]:
    """Unpack a mixer's maps, ``[image, layer, 1 + heads, H, W]``, the mean over heads first."""
    levels = np.frombuffer(base64.b64decode(stored.weights), dtype="<u2")
    shape = (images, layers, 1 + stored.heads, *stored.grid)
    weights: npt.NDArray[np.float64] = levels.reshape(shape).astype(np.float64)
    return weights * (stored.scale / LEVELS)


def sheet(record: ComparisonRecord) -> Blocks | None:
    """Make the static sheet: mean over heads, a middle and the last layer, all images.

    Without any map there is nothing to pick or show but the reasons.
    """
    stored = record.attention
    if not stored or not stored.images:
        return None
    for image in stored.images:
        if not pictures.PNG.fullmatch(image.png):
            raise UserError(f"record's attention image {image.id!r} is no PNG data URI")
    images, layers = len(stored.images), len(stored.layers)
    maps = {m: unpack(s, images, layers)[:, :, 0] for m, s in stored.maps.items()}
    shown = [label for label in record.labels if label in maps or label in stored.missing]
    positions = sorted({max(0, layers // 2 - 1), layers - 1}) if layers and maps else ()

    def cells(position: int, label: str) -> list[Cell]:
        return [_cell(image[position]) for image in maps.get(label, ())]

    return {stored.layers[i]: {label: cells(i, label) for label in shown} for i in positions}


def _cell(weights: npt.NDArray[np.float64]) -> Cell:
    return Cell(
        heat=pictures.heat_uri(weights.tolist()),
        peak=float(weights.max()),
        even=float(weights.mean()),
    )
