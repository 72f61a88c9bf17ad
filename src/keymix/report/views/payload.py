# SPDX-License-Identifier: Apache-2.0
"""What the page's script reads: the runs' answers by image, their curves and the packed maps."""

from __future__ import annotations

from collections.abc import Mapping

from keymix.records import to_json
from keymix.report import pictures
from keymix.report.charts import Look
from keymix.report.part import Page
from keymix.report.record import ComparisonRecord, DoneRun, OpenRun
from keymix.report.views.attention import LEVELS
from keymix.report.views.learning import history
from keymix.report.views.runs import STATUS
from keymix.task import Score, Task

DIGITS = 5
"""Significant digits of the curves' values."""


def payload(record: ComparisonRecord, looks: Mapping[str, Look], page: Page) -> object:
    """Make what the page's script reads."""
    task = record.task_kind
    content: dict[str, object] = {
        "kind": page.label_is,
        "score": _score(task.score),
        "inputs": record.data.kind.nouns,
        "baseline": record.baseline,
        "mixers": [{"label": m, "colour": look.colour} for m, look in looks.items()],
        "runs": [_run(run, task, page) for run in record.runs],
        "testImages": record.test_images,
        "environments": [group.lines for group in record.trained_with],
        "curves": [
            {"key": key, "label": label, "percent": percent}
            for key, label, percent in history(task)
        ],
        "attention": _attention(record),
        **_plain(page.of_comparison(record)),
    }
    return content


def _plain(record: object) -> dict[str, object]:
    """A task's part of the payload as plain values."""
    return {} if record is None else dict(to_json(record))


def _score(score: Score) -> dict[str, object]:
    """What the script needs to write a score."""
    return {
        "name": score.name,
        "label": score.label,
        "unit": score.unit,
        "scale": score.scale,
        "places": 1 if score.unit == "%" else score.places,
        "difference": score.difference_unit,
        "better": score.better,
    }


def _run(run: OpenRun | DoneRun, task: Task, page: Page) -> dict[str, object]:
    told = {"mixer": run.mixer, "seed": run.seed, "status": STATUS[run.status]}
    if isinstance(run, OpenRun):
        return told | {"done": False}
    return told | {
        "done": True,
        "score": run.last.test[task.score.key],
        "seconds": run.seconds,
        **_plain(page.of_run(run)),
        "environment": run.trained_with,
        "epochs": [line.epoch for line in run.history],
        "history": {
            key: [_short(line.values.get(key)) for line in run.history]
            for key, _, _ in history(task)
        },
    }


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
