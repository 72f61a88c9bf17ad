# SPDX-License-Identifier: Apache-2.0
r"""From events to frames: how many events of each polarity each pixel had in each of T stretches.

With N events and T frames, frame j holds the events l_j <= k < l_{j+1}, and the last all the rest:
by number, l_j = j floor(N / T); by time, l_j is the first event of
t_k >= t_0 + j floor((t_{N-1} - t_0) / T). That is how SpikingJelly integrates
(https://spikingjelly.readthedocs.io, ``integrate_events_by_fixed_frames_number``), and with it the
published results on CIFAR10-DVS and DVS128 Gesture. Differs: a stretch of time without events is an
empty frame (theirs is an error).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.events.stream import POLARITIES, Events, Size
from keymix.data.specs import FRAMES_BY
from keymix.data.streams import IntArray
from keymix.errors import UserError, unknown

TIME_STEPS = 10
"""Frames a recording where nobody says how many; published results have 10 and 16."""


def starts(t: IntArray, time_steps: int, frames_by: str) -> IntArray:
    """Find the first event of each frame; a frame ends where the next begins.

    Shape: ``[N]`` -> ``[T]``.
    """
    step = np.arange(time_steps, dtype=np.int64)
    if frames_by == "number":
        return step * (len(t) // time_steps)
    if frames_by != "time":
        raise unknown("data.frames_by", frames_by, FRAMES_BY)
    length = (int(t[-1]) - int(t[0])) // time_steps
    return np.searchsorted(t, int(t[0]) + step * length, side="left").astype(np.int64)


def integrate(
    events: Events, *, time_steps: int, frames_by: str = "number", size: Size | None = None
) -> NDArray[np.int64]:
    """Count a recording's events in frames.

    A smaller size than the sensor's sums pixels: column x of width W goes to floor(x W' / W), so no
    event is lost. Where W' does not divide W, some pixels gather one column more than others.

    Args:
        events: The recording.
        time_steps: T, frames.
        frames_by: ``number`` or ``time``; see the module.
        size: Height and width of the frames, pixels; None for the sensor's.

    Shape: ``[N]`` events -> ``[T, 2, H, W]``, darker before brighter.

    Raises:
        UserError: If the size is larger than the sensor, or ``frames_by`` is unknown.
    """
    height, width = size = size or events.sensor
    if height > events.sensor[0] or width > events.sensor[1]:
        raise UserError(
            f"data.image_size = {height},{width} is larger than the sensor of {events.sensor[0]}x"
            f"{events.sensor[1]}: events can be gathered in fewer pixels, not in more."
        )
    x, y = events["x"].astype(np.int64), events["y"].astype(np.int64)
    if size != events.sensor:
        x, y = x * width // events.sensor[1], y * height // events.sensor[0]
    first = starts(events["t"], time_steps, frames_by)
    lengths = np.diff(first, append=len(events))
    frame = np.repeat(np.arange(time_steps), lengths)
    place = ((frame * POLARITIES + events["p"]) * height + y) * width + x
    shape: tuple[Any, ...] = (time_steps, POLARITIES, height, width)
    counts = np.bincount(place, minlength=time_steps * POLARITIES * height * width)
    return counts.reshape(shape).astype(np.int64, copy=False)
