# SPDX-License-Identifier: Apache-2.0
"""The record of augmentation refuses what makes no sense."""

from __future__ import annotations

import pytest

from each import together
from keymix.data.augment import Augment
from keymix.errors import UserError


@together
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("crop_padding", -1),
        ("crop_padding", 1.5),
        ("crop_padding", True),
        ("flip", 0.5),
        ("rand_augment_first", 1),
        ("erasing", 1.01),
        ("erasing", -0.1),
        ("erasing", float("nan")),
        ("erasing", "often"),
        ("random_resized_crop", (0.0, 1.0)),
        ("random_resized_crop", (0.8, 0.2)),
        ("random_resized_crop", (0.1, 1.5)),
        ("random_resized_crop", 0.5),
        ("rand_augment", (2, 31)),
        ("rand_augment", (-1, 9)),
        ("rand_augment", (2,)),
        ("rand_augment", (2, 9.5)),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"augment\.{field} ="):
        Augment(**{field: value})  # type: ignore[arg-type]


def test_lists_from_json_make_equal_records() -> None:
    listed = Augment(rand_augment=[2, 9], random_resized_crop=[0.2, 1.0])  # type: ignore[arg-type]
    assert listed == Augment(rand_augment=(2, 9), random_resized_crop=(0.2, 1.0))
    assert hash(listed) == hash(Augment(rand_augment=(2, 9), random_resized_crop=(0.2, 1.0)))
