# SPDX-License-Identifier: Apache-2.0
"""Where the models look: the packed maps of a record, and the sheet that needs no script."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from keymix.errors import UserError
from keymix.report import pictures
from keymix.report.part import SHARES, Section, Shown
from keymix.report.record import Attention, PackedMaps, Results, Said

PLACE = 60

Maps = Mapping[str, npt.NDArray[np.float64]]
"""The mean over heads, ``[image, layer, H, W]``, by mixer's label."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A map as a picture, what its numbers are in words, and what its model answered."""

    heat: str
    figures: str
    said: Said | None


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What is shown without a script: maps of all images by layer and mixer, none without maps.

    `attending` and `masking` name the mixers with attention, and those with masks of tokens; `tiny`
    says that images have few pixels.
    """

    layers: Mapping[str, Mapping[str, list[Cell]]]
    attending: list[str]
    masking: list[str]
    tiny: bool


def sections(shown: Shown) -> Iterator[Section]:
    """Show the maps, where there are any."""
    stored = shown.pictures.attention
    if stored and stored.images and stored.maps and shown.record.learned:
        yield Section(
            name="Attention",
            template="sections/attention.html.j2",
            view=sheet(shown.record, stored),
            styles="sections/attention.css.j2",
            images=[image.id for image in stored.images],
        )


def unpack(stored: PackedMaps, images: int, layers: int) -> npt.NDArray[np.float64]:
    """Unpack a mixer's maps, ``[image, layer, 1 + heads, H, W]``, the mean over heads first."""
    levels = np.frombuffer(base64.b64decode(stored.weights), dtype="<u2")
    shape = (images, layers, 1 + stored.heads, *stored.grid)
    weights: npt.NDArray[np.float64] = levels.reshape(shape).astype(np.float64)
    return weights * (stored.scale / SHARES)


def _means(stored: Attention) -> Maps:
    images, layers = len(stored.images), len(stored.layers)
    return {m: unpack(each, images, layers)[:, :, 0] for m, each in stored.maps.items()}


def positions(stored: Attention) -> list[int]:
    """Choose the layers that are shown without a script: a middle and the last one."""
    layers = len(stored.layers)
    return sorted({max(0, layers // 2 - 1), layers - 1})


def sheet(record: Results, stored: Attention) -> Sheet:
    """Make the static sheet: mean over heads, a middle and the last layer, all images."""
    for image in stored.images:
        if not pictures.IMAGE.fullmatch(image.png):
            raise UserError(f"record's attention image {image.id!r} is no data URI of an image")
    maps = _means(stored)
    shown = [label for label in record.labels if label in maps or label in stored.missing]

    def cells(position: int, label: str) -> list[Cell]:
        if label not in maps:
            return []
        kind = partial(_figures, kind=stored.maps[label].kind)
        said = (stored.said or {}).get(label) or [None] * len(stored.images)
        of_images = [image[position] for image in maps[label]]
        return [
            Cell(heat=pictures.heat_uri(weights), figures=kind(weights), said=answer)
            for weights, answer in zip(of_images, said, strict=True)
        ]

    return Sheet(
        layers={
            stored.layers[i]: {label: cells(i, label) for label in shown} for i in positions(stored)
        },
        attending=[label for label in maps if stored.maps[label].kind is None],
        masking=[label for label in maps if stored.maps[label].kind == "mask"],
        tiny=max(record.data.image_size) <= pictures.TINY,
    )


def _figures(weights: npt.NDArray[np.float64], kind: Literal["mask"] | None) -> str:
    """Say in few words how strong a map is, since its colours have a scale of their own."""
    mean = float(weights.mean())
    if kind == "mask":
        return f"{100 * mean:.0f}\u00a0% pass"
    return f"up to {weights.max() / mean:.2f}\u00a0× even" if mean > 0 else "no attention"
