# SPDX-License-Identifier: Apache-2.0
"""Which shifts patch tokens have, and which they had in records that do not say. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHIFTS = ("axes", "half_patch", "diagonal")
"""What ``shifts`` may be; the first is that of new models."""

BEFORE = "diagonal"
"""What all models with shifted patches had while there was no choice."""

_SHIFTED_BEFORE = (
    "vit_small_spt_p4_32",
    "ska_vit_small_spt_p4_32",
    "cska_vit_small_spt_p4_32",
    "ska_vit_small_spt_p4_32_wide",
)


def embedder(model: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """Say which model of a recipe embeds the patches: its own, or the backbone in it.

    Of the ``model`` of a recipe (``name`` and ``options``) it returns the name, the recipe's key of
    the options, and these.
    """
    options = model.get("options") or {}
    if isinstance(backbone := options.get("backbone"), str):
        return backbone, "model.options.backbone_options", options.get("backbone_options") or {}
    return str(model.get("name")), "model.options", options


def recorded_shifts(model: Mapping[str, Any]) -> str | None:
    """Return the shifts that a recipe's recorded ``model`` was trained with; None without any."""
    name, _, options = embedder(model)
    if options.get("shifts") is not None:
        return str(options["shifts"])
    return BEFORE if options.get("shifted_patches", name in _SHIFTED_BEFORE) else None
