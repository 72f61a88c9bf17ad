# SPDX-License-Identifier: Apache-2.0
"""Two runs next to each other, which the page's script fills in."""

from __future__ import annotations

from collections.abc import Iterator

from keymix.report.part import Section, Shown

PLACE = 80


def sections(shown: Shown) -> Iterator[Section]:
    """Offer the finished runs, where there are two."""
    if sum(len(shown.record.finished(label)) for label in shown.record.labels) > 1:
        yield Section(template="sections/pair.html.j2", view=shown.page.pair_note)
