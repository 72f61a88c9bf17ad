# SPDX-License-Identifier: Apache-2.0
r"""Moving digits: what an event camera would see of scikit-learn's digits during three saccades.

Each of the 1,797 digits (8x8 pixels, https://doi.org/10.24432/C50P49), doubled in size, lies at its
own place before a sensor of 32x32 pixels that looks along a triangle, as the camera of N-MNIST does
(Orchard et al. 2015, https://doi.org/10.3389/fnins.2015.00437), 100 ms per side, its corners the
recording's own. A pixel sends an event when the logarithm of its brightness, log(0.1 + b) with b in
[0, 1], has changed by 0.35 since its last one (Lichtsteiner et al. 2008,
https://doi.org/10.1109/JSSC.2007.914337); an event's time lies within the step of 5 ms in which it
happened, by a hash. 64 events of noise happen anywhere.

Everything is a function of the digit's number: there is one such set.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from keymix.data.events.cache import Settings, recorded
from keymix.data.events.frames import TIME_STEPS
from keymix.data.events.stream import Events, Size, make_events
from keymix.data.sample import Faults, Source
from keymix.data.specs import source
from keymix.data.streams import IntArray, Stream, uniforms
from keymix.errors import UserError

SENSOR: Size = (32, 32)
LARGEST = 1797
_LEAST = 100
_SEED = 20261  # fixed: saccades are part of the data set
_STEP = 5_000  # microseconds
_STEPS = 60
_THRESHOLD, _FLOOR = 0.35, 0.1
_NOISE = 64  # events a recording
_REACH = 5.0  # pixels: how far a corner of the triangle lies from the middle, along each axis
_GROUP = 64


@source(
    "moving_digits",
    argument="[N]",
    summary="events that a camera would see of scikit-learn's 1,797 digits in saccades, 32x32 "
    "pixels, the first N of them; no download",
    kind="recording",
)
def open_moving_digits(
    argument: str,
    faults: Faults,
    *,
    time_steps: int = TIME_STEPS,
    frames_by: str = "number",
    image_size: Size | None = None,
) -> Source:
    """Open the first N of the moving digits, all by default; the test split (25 %) is split off."""
    count = LARGEST
    if argument:
        if not argument.isdecimal() or not _LEAST <= int(argument) <= LARGEST:
            raise UserError(
                f"data moving_digits:{argument}: how many recordings? Give a number from {_LEAST} "
                f"to {LARGEST}."
            )
        count = int(argument)
    rows = np.arange(count, dtype=np.int64)
    labels = _digits()[1].tolist()
    found = recorded(
        [(_id(row), labels[row], "train") for row in range(count)],
        [partial(recordings_of, rows[a : a + _GROUP]) for a in range(0, count, _GROUP)],
        Settings(SENSOR, time_steps, frames_by, image_size),
        classes=tuple(str(d) for d in range(10)),
        notes=("synthesised from scikit-learn's digits: simulated saccades, no camera",),
    )
    return replace(found, test_fraction=0.25)


@cache
def _digits() -> tuple[NDArray[np.float64], IntArray]:
    """The digits in [0, 1], doubled in size, ``[N, 16, 16]``, and their classes."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    large = np.kron(bunch.images / 16, np.ones((1, 2, 2)))
    return large, bunch.target.astype(np.int64)


def _id(row: int) -> str:
    return f"moving_digits recording {row}"


def recordings_of(rows: IntArray) -> list[Events]:
    """Record some of the digits, by number."""
    changes = _changes(_seen(_digits()[0][rows], rows))
    return [_events(found, row) for row, found in zip(rows.tolist(), changes, strict=True)]


def _seen(digits: NDArray[np.float64], rows: IntArray) -> NDArray[np.float64]:
    """Render what the sensor sees: brightness ``[n, steps + 1, H, W]`` in [0, 1]."""
    draws = uniforms(6, _SEED, Stream.SACCADES, rows)
    corners = (2 * draws - 1).reshape(-1, 3, 2) * _REACH  # [n, 3, (y, x)], from the middle
    at = np.arange(_STEPS + 1) * 3 / _STEPS
    side = np.minimum(at.astype(np.int64), 2)
    share = (at - side)[:, None]
    path = corners[:, side] * (1 - share) + corners[:, (side + 1) % 3] * share  # [n, steps + 1, 2]
    path = np.rint(path * 16) / 16  # sums of products are exact, on every machine
    own = digits.shape[-1]
    along = []
    for axis, pixels in enumerate(SENSOR):  # bilinear: how much of a digit's pixel each one sees
        place = (pixels - own) / 2 + path[:, :, axis, None, None]
        apart = np.arange(pixels)[:, None] - place - np.arange(own)
        along.append(np.maximum(0.0, 1.0 - np.abs(apart)))  # [n, steps + 1, pixels, own]
    seen: NDArray[np.float64] = along[0] @ digits[:, None] @ along[1].swapaxes(-1, -2)
    return seen


def _changes(seen: NDArray[np.float64]) -> NDArray[np.int64]:
    """Count each pixel's events in each step, brighter above 0; ``[n, steps, H, W]``."""
    level = np.log(_FLOOR + seen)
    last = level[:, 0]
    counts = []
    for step in range(1, level.shape[1]):
        changed = np.trunc((level[:, step] - last) / _THRESHOLD)
        last = last + changed * _THRESHOLD
        counts.append(changed.astype(np.int64))
    return np.stack(counts, axis=1)


def _events(changes: NDArray[np.int64], row: int) -> Events:
    """Spread the events of a recording over their steps, and add noise."""
    places = np.nonzero(changes)
    much = changes[places]
    step, y, x, p = (np.repeat(each, np.abs(much)) for each in (*places, much > 0))
    within = uniforms(1, _SEED, Stream.SACCADES, row, np.arange(len(step)))[:, 0]
    t = step * _STEP + np.floor(within * _STEP).astype(np.int64)
    height, width = SENSOR
    largest = np.array([_STEPS * _STEP, width, height, 2])
    noise = (uniforms(4, _SEED, Stream.SACCADES, row, -1 - np.arange(_NOISE)) * largest).astype(
        np.int64
    )
    found = np.concatenate([np.stack([t, x, y, p], axis=1), noise])
    t, x, y, p = found[np.argsort(found[:, 0], kind="stable")].T
    return make_events(_id(row), t=t, x=x, y=y, p=p, sensor=SENSOR)
