# SPDX-License-Identifier: Apache-2.0
"""Masks and boxes as people have them: what is read all the same, and what is named and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coco_sets import rectangle, write
from numpy.typing import NDArray
from PIL import Image
from scan_sets import mask_set

from keymix.cli import main
from keymix.data import ImageData, load
from keymix.data.check import check
from keymix.data.record import DataRecord, counts_left_out
from keymix.data.specs import kind_of
from keymix.errors import KeymixWarning, UserError
from keymix.records import from_json, to_json
from keymix.train.model import warn_of_data

Change = Callable[[dict[str, Any]], object]
SIZE = (40, 60)


def every(what: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Change all entries."""
    return lambda found: [change(entry) for entry in found[what]]


def third(what: str, **values: Any) -> Change:
    """Change the third entry; of annotations, it is of the second image."""
    return lambda found: found[what][2].update(values)


def instances(data: ImageData) -> dict[int, dict[str, Any]]:
    """All that is said of each image's instances at its own size, by its id."""
    rows = [row for split in data.splits for row in split.rows]
    return {row.target.image_id: row.target.truth() for row in rows}


def boxes(data: ImageData) -> dict[int, list[list[float]]]:
    return {key: each["boxes"].tolist() for key, each in instances(data).items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """A set of COCO without anything odd."""
    return load(f"coco:{write(tmp_path_factory.mktemp('plain') / 'set')}", image_size=SIZE)


# ---- COCO: read ------------------------------------------------------------------------------


def as_text(found: dict[str, Any]) -> None:
    for image in found["images"]:
        image.update(id=str(image["id"]), width=str(image["width"]))
    for each in found["annotations"]:
        each.update({key: str(each[key]) for key in ("id", "image_id", "category_id")})
        each["bbox"] = [*map(str, each["bbox"])]


def with_points(found: dict[str, Any]) -> None:
    for image in found["images"]:
        image.update({key: float(image[key]) for key in ("id", "width", "height")})
    for each in found["annotations"]:
        each.update({key: float(each[key]) for key in ("id", "image_id", "category_id")})


def flat(found: dict[str, Any]) -> None:
    for each in found["annotations"]:
        if isinstance(each["segmentation"], list):
            (each["segmentation"],) = each["segmentation"]


SAME: dict[str, Change] = {
    "numbers as text": as_text,
    "whole numbers with a point": with_points,
    "no sizes": every("images", lambda e: (e.pop("width"), e.pop("height"))),
    "sizes of -1": every("images", lambda e: e.update(width=-1, height=-1)),
    "no area": every("annotations", lambda e: e.pop("area")),
    "no crowds": every("annotations", lambda e: e["iscrowd"] or e.pop("iscrowd")),
    "the folder in front": every(
        "images", lambda e: e.update(file_name=f"train2017/{e['file_name']}")
    ),
    "the folders of Windows in front": every(
        "images", lambda e: e.update(file_name=f"set\\train2017\\{e['file_name']}")
    ),
    "polygons without a list around": flat,
}


@pytest.mark.parametrize("what", SAME)
def test_the_same_instances_are_read(tmp_path: Path, plain: ImageData, what: str) -> None:
    root = write(tmp_path / "set", change=SAME[what])
    found, wanted = (instances(data) for data in (load(f"coco:{root}", image_size=SIZE), plain))
    assert found.keys() == wanted.keys()
    for key, each in wanted.items():
        for name, values in each.items():
            if name == "area" and what == "no area":  # that of the mask, in whole pixels
                torch.testing.assert_close(found[key][name], values, rtol=0.1, atol=0)
            else:
                assert torch.equal(found[key][name], values), name
    assert check(f"coco:{root}").fit


@pytest.mark.parametrize("outline", [None, [], [[]]])
def test_boxes_without_outlines_are_read(tmp_path: Path, plain: ImageData, outline: Any) -> None:
    def bare(each: dict[str, Any]) -> None:
        del each["segmentation"], each["area"]
        if outline is not None:
            each["segmentation"] = outline

    root = write(tmp_path / "set", change=every("annotations", bare))  # those of val have outlines
    data = load(f"coco:{root}", image_size=SIZE)
    assert boxes(data) == boxes(plain)
    assert all("masks" not in each for each in instances(data).values())
    assert "masks" not in data.train.target(0)
    left, top, right, bottom = instances(data)[1]["boxes"].unbind(1)
    assert torch.equal(instances(data)[1]["area"], (right - left) * (bottom - top))
    assert [score.key for score in data.task.scores if "mask" in score.key] == []
    assert data.record().outlines is False
    assert plain.record().outlines is True
    assert check(f"coco:{root}").fit


# ---- COCO: faults ----------------------------------------------------------------------------


def runs(**values: Any) -> Change:
    """Change the first run lengths, which are the fifth annotation, of the second image."""
    return lambda found: found["annotations"][4]["segmentation"].update(values)


OF_ANNOTATION: dict[str, Change] = {
    "category": third("annotations", category_id=4),
    "no box": third("annotations", bbox=None),
    "flat box": third("annotations", bbox=[5, 6, 10, 0]),
    "box to the right": third("annotations", bbox=[30, 6, 20, 9]),
    "no outline, as others have": third("annotations", segmentation=[]),
    "two points": third("annotations", segmentation=[[1, 2, 3, 4]]),
    "points outside": third("annotations", segmentation=[[1, 2, 45, 4, 5, 6]]),
    "short run lengths": runs(counts=[0, 600, 1799]),
    "long compressed run lengths": runs(counts="0h"),
    "run lengths of another size": runs(size=[40, 60]),
}


@pytest.mark.parametrize("what", OF_ANNOTATION)
def test_an_unfit_annotation_is_left_out_alone(tmp_path: Path, what: str, plain: ImageData) -> None:
    root = write(tmp_path / "set", change=OF_ANNOTATION[what])
    with pytest.raises(UserError, match=r"train2017\.json: annotation .* of '0002\.png'"):
        load(f"coco:{root}", image_size=SIZE)
    assert not check(f"coco:{root}").fit
    data = load(f"coco:{root}", image_size=SIZE, skip_corrupt=True)
    assert (data.facts.left_out_count, data.facts.annotations_left_out) == (0, 1)
    expected = boxes(plain)
    del expected[2][2 if "run lengths" in what else 0]
    assert boxes(data) == expected


OF_IMAGE: dict[str, Callable[[Path], object]] = {
    # what is done to the file of the third image
    "missing": Path.unlink,
    "another size": lambda file: Image.new("RGB", (7, 9)).save(file),
    "no image": lambda file: file.write_text("no image"),
    "turned by EXIF": lambda file: Image.open(file).save(file, "JPEG", exif=turned()),
}


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize("what", OF_IMAGE)
def test_an_unfit_image_is_left_out_whole(tmp_path: Path, what: str) -> None:
    root = write(tmp_path / "set")
    file = root / "train2017" / "0003.png"
    OF_IMAGE[what](file)
    with pytest.raises(UserError, match=r"EXIF.*mogrify" if "EXIF" in what else file.name):
        load(f"coco:{root}", image_size=SIZE)
    assert not check(f"coco:{root}").fit
    data = load(f"coco:{root}", image_size=SIZE, skip_corrupt=True)
    assert [each.id for each in data.facts.left_out] == [str(file)]
    assert boxes(data).keys() == set(range(1, 12)) - {3}


LOOSE: dict[str, Change] = {
    "unknown image": lambda found: found["annotations"].append(rectangle(9, 77, (1, 2, 9, 9))),
    "id of another": third("images", id=2),
    "file of another": third("images", file_name="0002.png"),
    "image without name": lambda found: found["images"][2].pop("file_name"),
}


@pytest.mark.parametrize("what", LOOSE)
def test_an_entry_of_no_image_is_left_out(tmp_path: Path, what: str) -> None:
    root = write(tmp_path / "set", change=LOOSE[what])
    with pytest.raises(UserError, match=r"instances_train2017\.json: (images\[2\]|annotation 9) "):
        load(f"coco:{root}", image_size=SIZE)
    report = check(f"coco:{root}")
    assert not report.fit
    assert not any("test has no" in line for found in report.findings for line in found.where)
    data = load(f"coco:{root}", image_size=SIZE, skip_corrupt=True)
    assert len(boxes(data)) == (11 if what == "unknown image" else 10)


@pytest.mark.parametrize("content", ["{", "[]", '{"images": []}', b"\xff\xfe"])
def test_a_file_that_is_none(tmp_path: Path, content: str | bytes) -> None:
    root = write(tmp_path / "set", {"train2017": 2})
    file = root / "annotations" / "instances_train2017.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=file.name):
        load(f"coco:{root}")


def test_what_is_left_out_is_counted_by_split(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["annotations"][0].update(bbox=[0, 0, 0, 0], segmentation=[[1, -9, 5, 4, 5, 6]])
        found["annotations"][1].update(category_id=4)
        found["annotations"][5].update(bbox=[1, 1, 0, 2])  # of an image that is left out
        found["images"][2].update(width=49)

    root = write(tmp_path / "set", change=change)
    file = root / "annotations" / "instances_val2017.json"
    found = json.loads(file.read_text())
    found["annotations"][0].update(segmentation=[[1, 2]])
    file.write_text(json.dumps(found))
    data = load(f"coco:{root}", image_size=SIZE, skip_corrupt=True)
    assert (data.facts.left_out_count, data.facts.annotations_left_out) == (1, 3)
    (note,) = (note for note in data.facts.notes if "annotations" in note)
    assert "1 of test" in note
    with pytest.warns(KeymixWarning) as warned:
        warn_of_data(data)
    assert any("3 unfit annotations" in str(each.message) for each in warned)
    assert boxes(data)[1] == []  # an image of which no annotation is left is kept
    again = from_json(DataRecord, to_json(data.record()), where="it")
    assert counts_left_out(again, again.kind) == ["1 broken image", "3 unfit annotations"]


# ---- masks -----------------------------------------------------------------------------------


def arranged(root: Path, images: str, masks: str, mark: str) -> Path:
    """Arrange a made set with folders of other names, which may be one, and marks of masks."""
    for kind, name in (("images", images), ("masks", masks)):
        (root / name).mkdir(exist_ok=True)
        for file in sorted((root / kind).iterdir()):
            end = f"{mark}.png" if kind == "masks" else ".png"
            file.rename(root / name / f"{file.stem}{end}")
        if name != kind:
            (root / kind).rmdir()
    return root


@pytest.mark.parametrize(
    ("images", "masks", "mark"),
    [
        ("images", "masks", "_mask"),
        ("img", "labels", ""),
        ("Imgs", "annotations", "_label"),
        ("JPEGImages", "SegmentationClass", ""),
        ("images", "images", "_seg"),
        (".", ".", "_mask"),
        (".", "masks", ""),
    ],
)
def test_masks_are_paired(tmp_path: Path, images: str, masks: str, mark: str) -> None:
    plain = load(f"masks:{mask_set(tmp_path / 'plain', {'': 6})}")
    root = arranged(mask_set(tmp_path / "set", {"": 6}), images, masks, mark)
    found = load(f"masks:{root}")
    for one, two in zip(found.splits, plain.splits, strict=True):
        assert [Path(one.ids(i)).name for i in range(len(one))] == [
            Path(two.ids(i)).name for i in range(len(two))
        ]
        assert all(torch.equal(one.mask(i), two.mask(i)) for i in range(len(one)))
    if masks not in (images, "masks"):
        assert kind_of(root) == "masks"


def test_one_folder_of_each_split_holds_both(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"train": 4, "val": 2, "test": 3})
    for split in ("train", "val", "test"):
        arranged(root / split, ".", ".", "_mask")
    (root / "train").rename(root / "Training")
    assert [len(split) for split in load(f"masks:{root}").splits] == [4, 2, 3]


COLOURS = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0]], dtype=np.uint8)


def in_palette(mask: NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(mask).convert("P")
    image.putpalette([9, 9, 9, 0, 128, 0, 128, 0, 0])
    return image


OF_COLOURS = "0 0 0 background\n128 0 0 leaf\n0 128 0 root\n"
CODED: dict[str, tuple[Callable[[NDArray[np.uint8]], Image.Image], str]] = {
    # how class numbers become a picture, and what classes.txt says
    "colours": (lambda mask: Image.fromarray(COLOURS[mask]), OF_COLOURS),
    "opaque colours": (
        lambda mask: Image.fromarray(np.dstack([COLOURS[mask], mask * 0 + 255])),
        OF_COLOURS,
    ),
    "a palette, whatever its colours": (in_palette, OF_COLOURS),
    "three equal channels": (lambda mask: Image.fromarray(np.dstack([mask] * 3)), ""),
    "opaque grey": (lambda mask: Image.fromarray(np.dstack([mask, mask * 0 + 255]), "LA"), ""),
    "values": (lambda mask: Image.fromarray(mask * 100), "200 root\n0 background\n100 leaf\n"),
}


@pytest.mark.parametrize("what", CODED)
def test_masks_are_read_as_classes(tmp_path: Path, what: str) -> None:
    draw, text = CODED[what]
    root = mask_set(tmp_path / "set", {"": 6})
    wanted = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8).repeat(3, 0).repeat(3, 1)
    for file in (root / "masks").iterdir():
        draw(wanted).save(file)
    (root / "classes.txt").write_text(text or "background\nleaf\nroot\n")
    data = load(f"masks:{root}")
    names = np.array(data.classes)[data.train.mask(0).numpy()]
    assert (names == np.array(["background", "leaf", "root"])[wanted]).all()


@pytest.mark.parametrize(
    ("draw", "text", "culprit"),
    [
        (lambda mask: COLOURS[mask], "background\nleaf\nroot\n", r"p2\.png.*R G B name"),
        (lambda mask: COLOURS[mask] + 1, OF_COLOURS, r"p2\.png.*129 1 1 \(\d+ pixels\)"),
        (lambda mask: mask + 5, "0 background\n1 leaf\n", r"p2\.png.*6 \(\d+ pixels\)"),
    ],
)
def test_a_value_that_is_no_class_is_named(
    tmp_path: Path, draw: Callable[[Any], Any], text: str, culprit: str
) -> None:
    root = mask_set(tmp_path / "set", {"": 6})
    if "R G" not in culprit:  # the others are left fit
        for file in (root / "masks").iterdir():
            Image.fromarray(np.zeros((6, 9), dtype=np.uint8)).save(file)
    Image.fromarray(draw(np.ones((6, 9), dtype=np.uint8))).save(root / "masks" / "p2.png")
    (root / "classes.txt").write_text(text)
    with pytest.raises(UserError, match=culprit):
        load(f"masks:{root}")
    assert load(f"masks:{root}", skip_corrupt=True).facts.left_out_count == 1


def test_a_photograph_that_exif_turns_is_refused(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"": 6})
    image = root / "images" / "p2.png"
    Image.open(image).save(image.with_suffix(".jpg"), exif=turned())
    image.unlink()
    with pytest.raises(UserError, match=r"p2\.jpg.*EXIF.*mogrify"):
        load(f"masks:{root}")
    assert load(f"masks:{root}", skip_corrupt=True).facts.left_out_count == 1


def test_the_command_names_what_is_unfit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "set", change=third("annotations", bbox=[0, 0, 0, 0]))
    assert main(["data", "check", f"coco:{root}"]) == 1
    assert "annotation 200 of '0002.png'" in capsys.readouterr().out
    assert main(["data", "check", str(write(tmp_path / "good"))]) == 0
