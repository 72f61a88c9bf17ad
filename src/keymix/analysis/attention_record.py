# SPDX-License-Identifier: Apache-2.0
"""The record of ``attention.json``: what a look at attention leaves besides arrays. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from keymix.analysis.study_record import StudiedModel, StudyRecord

FORMAT = 1
"""Version of the record."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """The maps of one layer.

    Attributes:
        number: Of the layer in the model's order, from 0.
        path: Of its module.
        array: Name of its weights in ``maps.npz``.
        heads: Heads that are kept.
        heads_read: Heads that were read.
        keys: Keys that a row runs over.
        even: One over the even weight of each query's row.
        grid: Rows and columns of the queries; None of whole maps, as is all that follows.
        key_grid: Rows and columns of the keys.
        places: Row and column of each query on the grid; None for one that is no patch.
        peak: Largest weight on one position, as a multiple of even attention.
        prefix_share: Share of a row on prefix tokens; None too where there are none.
    """

    number: int
    path: str
    array: str
    heads: int
    heads_read: int
    keys: int
    even: tuple[int, ...]
    grid: tuple[int, int] | None = None
    key_grid: tuple[int, int] | None = None
    places: tuple[tuple[int, int] | None, ...] | None = None
    peak: float | None = None
    prefix_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class RolledOut:
    """Attention rollout of a model.

    Attributes:
        array: Its name in ``maps.npz``.
        tokens: Tokens of the maps, prefix tokens among them.
        layers: Numbers of the layers that it multiplies.
        of: Layers of the model.
    """

    array: str
    tokens: int
    layers: tuple[int, ...]
    of: int


@dataclass(frozen=True, kw_only=True)
class AttentionModel(StudiedModel):
    """What one model looks at.

    Attributes:
        photos: Name of the images in ``maps.npz``.
        layers: One entry a layer that has a map.
        missing: Path to reason of those without.
        rollout: None if it was not asked for or cannot be.
        no_rollout: Why it cannot be.
    """

    photos: str
    layers: tuple[AttentionLayer, ...]
    missing: Mapping[str, str]
    rollout: RolledOut | None
    no_rollout: str | None


@dataclass(frozen=True, kw_only=True)
class AttentionRecord(StudyRecord):
    """The content of ``attention.json``.

    Attributes:
        format: Version of the record.
        stage: Right after the softmax, or the map that multiplies V.
        heads: Each head, or their mean.
        view: Over the image, or whole maps.
        scale: One scale of colours for a figure, or one a cell.
        rollout: Whether rollout was asked for.
        queries: Whose rows, as they were named.
        origin: Where the images come from, in words.
        images: Their names.
        left_out: Name and reason of each that could not be read.
        models: One entry a model.
        figures: Files of the figures.
    """

    format: int = FORMAT
    stage: Literal["softmax", "final"]
    heads: Literal["mean", "each"]
    view: Literal["image", "matrix"]
    scale: Literal["shared", "each"]
    rollout: bool
    queries: tuple[str, ...]
    origin: str
    images: tuple[str, ...]
    left_out: Mapping[str, str]
    models: tuple[AttentionModel, ...]
    figures: tuple[str, ...] = ()
