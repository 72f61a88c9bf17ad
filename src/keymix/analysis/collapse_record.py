# SPDX-License-Identifier: Apache-2.0
"""What a study of attention collapse says of unique blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Unique:
    """The last "unique" block of layers that can be compared (DeepViT Sec. 5.2).

    Attributes:
        block: Its number in the model, from 1.
        path: Its layer.
        sharing: Numbers of the blocks after it, which could take its map.
        least: The least share of similar columns (Eq. 7) between its map and any of theirs; None
            where there are none.
    """

    block: int
    path: str
    sharing: tuple[int, ...]
    least: float | None
