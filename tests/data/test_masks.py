# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scan_sets import mask_set, write_rows

from keymix.data import load
from keymix.data.kinds import MASK
from keymix.data.looks import look
from keymix.data.sample import Faults, Row
from keymix.data.sources.masks import open_masks
from keymix.errors import UserError


def rows_of(root: Path) -> Sequence[Row]:
    return open_masks(str(root), Faults()).rows


def mask_of(root: Path, values: NDArray[Any] | Image.Image) -> NDArray[np.uint8]:
    """The mask that is read where a file of these pixels is."""
    image = values if isinstance(values, Image.Image) else Image.fromarray(values)
    image.save(root / "masks" / "p0.png")
    found: NDArray[np.uint8] = rows_of(root)[0].read_target().numpy()
    return found


def test_values_are_classes_whatever_the_mode(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"": 1}, size=(2, 3))
    result = np.array([[0, 1, 2], [255, 1, 0]], dtype=np.uint8)
    assert (mask_of(root, result) == result).all()
    assert (mask_of(root, result.astype(np.uint16)) == result).all()
    palette = Image.fromarray(result).convert("L")
    coloured = Image.frombytes("P", palette.size, result.tobytes())
    coloured.putpalette([k * 37 % 256 for k in range(768)])
    assert (mask_of(root, coloured) == result).all()
    assert (mask_of(root, result == 1) == (result == 1)).all()  # a picture of one bit


@pytest.mark.parametrize("text", ["ground\nignore\ntree\n", "0 ground\n1 ignore\n2 tree\n"])
def test_what_is_called_ignore_is_no_class(text: str, tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"": 1}, size=(2, 3))
    (root / "classes.txt").write_text(text)
    values = np.array([[0, 1, 2], [255, 1, 0]], dtype=np.uint8)
    assert (mask_of(root, values) == [[0, 255, 1], [255, 255, 0]]).all()
    assert open_masks(str(root), Faults()).classes == ("ground", "tree")


def test_a_colour_called_ignore_is_no_class(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"": 1}, size=(1, 3))
    (root / "classes.txt").write_text("10 20 30 ground\n224 224 192 ignore\n0 0 0 tree\n")
    colours = np.array([[[10, 20, 30], [224, 224, 192], [0, 0, 0]]], dtype=np.uint8)
    assert mask_of(root, colours).tolist() == [[0, 255, 1]]


def test_data_of_a_folder_report_classes_channels_and_what_is_empty(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"": 12})
    Image.fromarray(np.full((6, 9), 255, dtype=np.uint8)).save(root / "masks" / "p3.png")
    Image.fromarray(np.zeros((6, 9), dtype=np.uint8)).save(root / "masks" / "p4.png")
    data = load(f"masks:{root}", val_fraction=0.2, test_fraction=0.2)
    record = data.record()
    assert (data.classes, data.in_chans, data.image_size) == (
        ("background", "leaf", "root"),
        1,
        (6, 9),
    )
    assert data.masks is not None
    assert (data.masks.multilabel, data.masks.background) == (False, 0)
    assert sum(record.empty.values()) == 2
    assert record.masks == "exclusive"
    assert "no groups.csv: each image is taken for a case of its own" in record.notes
    Image.new("RGB", (9, 6)).save(root / "images" / "p3.png")
    assert load(f"masks:{root}").in_chans == 3


def test_given_splits_are_kept_and_stems_may_come_again(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"train": 5, "val": 2, "test": 3})
    data = load(f"masks:{root}")
    assert [len(split) for split in data.splits] == [5, 2, 3]
    assert len({group for split in data.splits for group in split.groups}) == 10
    assert data.test.ids(0) == str(root / "test" / "images" / "p0.png")
    assert data.test.rows[0].name == "p0"


def test_a_folder_a_class_is_multilabel(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"": 4})
    (root / "classes.txt").write_text("leaf\nroot")
    for file in sorted((root / "masks").iterdir()):
        values = np.asarray(Image.open(file))
        for k, name in enumerate(("leaf", "root")):
            (root / "masks" / name).mkdir(exist_ok=True)
            inside = ((values > k) * 100 * (k + 1)).astype(np.uint8)
            Image.fromarray(inside).save(root / "masks" / name / file.name)
        file.unlink()
    data = load(f"masks:{root}", val_fraction=0.3)
    assert data.classes == ("leaf", "root")
    assert data.record().masks == "multilabel"
    planes = data.train.mask(0)
    assert planes.shape == (2, 6, 9)
    assert planes.unique().tolist() == [0, 1]
    assert (planes[0] >= planes[1]).all()
    assert planes[0].sum() > planes[1].sum()
    with pytest.raises(UserError, match=r"has a folder for each class, so its masks are multila"):
        load(f"masks:{root}", masks="exclusive")
    (root / "masks" / "root" / "p2.png").unlink()
    with pytest.raises(UserError, match=r"masks/root/p2\.png: No such file"):
        load(f"masks:{root}")
    (root / "masks" / "seed").mkdir()
    with pytest.raises(UserError, match=r"masks/seed: class 'seed' is not in classes\.txt"):
        load(f"masks:{root}")


def put(kind: str, image: Image.Image) -> Callable[[Path], None]:
    return lambda root: image.save(root / kind / "p2.png")


def pixels(value: int, size: tuple[int, int] = (6, 9), kind: type = np.uint8) -> Image.Image:
    values = np.ones(size, dtype=kind)
    values[0, :2] = value
    return Image.fromarray(values)


OF_AN_IMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    # what is done to p2.png, and the culprit
    "no mask": (lambda root: (root / "masks" / "p2.png").unlink(), "masks/p2.png"),
    "no image": (lambda root: (root / "images" / "p2.png").unlink(), "images/p2.*"),
    "two images": (
        lambda root: pixels(3).save(root / "images" / "p2.jpg"),
        "images/p2.jpg",
    ),
    "value": (put("masks", pixels(7)), "7 (2 pixels)"),
    # 2 in its lower byte
    "wide value": (put("masks", pixels(258, kind=np.uint16)), "258 (2 pixels)"),
    "size": (put("masks", pixels(1, (9, 6))), "9x6 pixels, and its mask has 6x9"),
    "broken mask": (
        lambda root: (root / "masks" / "p2.png").write_bytes(b"no picture"),
        "masks/p2.png",
    ),
    "broken image": (
        lambda root: (root / "images" / "p2.png").write_bytes(b"no picture"),
        "images/p2.png",
    ),
}


@pytest.mark.parametrize("what", OF_AN_IMAGE)
def test_a_fault_of_an_image_is_named_once_refused_or_left_out(tmp_path: Path, what: str) -> None:
    spoil, culprit = OF_AN_IMAGE[what]
    root = mask_set(tmp_path / "set", {"": 9})
    spoil(root)
    seen = look(rows_of(root), MASK, decode=False)
    (fault,) = [fault for each in seen for fault in each.faults]
    assert culprit in fault.message
    with pytest.raises(UserError) as caught:
        load(f"masks:{root}")
    assert culprit in str(caught.value)
    record = load(f"masks:{root}", skip_corrupt=True).record()
    assert record.left_out_count == 1
    assert culprit in f"{record.left_out[0].id}: {record.left_out[0].reason}"
    assert sum(record.sizes.values()) == 8


def write(text: str) -> Callable[[Path], object]:
    return lambda root: (root / "classes.txt").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "culprit"),
    [
        (lambda root: (root / "classes.txt").unlink(), "classes.txt"),
        (write("leaf\nroot\nleaf\n"), "'leaf'"),
        (write("leaf\n"), "classes.txt"),
        (write("\n".join(f"c{k}" for k in range(256))), "256 classes"),
        (lambda root: mask_set(root, {"train": 2}), "train/"),
        (lambda root: (root / "masks").rename(root / "x"), "masks:"),
        (lambda root: [path.unlink() for path in (root / "images").iterdir()], "masks:"),
    ],
)
def test_a_mistake_of_the_folder_is_one_line(
    tmp_path: Path, spoil: Callable[[Path], object], culprit: str
) -> None:
    root = mask_set(tmp_path / "set", {"": 9})
    spoil(root)
    with pytest.raises(UserError, match=re.escape(culprit)) as caught:
        load(f"masks:{root}")
    assert "\n" not in str(caught.value)


def groups(root: Path, rows: list[list[str]]) -> Path:
    write_rows(root / "groups.csv", rows, ("image", "group"))
    return root


def test_a_group_stays_in_one_split(tmp_path: Path) -> None:
    rows = [[f"p{k}.png" if k % 2 else f"p{k}", f"plant{k // 3}"] for k in range(12)]
    root = groups(mask_set(tmp_path / "set", {"": 12}), rows)
    data = load(f"masks:{root}", val_fraction=0.3, test_fraction=0.3)
    assert data.record().cases == {"train": 2, "val": 1, "test": 1}
    assert [len(split) for split in data.splits] == [6, 3, 3]
