# SPDX-License-Identifier: Apache-2.0
"""Small image sets on disk, written for each test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import encoded, picture, seed_of


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write ``{"train/cat": 5, …}`` images below a new folder."""

    def make(counts: Mapping[str, int], size: tuple[int, int] = (16, 16)) -> Path:
        root = tmp_path / "images"
        for name, count in counts.items():
            (root / name).mkdir(parents=True)
            for i in range(count):
                picture(seed_of(name) + i, size).save(root / name / f"{i:03d}.png")
        return root

    return make


@pytest.fixture
def make_parquet(tmp_path: Path) -> Callable[..., Path]:
    """Write a parquet file in Hugging Face's layout; columns can be renamed, retyped, left out."""

    def make(
        labels: Sequence[Any] | None,
        *,
        file: str = "train-00000-of-00001.parquet",
        names: Sequence[str] | None = ("cat", "dog"),
        image_column: str = "image",
        label_column: str = "label",
        images: Sequence[Any] | None = None,
        count: int = 0,
        size: tuple[int, int] = (16, 16),
        row_group_size: int = 7,
        first_seed: int = 0,
    ) -> Path:
        count = len(labels) if labels is not None else count
        if images is None:
            images = [
                {"bytes": encoded(first_seed + i, size), "path": f"{i}.png"} for i in range(count)
            ]
        columns: dict[str, Any] = {image_column: pa.array(images)}
        if labels is not None:
            columns[label_column] = pa.array(labels)
        table = pa.table(columns)
        if names is not None:
            features: dict[str, Any] = {image_column: {"_type": "Image"}}
            if labels is not None:
                features[label_column] = {"names": list(names), "_type": "ClassLabel"}
            info = json.dumps({"info": {"features": features}})
            table = table.replace_schema_metadata({"huggingface": info})
        folder = tmp_path / "parquet"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / file, row_group_size=row_group_size)
        return folder

    return make
