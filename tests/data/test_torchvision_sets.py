# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10, CIFAR-100, SVHN and Fashion-MNIST: from archives in the real layouts, made small."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import archives
import numpy as np
import pytest
from PIL import Image

from keymix.data import load
from keymix.errors import UserError

NAMES = ["cifar10", "cifar100", "svhn", "fashion_mnist"]
NOWHERE = "http://127.0.0.1:9"  # the port "discard": nobody listens


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Serve a set's small archives; the server's record of requests comes with the root."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with archives.served(shelf) as (address, asked):

        def put(name: str) -> tuple[list[Path], list[str]]:
            return archives.write(name, shelf, address, monkeypatch), asked

        yield put


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a set's small archives where no address leads to."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    return lambda name: archives.write(name, shelf, NOWHERE, monkeypatch)


def place(name: str, root: Path) -> Path:
    folder = root / "FashionMNIST" / "raw" if name == "fashion_mnist" else root
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def refusal(spec: str) -> str:
    with pytest.raises(UserError) as caught:
        load(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_set_is_downloaded_once_and_its_pixels_arrive_as_they_are(
    online, tmp_path: Path, name: str
) -> None:
    _, asked = online(name)
    data = load(f"{name}:{tmp_path / 'root'}", val_fraction=0.2)
    assert any(line.startswith("GET") for line in asked)
    assert [len(split) for split in data.splits] == [48, 12, 20]
    assert data.image_size == (32, 32)
    assert (data.in_chans, len(data.classes)) == (3, 10)
    assert data.record().cached
    for split in data.splits:
        wanted = archives.pixels(name, split.origin)[split.index]
        assert split.labels.tolist() == archives.labels(split.origin)[split.index].tolist()
        if name != "fashion_mnist":
            assert (split.images.numpy() == wanted).all()
    assert data.test.ids(3) == f"{name} test image 3"
    asked.clear()
    again = load(f"{name}:{tmp_path / 'root'}", val_fraction=0.2)
    assert not asked
    assert again.record() == data.record()


def test_fashion_mnist_is_resized_and_repeated_and_says_so(online, tmp_path: Path) -> None:
    online("fashion_mnist")
    spec = f"fashion_mnist:{tmp_path / 'root'}"
    data = load(spec)
    image = Image.fromarray(archives.pixels("fashion_mnist", "test")[5, 0])
    wanted = np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC))
    assert (data.test.images[5].numpy() == wanted).all()  # all three channels
    notes = data.record().notes
    assert "grey images, repeated to three channels" in notes
    assert "images of 28x28 pixels resized to 32x32 (bicubic)" in notes
    assert data.classes[0] == "T-shirt/top"
    own = load(spec, image_size=28)
    assert (own.test.images[:, 1].numpy() == archives.pixels("fashion_mnist", "test")[:, 0]).all()
    assert not any("resized" in note for note in own.record().notes)


def test_svhn_s_ten_is_zero_and_its_extra_set_is_not_used(online, tmp_path: Path) -> None:
    online("svhn")
    data = load(f"svhn:{tmp_path / 'root'}")
    assert data.classes == tuple("0123456789")
    assert data.test.labels[0] == 0
    assert "the extra training images of SVHN are not used" in data.record().notes


@pytest.mark.parametrize("name", NAMES)
def test_archives_put_there_by_hand_serve_without_a_network(
    offline, tmp_path: Path, name: str
) -> None:
    files, root = offline(name), tmp_path / "root"
    line = refusal(f"{name}:{root}")
    assert f"into {place(name, root)}" in line
    assert all(f"{NOWHERE}/{file.name}" in line for file in files)
    for file in files:
        shutil.copy(file, place(name, root))
    victim = place(name, root) / files[0].name
    victim.write_bytes(victim.read_bytes()[:-40])
    assert str(victim) in refusal(f"{name}:{root}")
    shutil.copy(files[0], victim)
    assert len(load(f"{name}:{root}").test) == archives.TEST


def test_processes_that_start_together_download_once(online, tmp_path: Path) -> None:
    _, asked = online("svhn")
    with ThreadPoolExecutor(4) as pool:
        specs = [f"svhn:{tmp_path / 'root'}"] * 4
        sizes = list(pool.map(lambda spec: len(load(spec).test), specs))
    assert sizes == [archives.TEST] * 4
    # torchvision asks twice a file, the first time for redirections
    assert sorted(asked) == ["GET /test_32x32.mat"] * 2 + ["GET /train_32x32.mat"] * 2
