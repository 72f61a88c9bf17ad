# SPDX-License-Identifier: Apache-2.0
"""What augmentation does to pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keymix.data import Augment, ImageData, load
from keymix.data.batches import _boxes, erase, training_batch
from keymix.data.streams import uniforms

INDEX = np.arange(1000, dtype=np.int64)


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load("digits")


def made(data: ImageData, augment: Augment, index: np.ndarray = INDEX, epoch: int = 0):
    return training_batch(data.train, index, augment, seed=0, epoch=epoch)


def test_crops_are_every_shift_of_the_zero_padded_image_equally_often(digits: ImageData) -> None:
    padding = 2
    images = digits.train.images
    assert images is not None
    counts = np.zeros((5, 5), dtype=int)
    for epoch in range(3):
        for crop, i in zip(
            made(digits, Augment(crop_padding=padding), epoch=epoch), INDEX, strict=True
        ):
            padded = torch.nn.functional.pad(images[i], [padding] * 4)
            windows = padded.unfold(1, 12, 1).unfold(2, 12, 1)[0]  # [5, 5, 12, 12]
            hits = (windows == crop).all(-1).all(-1).numpy()
            assert hits.any()
            counts += hits
    assert counts.min() > 0.6 * 3000 / 25
    assert counts.max() < 1.5 * 3000 / 25


def test_half_of_the_images_are_mirrored(digits: ImageData) -> None:
    images = digits.train.images
    assert images is not None
    out = made(digits, Augment(flip=True))
    kept = (out == images[INDEX]).all(-1).all(-1).squeeze()
    mirrored = (out == images[INDEX].flip(-1)).all(-1).all(-1).squeeze()
    assert (kept | mirrored).all()
    assert 440 < mirrored.sum() < 560


def test_erased_rectangles_have_the_stated_area_and_frequency() -> None:
    index = np.arange(4000, dtype=np.int64)
    out = erase(torch.ones(4000, 1, 32, 32), 0.25, index, seed=0, epoch=0)
    share = 1 - out.mean((1, 2, 3))
    erased = share[share > 0]
    assert 900 < len(erased) < 1100
    assert erased.min() > 0.01
    assert erased.max() < 0.36
    for image in out[share > 0][:50, 0]:
        rows, columns = (image == 0).any(1).sum(), (image == 0).any(0).sum()
        assert rows * columns == (image == 0).sum()  # a rectangle
    assert (erase(torch.ones(40, 1, 8, 8), 0.0, index[:40], seed=0, epoch=0) == 1).all()


@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (5, 5)])
def test_boxes_lie_inside_with_area_and_shape_in_range(height: int, width: int) -> None:
    area, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    boxes, fits = _boxes(uniforms(40, 0, INDEX), height, width, area, ratio)
    top, left, h, w = boxes[fits].T
    assert fits.mean() > 0.95
    assert min(top.min(), left.min()) >= 0
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    assert min(h.min(), w.min()) >= 1
    if height > 5:  # rounding to pixels blurs the ranges of tiny boxes
        assert (h * w > 0.06 * height * width).all()
        assert ((w / h > 0.6) & (w / h < 1.6)).all()


def test_boxes_that_cannot_fit_are_said_not_to() -> None:
    _, fits = _boxes(uniforms(40, 0, INDEX), 4, 400, (0.5, 1.0), (3 / 4, 4 / 3))
    assert not fits.any()


def test_very_long_images_are_cropped_at_the_centre(make_folder) -> None:
    data = load(f"folder:{make_folder({'a': 4, 'b': 4}, (400, 4))}", image_size=100)
    images = made(data, Augment(random_resized_crop=(0.9, 1.0)), np.arange(4))
    assert images.shape == (4, 3, 100, 100)
    assert images.float().std() > 0


def test_random_resized_crops_differ_and_cover_the_image(make_folder) -> None:
    data = load(f"folder:{make_folder({'a': 4, 'b': 4}, (120, 100))}", image_size=(98, 97))
    index = np.zeros(1, dtype=np.int64)
    crops = [made(data, Augment(), index, epoch) for epoch in range(5)]
    assert crops[0].shape == (1, 3, 98, 97)
    assert not any(torch.equal(crops[0], other) for other in crops[1:])
    whole = made(data, Augment(random_resized_crop=(1.0, 1.0)), index)
    plain = data.train.decoded(0).resize((97, 98))
    difference = np.abs(whole[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(plain))
    assert np.median(difference) < 40  # nearly the whole image, squeezed


def test_rand_augment_changes_images_and_magnitude_matters(digits: ImageData) -> None:
    index = INDEX[:60]
    images = digits.train.images
    assert images is not None
    mild, strong = (made(digits, Augment(rand_augment=(2, m)), index) for m in (1, 20))
    change = [(out.int() - images[index].int()).abs().float().mean() for out in (mild, strong)]
    assert 0 < change[0] < change[1]
