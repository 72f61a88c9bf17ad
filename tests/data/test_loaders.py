# SPDX-License-Identifier: Apache-2.0
"""Order is a function of (seed, epoch), augmentation of (seed, epoch, index); of nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from keymix.data import Augment, ImageData, Loader, load
from keymix.data.decode import to_image
from keymix.data.loaders import Batch, InMemoryBatches, Made, WorkerBatches, _made
from keymix.data.random_parameters import erased_boxes
from keymix.errors import UserError

EVERYTHING = Augment(crop_padding=2, flip=True, rand_augment=(2, 9), erasing=0.5)
FAST = Augment(crop_padding=2, flip=True, erasing=0.5)
WHOLE = Augment(random_resized_crop=(1.0, 1.0))


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load("digits", limit=200)


@pytest.fixture
def photos(make_folder) -> ImageData:
    data = load(f"folder:{make_folder({'a': 12, 'b': 13}, (60, 50))}", image_size=132)
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


def test_workers_leave_the_model_s_random_numbers_alone(photos: ImageData) -> None:
    state = torch.get_rng_state()
    served(train_loader(photos, EVERYTHING, workers=1))
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


def test_workers_follow_the_epoch_and_can_be_iterated_again(photos: ImageData) -> None:
    plain, ahead = (train_loader(photos, EVERYTHING, workers=w, batch_size=5) for w in (0, 2))
    for epoch in (0, 4, 1, 1):
        a, b = served(plain, epoch), served(ahead, epoch)
        assert same(a, b)
        assert list(a) == list(b)


def test_an_abandoned_iteration_does_not_disturb_the_next(photos: ImageData) -> None:
    ahead = train_loader(photos, EVERYTHING, workers=1, batch_size=5)
    next(iter(ahead))
    assert same(served(ahead, 2), served(train_loader(photos, EVERYTHING), 2))


def from_batch(loader: Loader, start: int) -> list[Batch]:
    return list(loader.batches(start=start))


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y)
        for one, two in zip(a, b, strict=True)
        for x, y in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_in_memory_resumes_from_any_batch(digits: ImageData, drop_last: bool) -> None:
    loader = train_loader(digits, EVERYTHING, batch_size=16, drop_last=drop_last)
    loader.set_epoch(3)
    whole = list(loader)
    assert len(whole) == len(loader) == (11 if drop_last else 12)
    for start in (0, 1, 7, len(loader) - 1, len(loader)):
        assert equal(from_batch(loader, start), whole[start:])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_any_batch_of_a_lazy_set(photos: ImageData, workers: int) -> None:
    loader = train_loader(photos, EVERYTHING, batch_size=4, workers=workers)
    whole = list(loader)
    assert len(whole) == len(loader) > 4
    for start in (3, len(loader), 1):
        assert equal(from_batch(loader, start), whole[start:])
    assert equal(list(loader), whole)  # from its start again


def test_a_batch_that_is_not_there_is_refused(digits: ImageData) -> None:
    loader = train_loader(digits, None)
    for start in (-1, len(loader) + 1):
        with pytest.raises(ValueError, match=f"start={start}"):
            loader.batches(start=start)


def test_batches_of_a_rank_go_on_too(digits: ImageData) -> None:
    loader = train_loader(digits, EVERYTHING, batch_size=8, rank=1, world_size=3)
    assert equal(from_batch(loader, 2), list(loader)[2:])


def test_lazy_batches_are_channels_last_and_in_memory_ones_in_order(
    digits: ImageData, photos: ImageData
) -> None:
    for augment in (EVERYTHING, None):
        for workers in (0, 1):
            for batch in train_loader(photos, augment, workers=workers):
                assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert all(batch.images.is_contiguous() for batch in train_loader(digits, augment))


def test_lazy_batches_move_one_ahead_to_a_device(photos: ImageData) -> None:
    """The transfer of the next batch starts before the one in use is done with."""
    loader = train_loader(photos, EVERYTHING, batch_size=4, device="meta")
    moved: list[int] = []
    kept = WorkerBatches._moved

    def watched(self: WorkerBatches, made: Made) -> Made:
        moved.append(len(made.index))
        return kept(self, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerBatches, "_moved", watched)
        for number, batch in enumerate(loader, 1):
            assert batch.images.device.type == batch.targets.device.type == "meta"
            assert batch.index.device.type == "meta"
            assert len(moved) == min(number + 1, len(loader))


def test_rand_augment_first_needs_a_set_in_memory(photos: ImageData) -> None:
    first = Augment(rand_augment=(2, 9), rand_augment_first=True)
    with pytest.raises(UserError, match=r"augment\.rand_augment_first=True needs") as caught:
        train_loader(photos, first)
    assert "\n" not in str(caught.value)
    train_loader(photos, Augment(rand_augment_first=True))  # there is nothing to put first


@pytest.mark.parametrize("kind", ["in memory", "lazy"])
def test_erased_rectangles_have_the_mean_colour(
    kind: str, digits: ImageData, photos: ImageData
) -> None:
    data = digits if kind == "in memory" else photos
    plain, erased = (served(train_loader(data, Augment(erasing=p))) for p in (0.0, 1.0))
    boxes = erased_boxes(np.arange(len(plain)), 1.0, *data.image_size, seed=5, epoch=0)
    for i, image in plain.items():
        top, left, h, w = boxes[i]
        assert h * w > 0
        image[:, top : top + h, left : left + w] = 0.0
        assert torch.equal(image, erased[i])


def test_rand_augment_of_lazy_sets_comes_after_crop_and_flip(photos: ImageData) -> None:
    plain = Augment(flip=True)
    maker = WorkerBatches(partial(_made, photos.train, plain, 5), 0, torch.device("cpu"))
    index = np.arange(12, dtype=np.int64)
    (cropped,) = maker.batches(index, 12, epoch=0)
    augment = replace(plain, rand_augment=(2, 9))
    both = WorkerBatches(partial(_made, photos.train, augment, 5), 0, torch.device("cpu"))
    (made,) = both.batches(index, 12, epoch=0)
    served = InMemoryBatches(cropped.pixels, Augment(rand_augment=(2, 9)), 5, torch.device("cpu"))
    (expected,) = served.batches(index, 12, epoch=0)
    assert torch.equal(made.pixels, expected.pixels)


def test_very_long_images_are_cropped_at_the_centre(make_folder) -> None:
    data = load(f"folder:{make_folder({'a': 4, 'b': 4}, (400, 4))}", image_size=132)
    images = torch.stack(list(served(train_loader(data, WHOLE)).values()))
    assert images.shape[1:] == (3, 132, 132)
    assert images.std() > 0


def test_random_resized_crops_differ_and_cover_the_image(make_folder) -> None:
    data = load(f"folder:{make_folder({'a': 4, 'b': 4}, (150, 140))}", image_size=(130, 129))
    maker = WorkerBatches(partial(_made, data.train, Augment(), 0), 0, torch.device("cpu"))
    index = np.zeros(1, dtype=np.int64)
    crops = [next(maker.batches(index, 1, epoch=epoch)).pixels for epoch in range(5)]
    assert crops[0].shape == (1, 3, 130, 129)
    assert not any(torch.equal(crops[0], other) for other in crops[1:])
    maker = WorkerBatches(partial(_made, data.train, WHOLE, 0), 0, torch.device("cpu"))
    (whole,) = maker.batches(index, 1, epoch=0)
    plain = to_image(data.train.own(0)).resize((129, 130))
    difference = np.abs(whole.pixels[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(plain))
    assert np.median(difference) < 40  # nearly the whole image, squeezed


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
