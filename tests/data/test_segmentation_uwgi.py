# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scan_sets import add_scan, rows_of, scan_path, scan_set, write_rows

from keymix.data import load
from keymix.data.dataset import ImageData
from keymix.data.segmentation import rle
from keymix.data.segmentation.table import ScanSource, ScanTable
from keymix.data.sources.base import Faults
from keymix.data.sources.uwgi import open_source
from keymix.errors import UserError


def table_of(root: Path, **settings: object) -> ScanTable:
    source = open_source(str(root), Faults(), **settings)  # type: ignore[arg-type]
    return source.train


def one_slice(root: Path, pixels: np.ndarray | None = None, **runs: str) -> Path:
    add_scan(root, 1, 0, 1, pixels)
    write_rows(root / "train.csv", rows_of("case1_day0_slice_0001", **runs))
    return root


def test_names_report_columns_before_rows_and_their_spacing(tmp_path: Path) -> None:
    table = table_of(one_slice(tmp_path, stomach="10 1"))  # 6 rows of 9 columns, 1.50_2.00
    assert scan_path(tmp_path, 1, 0, 1, (6, 9)).name == "slice_0001_9_6_1.50_2.00.png"
    assert table.size(0) == (6, 9)
    assert table.spacing(0) == (2.0, 1.5)  # from row to row, from column to column
    assert table.pixels(0).shape == (1, 6, 9)
    assert np.argwhere(table.mask(0)).tolist() == [[1, 0]]
    assert (table.scan_id(0), table.groups) == ("case1_day0_slice_0001", ("case1",))


def test_sixteen_bits_are_scaled_from_least_to_largest(tmp_path: Path) -> None:
    pixels = np.array([[1000, 1001, 3040], [2020, 1000, 1100]], dtype=np.uint16)
    table = table_of(one_slice(tmp_path, pixels))
    assert table.pixels(0)[0].tolist() == [[0, 0, 255], [128, 0, 12]]  # 127.5 and 12.5 to even


def test_a_slice_of_one_value_is_black(tmp_path: Path) -> None:
    table = table_of(one_slice(tmp_path, np.full((2, 3), 777, dtype=np.uint16)))
    assert not table.pixels(0).any()


def test_the_later_organ_is_kept_and_overlaps_are_counted(tmp_path: Path) -> None:
    root = scan_set(tmp_path, {1: 2, 2: 2, 3: 2})
    rows = rows_of("case1_day0_slice_0001", large_bowel="1 4", small_bowel="3 4", stomach="4 1")
    with (root / "train.csv").open() as stream:
        kept = [row for row in csv.reader(stream) if row[0] != rows[0][0]]
    write_rows(root / "train.csv", [*kept[1:], *rows])
    mask = table_of(root).mask(0)
    assert mask[0].tolist() == [1, 1, 2, 3, 2, 2, 0, 0, 0]
    planes = table_of(root, masks="multilabel").mask(0)
    assert planes[:, 0].tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0, 0],
    ]
    message = "classes overlap in 2 pixels of 1 image: the later class is kept"
    notes = load(f"uwgi:{root}").record().notes
    assert [note for note in notes if note.startswith(message)]
    many = load(f"uwgi:{root}", masks="multilabel")
    assert not [note for note in many.record().notes if "overlap" in note]
    assert many.classes == ("large_bowel", "small_bowel", "stomach")
    assert many.record().multilabel is True


def test_stacks_are_neighbours_of_one_day_and_the_nearest_stands_in(tmp_path: Path) -> None:
    for number in (3, 4, 6, 7):  # 5 is missing; 8 and 2 are beyond the ends
        add_scan(tmp_path, 1, 0, number, np.array([[0, number, 255]], dtype=np.uint16))
    add_scan(tmp_path, 1, 2, 5, np.array([[0, 200, 255]], dtype=np.uint16))  # another day
    rows = [row for n in (3, 4, 6) for row in rows_of(f"case1_day0_slice_{n:04d}")]
    write_rows(tmp_path / "train.csv", rows)
    table = table_of(tmp_path, stack=5)
    assert table.channels == 5
    middle = [table.pixels(i)[:, 0, 1].tolist() for i in range(3)]
    # wanted 1 2 3 4 5, 2 3 4 5 6 and 4 5 6 7 8; 7 has no mask but is a neighbour
    assert middle == [[3, 3, 3, 4, 4], [3, 3, 4, 4, 6], [4, 6, 6, 7, 7]]
    assert [table.inspect(i).replaced for i in range(3)] == [3, 2, 2]
    source = open_source(str(tmp_path), Faults())
    assert source.notes == ("2 slices without a row in train.csv left out",)


@pytest.mark.parametrize("stack", [0, 2, -1])
def test_a_stack_has_a_middle(tmp_path: Path, stack: int) -> None:
    with pytest.raises(UserError, match=rf"data.stack = {stack}: it must be an odd number"):
        table_of(scan_set(tmp_path, {1: 1}), stack=stack)


def rewrite(change: Callable[[list[list[str]]], Sequence[Sequence[str]]]) -> Callable[[Path], None]:
    """Change the rows below the head of ``train.csv``."""

    def spoil(root: Path) -> None:
        with (root / "train.csv").open(newline="") as stream:
            head, *rows = csv.reader(stream)
        write_rows(root / "train.csv", change(rows), head)

    return spoil


def runs(text: str) -> Callable[[Path], None]:
    """Give the stomach of slice 2 of case 1, on line 7, other runs."""
    return rewrite(lambda rows: [*rows[:5], [*rows[5][:2], text], *rows[6:]])


def scan_2(root: Path) -> Path:
    return scan_path(root, 1, 0, 2, (6, 9))


def swap_sides(root: Path) -> None:
    scan_2(root).rename(scan_path(root, 1, 0, 2, (9, 6)))


def cut(root: Path) -> None:
    scan_2(root).write_bytes(scan_2(root).read_bytes()[:-30])


def colour(root: Path) -> None:
    Image.new("RGB", (9, 6)).save(scan_2(root))


def second_scan(root: Path) -> None:
    scan_2(root).with_name("slice_0002_9_6_1.50_1.50.png").write_bytes(scan_2(root).read_bytes())


OF_A_SLICE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # what is done to slice 2 of case 1: the kind of the fault, and the culprit
    "missing": (lambda root: scan_2(root).unlink(), "missing", "case1_day0_slice_0002"),
    "size": (swap_sides, "wrong size", "slice_0002_6_9_1.50_2.00.png"),
    "cut": (cut, "unreadable", "slice_0002_9_6_1.50_2.00.png"),
    "colour": (colour, "unreadable", "slice_0002_9_6_1.50_2.00.png: its pixels are RGB"),
    "two scans": (second_scan, "bad row", "case1_day0_slice_0002 has 2 scans"),
    "runs": (runs("1 2 3"), "bad annotation", "line 7 (case1_day0_slice_0002, stomach)"),
    "class": (
        rewrite(lambda rows: [*rows[:3], [rows[3][0], "colon", ""], *rows[4:]]),
        "bad row",
        "line 5 (case1_day0_slice_0002, colon)",
    ),
    "twice": (
        rewrite(lambda rows: [*rows, rows[3]]),
        "bad row",
        "line 38 (case1_day0_slice_0002, large_bowel): line 5",
    ),
}


@pytest.mark.parametrize("what", OF_A_SLICE)
def test_a_fault_of_a_slice_is_named_once_refused_or_left_out(tmp_path: Path, what: str) -> None:
    spoil, kind, culprit = OF_A_SLICE[what]
    root = scan_set(tmp_path, {1: 4, 2: 4, 3: 4})
    spec = f"uwgi:{root}"
    options: dict[str, Any] = {"val_fraction": 0.3, "test_fraction": 0.3}
    whole = load(spec, **options)
    spoil(root)
    table = table_of(root)
    ((found, message),) = [
        (fault.kind, fault.message) for i in range(12) for fault in table.inspect(i).faults
    ]
    assert found == kind
    assert culprit in message
    for refused in (lambda: load(spec, **options), lambda: table.read(1, (6, 9))):
        with pytest.raises(UserError) as caught:
            refused()
        assert culprit in str(caught.value)
    kept = load(spec, **options, skip_corrupt=True)
    record = kept.record()
    assert record.left_out_count == 1
    assert culprit in record.left_out[0].reason
    assert ids(whole) - ids(kept) == {"case1_day0_slice_0002"}
    assert record.fingerprint != whole.record().fingerprint


def ids(data: ImageData) -> set[str]:
    return {
        split.scans.scan_id(i)
        for split in data.splits
        if split.scans is not None
        for i in range(len(split))
    }


def test_a_neighbour_that_is_broken_or_of_another_size_is_a_fault(tmp_path: Path) -> None:
    root = scan_set(tmp_path, {1: 1})
    add_scan(root, 1, 0, 2, np.zeros((5, 9), dtype=np.uint16))
    (seen,) = (table_of(root, stack=3).inspect(0).faults,)
    assert [fault.kind for fault in seen] == ["wrong size"]
    assert not table_of(root, stack=1).inspect(0).faults
    with pytest.raises(UserError, match="has another size than its neighbour in the stack"):
        table_of(root, stack=3).pixels(0)


def test_all_faults_of_a_slice_are_found(tmp_path: Path) -> None:
    root = one_slice(tmp_path, large_bowel="1", small_bowel="99 1")
    scan_path(root, 1, 0, 1, (6, 9)).write_bytes(b"no image")
    kinds = [fault.kind for fault in table_of(root).inspect(0).faults]
    assert kinds == ["bad annotation", "bad annotation", "unreadable"]


# mistakes of the table as a whole: the line, after the folder
OF_THE_TABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "id": (
        rewrite(lambda rows: [["case1_slice_0001", "stomach", ""], *rows]),
        "train.csv: line 2: id 'case1_slice_0001' is not like case101_day20_slice_0078.",
    ),
    "cells": (
        rewrite(lambda rows: [["case1_day0_slice_0001"], *rows]),
        "train.csv: line 2 has 1 cells, not 3: 'case1_day0_slice_0001'.",
    ),
    "columns": (
        lambda root: write_rows(root / "train.csv", [["a", "b", "c"]], ("id", "class", "rle")),
        "train.csv: the first line has no column segmentation; it is 'id,class,rle'. Name the "
        "columns id,class,segmentation.",
    ),
    "no rows": (rewrite(lambda rows: []), "train.csv has no rows below its first line."),
    "nothing": (
        lambda root: (root / "train.csv").write_text(""),
        "train.csv: the first line has no column id; it is ''.",
    ),
    "bytes": (
        lambda root: (root / "train.csv").write_bytes(b"id,class,segmentation\n\xff\xfe\n"),
        "train.csv is not UTF-8 text",
    ),
    "quotes": (
        lambda root: (root / "train.csv").write_text('id,class,segmentation\na,b,"c\n'),
        "train.csv: line 2: unexpected end of data.",
    ),
}


@pytest.mark.parametrize("what", OF_THE_TABLE)
def test_a_mistake_of_the_table_is_one_line(tmp_path: Path, what: str) -> None:
    spoil, expected = OF_THE_TABLE[what]
    root = scan_set(tmp_path, {1: 2, 2: 2, 3: 2})
    spoil(root)
    with pytest.raises(UserError) as caught:
        load(f"uwgi:{root}")
    assert str(caught.value).startswith(f"{root}/{expected}")
    assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_read_are_collected(tmp_path: Path) -> None:
    root = scan_set(tmp_path, {1: 2})
    rewrite(lambda rows: [["x", "stomach", ""], *rows, ["y"]])(root)
    faults = Faults(collect=True)
    source = open_source(str(root), faults)
    lines = {f"{root}/train.csv:2", f"{root}/train.csv:9"}
    assert {fault.culprit for fault in faults.found} == lines
    assert len(faults.found) == 2
    assert len(source.train) == 2


def test_columns_may_stand_in_any_order_and_runs_be_long(tmp_path: Path) -> None:
    side = 600  # more characters than Python's csv takes in a cell
    add_scan(tmp_path, 1, 0, 1, np.zeros((side, side), dtype=np.uint16))
    text = rle.encode(np.indices((side, side)).sum(axis=0) % 2)
    assert len(text) > 131_072
    rows = [[text, "1", "stomach", "case1_day0_slice_0001"]]
    write_rows(tmp_path / "train.csv", rows, ("segmentation", "more", "class", "id"))
    assert table_of(tmp_path).mask(0).sum() == 3 * side * side // 2
    assert csv.field_size_limit() == 131_072


@pytest.mark.parametrize("spec", ["uwgi:none", "uwgi:."])
def test_a_folder_that_is_none_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"there is no 'none'|is not a folder with train\.csv"):
        load(spec)


def test_the_real_slices_load(real_data: Path) -> None:
    root = real_data / "uw-madison-gi"
    source = open_source(str(root), Faults())
    assert isinstance(source, ScanSource)
    table = source.train
    assert len(table) == 36
    assert not any(table.inspect(i).faults for i in range(36))
    i = [table.scan_id(k) for k in range(36)].index("case101_day20_slice_0078")
    assert table.size(i) == (266, 266)
    assert table.spacing(i) == (1.5, 1.5)
    with (root / "train.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    # from the CSV to masks and back, exactly
    many = open_source(str(root), Faults(), masks="multilabel")
    back = {
        (many.train.scan_id(k), organ): rle.encode(plane)
        for k in range(36)
        for organ, plane in zip(many.classes, many.train.mask(k), strict=True)
    }
    assert back == {(row["id"], row["class"]): row["segmentation"] for row in rows}
