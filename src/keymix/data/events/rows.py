# SPDX-License-Identifier: Apache-2.0
"""Recordings as rows of a data set: frames, which are made, or found, when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from keymix.data.events.cache import Frames, Settings, frames_of
from keymix.data.events.recordings import Recordings
from keymix.data.sample import Fault, Row, Size, Stored, refuse

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


class FrameRows(Sequence[Row]):
    """Recordings as frames: the first row that is asked for makes those of all, or finds them."""

    def __init__(self, recordings: Recordings, settings: Settings) -> None:
        self._recordings, self._settings = recordings, settings

    def __len__(self) -> int:
        return len(self._recordings.ids)

    def __getitem__(self, i: Any) -> Any:
        """Make the row of recording ``i``."""
        of = self._recordings
        return Row(
            id=of.ids[i],
            image=Recorded(self._frames, i, of.ids[i]),
            target=of.labels[i],
            split=of.splits[i],
        )

    @cached_property
    def _frames(self) -> Frames:
        return frames_of(self._recordings, self._settings)


@dataclass(frozen=True)
class Recorded(Stored):
    """The frames of a recording, counts ``[T, 2, H, W]``."""

    frames: Frames  # of the whole set
    number: int
    id: str

    def __call__(self) -> Tensor:
        """Copy the frames."""
        self.check(decode=True)
        return self.frames.read(self.number)

    def check(self, *, decode: bool) -> Size:
        """Refuse a recording that could not be read."""
        del decode
        if self.number in self.frames.broken:
            refuse([Fault(self.id, self.frames.broken[self.number])], "recordings")
        return self.frames.size

    def digest(self, *, content: bool = True) -> bytes:
        """Give the hash of the frames, made with them."""
        del content
        return self.frames.digests[self.number].encode()


def few_events(data: ImageData) -> str:
    """Say in one line that recordings have fewer events than frames; nothing if none has.

    By number, floor(N / T) is 0 then: all events are in the last frame, and the others are empty.
    """
    few = [
        row.id
        for split in data.splits
        for row in split.rows
        if isinstance(row.image, Recorded) and row.image.number in row.image.frames.few
    ]
    if not few:
        return ""
    return (
        f"recordings of fewer events than T = {data.time_steps}: {len(few):,} of "
        f"{sum(map(len, data.splits)):,} (first: {few[0]}); frames of them are empty: take fewer "
        "time steps"
    )
