# SPDX-License-Identifier: Apache-2.0
"""Shards are written whole, and streamed so that every image is served once an epoch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import encoded

from keymix.data import Augment, ImageData, Loader, Row, load, sharding, shards
from keymix.data.check import check
from keymix.data.headers import read_headers
from keymix.data.loaders import Batch
from keymix.data.sharding import write_shards
from keymix.data.shards import INDEX, SIDE_BY_SIDE
from keymix.errors import UserError

PER_SHARD = 120  # of 1,213 digits: eleven shards, the last of 13
READERS = {"one": (1, 0), "ranks": (3, 0), "workers": (1, 3), "both": (2, 2), "many": (5, 2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The digits as shards of both layouts."""
    base = tmp_path_factory.mktemp("shards")
    for layout in sharding.LAYOUTS:
        write_shards("digits", base / layout, layout=layout, images=PER_SHARD)
    return {layout: base / layout for layout in sharding.LAYOUTS}


@pytest.fixture(scope="module")
def data(folders: dict[str, Path]) -> ImageData:
    return load(f"stream:{folders['parquet']}")


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load("digits")


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["parquet"], tmp_path / "copy"))


def loader(data: ImageData, *, rank: int = 0, size: int = 1, workers: int = 0, **more) -> Loader:
    options = {"batch_size": 32, "seed": 5, "augment": Augment(flip=True), "train": True} | more
    return Loader(data.train, data, rank=rank, world_size=size, workers=workers, **options)


def order(data: ImageData, size: int, workers: int, epoch: int = 0, **more) -> list[list[int]]:
    every = [loader(data, rank=rank, size=size, workers=workers, **more) for rank in range(size)]
    for each in every:
        each.set_epoch(epoch)
    assert len({len(each) for each in every}) == 1  # a rank that has more would wait for ever
    return [each.order().tolist() for each in every]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y)
        for one, two in zip(a, b, strict=True)
        for x, y in zip(one, two, strict=True)
    )


def refusal(what: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        what()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("size", "workers"), READERS.values(), ids=READERS)
@pytest.mark.parametrize("batch_size", [32, 50])
def test_every_image_is_served_once_over_ranks_and_workers(
    data: ImageData, size: int, workers: int, batch_size: int
) -> None:
    for epoch in (0, 3):
        served = order(data, size, workers, epoch, batch_size=batch_size)
        whole = [*chain(*served)]
        assert {*whole} == {*range(1213)}
        assert len(whole) - 1213 < size  # at most devices - 1 are served twice
        assert len({len(each) for each in served}) == 1


def test_order_is_of_seed_and_epoch_alone(data: ImageData) -> None:
    first = order(data, 2, 2, 1)
    assert first == order(data, 2, 2, 1)
    for other in (order(data, 2, 2, 2), order(data, 2, 2, 1, seed=6)):
        assert sum(a == b for a, b in zip(chain(*first), chain(*other), strict=True)) < 60


def test_neighbours_in_an_epoch_are_of_many_shards(data: ImageData) -> None:
    (served,) = order(data, 1, 0)
    assert len({i // PER_SHARD for i in served[:32]}) >= SIDE_BY_SIDE - 2
    assert sum(b - a == 1 for a, b in pairwise(served)) < 30
    firsts = {
        frozenset(i // PER_SHARD for i in order(data, 1, 0, epoch)[0][:900]) for epoch in range(4)
    }
    assert len(firsts) > 1  # shards are in another order in another epoch


def test_no_more_than_a_buffer_is_read_ahead(data: ImageData, monkeypatch) -> None:
    monkeypatch.setattr(shards, "BUFFER", 100)
    stream = data.train.stream
    assert stream is not None
    blocks = [*stream.blocks(50, 700, seed=0, epoch=1)]
    assert max(map(len, blocks)) == 100
    assert sum(map(len, blocks)) == 700
    assert all(len({i // PER_SHARD for i in block}) <= SIDE_BY_SIDE for block in blocks)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_any_batch(data: ImageData, workers: int) -> None:
    served = loader(data, rank=1, size=2, workers=workers)
    served.set_epoch(2)
    whole = list(served)
    assert np.concatenate([each.index for each in whole]).tolist() == served.order().tolist()
    for start in (7, len(whole)):
        fresh = loader(data, rank=1, size=2, workers=workers)  # as after a kill
        fresh.set_epoch(2)
        assert same([*fresh.batches(start=start)], whole[start:])
    assert same([*served.batches(start=3)], whole[3:])
    assert same([*served], whole)


def test_an_image_s_augmentation_is_of_seed_epoch_and_position(data: ImageData) -> None:
    a, b = (
        {
            int(i): image
            for batch in loader(data, **how)
            for image, i in zip(batch.images, batch.index, strict=True)
        }
        for how in ({"batch_size": 50}, {"batch_size": 600})
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[i], b[i]) for i in a)


def test_both_layouts_stream_the_same_from_here_and_elsewhere(
    data: ImageData, folders: dict[str, Path]
) -> None:
    import fsspec

    fsspec.filesystem("memory").put(str(folders["parquet"]), "/digits", recursive=True)
    expected = [*loader(data, workers=2)]
    for spec in (f"stream:{folders['webdataset']}", "stream:memory://digits"):
        other = load(spec)
        assert other.facts.fingerprint == data.facts.fingerprint
        assert same([*loader(other, workers=2)], expected)


def test_shards_hold_the_images_of_each_split(data: ImageData, digits: ImageData) -> None:
    assert data.classes == digits.classes
    assert (data.mean, data.std) == (digits.mean, digits.std)
    for name in ("val", "test"):
        one, other = getattr(data, name), getattr(digits, name)
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    plain = Loader(data.train, data, batch_size=100, train=False)
    assert torch.cat([each.index for each in plain]).tolist() == [*range(1213)]
    stream = data.train.stream
    assert stream is not None
    assert known(stream.fetch(np.arange(1213)).values()) == known(digits.train.rows)


def known(rows: Iterable[Row]) -> list[tuple[bytes, int]]:
    return sorted((row.image().numpy().tobytes(), int(row.target)) for row in rows)


def test_one_image_is_read_by_its_position(data: ImageData) -> None:
    batch = next(iter(Loader(data.train, data, batch_size=200, train=False)))
    i = PER_SHARD + 7
    assert data.train.ids(i).endswith("train-00001.parquet row 7")
    assert torch.equal(data.prepared(data.train.read(i)[None])[0], batch.images[i])
    assert data.train.target(i) == batch.targets[i]


def test_what_needs_all_labels_refuses_a_stream(data: ImageData) -> None:
    assert "parquet:PATH" in refusal(lambda: data.train.labels)
    assert "is a stream" in refusal(lambda: check(data.spec))
    assert "is a stream" in refusal(lambda: write_shards(data.spec, Path("nowhere")))
    assert "is a stream" in refusal(lambda: read_headers(data.spec))


@pytest.mark.parametrize("option", [{"limit": 100}, {"skip_corrupt": True}, {"white_level": 9}])
def test_options_of_maps_are_refused(folders: dict[str, Path], option: dict) -> None:
    said = refusal(lambda: load(f"stream:{folders['parquet']}", **option))
    assert said.startswith(f"data.{next(iter(option))} = ")


def test_fewer_shards_than_readers_are_refused(data: ImageData) -> None:
    assert len(data.train.stream.shards) == 11
    loader(data, size=5, workers=2)
    said = refusal(lambda: loader(data, size=4, workers=3))
    assert said.startswith("11 training shards are fewer than the 12 readers: 4 devices x 3")
    assert "--images-per-shard" in said


@pytest.mark.parametrize(("fault", "workers"), [("damaged", 0), ("gone", 2), ("short", 0)])
def test_a_shard_that_breaks_in_mid_epoch_is_named(copied: Path, fault: str, workers: int) -> None:
    data = load(f"stream:{copied}")
    served = loader(data, workers=workers, batch_size=16)
    shard = copied / "train-00009.parquet"
    other = copied / "train-00010.parquet"  # of fewer images
    broken = {"damaged": lambda: shard.write_bytes(shard.read_bytes()[:900]), "gone": shard.unlink}
    broken.get(fault, lambda: shutil.copy(other, shard))()
    said = refusal(lambda: [*served])
    assert said.startswith(f"shard {shard} ")
    assert "last checkpoint" in said
    assert ("ends after 13 of 120 images" in said) == (fault == "short")


def test_hugging_face_s_parquet_files_need_no_index(make_parquet) -> None:
    for k in range(4):
        make_parquet([0, 1] * 10, file=f"data/train-{k}-of-4.parquet", first_seed=20 * k)
    folder = make_parquet([1, 0, 1], file="data/test-0.parquet", first_seed=100)
    data = load(f"stream:{folder}")
    assert (len(data.train), len(data.val), len(data.test)) == (60, 20, 3)
    assert data.classes == ("cat", "dog")
    assert "one of the shards of train" in " ".join(data.facts.notes)
    assert {*chain(*order(data, 1, 3))} == {*range(60)}
    (batch,) = Loader(data.train, data, batch_size=100, train=False)
    assert batch.targets.tolist() == [0, 1] * 30


def test_a_damaged_image_is_named_with_its_shard(make_parquet) -> None:
    images = [{"bytes": encoded(i), "path": None} for i in range(12)]
    for k in range(3):
        images[5] = {"bytes": b"no image" if k == 1 else encoded(5), "path": None}
        make_parquet([0, 1] * 6, file=f"train-{k}.parquet", images=images)
    folder = make_parquet([0, 1], file="test-0.parquet")
    make_parquet([0, 1], file="validation-0.parquet")
    said = refusal(lambda: load(f"stream:{folder}"))
    place = f"{folder}/train-1.parquet row 5"
    assert said == f"cannot read image {place}: not an image. Write its shard again."


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere", "there is no 'nowhere'"),
        ("http://127.0.0.1:9/shards", "127.0.0.1"),
        ("no-such-protocol://x", "no-such-protocol"),
    ],
)
def test_an_address_that_cannot_be_reached_is_named(spec: str, said: str) -> None:
    found = refusal(lambda: load(f"stream:{spec}"))
    assert found.startswith(f"data stream:{spec}")
    assert said in found


def test_without_datasets_it_says_what_to_install(folders, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = refusal(lambda: load(f"stream:{folders['parquet']}"))
    assert "keymix[stream]" in said


def test_shards_are_written_whole_or_not_at_all(make_folder, tmp_path: Path) -> None:
    photos = make_folder({"a": 6, "b": 6})
    out = tmp_path / "shards"
    write_shards(f"folder:{photos}", out, images=4)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    (photos / "b" / "002.png").write_bytes(b"no image")
    said = refusal(lambda: write_shards(f"folder:{photos}", out, images=3))
    assert "002.png" in said
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert INDEX in before
    assert {each.name for each in tmp_path.iterdir()} == {"images", "shards"}


@pytest.mark.parametrize("spec", ["moving_digits:20", "masks:x"])
def test_only_images_with_a_class_each_are_sharded(spec: str, tmp_path: Path) -> None:
    assert "a class each" in refusal(lambda: write_shards(spec, tmp_path / "x"))
