# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from scan_sets import scan_path, scan_set, write_rows

from keymix.data import load
from keymix.data.sources.base import Faults
from keymix.data.sources.uwgi import open_source
from keymix.errors import UserError


def pinned(root: Path, head: str, rows: Sequence[Sequence[str]]) -> Path:
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
    assert [set(split.scans.groups) for split in data.splits if split.scans] == [
        {"case1"},
        {"case2"},
        {"case3"},
    ]
    assert data.record().test_fraction is None
    assert "validation = the source's validation split" in data.record().notes
    with pytest.raises(UserError, match="have a test split of their own"):
        load(f"uwgi:{tmp_path}", test_fraction=0.1)


def test_without_validation_it_is_split_off_from_train(tmp_path: Path) -> None:
    data = load(f"uwgi:{pinned(tmp_path, 'id', SLICES)}", val_fraction=0.5)
    assert {split.name: len(split) for split in data.splits} == {"train": 2, "val": 2, "test": 2}
    assert data.test.scans is not None
    assert set(data.test.scans.groups) == {"case3"}


def test_a_case_in_two_splits_is_refused_unless_slices_are_split(tmp_path: Path) -> None:
    rows = [[SLICES[0][0], "test"], *SLICES[1:]]
    root = pinned(tmp_path, "id", rows)
    faults = Faults(collect=True)
    open_source(str(root), faults)
    assert [fault.culprit for fault in faults.found] == ["case1"]
    with pytest.raises(UserError, match=r"case 'case1' is in train .* and in test .*slice_0001"):
        load(f"uwgi:{root}")
    data = load(f"uwgi:{root}", split_by="slice", val_fraction=0.3)
    assert "case1" in data.test.scans.groups  # type: ignore[union-attr]
    notes = data.record().notes
    assert [note for note in notes if note.startswith("split by slice: ") and "case1" in note]


@pytest.mark.parametrize(
    ("head", "rows", "culprit"),
    [
        ("case", [*CASES, ["case1", "test"]], "line 5: 'case1'"),
        ("id", [*SLICES, [SLICES[0][0], "val"]], "line 8: 'case1_day0_slice_0001'"),
        ("case", [*CASES, ["case9", "test"]], "line 5: 'case9'"),
        ("case", [*CASES[:2], ["case3", "dev"], ["case3", "test"]], "line 4: split 'dev'"),
        ("case", CASES[:2], "2 slices: case3_day0_slice_0001, case3_day0_slice_0002"),
    ],
)
def test_mistakes_in_a_list_of_splits_are_named(
    tmp_path: Path, head: str, rows: list[list[str]], culprit: str
) -> None:
    root = pinned(tmp_path, head, rows)
    with pytest.raises(UserError, match=re.escape(culprit)) as caught:
        load(f"uwgi:{root}", split_by="slice")
    assert str(root / "splits.csv") in str(caught.value)


def test_the_fingerprint_differs_where_a_slice_is_left_out(tmp_path: Path) -> None:
    root = pinned(tmp_path, "case", CASES)
    path = scan_path(root, 1, 0, 2, (6, 9))
    path.write_bytes(b"no picture")
    broken = load(f"uwgi:{root}", skip_corrupt=True).record()
    lines = (root / "train.csv").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "case1_day0_slice_0002" not in line]
    (root / "train.csv").write_text("".join(kept))
    without = load(f"uwgi:{root}").record()
    assert broken.sizes == without.sizes
    assert broken.mean == without.mean
    assert broken.fingerprint != without.fingerprint
