# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_files import (
    AEDAT2_HEADER,
    AEDAT3_HEADER,
    aedat2,
    aedat3,
    packet,
    random_events,
    write_npz,
)

from keymix.data.events import read_events
from keymix.errors import UserError


def as_list(path: Path, **options: Any) -> list[tuple[int, ...]]:
    events = read_events(path, **options)
    return [tuple(map(int, e)) for e in events.data.tolist()]


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_events(path, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(content: bytes, name: str = "a.aedat") -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def test_aedat2_is_read_as_it_was_written(file: Any) -> None:
    events = random_events(500, seed=1)
    assert as_list(file(aedat2(events))) == events
    assert read_events(file(aedat2(events))).sensor == (128, 128)


def test_times_of_aedat2_are_unsigned(file: Any) -> None:
    events = [(2**31 - 1, 0, 0, 1), (2**31 + 5, 1, 2, 0)]
    assert as_list(file(aedat2(events))) == events


def test_external_signals_in_aedat2_are_no_events(file: Any) -> None:
    events = random_events(3)
    signal = struct.pack(">II", 0x8000, events[0][0])
    assert as_list(file(AEDAT2_HEADER + signal + aedat2(events, b""))) == events


def test_aedat3_is_read_as_it_was_written(file: Any) -> None:
    events = random_events(550, seed=2)
    assert as_list(file(aedat3(events))) == events


def test_overflows_of_aedat3_stand_above_the_time(file: Any) -> None:
    late = [(5, 1, 2, 1), (9, 3, 4, 0)]
    content = AEDAT3_HEADER + packet(random_events(4)) + packet(late, overflow=3)
    assert as_list(file(content))[4:] == [(3 * 2**31 + t, x, y, p) for t, x, y, p in late]


def test_invalid_events_and_spare_room_of_aedat3_are_left_out(file: Any) -> None:
    events = random_events(6)
    content = (
        AEDAT3_HEADER + packet(events, invalid=(0, 4), capacity=9) + packet([(10**6, 1, 1, 1)])
    )
    assert as_list(file(content)) == [*events[1:4], events[5], (10**6, 1, 1, 1)]


def test_npz_is_read_as_it_was_written(tmp_path: Path) -> None:
    events = random_events(40, side=16)
    assert as_list(write_npz(tmp_path / "a.npz", events)) == events
    assert read_events(tmp_path / "a.npz").sensor == (16, 16)


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint16])
def test_npz_takes_polarities_as_they_are_met(tmp_path: Path, kind: type) -> None:
    events = random_events(40, side=16)
    p = np.array([e[3] for e in events])
    signed = 2 * p - 1 if kind is np.int8 else p
    assert as_list(write_npz(tmp_path / "a.npz", events, p=signed.astype(kind))) == events


def test_npz_without_a_sensor_takes_one_that_is_named(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", random_events(4, side=16), None)
    assert read_events(path, (20, 30)).sensor == (20, 30)
    assert "sensor_size=(height, width)" in refusal(path)


def test_aedat2_that_ends_in_mid_event_is_refused(file: Any) -> None:
    for lost in range(1, 8):
        text = refusal(file(aedat2(random_events(10))[:-lost]))
        assert text.startswith(f"the file ends in mid-event: event 9 has {8 - lost} of 8 bytes")


def test_aedat3_that_is_cut_anywhere_is_refused(file: Any) -> None:
    content = AEDAT3_HEADER + packet(random_events(4)) + packet(random_events(3, start=9999))
    first = len(AEDAT3_HEADER) + 28 + 4 * 8
    for end in range(len(AEDAT3_HEADER) + 1, len(content)):
        if end == first:
            continue  # between two packets nothing is missing
        assert refusal(file(content[:end])).startswith("the file ends in mid-packet after ")
    assert "after event 3" in refusal(file(content[: first + 27]))


def test_events_outside_the_sensor_are_refused_by_number(file: Any, tmp_path: Path) -> None:
    events = random_events(10)
    foreign = struct.pack(">II", 0x10000, 10**6)
    assert "event 10 at x=-129, y=127 is outside" in refusal(file(aedat2(events) + foreign))
    outside = AEDAT3_HEADER + packet([*events, (10**6, 128, 5, 1)])
    assert "event 10 at x=128, y=5 is outside the sensor of 128 columns" in refusal(file(outside))
    small = write_npz(tmp_path / "a.npz", [(0, 0, 0, 1), (1, 2, 16, 1)])
    assert "event 1 at x=2, y=16 is outside" in refusal(small)
    negative = write_npz(tmp_path / "a.npz", [(0, 0, 0, 1), (1, -2, 6, 1)])
    assert "event 1 at x=-2, y=6 is outside" in refusal(negative)
    assert "swapped" not in refusal(negative)


def test_numbers_of_events_pass_over_packets_of_other_types(file: Any) -> None:
    events = random_events(10)
    outside = aedat3([*events, (10**6, 128, 5, 1)], each=2)  # and as many packets of another type
    assert refusal(file(outside)).startswith("event 10 at x=128, y=5 is outside")


def test_sensors_larger_than_any_are_refused(tmp_path: Path) -> None:
    far = write_npz(tmp_path / "a.npz", [(0, 3, 3, 1), (1, 40_000, 1, 0)], None)
    assert refusal(far, sensor=(10, 50_000)).startswith("a sensor of 10x50000 pixels is too large")


def test_swapped_axes_are_named(tmp_path: Path) -> None:
    swapped = write_npz(tmp_path / "a.npz", [(0, 3, 20, 1), (1, 15, 2, 0)], (16, 24))
    assert "event 0 at x=3, y=20" in refusal(swapped)
    assert "x and y look swapped" in refusal(swapped)


def test_falling_times_are_refused_by_number(file: Any, tmp_path: Path) -> None:
    events = [(5, 0, 0, 0), (7, 0, 0, 0), (6, 0, 0, 0)]
    message = "event 2 is at 6 us, before event 1 at 7 us"
    assert refusal(file(aedat2(events))).startswith(message)
    assert refusal(file(AEDAT3_HEADER + packet(events))).startswith(message)
    assert refusal(write_npz(tmp_path / "a.npz", events)).startswith(message)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"t": None}, "has no array 't'"),
        ({"x": np.zeros(3, dtype=int)}, "x is int64 of the shape (3,)"),
        ({"y": np.zeros((4, 1), dtype=int)}, "y is int64 of the shape (4, 1)"),
        ({"t": np.arange(4) / 1e6}, "t is float64"),
        ({"p": np.array([0, 1, 2, 1])}, "event 2 has polarity 2"),
        ({"p": np.array([-1, 1, 0, 1])}, "event 0 has polarity -1"),
        ({"x": np.array([1, 2, 3, 2**40])}, f"event 3 at x={2**40}"),
    ],
)
def test_unfit_arrays_are_refused(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    assert expected in refusal(write_npz(tmp_path / "a.npz", random_events(4, side=16), **changed))


@pytest.mark.parametrize("sensor", [(16,), (0, 16), (16.0, 16.0), (1 << 20, 16)])
def test_unfit_sensor_sizes_are_refused(tmp_path: Path, sensor: Any) -> None:
    assert "height and width are wanted" in refusal(
        write_npz(tmp_path / "a.npz", random_events(4, side=16), sensor)
    )
