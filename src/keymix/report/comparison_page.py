# SPDX-License-Identifier: Apache-2.0
"""One comparison as one offline HTML page: from the record of ``results.json``, no torch.

The page's script sorts tables, picks attention maps and compares two runs; `keymix.report.page`
says what holds for every page, `keymix.report.sections` what this one shows, and
`keymix.report.part` what a task adds to it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

from keymix.analysis.statistics import FEW_CASES
from keymix.records import to_json
from keymix.report import pictures, sections
from keymix.report.answer import answer
from keymix.report.gallery import NO_PICTURES, Pictures
from keymix.report.page import Script, environment, render_page
from keymix.report.part import SHARES, Section, Shown
from keymix.report.record import Attention, DoneRun, OpenRun, Results
from keymix.report.sections.learning import history
from keymix.report.sections.runs import STATUS
from keymix.report.words import finding_text, said, say
from keymix.task import Score, Task

SCRIPTS = ("core", "tables", "answer", "attention")
"""Files of ``templates/script``, in the order they are joined."""


def render(record: Results, pictures: Pictures = NO_PICTURES) -> str:
    """Render a comparison's results, with the pictures next to them, as an HTML document."""
    shown = Shown.of(record, pictures)
    looks, page = shown.looks, shown.page
    own: list[Script] = [(page.package, name) for name in page.scripts] or ["contrast"]
    own = [*page.shared_scripts, *own]
    done = [run for run in record.runs if isinstance(run, DoneRun)]
    made = list(sections_of(shown))
    found = answer(record)
    view = {
        "r": record,
        "pictures": pictures,
        "looks": looks,
        "absent": [label for label in record.labels if not record.finished(label)],
        "done": len(done),
        "reference_labels": record.trained_references,
        "score": record.task_kind.score,
        "page": page,
        "own_captions": environment(page.package).select_template(
            ["own/captions.html.j2", "captions.html.j2"]
        ),
        "say": say,
        "said": said,
        "label_is": page.label_is,
        "few_cases": FEW_CASES,
        "sections": made,
        "pictured": say("pictured", record, len({x for each in made for x in each.images})),
        "lacks_maps": not (pictures.collapse or record.task_kind.whole_images),
        "answer": found,
        "findings": [finding_text(record, each) for each in record.findings],
        "pick": record.recommendation.pick,
    }
    return render_page(
        "report.html.j2",
        view,
        payload=payload(shown, subject=found.subject),
        scripts=(*SCRIPTS, *own, "pair"),
        package=page.package,
    )


def sections_of(shown: Shown) -> Iterator[Section]:
    """Make the sections, in order: those of `keymix.report.sections`, and the task's own."""
    found = [
        import_module(f"{sections.__name__}.{each.name}")
        for each in pkgutil.iter_modules(sections.__path__)
    ]
    placed = [(module.PLACE, module.sections) for module in found]
    for _, made in sorted([*placed, (sections.OWN, _own)], key=lambda each: each[0]):
        yield from made(shown)


def _own(shown: Shown) -> Iterator[Section]:
    """Make the task's sections; those with templates have them in its package.

    Answers of models that learned nothing are not worth a look.
    """
    if not shown.record.learned:
        return
    for section in shown.page.sections(shown.record, shown.looks):
        template, styles = (name and f"own/{name}" for name in (section.template, section.styles))
        yield replace(section, template=template, styles=styles)


# ---- what the script reads ------------------------------------------------------------------

DIGITS = 5
"""Significant digits of the curves' values."""


def payload(shown: Shown, *, subject: str = "") -> object:
    """Make what the page's script reads: runs, their curves, packed maps, the task's own.

    The `subject` is the mixer that the page is about.
    """
    record, looks, page = shown.record, shown.looks, shown.page
    task = record.task_kind
    return {
        "kind": page.label_is,
        "score": _score(task.score),
        "inputs": record.data.kind.nouns,
        "baseline": record.baseline,
        "subject": subject,
        "mixers": [{"label": m, "colour": look.colour} for m, look in looks.items()],
        "runs": [_run(run, task) for run in record.runs],
        "testImages": record.test_images,
        "environments": record.trained_with,
        "curves": [
            {"key": key, "label": label, "percent": percent}
            for key, label, percent in history(task)
        ],
        "attention": _attention(shown.pictures.attention),
        "names": next((g.names for g in shown.pictures.galleries.values() if g.names), None),
        **record.own.values,
    }


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


def _run(run: OpenRun | DoneRun, task: Task) -> dict[str, object]:
    known = {"mixer": run.mixer, "seed": run.seed, "status": STATUS[run.status]}
    if isinstance(run, OpenRun):
        return known | {"done": False}
    return known | {
        "done": True,
        "score": run.last.test[task.score.key],
        "seconds": run.seconds,
        **run.own.values,
        "environment": run.trained_with,
        "epochs": [line.epoch for line in run.history],
        "history": {
            key: [_short(line.values.get(key)) for line in run.history]
            for key, _, _ in history(task)
        },
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _attention(stored: Attention | None) -> dict[str, object] | None:
    if not stored or not stored.maps:
        return None
    return {
        "images": [{"label": image.label, "id": image.id} for image in stored.images],
        "layers": stored.layers,
        "maps": to_json(stored.maps),
        "missing": stored.missing,
        "said": to_json(stored.said or {}),
        "levels": SHARES,
        "heat": pictures.HEAT,
        "full": pictures.FULL,
        "opacity": pictures.OPACITY,
    }
