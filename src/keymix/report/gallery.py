# SPDX-License-Identifier: Apache-2.0
"""Test images in pictures: the truth and what each mixer answers, of one type for all tasks.

A task chooses the images and makes the panels; a panel's mask lies over the image as a transparent
picture and its boxes as vectors, so that a page contains each image once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keymix.report.record import Attention, Collapse, Sparse

WIDTH = 360
"""Width of a picture in the units of its boxes."""
Kind = Literal["right", "wrong", "crowd"]
"""A ``wrong`` box finds no instance; a ``crowd`` counts neither as right nor as wrong."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box over a picture: left, top, width, height, where the picture's width is `WIDTH`."""

    place: tuple[float, float, float, float]
    text: str
    colour: str
    kind: Kind = "right"


@dataclass(frozen=True, kw_only=True)
class Panel(Sparse):
    """The truth of an image, or an answer to it.

    `mixers` are those that gave the answer, with a figure of each, such as its probability; none of
    the truth. `layers` are transparent pictures of masks, one of which is shown at a time.
    """

    mixers: Mapping[str, str] = field(default_factory=dict)
    text: str
    right: bool | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A test image as a data URI, its height and width, and its panels, the truth first.

    `id` is where it is from, `name` what the page calls it; the last part of the `id`, if empty.
    `why` says in a few words why it was chosen.
    """

    id: str
    name: str = ""
    why: str = ""
    picture: str
    size: tuple[int, int]
    panels: tuple[Panel, ...]

    @property
    def shown(self) -> str:
        """What the page calls it."""
        return self.name or self.id.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Gallery(Sparse):
    """A few test images and the answers to them.

    `about` are the numbers of its heading and note, which the macro of its name in the task's
    ``captions.html.j2`` writes. `legends` are names and colours of what each layer shows, `missing`
    says why a mixer's model gave no answer, and `names` are of all test images.
    """

    scenes: tuple[Scene, ...]
    about: Mapping[str, bool | int | float] = field(default_factory=dict)
    legends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] | None = None

    @property
    def drawn(self) -> bool:
        """Whether answers lie over the images, as masks or boxes do, or stand below them."""
        panels = (panel for scene in self.scenes for panel in scene.panels)
        return any(panel.layers or panel.boxes for panel in panels)


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """What was read off the models and the images, next to the results; None where it could not be.

    `galleries` are the task's, by name and in order; `notes` say what failed, for who ran it.
    """

    attention: Attention | None = None
    collapse: Collapse | None = None
    galleries: Mapping[str, Gallery] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NO_PICTURES = Pictures()
