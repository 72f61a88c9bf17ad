# SPDX-License-Identifier: Apache-2.0
"""A first look at a data set, before it is loaded: how many images, how large, grey or colour."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keymix.data.decode import DAMAGE, Encoded, upright_size
from keymix.data.sample import Faults, Size, select
from keymix.data.specs import parse

SAMPLE = 200
"""Images whose headers are read, evenly spread over the training images."""
_GREY = ("1", "L", "I", "I;16", "I;16B", "I;16L")
"""Pillow's modes of images without colour."""


@dataclass(frozen=True, kw_only=True)
class Headers:
    """What the headers of a sample of images say."""

    count: int  # images of all splits
    size: Size  # median height and width, pixels
    same: bool  # whether all have this size
    grey: bool  # whether none has colour
    classes: tuple[str, ...]  # names; none where targets are others

    @property
    def text(self) -> str:
        """Say it in a few words, such as ``13,165 grey images of 64x64``."""
        colour = "grey " if self.grey else ""
        about = "" if self.same else "about "
        return f"{self.count:,} {colour}images of {about}{self.size[1]}x{self.size[0]}"


def read_headers(spec: str) -> Headers:
    """Read sizes and colour of a sample of images; broken ones are passed over."""
    entry, argument = parse(spec)
    source = entry.open(argument, Faults()).by_position(spec)
    train = np.flatnonzero([row.split in ("", "train") for row in source.rows])
    chosen = np.unique(np.linspace(0, len(train) - 1, SAMPLE).astype(np.int64))
    sizes: list[Size] = []
    modes: set[str] = set()
    for row in select(source.rows, train[chosen]):
        if not isinstance(row.image, Encoded):
            pixels = row.image()
            sizes.append((pixels.shape[-2], pixels.shape[-1]))
            modes.add("L" if len(pixels) == 1 else "RGB")
            break
        try:
            with row.image.open() as image:
                sizes.append(upright_size(image))
                modes.add(image.mode)
        except DAMAGE:
            continue
    found = np.array(sizes or [source.image_size or (0, 0)])
    height, width = (int(side) for side in np.median(found, axis=0))
    return Headers(
        count=len(source.rows),
        size=(height, width),
        same=len(np.unique(found, axis=0)) == 1,
        grey=bool(modes) and all(mode in _GREY for mode in modes),
        classes=source.classes,
    )
