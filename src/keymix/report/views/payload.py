# SPDX-License-Identifier: Apache-2.0
"""What the page's script reads: the runs' answers by image, their curves and the packed maps."""

from __future__ import annotations

import json
from collections.abc import Mapping

from markupsafe import Markup

from keymix.data.tasks import SEGMENTATION
from keymix.records import to_json
from keymix.report import pictures
from keymix.report.plots import Look
from keymix.report.record import ComparisonRecord, DoneRun, OpenRun
from keymix.report.views.attention import LEVELS
from keymix.report.views.learning import history
from keymix.report.views.runs import STATUS
from keymix.task import Task

DIGITS = 5
"""Significant digits of the curves' values."""

SHARES = 65535
"""A stored Jaccard index of this many is 1."""


def payload(record: ComparisonRecord, looks: Mapping[str, Look]) -> Markup:
    """Make the JSON that stands in the page; no text in it can end its element."""
    task = record.task_kind
    content: dict[str, object] = {
        "kind": "name" if task is SEGMENTATION else "class",
        "baseline": record.baseline,
        "mixers": [{"label": m, "colour": look.colour} for m, look in looks.items()],
        "runs": [_run(run, task) for run in record.runs],
        "testImages": record.test_images,
        "classes": {
            "names": record.classes.names,
            "images": record.classes.test_images,
        },
        "environments": [group.lines for group in record.trained_with],
        "curves": [
            {"key": key, "label": label, "percent": percent}
            for key, label, percent in history(task)
        ],
        "attention": _attention(record),
    }
    if task is SEGMENTATION:
        content |= {"levels": SHARES, "names": record.gallery.names if record.gallery else None}
    return as_element_text(content)


def as_element_text(content: object) -> Markup:
    """Write JSON that is safe inside a script element: ``<``, ``>`` and ``&`` as escapes."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _run(run: OpenRun | DoneRun, task: Task) -> dict[str, object]:
    told = {"mixer": run.mixer, "seed": run.seed, "status": STATUS[run.status]}
    if isinstance(run, OpenRun):
        return told | {"done": False}
    return told | {
        "done": True,
        "score": run.last.test[task.score.key],
        "seconds": run.seconds,
        **_answers(run, task),
        "environment": run.trained_with,
        "epochs": [line.epoch for line in run.history],
        "history": {
            key: [_short(line.values[key]) for line in run.history] for key, _, _ in history(task)
        },
    }


def _answers(run: DoneRun, task: Task) -> dict[str, object]:
    if task is SEGMENTATION:
        return {"overlaps": run.overlaps, "classes": [row.jaccard for row in run.classes or ()]}
    return {"correct": run.correct, "classCorrect": run.class_correct}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _attention(record: ComparisonRecord) -> dict[str, object] | None:
    stored = record.attention
    if not stored or not stored.maps:
        return None
    return {
        "images": [{"label": image.label, "id": image.id} for image in stored.images],
        "layers": stored.layers,
        "maps": to_json(stored.maps),
        "missing": stored.missing,
        "levels": LEVELS,
        "heat": pictures.HEAT,
        "full": pictures.FULL,
        "opacity": pictures.OPACITY,
    }
