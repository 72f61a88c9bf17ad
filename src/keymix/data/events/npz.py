# SPDX-License-Identifier: Apache-2.0
"""Recordings of one's own: ``.npz`` files with the arrays t, x, y, p and, optional, sensor_size."""

from __future__ import annotations

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
_DAMAGE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)


def read_npz(path: Path, sensor: Size | None = None) -> Events:
    """Read a recording.

    ``t`` are whole microseconds; ``p`` is 0 and 1, false and true, or -1 and 1.

    Args:
        path: The file.
        sensor: Height and width, pixels; None takes the file's ``sensor_size``.

    Raises:
        UserError: If the file is damaged, an array is missing or unfit, the sensor size is unknown,
            or `make_events` refuses the events.
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
    if (p == -1).any():
        if (p == 0).any():
            at = int((p == 0).argmax())
            raise UserError(
                f"{path}: event {at} has polarity 0 among others of -1; choose one way."
            )
        p = np.where(p == -1, 0, p)
    return make_events(str(path), t=t, x=x, y=y, p=p, sensor=sensor)


def extent(path: Path) -> tuple[Size | None, Size]:
    """Tell a file's own sensor size, if it has one, and the least that its events fit on.

    Raises:
        UserError: If the file is damaged, an array is missing or unfit, or an event is too far out
            for any sensor.
    """
    columns = _columns(path)
    own = _sensor_of(path, columns.pop(_SENSOR, None))
    x, y = columns["x"], columns["y"]
    far = (x >= LARGEST_SIDE) | (y >= LARGEST_SIDE)
    if far.any():
        at = int(far.argmax())
        raise UserError(
            f"{path}: event {at} at x={int(x[at])}, y={int(y[at])} is outside every sensor; "
            f"{LARGEST_SIDE} pixels a side is the most. Remove the event."
        )
    return own, (int(y.max(initial=0)) + 1, int(x.max(initial=0)) + 1)


def _columns(path: Path) -> dict[str, NDArray[Any]]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise UserError(f"{path}: is no .npz file but one array. Save it with numpy.savez.")
        with loaded as file:
            columns = {name: file[name] for name in file.files if name in (*_FIELDS, _SENSOR)}
    except UserError:
        raise
    except _DAMAGE as error:
        told = f"{path}: cannot be read: {_why(path, error)}. Replace or remove it."
        raise UserError(told) from None
    missing = [name for name in _FIELDS if name not in columns]
    if missing:
        raise UserError(f"{path}: has no array {missing[0]!r}. Save t, x, y and p.")
    count = columns["t"].shape[0] if columns["t"].ndim else 0
    for name in _FIELDS:
        column = columns[name]
        if column.ndim != 1 or len(column) != count:
            raise UserError(
                f"{path}: {name} has the shape {column.shape}, t {columns['t'].shape}. One number "
                "an event is wanted of each."
            )
        if column.dtype.kind not in ("iub" if name == "p" else "iu"):
            wanted = "whole microseconds" if name == "t" else "whole numbers"
            raise UserError(f"{path}: {name} is {column.dtype}; {wanted} are wanted.")
        # unsigned numbers would wrap where they are subtracted or compared
        columns[name] = column.astype(np.int64, copy=False)
    return columns


def _why(path: Path, error: Exception) -> str:
    """Say in a few words what NumPy stumbled over."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if not path.stat().st_size:
        return "the file is empty"
    if "pickle" in str(error):  # NumPy takes what it does not know for a pickle
        return "it is no .npz file of plain numbers"
    return "it is cut off or damaged"


def _sensor_of(path: Path, value: NDArray[Any] | None) -> Size | None:
    if value is None:
        return None
    sides = value.tolist()
    if value.shape != (2,) or not all(type(s) is int and 0 < s <= LARGEST_SIDE for s in sides):
        raise UserError(f"{path}: sensor_size is {sides!r}; height and width are wanted.")
    return sides[0], sides[1]
