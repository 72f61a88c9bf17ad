# SPDX-License-Identifier: Apache-2.0
"""Masks drawn over images, and as files whose numbers come back."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from keymix.analysis.mask_pictures import (
    FILL,
    GREY,
    PALETTE,
    class_colours,
    mask_picture,
    overlay,
    rim,
)
from keymix.analysis.overlap import IGNORED


def test_an_organ_has_one_colour_with_and_without_background():
    assert class_colours(4, background=0) == [None, *class_colours(3)]
    assert class_colours(3) == list(PALETTE[:3])
    assert class_colours(4, background=2)[2] is None


def test_colours_beyond_the_palette_are_all_different():
    assert len(set(class_colours(3 * len(PALETTE)))) == 3 * len(PALETTE)


def mixed(grey, colour):
    return [round(grey * (1 - FILL) + c * FILL) for c in colour]


def test_predicted_pixels_are_tinted_and_true_ones_outlined():
    image = np.full((1, 7, 7), 100, np.uint8)
    mask, truth = np.zeros((2, 7, 7), np.int64)
    mask[0, 0] = 1
    truth[1:6, 1:6] = 2
    truth[6, 6] = IGNORED
    colours = class_colours(3, background=0)
    drawn = overlay(image, mask, colours, truth)
    assert drawn.dtype == np.uint8
    assert drawn[0, 0].tolist() == mixed(100, PALETTE[0])
    assert drawn[1, 3].tolist() == list(PALETTE[1])
    assert drawn[3, 3].tolist() == [100, 100, 100]  # inside the outline
    assert drawn[6, 6].tolist() == mixed(100, GREY)
    assert overlay(image, mask, colours)[1, 3].tolist() == [100, 100, 100]


def test_of_overlapping_organs_the_last_lies_on_top():
    image = np.zeros((1, 2, 2), np.uint8)
    both = np.ones((2, 2, 2), np.uint8)
    first = overlay(image, both[:1], class_colours(1))[0, 0]
    drawn = overlay(image, both, class_colours(2))[0, 0]
    expected = [round(a * (1 - FILL) + b * FILL) for a, b in zip(first, PALETTE[1], strict=True)]
    assert drawn.tolist() == expected


def test_of_a_stack_the_middle_slice_is_drawn_and_of_a_photo_its_grey():
    stack = np.stack([np.full((2, 2), v, np.uint8) for v in (10, 20, 30, 40, 50)])
    nothing, colours = np.zeros((2, 2), np.uint8), class_colours(1, background=0)
    assert overlay(stack, nothing, colours)[0, 0].tolist() == [30, 30, 30]
    red = np.zeros((3, 2, 2), np.uint8)
    red[0] = 255
    assert overlay(red, nothing, colours)[0, 0].tolist() == [76, 76, 76]  # 0.299 of 255


def test_masks_of_another_size_than_the_image_are_refused():
    with pytest.raises(ValueError, match="truth"):
        overlay(np.zeros((1, 4, 4), np.uint8), np.zeros((4, 4)), [None], np.zeros((4, 5)))


def test_rim_is_what_touches_another_pixel_or_the_border():
    mask = np.ones((4, 5), bool)
    assert (~rim(mask)).sum() == 2 * 3
    assert rim(np.eye(3, dtype=bool)).sum() == 3


def test_numbers_of_a_mask_file_come_back_and_are_shown_in_colours():
    mask = np.array([[0, 1, 2], [3, 255, 0]])
    stream = io.BytesIO()
    mask_picture(mask, class_colours(4, background=0)).save(stream, "PNG")
    back = Image.open(stream)
    assert back.mode == "P"
    np.testing.assert_array_equal(np.asarray(back), mask)
    shown = np.asarray(back.convert("RGB"))
    assert shown.reshape(-1, 3)[:5].tolist() == [[0, 0, 0], *map(list, PALETTE[:3]), list(GREY)]


def test_class_without_a_colour_is_refused():
    with pytest.raises(ValueError, match="2 colours"):
        mask_picture(np.array([[0, 2]]), class_colours(2, background=0))
