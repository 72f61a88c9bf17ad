# SPDX-License-Identifier: Apache-2.0
r"""Readers of AEDAT 2.0 (CIFAR10-DVS) and AEDAT 3.1 (DVS128 Gesture).

AEDAT 2.0: lines of ``#``, then big-endian words, two an event.

An event is an address and a time in microseconds, 32 bits each. The address of the 128x128 DVS
(https://docs.inivation.com/software/software-advanced-usage/file-formats/aedat-2.0.html): bit 0
polarity, bits 1-7 column, bits 8-14 row, bit 15 an external signal that is no event of a pixel.
CIFAR10-DVS (Li et al. 2017, https://doi.org/10.3389/fnins.2017.00309) was recorded with a camera on
its side, and with the bit of polarity cleared for brighter: x = 127 - row, y = 127 - column,
p = 1 - bit, as SpikingJelly reads it.

Its reader is our own because SpikingJelly's takes a file that ends in mid-event for a short one
where its words are even, masks addresses of other cameras, and does not look at times.

AEDAT 3.1: a header in text, then little-endian packets.

A packet (https://docs.inivation.com/software/software-advanced-usage/file-formats/aedat-3.1.html)
has 28 bytes of header: type and source (16 bits each), bytes an event, offset of the time in an
event, overflows of the time, room for events, events, valid events (32 bits each). A polarity event
(type 1) is 8 bytes: bit 0 valid, bit 1 polarity, bits 2-16 row, bits 17-31 column, then the time in
microseconds, 31 bits; the overflows stand above them. Packets of other types are skipped, and so
are events that the camera's software marked invalid.

Its reader is our own because SpikingJelly's takes a packet that is cut off for a short one, reads
invalid events as valid ones, and loops over events in Python.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keymix.data.events.stream import Events, Size, make_events
from keymix.errors import UserError

SENSOR: Size = (128, 128)
_VERSION = "#!AER-DAT"
_EVENT = 8  # bytes
_EXTERNAL = 0x8000
_FORMAT = re.compile(rb"#Format: *(\S+)")
_HEADER = struct.Struct("<hhiiiiii")
_POLARITY = 1
_BYTES, _TIME = 8, 4  # of a polarity event, and where its time begins


def content_of(path: Path) -> bytes:
    """Read a file whole."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None


def read_aedat2(path: Path) -> Events:
    """Read a recording of CIFAR10-DVS."""
    content = content_of(path)
    start = _after_text(path, content, "2.0")
    length = len(content) - start
    if length % _EVENT:
        raise UserError(
            f"{path}: the file ends in mid-event: event {length // _EVENT} has {length % _EVENT} "
            f"of {_EVENT} bytes. Download or copy the file again."
        )
    words = np.frombuffer(content, dtype=">u4", offset=start).reshape(-1, 2).astype(np.int64)
    address, t = words[:, 0], words[:, 1]
    own = address & _EXTERNAL == 0
    address, t = address[own], t[own]
    x, y = 127 - (address >> 8), 127 - (address >> 1 & 0x7F)  # of another camera, x is below 0
    return make_events(str(path), t=t, x=x, y=y, p=1 - (address & 1), sensor=SENSOR)


def read_aedat3(path: Path, sensor: Size = SENSOR) -> Events:
    """Read all polarity events of a recording."""
    content = content_of(path)
    at = _after_text(path, content, "3.1", b"#!END-HEADER")
    if (form := _FORMAT.search(content[:at])) and form[1] != b"RAW":
        kind = form[1].decode("ascii", "replace")
        raise UserError(f"{path}: its packets are {kind!r}; only 'RAW' can be read.")
    parts: list[NDArray[np.int64]] = []
    first = 0  # the number of the packet's first event among the file's polarity events
    while at < len(content):
        kind, overflow, number, length = _packet(path, content, at, first)
        at += _HEADER.size
        if kind == _POLARITY:
            words = np.frombuffer(content, "<u4", 2 * number, at).reshape(-1, 2).astype(np.int64)
            data, t = words[:, 0], words[:, 1] | overflow << 31
            columns = np.stack([t, data >> 17, data >> 2 & 0x7FFF, data >> 1 & 1])
            parts.append(columns[:, np.flatnonzero(data & 1)])
            first += number
        at += length
    t, x, y, p = np.concatenate([np.zeros((4, 0), dtype=np.int64), *parts], axis=1)
    return make_events(str(path), t=t, x=x, y=y, p=p, sensor=sensor)


def _after_text(path: Path, content: bytes, version: str, end: bytes = b"") -> int:
    """Find where the events begin: after the lines of ``#``, or after the line ``end``."""
    if not content:
        raise UserError(f"{path}: the file is empty. Download or copy it again.")
    wanted = f"{_VERSION}{version}"
    if not content.startswith(wanted.encode()):
        first = content[:16].split(b"\n")[0].strip()
        raise UserError(
            f"{path}: the header is broken: the file begins with {first!r}, not with "
            f"{wanted!r}. Give an AEDAT {version} file."
        )
    at, stop, line = 0, 1, b""
    while stop and (not end or line != end) and content[at : at + 1] == b"#":
        stop = content.find(b"\n", at) + 1
        line, at = content[at:stop].strip(), stop
    if not stop or (end and line != end):
        why = f"there is no line {end.decode()!r}" if end else "its last line has no end"
        raise UserError(f"{path}: the header is broken: {why}. Copy the file again.")
    return at


def _packet(path: Path, content: bytes, at: int, first: int) -> tuple[int, int, int, int]:
    """Read a packet's header and check that the packet is whole.

    Returns its type, the overflows of its time, its events, and the bytes that follow.
    """
    left = len(content) - at
    whole, there = left >= _HEADER.size, left - _HEADER.size
    if whole:
        kind, _, size, offset, overflow, capacity, number, valid = _HEADER.unpack_from(content, at)
        fits = 0 <= valid <= number <= capacity and size > 0 and overflow >= 0
        if not fits or (kind == _POLARITY and (size, offset) != (_BYTES, _TIME)):
            raise UserError(
                f"{path}: the packet after event {first - 1}, at byte {at}, is damaged. Download "
                "the file again."
            )
    if not whole or there < capacity * size:
        raise UserError(
            f"{path}: the file ends in mid-packet after event {first - 1}. Download or copy the "
            "file again."
        )
    return kind, overflow, number, capacity * size
