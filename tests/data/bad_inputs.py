# SPDX-License-Identifier: Apache-2.0
"""Bad data as it is met: what is given, how it is made, and the line that answers it.

``python tests/data/bad_inputs.py`` prints the table of `docs/reliability.md` from these rows;
`test_bad_inputs` holds each of them against the real command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from bad_instances import INSTANCE_ROWS
from bad_masks import MASK_ROWS
from bad_row import Row
from pictures import encoded, picture

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
WAY_OUT = (
    "Correct it, or leave such images out with --data.skip_corrupt true; "
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


def birds() -> None:
    """``birds.parquet`` with 8 images, the classes finch and wren, and a label of neither."""
    columns = {
        "image": pa.array([{"bytes": encoded(i)} for i in range(8)]),
        "label": [0, 1, 7, *[0] * 5],
    }
    features = {"label": {"names": ["finch", "wren"], "_type": "ClassLabel"}}
    info = json.dumps({"info": {"features": features}})
    pq.write_table(
        pa.table(columns).replace_schema_metadata({"huggingface": info}), "birds.parquet"
    )


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
        "an empty class",
        "folder:photos",
        "photos/emu: class 'emu' has no images. Add some, or remove the folder.",
        lambda: photos(cat=12, dog=12, emu=0),
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
        "a class whose images are all broken, with `--skip-corrupt`",
        "folder:photos",
        "data folder:photos: class 'dog' has no training images left, all are broken "
        "(photos/dog/001.jpg: the file is empty). Replace them, or remove the class.",
        one_class_broken,
        ("--skip-corrupt",),
    ),
    Row(
        "a label out of range",
        "parquet:birds.parquet",
        "birds.parquet row 2: the label is 7, no class of the training data. "
        "Correct or remove the row.",
        birds,
    ),
    Row(
        "no network, nothing there",
        "cifar10:data",
        "data cifar10: it is not whole in data, and downloading it failed (<urlopen error "
        "[Errno -2] Name or service not known>). Put "
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
