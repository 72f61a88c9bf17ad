# SPDX-License-Identifier: Apache-2.0
"""A check of images with masks continues after a fault, and names each fault once."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scan_sets import ORGANS, add_scan, mask_set, rows_of, scan_path, scan_set, write_rows
from scan_tables import Scans

from keymix import recipes
from keymix.data import load
from keymix.data.check import check
from keymix.data.findings import Report
from keymix.data.segmentation.check import survey_scans
from keymix.data.segmentation.table import KINDS
from keymix.errors import UserError
from keymix.train.validate import training_batches

UNFIT = "splits with nothing to learn or to measure"
SMALL = "images with a side below 8 pixels"  # those of these tests are


def found(report: Report) -> dict[str, tuple[str, int]]:
    return {f.what: (f.level, f.count) for f in report.findings if f.what != SMALL}


def where(report: Report, what: str) -> list[str]:
    return list(next(f for f in report.findings if f.what == what).where)


def write(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Eight cases of three slices, each with some stomach; two have the other organs."""
    root = scan_set(tmp_path / "uw", dict.fromkeys(range(1, 9), 3))
    rows = read(root / "train.csv")
    for row in rows[1:]:
        if row[0].startswith(("case3_", "case5_", "case6_")):
            row[2] = {"large_bowel": "1 3", "small_bowel": "20 4", "stomach": row[2]}[row[1]]
    write(root / "train.csv", rows)
    return root


def test_a_clean_set_is_fit_and_its_facts_are_reported(scans: Path) -> None:
    done: list[tuple[int, int]] = []
    report = check(str(scans), progress=lambda *some: done.append(some))
    assert report.spec == f"uwgi:{scans}"
    assert report.fit
    assert done[-1] == (24, 24)
    facts = report.facts
    data = load(f"uwgi:{scans}", val_fraction=1 / 6)
    assert facts["images"] == {"train": 24}
    assert facts["splits"] == {split.name: len(split) for split in data.splits}
    assert facts["cases"] == data.record().cases
    assert facts["masks"] == {"kind": "exclusive", "empty": 0, "ignored": 0.0}
    assert facts["spacing"]["common"] == {"row_mm": 2.0, "column_mm": 1.5, "images": 24}
    stomach, large = facts["classes"]["stomach"], facts["classes"]["large_bowel"]
    assert stomach["share_of_pixels"] == 2 / 54
    assert large["share_of_pixels"] == pytest.approx(9 * 3 / (24 * 54))
    assert sum(stomach[name] for name in facts["splits"]) == 24
    assert sum(large[name] for name in facts["splits"]) == 9
    assert sum(of["share_of_pixels"] for of in facts["classes"].values()) == pytest.approx(1)


def test_every_fault_of_scans_is_named_once_with_file_and_row(scans: Path) -> None:
    table = scans / "train.csv"
    rows = read(table)

    def plant(line: int, text: str, organ: str | None = None) -> str:
        rows[line - 1][2] = text
        rows[line - 1][1] = organ or rows[line - 1][1]
        return f"{table}: line {line}"

    first = {
        "run lengths of an odd count": plant(2, "1 2 3"),
        "run lengths that are no numbers of 1 or more": plant(12, "0 2"),
        "run lengths beyond the image": plant(22, "54 2"),
        "run lengths that overlap": plant(32, "1 4 3 2"),
        "classes that the data set does not have": plant(42, "1 2", "spleen"),
        "masks that have several rows": plant(51, "", "large_bowel"),
    }
    write(table, [*rows, ["case9", "stomach", ""]])
    first["rows that cannot be read"] = f"{table}: line {len(rows) + 1}"
    missing = scan_path(scans, 8, 0, 1, (6, 9))
    missing.unlink()
    first["scans that are missing"] = f"{table}: line {1 + 7 * 9 + 1}"
    small = scan_path(scans, 7, 0, 2, (6, 9))
    Image.fromarray(np.ones((5, 9), np.uint16)).save(small)
    first["images of another size than their name says"] = str(small)
    cut = scan_path(scans, 7, 0, 3, (6, 9))
    cut.write_bytes(cut.read_bytes()[:60])
    first["broken images"] = f"cannot read image {cut}"
    other = cut.with_name("slice_0001_9_6_1.50_1.50.png")
    shutil.copy(scan_path(scans, 2, 0, 3, (6, 9)), other)
    copy = scan_path(scans, 4, 0, 3, (6, 9))
    shutil.copy(scan_path(scans, 5, 0, 3, (6, 9)), copy)
    (small.parent / "notes.txt").touch()
    report = check(f"uwgi:{scans}")
    entries = {f.what: f for f in report.findings}
    for what, start in first.items():
        assert entries[what].level == "stops"
        assert entries[what].count == 1, what
        assert entries[what].where[0].startswith(start), what
        assert entries[what].details[0]["id"], what
    assert entries["several scans of one slice"].count == 1
    assert str(copy) in where(report, "images with more than one mask")[0]
    assert where(report, "files that are no images by their name") == [
        str(small.parent / "notes.txt")
    ]
    assert not report.fit
    with pytest.raises(UserError):
        load(f"uwgi:{scans}")


def test_every_fault_of_masks_is_named_once_with_its_file(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"": 60})
    images, masks = root / "images", root / "masks"

    def save(path: Path, pixels: np.ndarray) -> None:
        Image.fromarray(pixels.astype(np.uint8)).save(path)

    save(masks / "p1.png", np.full((6, 9), 7))
    save(masks / "p2.png", np.zeros((6, 8)))
    save(masks / "p3.png", np.zeros((6, 9, 3)))
    (masks / "p4.png").write_bytes(b"x")
    (masks / "p5.png").unlink()
    (images / "p6.png").unlink()
    (images / "p7.png").write_bytes(b"x")
    shutil.copy(images / "p0.png", images / "p0.bmp")
    (masks / "p9.tif").touch()
    report = check(str(root))
    assert report.spec == f"masks:{root}"
    named = {
        "masks with values that classes.txt lacks": ("p1.png", "7 (54 pixels)"),
        "masks of another size than their image": ("p2.png", "8x6"),
        "masks in colour": ("p3.png", "RGB"),
        "broken masks": ("p4.png", "not an image"),
        "images without mask": ("p5.png", "missing"),
        "masks without image": ("p6.png", "no image"),
        "broken images": ("p7.png", "not an image"),
        "several images of one stem": ("p0.bmp", "p0.png"),
    }
    for what, (file, word) in named.items():
        (line,) = where(report, what)
        assert file in line
        assert word in line
    assert where(report, "files that are no images by their name") == [str(masks / "p9.tif")]
    # nothing else is reported of the damaged ones
    assert set(found(report)) == {*named, "files that are no images by their name"}


def test_every_kind_of_fault_has_words_and_a_remedy() -> None:
    """The kinds that the code reports are those of the table, which the check goes through."""
    folder = Path(__file__).parents[2] / "src" / "keymix" / "data"
    text = "".join(path.read_text() for path in folder.rglob("*.py") if path.name != "table.py")
    for kind, (what, remedy) in KINDS.items():
        assert f'"{kind}"' in text, f"nothing reports {kind!r}"
        assert what
        assert remedy


def test_a_case_in_two_splits_is_reported(scans: Path) -> None:
    """Of given splits it stops training; where slices are split on purpose, it falsifies."""
    ids = sorted({row[0] for row in read(scans / "train.csv")[1:]})
    rows = [[name, "test" if name.startswith("case8") else "train"] for name in ids]
    rows[0][1], rows[5][1] = "test", "val"
    write(scans / "splits.csv", [["id", "split"], *rows])
    report = check(f"uwgi:{scans}")
    faults = where(report, "cases in two splits")
    assert [line.split()[1] for line in faults] == ["'case2'", "'case1'"]
    report = check(f"uwgi:{scans}", split_by="slice")
    assert "cases in two splits" not in found(report)
    assert found(report)["cases in more than one split"] == ("falsifies", 2)
    assert where(report, "cases in more than one split") == [
        "case1 (train, test)",
        "case2 (train, val)",
    ]
    (scans / "splits.csv").unlink()
    assert check(f"uwgi:{scans}").fit
    report = check(f"uwgi:{scans}", split_by="slice")
    assert report.verdict.startswith("falsifies results: cases in more than one split (")


def test_splits_of_one_case_and_classes_that_they_lack_are_warned_of(scans: Path) -> None:
    rows = [[f"case{k}", "test" if k == 8 else "val" if k > 6 else "train"] for k in range(1, 9)]
    rows[5][1] = "val"
    write(scans / "splits.csv", [["case", "split"], *rows])
    report = check(f"uwgi:{scans}")
    assert report.fit
    assert where(report, "splits of a single case") == ["test"]
    assert where(report, "classes that test lacks") == ["large_bowel", "small_bowel"]
    assert "classes that val lacks" not in found(report)
    rows = [[case, "val" if split == "train" else "train"] for case, split in rows]
    rows[0][1] = rows[6][1] = "test"
    rows[5][1] = "val"
    write(scans / "splits.csv", [["case", "split"], *rows])
    report = check(f"uwgi:{scans}")
    assert where(report, "classes that train lacks") == ["large_bowel", "small_bowel"]
    # a class that is not learned is not missed elsewhere
    assert "classes that test lacks" not in found(report)


def test_too_few_cases_stop_training(tmp_path: Path) -> None:
    root = scan_set(tmp_path / "few", {1: 4, 2: 4})
    report = check(str(root))
    assert found(report)["splits left empty"] == ("stops", 1)
    assert check(str(root), split_by="slice").verdict.startswith("falsifies")
    with pytest.raises(UserError, match="3 are needed"):
        load(f"uwgi:{root}")


def test_overlapping_organs_are_counted_in_exclusive_masks(scans: Path) -> None:
    rows = read(scans / "train.csv")
    rows[1][2] = "10 3"  # of the stomach's pixels 11 and 12
    write(scans / "train.csv", rows)
    report = check(f"uwgi:{scans}")
    assert report.fit
    (line,) = where(report, "masks in which classes overlap")
    assert line == f"{scan_path(scans, 1, 0, 1, (6, 9))}: 2 pixels"
    several = check(f"uwgi:{scans}", masks="multilabel")
    assert "masks in which classes overlap" not in found(several)
    assert several.facts["masks"]["kind"] == "multilabel"
    large = [each.facts["classes"]["large_bowel"] for each in (report, several)]
    assert (large[1]["share_of_pixels"] - large[0]["share_of_pixels"]) * 24 * 54 == pytest.approx(2)


def test_empty_and_ignored_masks_are_facts_and_warnings(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"": 12})
    for k, value in enumerate((0, 0, 255)):
        Image.fromarray(np.full((6, 9), value, np.uint8)).save(root / "masks" / f"p{k}.png")
    report = check(str(root))
    masks = [np.asarray(Image.open(path)) for path in sorted((root / "masks").iterdir())]
    ignored = sum(int((mask == 255).sum()) for mask in masks)
    leaf = sum(int((mask == 1).sum()) for mask in masks)
    assert report.facts["masks"]["empty"] == 3
    assert report.facts["masks"]["ignored"] == pytest.approx(ignored / (12 * 54))
    share = report.facts["classes"]["leaf"]["share_of_pixels"]
    assert share == pytest.approx(leaf / (12 * 54 - ignored))  # of those that count
    assert where(report, "masks that are ignored altogether") == [str(root / "images" / "p2.png")]
    assert "cases" not in report.facts  # nothing says which images are of one


def test_copies_are_reported_by_split_and_mask_and_blank_images_are_none(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"train": 12, "test": 4})
    train, test = root / "train", root / "test"

    def copy(name: str, to: Path, mask: Path) -> None:
        shutil.copy(train / "images" / name, to)
        shutil.copy(mask, to.parent.with_name("masks") / to.name)

    copy("p0.png", test / "images" / "leak.png", train / "masks" / "p0.png")
    copy("p1.png", train / "images" / "zother.png", train / "masks" / "p2.png")
    for k in (3, 4):
        for folder in (train, test):
            if (folder / "images" / f"p{k}.png").exists():
                blank = Image.new("L", (9, 6), 40)
                blank.save(folder / "images" / f"p{k}.png")
    report = check(str(root))
    assert found(report)["images in more than one split"] == ("falsifies", 1)
    (leak,) = where(report, "images in more than one split")
    assert leak.count(" = ") == 1
    assert {"p0.png", "leak.png"} == {
        part.split(" ")[0].rpartition("/")[2] for part in leak.split(" = ")
    }
    conflicts = where(report, "images with more than one mask")
    assert len(conflicts) == 1
    assert "zother.png" in conflicts[0]
    assert found(report)["images of one colour"] == ("warning", 3)
    other = mask_set(tmp_path / "n", {"train": 12, "val": 3, "test": 3})
    for kind in ("images", "masks"):
        shutil.copy(other / "train" / kind / "p0.png", other / "train" / kind / "again.png")
    assert found(check(str(other))) == {"images repeated with the same mask": ("warning", 1)}


def test_other_spacings_are_noted(scans: Path) -> None:
    odd = scan_path(scans, 2, 0, 2, (6, 9))
    odd.rename(odd.with_name("slice_0002_9_6_1.63_1.63.png"))
    report = check(f"uwgi:{scans}")
    assert report.facts["spacing"]["different"] == 2
    assert found(report)["images of another spacing than 1.5x2 mm"] == ("note", 1)
    (line,) = where(report, "images of another spacing than 1.5x2 mm")
    assert line.endswith("slice_0002_9_6_1.63_1.63.png: 1.63x1.63 mm")


def test_stacks_report_missing_neighbours_and_a_broken_one_once(scans: Path) -> None:
    report = check(f"uwgi:{scans}", stack=3)
    assert found(report)["stacks with missing neighbours"] == ("note", 16)  # first and last of 8
    assert report.fit
    # copies are faults by the slice itself, whatever is next to it
    shutil.copy(scan_path(scans, 1, 0, 1, (6, 9)), scan_path(scans, 2, 0, 2, (6, 9)))
    faults = found(check(f"uwgi:{scans}", stack=3))
    copies = ("images in more than one split", "images repeated with the same mask")
    assert sum(faults[what][1] for what in copies if what in faults) == 1
    middle = scan_path(scans, 1, 0, 2, (6, 9))
    middle.write_bytes(b"x")
    report = check(f"uwgi:{scans}", stack=3)
    assert where(report, "broken images") == [f"cannot read image {middle}: not an image"]


def test_what_a_table_does_not_report_by_its_kind_is_reported_all_the_same() -> None:
    class Gone(Scans):
        def mask(self, i: int):
            if i == 1:
                raise UserError("cannot read mask 1: permission denied")
            return super().mask(i)

    pixels = np.random.default_rng(0).integers(0, 255, (3, 1, 4, 4), dtype=np.uint8)
    survey, seen = survey_scans(Gone(pixels, pixels[:, 0] % 3), 3, lambda done: None)
    ((i, (fault,)),) = seen.faults.items()
    assert (i, fault.kind, fault.culprit) == (1, "unreadable image", "scans/1.png")
    assert seen.area.tolist() == [16, 0, 16]
    assert survey.sizes.tolist() == [[4, 4]] * 3


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (mask_set, {"stack": 3}, "have no neighbours"),
        (mask_set, {"masks": "multilabel"}, "no folders for the classes"),
        (mask_set, {"split_by": "day"}, "unknown data.split_by 'day'"),
        (scan_set, {"masks": "both"}, "unknown task.options.masks 'both'"),
        (scan_set, {"stack": 2}, "must be an odd number"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, make: Callable[..., Path], settings: dict, message: str
) -> None:
    root = make(tmp_path / "set", {"": 9} if make is mask_set else {1: 2, 2: 2, 3: 2})
    with pytest.raises(UserError, match=message):
        check(str(root), **settings)


def test_a_share_for_test_is_refused_where_the_data_have_one(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"train": 9, "test": 3})
    with pytest.raises(UserError, match=r"test_fraction = 0\.5"):
        check(str(root), test_fraction=0.5)
    assert check(str(mask_set(tmp_path / "n", {"": 12})), test_fraction=0.5).facts["splits"] == {
        "train": 5,
        "val": 1,
        "test": 6,
    }


def test_what_cannot_be_opened_stops(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"": 9})
    (root / "classes.txt").unlink()
    report = check(str(root), split_by="case")
    assert found(report) == {"sets that cannot be opened": ("stops", 1)}
    assert "classes.txt is missing" in report.findings[0].where[0]


def filled(root: Path, split: str, *values: int) -> Path:
    """Give the masks of a split these values and no others."""
    rng = np.random.default_rng(0)
    for path in (root / split / "masks").iterdir():
        pixels = rng.choice(np.array(values, dtype=np.uint8), (6, 9))
        pixels.flat[: len(values)] = values
        Image.fromarray(pixels).save(path)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "values", "culprit"),
    [
        ("", (0,), "training images has a pixel of a class that counts"),
        ("", (0, 255), "write 1 for the class"),
        ("", (255,), "training images are ignored"),
        ("", (1, 255), "are of the class 'leaf'"),
        ("train", (0, 255), "write 1 for the class"),
        ("test", (255,), "of the 3 test images are ignored"),
        ("val", (255,), "of the 3 validation images are ignored"),
    ],
)
def test_the_check_and_training_refuse_the_same_masks(
    tmp_path: Path, split: str, values: tuple[int, ...], culprit: str
) -> None:
    counts = {split: 12} if not split else {"train": 9, "val": 3, "test": 3}
    root = filled(mask_set(tmp_path / "m", counts), split, *values)
    report = check(str(root))
    (line, *_) = where(report, UNFIT)
    assert culprit in line
    assert found(report)[UNFIT][0] == "stops"
    recipe = recipes.get("small_masks_setr")
    data = load(f"masks:{root}", val_fraction=1 / 6)
    with pytest.raises(UserError) as error:
        training_batches(recipe, data)
    assert str(error.value).endswith(line)


def test_multilabel_masks_and_scans_without_any_class_are_refused_alike(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "m", {"": 12})
    (root / "classes.txt").write_text("leaf\nroot\n")
    for path in (root / "masks").iterdir():
        path.unlink()
    for name in ("leaf", "root"):
        (root / "masks" / name).mkdir()
        for k in range(12):
            Image.new("L", (9, 6)).save(root / "masks" / name / f"p{k}.png")
    scans = scan_set(tmp_path / "uw", dict.fromkeys(range(1, 6), 2))
    rows = [[name, organ, ""] for name, organ, _ in read(scans / "train.csv")[1:]]
    write_rows(scans / "train.csv", rows)
    recipe = recipes.get("small_masks_setr")
    for spec in (f"masks:{root}", f"uwgi:{scans}"):
        assert found(check(spec))[UNFIT] == ("stops", 1)
        with pytest.raises(UserError, match="has a pixel of a class that counts"):
            training_batches(recipe, load(spec, val_fraction=1 / 6))
    for k in range(12):  # where each class has masks of its own, anything but 0 is inside
        Image.new("L", (9, 6), 255).save(root / "masks" / "leaf" / f"p{k}.png")
    assert UNFIT not in found(check(f"masks:{root}"))
    training_batches(recipe, load(f"masks:{root}", val_fraction=1 / 6))


def test_classes_are_counted_only_where_all_masks_were_read(scans: Path) -> None:
    assert set(check(f"uwgi:{scans}").facts["classes"]) == {"background", *ORGANS}
    scan_path(scans, 8, 0, 1, (6, 9)).write_bytes(b"x")
    report = check(f"uwgi:{scans}")
    assert "classes" not in report.facts
    assert not any(what.startswith("classes that") for what in found(report))
    assert any("classes are not counted" in note for note in report.facts["notes"])
    scan_path(scans, 8, 0, 1, (6, 9)).unlink()
    write(scans / "train.csv", [*read(scans / "train.csv"), ["case9", "stomach"]])
    assert "classes" not in check(f"uwgi:{scans}").facts


def test_a_slice_without_a_row_for_an_organ_is_named(scans: Path) -> None:
    rows = read(scans / "train.csv")
    gone = ["case2_day0_slice_0002", "stomach"], ["case7_day0_slice_0001", "large_bowel"]
    kept = [row for row in rows if row[:2] not in gone]
    write(scans / "train.csv", kept)
    report = check(f"uwgi:{scans}")
    what = "slices without a row for an organ"
    assert found(report)[what] == ("falsifies", 2)
    assert where(report, what) == [
        "case2_day0_slice_0002: no row for stomach",
        "case7_day0_slice_0001: no row for large_bowel",
    ]
    data = load(f"uwgi:{scans}")
    assert [each.id for each in data.unlisted] == [slice_id for slice_id, _ in gone]
    assert any("case2_day0_slice_0002" in note for note in data.record().notes)


def test_rows_of_what_is_there_alone_are_a_pattern_too(scans: Path) -> None:
    """Where no row says that an organ is absent, a row that is not there may say it."""
    rows = read(scans / "train.csv")
    write(scans / "train.csv", [row for row in rows if row[2]])
    assert "slices without a row for an organ" not in found(check(f"uwgi:{scans}"))
    filled_rows = [[*row[:2], row[2] or "40 2"] for row in rows]
    write(scans / "train.csv", filled_rows[:-1])
    report = check(f"uwgi:{scans}")
    assert found(report)["slices without a row for an organ"] == ("warning", 1)
    assert report.fit
    write(scans / "train.csv", filled_rows)
    assert "slices without a row for an organ" not in found(check(f"uwgi:{scans}"))


@pytest.mark.skipif("KEYMIX_DATA" not in os.environ, reason="no KEYMIX_DATA")
def test_the_slices_of_a_hospital_are_clean() -> None:
    root = Path(os.environ["KEYMIX_DATA"]) / "uw-madison-gi"
    report = check(str(root))
    assert report.spec == f"uwgi:{root}"
    assert found(report) == {
        "splits of a single case": ("warning", 1),
        "classes that test lacks": ("warning", 1),
    }
    assert report.facts["images"] == {"train": 36}
    assert report.facts["sizes"]["common"] == {"width": 266, "height": 266, "images": 36}


def test_empty_scans_are_read(tmp_path: Path) -> None:
    """A slice without any run is one without organs, and a fact."""
    root = scan_set(tmp_path / "uw", {1: 3, 2: 3, 3: 3, 4: 3})
    add_scan(root, 4, 0, 4)
    rows = read(root / "train.csv")[1:]
    write_rows(root / "train.csv", [*rows, *rows_of("case4_day0_slice_0004")])
    report = check(str(root))
    assert report.facts["masks"]["empty"] == 1
    assert report.facts["images"] == {"train": 13}
