# SPDX-License-Identifier: Apache-2.0
"""Predicted masks on the page: the same few test images with the truth and every prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keymix.errors import UserError
from keymix.report.formats import percent
from keymix.report.views.attention import PNG

Record = Mapping[str, Any]


def sheet(record: Record) -> dict[str, Any] | None:
    """Make the sheet of masks: a column an image, a row the truth and each mixer.

    Returns:
        ``slices, legend, ignored, seed, size`` as stored, ``distinct`` (whether no two of the
        images that have something are of one case), ``rows`` (mixer and cells with ``png`` and
        ``told``, or the reason why there are none); ``None`` without pictures.

    Raises:
        UserError: If a picture of the record is no PNG data URI.
    """
    stored = record.get("gallery")
    if not stored or not stored["slices"]:
        return None
    slices = stored["slices"]
    pictures = [uri for each in slices for uri in (each["png"], each["truth"])]
    pictures += [cell["png"] for cells in stored["predictions"].values() for cell in cells]
    if not all(PNG.fullmatch(uri) for uri in pictures):
        raise UserError("a picture of the record's gallery is no PNG data URI")
    rows: list[dict[str, Any]] = []
    for mixer in record["mixers"]:
        label = mixer["label"]
        if label in stored["predictions"]:
            cells = [
                {"png": cell["png"], "told": _told(each, cell)}
                for each, cell in zip(slices, stored["predictions"][label], strict=True)
            ]
            rows.append({"mixer": label, "cells": cells, "missing": None})
        elif label in stored["missing"]:
            rows.append({"mixer": label, "cells": [], "missing": stored["missing"][label]})
    return {
        "slices": slices,
        "legend": stored["legend"],
        "ignored": stored["ignored"],
        "seed": stored["seed"],
        "size": stored["size"],
        "distinct": _distinct([each["case"] for each in slices if each["area"]]),
        "rows": rows,
    }


def _distinct(cases: Sequence[str]) -> bool:
    return len(set(cases)) == len(cases)


def _told(each: Mapping[str, Any], cell: Mapping[str, Any]) -> str:
    """Say under a prediction how good it is."""
    if each["area"]:
        return f"Jaccard {percent(cell['jaccard'])}\u00a0%"
    if not cell["found"]:
        return "rightly nothing"
    pixels = "pixel" if cell["found"] == 1 else "pixels"
    return f"{cell['found']:,} {pixels} where nothing is"
