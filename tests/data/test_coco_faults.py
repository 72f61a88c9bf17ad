# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a set in the format of COCO is named, counted, and refused or left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coco_sets import rectangle, write
from PIL import Image

from keymix.cli import main
from keymix.data import Augment, ImageData, Loader, load
from keymix.data.check import check
from keymix.data.detection.table import InstanceTargets
from keymix.data.findings import Report
from keymix.data.record import DataRecord, counts_left_out
from keymix.errors import KeymixWarning, UserError
from keymix.records import from_json, to_json
from keymix.train.model import warn_of_data

Change = Callable[[dict[str, Any]], object]


def entry(what: str, **values: Any) -> Change:
    """Change values of the third entry; of annotations, it is of the second image."""
    return lambda found: found[what][2].update(values)


def without(what: str, key: str) -> Change:
    return lambda found: found[what][2].pop(key)


def add(what: str, made: Any) -> Change:
    return lambda found: found[what].append(made)


def runs(**values: Any) -> Change:
    """Change the first run lengths, which are the fifth annotation, of the second image."""
    return lambda found: found["annotations"][4]["segmentation"].update(values)


def same_id(found: dict[str, Any]) -> None:
    found["annotations"][2].update(id=found["annotations"][1]["id"])


BIG = 10**400
OF_ANNOTATION: dict[str, tuple[Change, str]] = {
    # what: the change of an annotation of the second image, and the kind of its fault
    "category": (entry("annotations", category_id=4), "unknown category"),
    "no category": (without("annotations", "category_id"), "missing key"),
    "text category": (entry("annotations", category_id="7"), "bad entry"),
    "no id": (without("annotations", "id"), "missing key"),
    "real id": (entry("annotations", id=1.5), "bad entry"),
    "huge id": (entry("annotations", id=BIG), "bad entry"),
    "same id": (same_id, "duplicate id"),
    "no box": (without("annotations", "bbox"), "missing key"),
    "box of text": (entry("annotations", bbox="abcd"), "bad number"),
    "box of three": (entry("annotations", bbox=[1, 2, 3]), "bad number"),
    "box with nothing": (entry("annotations", bbox=[1, 2, 3, None]), "bad number"),
    "box of nan": (entry("annotations", bbox=[1, float("nan"), 3, 4]), "bad number"),
    "box of infinity": (entry("annotations", bbox=[1, 2, float("inf"), 4]), "bad number"),
    "huge box": (entry("annotations", bbox=[1, 2, BIG, 4]), "bad number"),
    "flat box": (entry("annotations", bbox=[5, 6, 10, 0]), "empty box"),
    "negative box": (entry("annotations", bbox=[25, 6, -10, 9]), "empty box"),
    "box to the right": (entry("annotations", bbox=[30, 6, 20, 9]), "box outside the image"),
    "box above": (entry("annotations", bbox=[3, -5, 20, 9]), "box outside the image"),
    "box at the border": (
        entry("annotations", bbox=[40.2, 6, 0.5, 9]),
        "box outside the image",
    ),
    "no area": (without("annotations", "area"), "missing key"),
    "negative area": (entry("annotations", area=-1), "bad number"),
    "area beyond the image": (entry("annotations", area=1e308), "bad number"),
    "area of nan": (entry("annotations", area=float("nan")), "bad number"),
    "crowd of two": (entry("annotations", iscrowd=2), "bad entry"),
    "crowd of text": (entry("annotations", iscrowd=[]), "bad entry"),
    "no outline": (without("annotations", "segmentation"), "missing key"),
    "empty outline": (entry("annotations", segmentation=[]), "no outline"),
    "outline of text": (entry("annotations", segmentation="1 2 3"), "no outline"),
    "two points": (entry("annotations", segmentation=[[1, 2, 3, 4]]), "bad polygon"),
    "odd numbers": (entry("annotations", segmentation=[[1, 2, 3, 4, 5, 6, 7]]), "bad polygon"),
    "an empty polygon": (
        entry("annotations", segmentation=[[1, 2, 3, 4, 5, 6], []]),
        "bad polygon",
    ),
    "flat list": (entry("annotations", segmentation=[1, 2, 3, 4, 5, 6]), "bad number"),
    "points of text": (entry("annotations", segmentation=[["a"] * 6]), "bad number"),
    "points of nan": (
        entry("annotations", segmentation=[[1, 2, 3, 4, 5, float("nan")]]),
        "bad number",
    ),
    "points outside": (
        entry("annotations", segmentation=[[1, 2, 45, 4, 5, 6]]),
        "polygon outside the image",
    ),
    "points above": (
        entry("annotations", segmentation=[[1, -2, 5, 4, 5, 6]]),
        "polygon outside the image",
    ),
    "short run lengths": (runs(counts=[0, 600, 1799]), "bad run lengths"),
    "long run lengths": (runs(counts=[0, 600, 1801]), "bad run lengths"),
    "no run lengths": (runs(counts=[]), "bad run lengths"),
    "negative run lengths": (runs(counts=[-1, 601, 1800]), "bad run lengths"),
    "real run lengths": (runs(counts=[0.0, 600, 1800]), "bad run lengths"),
    "huge run lengths": (runs(counts=[0, BIG]), "bad run lengths"),
    "cut run lengths": (runs(counts="0h"), "bad run lengths"),
    "compressed run lengths of others": (runs(counts="0h01"), "bad run lengths"),
    "run lengths of another size": (runs(size=[40, 60]), "bad run lengths"),
    "run lengths of no size": (runs(size=None), "bad run lengths"),
}
OF_IMAGE: dict[str, tuple[Change, str]] = {
    # what: the change of the third image, and the kind of its fault
    "another width": (entry("images", width=49), "size unlike the entry"),
    "leaves the folder": (entry("images", file_name="../0003.png"), "bad file name"),
    "leaves it deeper": (entry("images", file_name="a/../../0003.png"), "bad file name"),
    "absolute": (entry("images", file_name="/etc/passwd"), "bad file name"),
    "of Windows": (entry("images", file_name="..\\0003.png"), "bad file name"),
    "of a drive": (entry("images", file_name="C:\\0003.png"), "bad file name"),
    "nul": (entry("images", file_name="0003\0.png"), "bad file name"),
    "missing": (entry("images", file_name="none.png"), "missing image"),
}
LOOSE: dict[str, tuple[Change, str, int]] = {
    # what: the change, the kind of its faults, and how many
    "unknown image": (add("annotations", rectangle(9, 77, (1, 2, 9, 9))), "unknown image", 1),
    "annotation of no image": (without("annotations", "image_id"), "missing key", 1),
    "annotation of an image by name": (entry("annotations", image_id="2"), "missing key", 1),
    "no annotation": (add("annotations", [1]), "bad entry", 1),
    "image without id": (without("images", "id"), "bad entry", 1),
    "image without name": (without("images", "file_name"), "bad entry", 1),
    "image without height": (without("images", "height"), "bad entry", 1),
    "image of text": (entry("images", width="48"), "bad entry", 1),
    "image of no size": (entry("images", width=0), "bad entry", 1),
    "image of negative size": (entry("images", width=-48), "bad entry", 1),
    "no image": (add("images", None), "bad entry", 1),
    "image of the same id": (
        add("images", {"id": 3, "file_name": "0009.png", "width": 48, "height": 48}),
        "duplicate id",
        1,
    ),
    "image of the same file": (
        add("images", {"id": 30, "file_name": "0003.png", "width": 48, "height": 48}),
        "file listed twice",
        1,
    ),
    "category of the same id": (add("categories", {"id": 7, "name": "x"}), "duplicate id", 1),
    "category without name": (add("categories", {"id": 8}), "bad entry", 1),
    "category of text": (add("categories", {"id": "8", "name": "x"}), "bad entry", 1),
    "no category": (add("categories", 8), "bad entry", 1),
    "category that val lacks": (entry("categories", name="hound"), "other categories", 1),
}


def kinds(report: Report) -> dict[str, int]:
    """Count what stops training, by kind."""
    return {f.what: f.count for f in report.of("stops")}


def read_all(data: ImageData) -> int:
    """Serve every image of every split as training and evaluation do."""
    count = 0
    for split in data.splits:
        assert isinstance(split.targets, InstanceTargets)
        augment = Augment(flip=True, multi_scale=(20, 40))
        for train in (True, False):
            loader = Loader(split, data, batch_size=2, train=train, augment=augment)
            for batch in loader:
                for target in batch.targets:
                    left, top, right, bottom = target["boxes"].unbind(1)
                    assert ((right > left) & (bottom > top)).all()
                    assert target["boxes"].isfinite().all()
                    count += 1
        for i in range(len(split)):
            split.targets.truth(i)
            split.targets.encoded(i)
    return count


def boxes_of(data: ImageData) -> dict[int, list[list[float]]]:
    """Read the boxes of each image by its id; all else of its instances is of as many."""
    found = {}
    for targets in (split.targets for split in data.splits):
        assert isinstance(targets, InstanceTargets)
        for i in range(len(targets)):
            truth = targets.truth(i)
            assert len({len(truth[name]) for name in ("boxes", "labels", "masks", "area")}) == 1
            assert len(targets.encoded(i)) == len(truth["masks"])
            found[targets.image_id(i)] = truth["boxes"].tolist()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """A set without a fault."""
    return load(f"coco:{write(tmp_path_factory.mktemp('plain') / 'set')}", image_size=(40, 60))


def found_and_refused(root: Path, kind: str) -> None:
    """A check names one fault of a kind, and loading refuses it."""
    report = check(f"coco:{root}")
    assert kinds(report) == {kind: 1}
    (finding,) = report.of("stops")
    with pytest.raises(UserError) as caught:
        load(f"coco:{root}", image_size=(40, 60))
    assert str(caught.value).startswith(finding.where[0])
    assert "skip_corrupt" in str(caught.value)


SPLITS = pytest.mark.parametrize(("split", "first"), [("train2017", 1), ("val2017", 9)])


@SPLITS
@pytest.mark.parametrize("what", OF_ANNOTATION)
def test_an_unfit_annotation_is_left_out_alone(
    tmp_path: Path, what: str, split: str, first: int, plain: ImageData
) -> None:
    change, kind = OF_ANNOTATION[what]
    root = write(tmp_path / "set", change=change, changed=split)
    found_and_refused(root, kind)
    assert check(f"coco:{root}").facts["instances"]["unfit"] == 1
    data = load(f"coco:{root}", image_size=(40, 60), skip_corrupt=True)
    assert (data.facts.left_out_count, data.facts.annotations_left_out) == (0, 1)
    (note,) = (note for note in data.facts.notes if "annotations" in note)
    assert f"{kind} (1)" in note
    expected = boxes_of(plain)
    del expected[first + 1][2 if "run lengths" in what else 0]
    assert boxes_of(data) == expected
    assert read_all(data) == 2 * 11
    assert data.facts.fingerprint != plain.facts.fingerprint


@SPLITS
@pytest.mark.parametrize("what", OF_IMAGE)
def test_an_unfit_image_is_left_out_whole(
    tmp_path: Path, what: str, split: str, first: int
) -> None:
    change, kind = OF_IMAGE[what]
    root = write(tmp_path / "set", change=change, changed=split)
    found_and_refused(root, kind)
    assert check(f"coco:{root}").facts["instances"]["unfit"] == 0
    data = load(f"coco:{root}", image_size=(40, 60), skip_corrupt=True)
    assert (data.facts.left_out_count, data.facts.annotations_left_out) == (1, None)
    assert not any("annotations" in note for note in data.facts.notes)
    assert boxes_of(data).keys() == set(range(1, 12)) - {first + 2}
    assert read_all(data) == 2 * 10


def test_annotations_left_out_are_counted_once_by_split_and_kind(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["annotations"][0].update(bbox=[0, 0, 0, 0], segmentation=[[1, -9, 5, 4, 5, 6]])
        found["annotations"][1].update(category_id=4)
        found["annotations"][2].update(id=found["annotations"][4]["id"])
        found["annotations"][5].update(bbox=[1, 1, 0, 2])  # of an image that is left out
        found["images"][2].update(width=49)

    root = write(tmp_path / "set", change=change)
    file = root / "annotations" / "instances_val2017.json"
    found = json.loads(file.read_text())
    found["annotations"][0].update(segmentation=[[1, 2]])
    file.write_text(json.dumps(found))
    report = check(f"coco:{root}")
    assert report.facts["instances"]["unfit"] == 5
    data = load(f"coco:{root}", image_size=(40, 60), skip_corrupt=True)
    assert (data.facts.left_out_count, data.facts.annotations_left_out) == (1, 4)
    (note,) = (note for note in data.facts.notes if "annotations" in note)
    counts = dict.fromkeys(("empty box", "unknown category", "duplicate id", "bad polygon"), 1)
    for kind, count in counts.items():
        assert f"{kind} ({count})" in note
    numbers = {name: int(number) for number, name in re.findall(r"(\d+) of (train|val|test)", note)}
    assert sum(numbers.values()) == 4
    assert numbers["test"] == 1
    with pytest.warns(KeymixWarning) as warned:
        warn_of_data(data)
    assert any("4 unfit annotations" in str(each.message) for each in warned)
    assert boxes_of(data)[1] == []  # an image of which no annotation is left is kept
    again = from_json(DataRecord, to_json(data.record()), where="it")
    assert again.annotations_left_out == 4
    assert counts_left_out(again, again.kind) == ["1 broken image", "4 unfit annotations"]


def test_the_first_annotation_of_an_id_is_kept(tmp_path: Path) -> None:
    root = write(tmp_path / "set", change=same_id)
    data = load(f"coco:{root}", image_size=(40, 60), skip_corrupt=True)
    assert [len(boxes_of(data)[key]) for key in (1, 2)] == [2, 2]


@pytest.mark.parametrize("what", LOOSE)
def test_a_fault_of_an_entry(tmp_path: Path, what: str) -> None:
    change, kind, count = LOOSE[what]
    root = write(tmp_path / "set", change=change)
    with pytest.raises(UserError) as caught:
        load(f"coco:{root}", image_size=(40, 60))
    report = check(f"coco:{root}")
    assert kinds(report).pop(kind) >= count
    found = next(f for f in report.of("stops") if f.what == kind)
    assert any(str(caught.value).startswith(f.where[0]) for f in report.of("stops"))
    data = load(f"coco:{root}", image_size=(40, 60), skip_corrupt=True)
    assert any(found.what in note for note in data.facts.notes)
    assert read_all(data) > 0


def _spoil(root: Path, how: str) -> Path:
    file = root / "train2017" / "0003.png"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:200])
    elif how == "text":
        file.write_text("no image")
    else:
        Image.new("RGB", (7, 9)).save(file)
    return file


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("cut", "broken images"),
        ("text", "broken images"),
        ("small", "size unlike the entry"),
    ],
)
def test_a_spoilt_image(tmp_path: Path, how: str, kind: str) -> None:
    root = write(tmp_path / "set")
    file = _spoil(root, how)
    if how != "cut":  # whose header is whole
        with pytest.raises(UserError, match=file.name):
            load(f"coco:{root}", image_size=(40, 60))
    assert kinds(check(f"coco:{root}")) == {kind: 1}
    data = load(f"coco:{root}", image_size=(40, 60), skip_corrupt=True)
    assert [each.id for each in data.facts.left_out] == [str(file)]
    assert read_all(data) == 2 * 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"images": []}',
        '{"images": [], "annotations": [], "categories": []}',
        '{"images": [1], "annotations": [], "categories": [{"id": 1, "name": "a"}]}',
        '{"images": {}, "annotations": [], "categories": []}',
        '{"images": [{"id": 1}], "annotations": [], "categories": [2]}',
        "[" * 100_000,
        '{"images": [' + "9" * 5000 + "]}",
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    root = write(tmp_path / "set")
    file = root / "annotations" / "instances_train2017.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"instances_train2017\.json"):
        load(f"coco:{root}")
    report = check(f"coco:{root}")
    assert [f.what for f in report.of("stops")][-1] == "sets that cannot be opened"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    file = root / "annotations" / "instances_train2017.json"
    file.write_bytes(b'{"images": "\xff\xfe"}')
    with pytest.raises(UserError, match=file.name):
        load(f"coco:{root}")
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=file.name):
        load(f"coco:{root}")


def _without_instances(found: dict[str, Any]) -> None:
    found["annotations"] = []


def _crowds_alone(found: dict[str, Any]) -> None:
    for each in found["annotations"]:
        each["iscrowd"] = 1


@pytest.mark.parametrize("change", [_without_instances, _crowds_alone])
def test_nothing_to_learn(tmp_path: Path, change: Change) -> None:
    root = write(tmp_path / "set", change=change)
    with pytest.raises(UserError, match="nothing can be learned"):
        load(f"coco:{root}")
    assert kinds(check(f"coco:{root}")) == {"splits with nothing to learn or to measure": 1}


def test_faults_of_all_splits_are_counted(tmp_path: Path) -> None:
    root = write(tmp_path / "set", change=entry("annotations", category_id=4))
    file = root / "annotations" / "instances_val2017.json"
    found = json.loads(file.read_text())
    found["annotations"][0]["category_id"] = 5
    found["annotations"][1]["bbox"] = [0, 0, 0, 0]
    file.write_text(json.dumps(found))
    assert kinds(check(f"coco:{root}")) == {"unknown category": 2, "empty box": 1}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "set", change=entry("annotations", bbox=[0, 0, 0, 0]))
    assert main(["data", "check", f"coco:{root}"]) == 1
    said = capsys.readouterr().out
    assert "annotation 200" in said
    assert "instances\t" in said
    assert "unfit\t" in said
    assert main(["data", "check", str(write(tmp_path / "good"))]) == 0
