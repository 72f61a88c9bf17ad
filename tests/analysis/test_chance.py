# SPDX-License-Identifier: Apache-2.0
"""Guessing is told by the number of images, not by a share alone."""

from __future__ import annotations

import pytest

from each import together
from keymix.analysis.chance import no_better_than_chance


@together
@pytest.mark.parametrize(
    ("top1", "images", "guesses"),
    [
        (0.1, 10_000, True),
        (0.105, 10_000, True),  # a standard error is 0.003
        (0.108, 10_000, False),
        (0.16, 25, True),  # and 0.06
        (0.24, 25, False),
        (0.02, 25, True),
    ],
)
def test_two_standard_errors_are_the_border(top1: float, images: int, guesses: bool) -> None:
    assert no_better_than_chance(top1, classes=10, images=images) is guesses
