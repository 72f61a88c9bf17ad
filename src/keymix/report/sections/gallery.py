# SPDX-License-Identifier: Apache-2.0
"""Test images with what each mixer answers, as the task chose and drew them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keymix.report.gallery import Gallery
from keymix.report.part import Section, Shown
from keymix.report.pictures import TINY

PLACE = 55


@dataclass(frozen=True, kw_only=True)
class GalleryView:
    """A gallery, its name, and whether its images have so few pixels that each is seen."""

    name: str
    stored: Gallery
    tiny: bool


def sections(shown: Shown) -> Iterator[Section]:
    """Show every gallery; the answers of models that learned nothing are not worth a look."""
    if not shown.record.learned:
        return
    for i, (name, gallery) in enumerate(shown.pictures.galleries.items()):
        yield Section(
            name="" if i else "Pictures",
            template="sections/gallery.html.j2",
            view=GalleryView(
                name=name, stored=gallery, tiny=max(shown.record.data.image_size) <= TINY
            ),
            styles="sections/gallery.css.j2",
            images=[scene.id for scene in gallery.scenes],
        )
