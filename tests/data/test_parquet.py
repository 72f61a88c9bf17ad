# SPDX-License-Identifier: Apache-2.0
"""Parquet files in Hugging Face's image layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pictures import encoded, picture

from keymix.data import load
from keymix.data.check import check
from keymix.data.sample import Faults, select
from keymix.data.specs import parse
from keymix.errors import UserError

TWENTY = [0, 1] * 10


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


def test_rows_have_images_once_they_are_selected(make_parquet) -> None:
    images = [{"bytes": encoded(i), "path": None} for i in range(20)]
    make_parquet(TWENTY, images=images)
    folder = make_parquet(TWENTY, images=images[::-1], file="train-1.parquet")
    spec, argument = parse(f"parquet:{folder}")
    rows = spec.open(argument, Faults()).rows
    with pytest.raises(RuntimeError, match="select"):
        rows[0].image()
    some = select(rows, np.array([3, 19, 20, 37]))
    assert [row.id.rpartition(" ")[2] for row in some] == ["3", "19", "0", "17"]
    assert [row.target for row in some] == [1, 1, 0, 1]
    again = select(some, np.array([1, 3]))
    for row, seed in zip([*some, *again], (3, 19, 19, 2, 19, 2), strict=True):
        assert (row.image().numpy() == np.asarray(picture(seed)).transpose(2, 0, 1)).all()
    (folder / "train-1.parquet").write_bytes(b"PAR1")
    select(rows, np.arange(20))
    with pytest.raises(UserError, match=r"train-1\.parquet"):
        select(rows, np.array([3, 20]))


def errs(folder: Path, message: str, **options: object) -> None:
    with pytest.raises(UserError) as caught:
        load(f"parquet:{folder}", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("image_size", [16, 120])
def test_broken_images_name_file_and_row(make_parquet, image_size: int) -> None:
    images = [encoded(i) for i in range(20)]
    images[13] = images[13][:50]
    errs(make_parquet(TWENTY, images=images), "parquet row 13", image_size=image_size)
    images[13] = None
    errs(make_parquet(TWENTY, images=images), "row 13: it is empty", image_size=image_size)


def test_damaged_parquet_files_are_named(make_parquet) -> None:
    folder = make_parquet(TWENTY)
    file = folder / "train-00000-of-00001.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:200])
    errs(folder, "is not a readable parquet file")
    file.write_bytes(content[:100] + b"\xff" * 300 + content[400:])
    errs(folder, "train-00000-of-00001.parquet")


def test_training_files_are_missed(make_parquet) -> None:
    errs(make_parquet(TWENTY, file="test-0.parquet"), "no train-*.parquet there, only test-0")


def test_real_cifar10_loads(real_data: Path) -> None:
    data = load(f"parquet:{real_data / 'cifar10'}", limit=200)
    assert data.classes[0] == "airplane"
    assert [len(s) for s in data.splits] == [180, 20, 200]
    for split in data.splits:
        assert (split.labels.bincount() == len(split) // 10).all()
    assert data.image_size == (32, 32)
    assert min(data.mean) > 0.4
    assert max(data.std) < 0.3
