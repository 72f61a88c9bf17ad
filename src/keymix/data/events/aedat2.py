# SPDX-License-Identifier: Apache-2.0
"""AEDAT 2.0, the format of CIFAR10-DVS: lines of ``#``, then big-endian words, two an event.

An event is an address and a time in microseconds, 32 bits each. The address of the 128x128 DVS
(https://docs.inivation.com/software/software-advanced-usage/file-formats/aedat-2.0.html): bit 0
polarity, bits 1-7 column, bits 8-14 row, bit 15 an external signal that is no event of a pixel.
CIFAR10-DVS (Li et al. 2017, https://doi.org/10.3389/fnins.2017.00309) was recorded with a camera on
its side, and with the bit of polarity cleared for brighter: x = 127 - row, y = 127 - column,
p = 1 - bit, as SpikingJelly reads it.

The reader is our own because SpikingJelly's takes a file that ends in mid-event for a short one
where its words are even, masks addresses of other cameras, and does not look at times.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from keymix.data.events.stream import Events, Size, make_events
from keymix.data.files import regular
from keymix.errors import UserError

SENSOR: Size = (128, 128)
_VERSION = b"#!AER-DAT2.0"
_EVENT = 8  # bytes
_EXTERNAL = 0x8000


def read_aedat2(path: Path) -> Events:
    """Read a recording of CIFAR10-DVS."""
    content = regular(path).read_bytes()
    start = _header(path, content)
    length = len(content) - start
    if length % _EVENT:
        raise UserError(
            f"{path}: the file ends in mid-event: event {length // _EVENT} has {length % _EVENT} "
            f"of {_EVENT} bytes. Download or copy the file again."
        )
    words = np.frombuffer(content, dtype=">u4", offset=start).reshape(-1, 2).astype(np.int64)
    address, t = words[:, 0], words[:, 1]
    foreign = address > 0xFFFF
    if foreign.any():
        at = int(foreign.argmax())
        raise UserError(
            f"{path}: event {at} has the address 0x{int(address[at]):08x}, which is outside the "
            "128x128 sensor (16 bits). The file is damaged, or of another camera."
        )
    numbers = np.flatnonzero(address & _EXTERNAL == 0)
    address, t = address[numbers], t[numbers]
    return make_events(
        str(path),
        t=t,
        x=127 - (address >> 8 & 0x7F),
        y=127 - (address >> 1 & 0x7F),
        p=1 - (address & 1),
        sensor=SENSOR,
        numbers=numbers,
    )


def _header(path: Path, content: bytes) -> int:
    """Find where the events begin."""
    if not content:
        raise UserError(f"{path}: the file is empty. Download or copy it again.")
    if not content.startswith(_VERSION):
        first = content[:16].split(b"\n")[0].strip()
        raise UserError(
            f"{path}: the header is broken: the file begins with {first!r}, not with "
            f"{_VERSION.decode()!r}. Give an AEDAT 2.0 file."
        )
    at = 0
    while content[at : at + 1] == b"#":
        end = content.find(b"\n", at)
        if end < 0:
            raise UserError(
                f"{path}: the header is broken: its last line has no end. Copy the file again."
            )
        at = end + 1
    return at
