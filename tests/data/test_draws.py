# SPDX-License-Identifier: Apache-2.0
"""What chance decides: fixed for good, even, and within its ranges."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms.v2 import RandAugment as TorchvisionRandAugment

from keymix.data import Loader, load
from keymix.data.pixels import erase, shift_and_flip
from keymix.data.rand_augment import NAMES
from keymix.data.random_parameters import (
    CROP_RATIO,
    boxes,
    crop_corners,
    erased_boxes,
    flips,
    operations,
    resized_crop,
)
from keymix.data.streams import uniforms

INDEX = np.arange(1000, dtype=np.int64)
THIRDS = np.arange(200, dtype=np.int64) * 3
RUN = {"seed": 3, "epoch": 2}


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def test_the_order_of_images_stays_what_it_was() -> None:
    data = load("digits")
    loader = Loader(data.train, data, batch_size=16, train=True, seed=3)
    loader.set_epoch(2)
    order = loader.order()
    assert order[:8].tolist() == [323, 216, 787, 1068, 208, 180, 416, 569]
    assert digest(order.astype("<i8")) == "c34274b6bb4531cf"


def test_crops_and_flips_stay_what_they_were() -> None:
    corners = crop_corners(THIRDS, 4, **RUN)
    assert corners[:4].tolist() == [[0, 8], [2, 5], [4, 5], [5, 6]]
    flipped = flips(THIRDS, **RUN)
    assert flipped[:10].astype(int).tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    numbers = torch.arange(700 * 3 * 12 * 10) * 2654435761 % 65521 % 251
    pixels = numbers.to(torch.uint8).view(700, 3, 12, 10)[torch.from_numpy(THIRDS)]
    both = shift_and_flip(pixels, torch.from_numpy(corners), torch.from_numpy(flipped), 4)
    assert digest(both.numpy()) == "2ac46ab95877e295"
    mirrored = shift_and_flip(pixels, None, torch.from_numpy(flipped), 0)
    assert digest(mirrored.numpy()) == "f0728a4dad02c5cf"


def test_erased_rectangles_stay_what_they_were() -> None:
    chosen = erased_boxes(THIRDS, 0.5, 32, 32, **RUN)
    out = erase(torch.ones(200, 1, 32, 32), torch.from_numpy(chosen))
    assert digest(out.to(torch.uint8).numpy()) == "0aea3fcbdfded0c8"


def test_operations_stay_what_they_are() -> None:
    assert operations(THIRDS, 2, **RUN)[:4].tolist() == [[18, 3], [16, 26], [27, 20], [8, 8]]


@pytest.mark.parametrize("setting", [(2, 9), (2, 14)])
def test_operations_are_drawn_as_often_as_torchvision_draws_them(
    setting: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of (operation, sign) next to torchvision's own, counted where it applies them."""
    count, magnitude = setting
    theirs = TorchvisionRandAugment(num_ops=count, magnitude=magnitude)
    seen: list[tuple[int, bool]] = []

    def applied(image: torch.Tensor, name: str, size: float, **_: object) -> torch.Tensor:
        seen.append((NAMES.index(name), size < 0))
        return image

    monkeypatch.setattr(theirs, "_apply_image_or_video_transform", applied)
    n = 6000
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(n):
            theirs(image)
    pairs = np.array(seen).reshape(n, count, 2)
    drawn = operations(np.arange(n, dtype=np.int64), count, seed=0, epoch=0)
    ours = np.stack([drawn // 2, drawn % 2], axis=-1)
    ours[..., 1] *= (ours[..., 0] >= 1) & (ours[..., 0] <= 9)  # the rest has no sign
    for step in range(count):
        table = np.array(
            [np.bincount(2 * p[:, step, 0] + p[:, step, 1], minlength=28) for p in (ours, pairs)]
        )
        table = table[:, table.sum(0) > 0]
        assert table.shape[1] == 9 * 2 + 5
        assert stats.chi2_contingency(table).pvalue > 1e-3
    both = np.array(
        [np.bincount(14 * p[:, 0, 0] + p[:, 1, 0], minlength=196) for p in (ours, pairs)]
    )
    assert stats.chi2_contingency(both).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (5, 5)])
def test_boxes_lie_inside_with_area_and_shape_in_range(height: int, width: int) -> None:
    area = (0.08, 1.0)
    made, fits = boxes(uniforms(40, 0, INDEX), height, width, area, CROP_RATIO)
    top, left, h, w = made[fits].T
    assert fits.mean() > 0.95
    assert min(top.min(), left.min()) >= 0
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    assert min(h.min(), w.min()) >= 1
    if height > 5:  # rounding to pixels blurs the ranges of tiny boxes
        assert (h * w > 0.06 * height * width).all()
        assert ((w / h > 0.6) & (w / h < 1.6)).all()


def test_boxes_that_cannot_fit_are_said_not_to() -> None:
    _, fits = boxes(uniforms(40, 0, INDEX), 4, 400, (0.5, 1.0), CROP_RATIO)
    assert not fits.any()
    assert resized_crop(0, 4, 400, (0.5, 1.0), **RUN) == (0, 197, 4, 5)


def test_crops_have_shapes_around_that_of_the_images_they_become() -> None:
    """A box is stretched by at most 4/3, as evaluation's crop is not at all."""
    for shape in (0.5, 1.5, 2.0):
        made = np.array(
            [resized_crop(i, 90, 90, (0.2, 0.5), shape=shape, **RUN) for i in range(99)]
        )
        ratio = made[:, 3] / made[:, 2] / shape
        assert ratio.min() > 0.7
        assert ratio.max() < 1.4
    assert resized_crop(0, 400, 4, (0.5, 1.0), shape=2.0, **RUN) == (198, 0, 3, 4)


def test_erased_rectangles_do_not_depend_on_how_many_are_drawn_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = erased_boxes(INDEX, 0.5, 32, 32, **RUN)
    monkeypatch.setattr("keymix.data.random_parameters._BLOCK", 7)
    assert (erased_boxes(INDEX, 0.5, 32, 32, **RUN) == whole).all()
    assert 400 < (whole[:, 2] > 0).sum() < 600
