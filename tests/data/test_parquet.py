# SPDX-License-Identifier: Apache-2.0
"""Parquet files in Hugging Face's image layout."""

from __future__ import annotations

import datetime
import decimal
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import encoded, picture
from PIL import Image

from keymix.cli import main
from keymix.data import load
from keymix.data.check import check
from keymix.data.sources import parquet as cells
from keymix.errors import UserError

TWENTY = [0, 1] * 10
POOLS: list[Any] = []  # what was allocated from a pool may outlive a test


def test_train_and_test_files_are_read(make_parquet) -> None:
    make_parquet(TWENTY)
    folder = make_parquet([1, 0, 1], file="test-00000-of-00001.parquet", first_seed=100)
    data = load(f"parquet:{folder}")
    assert data.classes == ("cat", "dog")
    assert data.image_size == (16, 16)
    assert [len(s) for s in data.splits] == [18, 2, 3]
    assert data.test.labels.tolist() == [1, 0, 1]
    assert data.test.images is not None
    assert (data.test.images[1].numpy() == np.asarray(picture(101)).transpose(2, 0, 1)).all()


def test_every_image_stays_with_its_label_and_row_across_files_and_row_groups(make_parquet) -> None:
    make_parquet(TWENTY, file="train-00000-of-00002.parquet")
    folder = make_parquet(TWENTY[::-1], file="train-00001-of-00002.parquet", first_seed=20)
    data = load(f"parquet:{folder}", val_fraction=0.3)
    seen = set()
    for split in data.splits:
        for i in range(len(split)):
            file, row = split.ids(i).rsplit(" row ", 1)
            number = int(row) + (20 if "00001-of" in file else 0)
            seen.add(number)
            assert split.labels[i] == (TWENTY + TWENTY[::-1])[number]
            expected = np.asarray(picture(number)).transpose(2, 0, 1)
            assert (split.read(i).numpy() == expected).all()
    assert seen == set(range(40))


def test_validation_without_test_becomes_the_test_split(make_parquet) -> None:
    make_parquet(TWENTY, file="data/train-0.parquet")
    folder = make_parquet([0, 1], file="data/validation-0.parquet", first_seed=50)
    data = load(f"parquet:{folder}")
    assert len(data.test) == 2
    assert data.test.origin == "val"
    assert "test = the source's validation split" in " ".join(data.record().notes)


def test_hidden_test_labels_are_no_test_split(make_parquet) -> None:
    make_parquet(TWENTY)
    folder = make_parquet([-1, -1], file="test-0.parquet")
    data = load(f"parquet:{folder}")
    assert len(data.test) == 4
    assert "hidden" in " ".join(data.record().notes)


@pytest.mark.parametrize(
    ("image_column", "label_column"), [("img", "fine_label"), ("image", "labels")]
)
def test_usual_names_serve_without_metadata(
    make_parquet, image_column: str, label_column: str
) -> None:
    folder = make_parquet(
        [5, 7] * 10, names=None, image_column=image_column, label_column=label_column
    )
    data = load(f"parquet:{folder / 'train-00000-of-00001.parquet'}")
    assert data.classes == ("5", "7")
    assert "test = 4 images split off from train" in " ".join(data.record().notes)


def test_columns_of_any_name_are_found_by_their_type(make_parquet) -> None:
    folder = make_parquet(TWENTY, image_column="photo", label_column="species")
    assert load(f"parquet:{folder}").classes == ("cat", "dog")


def test_text_labels_are_sorted_classes(make_parquet) -> None:
    folder = make_parquet(["b", "a"] * 10, names=None)
    data = load(f"parquet:{folder}")
    assert data.classes == ("a", "b")
    row = int(data.train.ids(0).rsplit(" ", 1)[1])
    assert data.train.labels[0] == (row + 1) % 2


def test_images_may_be_plain_bytes_or_paths(make_parquet) -> None:
    plain = load(f"parquet:{make_parquet(TWENTY, images=[encoded(i) for i in range(20)])}")
    folder = make_parquet(TWENTY, images=[f"{i}.png" for i in range(20)])
    for i in range(20):
        (folder / f"{i}.png").write_bytes(encoded(i))
    assert load(f"parquet:{folder}").record().fingerprint == plain.record().fingerprint


def test_the_fingerprint_notices_a_changed_image_and_a_changed_label(make_parquet) -> None:
    def fingerprint(labels: list[int], first_seed: int = 0) -> str:
        folder = make_parquet(labels, first_seed=first_seed)
        return load(f"parquet:{folder}").record().fingerprint

    base = fingerprint(TWENTY)
    assert fingerprint(TWENTY) == base
    assert fingerprint(TWENTY, first_seed=1) != base
    assert fingerprint([1, 0, *TWENTY[2:]]) != base


def errs(folder: Path, message: str, **options: object) -> None:
    with pytest.raises(UserError) as caught:
        load(f"parquet:{folder}", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_without_labels_are_refused(make_parquet) -> None:
    errs(make_parquet(None, count=4), "has no labels (columns: image)")


def test_files_without_images_are_refused(make_parquet) -> None:
    errs(make_parquet(TWENTY, names=None, images=list(range(20))), "holds int64")
    errs(
        make_parquet(TWENTY, names=None, image_column="size", images=list(range(20))),
        "has no image column",
    )


def test_bad_labels_name_file_and_row(make_parquet) -> None:
    errs(make_parquet([0, 1, 2, 0]), "parquet row 2: 'label' is 2, which is no class")
    errs(make_parquet([0, 1, None, 0]), "row 2: 'label' is missing")
    errs(make_parquet([0, 1, None, 0], names=None), "row 2: 'label' is missing")
    errs(make_parquet([0.5, 1.5] * 4, names=None), "labels in column 'label' are double")


NO_LABELS: dict[str, Any] = {
    "floats": [0.0, 1.0],
    "not a number": [0.0, float("nan")],
    "half floats": pa.array([0, 1], pa.int64()).cast(pa.float16()),
    "nothing": [None, None],
    "missing numbers": pa.array([None, None], pa.int64()),
    "missing text": pa.array([None, None], pa.string()),
    "hidden": [-1, -1],
    "lists": [[0], [1]],
    "structs": [{"a": 0}, {"a": 1}],
    "maps": pa.array([[("a", 1)], [("b", 1)]], pa.map_(pa.string(), pa.int64())),
    "bytes": [b"a", b"b"],
    "decimals": [decimal.Decimal("0.5"), decimal.Decimal("1.5")],
    "times": [datetime.datetime(2020, 1, 1), datetime.datetime(2021, 1, 1)],
    "durations": pa.array([1, 2], pa.duration("s")),
    "encoded floats": pa.array([0.5, 1.5]).dictionary_encode(),
    "pages of text": ["a", "b" * 5000],
}


@pytest.mark.parametrize("kind", NO_LABELS)
def test_labels_that_name_no_class_get_one_verdict(
    make_parquet, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    labels = pa.concat_arrays([pa.array(NO_LABELS[kind])] * 6)
    folder = make_parquet(labels, names=None)
    with pytest.raises(UserError) as refused:
        load(f"parquet:{folder}")
    assert "'label'" in str(refused.value)
    assert main(["data", "check", str(folder)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"verdict\tparquet:{folder}: stops training: ")
    assert str(refused.value) in text


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (pa.array([True, False]), ("False", "True")),
        (pa.array([2**63, 7], pa.uint64()), ("7", str(2**63))),
        (pa.array(["b", "a"]).dictionary_encode(), ("a", "b")),
        (pa.array([4, 3]).dictionary_encode(), ("3", "4")),
        (pa.array(["b", "a"], pa.large_string()), ("a", "b")),
        (pa.array(["b", "a"], pa.string_view()), ("a", "b")),
    ],
)
def test_whole_numbers_and_text_of_every_type_name_classes(
    make_parquet, labels: Any, classes: tuple[str, ...]
) -> None:
    folder = make_parquet(pa.concat_arrays([labels] * 8), names=None)
    data = load(f"parquet:{folder}")
    assert data.classes == classes
    row = int(data.train.ids(0).rsplit(" ", 1)[1])
    assert classes[data.train.labels[0]] == str(labels[row % 2])
    assert check(str(folder)).fit


def test_other_writers_notes_are_passed_over(make_parquet) -> None:
    folder = make_parquet(TWENTY)
    file = folder / "train-00000-of-00001.parquet"
    for note in ("[" * 100_000, '{"info": {"features": [1]}}', "7", '{"info": 3}'):
        table = pq.read_table(file).replace_schema_metadata({"huggingface": note})
        pq.write_table(table, file)
        assert load(f"parquet:{folder}").classes == ("0", "1")


@contextmanager
def unpacked() -> Iterator[Any]:
    """Counts what Arrow unpacks."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.slow
@pytest.mark.parametrize("written", [{"row_group_size": 1}, {}, {"use_dictionary": False}], ids=str)
def test_a_small_file_fills_no_memory(
    make_parquet, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    """20 images of 3 MB in a file of a few kilobytes, 60 MB, read 5 MiB at a time."""
    monkeypatch.setattr(cells, "_BATCH", 5 << 20)
    monkeypatch.setattr(cells, "_JOINED", 1 << 20)
    folder = make_parquet(TWENTY)
    file = folder / "train-00000-of-00001.parquet"
    table = pq.read_table(file)
    images = pa.array([{"bytes": bytes(3_000_000), "path": None}] * 20, table["image"].type)
    pq.write_table(table.set_column(0, "image", images), file, compression="zstd", **written)
    del table, images
    assert file.stat().st_size < 60_000
    with unpacked() as pool:
        errs(folder, "row 0: ", cell_mib=2)
        errs(folder, "data.cell_mib", cell_mib=2)
        (finding,) = check(str(folder), cell_mib=2).of("stops")
        assert (finding.what, finding.count) == ("broken images", 20)
        assert pool.max_memory() < 40_000_000


def test_large_scans_pass_and_the_bound_can_be_raised(make_parquet) -> None:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 1 << 16, (1000, 1000), dtype=np.uint16)
    Image.fromarray(noise).save(stream, "PNG", compress_level=1)  # 2 MB
    images = [{"bytes": encoded(i), "path": None} for i in range(20)]
    images[3]["bytes"] = stream.getvalue()
    folder = make_parquet(TWENTY, images=images)
    assert check(str(folder)).fit
    report = check(str(folder), cell_mib=1)
    (finding,) = report.of("stops")
    assert finding.count == 1
    assert finding.where[0].startswith(f"{folder}/train-00000-of-00001.parquet row 3: ")
    errs(folder, "row 3: ", cell_mib=1, image_size=120)
    assert len(load(f"parquet:{folder}", cell_mib=2, image_size=16).train)
    assert load(f"parquet:{folder}", cell_mib=1, skip_corrupt=True).record().left_out_count == 1


def test_the_bound_of_cells_is_for_parquet_alone(make_folder) -> None:
    root = make_folder({"a": 4, "b": 4})
    with pytest.raises(UserError, match=r"data\.cell_mib = 100: data folder:"):
        load(f"folder:{root}", cell_mib=100)
    with pytest.raises(UserError, match=r"data\.cell_mib = 100: data "):
        check(str(root), cell_mib=100)


def test_more_rows_than_bytes_are_refused(make_parquet) -> None:
    folder = make_parquet(TWENTY)
    file = folder / "train-00000-of-00001.parquet"
    kind = pq.read_schema(file).field("image").type
    table = pa.table({"image": pa.nulls(1 << 20, kind), "label": pa.array([0] * (1 << 20))})
    pq.write_table(table, file)
    errs(folder, "claims 1,048,576 rows")


def test_a_damaged_row_group_leaves_the_others(make_parquet) -> None:
    folder = make_parquet(TWENTY)
    file = folder / "train-00000-of-00001.parquet"
    group = pq.ParquetFile(file).metadata.row_group(1).column(0)
    content = bytearray(file.read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    file.write_bytes(bytes(content))
    (finding,) = check(str(folder)).of("stops")
    rows = [int(line.partition(" row ")[2].partition(":")[0]) for line in finding.where]
    assert rows == list(range(7, 14))


def test_one_class_and_no_rows_are_refused(make_parquet) -> None:
    errs(make_parquet([1] * 8), "one class only")
    errs(make_parquet([], images=pa.array([], pa.binary())), "no rows")


@pytest.mark.parametrize("image_size", [16, 120])
def test_broken_images_name_file_and_row(make_parquet, image_size: int) -> None:
    images = [encoded(i) for i in range(20)]
    images[13] = images[13][:50]
    errs(make_parquet(TWENTY, images=images), "parquet row 13", image_size=image_size)
    images[13] = None
    errs(make_parquet(TWENTY, images=images), "row 13: the image is empty", image_size=image_size)


def test_damaged_parquet_files_are_named(make_parquet) -> None:
    folder = make_parquet(TWENTY)
    file = folder / "train-00000-of-00001.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:200])
    errs(folder, "is not a readable parquet file")
    file.write_bytes(content[:100] + b"\xff" * 300 + content[400:])
    errs(folder, "train-00000-of-00001.parquet")


def test_missing_paths_and_other_files_are_named(make_parquet, tmp_path: Path) -> None:
    errs(tmp_path / "nowhere", "there is no")
    (tmp_path / "empty").mkdir()
    errs(tmp_path / "empty", "no *.parquet files")
    errs(make_parquet(TWENTY, file="test-0.parquet"), "no train-*.parquet next to test-0.parquet")


def test_real_cifar10_loads(real_data: Path) -> None:
    data = load(f"parquet:{real_data / 'cifar10'}", limit=200)
    assert data.classes[0] == "airplane"
    assert [len(s) for s in data.splits] == [180, 20, 200]
    for split in data.splits:
        assert (split.labels.bincount() == len(split) // 10).all()
    assert data.image_size == (32, 32)
    assert min(data.mean) > 0.4
    assert max(data.std) < 0.3
