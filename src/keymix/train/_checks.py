# SPDX-License-Identifier: Apache-2.0
"""Checks of single recipe values, each with one line that names the dotted key."""

from __future__ import annotations

import math

from keymix.errors import UserError


def require(condition: bool, name: str, value: object, remedy: str) -> None:
    """Refuse a value, named by its dotted key, unless a condition holds."""
    if not condition:
        raise UserError(f"{name} = {value!r}: {remedy}.")


def require_finite(name: str, value: float) -> None:
    """Refuse infinities and NaN."""
    require(math.isfinite(value), name, value, "must be a finite number")


def require_at_least(least: float, **values: float) -> None:
    """Refuse numbers below a bound; ``__`` in a name stands for a dot."""
    for name, value in values.items():
        require_finite(name.replace("__", "."), value)
        require(value >= least, name.replace("__", "."), value, f"must be {least} or more")


def require_probability(**values: float) -> None:
    """Refuse numbers outside [0, 1); ``__`` in a name stands for a dot."""
    for name, value in values.items():
        require_finite(name.replace("__", "."), value)
        require(0 <= value < 1, name.replace("__", "."), value, "must lie in [0, 1)")


def sides(size: int | tuple[int, int]) -> int | tuple[int, int]:
    """Check an image size; equal sides become one, so that equal settings are equal records."""
    pair = (size, size) if isinstance(size, int) else size
    ok = len(pair) == 2 and all(type(side) is int and side > 0 for side in pair)
    require(ok, "data.image_size", size, "give a side in pixels, such as 48, or height,width")
    height, width = pair
    return height if height == width else (height, width)
