# SPDX-License-Identifier: Apache-2.0
"""Recordings of one's own: ``.npz`` files with the arrays t, x, y, p and, optional, sensor_size."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.events.stream import LARGEST_SIDE, Events, Size, make_events
from keymix.data.files import regular
from keymix.errors import UserError

_FIELDS = ("t", "x", "y", "p")
_SENSOR = "sensor_size"
_LARGE = 16 << 20  # bytes of an array; a larger one may shrink to no less than …
_DENSE = 100  # … this part of it in the file: real events shrink to a fifth or a tenth
_DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
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
    if (p == -1).any():
        if (p == 0).any():
            at = int((p == 0).argmax())
            raise UserError(
                f"{path}: event {at} has polarity 0 among others of -1; choose one way."
            )
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
        with regular(path).open("rb") as stream:
            if stream.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
                raise UserError(f"{path}: is no .npz file but one array. Save it with numpy.savez.")
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name in (*_FIELDS, _SENSOR)]
            for name in names:
                _check_size(path, file, name)
            columns = {name: file[name] for name in names}
    except UserError:
        raise
    except _DAMAGE as error:
        message = f"{path}: cannot be read: {_why(path, error)}. Replace or remove it."
        raise UserError(message) from None
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


def _check_size(path: Path, file: Any, name: str) -> None:
    """Refuse an array that would fill the memory, by the sizes that its file names."""
    within = {info.filename.removesuffix(".npy"): info for info in file.zip.infolist()}[name]
    if within.file_size > _LARGE and within.file_size > _DENSE * within.compress_size:
        raise UserError(
            f"{path}: {name} takes {within.compress_size:,} bytes and would unpack to "
            f"{within.file_size:,}. If it is a recording, save it with numpy.savez, not compressed."
        )
    with file.zip.open(within) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, kind = read(stream)
    if not kind.hasobject and math.prod(shape) * kind.itemsize > within.file_size:
        raise ValueError(f"{name} claims the shape {shape}")


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
