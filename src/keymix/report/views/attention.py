# SPDX-License-Identifier: Apache-2.0
"""Attention on the page: the packed maps of a record, and the sheet that needs no script."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keymix.errors import UserError
from keymix.report import pictures
from keymix.report.record import ComparisonRecord, MapImage, PackedMaps

LEVELS = 65535
"""A stored weight of this many is the map's ``scale``."""

PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A map as a picture, its largest weight, and that of even attention."""

    heat: str
    peak: float
    even: float


@dataclass(frozen=True, kw_only=True)
class MapRow:
    """A mixer's maps of all images, or the reason why there are none."""

    mixer: str
    cells: list[Cell]
    missing: str | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """A layer with the maps of all mixers."""

    name: str
    rows: list[MapRow]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The section of attention maps.

    Args:
        images: The test images.
        query: Whose attention it is, in a sentence.
        blocks: A middle and the last layer; none without any map.
        missing: Reasons by mixer's label, where no block has them.
        mixers: Labels of the mixers that have maps.
        layers: Names of all layers.
        heads: The most heads that a mixer has.
    """

    images: tuple[MapImage, ...]
    query: str
    blocks: list[Block]
    missing: Mapping[str, str]
    mixers: list[str]
    layers: tuple[str, ...]
    heads: int


def unpack(stored: PackedMaps, images: int, layers: int) -> npt.NDArray[np.float64]:
    """Unpack a mixer's maps.

    Args:
        stored: The packed maps.
        images: How many images there are.
        layers: How many layers there are.

    Returns:
        ``[image, layer, 1 + heads, height, width]``; the mean over heads comes first.
    """
    levels = np.frombuffer(base64.b64decode(stored.weights), dtype="<u2")
    shape = (images, layers, 1 + stored.heads, *stored.grid)
    weights: npt.NDArray[np.float64] = levels.reshape(shape).astype(np.float64)
    return weights * (stored.scale / LEVELS)


def sheet(record: ComparisonRecord) -> Sheet | None:
    """Make the static sheet: mean over heads, a middle and the last layer, all images.

    Raises:
        UserError: If an image of the record is no PNG data URI.
    """
    stored = record.attention
    if not stored or not stored.images:
        return None
    for image in stored.images:
        if not PNG.fullmatch(image.png):
            raise UserError(f"record's attention image {image.id!r} is no PNG data URI")
    images, layers = len(stored.images), len(stored.layers)
    maps = {m: unpack(s, images, layers)[:, :, 0] for m, s in stored.maps.items()}
    labels = record.labels
    blocks = []
    # without any map there is nothing to pick or lay out, and the reasons stand alone
    for position in sorted({max(0, layers // 2 - 1), layers - 1}) if layers and maps else ():
        rows = [
            MapRow(
                mixer=label,
                cells=[_cell(image[position]) for image in maps.get(label, ())],
                missing=stored.missing.get(label),
            )
            for label in labels
            if label in maps or label in stored.missing
        ]
        blocks.append(Block(name=stored.layers[position], rows=rows))
    return Sheet(
        images=stored.images,
        query=stored.query,
        blocks=blocks,
        missing={} if blocks else stored.missing,
        mixers=[label for label in labels if label in maps],
        layers=stored.layers,
        heads=max((s.heads for s in stored.maps.values()), default=0),
    )


def _cell(weights: npt.NDArray[np.float64]) -> Cell:
    return Cell(
        heat=pictures.heat_uri(weights.tolist()),
        peak=float(weights.max()),
        even=float(weights.mean()),
    )
