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
    """The maps of a middle and the last layer, and what the script's picker offers.

    `mixers` have maps; `missing` are reasons by label, where no block of the sheet has them;
    `heads` is the most that a mixer has.
    """

    blocks: list[Block]
    missing: Mapping[str, str]
    mixers: list[str]
    heads: int


def sections(shown: Shown) -> Iterator[Section]:
    """Show the maps, where the record has images."""
    view = sheet(shown.record)
    if view is not None:
        template = "sections/attention.html.j2"
        yield Section(template=template, view=view, styles="sections/attention.css.j2")


def unpack(stored: PackedMaps, images: int, layers: int) -> npt.NDArray[np.float64]:
    """Unpack a mixer's maps, ``[image, layer, 1 + heads, H, W]``, the mean over heads first."""
    levels = np.frombuffer(base64.b64decode(stored.weights), dtype="<u2")
    shape = (images, layers, 1 + stored.heads, *stored.grid)
    weights: npt.NDArray[np.float64] = levels.reshape(shape).astype(np.float64)
    return weights * (stored.scale / LEVELS)


def sheet(record: ComparisonRecord) -> Sheet | None:
    """Make the static sheet: mean over heads, a middle and the last layer, all images."""
    stored = record.attention
    if not stored or not stored.images:
        return None
    for image in stored.images:
        if not pictures.PNG.fullmatch(image.png):
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
        blocks=blocks,
        missing={} if blocks else stored.missing,
        mixers=[label for label in labels if label in maps],
        heads=max((s.heads for s in stored.maps.values()), default=0),
    )


def _cell(weights: npt.NDArray[np.float64]) -> Cell:
    return Cell(
        heat=pictures.heat_uri(weights.tolist()),
        peak=float(weights.max()),
        even=float(weights.mean()),
    )
