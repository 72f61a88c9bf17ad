# SPDX-License-Identifier: Apache-2.0
"""What is a size of images, and what patches fill."""

from __future__ import annotations

from typing import Any

import pytest

from each import together
from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.layers.patches import patch_grid


def test_a_side_stands_for_both() -> None:
    assert whole_size("img_size", 32) == (32, 32)
    assert whole_size("img_size", [32, 48]) == (32, 48)


@together
@pytest.mark.parametrize(
    "value", [0, -4, True, None, "48", "ab", 48.5, float("nan"), (3, 32, 32), (32,), (32, 0)]
)
def test_what_is_no_size_is_named(value: Any) -> None:
    with pytest.raises(UserError, match=r"^img_size=.* must be a side, or \(height, width\)"):
        whole_size("img_size", value)


def test_patches_fill_an_image_or_the_nearest_sizes_are_named() -> None:
    assert patch_grid((32, 48), (4, 8)) == (8, 6)
    with pytest.raises(UserError, match=r"32x33: .* 4x4 pixels, which 33 .*; take 32 or 36$"):
        patch_grid((32, 33), (4, 4))
    with pytest.raises(UserError, match=r"which 3 does not hold in full; take 4$"):
        patch_grid((3, 32), (4, 4))
    assert patch_grid((33, 35), (4, 4), padded=True) == (8, 8)
    with pytest.raises(UserError, match=r"take 4$"):
        patch_grid((3, 32), (4, 4), padded=True)
