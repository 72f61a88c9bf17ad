# SPDX-License-Identifier: Apache-2.0
"""One comparison as one offline HTML page: from the plain record of ``results.json``, no torch.

The page's script sorts tables, picks attention maps and compares two runs; `keymix.report.page`
says what holds for every page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keymix.errors import UserError
from keymix.report import plots
from keymix.report.page import render_page
from keymix.report.views import attention, classes, learning, outcome, runs, spikes
from keymix.report.views.payload import payload

FORMAT = 2
"""Version of the record that this page understands (``record["format"]``)."""

SCRIPTS = ("core", "tables", "attention", "pair")
"""Files of ``templates/script``, in the order they are joined."""

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
    return render_page(
        "report.html.j2", _view(record, looks), payload=payload(record, looks), scripts=SCRIPTS
    )


def _view(record: Record, looks: Mapping[str, plots.Look]) -> dict[str, Any]:
    labels = [m["label"] for m in record["mixers"]]
    last = record["outcome"]["last"]
    dense, at = spikes.dense_over(record)
    return {
        "r": record,
        "looks": looks,
        "others": [row for row in last if row["mixer"] != record["baseline"]],
        "failed": runs.unfinished(record, "failed"),
        "waiting": runs.unfinished(record, "missing"),
        "absent": runs.without_runs(record),
        "done": sum(run["status"] == "done" for run in record["runs"]),
        "ratio": {label: runs.ratio(record, label) for label in labels},
        "status": runs.STATUS,
        "environments": runs.environments(record),
        "top5": any(row["top5"]["mean"] is not None for row in last),
        "forest": outcome.forest(record, looks),
        "scatters": outcome.scatters(record, looks),
        "spikes": spikes.sheet(record),
        "dense": dense,
        "at": at,
        "curves": learning.curves(record, looks),
        "collapse": learning.collapse(record, looks),
        "classes": classes.by_class(record, looks),
        "attention": attention.sheet(record),
        "seconds": sum(run.get("seconds") or 0 for run in record["runs"]),
    }
