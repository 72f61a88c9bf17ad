# SPDX-License-Identifier: Apache-2.0
"""Checks of single recipe values, each with one line that names the dotted key."""

from __future__ import annotations

from keymix.errors import UserError


def require(condition: bool, name: str, value: object, remedy: str) -> None:
    """Refuse a value, named by its dotted key, unless a condition holds."""
    if not condition:
        raise UserError(f"{name} = {value!r}: {remedy}.")


def sides(size: int | tuple[int, int]) -> int | tuple[int, int]:
    """Check an image size; equal sides become one, so that equal settings are equal records."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    ok = len(pair) == 2 and all(type(side) is int and side > 0 for side in pair)
    require(ok, "data.image_size", size, "give a side in pixels, such as 48, or height,width")
    height, width = pair
    return height if height == width else (height, width)
