# SPDX-License-Identifier: Apache-2.0
"""A check decodes everything, continues after a problem, and names what it found."""

from __future__ import annotations

import io
import json
import shutil
import struct
import zlib
from pathlib import Path

import archives
import numpy as np
import pyarrow as pa
import pytest
from pictures import encoded, picture
from PIL import Image

from each import together
from keymix.data import load
from keymix.data.check import check
from keymix.data.findings import Report
from keymix.errors import UserError


def found(report: Report) -> dict[str, tuple[str, int]]:
    return {f.what: (f.level, f.count) for f in report.findings}


def where(report: Report, what: str) -> str:
    return " | ".join(next(f for f in report.findings if f.what == what).where)


def details(report: Report, what: str) -> list:
    return list(next(f for f in report.findings if f.what == what).details)


def test_a_clean_folder_is_fit(make_folder) -> None:
    root = make_folder({"train/a": 8, "train/b": 8, "test/a": 3, "test/b": 3})
    report = check(str(root))
    assert (report.fit, report.verdict, report.findings) == (True, "fit for training", [])
    assert report.spec == f"folder:{root}"
    assert report.facts["images"] == {"train": 16, "test": 6}
    assert report.facts["splits"] == {"train": 14, "val": 2, "test": 6}
    assert report.facts["classes"]["b"] == {"train": 8, "test": 3}
    assert report.facts["sizes"]["common"] == {"width": 16, "height": 16, "images": 22}


def test_it_goes_on_after_every_problem(make_folder) -> None:
    root = make_folder(
        {"train/a": 9, "train/b": 9, "train/hollow": 0, "test/a": 2, "test/new": 2, "val/b": 2}
    )
    file = root / "train" / "a" / "003.png"
    file.write_bytes(file.read_bytes()[:120])
    (root / "train" / "a" / "004.png").write_bytes(b"")
    (root / "test" / "new" / "000.png").write_text("hello")
    (root / "val" / "b" / "notes.txt").write_text("hello")
    report = check(f"folder:{root}")
    assert found(report) == {
        "empty classes": ("stops", 1),
        "classes that train does not have": ("stops", 1),
        "broken images": ("stops", 3),
        "classes that val lacks": ("warning", 1),
        "classes that test lacks": ("warning", 1),
        "files that are no images by their name": ("warning", 1),
    }
    levels = [finding.level for finding in report.findings]
    assert levels == ["stops"] * 3 + ["warning"] * 3
    assert "003.png: image file is truncated" in where(report, "broken images")
    assert "004.png: the file is empty" in where(report, "broken images")
    assert f"{root}/test/new/000.png: not an image" in where(report, "broken images")
    assert "class 'new' is not in train" in where(report, "classes that train does not have")
    assert where(report, "files that are no images by their name") == str(
        root / "val" / "b" / "notes.txt"
    )
    assert not report.fit
    assert report.verdict.startswith("stops training: empty classes (1), ")


def test_what_would_stop_training_does(make_folder) -> None:
    """The check and `load` agree on what is fit."""
    root = make_folder({"a": 9, "b": 9})
    load(f"folder:{root}")
    assert check(str(root)).fit
    for damage in ("hollow", "broken"):
        copy = root.parent / damage
        shutil.copytree(root, copy)
        if damage == "hollow":
            (copy / "c").mkdir()
        else:
            (copy / "a" / "000.png").write_bytes(b"x")
        assert not check(str(copy)).fit
        with pytest.raises(UserError):
            load(f"folder:{copy}")
    few = root.parent / "few"
    for name in "ab":
        (few / name).mkdir(parents=True)
        picture(ord(name)).save(few / name / "0.png")
    assert found(check(str(few)))["splits left empty"] == ("stops", 1)


def test_one_class_stops_training(make_folder) -> None:
    report = check(str(make_folder({"only": 5})))
    assert found(report) == {"sets of one class only": ("stops", 1)}


def test_the_same_pixels_in_two_splits_falsify_whatever_the_file(make_folder) -> None:
    root = make_folder({"train/a": 9, "train/b": 9, "test/a": 3, "test/b": 3})
    original = root / "train" / "a" / "002.png"
    Image.open(original).convert("RGBA").save(root / "test" / "a" / "copy.png")
    Image.open(original).save(root / "test" / "a" / "lossy.jpg", quality=20)  # other pixels
    report = check(str(root))
    assert found(report) == {
        "images in more than one split": ("falsifies", 1),
        "transparent images": ("note", 1),
    }
    line = where(report, "images in more than one split")
    assert line == f"{original} (train, a) = {root}/test/a/copy.png (test, a)"
    assert not report.fit
    assert report.verdict == "falsifies results: images in more than one split (1)"
    assert details(report, "images in more than one split")[0][1]["split"] == "test"


def test_copies_within_a_split_are_reported_by_class(make_folder) -> None:
    root = make_folder(
        {"train/a": 40, "train/b": 9, "val/a": 2, "val/b": 2, "test/a": 2, "test/b": 2}
    )
    shutil.copy(root / "train" / "a" / "000.png", root / "train" / "a" / "again.png")
    shutil.copy(root / "train" / "a" / "001.png", root / "train" / "b" / "again.png")
    report = check(str(root))
    assert found(report) == {
        "images with more than one label": ("falsifies", 1),
        "images repeated within a class": ("warning", 1),
    }
    assert "001.png (train, a) = " in where(report, "images with more than one label")


def test_copies_that_carving_would_tear_apart_are_leaks(make_folder) -> None:
    root = make_folder({"a": 30, "b": 30})
    data = load(f"folder:{root}")
    test, train = Path(data.test.ids(0)), Path(data.train.ids(0))
    shutil.copy(test, train)  # the same class: both lists begin with class 0
    report = check(str(root))
    assert found(report) == {"images in more than one split": ("falsifies", 1)}
    line = where(report, "images in more than one split")
    assert f"{train} (train, a)" in line
    assert f"{test} (test, a)" in line


def test_broken_images_are_no_copies_of_each_other(make_folder) -> None:
    root = make_folder({"train/a": 9, "train/b": 9, "test/a": 3, "test/b": 3})
    for split in ("train", "test"):
        (root / split / "a" / "000.png").write_bytes(b"broken")
    assert found(check(str(root))) == {"broken images": ("stops", 2)}


def test_the_worst_stands_first(make_folder) -> None:
    root = make_folder({"train/a": 9, "train/b": 9, "test/a": 3, "test/b": 3})
    (root / "train" / "a" / "notes.txt").write_text("hello")
    picture(0).convert("L").save(root / "train" / "a" / "grey.png")
    shutil.copy(root / "train" / "a" / "002.png", root / "test" / "a" / "copy.png")
    (root / "test" / "a" / "001.png").write_bytes(b"broken")
    levels = [finding.level for finding in check(str(root)).findings]
    assert levels == ["stops", "falsifies", "warning", "note"]


def test_kinds_of_files_are_reported_with_what_is_done(make_folder) -> None:
    root = make_folder({"a": 20, "b": 20})
    a = root / "a"
    for name, made in {
        "grey.png": picture(500).convert("L"),
        "cmyk.jpg": picture(501).convert("CMYK"),
        "palette.png": picture(502).quantize(8),
        "clear.png": picture(503).convert("RGBA"),
        "deep.png": Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16) * 200),
    }.items():
        made.save(a / name)
    frames = [picture(504), picture(505)]
    frames[0].save(a / "moving.gif", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(506).save(a / "turned.jpg", exif=exif)
    report = check(str(root))
    assert found(report) == {
        "animated images": ("warning", 1),
        "turned images": ("note", 1),
        "16-bit images": ("note", 1),
        "grey images": ("note", 2),
        "CMYK images": ("note", 1),
        "palette images": ("note", 2),
        "transparent images": ("note", 1),
    }
    assert where(report, "animated images").endswith("moving.gif")
    assert where(report, "turned images").endswith("turned.jpg")
    assert report.fit
    assert report.verdict == "fit for training, with 1 warning"


def test_a_camera_s_previews_are_no_animation(make_folder) -> None:
    root = make_folder({"a": 9, "b": 9})
    photo = root / "a" / "photo.jpg"
    picture(1).save(photo, "MPO", save_all=True, append_images=[picture(2)])
    with Image.open(photo) as image:
        assert (image.format, image.is_animated) == ("MPO", True)
    assert check(str(root)).verdict == "fit for training"


def test_sixteen_bit_colour_is_reported(make_folder) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    rows = b"".join(b"\0" + bytes(range(96)) for _ in range(16))  # 16 pixels of 3 x 16 bits
    header = struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0)
    stream = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    stream.seek(8)
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        stream.write(chunk(kind, body))
    root = make_folder({"a": 9, "b": 9})
    (root / "a" / "deep.png").write_bytes(stream.getvalue())
    assert found(check(str(root))) == {"16-bit images": ("note", 1)}


def test_sizes_and_very_small_images_are_reported(make_folder) -> None:
    root = make_folder({"a": 9, "b": 9}, (64, 48))
    picture(1, (15, 11)).save(root / "a" / "small.png")
    picture(2, (100, 90)).save(root / "b" / "large.png")
    report = check(str(root))
    sizes = report.facts["sizes"]
    assert sizes["different"] == 3
    assert sizes["common"] == {"width": 64, "height": 48, "images": 18}
    assert sizes["smallest"]["id"].endswith("small.png")
    assert (sizes["largest"]["width"], sizes["largest"]["height"]) == (100, 90)
    assert found(report) == {"images with a side below 12 pixels": ("warning", 1)}


def test_imbalance_and_single_images_are_reported(make_folder) -> None:
    report = check(str(make_folder({"a": 40, "b": 4, "rare": 1})))
    assert found(report) == {
        "classes of one training image": ("warning", 1),
        "large imbalances": ("warning", 1),
    }
    assert where(report, "large imbalances") == "a has 40 training images, rare 1"


def test_parquet_rows_are_checked_row_group_by_row_group(make_parquet) -> None:
    images = [{"bytes": encoded(i), "path": None} for i in range(20)]
    images[3] = {"bytes": b"no image", "path": None}
    images[8] = {"bytes": None, "path": None}
    labels = [0, 1] * 10
    labels[5], labels[11] = 7, None
    make_parquet(labels, images=images, names=("cat", "dog", "emu"))
    folder = make_parquet(
        [0, 1], file="test-0.parquet", images=[images[4], images[9]], names=("cat", "dog", "emu")
    )
    report = check(str(folder))
    assert report.spec == f"parquet:{folder}"
    assert found(report) == {
        "bad labels": ("stops", 2),
        "broken images": ("stops", 2),
        "images in more than one split": ("falsifies", 2),
        "classes without training images": ("warning", 1),
    }
    file = folder / "train-00000-of-00001.parquet"
    assert f"{file} row 5: the label is 7" in where(report, "bad labels")
    assert f"{file} row 11: the label is missing" in where(report, "bad labels")
    assert where(report, "broken images") == (
        f"{file} row 3: not an image | {file} row 8: the image is empty"
    )
    assert f"{file} row 4 (train, cat) = {folder}/test-0.parquet row 0 (test, cat)" in where(
        report, "images in more than one split"
    )


def test_an_unreadable_file_among_others_is_reported_and_passed_over(make_parquet) -> None:
    make_parquet([0, 1] * 10)
    folder = make_parquet([0, 1], file="test-0.parquet", first_seed=50)
    (folder / "test-0.parquet").write_bytes(b"PAR1")
    assert found(check(str(folder))) == {"unreadable files": ("stops", 1)}


def test_a_set_that_cannot_be_opened_is_reported_not_raised(make_parquet, tmp_path: Path) -> None:
    folder = make_parquet([0, 1] * 10)
    (folder / "train-00000-of-00001.parquet").write_bytes(b"PAR1 half")
    report = check(str(folder))
    assert found(report) == {"sets that cannot be opened": ("stops", 1)}
    flat = tmp_path / "flat"
    flat.mkdir()
    picture(0).save(flat / "a.png")
    assert "has no folders inside" in where(check(str(flat)), "sets that cannot be opened")


def test_imagenet_is_found_and_checked(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("val", 2)):
        for k, wnid in enumerate(("n01440764", "n02012849")):
            (tmp_path / split / wnid).mkdir(parents=True)
            for i in range(count):
                seed = 100 * k + i + (50 if split == "val" else 0)
                picture(seed).save(tmp_path / split / wnid / f"{i}.JPEG")
    report = check(str(tmp_path))
    assert report.spec == f"imagenet:{tmp_path}"
    assert report.facts["splits"] == {"train": 14, "val": 2, "test": 4}
    assert not report.findings


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_sets_of_arrays_are_checked(tmp_path: Path, monkeypatch, name: str) -> None:
    folder = tmp_path / "FashionMNIST" / "raw" if name == "fashion_mnist" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    archives.write(name, folder, "http://127.0.0.1:9", monkeypatch)
    report = check(f"{name}:{tmp_path}")
    assert report.facts["images"] == {"train": archives.TRAIN, "test": archives.TEST}
    assert set(found(report)) <= {"grey images"}
    assert report.facts["sizes"]["different"] == 1


@together
@pytest.mark.parametrize(
    "what", ["digit", "/nowhere/at/all", "folder:/nowhere", "folder", "parquet:/nowhere"]
)
def test_a_mistake_in_the_command_is_the_user_s(what: str) -> None:
    with pytest.raises(UserError):
        check(what)


def test_the_report_is_plain_data(make_folder) -> None:
    root = make_folder({"a": 9, "b": 9})
    (root / "a" / "000.png").write_bytes(b"x")
    report = check(str(root))
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["fit"] is False
    (finding,) = stored["findings"]
    assert (finding["level"], finding["what"], finding["count"]) == ("stops", "broken images", 1)
    assert finding["where"] == [
        {
            "id": f"{root}/a/000.png",
            "split": finding["where"][0]["split"],
            "class": "a",
            "reason": "not an image",
        }
    ]


def test_progress_counts_every_image(make_folder) -> None:
    root = make_folder({"a": 50, "b": 50})
    steps: list[tuple[int, int]] = []
    check(str(root), progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (100, 100)
    assert len(steps) > 2
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_memory_holds_a_row_group_at_a_time(make_parquet) -> None:
    size = 100
    rng = np.random.default_rng(0)
    images = []
    for _ in range(120):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(stream, "BMP")
        images.append({"bytes": stream.getvalue(), "path": None})
    folder = make_parquet([0, 1] * 60, images=images, row_group_size=4)
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        check(str(folder))
    finally:
        pa.set_memory_pool(before)
    encoded_bytes = sum(len(image["bytes"]) for image in images)
    assert encoded_bytes / 60 < pool.max_memory() < encoded_bytes / 3
