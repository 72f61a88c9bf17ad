# SPDX-License-Identifier: Apache-2.0
"""One comparison as one offline HTML page: from the record of ``results.json``, no torch.

The page's script sorts tables, picks attention maps and compares two runs; `keymix.report.page`
says what holds for every page, and `keymix.report.part` what a task adds to this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keymix.records import to_json
from keymix.report import charts
from keymix.report.page import Script, render_page
from keymix.report.part import Page, page_of
from keymix.report.record import ComparisonRecord, DoneRun
from keymix.report.views import attention, learning, outcome, runs, spikes
from keymix.report.views.payload import payload
from keymix.report.views.wording import columns, wording

SCRIPTS = ("core", "tables", "attention")
"""Files of ``templates/script``, in the order they are joined."""


def render(record: ComparisonRecord) -> str:
    """Render a comparison's record.

    Args:
        record: What `keymix.compare.record` makes, or `keymix.report.record.opened` reads.

    Returns:
        The HTML document.

    Raises:
        UserError: If a picture of the record is none.
    """
    controls = [mixer.label for mixer in record.mixers if mixer.control]
    looks = charts.looks(record.labels, baseline=record.baseline, controls=controls)
    page = page_of(record.task_kind)
    own: list[Script] = [(page.package, name) for name in page.scripts] or ["contrast"]
    view = _view(record, looks, page)
    return render_page(
        "report.html.j2",
        view,
        payload=payload(record, looks, page),
        scripts=(*SCRIPTS, *own, "pair"),
        package=page.package if view["own_sections"] else "",
    )


def _view(record: ComparisonRecord, looks: Mapping[str, charts.Look], page: Page) -> dict[str, Any]:
    dense, at = spikes.dense_over(record)
    task = record.task_kind
    done = [run for run in record.runs if isinstance(run, DoneRun)]
    return {
        "r": record,
        "recipe": record.recipe.to_dict(),
        "data": to_json(record.data),
        "looks": looks,
        "others": [row for row in record.outcome.last if row.mixer != record.baseline],
        "failed": runs.unfinished(record, "failed"),
        "waiting": runs.unfinished(record, "missing"),
        "noted": runs.noted(record),
        "absent": runs.without_runs(record),
        "done": len(done),
        "ratio": {label: runs.ratio(record, label) for label in record.labels},
        "checked": record.data_check,
        "status": runs.STATUS,
        "environments": runs.environments(record),
        "score": task.score,
        "w": wording(record),
        "columns": columns(record),
        "about_table": page.about_table(record),
        "pair_note": page.pair_note,
        "label_is": page.label_is,
        "forest": outcome.forest(record, looks),
        "scatters": outcome.scatters(record, looks),
        "spikes": spikes.sheet(record),
        "dense": dense,
        "at": at,
        "curves": learning.curves(record, looks),
        "collapse": learning.collapse(record, looks),
        "own_sections": page.sections(record, looks),
        "attention": attention.sheet(record),
        "seconds": sum(run.seconds for run in done),
    }
