# SPDX-License-Identifier: Apache-2.0
"""A check looks at every sample, continues after a problem, and names what it found."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import archives
import coco_sets
import numpy as np
import pyarrow as pa
import pytest
from event_files import (
    aedat3,
    random_events,
    write_cifar10dvs,
    write_dvs128,
    write_folder,
    write_npz,
)
from film import save_frames
from pictures import encoded, picture, seed_of
from PIL import Image
from scan_sets import add_scan, lines_of, mask_set, scan_path, scan_set, write_rows

from each import together
from keymix.data import load
from keymix.data.check import check, quick_check
from keymix.data.findings import IN_SEQUENCES, KINDS, NOTE, STOPS, Report
from keymix.data.specs import Options
from keymix.errors import UserError

SMALL = "very small"
TWO_SPLITS = {"train/a": 9, "train/b": 9, "test/a": 3, "test/b": 3}


def found(report: Report) -> dict[str, tuple[str, int]]:
    """Count the items of each finding; most sets here are of very small images, which go."""
    counts = {
        f.what: (f.level, sum(SMALL not in each for each in f.where)) for f in report.findings
    }
    return {what: of for what, of in counts.items() if of[1]}


def where(report: Report, kind: str) -> list[str]:
    what = words(report, kind)
    return next(f for f in report.findings if f.what == what).where


def words(report: Report, kind: str) -> str:
    return KINDS[kind][1].format(kind=report.kind, target=report.target)


def photos(root: Path, counts: Mapping[str, int], size: tuple[int, int] = (16, 16)) -> Path:
    """Write images below ``root/<split>/<class>``."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(seed_of(name) + i, size).save(root / name / f"{i:03d}.png")
    return root


def write(path: Path, rows: list[list[str]]) -> None:
    write_rows(path, rows[1:], rows[0])


def read(path: Path) -> list[list[str]]:
    return [line.split(",") for line in path.read_text().splitlines()]


def scans(root: Path, change: Callable[[list[list[str]]], object] = lambda rows: None) -> Path:
    """Eight cases of three slices, each with some stomach; three have the other organs."""
    scan_set(root, dict.fromkeys(range(1, 9), 3))
    rows = read(root / "train.csv")
    for row in rows[1:]:
        if row[0].startswith(("case3_", "case5_", "case6_")):
            row[2] = {"large_bowel": "1 3", "small_bowel": "20 4", "stomach": row[2]}[row[1]]
    change(rows)
    write(root / "train.csv", rows)
    return root


def in_splits(root: Path, **cases: str) -> Path:
    """Name the split of some cases; all others are for training."""
    rows = [[f"case{k}", cases.get(f"case{k}", "train")] for k in range(1, 9)]
    write(scans(root) / "splits.csv", [["case", "split"], *rows])
    return root


# ---- what each set is made of, and what is found in it -------------------------------------


def after_every_problem(root: Path) -> str:
    photos(root, {"train/a": 9, "train/b": 9, "train/hollow": 0, "test/a": 2, "test/new": 2})
    (root / "train" / "a" / "003.png").write_bytes(encoded(3)[:120])
    (root / "train" / "a" / "004.png").write_bytes(b"")
    (root / "test" / "new" / "000.png").write_text("hello")
    (root / "test" / "a" / "notes.txt").write_text("hello")
    return f"folder:{root}"


def copies(root: Path) -> str:
    splits = {f"{split}/{name}": 2 for split in ("val", "test") for name in "ab"}
    photos(root, {"train/a": 15, "train/b": 9, **splits})
    Image.open(root / "train/a/002.png").convert("RGBA").save(root / "test/a/copy.png")
    Image.open(root / "train/a/002.png").save(root / "test/a/lossy.jpg", quality=20)
    shutil.copy(root / "train/a/000.png", root / "train/a/again.png")
    shutil.copy(root / "train/a/001.png", root / "train/b/again.png")
    for name in ("train/a", "test/a"):
        Image.new("RGB", (16, 16)).save(root / name / "blank.png")  # no copies of each other
    return f"folder:{root}"


def odd_images(root: Path) -> str:
    photos(root, {"a": 20, "b": 20}, (64, 48))
    a = root / "a"
    picture(500, (64, 48)).convert("L").save(a / "grey.png")
    picture(501, (64, 48)).convert("CMYK").save(a / "cmyk.jpg")
    deep = np.arange(3072, dtype=np.uint16).reshape(48, 64) * 20
    Image.fromarray(deep).save(a / "deep.png")
    frames = [picture(504, (64, 48)), picture(505, (64, 48))]
    frames[0].save(a / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)
    frames[0].save(a / "previews.jpg", "MPO", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(506, (64, 48)).save(a / "turned.jpg", exif=exif)
    picture(1, (15, 11)).save(a / "small.png")
    return f"folder:{root}"


def uneven(root: Path) -> str:
    return f"folder:{photos(root, {'a': 40, 'b': 4, 'rare': 1})}"


def parquet(root: Path) -> str:
    """Bad labels, images that are none, and two of train in test."""
    root.mkdir()
    labels: list[int | None] = [0, 1] * 10
    labels[5], labels[11] = 7, None
    images: list[bytes | None] = [encoded(i) for i in range(20)]
    images[3], images[8] = b"no image", None
    names = json.dumps(
        {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    )
    for split, some, of in (("train", images, labels), ("test", [encoded(4), encoded(9)], [0, 1])):
        column = [{"bytes": each, "path": None} for each in some]
        table = pa.table({"image": column, "label": of})
        table = table.replace_schema_metadata({"huggingface": names})
        pa.parquet.write_table(table, root / f"{split}-0.parquet", row_group_size=7)
    return f"parquet:{root}"


def bad_scans(root: Path) -> str:
    def change(rows: list[list[str]]) -> None:
        rows[1][2], rows[11][2], rows[21][2], rows[31][2] = "1 2 3", "0 2", "54 2", "1 4 3 2"
        rows[41][1] = "spleen"

    scans(root, change)
    scan_path(root, 8, 0, 1, (6, 9)).unlink()
    Image.fromarray(np.ones((5, 9), np.uint16)).save(scan_path(root, 7, 0, 2, (6, 9)))
    cut = scan_path(root, 7, 0, 3, (6, 9))
    cut.write_bytes(cut.read_bytes()[:60])
    return f"uwgi:{root}"


def lone_cases(root: Path) -> str:
    return f"uwgi:{in_splits(root, case6='val', case7='val', case8='test')}"


def cases_in_two(root: Path) -> str:
    scans(root)
    ids = sorted({row[0] for row in read(root / "train.csv")[1:]})
    rows = [[name, "test" if name.startswith("case8") else "train"] for name in ids]
    rows[0][1], rows[5][1] = "test", "val"
    write(root / "splits.csv", [["id", "split"], *rows])
    return f"uwgi:{root}"


def missing_rows(root: Path) -> str:
    return f"uwgi:{scans(root, lambda rows: rows.pop(6))}"


def overlapping(root: Path) -> str:
    return f"uwgi:{scans(root, lambda rows: rows[1].__setitem__(2, '10 3'))}"


def bad_masks(root: Path) -> str:
    mask_set(root, {"": 60})
    images, masks = root / "images", root / "masks"
    for name, pixels in (("p1", np.full((6, 9), 7)), ("p2", np.zeros((6, 8)))):
        Image.fromarray(pixels.astype(np.uint8)).save(masks / f"{name}.png")
    (masks / "p4.png").write_bytes(b"x")
    (masks / "p5.png").unlink()
    (images / "p6.png").unlink()
    (images / "p7.png").write_bytes(b"x")
    (masks / "p9.tif").touch()
    return f"masks:{root}"


def copied_masks(root: Path) -> str:
    mask_set(root, {"train": 12, "test": 4})
    for name, to in (("p0", "test/images/leak"), ("p1", "train/images/zother")):
        shutil.copy(root / "train/images" / f"{name}.png", root / f"{to}.png")
    shutil.copy(root / "train/masks/p0.png", root / "test/masks/leak.png")
    shutil.copy(root / "train/masks/p2.png", root / "train/masks/zother.png")
    Image.new("L", (9, 6), 40).save(root / "train/images/p3.png")
    Image.new("L", (9, 6), 255).save(root / "train/masks/p4.png")
    return f"masks:{root}"


def instances(root: Path) -> str:
    coco_sets.write(root, change=lambda f: f["annotations"][2].update(bbox=[0, 0, 0, 0]))
    (root / "train2017/0007.png").unlink()
    picture(0, (7, 9)).save(root / "train2017/0003.png")
    return f"coco:{root}"


def copied_instances(root: Path) -> str:
    def change(found: dict) -> None:
        found["annotations"] = [a for a in found["annotations"] if a["category_id"] != 90]

    coco_sets.write(root, change=change)
    shutil.copy(root / "val2017/0009.png", root / "train2017/0004.png")
    return f"coco:{root}"


def recordings(root: Path) -> str:
    write_folder(
        root, {f"{split}/{name}": 12 for split in ("train", "val", "test") for name in "ab"}
    )
    b = root / "train/b"
    shutil.copy(root / "train/a/003.npz", b / "099.npz")
    write_npz(b / "005.npz", [(0, 16, 0, 1)])
    write_npz(b / "007.npz", random_events(3, side=16))
    write_npz(b / "008.npz", [(t, 3, 3, 1) for t in (*range(30), 1_000_000)])
    (b / "notes.txt").touch()
    return f"events:{root}"


def gestures(root: Path) -> str:
    folder = write_dvs128(root) / "DvsGesture"
    (folder / "user01_led.aedat").write_bytes(aedat3(random_events(50))[:-5])
    (folder / "user02_led_labels.csv").unlink()
    return f"dvs128:{root}"


FOUND: Mapping[Callable[[Path], str], Mapping[str, tuple[int, tuple[str, ...]]]] = {
    # how many items there are of each kind, and words that stand in a line of it each
    after_every_problem: {
        "unusable": (5, ("hollow", "test/new", "003.png: image file is truncated", "004.png")),
        "stranger": (1, ("test/a/notes.txt",)),
    },
    copies: {
        "leak": (1, ("train/a/002.png (train, a) = ",)),
        "conflict": (1, ("train/b/again.png (train, b)",)),
        "copies": (1, ("train/a/again.png",)),
        "odd": (2, ("train/a/blank.png: of one colour",)),
        "converted": (1, ("copy.png: transparent",)),
    },
    odd_images: {
        "odd": (1, ("small.png: very small, 15x11", "moving.webp: animated")),
        "converted": (4, ("turned.jpg: turned", "deep.png: 16-bit, grey", "cmyk.jpg: CMYK")),
    },
    uneven: {"few": (2, ("train has one image of rare", "a has 40 training images, rare 1"))},
    parquet: {
        "unusable": (4, ("row 5: the label", "row 11: the label", "row 3", "row 8: it is empty")),
        "leak": (2, ("row 4 (train, a) = ",)),
    },
    bad_scans: {
        "unusable": (
            8,
            (
                *(f"line {line} " for line in (2, 12, 22, 32, 42)),
                "case8_day0/scans/slice_0001_*.png",
                "slice_0002_9_6",
                "slice_0003_9_6",
            ),
        )
    },
    lone_cases: {"few": (3, ("test has a single case", "test has no image of large_bowel"))},
    cases_in_two: {"groups": (2, ("case1: train, test",))},
    missing_rows: {"rows": (1, ("case1_day0_slice_0002: no row for stomach",))},
    overlapping: {"odd": (1, ("slice_0001_9_6_1.50_2.00.png: classes overlap in 2 pixels",))},
    bad_masks: {
        "unusable": (6, (*(f"p{k}.png" for k in (1, 2, 4, 5, 7)), "p6.*")),
        "stranger": (1, ("p9.tif",)),
    },
    copied_masks: {
        "leak": (1, ("leak.png (test)",)),
        "conflict": (1, ("zother.png",)),
        "odd": (2, ("p3.png: of one colour", "p4.png: all of its mask is ignored")),
    },
    instances: {"unusable": (3, ("annotation 200", "0007.png", "0003.png has 7x9"))},
    copied_instances: {
        "leak": (1, ("val2017/0009.png (",)),
        "conflict": (1, ("train2017/0004.png (train)",)),
        "few": (2, ("train has no image of dog", "train has one image of ant")),
    },
    recordings: {
        "unusable": (1, ("b/005.npz: event 0 at x=16, y=0 is outside",)),
        "conflict": (1, ("b/099.npz",)),
        "odd": (1, ("b/007.npz: 9 of 10 frames",)),
        "stranger": (1, ("b/notes.txt",)),
    },
    gestures: {"unusable": (12, ("user01_led.aedat (user01_led_labels.csv line 2): ", "user02"))},
}
OPTIONS = {cases_in_two: {"split_by": "slice"}}


@pytest.mark.parametrize("make", FOUND, ids=lambda make: make.__name__)
def test_what_is_found(make: Callable[[Path], str], tmp_path: Path) -> None:
    report = check(make(tmp_path / "set"), Options(**OPTIONS.get(make, {})))
    left = found(report)
    for kind, (count, lines) in FOUND[make].items():
        assert left.pop(words(report, kind)) == (KINDS[kind][0], count), kind
        for line in lines:
            assert any(line in each for each in where(report, kind)), (line, where(report, kind))
    left.pop(words(report, "few"), None)  # there are few images of some of these classes
    assert not left
    levels = [finding.level for finding in report.findings]
    assert levels == sorted(levels, key=["stops", "falsifies", "warning", "note"].index)
    assert report.fit == (levels[:1] not in (["stops"], ["falsifies"]))
    stored = json.loads(json.dumps(report.to_dict()))
    assert [f["count"] for f in stored["findings"]] == [len(f["where"]) for f in stored["findings"]]


@pytest.mark.parametrize(
    "make", [copies, uneven, copied_masks, cases_in_two, missing_rows, copied_instances]
)
def test_the_quick_check_finds_the_same(make: Callable[[Path], str], tmp_path: Path) -> None:
    options = OPTIONS.get(make, {})
    spec = make(tmp_path / "set")
    report = quick_check(
        load(spec, val_fraction=0.1 if make in (copies, uneven) else 1 / 6, **options)
    )
    whole = check(spec, Options(**options))
    assert [
        (each.level, each.what, each.where)
        for each in whole.findings
        if each.level != NOTE and each.what != "odd images"
    ] == [(f.level, f.what, f.where) for f in report.findings if f.what != "odd images"]
    assert ("odd images" in found(report)) == (make in (copies, copied_masks))
    assert report.facts["looked_at"]["images"] == report.facts["looked_at"]["of"] > 0
    assert report.facts["not_looked_at"] == []


# ---- facts ------------------------------------------------------------------------------------


def test_a_clean_folder_is_fit(make_folder) -> None:
    root = make_folder({"train/a": 8, "train/b": 8, "test/a": 3, "test/b": 3})
    steps: list[tuple[int, int]] = []
    report = check(str(root), progress=lambda *step: steps.append(step))
    assert (report.fit, report.verdict, report.findings) == (True, "fit for training", [])
    assert report.spec == f"folder:{root}"
    assert report.facts["images"] == {"train": 16, "test": 6}
    assert report.facts["splits"] == {"train": 14, "val": 2, "test": 6}
    assert report.facts["classes"]["b"] == {"train": 8, "test": 3}
    assert report.facts["sizes"]["common"] == {"width": 16, "height": 16, "images": 22}
    assert steps == sorted(steps)
    assert steps[-1] == (22, 22)


def test_masks_are_reported_class_by_class(tmp_path: Path) -> None:
    spec = f"uwgi:{scans(tmp_path / 'uw')}"
    report, data = check(spec), load(spec, val_fraction=1 / 6)
    assert report.fit
    facts = report.facts
    assert facts["splits"] == {split.name: len(split) for split in data.splits}
    assert facts["cases"] == data.record().cases
    assert facts["masks"] == {"kind": "exclusive", "empty": 0, "ignored": 0.0}
    stomach, large = facts["classes"]["stomach"], facts["classes"]["large_bowel"]
    assert stomach["share_of_pixels"] == 2 / 54
    assert large["share_of_pixels"] == pytest.approx(9 * 3 / (24 * 54))
    assert sum(stomach[name] for name in facts["splits"]) == 24
    assert sum(of["share_of_pixels"] for of in facts["classes"].values()) == pytest.approx(1)
    add_scan(tmp_path / "uw", 4, 0, 4)
    rows = read(tmp_path / "uw" / "train.csv")
    write(tmp_path / "uw" / "train.csv", [*rows, *lines_of("case4_day0_slice_0004")])
    report = check(spec, Options(masks="multilabel", stack=3))
    assert (report.facts["masks"]["kind"], report.facts["masks"]["empty"]) == ("multilabel", 1)


def test_ignored_pixels_do_not_count(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"": 12})
    report = check(str(root))
    masks = [np.asarray(Image.open(path)) for path in sorted((root / "masks").iterdir())]
    ignored, leaf = (sum(int((mask == value).sum()) for mask in masks) for value in (255, 1))
    assert report.facts["masks"]["ignored"] == pytest.approx(ignored / (12 * 54))
    share = report.facts["classes"]["leaf"]["share_of_pixels"]
    assert share == pytest.approx(leaf / (12 * 54 - ignored))
    assert "cases" not in report.facts  # nothing says which images are of one


def test_instances_are_reported_by_class_and_size(tmp_path: Path) -> None:
    root = coco_sets.write(tmp_path / "set")
    report = check(str(root))
    assert report.fit
    counts, classes = report.facts["instances"], report.facts["classes"]
    assert (counts["crowds"], counts["test"], counts["unfit"]) == (4, 5, 0)
    assert sum(counts[name] for name in ("train", "val")) == 7 * 2 + 3
    assert sum(counts["images_without"].values()) == 2
    assert sum(sum(of.values()) for of in classes.values()) == 7 * 2 + 2 * 2
    assert list(classes) == ["ant", "cat", "dog"]
    assert counts["sizes"] == {"small": 1.0, "large": 0.0}


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_sets_of_arrays_are_checked(tmp_path: Path, monkeypatch, name: str) -> None:
    folder = tmp_path / "FashionMNIST" / "raw" if name == "fashion_mnist" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    archives.write(name, folder, "http://127.0.0.1:9", monkeypatch)
    report = check(f"{name}:{tmp_path}")
    assert report.facts["images"] == {"train": archives.TRAIN, "test": archives.TEST}
    assert not report.of(STOPS)
    assert report.facts["sizes"]["different"] == 1


def test_published_recordings_are_fit(tmp_path: Path) -> None:
    assert check(f"cifar10dvs:{write_cifar10dvs(tmp_path / 'c')}").fit
    assert check(f"dvs128:{write_dvs128(tmp_path / 'd')}").fit


def test_imagenet_is_found_and_checked(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("val", 2)):
        photos(tmp_path, {f"{split}/n01440764": count, f"{split}/n02012849": count})
        for file in [*tmp_path.glob(f"{split}/*/*.png")]:
            Image.open(file).save(file.with_suffix(".JPEG"))
            file.unlink()
    report = check(str(tmp_path))
    assert report.spec == f"imagenet:{tmp_path}"
    assert report.facts["splits"] == {"train": 14, "val": 2, "test": 4}
    assert not report.findings


@pytest.mark.skipif("KEYMIX_DATA" not in os.environ, reason="no KEYMIX_DATA")
def test_the_slices_of_a_hospital_are_clean() -> None:
    report = check(str(Path(os.environ["KEYMIX_DATA"]) / "uw-madison-gi"))
    assert [f.what for f in report.findings] == [words(report, "few")]
    assert report.findings[0].count == 2
    assert report.facts["sizes"]["common"] == {"width": 266, "height": 266, "images": 36}


# ---- the check and training agree -------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [after_every_problem, parquet, bad_scans, bad_masks, instances, recordings, gestures]
)
def test_what_would_stop_training_does(make: Callable[[Path], str], tmp_path: Path) -> None:
    with pytest.raises(UserError):
        load(make(tmp_path / "set"))


def test_sets_that_cannot_be_opened_or_split_are_reported(tmp_path: Path) -> None:
    one = photos(tmp_path / "one", {"only": 5})
    few = photos(tmp_path / "few", {"a": 1, "b": 1})
    cases = scan_set(tmp_path / "cases", {1: 4, 2: 4})
    masks = mask_set(tmp_path / "masks", {"": 9})
    (masks / "classes.txt").unlink()
    half = tmp_path / "half.parquet"
    half.write_bytes(b"PAR1 half")
    for root, culprit in (
        (one, "(only)"),
        (few, "none is left for"),
        (cases, "2 cases to make train"),
        (masks, "classes.txt"),
        (half, "half.parquet"),
    ):
        (finding,) = check(str(root)).of(STOPS)
        assert culprit in " ".join(finding.where)


def test_copies_that_carving_would_tear_apart_are_leaks(make_folder) -> None:
    root = make_folder({"a": 30, "b": 30})
    data = load(f"folder:{root}")
    shutil.copy(Path(data.test.ids(0)), Path(data.train.ids(0)))  # both begin with class 0
    (line,) = where(check(str(root)), "leak")
    assert f"{data.train.ids(0)} (train, a)" in line
    assert f"{data.test.ids(0)} (test, a)" in line


@together
@pytest.mark.parametrize(
    "what", ["digit", "/nowhere/at/all", "folder:/nowhere", "folder", "parquet:/nowhere"]
)
def test_a_mistake_in_the_command_is_the_user_s(what: str) -> None:
    with pytest.raises(UserError):
        check(what)


def test_a_few_encoded_images_are_in_memory_at_a_time(make_parquet, monkeypatch) -> None:
    monkeypatch.setattr("keymix.data.check._AT_ONCE", 8)
    rng = np.random.default_rng(0)
    images = []
    for _ in range(120):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (100, 100, 3), dtype=np.uint8)).save(stream, "BMP")
        images.append({"bytes": stream.getvalue(), "path": None})
    folder = make_parquet([0, 1] * 60, images=images, row_group_size=4)
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        check(str(folder))
    finally:
        pa.set_memory_pool(before)
    encoded_bytes = sum(len(image["bytes"]) for image in images)
    assert encoded_bytes / 60 < pool.max_memory() < encoded_bytes / 3


# ---- the quick check ---------------------------------------------------------------------------


def test_files_are_compared_by_their_content_and_one_colour_is_no_copy(tmp_path: Path) -> None:
    photos(tmp_path, TWO_SPLITS, (300, 200))
    shutil.copy(tmp_path / "train/a/000.png", tmp_path / "test/a/x.png")
    for place in ("test/a", "train/b"):
        Image.new("L", (512, 512), 128).save(tmp_path / place / "flat.png")
    report = quick_check(load(f"folder:{tmp_path}"))
    assert found(report) == {
        "images in more than one split": ("falsifies", 1),
        "odd images": ("warning", 2),
    }
    assert report.facts["looked_at"] == {"images": 27, "of": 27}


def test_what_there_was_no_time_for_is_reported(tmp_path: Path) -> None:
    root = photos(tmp_path, {"a": 100, "b": 100}, (132, 132))
    none = quick_check(load(f"folder:{root}"), seconds=-1)
    assert none.facts["looked_at"] == {"images": 0, "of": 200}
    assert none.facts["not_looked_at"] == [
        "whether images are frames of sequences",
        "copies among 200 of 200 images",
    ]
    assert not none.findings
    for path in sorted(root.rglob("*.png")):  # names that are no numbers: nothing to compare
        path.rename(path.with_stem(path.stem.translate(str.maketrans("0123456789", "abcdefghij"))))
    ticks = iter(range(10_000))
    some = quick_check(load(f"folder:{root}"), seconds=100, clock=lambda: float(next(ticks)))
    looked = some.facts["looked_at"]["images"]
    assert 0 < looked < 200
    assert some.facts["not_looked_at"] == [f"copies among {200 - looked} of 200 images"]


def test_recordings_are_compared_by_their_frames(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "ev", {"train/a": 8, "train/b": 8, "test/a": 3, "test/b": 3})
    shutil.copy(root / "train/a/000.npz", root / "test/a/again.npz")
    report = quick_check(load(f"events:{root}", time_steps=2))
    assert found(report) == {"recordings in more than one split": ("falsifies", 1)}


@pytest.mark.parametrize("kind", ["masks", "folder"])
def test_frames_are_found_in_splits_of_one_set(tmp_path: Path, kind: str) -> None:
    root = save_frames(tmp_path / "film", kind=kind)
    report = quick_check(load(f"{kind}:{root}"))
    assert IN_SEQUENCES in found(report)
    assert report.facts["sequences"]["images"] == 64
