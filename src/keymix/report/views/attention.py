# SPDX-License-Identifier: Apache-2.0
"""Attention on the page: the packed maps of a record, and the sheet that needs no script."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from keymix.errors import UserError
from keymix.report import pictures

Record = Mapping[str, Any]
Stored = Mapping[str, Any]

LEVELS = 65535
"""A stored weight of this many is the map's ``scale``."""

PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


def unpack(stored: Stored, images: int, layers: int) -> npt.NDArray[np.float64]:
    """Unpack a mixer's maps.

    Args:
        stored: ``heads``, ``grid`` (height, width), ``weights`` (base64 of little-endian uint16)
            and ``scale``, the weight that 65535 stands for.
        images: How many images there are.
        layers: How many layers there are.

    Returns:
        ``[image, layer, 1 + heads, height, width]``; the mean over heads comes first.
    """
    levels = np.frombuffer(base64.b64decode(stored["weights"]), dtype="<u2")
    shape = (images, layers, 1 + stored["heads"], *stored["grid"])
    weights: npt.NDArray[np.float64] = levels.reshape(shape).astype(np.float64)
    return weights * (float(stored["scale"]) / LEVELS)


def sheet(record: Record) -> dict[str, Any] | None:
    """Make the static sheet: mean over heads, a middle and the last layer, all images.

    Raises:
        UserError: If an image of the record is no PNG data URI.
    """
    stored = record.get("attention")
    if not stored or not stored["images"]:
        return None
    for image in stored["images"]:
        if not PNG.fullmatch(image["png"]):
            raise UserError(f"record's attention image {image['id']!r} is no PNG data URI")
    images, layers = len(stored["images"]), len(stored["layers"])
    maps = {m: unpack(s, images, layers)[:, :, 0] for m, s in stored["maps"].items()}
    labels = [m["label"] for m in record["mixers"]]
    blocks = []
    # without any map there is nothing to pick or lay out, and the reasons stand alone
    for position in sorted({max(0, layers // 2 - 1), layers - 1}) if layers and maps else ():
        rows = [
            {
                "mixer": label,
                "cells": [_cell(image[position]) for image in maps.get(label, ())],
                "missing": stored["missing"].get(label),
            }
            for label in labels
            if label in maps or label in stored["missing"]
        ]
        blocks.append({"name": stored["layers"][position], "rows": rows})
    return {
        "images": stored["images"],
        "query": stored["query"],
        "blocks": blocks,
        "missing": {} if blocks else dict(stored["missing"]),
        "mixers": [label for label in labels if label in maps],
        "layers": stored["layers"],
        "heads": max((s["heads"] for s in stored["maps"].values()), default=0),
    }


def _cell(weights: npt.NDArray[np.float64]) -> dict[str, Any]:
    return {
        "heat": pictures.heat_uri(weights.tolist()),
        "peak": float(weights.max()),
        "even": float(weights.mean()),
    }
