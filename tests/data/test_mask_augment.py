# SPDX-License-Identifier: Apache-2.0
"""The five operations on images with masks: how often, on what, and that a mask moves along."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from each import together
from keymix.data import Augment
from keymix.data.kinds import MaskKind
from keymix.data.mask_augment import augmented, outside

NOTHING = Augment()
FIVE = ("flip", "vertical_flip", "shift_scale_rotate", "coarse_dropout", "brightness_contrast")
MOVES = FIVE[:3]
ALL = Augment(**dict.fromkeys(FIVE, True))


def only(*names: str) -> Augment:
    return replace(NOTHING, **dict.fromkeys(names, True))


def some(seed: int = 0, channels: int = 1, size: tuple[int, int] = (48, 40)) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(1, 255, (channels, *size), dtype=np.uint8))


def done(image, mask, augment, i=0, *, fill=0, seed=3, epoch=0):
    return augmented(image, mask, i, augment, fill=fill, seed=seed, epoch=epoch)


@cache
def acted() -> dict[str, list[bool]]:
    """Which of 400 draws each augmentation alone changes an image in."""
    image = some(size=(16, 16))
    return {
        name: [not torch.equal(done(image, image[0], only(name), i)[0], image) for i in range(400)]
        for name in FIVE
    }


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", FIVE)
def test_each_acts_on_half_of_the_images_and_its_flag_alone_switches_it(name: str) -> None:
    image = some(size=(16, 16))
    assert abs(np.mean(acted()[name]) - 0.5) < 0.1  # four deviations of 400 coins
    left = replace(ALL, **{name: False})
    both = [done(image, image[0], augment, i) for i in range(150) for augment in (ALL, left)]
    changed = [not torch.equal(a[0], b[0]) for a, b in zip(both[::2], both[1::2], strict=True)]
    # an operation's own numbers do not depend on which others are on
    assert sum(c and not a for a, c in zip(acted()[name], changed, strict=False)) == 0
    assert np.mean(changed) > 0.35
    assert all(torch.equal(done(image, image[0], NOTHING, i)[0], image) for i in range(5))


def test_the_five_are_drawn_apart_from_each_other() -> None:
    apart = np.corrcoef(np.array([acted()[name] for name in FIVE], dtype=float)) - np.eye(5)
    assert np.abs(apart).max() < 0.2  # four deviations of a correlation of 400


def test_numbers_depend_on_seed_epoch_and_index() -> None:
    image = some()

    def all_of(**how):
        return torch.stack([done(image, image[0], ALL, i, **how)[0] for i in range(20)])

    base = all_of()
    assert torch.equal(base, all_of())
    for other in (all_of(seed=4), all_of(epoch=1)):
        assert sum(torch.equal(a, b) for a, b in zip(base, other, strict=True)) < 5
    assert len({each.numpy().tobytes() for each in base}) > 15


def test_flips_are_what_they_say() -> None:
    image = some()
    for name, axis in (("flip", 2), ("vertical_flip", 1)):
        seen = {
            tuple(
                torch.equal(x, y)
                for x, y in zip(pair, (image.flip(axis), image[0].flip(axis - 1)), strict=True)
            )
            for i in range(20)
            if not torch.equal((pair := done(image, image[0], only(name), i))[0], image)
        }
        assert seen == {(True, True)}


def test_a_mask_moves_exactly_as_its_image() -> None:
    """On a slope of 4 a pixel, the nearest pixel is at most half of one from the bilinear place.

    Were one of them half a pixel off, differences of 4 would be seen.
    """
    ramp = (1 + 4 * torch.arange(60, dtype=torch.uint8)).expand(60, 60)
    for slope in (ramp, ramp.mT):
        image = slope[None].contiguous()
        worst = []
        for i in range(40):
            pixels, mask = done(image, slope.contiguous(), only(*MOVES), i)
            outside = ((mask == 0) | (pixels[0] == 0)).float()[None]
            # bilinear pixels at the border blend with the black outside
            whole = F.max_pool2d(F.pad(outside, (1, 1, 1, 1), value=1.0), 3, stride=1)[0] == 0
            gap = (pixels[0].int() - mask.int()).abs()[whole]
            worst.append(int(gap.max()))
            assert whole.float().mean() > 0.5
        assert max(worst) == 2


@pytest.mark.parametrize("shape", [(3,), (1,)])
def test_every_plane_of_a_multilabel_mask_and_every_channel_moves_alike(shape) -> None:
    image, mask = some(1).expand(5, -1, -1), some(2)[0].expand(*shape, -1, -1)
    for i in range(10):
        pixels, moved = done(image.contiguous(), mask.contiguous(), only(*MOVES), i)
        assert pixels.shape == image.shape
        assert moved.shape == mask.shape
        assert (pixels == pixels[:1]).all()
        assert (moved == moved[:1]).all()
        flat = done(image.contiguous(), mask[0].contiguous(), only(*MOVES), i)[1]
        assert torch.equal(moved[0], flat)


def test_masks_get_no_value_that_they_had_not() -> None:
    """Also 255, ignored, comes through; outside is what `fill` says, and black in the image."""
    mask = torch.full((40, 40), 255, dtype=torch.uint8)
    mask[::2, ::3] = 7
    image = torch.full((1, 40, 40), 200, dtype=torch.uint8)
    seen = set()
    for i in range(30):
        pixels, moved = done(image, mask, only("shift_scale_rotate"), i, fill=3)
        seen |= set(moved.unique().tolist())
        assert moved.dtype == pixels.dtype == torch.uint8
        corners = pixels[0][moved == 3]
        assert corners.numel() == 0 or corners.float().mean() < 100
        assert (pixels[0][moved != 3].float().mean()) > 190
    assert seen == {3, 7, 255}


@pytest.mark.parametrize(
    ("kind", "fill"),
    [
        (MaskKind(multilabel=False, background=0), 0),
        (MaskKind(multilabel=False, background=2), 2),
        (MaskKind(multilabel=False, background=None), 255),
        (MaskKind(multilabel=True, background=None), 0),
    ],
)
def test_outside_is_background_or_no_class(kind: MaskKind, fill: int) -> None:
    assert outside(kind) == fill


def test_shifts_sizes_and_turns_have_their_ranges() -> None:
    """Measured on a disc at the centre and one next to it, of 400 images of 96 pixels."""
    side = 96
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    centre, off_centre = np.hypot(y, x) < 5, np.hypot(y, x - 24) < 5
    mask = torch.from_numpy((centre + 2 * off_centre).astype(np.uint8))
    found = []
    for i in range(400):
        moved = done(mask[None] * 100, mask, only("shift_scale_rotate"), i)[1].numpy()
        places = [np.argwhere(moved == k).mean(axis=0) - (side - 1) / 2 for k in (1, 2)]
        arm = places[1] - places[0]
        found.append([*places[0], np.hypot(*arm) / 24, np.degrees(np.arctan2(arm[0], arm[1]))])
    shift_y, shift_x, size, angle = np.abs(np.array(found) - [0, 0, 1, 0]).max(axis=0)
    assert 5.3 < shift_y < 6.3  # 0.0625 of 96 pixels is 6
    assert 5.3 < shift_x < 6.3
    assert 0.09 < size < 0.12
    assert 42 < angle < 46.5
    apart = np.corrcoef(np.array(found)[np.array(found)[:, 0] != 0].T) - np.eye(4)
    assert np.abs(apart).max() < 0.3  # four deviations of 200


@pytest.mark.parametrize(("size", "hole"), [((224, 224), (8, 8)), ((112, 224), (4, 8))])
def test_dropout_blanks_up_to_eight_holes_and_no_mask(size, hole) -> None:
    image = torch.full((2, *size), 9, dtype=torch.uint8)
    mask = some(4, 1, size)[0]
    area = []
    for i in range(60):
        pixels, kept = done(image, mask, only("coarse_dropout"), i)
        assert torch.equal(kept, mask)
        assert torch.equal(pixels[0], pixels[1])
        if (blank := pixels[0] == 0).any():
            area.append(int(blank.sum()))
            rows, columns = torch.where(blank)
            top = int(rows.min())
            first = columns[rows == top].min()
            assert blank[top : top + hole[0], first : first + hole[1]].all()
    assert max(area) == 8 * hole[0] * hole[1]
    assert min(area) > 4 * hole[0] * hole[1]


def test_brightness_and_contrast_are_alike_over_channels_and_leave_masks() -> None:
    """A pixel x becomes m + c (b x - m), m the mean of b x over all channels."""
    levels = torch.tensor([50, 70, 90, 110], dtype=torch.uint8).view(4, 1, 1)
    image = some(5, 4, (30, 30)) // 4 + levels  # nothing is cut at 0 or 255
    mask = some(6)[0]
    slopes = []  # measured on whole numbers that torchvision cuts off twice
    for i in range(200):
        pixels, kept = done(image, mask, only("brightness_contrast"), i)
        assert torch.equal(kept, mask)
        if torch.equal(pixels, image):
            continue
        x, y = image.double().flatten(), pixels.double().flatten()
        slope, level = np.polyfit(x.numpy(), y.numpy(), 1)
        assert (y - (slope * x + level)).abs().max() < 2  # one line for all channels
        brightness = float(y.mean() / x.mean())
        slopes.append((brightness, slope / brightness))
    b, c = np.array(slopes).T
    assert 0.78 < b.min() < 0.83
    assert 1.17 < b.max() < 1.22
    assert 0.78 < c.min() < 0.83
    assert 1.17 < c.max() < 1.22
    assert abs(np.corrcoef(b, c)[0, 1]) < 0.35


def test_what_is_given_is_not_written_into() -> None:
    image, mask = some(), some(8)[0]
    before = image.clone(), mask.clone()
    for i in range(10):
        done(image, mask, ALL, i)
    assert torch.equal(image, before[0])
    assert torch.equal(mask, before[1])
