# SPDX-License-Identifier: Apache-2.0
"""Bad data as it is met: what is given, how it is made, and the line that answers it.

``python tests/data/bad_inputs.py`` prints the table of `docs/reliability.md` from these rows;
`test_bad_inputs` holds each of them against the real command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from bad_instances import INSTANCE_ROWS
from bad_masks import MASK_ROWS
from bad_row import Row
from pictures import encoded, picture

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
WAY_OUT = (
    "Replace or remove it, or leave such images out with --data.skip_corrupt true; "
    "`keymix data check` names them all."
)


def photos(side: int = 16, **counts: int) -> Path:
    """Images in ``photos/<class>/``; an underscore in a name stands for a slash."""
    for name, count in (counts or {"cat": 12, "dog": 12}).items():
        folder = Path("photos", name.replace("_", "/"))
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            seed = 1000 * sum(map(ord, name)) + i
            picture(seed, (side, side)).save(folder / f"{i:03d}.jpg", quality=95)
    return Path("photos")


def spoilt(name: str, change: Callable[[bytes], bytes], side: int = 16, **counts: int) -> None:
    file = photos(side, **counts) / name
    file.write_bytes(change(file.read_bytes()))


def cut(content: bytes) -> bytes:
    return content[:-60]


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def birds(
    labels: Sequence[Any] | None = (0, 1) * 10,
) -> Path:
    """``birds.parquet`` with 20 images and the classes finch and wren."""
    columns = {"image": pa.array([{"bytes": encoded(i), "path": None} for i in range(20)])}
    if labels is not None:
        columns["label"] = pa.array(labels)
    features = {"label": {"names": ["finch", "wren"], "_type": "ClassLabel"}}
    table = pa.table(columns)
    if labels is not None:
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    pq.write_table(table, "birds.parquet")
    return Path("birds.parquet")


def cut_parquet() -> None:
    file = birds()
    file.write_bytes(half(file.read_bytes()))


def one_class_broken() -> None:
    photos()
    for file in Path("photos", "dog").iterdir():
        file.write_bytes(b"")


ROWS: tuple[Row, ...] = (
    Row(
        "a misspelt spec",
        "cifr10",
        "unknown data 'cifr10'. Did you mean 'cifar10' or 'cifar100' or 'cifar10dvs'?",
    ),
    Row(
        "a path without its kind",
        "photos",
        "data 'photos' is a path without its kind. Write folder:photos",
        photos,
    ),
    Row(
        "a path that is not there",
        "folder:photo",
        "data folder:photo: there is no 'photo'. Check the path.",
    ),
    Row(
        "an empty class",
        "folder:photos",
        "photos/emu: class 'emu' has no images. Add some, or remove the folder.",
        lambda: photos(cat=12, dog=12, emu=0),
    ),
    Row(
        "a test class that train lacks",
        "folder:photos",
        "photos/test/emu: class 'emu' is not in train. Add it there, or remove the folder.",
        lambda: photos(train_cat=9, train_dog=9, test_cat=2, test_emu=2),
    ),
    Row(
        "a limit below two images per class",
        "digits",
        "limit=12 is below two images per class. Give at least 20.",
        words=("--limit", "12"),
    ),
    Row(
        "a truncated JPEG, small images",
        "folder:photos",
        "cannot read image photos/cat/003.jpg: image file is truncated (90 bytes not processed). "
        + WAY_OUT,
        lambda: spoilt("cat/003.jpg", cut),
    ),
    Row(
        "a truncated JPEG, large images, read during validation",
        "folder:photos",
        "cannot read image photos/val/cat/001.jpg: image file is truncated "
        "(35 bytes not processed). " + WAY_OUT,
        lambda: spoilt(
            "val/cat/001.jpg",
            half,
            side=120,
            train_cat=4,
            train_dog=4,
            val_cat=2,
            val_dog=2,
            test_cat=2,
            test_dog=2,
        ),
    ),
    Row(
        "a text file named .jpg",
        "folder:photos",
        "cannot read image photos/cat/003.jpg: not an image. " + WAY_OUT,
        lambda: spoilt("cat/003.jpg", lambda _: b"a cat"),
    ),
    Row(
        "a class whose images are all broken, with `--skip-corrupt`",
        "folder:photos",
        "data folder:photos: class 'dog' has no training images left, all are broken "
        "(photos/dog/001.jpg: the file is empty). Replace them, or remove the class.",
        one_class_broken,
        ("--skip-corrupt",),
    ),
    Row(
        "parquet without labels",
        "parquet:birds.parquet",
        "birds.parquet has no labels (columns: image struct<bytes: binary, path: null>). "
        "Name the column 'label'.",
        lambda: birds(labels=None),
    ),
    Row(
        "a label out of range",
        "parquet:birds.parquet",
        "birds.parquet row 5: the label is 7, no class of the training data. "
        "Correct or remove the row.",
        lambda: birds(labels=[0, 1, 0, 1, 0, 7, *[0, 1] * 7]),
    ),
    Row(
        "a truncated parquet file",
        "parquet:birds.parquet",
        "birds.parquet is not a readable parquet file: Parquet magic bytes not found in footer. "
        "Either the file is corrupted or this is not a parquet file.",
        cut_parquet,
    ),
    Row(
        "no network, nothing there",
        "cifar10:data",
        "data cifar10: it is not whole in data, and downloading it failed (<urlopen error "
        "[Errno -2] Name or service not known>). Remove what is damaged there and put "
        f"{CIFAR} into data, or use hf:OWNER/NAME or parquet:PATH.",
    ),
    Row(
        "no network, a set of the Hub that is not in its cache",
        "hf:uoft-cs/cifar10",
        "data hf:uoft-cs/cifar10: the Hub cannot be reached ([Errno -2] Name or service not "
        "known), and its cache huggingface/hub lacks it. Run the command where there is "
        "a network, or use parquet:PATH.",
    ),
    *MASK_ROWS,
    *INSTANCE_ROWS,
)


def table() -> str:
    """The rows as a table in Markdown."""
    lines = ["| given | `--data` | answered |", "|---|---|---|"]
    for row in ROWS:
        data = " ".join([row.spec, *row.words])
        answer = row.answer.replace("|", "\\|").replace("`", "")
        lines.append(f"| {row.given} | `{data}` | `{answer}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
