# SPDX-License-Identifier: Apache-2.0
"""Batched RandAugment is torchvision's, pixel for pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional
from torchvision.transforms.v2 import RandAugment as TorchvisionRandAugment

from keymix.data.rand_augment import (
    GEOMETRIC,
    NAMES,
    RandAugment,
    plans,
    recolour,
    sort_by_operation,
)

CPU = torch.device("cpu")
SIZES = [(3, 32, 32), (1, 12, 12), (3, 24, 40), (3, 33, 35), (3, 2, 2)]


def pictures(channels: int, height: int, width: int) -> torch.Tensor:
    """Noise, a smooth image, one of a single value, and two of few values."""
    generator = torch.Generator().manual_seed(height)
    shape = (channels, height, width)
    coarse = torch.rand((1, channels, 3, 3), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]
    two = torch.randint(0, 2, shape, generator=generator)
    return torch.stack(
        [
            torch.randint(0, 256, shape, generator=generator),
            smooth.mul(255),
            torch.full(shape, 77),
            two * 255,
            100 + two,
        ]
    ).to(torch.uint8)


def by_torchvision(images: torch.Tensor, name: str, bin_: int, negative: bool) -> torch.Tensor:
    """Change images one by one with torchvision's own table of magnitudes and operations."""
    theirs = TorchvisionRandAugment(num_ops=1, magnitude=bin_)
    sizes, signed = theirs._AUGMENTATION_SPACE[name]
    all_sizes = sizes(31, *images.shape[-2:])
    size = 0.0 if all_sizes is None else float(all_sizes[bin_])
    size = -size if signed and negative else size
    return torch.stack(
        [
            theirs._apply_image_or_video_transform(
                image, name, size, interpolation=theirs.interpolation, fill=theirs._fill
            )
            for image in images
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_every_operation_at_every_magnitude_is_torchvision_s(
    shape: tuple[int, int, int], name: str
) -> None:
    images = pictures(*shape)
    before = images.clone()
    # all magnitudes at one size; at the others the ends, the first step and those about the middle
    for bin_ in range(31) if shape == SIZES[0] else (0, 1, 9, 15, 20, 30):
        ours = RandAugment(bin_, *shape[1:], CPU)
        for negative in (False, True):
            codes = np.full((len(images), 1), 2 * NAMES.index(name) + negative)
            (plan,) = sort_by_operation(codes, size=len(images), device=CPU)
            expected = by_torchvision(images, name, bin_, negative)
            assert torch.equal(ours(images, plan), expected), (bin_, negative)
    assert torch.equal(images, before)


def test_the_names_are_torchvision_s_in_its_order() -> None:
    assert tuple(TorchvisionRandAugment._AUGMENTATION_SPACE) == NAMES


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_each_image_meets_its_own_operations_in_their_order(count: int) -> None:
    rng = np.random.default_rng(count)
    images = pictures(3, 16, 16).repeat(20, 1, 1, 1)
    codes = rng.integers(0, 28, (len(images), count))
    ours = RandAugment(20, 16, 16, CPU)
    seen = torch.cat(
        [
            ours(images[i * 64 : (i + 1) * 64], plan)
            for i, plan in enumerate(sort_by_operation(codes, size=64, device=CPU))
        ]
    )
    for image, own, out in zip(images, codes, seen, strict=True):
        expected = image[None]
        for code in own:
            expected = by_torchvision(expected, NAMES[code // 2], 20, bool(code % 2))
        assert torch.equal(out[None], expected)


def test_an_image_s_fate_does_not_depend_on_its_batch() -> None:
    images = pictures(3, 12, 12).repeat(8, 1, 1, 1)
    index = np.arange(len(images), dtype=np.int64) * 7
    ours = RandAugment(9, 12, 12, CPU)

    def made(size: int) -> torch.Tensor:
        planned = plans(index, 2, size, seed=1, epoch=2, device=CPU)
        return torch.cat([ours(images[i * size :][:size], p) for i, p in enumerate(planned)])

    whole = made(len(images))
    assert not torch.equal(whole, images)
    for size in (1, 7, 16):
        assert torch.equal(made(size), whole)


def test_operations_that_move_pixels_are_not_recoloured() -> None:
    with pytest.raises(ValueError, match="'Rotate'"):
        recolour(GEOMETRIC[-1], pictures(3, 8, 8), 0.0)
