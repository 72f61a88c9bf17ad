# SPDX-License-Identifier: Apache-2.0
"""Folders and files of images as people have them: what is read, what is said, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import encoded, picture, seed_of
from PIL import Image

from keymix.analysis.images import View
from keymix.data import load
from keymix.data.check import check
from keymix.data.class_names import read_class_names
from keymix.data.decode import Encoded, convert, open_image
from keymix.data.shown import read_file
from keymix.data.specs import kind_of
from keymix.errors import KeymixWarning, UserError
from keymix.studies.inputs import _of_rows
from keymix.train.evaluation import data_for
from keymix.train.recipe import DataConfig

Make = Callable[[Path], object]


def images(root: Path, suffix: str = "png", **counts: int) -> None:
    """Write images below ``root``; two underscores in a name stand for a slash."""
    for name, count in counts.items():
        folder = root / name.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture(seed_of(name) + i, (20, 14)).save(folder / f"{i:03d}.{suffix}")


def turned(path: Path, orientation: int = 6) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(path).save(path, exif=exif)


def hidden(root: Path) -> None:
    images(root, cat=12, dog=12)
    for name in (".ipynb_checkpoints", ".thumbnails", "deep/__MACOSX"):
        (root / "cat" / name).mkdir(parents=True)
        shutil.copy(root / "dog" / "000.png", root / "cat" / name / "copy.png")


def table(name: str = "labels.csv", head: str = "file,label", each: str = "{file},{label}") -> Make:
    """Images in one folder with a table next to them; every fourth is of dog."""

    def make(root: Path) -> None:
        images(root, **{"im": 16})
        rows = [
            each.format(
                file=f"im/{i:03d}.png",
                label=("cat", "dog")[i % 4 == 3],
                split=("train", "Testing")[i > 11],
                group=f"p{i // 4}",
                number=7 + 3 * (i % 4 == 3),
            )
            for i in range(16)
        ]
        (root / name).write_text("\n".join([head, *rows]) + "\n")

    return make


def numbered(root: Path) -> None:
    table("labels.csv", each="{file},{number}")(root)
    (root / "classes.txt").write_text("7 cat\n10 dog\n")


def hub_folder(root: Path) -> None:
    """Hugging Face's ImageFolder: a table in each split's folder."""
    for split, count in (("train", 16), ("validation", 4)):
        images(root, **{split: count})
        rows = [f"{i:03d}.png,{('cat', 'dog')[i % 2]}" for i in range(count)]
        (root / split / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))


def arrow(folder: Path, count: int, first: int = 0) -> None:
    """A folder as ``save_to_disk`` of `datasets` leaves it, in two shards."""
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    info = '{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}'
    for k in range(2):
        rows = range(first + k * count // 2, first + (k + 1) * count // 2)
        columns = {
            "image": pa.array([{"bytes": encoded(i), "path": None} for i in rows]),
            "label": pa.array([i % 2 for i in rows]),
        }
        made = pa.table(columns).replace_schema_metadata({"huggingface": info})
        path = str(folder / f"data-{k:05d}-of-00002.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, made.schema) as stream:
            stream.write_table(made, max_chunksize=70)


def saved_splits(root: Path) -> None:
    arrow(root / "train", 16)
    arrow(root / "test", 4, first=50)
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


READ: dict[str, tuple[Make, str, list[int], str]] = {
    # what is there, the kind that it is recognised as, sizes of the splits, a note
    "training and testing": (
        lambda root: images(root, training__a=10, training__b=10, testing__a=3, testing__b=3),
        "folder",
        [18, 2, 6],
        "",
    ),
    "Train, DEV and Test": (
        lambda root: images(root, Train__a=9, Train__b=9, DEV__a=2, DEV__b=2, Test__a=2, Test__b=1),
        "folder",
        [18, 4, 3],
        "validation = the source's validation split",
    ),
    "one common folder below each class": (
        lambda root: images(root, a__images=10, b__images=10),
        "folder",
        [14, 2, 4],
        "",
    ),
    "hidden folders": (hidden, "folder", [17, 2, 5], "3 images in hidden folders are left out"),
    "labels.csv": (table(), "csv", [12, 1, 3], "test = 3 images split off"),
    "metadata.csv": (
        table("metadata.csv", "file_name,x,label", "{file},1,{label}"),
        "csv",
        [12, 1, 3],
        "",
    ),
    "a column of splits": (
        table(head="label,split,file", each="{label},{split},{file}"),
        "csv",
        [11, 1, 4],
        "",
    ),
    "a column of groups": (
        table(head="file,label,group", each="{file},{label},{group}"),
        "csv",
        [8, 4, 4],
        "",
    ),
    "numbers with classes.txt": (numbered, "csv", [12, 1, 3], ""),
    "a table in each split": (hub_folder, "csv", [14, 2, 4], "test = the source's validation"),
    "save_to_disk": (lambda root: arrow(root, 160), "parquet", [115, 13, 32], ""),
    "save_to_disk of splits": (saved_splits, "parquet", [14, 2, 4], ""),
}


@pytest.mark.parametrize("name", READ)
def test_what_people_have_is_read(name: str, tmp_path: Path) -> None:
    make, kind, sizes, note = READ[name]
    root = tmp_path / "set"
    make(root)
    assert kind_of(root) == kind
    assert check(str(root)).fit
    data = load(f"{kind}:{root}")
    assert data.classes in (("a", "b"), ("cat", "dog"))
    assert [len(split) for split in data.splits] == sizes
    assert note in " ".join(data.record().notes)
    for split in data.splits:
        for i in range(len(split)):
            where = Path(split.ids(i))
            if kind == "folder":
                assert data.classes[split.labels[i]] in where.parts
            elif where.parent.name == "im":
                assert split.labels[i] == (int(where.stem) % 4 == 3)
            else:
                row = int(split.ids(i).rpartition(" ")[2]) if kind == "parquet" else where.stem
                assert split.labels[i] == int(row) % 2


def test_groups_of_a_table_stay_in_one_split(tmp_path: Path) -> None:
    READ["a column of groups"][0](tmp_path)
    data = load(f"csv:{tmp_path}")
    groups = [
        {int(Path(split.ids(i)).stem) // 4 for i in range(len(split))} for split in data.splits
    ]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 4


def parquet(**columns: Any) -> Make:
    def make(root: Path) -> None:
        root.mkdir()
        pq.write_table(pa.table({"label": [0, 1] * 5, **columns}), root / "train.parquet")

    return make


def spoilt(line: int, row: str) -> Make:
    """A table with a bad row at a line."""

    def make(root: Path) -> None:
        table(head="file,label,split", each="{file},{label},{split}")(root)
        lines = (root / "labels.csv").read_text().splitlines()
        lines[line - 1] = row
        (root / "labels.csv").write_text("\n".join(lines))

    return make


def folds(root: Path) -> None:
    images(root, **{f"fold{k}__{name}": 3 for k in "12" for name in "ab"})


REFUSED: dict[str, tuple[Make, str, tuple[str, ...]]] = {
    # what is there, the spec's kind, and what the line names
    "splits of other names": (folds, "folder", ("fold1, fold2", "(a, b)", "train, val and test")),
    "one class": (lambda root: images(root, only=3), "folder", ("(only)",)),
    "no folders": (lambda root: root.mkdir(), "folder", ("no folders",)),
    "an empty class": (
        lambda root: images(root, a=3, b=3, hollow=0),
        "folder",
        ("set/hollow", "'hollow'"),
    ),
    "a test class that train lacks": (
        lambda root: images(root, train__a=3, train__b=3, test__a=1, test__new=1),
        "folder",
        ("test/new", "'new'"),
    ),
    "test without train": (lambda root: images(root, val__a=3, test__a=3), "folder", ("train",)),
    "an image each": (lambda root: images(root, a=1, b=1), "folder", ("none is left",)),
    "a file that is missing": (
        spoilt(3, "gone.png,cat,train"),
        "csv",
        ("labels.csv: line 3", "gone.png"),
    ),
    "a row without a label": (
        spoilt(4, "im/002.png,,train"),
        "csv",
        ("labels.csv: line 4", "label"),
    ),
    "a split of no name": (
        spoilt(4, "im/002.png,cat,fold"),
        "csv",
        ("labels.csv: line 4", "'fold'"),
    ),
    "a test label of no class": (
        spoilt(15, "im/013.png,emu,test"),
        "csv",
        ("labels.csv: line 15", "emu"),
    ),
    "a table without a column": (table(head="file,y"), "csv", ("labels.csv", "label or class")),
    "one label": (table(each="{file},cat"), "csv", ("classes",)),
    "no table": (lambda root: images(root, a=2), "csv", ("labels.csv", "metadata.csv")),
    "paths of nothing": (
        parquet(image=[f"x/{i}.png" for i in range(10)]),
        "parquet",
        ("train.parquet row 0", "No such file"),
    ),
    "lists": (parquet(image=[[1, 2]] * 10), "parquet", ("'image'", "list<")),
    "no image": (parquet(pixels=[[1, 2]] * 10), "parquet", ("pixels list<",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, kind, words = REFUSED[name]
    root = tmp_path / "set"
    make(root)
    with pytest.raises(UserError) as caught:
        load(f"{kind}:{root}")
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert not check(f"{kind}:{root}").fit


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
@pytest.mark.parametrize("side", [None, 140], ids=["in memory", "one by one"])
def test_turned_photographs_stand_upright(tmp_path: Path, suffix: str, side: int | None) -> None:
    images(tmp_path, suffix, a=8, b=8)
    for i in range(8):
        turned(tmp_path / "a" / f"{i:03d}.{suffix}")
    data = load(f"folder:{tmp_path}", image_size=side or (20, 20))
    found = [i for i in range(len(data.train)) if "/a/" in data.train.ids(i)]
    assert f"{len(found)} of {len(data.train)} training images are turned" in str(data.facts.notes)
    path = Path(data.train.ids(found[0]))
    with open_image(path) as image, open_image(path) as again:
        pixels = np.asarray(again.convert("RGB"))
        stored = pixels if suffix == "tif" else np.rot90(pixels, -1)  # Pillow turns TIFF itself
        assert (np.asarray(convert(image, 3)) == stored).all()
        assert stored.shape == (20, 14, 3)
    record = data.record()
    assert (read_file(path, record, data.image_size) == data.train.read(found[0])).all()
    (note,) = [each for each in check(str(tmp_path)).findings if each.what == "converted images"]
    assert (note.level, note.count) == ("note", 8)


def test_a_size_is_that_of_the_upright_image(tmp_path: Path) -> None:
    images(tmp_path, "jpg", a=6, b=6)
    for file in tmp_path.rglob("*.jpg"):
        turned(file)
    assert load(f"folder:{tmp_path}").image_size == (20, 14)


def test_a_turned_image_with_a_target_in_it_is_refused(tmp_path: Path) -> None:
    images(tmp_path, "jpg", a=1)
    path = tmp_path / "a" / "000.jpg"
    turned(path, 3)
    image = Encoded(path, str(path), placed=True)
    with pytest.raises(UserError, match=r"000\.jpg: EXIF .* mogrify -auto-orient .*000\.jpg"):
        image()
    with pytest.raises(ValueError, match="EXIF"):
        image.check(decode=False)


def deep(root: Path, most: int, count: int = 10) -> None:
    rng = np.random.default_rng(most)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for i in range(count):
            values = rng.integers(0, most + 1, (14, 20)).astype(np.uint16)
            values[0, :2] = 0, most
            Image.fromarray(values).save(root / name / f"{i}.png")


def test_values_of_fewer_bits_are_warned_of_and_scaled(tmp_path: Path) -> None:
    root, other = tmp_path / "ten", tmp_path / "other"
    deep(root, 1020)
    deep(other, 700)
    with pytest.warns(KeymixWarning, match=r"1,020 of 65,535.* --data\.white_level 1023, or auto"):
        plain = load(f"folder:{root}")
    assert any("1,020" in note for note in plain.record().notes)
    assert plain.record().white_level is None
    assert plain.train.images.max() == 4
    (found,) = check(str(root)).of("warning")
    assert "1,020" in found.where[0]
    for level, white in (("auto", 1020), (1023, 1023), (510, 510)):
        data = load(f"folder:{root}", white_level=level)
        assert data.record().white_level == white
        path = Path(data.train.ids(0))
        values = np.asarray(Image.open(path)).astype(float)
        wanted = np.minimum(np.floor(values * 255 / white + 0.5), 255)
        assert (data.train.read(0)[0].numpy() == wanted).all()
        assert (read_file(path, data.record(), data.image_size) == data.train.read(0)).all()
        view = View(size=(14, 20), in_chans=3, mean=(), std=(), crop_pct=1.0, white_level=white)
        analysed = _of_rows(data.train.rows, "", view)
        assert (analysed.read(0) == data.train.read(0)).all()
    one_by_one = load(f"folder:{root}", white_level="auto", image_size=140)
    assert one_by_one.train.images is None
    assert one_by_one.train.read(0).max() > 200
    seen = load(f"folder:{root}", white_level="auto").record()
    config = DataConfig(spec=f"folder:{root}", white_level="auto")
    for spec in (None, f"folder:{other}"):  # scored as the run was trained
        assert data_for(config, seen, spec, seen.image_size).record().white_level == 1020


def test_the_full_sixteen_bits_stay_as_they_are(tmp_path: Path) -> None:
    values = np.arange(65536).reshape(256, 256).astype(np.uint16)
    made = np.asarray(convert(Image.fromarray(values), 1))
    assert (made == (values.astype(int) + 128) // 257).all()


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("\ufeffbackground\r\nred leaf\r\n\r\n", (("background", "red leaf"), None, None)),
        ("0 sky\n100 red leaf\n", (("sky", "red leaf"), (0, 100), None)),
        ("0 0 0 sky\n128 0 9 leaf", (("sky", "leaf"), None, ((0, 0, 0), (128, 0, 9)))),
        ("sky\n\nleaf", "line 2"),
        ("0 sky\nleaf", "line 2"),
        ("sky\nsky", "line 2"),
        ("1 sky\n1 leaf", "line 2"),
        ("0 0 300 sky", "line 1"),
        ("", "line 1"),
    ],
)
def test_classes_stand_in_one_format(tmp_path: Path, text: str, read: Any) -> None:
    path = tmp_path / "classes.txt"
    path.write_bytes(text.encode())
    if isinstance(read, str):
        with pytest.raises(UserError, match=rf"classes\.txt: {read}"):
            read_class_names(path)
    else:
        assert read_class_names(path) == (*read, None)
