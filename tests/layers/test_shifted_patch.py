# SPDX-License-Identifier: Apache-2.0
"""Shifted patch tokenisation against a loop over pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from each import together
from keymix.layers.patches import SHIFTS, ShiftedPatchEmbed
from mixer_cases import refused, stir
from tolerances import close, differs


def by_hand(layer: ShiftedPatchEmbed, image: np.ndarray, p: int) -> np.ndarray:
    """Sec. 4.1: the image and four shifted copies, patches, LayerNorm, projection."""
    c, height, width = image.shape
    # where each copy's pixel (y, x) comes from
    s = p // 2 if layer.shifts == "half_patch" else 1
    moves = [(0, 0), (-s, -s), (s, -s), (-s, s), (s, s)]
    if layer.shifts == "axes":
        moves = [(0, 0), (0, -s), (0, s), (-s, 0), (s, 0)]
    weights = {k: v.detach().numpy() for k, v in layer.state_dict().items()}
    tokens = []
    for top in range(0, height, p):
        for left in range(0, width, p):
            values = []
            for dy, dx in moves:
                for channel in range(c):
                    for y in range(top, top + p):
                        for x in range(left, left + p):
                            inside = 0 <= y + dy < height and 0 <= x + dx < width
                            values.append(image[channel, y + dy, x + dx] if inside else 0.0)
            v = np.array(values)
            v = (v - v.mean()) / np.sqrt(v.var() + 1e-5)
            v = v * weights["norm.weight"] + weights["norm.bias"]
            tokens.append(weights["proj.weight"] @ v + weights["proj.bias"])
    return np.array(tokens)


@together
@pytest.mark.parametrize("shifts", SHIFTS)
@pytest.mark.parametrize(
    ("size", "patch", "channels"), [((8, 12), 4, 3), ((6, 6), 2, 1), ((10, 5), 5, 2)]
)
def test_shifted_patches_are_a_loop_over_pixels(size, patch, channels, shifts) -> None:
    layer = ShiftedPatchEmbed(size, patch, channels, 10, shifts=shifts).double()
    stir(layer)
    images = torch.randn(2, channels, *size, dtype=torch.float64)
    y = layer(images)
    assert y.shape == (2, (size[0] // patch) * (size[1] // patch), 10)
    for image, tokens in zip(images.numpy(), y, strict=True):
        close(tokens, torch.from_numpy(by_hand(layer, image, patch)))


def test_its_weights_are_the_published_240_wide_projection() -> None:
    layer = ShiftedPatchEmbed()
    assert sum(p.numel() for p in layer.parameters()) == 2 * 240 + 240 * 512 + 512
    assert all(not p.is_meta for p in layer.parameters())


def test_other_images_and_options_are_refused() -> None:
    layer = ShiftedPatchEmbed(8, 4, 3, 10)
    with refused(r"\(8, 12\).*\(8, 8\)"):
        layer(torch.randn(1, 3, 8, 12))
    with refused("dynamic_img_pad"):
        ShiftedPatchEmbed(8, 4, 3, 10, dynamic_img_pad=True)
    with refused("patch size"):
        layer.set_input_size(patch_size=2)
    layer.set_input_size((8, 12), patch_size=4)
    assert layer.grid_size == (2, 3)


def test_new_patches_move_along_the_axes_and_each_choice_is_another() -> None:
    assert ShiftedPatchEmbed(8, 4, 3, 10).shifts == "axes"
    axes, half = (ShiftedPatchEmbed(8, 4, 3, 10, shifts=shifts).double() for shifts in SHIFTS)
    half.load_state_dict(axes.state_dict())
    images = torch.randn(1, 3, 8, 8).double()
    assert differs(axes(images), half(images))


def test_half_of_an_oblong_patch_is_half_of_each_side() -> None:
    layer = ShiftedPatchEmbed((12, 12), (6, 3), 1, 10, shifts="half_patch")
    marked = torch.zeros(1, 1, 12, 12)
    marked[..., 5, 5] = 1
    found = [tuple(copy[0, 0].nonzero()[0].tolist()) for copy in layer._copies(marked)]
    assert sorted(found) == [(2, 4), (2, 6), (8, 4), (8, 6)]


def test_another_image_size_is_taken() -> None:
    layer = ShiftedPatchEmbed(8, 4, 3, 10)
    layer.set_input_size((16, 12))
    assert layer.grid_size == (4, 3)
    assert layer(torch.randn(1, 3, 16, 12)).shape == (1, 12, 10)
