# SPDX-License-Identifier: Apache-2.0
"""Recordings of one's own: ``.npz`` files with the arrays t, x, y, p and, optional, sensor_size."""

from __future__ import annotations

import lzma
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.events.stream import LARGEST_SIDE, Events, Size, make_events
from keymix.errors import UserError

_FIELDS = ("t", "x", "y", "p")
_SENSOR = "sensor_size"
_ONE_AT_A_TIME = threading.Lock()
"""NumPy parses headers with ``ast``: in two threads CPython before 3.11.8 fails (its gh-106905)."""
_DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,  # one array
    RuntimeError,  # a packing that Python does not know, or a password
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def read_npz(path: Path, sensor: Size | None = None) -> Events:
    """Read a recording.

    ``t`` are whole microseconds; ``p`` is 0 and 1, false and true, or -1 and 1.
    """
    columns = _columns(path)
    own = _sensor_of(path, columns.pop(_SENSOR, None))
    if own is not None and sensor is not None and own != sensor:
        raise UserError(
            f"{path}: its sensor_size is {own[0]}x{own[1]}, that of the others "
            f"{sensor[0]}x{sensor[1]}. Keep recordings of one sensor together."
        )
    sensor = own or sensor
    if sensor is None:
        raise UserError(
            f"{path}: the sensor's size is unknown. Store it in the file: "
            "sensor_size=(height, width)."
        )
    t, x, y, p = (columns[name] for name in _FIELDS)
    if not (p == 0).any():
        p = np.where(p == -1, 0, p)
    return make_events(str(path), t=t, x=x, y=y, p=p, sensor=sensor)


def extent(path: Path) -> tuple[Size | None, Size]:
    """Return a file's own sensor size, if it has one, and the least that its events fit on."""
    columns = _columns(path)
    own = _sensor_of(path, columns.pop(_SENSOR, None))
    x, y = columns["x"], columns["y"]
    far = (x >= LARGEST_SIDE) | (y >= LARGEST_SIDE)
    if far.any():
        at = int(far.argmax())
        raise UserError(
            f"{path}: event {at} at x={int(x[at])}, y={int(y[at])} is outside every sensor; "
            f"{LARGEST_SIDE} pixels per side is the most. Remove the event."
        )
    return own, (int(y.max(initial=0)) + 1, int(x.max(initial=0)) + 1)


def _columns(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with _ONE_AT_A_TIME, np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in (*_FIELDS, _SENSOR) if name in file}
    except _DAMAGE as error:
        why = getattr(error, "strerror", None) or "it is damaged, or no .npz file of plain numbers"
        raise UserError(f"{path}: cannot be read: {why}. Replace or remove it.") from None
    missing = [name for name in _FIELDS if name not in columns]
    if missing:
        raise UserError(f"{path}: has no array {missing[0]!r}. Save t, x, y and p.")
    for name in _FIELDS:
        column, kinds = columns[name], "iub" if name == "p" else "iu"
        if column.shape != columns["t"].shape or column.ndim != 1 or column.dtype.kind not in kinds:
            raise UserError(
                f"{path}: {name} is {column.dtype} of the shape {column.shape}; a whole number an "
                f"event is wanted{' (microseconds)' if name == 't' else ''}."
            )
        # unsigned numbers would wrap where they are subtracted or compared
        columns[name] = column.astype(np.int64, copy=False)
    return columns


def _sensor_of(path: Path, value: NDArray[Any] | None) -> Size | None:
    if value is None:
        return None
    sides = value.tolist()
    if value.shape != (2,) or not all(type(s) is int and 0 < s <= LARGEST_SIDE for s in sides):
        raise UserError(f"{path}: sensor_size is {sides!r}; height and width are wanted.")
    return sides[0], sides[1]
