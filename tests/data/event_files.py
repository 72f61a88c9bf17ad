# SPDX-License-Identifier: Apache-2.0
"""Event files byte by byte, after the public descriptions of the formats, without our readers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

Event = tuple[int, int, int, int]  # t, x, y, p

AEDAT2_HEADER = (
    b"#!AER-DAT2.0\r\n"
    b"# This is a raw AE data file - do not edit\r\n"
    b"# Data format is int32 address, int32 timestamp (8 bytes total), repeated for each event\r\n"
    b"# Timestamps tick is 1 us\r\n"
)
AEDAT3_HEADER = (
    b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n"
    b"#Start-Time: 2016-08-12 14:00:00 (TZ+0000)\r\n#!END-HEADER\r\n"
)
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def random_events(
    count: int, seed: int = 0, side: int = 128, start: int = 0, step: int = 50
) -> list[Event]:
    """Events whose times never fall; some happen at once."""
    rng = np.random.default_rng(seed)
    t = start + np.cumsum(rng.integers(0, step, count))
    x, y = rng.integers(0, side, (2, count))
    return [tuple(map(int, e)) for e in zip(t, x, y, rng.integers(0, 2, count), strict=True)]


def address2(x: int, y: int, p: int) -> int:
    """The address that CIFAR10-DVS has for an event at (x, y): the camera lies on its side."""
    return (127 - x) << 8 | (127 - y) << 1 | (1 - p)


def aedat2(events: Iterable[Event], header: bytes = AEDAT2_HEADER) -> bytes:
    body = b"".join(struct.pack(">II", address2(x, y, p), t) for t, x, y, p in events)
    return header + body


def packet(
    events: Sequence[Event],
    *,
    kind: int = 1,
    valid: int | None = None,
    overflow: int = 0,
    invalid: Sequence[int] = (),
    capacity: int | None = None,
) -> bytes:
    """A packet of AEDAT 3.1; ``invalid`` are positions of events that are marked so."""
    number = len(events)
    capacity = number if capacity is None else capacity
    valid = number - len(invalid) if valid is None else valid
    head = struct.pack("<HHIIIIII", kind, 1, 8, 4, overflow, capacity, number, valid)
    body = b"".join(
        struct.pack("<II", x << 17 | y << 2 | p << 1 | (k not in invalid), t & 0x7FFFFFFF)
        for k, (t, x, y, p) in enumerate(events)
    )
    return head + body + bytes(8 * (capacity - number))


def aedat3(events: Sequence[Event], each: int = 100, header: bytes = AEDAT3_HEADER) -> bytes:
    """Packets of up to ``each`` events, with a packet of another type before every one."""
    special = struct.pack("<HHIIIIII", 0, 1, 8, 4, 0, 1, 1, 1) + bytes(8)
    body = b"".join(special + packet(events[a : a + each]) for a in range(0, len(events), each))
    return header + body


def columns(events: Sequence[Event]) -> dict[str, np.ndarray]:
    t, x, y, p = (np.array(column, dtype=np.int64) for column in zip(*events, strict=True))
    return {"t": t, "x": x, "y": y, "p": p}


def write_npz(
    path: Path, events: Sequence[Event], sensor: Sequence[int] | None = (16, 16), **changed: object
) -> Path:
    arrays: dict[str, object] = {**columns(events), **changed}
    if sensor is not None:
        arrays["sensor_size"] = np.array(sensor)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def write_cifar10dvs(root: Path, per_class: int = 10, events: int = 60) -> Path:
    """The ten classes of CIFAR10-DVS, some files each."""
    for k, name in enumerate(CLASSES):
        for i in range(per_class):
            file = root / name / f"cifar10_{name}_{i}.aedat"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(aedat2(random_events(events, seed=1000 * k + i)))
    return root


def write_dvs128(root: Path, users: Sequence[int] = (1, 2, 24), events: int = 60) -> Path:
    """DVS128 Gesture: recordings of all eleven gestures, users from 24 on in test."""
    folder = root / "DvsGesture"
    folder.mkdir(parents=True, exist_ok=True)
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for user in users:
        name = f"user{user:02d}_led"
        found: list[Event] = []
        rows = ["class,startTime_usec,endTime_usec"]
        for gesture in range(1, 12):
            start = gesture * 100_000
            found += random_events(events, seed=100 * user + gesture, start=start)
            rows.append(f"{gesture},{start},{start + 50_000}")
        (folder / f"{name}.aedat").write_bytes(aedat3(found))
        (folder / f"{name}_labels.csv").write_text("\n".join(rows) + "\n")
        lists["test" if user >= 24 else "train"].append(f"{name}.aedat\n")
    for split, names in lists.items():
        (folder / f"trials_to_{split}.txt").write_text("".join(names))
    return root


def write_folder(
    root: Path, counts: dict[str, int], events: int = 60, side: int = 16, seed: int = 0
) -> Path:
    """Own recordings in ``root/<class>/``."""
    for k, (name, count) in enumerate(counts.items()):
        for i in range(count):
            found = random_events(events, seed=seed + 1000 * k + i, side=side)
            write_npz(root / name / f"{i:03d}.npz", found, (side, side))
    return root
