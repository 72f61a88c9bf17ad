# SPDX-License-Identifier: Apache-2.0
"""Order is a function of (seed, epoch), augmentation of (seed, epoch, index); of nothing else."""

from __future__ import annotations

import pytest
import torch

from keymix.data import Augment, ImageData, Loader, load
from keymix.errors import UserError

EVERYTHING = Augment(crop_padding=2, flip=True, rand_augment=(2, 9), erasing=0.5)
FAST = Augment(crop_padding=2, flip=True, erasing=0.5)


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load("digits", limit=200)


@pytest.fixture
def photos(make_folder) -> ImageData:
    data = load(f"folder:{make_folder({'a': 12, 'b': 13}, (60, 50))}", image_size=100)
    assert data.train.images is None
    return data


def served(loader: Loader, epoch: int = 0) -> dict[int, torch.Tensor]:
    loader.set_epoch(epoch)
    return {
        int(i): image
        for batch in loader
        for i, image in zip(batch.index, batch.images, strict=True)
    }


def same(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[i], b[i]) for i in a)


def train_loader(data: ImageData, augment: Augment | None, **options) -> Loader:
    options = {"batch_size": 16, "seed": 5} | options
    return Loader(data.train, data, train=True, augment=augment, **options)


@pytest.mark.parametrize("augment", [FAST, EVERYTHING], ids=["fast", "everything"])
@pytest.mark.parametrize(
    "options", [{"batch_size": 7}, {"workers": 2}, {"batch_size": 180}], ids=str
)
def test_augmentation_is_independent_of_batches_and_workers(
    digits: ImageData, augment: Augment, options: dict
) -> None:
    assert same(
        served(train_loader(digits, augment), 3),
        served(train_loader(digits, augment, **options), 3),
    )


def test_augmentation_is_independent_of_other_random_numbers(digits: ImageData) -> None:
    before = served(train_loader(digits, EVERYTHING))
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    after = served(train_loader(digits, EVERYTHING))
    assert same(before, after)
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_leave_the_model_s_random_numbers_alone(digits: ImageData) -> None:
    state = torch.get_rng_state()
    served(train_loader(digits, EVERYTHING, workers=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_lazy_sets_keep_the_same_promise(photos: ImageData) -> None:
    base = served(train_loader(photos, EVERYTHING), 1)
    assert same(base, served(train_loader(photos, EVERYTHING, batch_size=3, workers=2), 1))
    again = served(train_loader(photos, EVERYTHING), 2)
    assert not any(torch.equal(base[i], again[i]) for i in base)


def test_epochs_and_seeds_differ_in_order_and_augmentation(digits: ImageData) -> None:
    base = served(train_loader(digits, FAST))
    for other in (
        served(train_loader(digits, FAST), 1),
        served(train_loader(digits, FAST, seed=6)),
    ):
        assert base.keys() == other.keys()
        assert list(base) != list(other)
        assert sum(torch.equal(base[i], other[i]) for i in base) < 0.2 * len(base)


def test_workers_follow_the_epoch_and_can_be_iterated_again(digits: ImageData) -> None:
    plain, ahead = (train_loader(digits, EVERYTHING, workers=w) for w in (0, 2))
    for epoch in (0, 4, 1, 1):
        a, b = served(plain, epoch), served(ahead, epoch)
        assert same(a, b)
        assert list(a) == list(b)


def test_an_abandoned_iteration_does_not_disturb_the_next(digits: ImageData) -> None:
    ahead = train_loader(digits, EVERYTHING, workers=1)
    next(iter(ahead))
    assert same(served(ahead, 2), served(train_loader(digits, EVERYTHING), 2))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_what_one_process_sees(digits: ImageData, world_size: int) -> None:
    ranks = [
        served(train_loader(digits, EVERYTHING, rank=r, world_size=world_size, batch_size=4))
        for r in range(world_size)
    ]
    assert same(
        {k: v for rank in ranks for k, v in rank.items()}, served(train_loader(digits, EVERYTHING))
    )


def test_the_batch_of_all_ranks_is_the_batch_of_one(digits: ImageData) -> None:
    whole = [b.index.tolist() for b in train_loader(digits, None, batch_size=20)]
    parts = [
        [b.index.tolist() for b in train_loader(digits, None, batch_size=10, rank=r, world_size=2)]
        for r in (0, 1)
    ]
    assert [sorted(b) for b in whole] == [sorted(a + b) for a, b in zip(*parts, strict=True)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_training_ranks_have_equally_many_batches(digits: ImageData, drop_last: bool) -> None:
    world_size = 7  # 180 images are no multiple of it
    sizes = []
    for rank in range(world_size):
        loader = train_loader(
            digits, None, batch_size=4, rank=rank, world_size=world_size, drop_last=drop_last
        )
        sizes.append([len(batch.index) for batch in loader])
        assert len(loader) == len(sizes[-1])
    assert all(s == sizes[0] for s in sizes)
    assert set(sizes[0]) == ({4} if drop_last else {4, 2})


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_evaluation_serves_every_image_once_unchanged(digits: ImageData, world_size: int) -> None:
    seen: list[int] = []
    mean, std = digits.mean[0], digits.std[0]
    for rank in range(world_size):
        loader = Loader(
            digits.test,
            digits,
            batch_size=16,
            train=False,
            augment=FAST,
            rank=rank,
            world_size=world_size,
        )
        for batch in loader:
            seen += batch.index.tolist()
            assert torch.equal(batch.targets, digits.test.labels[batch.index])
            assert digits.test.images is not None
            expected = (digits.test.images[batch.index].double() / 255 - mean) / std
            torch.testing.assert_close(batch.images, expected.float(), atol=1e-5, rtol=1e-5)
    assert sorted(seen) == list(range(len(digits.test)))
    if world_size == 1:
        assert seen == sorted(seen)


def test_lazy_evaluation_serves_what_read_gives(photos: ImageData) -> None:
    loader = Loader(photos.test, photos, batch_size=2, train=False)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (photos.mean, photos.std))
    for i, image in served(loader).items():
        expected = (photos.test.read(i) / 255 - mean) / std
        torch.testing.assert_close(image, expected, atol=1e-5, rtol=1e-5)


def test_training_does_not_write_into_the_cache(digits: ImageData) -> None:
    assert digits.train.images is not None
    before = digits.train.images.clone()
    for augment in (FAST, EVERYTHING, Augment(flip=True), Augment(erasing=1.0), None):
        served(train_loader(digits, augment))
    assert torch.equal(digits.train.images, before)


def test_normalised_training_images_have_mean_0_and_deviation_1(digits: ImageData) -> None:
    images = torch.stack(list(served(train_loader(digits, None)).values()))
    assert images.mean().abs() < 1e-4
    assert (images.std() - 1).abs() < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"workers": -1}, "workers=-1"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"batch_size": 181, "drop_last": True}, "leaves no full batch of the 180 images of train"),
    ],
)
def test_bad_values_are_named(digits: ImageData, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_loader(digits, None, **options)
