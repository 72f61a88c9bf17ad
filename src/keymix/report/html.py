# SPDX-License-Identifier: Apache-2.0
"""One comparison as one offline HTML page: from the plain record of ``results.json``, no torch.

The page's script sorts tables, picks attention maps and compares two runs; `keymix.report.page`
says what holds for every page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keymix.data.tasks import SEGMENTATION, task_of
from keymix.errors import UserError
from keymix.report import plots
from keymix.report.page import render_page
from keymix.report.views import (
    attention,
    classes,
    gallery,
    learning,
    mask_classes,
    outcome,
    runs,
    spikes,
)
from keymix.report.views.payload import payload
from keymix.report.views.wording import columns, wording

FORMAT = 2
"""Version of the record that this page understands (``record["format"]``)."""

SCRIPTS = ("core", "tables", "attention", "answers", "pair")
"""Files of ``templates/script``, in the order they are joined."""
MASK_SCRIPTS = tuple("overlaps" if name == "answers" else name for name in SCRIPTS)
"""Those where images have masks."""

Record = Mapping[str, Any]


def render(record: Record) -> str:
    """Render a comparison's record.

    Args:
        record: The content of ``results.json``, which `keymix.compare.gather` makes.

    Returns:
        The HTML document.

    Raises:
        UserError: If the record has another format version.
    """
    if record.get("format") != FORMAT:
        raise UserError(
            f"record of format {record.get('format')!r} cannot be shown; this keymix reads format "
            f"{FORMAT}. Run `keymix compare` again with the same command (finished runs are kept)."
        )
    labels = [m["label"] for m in record["mixers"]]
    controls = [m["label"] for m in record["mixers"] if m["control"]]
    looks = plots.looks(labels, baseline=record["baseline"], controls=controls)
    masks = task_of(record) is SEGMENTATION
    return render_page(
        "report.html.j2",
        _view(record, looks),
        payload=payload(record, looks),
        scripts=MASK_SCRIPTS if masks else SCRIPTS,
    )


def _view(record: Record, looks: Mapping[str, plots.Look]) -> dict[str, Any]:
    labels = [m["label"] for m in record["mixers"]]
    last = record["outcome"]["last"]
    dense, at = spikes.dense_over(record)
    task = task_of(record)
    masks = task is SEGMENTATION
    return {
        "r": record,
        "looks": looks,
        "others": [row for row in last if row["mixer"] != record["baseline"]],
        "failed": runs.unfinished(record, "failed"),
        "waiting": runs.unfinished(record, "missing"),
        "noted": runs.noted(record),
        "absent": runs.without_runs(record),
        "done": sum(run["status"] == "done" for run in record["runs"]),
        "ratio": {label: runs.ratio(record, label) for label in labels},
        "checked": record.get("data_check"),
        "status": runs.STATUS,
        "environments": runs.environments(record),
        "masks": masks,
        "score": task.score,
        "w": wording(task),
        "columns": columns(record),
        "forest": outcome.forest(record, looks),
        "scatters": outcome.scatters(record, looks),
        "spikes": spikes.sheet(record),
        "dense": dense,
        "at": at,
        "curves": learning.curves(record, looks),
        "collapse": learning.collapse(record, looks),
        "classes": (mask_classes if masks else classes).by_class(record, looks),
        "gallery": gallery.sheet(record),
        "attention": attention.sheet(record),
        "seconds": sum(run.get("seconds") or 0 for run in record["runs"]),
    }
