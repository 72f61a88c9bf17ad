# SPDX-License-Identifier: Apache-2.0
"""Crops, flips and erased rectangles, compared with slow loops over single images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from each import together
from keymix.data.pixels import erase, shift_and_flip, take
from keymix.data.random_parameters import crop_corners, erased_boxes, flips

INDEX = np.arange(3000, dtype=np.int64)


def noise(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (count, channels, height, width)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@together
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("crop", "flip"), [(True, True), (True, False), (False, True)])
def test_crops_and_flips_are_those_of_single_images(channels: int, crop: bool, flip: bool) -> None:
    padding, images = 3, noise(40, channels, 9, 7)
    corners = torch.from_numpy(crop_corners(INDEX[:40], padding, seed=0, epoch=0))
    mirrored = torch.from_numpy(flips(INDEX[:40], seed=0, epoch=0))
    before = images.clone()
    out = shift_and_flip(images, corners if crop else None, mirrored if flip else None, padding)
    for image, (top, left), mirror, seen in zip(images, corners, mirrored, out, strict=True):
        expected = image
        if crop:
            padded = torch.nn.functional.pad(image, [padding] * 4)
            expected = padded[:, top : top + 9, left : left + 7]
        if flip and mirror:
            expected = expected.flip(-1)
        assert torch.equal(seen, expected)
    assert torch.equal(images, before)


def test_every_crop_is_equally_likely() -> None:
    corners = crop_corners(INDEX, 2, seed=0, epoch=0)
    counts = np.bincount(5 * corners[:, 0] + corners[:, 1])
    assert len(counts) == 25
    assert stats.chisquare(counts).pvalue > 1e-3


def test_half_of_the_images_are_mirrored() -> None:
    assert 1400 < flips(INDEX, seed=0, epoch=0).sum() < 1600


def test_nothing_asked_for_changes_nothing() -> None:
    images = noise(2, 3, 4, 4)
    assert shift_and_flip(images, None, None, 0) is images


def test_pixels_from_outside_are_black() -> None:
    source = torch.tensor([[3, -1, 0, -1]])
    assert take(torch.tensor([[[[1, 2], [3, 4]]]]), source).flatten().tolist() == [4, 0, 1, 0]


def test_erased_rectangles_have_the_stated_area_and_frequency() -> None:
    index = np.arange(4000, dtype=np.int64)
    boxes = erased_boxes(index, 0.25, 32, 32, seed=0, epoch=0)
    out = erase(torch.ones(4000, 1, 32, 32), torch.from_numpy(boxes))
    share = 1 - out.mean((1, 2, 3))
    erased = share[share > 0]
    assert 900 < len(erased) < 1100
    assert erased.min() > 0.01
    assert erased.max() < 0.36
    for image in out[share > 0][:50, 0]:
        rows, columns = (image == 0).any(1).sum(), (image == 0).any(0).sum()
        assert rows * columns == (image == 0).sum()  # a rectangle
    none = erased_boxes(index[:40], 0.0, 8, 8, seed=0, epoch=0)
    assert (erase(torch.ones(40, 1, 8, 8), torch.from_numpy(none)) == 1).all()
