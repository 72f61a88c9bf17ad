# SPDX-License-Identifier: Apache-2.0
"""Sizes of images in pixels, and the patches that fill them: one rule for all models."""

from __future__ import annotations

from collections.abc import Sequence

from keymix.errors import UserError

Grid = tuple[int, int]


def whole_size(name: str, value: object) -> Grid:
    """Return height and width, from one side or both.

    Args:
        name: What the value is called.
        value: A side, or height and width, in pixels.

    Raises:
        UserError: If it is anything else; it names the argument.
    """
    sides = (value, value) if isinstance(value, int) else value
    sides = tuple(sides) if isinstance(sides, Sequence) else ()
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    if len(sides) != 2 or not whole or min(sides) < 1:
        raise UserError(f"{name}={value!r} must be a side, or (height, width), in whole pixels")
    return sides[0], sides[1]


def patch_grid(size: Grid, patch: Grid, *, padded: bool = False) -> Grid:
    """Return the grid of patches that an image is cut into.

    Args:
        size: Height and width of the image, pixels.
        patch: Those of a patch.
        padded: Whether the image is padded where patches do not fill it; the grid is then that of
            the patches which lie in the image as a whole, as timm's position embeddings have it.

    Raises:
        UserError: If patches do not fill the image, whose last rows or columns would be dropped;
            with the nearest sizes.
    """
    for side, step in zip(size, patch, strict=True):
        if side < step if padded else side % step:
            low = side - side % step
            near = f"{low} or {low + step}" if low else f"{step}"
            raise UserError(
                f"images of {size[0]}x{size[1]}: the model cuts patches of {patch[0]}x{patch[1]} "
                f"pixels, which {side} does not hold in full; take {near}"
            )
    return size[0] // patch[0], size[1] // patch[1]
