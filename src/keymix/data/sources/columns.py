# SPDX-License-Identifier: Apache-2.0
"""Finds images and labels among the columns of a parquet file, and refuses odd labels.

Columns are found from the features that ``datasets`` writes into the schema's metadata
(https://huggingface.co/docs/datasets/image_dataset), or else by their usual names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from keymix.data.sources.base import some
from keymix.data.sources.cells import opened
from keymix.errors import UserError

_IMAGE_NAMES = ("image", "img", "images", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
_SHOWN = 60  # characters of a type


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns."""

    image: str
    label: str
    # of the classes, by their numbers; None where the file does not tell
    names: tuple[str, ...] | None


def find_columns(file: Path) -> Columns:
    """Find the image and the label column of a file from its schema."""
    schema = opened(file).schema_arrow
    features: dict[str, Any] = {}
    try:
        info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = {**info.get("info", {}).get("features", {})}
    except (ValueError, AttributeError, TypeError, RecursionError):  # another writer's metadata
        pass  # go by the names

    def typed(kind: str) -> list[str]:
        return [
            name
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == kind and name in schema.names
        ]

    images = typed("Image") or [field.name for field in schema if _is_image_struct(field.type)]
    image = _pick(images, schema.names, _IMAGE_NAMES)
    label = _pick(typed("ClassLabel"), schema.names, _LABEL_NAMES)
    seen = some(schema.names, 10)
    if image is None:
        raise UserError(f"{file} has no image column (columns: {seen}). Name it 'image'.")
    if label is None:
        raise UserError(
            f"{file} has no labels (columns: {seen}). Classification needs a column 'label'."
        )
    check_labels(file, schema, label)
    names = features.get(label, {}).get("names") if isinstance(features.get(label), dict) else None
    return Columns(image, label, tuple(map(str, names)) if names and type(names) is list else None)


def check_labels(file: Path, schema: Any, column: str) -> None:
    """Refuse labels of a type that names no class."""
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    fits = (
        pa.types.is_integer,
        pa.types.is_boolean,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_null,  # a column of nothing is told by its rows
    )
    if not any(fit(value) for fit in fits):
        raise UserError(
            f"{file}: the labels in column {column!r} are {str(kind)[:_SHOWN]}; a class is a whole "
            "number or text. Write them so."
        )


def _is_image_struct(kind: Any) -> bool:
    """Tell whether a column has the layout of Hugging Face's images, {bytes, path}."""
    if not pa.types.is_struct(kind):
        return False
    return {"bytes", "path"} <= {kind.field(i).name for i in range(kind.num_fields)}


def _pick(typed: list[str], present: Sequence[str], usual: Sequence[str]) -> str | None:
    """Choose a column: the usual name among those of the right type, else the first of the type."""
    for candidates in (typed, list(present)):
        for name in usual:
            if name in candidates:
                return name
    return typed[0] if typed else None
