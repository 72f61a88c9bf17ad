# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scan_sets import add_scan, lines_of, scan_path, scan_set, write_rows

from keymix.data import load, rle
from keymix.data.dataset import ImageData
from keymix.data.kinds import MASK
from keymix.data.looks import look
from keymix.data.sample import Fault, Faults, Row
from keymix.data.sources.uwgi import open_uwgi
from keymix.errors import UserError


def rows_of(root: Path, **settings: Any) -> Sequence[Row]:
    return open_uwgi(str(root), Faults(), **settings).rows


def faults_of(root: Path, **settings: Any) -> list[Fault]:
    seen = look(rows_of(root, **settings), MASK, decode=False)
    return [fault for each in seen for fault in each.faults]


def one_slice(root: Path, pixels: np.ndarray | None = None, **runs: str) -> Path:
    add_scan(root, 1, 0, 1, pixels)
    write_rows(root / "train.csv", lines_of("case1_day0_slice_0001", **runs))
    return root


def test_names_report_columns_before_rows_and_their_spacing(tmp_path: Path) -> None:
    (row,) = rows_of(one_slice(tmp_path, stomach="10 1"))  # 6 rows of 9 columns, 1.50_2.00
    assert scan_path(tmp_path, 1, 0, 1, (6, 9)).name == "slice_0001_9_6_1.50_2.00.png"
    assert row.spacing == (2.0, 1.5)  # from row to row, from column to column
    assert row.image().shape == (1, 6, 9)
    assert row.read_target().nonzero().tolist() == [[1, 0]]
    assert (row.name, row.group) == ("case1_day0_slice_0001", "case1")


def test_sixteen_bits_are_scaled_from_least_to_largest(tmp_path: Path) -> None:
    pixels = np.array([[1000, 1001, 3040], [2020, 1000, 1100]], dtype=np.uint16)
    (row,) = rows_of(one_slice(tmp_path, pixels))
    assert row.image()[0].tolist() == [[0, 0, 255], [128, 0, 12]]  # 127.5 and 12.5 to even


def test_a_slice_of_one_value_is_black(tmp_path: Path) -> None:
    (row,) = rows_of(one_slice(tmp_path, np.full((2, 3), 777, dtype=np.uint16)))
    assert not row.image().any()


def test_the_later_organ_is_kept_and_overlaps_are_counted(tmp_path: Path) -> None:
    root = scan_set(tmp_path, {1: 2, 2: 2, 3: 2})
    rows = lines_of("case1_day0_slice_0001", large_bowel="1 4", small_bowel="3 4", stomach="4 1")
    with (root / "train.csv").open() as stream:
        kept = [row for row in csv.reader(stream) if row[0] != rows[0][0]]
    write_rows(root / "train.csv", [*kept[1:], *rows])
    mask = rows_of(root)[0].read_target()
    assert mask[0].tolist() == [1, 1, 2, 3, 2, 2, 0, 0, 0]
    planes = rows_of(root, masks="multilabel")[0].read_target()
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
    rows = [row for n in (3, 4, 6) for row in lines_of(f"case1_day0_slice_{n:04d}")]
    write_rows(tmp_path / "train.csv", rows)
    source = open_uwgi(str(tmp_path), Faults(), stack=5)
    assert source.in_chans == 5
    middle = [row.image()[:, 0, 1].tolist() for row in source.rows]
    # wanted 1 2 3 4 5, 2 3 4 5 6 and 4 5 6 7 8; 7 has no mask but is a neighbour
    assert middle == [[3, 3, 3, 4, 4], [3, 3, 4, 4, 6], [4, 6, 6, 7, 7]]
    left_out = "2 slices without a row in train.csv left out"
    assert source.notes[0] == left_out
    assert source.notes[1].startswith("7 missing neighbours in the stacks replaced")
    assert open_uwgi(str(tmp_path), Faults()).notes == (left_out,)


@pytest.mark.parametrize("stack", [0, 2, -1])
def test_a_stack_has_a_middle(tmp_path: Path, stack: int) -> None:
    with pytest.raises(UserError, match=rf"data.stack = {stack}: it must be an odd number"):
        rows_of(scan_set(tmp_path, {1: 1}), stack=stack)


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


OF_A_SLICE: dict[str, tuple[Callable[[Path], None], str]] = {
    # what is done to slice 2 of case 1, and the culprit
    "missing": (lambda root: scan_2(root).unlink(), "scans/slice_0002_*.png"),
    "size": (swap_sides, "slice_0002_6_9_1.50_2.00.png"),
    "cut": (cut, "slice_0002_9_6_1.50_2.00.png"),
    "colour": (colour, "slice_0002_9_6_1.50_2.00.png: its pixels are RGB"),
    "two scans": (second_scan, "case1_day0_slice_0002 has 2 scans"),
    "runs": (runs("1 2 3"), "line 7 (case1_day0_slice_0002, stomach)"),
    "class": (
        rewrite(lambda rows: [*rows[:3], [rows[3][0], "colon", ""], *rows[4:]]),
        "line 5 (case1_day0_slice_0002, colon)",
    ),
    "twice": (
        rewrite(lambda rows: [*rows, rows[3]]),
        "line 38 (case1_day0_slice_0002, large_bowel): line 5",
    ),
}


@pytest.mark.parametrize("what", OF_A_SLICE)
def test_a_fault_of_a_slice_is_named_once_refused_or_left_out(tmp_path: Path, what: str) -> None:
    spoil, culprit = OF_A_SLICE[what]
    root = scan_set(tmp_path, {1: 4, 2: 4, 3: 4})
    spec = f"uwgi:{root}"
    options: dict[str, Any] = {"val_fraction": 0.3, "test_fraction": 0.3}
    whole = load(spec, **options)
    spoil(root)
    (fault,) = faults_of(root)
    assert culprit in fault.message
    with pytest.raises(UserError) as caught:
        load(spec, **options)
    assert culprit in str(caught.value)
    kept = load(spec, **options, skip_corrupt=True)
    record = kept.record()
    assert record.left_out_count == 1
    assert culprit in f"{record.left_out[0].id}: {record.left_out[0].reason}"
    assert ids(whole) - ids(kept) == {"case1_day0_slice_0002"}
    assert record.fingerprint != whole.record().fingerprint


def ids(data: ImageData) -> set[str]:
    return {row.name for split in data.splits for row in split.rows}


# mistakes of the table as a whole: the line, after the folder


def test_columns_may_stand_in_any_order_and_runs_be_long(tmp_path: Path) -> None:
    side = 600  # more characters than Python's csv takes in a cell
    add_scan(tmp_path, 1, 0, 1, np.zeros((side, side), dtype=np.uint16))
    text = rle.encode(np.indices((side, side)).sum(axis=0) % 2)
    assert len(text) > 131_072
    rows = [[text, "1", "stomach", "case1_day0_slice_0001"]]
    write_rows(tmp_path / "train.csv", rows, ("segmentation", "more", "class", "id"))
    assert rows_of(tmp_path)[0].read_target().sum() == 3 * side * side // 2
    assert csv.field_size_limit() == 131_072


def pinned(root: Path, head: str, rows: Sequence[Sequence[str]]) -> Path:
    """Three cases of two slices each, with a list of splits."""
    scan_set(root, {1: 2, 2: 2, 3: 2})
    write_rows(root / "splits.csv", rows, (head, "split"))
    return root


CASES = [["case1", "train"], ["case2", "val"], ["case3", "test"]]
SLICES = [
    [f"case{case}_day0_slice_{number:04d}", "test" if case == 3 else "train"]
    for case in (1, 2, 3)
    for number in (1, 2)
]


def test_a_list_of_splits_is_kept(tmp_path: Path) -> None:
    data = load(f"uwgi:{pinned(tmp_path, 'case', CASES)}")
    assert [set(split.groups) for split in data.splits] == [{"case1"}, {"case2"}, {"case3"}]
    assert data.record().test_fraction is None
    assert "validation = the source's validation split" in data.record().notes
    with pytest.raises(UserError, match="have a test split of their own"):
        load(f"uwgi:{tmp_path}", test_fraction=0.1)


def test_without_validation_it_is_split_off_from_train(tmp_path: Path) -> None:
    data = load(f"uwgi:{pinned(tmp_path, 'id', SLICES)}", val_fraction=0.5)
    assert {split.name: len(split) for split in data.splits} == {"train": 2, "val": 2, "test": 2}
    assert set(data.test.groups) == {"case3"}


def test_a_case_in_two_splits_is_refused_unless_slices_are_split(tmp_path: Path) -> None:
    rows = [[SLICES[0][0], "test"], *SLICES[1:]]
    root = pinned(tmp_path, "id", rows)
    faults = Faults(collect=True)
    open_uwgi(str(root), faults)
    assert [fault.culprit for fault in faults.found] == ["case 'case1'"]
    with pytest.raises(UserError, match=r"case 'case1': it is in test .*slice_0001.* and in train"):
        load(f"uwgi:{root}")
    data = load(f"uwgi:{root}", split_by="slice", val_fraction=0.3)
    assert "case1" in data.test.groups
    notes = data.record().notes
    assert [note for note in notes if note.startswith("split by slice: ") and "case1" in note]


def test_the_fingerprint_differs_where_a_slice_is_left_out(tmp_path: Path) -> None:
    root = pinned(tmp_path, "case", CASES)
    scan_2(root).write_bytes(b"no picture")
    broken = load(f"uwgi:{root}", skip_corrupt=True).record()
    lines = (root / "train.csv").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "case1_day0_slice_0002" not in line]
    (root / "train.csv").write_text("".join(kept))
    without = load(f"uwgi:{root}").record()
    assert broken.sizes == without.sizes
    assert broken.mean == without.mean
    assert broken.fingerprint != without.fingerprint


def test_the_real_slices_load(real_data: Path) -> None:
    root = real_data / "uw-madison-gi"
    assert not faults_of(root)
    rows = {row.name: row for row in rows_of(root)}
    assert len(rows) == 36
    one = rows["case101_day20_slice_0078"]
    assert one.image().shape == (1, 266, 266)
    assert one.spacing == (1.5, 1.5)
    with (root / "train.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    # from the CSV to masks and back, exactly
    many = open_uwgi(str(root), Faults(), masks="multilabel")
    back = {
        (row.name, organ): rle.encode(plane)
        for row in many.rows
        for organ, plane in zip(many.classes, row.read_target().numpy(), strict=True)
    }
    assert back == {(line["id"], line["class"]): line["segmentation"] for line in lines}
