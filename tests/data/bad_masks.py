# SPDX-License-Identifier: Apache-2.0
"""Bad data with masks as they are met; `bad_inputs` has the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bad_row import Row
from PIL import Image
from scan_sets import mask_set, rows_of, scan_path, scan_set, write_rows

CORRECT = (
    "Correct it, or leave such images out with --data.skip_corrupt true; `keymix data check` names "
    "them all."
)
OF_MASKS = "small_masks_setr"


def scans(**runs: str) -> Path:
    """Three cases of two slices in ``gi``; those of the first slice have these run lengths."""
    root = scan_set(Path("gi"), {1: 2, 2: 2, 3: 2})
    lines = (root / "train.csv").read_text().splitlines()
    others = [line.split(",") for line in lines if "case1_day0_slice_0001" not in line]
    rows = rows_of("case1_day0_slice_0001", **runs)
    write_rows(root / "train.csv", [*rows, *others[1:]])
    return root


def without_scan() -> None:
    scan_path(scans(), 1, 0, 1, (6, 9)).unlink()


def case_in_two_splits() -> None:
    root = scans()
    ids = [f"case{case}_day0_slice_{number:04d}" for case in (1, 2, 3) for number in (1, 2)]
    splits = ("train", "test", "train", "train", "val", "val")
    write_rows(root / "splits.csv", list(zip(ids, splits, strict=True)), ("id", "split"))


def leaves(change: Callable[[Path], object]) -> None:
    """Six images and masks in ``leaves``, one of them changed."""
    change(mask_set(Path("leaves"), {"": 6}) / "masks" / "p0.png")


MASK_ROWS: tuple[Row, ...] = (
    Row(
        "run lengths beyond the image",
        "uwgi:gi",
        "gi/train.csv: line 4 (case1_day0_slice_0001, stomach): runs below 1, that overlap, or end "
        "beyond the image of 9x6 = 54 pixels. " + CORRECT,
        lambda: scans(stomach="1 3 54 2"),
        recipe=OF_MASKS,
    ),
    Row(
        "a scan that is missing",
        "uwgi:gi",
        "gi/train.csv: line 2: the scan of case1_day0_slice_0001 is missing: "
        "train/case1/case1_day0/scans/slice_0001_*.png. " + CORRECT,
        without_scan,
        recipe=OF_MASKS,
    ),
    Row(
        "a case in two splits",
        "uwgi:gi",
        "case 'case1' is in train (gi/train/case1/case1_day0/scans/slice_0001_9_6_1.50_2.00.png) "
        "and in test (gi/train/case1/case1_day0/scans/slice_0002_9_6_1.50_2.00.png): what is "
        "learned of it would be tested on it. Keep it in one split, or split by slice: "
        "data.split_by=slice.",
        case_in_two_splits,
        recipe=OF_MASKS,
    ),
    Row(
        "a mask with an undeclared value",
        "masks:leaves",
        "leaves/masks/p0.png has values that classes.txt does not declare: 7 (54 pixels); 255 is "
        "ignored. " + CORRECT,
        lambda: leaves(lambda mask: Image.new("L", (9, 6), 7).save(mask)),
        recipe=OF_MASKS,
    ),
    Row(
        "a mask in colour",
        "masks:leaves",
        "cannot read mask leaves/masks/p0.png: it is in colour: write 'R G B name' for each class "
        "in classes.txt, or store class numbers in one channel. " + CORRECT,
        lambda: leaves(lambda mask: Image.new("RGB", (9, 6), "red").save(mask)),
        recipe=OF_MASKS,
    ),
    Row(
        "an image without mask",
        "masks:leaves",
        "cannot read mask leaves/masks/p0.png: No such file or directory. " + CORRECT,
        lambda: leaves(Path.unlink),
        recipe=OF_MASKS,
    ),
    Row(
        "a stack of images that have no neighbours",
        "masks:leaves",
        "data.stack = 3: images of masks:leaves have no neighbours. Leave it out, or take data of "
        "scans, such as uwgi:PATH.",
        lambda: leaves(lambda mask: None),
        ("--data.stack", "3"),
        OF_MASKS,
    ),
)
