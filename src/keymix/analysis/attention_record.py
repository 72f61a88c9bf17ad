# SPDX-License-Identifier: Apache-2.0
"""The record of ``attention.json``: what a study of attention finds, arrays aside. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from keymix.analysis.study_record import StudiedModel

WHOLE = (1.0, 1.0)
"""Share of what maps cover that images without padding are."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """The maps of one layer."""

    number: int  # of the layer in the model's order, from 0
    path: str
    array: str  # name of its weights in ``attention-maps.npz``
    heads: int
    heads_read: int  # heads that were read
    keys: int  # keys that a row runs over
    even: tuple[int, ...]  # one over the even weight of each query's row
    # rows and columns of the queries; None of whole maps, as is all that follows
    grid: tuple[int, int] | None = None
    key_grid: tuple[int, int] | None = None  # rows and columns of the keys
    # row and column of each query on the grid; None for one that is no patch
    places: tuple[tuple[int, int] | None, ...] | None = None
    peak: float | None = None  # largest weight on one position, as a multiple of even attention
    # share of a row on prefix tokens; None too where there are none
    prefix_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class RolledOut:
    """Attention rollout of a model."""

    array: str  # its name in ``attention-maps.npz``
    tokens: int  # tokens of the maps, prefix tokens among them
    layers: tuple[int, ...]
    of: int


@dataclass(frozen=True, kw_only=True)
class AttentionModel(StudiedModel):
    """What one model looks at."""

    photos: str  # name of the images in ``attention-maps.npz``
    layers: tuple[AttentionLayer, ...]
    missing: Mapping[str, str]  # path to reason of those without
    rollout: RolledOut | None  # none if it was not asked for or cannot be
    no_rollout: str | None  # why it cannot be
    # height and width of the images as shares of what the maps cover; the rest is padding
    image: tuple[float, float] = WHOLE

    def omitted(self) -> tuple[str, ...]:
        """The field that is not written: the share of images without padding."""
        return ("image",) if self.image == WHOLE else ()


@dataclass(frozen=True, kw_only=True)
class AttentionRecord:
    """The content of ``attention.json``."""

    stage: Literal["softmax", "final"]  # right after the softmax, or the map that multiplies V
    heads: Literal["mean", "each"]
    view: Literal["image", "matrix"]  # over the image, or whole maps
    scale: Literal["shared", "each"]  # one scale of colours for a figure, or one per cell
    rollout: bool  # whether rollout was asked for
    queries: tuple[str, ...]
    origin: str  # where the images come from, in words
    images: tuple[str, ...]
    left_out: Mapping[str, str]  # name and reason of each that could not be read
    models: tuple[AttentionModel, ...]
    figures: tuple[str, ...] = ()  # files of the figures
