# SPDX-License-Identifier: Apache-2.0
"""Folders of image files."""

from __future__ import annotations

import gc
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from pictures import picture

from keymix.data import Augment, Loader, load
from keymix.data.sample import Faults, select
from keymix.data.specs import parse
from keymix.errors import UserError


def test_a_flat_folder_gives_up_test_and_validation(make_folder) -> None:
    root = make_folder({"cat": 20, "dog": 10})
    data = load(f"folder:{root}")
    assert data.classes == ("cat", "dog")
    assert [len(s) for s in data.splits] == [22, 2, 6]
    assert data.test.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert "test = 6 images split off from train" in " ".join(data.record().notes)
    for split in data.splits:
        for i in range(len(split)):
            assert Path(split.ids(i)).parent.name == data.classes[split.labels[i]]


def test_rows_are_built_alike_in_another_process(make_folder) -> None:
    root = make_folder({"train/cat": 3, "train/dog/deep": 2, "Test/dog": 2})
    spec, argument = parse(f"folder:{root}")
    rows = spec.open(argument, Faults()).rows
    assert [(row.name, row.target, row.split) for row in rows][2:6] == [
        ("cat/002", 0, "train"),
        ("dog/deep/000", 1, "train"),
        ("dog/deep/001", 1, "train"),
        ("dog/000", 1, "test"),
    ]
    assert [*pickle.loads(pickle.dumps(rows))] == [*rows]
    assert [*select(rows, np.array([1, 5]))] == [rows[1], rows[5]]


def test_classes_of_one_image_stay_in_train(make_folder) -> None:
    data = load(f"folder:{make_folder({'a': 12, 'b': 12, 'rare': 1})}")
    assert data.train.labels.tolist().count(2) == 1
    assert 2 not in data.val.labels.tolist() + data.test.labels.tolist()
    assert "not validated on, for want of a second image: rare" in data.record().notes


def test_common_and_mixed_sizes(make_folder) -> None:
    root = make_folder({"a": 5, "b": 5}, (20, 14))
    assert load(f"folder:{root}").image_size == (14, 20)
    picture(0, (30, 30)).save(root / "b" / "other.png")
    mixed = load(f"folder:{root}")
    assert mixed.image_size == (224, 224)
    assert mixed.train.images is None
    small = load(f"folder:{root}", image_size=24)
    assert small.train.images is not None
    assert small.train.images.shape[1:] == (3, 24, 24)


def test_other_files_and_nested_folders(make_folder) -> None:
    root = make_folder({"a/deep": 4, "b": 5})
    (root / "b" / "notes.txt").write_text("no image")
    (root / "b" / ".hidden.png").write_text("no image")
    (root / ".git").mkdir()
    picture(0).save(root / "loose.png")
    data = load(f"folder:{root}")
    assert sum(map(len, data.splits)) == 9
    assert "1 images outside the class folders are left out" in data.record().notes


def test_a_truncated_file_is_named_when_read_lazily(make_folder, monkeypatch) -> None:
    # The parent waits so long for a worker to end; a worker that is not asked to looks after 5 s.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 4.0)
    data = load(f"folder:{make_folder({'a': 6, 'b': 6}, (132, 132))}")
    assert data.train.images is None
    victim = Path(data.train.ids(2))
    victim.write_bytes(victim.read_bytes()[:-300])  # its header is whole
    for workers in (0, 1):
        loader = Loader(
            data.train, data, batch_size=4, train=True, augment=Augment(), workers=workers
        )
        with pytest.raises(UserError) as caught:
            list(loader)
        assert str(victim) in str(caught.value)
        assert "\n" not in str(caught.value)
    (process,), ended = loader._server._processes, []
    join = process.join

    def joined(timeout: float | None = None) -> None:
        join(timeout)
        ended.append(process.exitcode)

    monkeypatch.setattr(process, "join", joined)
    del loader, caught
    gc.collect()
    assert ended == [0]  # it was asked to end


def test_moving_the_folder_changes_neither_split_nor_fingerprint(
    make_folder, tmp_path: Path
) -> None:
    root = make_folder({"a": 8, "b": 8})
    for image_size in (None, 132):
        before = load(f"folder:{root}", image_size=image_size).record()
        copy = tmp_path / f"copy{image_size}"
        shutil.copytree(root, copy)
        after = load(f"folder:{copy}", image_size=image_size).record()
        assert after.index_sha256 == before.index_sha256
        assert after.fingerprint == before.fingerprint
        picture(99).save(copy / "a" / "000.png")
        changed = load(f"folder:{copy}", image_size=image_size).record()
        assert changed.fingerprint != before.fingerprint


def test_real_photos_load_lazily(real_data: Path, tmp_path: Path) -> None:
    photos = sorted((real_data / "imagenet-samples").rglob("*.JPEG"))
    for i, photo in enumerate(photos):
        folder = tmp_path / ("even" if i % 2 else "odd")
        folder.mkdir(exist_ok=True)
        shutil.copy(photo, folder)
    data = load(f"folder:{tmp_path}")
    assert data.image_size == (224, 224)
    assert data.record().mean_std_of == "all training images"
    assert data.train.read(0).shape == (3, 224, 224)
    loader = Loader(data.train, data, batch_size=5, train=True, augment=Augment(flip=True))
    images = next(iter(loader)).images
    assert images.shape == (5, 3, 224, 224)
    assert 0.3 < images.std() < 3
