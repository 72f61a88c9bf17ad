# SPDX-License-Identifier: Apache-2.0
"""Recordings of event cameras: readers, frames, and the cache that frames are served from."""

from typing import TYPE_CHECKING

from keymix._lazy import attach

if TYPE_CHECKING:
    from keymix.data.events.frames import integrate as integrate
    from keymix.data.events.recordings import read_events as read_events
    from keymix.data.events.stream import Events as Events
    from keymix.data.events.stream import make_events as make_events

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Events": "keymix.data.events.stream",
        "integrate": "keymix.data.events.frames",
        "make_events": "keymix.data.events.stream",
        "read_events": "keymix.data.events.recordings",
    },
)
