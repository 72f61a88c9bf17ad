# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from event_files import random_events
from hypothesis import given, settings
from hypothesis import strategies as st

from keymix.data.events import Events, integrate, make_events
from keymix.errors import UserError

SIDE = 6
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, SIDE + 1), st.integers(0, SIDE - 1), st.integers(0, 1)
    ),
    min_size=1,
    max_size=60,
).map(lambda found: sorted(found, key=lambda e: e[0]))


def recording(found: list[tuple[int, int, int, int]], sensor: tuple[int, int]) -> Events:
    t, x, y, p = (np.array(column, dtype=np.int64) for column in zip(*found, strict=True))
    return make_events("a", t=t, x=x, y=y, p=p, sensor=sensor)


def by_loop(
    found: list[tuple[int, int, int, int]],
    T: int,
    by: str,
    sensor: tuple[int, int],
    size: tuple[int, int],
) -> np.ndarray:
    frames = np.zeros((T, 2, *size), dtype=np.int64)
    first = found[0][0]
    length = (found[-1][0] - first) // T
    for k, (t, x, y, p) in enumerate(found):
        if by == "number":
            each = len(found) // T
            j = T - 1 if each == 0 else min(k // each, T - 1)
        else:
            j = T - 1 if length == 0 else min((t - first) // length, T - 1)
        frames[j, p, y * size[0] // sensor[0], x * size[1] // sensor[1]] += 1
    return frames


@given(EVENTS, st.integers(1, 9), st.sampled_from(["number", "time"]), st.integers(1, SIDE))
@settings(max_examples=100, deadline=None)
def test_frames_equal_a_loop_over_events(
    found: list[tuple[int, int, int, int]], T: int, by: str, height: int
) -> None:
    sensor, size = (SIDE, SIDE + 2), (height, min(height + 1, SIDE + 2))
    made = integrate(recording(found, sensor), time_steps=T, frames_by=by, size=size)
    np.testing.assert_array_equal(made, by_loop(found, T, by, sensor, size))
    assert made.sum() == len(found)


def test_a_smaller_size_sums_pixels() -> None:
    events = recording(random_events(500, side=16), (16, 16))
    whole = integrate(events, time_steps=3)
    half = integrate(events, time_steps=3, size=(8, 4))
    np.testing.assert_array_equal(half, whole.reshape(3, 2, 8, 2, 4, 4).sum((3, 5)))


def test_a_stretch_of_time_without_events_is_an_empty_frame() -> None:
    events = recording([(0, 0, 0, 1), (1, 1, 1, 0), (100, 2, 2, 1)], (4, 4))
    made = integrate(events, time_steps=4, frames_by="time")
    assert made.sum((1, 2, 3)).tolist() == [2, 0, 0, 1]


def test_what_frames_cannot_be_is_refused() -> None:
    events = recording(random_events(9, side=16), (16, 16))
    with pytest.raises(UserError, match=r"data\.image_size = 17,16 is larger than the sensor"):
        integrate(events, time_steps=2, size=(17, 16))
    with pytest.raises(UserError, match=r"unknown data\.frames_by 'tim'. Did you mean 'time'"):
        integrate(events, time_steps=2, frames_by="tim")
