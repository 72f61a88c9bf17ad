# SPDX-License-Identifier: Apache-2.0
"""The cheap part of the check finds what the whole check finds, or says what it left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from event_files import write_folder
from film import save_frames
from pictures import picture
from PIL import Image
from scan_sets import mask_set, scan_set

from keymix.data import load
from keymix.data.check import check, quick_check
from keymix.data.findings import IN_SEQUENCES, Report

FALSE = ("images in more than one split", "images with more than one label")
TWO_SPLITS = {"train/a": 20, "train/b": 20, "test/a": 4, "test/b": 4}


def findings_of(report: Report) -> dict[str, tuple[str, int]]:
    return {found.what: (found.level, found.count) for found in report.findings}


@pytest.fixture
def copied(make_folder: Callable[..., Path]) -> Path:
    """Two copies of training images in test, and one in the other class."""
    root = make_folder(TWO_SPLITS)
    shutil.copy(root / "train" / "a" / "000.png", root / "test" / "a" / "again.png")
    shutil.copy(root / "train" / "b" / "001.png", root / "test" / "b" / "again.png")
    shutil.copy(root / "train" / "a" / "002.png", root / "train" / "b" / "again.png")
    return root


@pytest.mark.parametrize("size", [None, pytest.param(132, marks=pytest.mark.slow)])
def test_copies_are_found_in_memory_and_one_by_one(copied: Path, size: int | None) -> None:
    data = load(f"folder:{copied}", image_size=size)
    assert (data.train.images is None) == (size == 132)
    found = findings_of(quick_check(data))
    assert found == findings_of(check(str(copied)))
    assert found["images in more than one split"][0] == "falsifies"
    assert found["images with more than one label"] == ("falsifies", 1)


def test_photos_of_equal_files_are_found_by_smaller_pictures(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("test", 3)):
        for k, name in enumerate("ab"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                seed = 100 * k + i + 50 * (split == "test")
                picture(seed, (300, 200)).save(tmp_path / split / name / f"{i}.jpg")
    shutil.copy(tmp_path / "train" / "a" / "0.jpg", tmp_path / "test" / "a" / "x.jpg")
    report = quick_check(load(f"folder:{tmp_path}"))
    assert findings_of(report) == {"images in more than one split": ("falsifies", 1)}
    assert report.facts == {"looked_at": {"images": 23, "of": 23}, "not_looked_at": []}


def test_photos_that_differ_in_detail_alone_are_no_copies(make_folder: Callable[..., Path]) -> None:
    root = make_folder(TWO_SPLITS)
    flat = np.full((512, 512), 128, dtype=np.uint8)
    Image.fromarray(flat).save(root / "test" / "a" / "flat.jpg", quality=95)
    flat[:8, :8] += 40 * (np.indices((8, 8)).sum(0) % 2 * 2 - 1).astype(np.uint8)  # of mean 0
    Image.fromarray(flat).save(root / "train" / "b" / "dots.jpg", quality=95)
    report = quick_check(load(f"folder:{root}", image_size=132))
    assert findings_of(report) == {}
    assert report.facts["not_looked_at"] == []


@pytest.mark.slow
def test_what_there_was_no_time_for_is_reported(make_folder: Callable[..., Path]) -> None:
    root = make_folder({"a": 200, "b": 200}, size=(132, 132))
    spec = f"folder:{root}"
    none = quick_check(load(spec), seconds=-1)
    assert none.facts["looked_at"] == {"images": 0, "of": 400}
    assert none.facts["not_looked_at"] == [
        "whether images are frames of sequences",
        "copies among 400 of 400 images",
    ]
    assert not none.findings
    for path in sorted(root.rglob("*.png")):  # names that are no numbers: nothing to compare
        path.rename(path.with_stem(path.stem.translate(str.maketrans("0123456789", "abcdefghij"))))
    ticks = iter(range(1000))
    some = quick_check(load(spec), seconds=3, clock=lambda: float(next(ticks)))
    looked = some.facts["looked_at"]["images"]
    assert 0 < looked < 400
    assert some.facts["not_looked_at"] == [f"copies among {400 - looked} of 400 images"]


def test_uneven_classes_are_the_same_for_check_and_quick_check(
    make_folder: Callable[..., Path],
) -> None:
    root = make_folder({"a": 40, "b": 4})
    data = load(f"folder:{root}")
    whole = findings_of(check(str(root)))
    assert findings_of(quick_check(data)) == {"large imbalances": ("warning", 1)} == whole


def test_recordings_are_compared_by_their_frames(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "ev", {"train/a": 8, "train/b": 8, "test/a": 3, "test/b": 3})
    shutil.copy(root / "train" / "a" / "000.npz", root / "test" / "a" / "again.npz")
    report = quick_check(load(f"events:{root}", time_steps=2))
    assert findings_of(report) == {"recordings in more than one split": ("falsifies", 1)}
    assert report.facts["looked_at"] == {"images": 23, "of": 23}


def test_masks_are_compared_with_their_images_and_cases(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"train": 12, "test": 4})
    shutil.copy(root / "train" / "images" / "p0.png", root / "test" / "images" / "p1.png")
    spec = f"masks:{root}"
    wanted = {"images in more than one split", "images with more than one mask"}
    assert {*findings_of(quick_check(load(spec, val_fraction=1 / 6)))} == wanted
    assert wanted <= {*findings_of(check(spec))}
    scans = scan_set(tmp_path / "uw", dict.fromkeys(range(1, 7), 4))
    table = scans / "train.csv"
    table.write_text(table.read_text().replace("case2_day0_slice_0002,small_bowel,\n", ""))
    data = load(f"uwgi:{scans}", split_by="slice", test_fraction=0.3)
    found = findings_of(quick_check(data))
    assert found["cases in more than one split"][0] == "falsifies"
    assert found["slices without a row for an organ"] == ("falsifies", 1)
    assert found["classes that train lacks"] == ("warning", 2)


@pytest.mark.parametrize("kind", ["masks", "folder"])
def test_frames_are_found_in_splits_of_one_set(tmp_path: Path, kind: str) -> None:
    root = save_frames(tmp_path / "film", kind=kind)
    report = quick_check(load(f"{kind}:{root}"))
    assert IN_SEQUENCES in findings_of(report)
    assert report.facts["sequences"]["images"] == 64
