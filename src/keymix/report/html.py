# SPDX-License-Identifier: Apache-2.0
"""One comparison as one offline HTML page: from the plain record of ``results.json``, no torch.

The page asks nothing of the network. It is complete without its script; the script sorts tables,
picks attention maps and compares two runs. The page's content policy lets that one script run,
known by its hash, and nothing else. Every text of the record is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape

from keymix.errors import UserError
from keymix.report import formats, plots
from keymix.report.views import attention, classes, learning, outcome, runs
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
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("keymix.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": formats.percent,
        "points": formats.points,
        "count": formats.count,
        "ms": formats.milliseconds,
        "rate": formats.rate,
        "mib": formats.mib,
        "duration": formats.duration,
        "breakable": _breakable,
        "nice_json": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    }
    env.filters.update(filters)
    env.globals["span"] = formats.span
    return env.get_template("report.html.j2").render(_view(record))


def script() -> str:
    """Return the page's script: its files, joined into one function that shares no names."""
    folder = files("keymix.report") / "templates" / "script"
    parts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def digest(text: str) -> str:
    """Return a script's hash as a content policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _breakable(label: str) -> Markup:
    """Let a long label break behind brackets, commas, slashes, equals signs and underscores."""
    text = escape(label)
    for mark in "(,/=_":
        text = text.replace(mark, Markup(mark) + Markup("<wbr>"))
    return text


def _view(record: Record) -> dict[str, Any]:
    labels = [m["label"] for m in record["mixers"]]
    controls = [m["label"] for m in record["mixers"] if m["control"]]
    looks = plots.looks(labels, baseline=record["baseline"], controls=controls)
    last = record["outcome"]["last"]
    code = script()
    return {
        "r": record,
        "script": Markup(code),
        "digest": digest(code),
        "payload": payload(record, looks),
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
        "curves": learning.curves(record, looks),
        "collapse": learning.collapse(record, looks),
        "classes": classes.by_class(record, looks),
        "attention": attention.sheet(record),
        "seconds": sum(run.get("seconds") or 0 for run in record["runs"]),
    }
