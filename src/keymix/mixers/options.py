# SPDX-License-Identifier: Apache-2.0
"""The options that all mixers with an attention map share, written once for their constructors."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

TalkingHeads = bool | Literal["bias"]
Scale = Literal["head_dim", "dim", False]
Backend = Literal["auto", "reference", "sdpa", "blocked", "triton"]


class MapOptions(TypedDict, total=False):
    """The options of :class:`keymix.mixers.map_mixer.MapMixer`, for subclasses.

    ``def __init__(self, site, *, mine=1, **shared: Unpack[MapOptions])``: type checkers and the
    registry read them from here on, so that they are written once.
    """

    head_dim: int | None
    qkv_bias: bool
    proj_bias: bool
    scale: Scale
    temperature: bool | float
    mask_diagonal: bool
    talking_heads: TalkingHeads
    attn_drop: float
    proj_drop: float
    backend: Backend
    device: Any
    dtype: Any
