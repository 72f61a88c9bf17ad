# SPDX-License-Identifier: Apache-2.0
"""What a task brings to a report: sections of its own, their scripts and what these read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from keymix.report.plots import Look
from keymix.report.record import ComparisonRecord, DoneRun
from keymix.task import Task


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a task.

    Args:
        template: Its template, below the task's folder.
        view: What the template reads, under the name ``view``.
    """

    template: str
    view: object


class Page:
    """What a task shows in a comparison's report; a task without a page of its own has this one.

    ``package`` is the package in which ``templates`` and ``script`` lie; empty for none.
    ``scripts`` names files of ``script``, which follow the page's own; one of them defines
    ``contrast(a, b)`` for two runs side by side.
    """

    package: str = ""
    scripts: Sequence[str] = ()

    def sections(self, record: ComparisonRecord, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Make the task's sections, in order."""
        del record, looks
        return ()

    def of_run(self, run: DoneRun) -> object:
        """What the script reads of a finished run: a dataclass, or None for nothing."""
        del run
        return None

    def of_comparison(self, record: ComparisonRecord) -> object:
        """What the script reads of the comparison as a whole, likewise."""
        del record
        return None


def page_of(task: Task) -> Page:
    """Open a task's page; the one without sections where it has none."""
    return cast(Page, task.load("page")) if task.has("page") else Page()
