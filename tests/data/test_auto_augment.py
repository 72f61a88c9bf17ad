# SPDX-License-Identifier: Apache-2.0
"""timm's RandAugment and noise in erased rectangles: a function of (seed, epoch, index) too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from keymix.data import Augment, ImageData, Loader, load
from keymix.data.pixels import Noise
from keymix.data.rand_augment import AutoAugment
from keymix.data.random_parameters import erased_boxes
from keymix.errors import UserError

CONFIG = "rand-m9-mstd0.5-inc1"
NOISY = Augment(auto_augment=CONFIG, flip=True, erasing=0.5, erasing_fill="noise")


@pytest.fixture
def photos(make_folder) -> ImageData:
    data = load(f"folder:{make_folder({'a': 12, 'b': 13}, (60, 50))}", image_size=132)
    assert data.train.images is None
    return data


def served(data: ImageData, augment: Augment, epoch: int = 0, **options) -> dict[int, torch.Tensor]:
    options = {"batch_size": 7, "seed": 5} | options
    loader = Loader(data.train, data, train=True, augment=augment, **options)
    loader.set_epoch(epoch)
    return {
        int(i): image
        for batch in loader
        for i, image in zip(batch.index, batch.images, strict=True)
    }


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"workers": 2}], ids=str)
def test_an_image_is_augmented_alike_whatever_comes_before_it(photos, options: dict) -> None:
    wanted = served(photos, NOISY)
    random.seed(99)
    np.random.seed(99)
    found = served(photos, NOISY, **options)
    assert all(torch.equal(found[i], image) for i, image in wanted.items())
    for other in ({"epoch": 1}, {"seed": 6}):
        changed = served(photos, NOISY, **other)
        assert sum(torch.equal(changed[i], image) for i, image in wanted.items()) < 3


def test_the_callers_random_states_stay(photos: ImageData) -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    served(photos, NOISY)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_operations_are_timms() -> None:
    noise = np.random.default_rng(0)
    pixels = noise.integers(0, 256, (6, 3, 40, 50), dtype=np.uint8)
    index = np.arange(6, dtype=np.int64)
    ours = AutoAugment(CONFIG, 3, 40, 50)(pixels.copy(), index, seed=1, epoch=2)
    theirs = rand_augment_transform(CONFIG, {"translate_const": 18})
    from keymix.data.streams import Stream, hash64

    for k, key in enumerate(hash64(1, 2, Stream.RAND_AUGMENT, index).tolist()):
        random.seed(key)
        np.random.seed(key % 2**32)
        wanted = np.asarray(theirs(Image.fromarray(pixels[k].transpose(1, 2, 0))))
        assert np.array_equal(ours[k].transpose(1, 2, 0), wanted)
    assert (ours != pixels).any((1, 2, 3)).sum() >= 3


def test_erased_rectangles_show_noise_of_their_own(photos: ImageData) -> None:
    plain = served(photos, Augment(erasing=0.0))
    noisy = served(photos, Augment(erasing=1.0, erasing_fill="noise"))
    boxes = erased_boxes(np.arange(len(plain)), 1.0, *photos.image_size, seed=5, epoch=0)
    shown = []
    for i, image in plain.items():
        top, left, h, w = boxes[i]
        inside = torch.zeros(photos.image_size, dtype=torch.bool)
        inside[top : top + h, left : left + w] = True
        assert torch.equal(noisy[i][:, ~inside], image[:, ~inside])
        shown.append(noisy[i][:, inside].flatten())
    values = torch.cat(shown)
    assert abs(float(values.mean())) < 0.05
    assert abs(float(values.std()) - 1) < 0.05


def test_noise_is_a_window_of_its_own_for_each_sample_and_epoch() -> None:
    noise = Noise(3, 8, 9, seed=1, device=torch.device("cpu"))
    index = torch.tensor([4, 5, 6])
    first = noise(index, 0)
    assert first.shape == (3, 3, 8, 9)
    assert torch.equal(noise(index[1:], 0), first[1:])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(noise(index, 1), first)


def test_rows_and_columns_of_a_window_are_drawn_apart() -> None:
    H, W, n = 4, 4, 400
    noise = Noise(1, H, W, seed=1, device=torch.device("cpu"))
    index = torch.arange(n)
    windows = noise(index, 0)[:, 0]
    places = noise._field[0].unfold(0, H, 1).unfold(1, W, 1)  # every window, by its corner
    equal = (windows[:, None, None] == places).flatten(3).all(-1)
    assert torch.equal(equal.flatten(1).sum(1), torch.ones(n, dtype=torch.long))
    seen = equal.sum(0)  # how often each corner is drawn: 16 times of 400, were all alike
    assert seen.shape == (H + 1, W + 1)
    assert seen.min() >= 4
    assert seen.max() <= 36


def test_sets_it_cannot_serve_are_refused(make_folder) -> None:
    digits = load("digits", limit=50)
    with pytest.raises(UserError, match=r"kept in memory.*augment\.rand_augment"):
        Loader(digits.train, digits, batch_size=8, train=True, augment=Augment(auto_augment=CONFIG))
    with pytest.raises(UserError, match="3 channels, not 1"):
        AutoAugment(CONFIG, 1, 40, 40)
