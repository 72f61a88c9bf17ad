# SPDX-License-Identifier: Apache-2.0
"""A recording of an event camera: one structured array, checked once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keymix.errors import UserError

Size: TypeAlias = tuple[int, int]  # height, width

EVENT = np.dtype([("t", "<i8"), ("x", "<i2"), ("y", "<i2"), ("p", "u1")])
"""Time in microseconds, column, row, polarity (1 brighter, 0 darker)."""

POLARITIES = 2
LARGEST_SIDE = 1 << 15  # what x and y hold


@dataclass(frozen=True, eq=False)
class Events:
    """The events of one recording, in the order of their times.

    Args:
        data: Structured array of `EVENT`, ``[N]``.
        sensor: Height and width of the sensor, pixels.
    """

    data: NDArray[np.void]
    sensor: Size

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, field: str) -> NDArray[Any]:
        """Give one field of all events: ``t``, ``x``, ``y`` or ``p``."""
        return self.data[field]

    def between(self, start: int, end: int) -> Events:
        """Cut out the events of ``start <= t < end``, microseconds."""
        a, b = np.searchsorted(self.data["t"], [start, end], side="left")
        return Events(self.data[a:b], self.sensor)


def make_events(
    name: str,
    *,
    t: NDArray[Any],
    x: NDArray[Any],
    y: NDArray[Any],
    p: NDArray[Any],
    sensor: Size,
) -> Events:
    """Make a recording of four columns, after checking all that a model would stumble over.

    Args:
        name: Where the events come from, for messages.
        t: Times in microseconds, never falling.
        x: Columns, from 0 to the sensor's width - 1.
        y: Rows, from 0 to its height - 1.
        p: Polarities, 0 or 1.
        sensor: Height and width, pixels.

    Raises:
        UserError: If there is no event, or the sensor is too large; or naming the first event whose
            place is outside the sensor, whose polarity is neither 0 nor 1, or whose time is before
            that of the event before it.
    """
    if len(t) == 0:
        raise UserError(f"{name}: the recording holds no event. Remove it, or record it again.")
    height, width = sensor
    if max(sensor) > LARGEST_SIDE:
        raise UserError(
            f"{name}: a sensor of {height}x{width} pixels is too large; {LARGEST_SIDE} a side is "
            "the most. Name the right size, or look for an event far outside."
        )

    outside = (x < 0) | (x >= width) | (y < 0) | (y >= height)
    if outside.any():
        at = int(outside.argmax())
        swapped = int(x.max()) < height and int(y.max()) < width and min(x.min(), y.min()) >= 0
        raise UserError(
            f"{name}: event {at} at x={int(x[at])}, y={int(y[at])} is outside the sensor of "
            f"{width} columns and {height} rows{'; x and y look swapped' if swapped else ''}. "
            "Name the right sensor size, or remove the event."
        )
    odd = (p != 0) & (p != 1)
    if odd.any():
        at = int(odd.argmax())
        raise UserError(f"{name}: event {at} has polarity {p[at]}; 0 or 1 is wanted.")
    falls = t[1:] < t[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        raise UserError(
            f"{name}: event {at} is at {int(t[at])} us, before event {at - 1} at "
            f"{int(t[at - 1])} us. Sort the events by time, or replace the file."
        )
    data = np.empty(len(t), dtype=EVENT)
    for field, column in (("t", t), ("x", x), ("y", y), ("p", p)):
        data[field] = column
    return Events(data, sensor)
