# SPDX-License-Identifier: Apache-2.0
"""The record of a comparison, from its runs as they were read, and the report in words.

Tables and report are rendered from it. What is said of a task's scores, splits and intervals is
its page's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from keymix.analysis.certainty import (
    CLEAR_SEEDS,
    PROVISIONAL_SEEDS,
    alpha_of_look,
    smallest_margin,
)
from keymix.analysis.statistics import crossed_difference
from keymix.compare import environments
from keymix.compare.costs import SpikeRows, spike_table
from keymix.compare.findings import Found, decide, findings
from keymix.compare.outcome import Rules, Scores, caution, lead, outcome
from keymix.compare.pictures import Pictures
from keymix.compare.plan import Plan
from keymix.compare.references import References
from keymix.compare.runs import Finished, Reading
from keymix.data.check import quick_check
from keymix.data.dataset import ImageData
from keymix.data.findings import FALSIFIES, IN_SEQUENCES, LONE_CASE, NOTE, SEVERITY
from keymix.data.record import DataRecord, counts_left_out
from keymix.mixers.registry import get_mixer_class
from keymix.mixers.spec import parse_mixer
from keymix.records import Own
from keymix.report.checked import Checked, DataCheck, DataFinding, GradedFinding, Level
from keymix.report.formats import listing
from keymix.report.part import Page, page_of
from keymix.report.record import (
    ComparedMixer,
    ComparisonRecord,
    CostRow,
    Measured,
    Outcome,
    OutcomeRow,
    Paragraph,
    Readout,
    Tuning,
    Which,
)
from keymix.report.wording import unit_of
from keymix.train.environment import environment

NARROW = (
    "Intervals over test {units} are too narrow: {inputs} that belong together count as "
    "independent."
)
"""What frames of a sequence do to the second question."""
_NAMED = 3  # places of a finding that the record names
_SHOWN = 2  # ... and the terminal
_SPLITS = {"train": "training", "val": "validation"}


def make_record(
    plan: Plan,
    data: DataRecord,
    readings: Sequence[Reading],
    *,
    costs: Mapping[str, CostRow],
    measured: Measured,
    pictures: Pictures,
    images: bool,
    spikes: SpikeRows | None,
    checked: Checked | None,
    references: References,
    looks: tuple[int, ...],
    tuning: Tuning | None,
) -> ComparisonRecord:
    """Make the content of ``results.json``: all that the report shows."""
    task = data.task_kind
    done = [reading for reading in readings if isinstance(reading, Finished)]
    narrow = narrow_note(checked, data)
    again = bool(looks) and len(plan.seeds) <= looks[-1]
    look = len(looks) if again else len(looks) + 1
    margin = plan.margin
    rules = Rules(
        alpha=alpha_of_look(look),
        margin=margin,
        narrow=bool(narrow),
        controls=[each.label for each in plan.mixers if each.control],
        references=[each.label for each in plan.mixers if each.reference],
    )

    def rows(which: Which) -> tuple[OutcomeRow, ...]:
        return outcome(
            plan.labels,
            baseline=plan.baseline,
            seeds=plan.seeds,
            scores=_scores(plan, done, which),
            task=task,
            unit=unit_of(data),
            rules=rules,
        )

    outcomes = Outcome(last=rows("last"), best=rows("best"))
    found = Found(
        plan=plan, data=data, done=done, references=references, costs=costs, checked=checked
    )
    found_out = findings(found)
    kinds = {each.kind for each in found_out}
    intervals = {row.mixer: row.interval for row in outcomes.last}
    here = environments.lines(environment())
    trained_with, places = environments.distinct([reading.environment for reading in done])
    place = dict(zip(((r.run.mixer, r.run.seed) for r in done), places, strict=True))
    table = spike_table(plan, readings, spikes, costs, inputs=data.kind.nouns)
    own = Own.of(page_of(task).keep_comparison([reading.tested for reading in done], data))
    return ComparisonRecord(
        title=title(data),
        facts=facts(plan, data),
        lead=lead(outcomes.last, baseline=plan.baseline, task=task, inputs=data.kind.nouns),
        caution=caution(len(plan.seeds), task=task),
        created=time.strftime("%Y-%m-%d %H:%M %Z"),
        command=plan.command,
        environment={key: line for key, line in here.items() if key != "threads"},
        trained_with=trained_with,
        environment_warning=environments.warning(trained_with, here),
        data=data,
        data_line=data_line(data),
        data_check=None if checked is None else data_check(checked, data),
        left_out=data.left_out,
        recipe=plan.recipe,
        match=plan.match,
        readout=Readout(pooling=plan.pooling, because=plan.pooled_for),
        baseline=plan.baseline,
        seeds=plan.seeds,
        processes=plan.processes,
        threads=plan.threads,
        mixers=tuple(
            ComparedMixer(
                label=e.label, slug=e.slug, control=e.control, reference=e.reference, note=e.note
            )
            for e in plan.mixers
        ),
        mechanisms=mechanisms(plan),
        findings=found_out,
        outcome=outcomes,
        references=references.rows,
        recommendation=decide(found, kinds, intervals),
        tuning=tuning,
        margin=margin,
        looks=looks,
        alpha=rules.alpha,
        test_images=data.sizes["test"],
        costs=costs,
        measured=measured,
        spikes=table,
        method=method(
            plan,
            data,
            done=len(done),
            device=measured.device,
            narrow=narrow,
            shown=_margin_shown(found, rules.alpha),
            look=look,
        ),
        curves_note=curves_note(plan, data),
        runs=tuple(
            replace(r.run, trained_with=place[r.run.mixer, r.run.seed])
            if isinstance(r, Finished)
            else r
            for r in readings
        ),
        images=images,
        attention=pictures.attention,
        collapse=pictures.collapse,
        own=Own({**own.values, **pictures.own.values}),
    )


def mechanisms(plan: Plan) -> dict[str, str]:
    """Say what each mixer does, once where several rows have it."""
    labels = [each.label for each in plan.mixed if not each.ann_of]
    names = dict.fromkeys(name for label in labels for name in parse_mixer(label).names)
    about = {name: get_mixer_class(name).about for name in names}
    return {name: text for name, text in about.items() if text}


def _scores(plan: Plan, done: Sequence[Finished], which: Which) -> dict[str, dict[int, Scores]]:
    table: dict[str, dict[int, Scores]] = {label: {} for label in plan.labels}
    for reading in done:
        table[reading.run.mixer][reading.run.seed] = reading.scores(which)
    return table


# ---- in words -------------------------------------------------------------------------------


def title(data: DataRecord) -> str:
    """Name the comparison."""
    return f"Token mixers compared on {_place(data)}"


def _place(data: DataRecord) -> str:
    """Return the last part of a path in a data spec: ``folder:~/photos`` is photos."""
    kind, _, path = data.spec.partition(":")
    return kind if path.isdigit() else path.rstrip("/").rpartition("/")[2] or kind


def facts(plan: Plan, data: DataRecord) -> tuple[str, ...]:
    """List the few facts under the title."""
    epochs, seeds = plan.recipe.schedule.epochs, len(plan.seeds)
    sizes = data.sizes
    height, width = data.image_size
    left_out = counts_left_out(data, data.kind)
    size = f"{height}×{width} px"
    size = f"up to {size}" if data.task_kind.whole_images else size
    about = page_of(data.task_kind).about_data(data)
    trained = [each.label for each in plan.mixers if each.reference]
    runs = " + ".join([f"{len(plan.mixed)} mixers", *trained])
    return (
        plan.recipe.model.name,
        f"{runs} × {_plural(seeds, 'seed')}",
        _plural(epochs, "epoch"),
        f"{sizes['train']:,} training, {sizes['val']:,} validation, {sizes['test']:,} test "
        f"{data.kind.nouns}",
        f"{size}, {about}" if about else size,
        *([f"{' and '.join(left_out)} left out"] if left_out else []),
    )


def _one_left_out(data: DataRecord) -> bool:
    return data.left_out_count + (data.annotations_left_out or 0) == 1


def data_line(data: DataRecord) -> str:
    """Name the data and its fingerprint in one line."""
    return f"{'; '.join((data.spec, *data.notes))}; fingerprint {data.fingerprint[:16]}"


def curves_note(plan: Plan, data: DataRecord) -> str:
    """Warn where training and validation loss are not of one kind."""
    loss, augment = plan.recipe.loss, plan.recipe.augment
    softened = [
        word
        for word, used in (
            ("label smoothing", loss.label_smoothing),
            ("mixup", loss.mixup),
            ("cutmix", loss.cutmix),
        )
        if used
    ]
    text = f"Training loss is of augmented {data.kind.nouns}"
    if softened and data.task_kind.validation_loss:
        return f"{text}, with {', '.join(softened)}; it does not compare with validation loss."
    changed = augment != type(augment)()
    return f"{text}, averaged over the epoch." if changed else ""


def method(
    plan: Plan,
    data: DataRecord,
    *,
    done: int,
    device: str,
    narrow: str = "",
    shown: float | None = None,
    look: int = 1,
) -> tuple[Paragraph, ...]:
    """Say how it was done, one paragraph per question; ``done`` runs are done."""
    sizes = data.sizes
    left_out, inputs = counts_left_out(data, data.kind), data.kind.nouns
    task, unit = data.task_kind, unit_of(data)
    page = page_of(task)
    items = [
        (
            "What was kept equal.",
            "Every mixer was trained with the same recipe: optimiser, schedule, augmentation, "
            f"number of epochs and evaluation. At one seed all mixers see the same {inputs} in the "
            "same order with the same augmentation, and the weights and dropout draw from that "
            "seed; so runs are paired by seed. Nothing was tuned for any one mixer.",
        ),
        ("Readout.", _readout(plan, page)),
        (
            "Splits.",
            f"{sizes['train']:,} {inputs} train, {sizes['val']:,} validate, {sizes['test']:,} "
            f"test. Validation is apart from the test {inputs} and its split has a seed of its own "
            f"({data.split_seed}). The test {inputs} were touched once, at the end of each "
            "run. The headline is the last epoch, which needs no choice; the epoch that was best "
            "on validation is shown next to it."
            + (f" {about}" if (about := page.about_splits(data)) else "")
            + (
                f" {' and '.join(left_out)} {'was' if _one_left_out(data) else 'were'} left out; "
                f"the splits stayed as they were chosen, and every mixer saw the same {inputs}."
                if left_out
                else ""
            ),
        ),
        (
            "The interval of a difference.",
            f"It covers both other training runs and other test {unit}s: training runs crossed "
            "with test "
            f"{unit}s (Obuchowski and Rockette 1995, degrees of freedom after Hillis 2007). The "
            "variance is that over seeds plus that over "
            f"{unit}s less what is in both. Next to it stand the two questions alone.",
        ),
        (
            "Would it hold if trained again?",
            "The interval over seeds: the mean of the differences at shared seeds with Student's "
            f"t, 95 %. It covers new weights and new data order, on these same test {inputs}. From "
            "two or three seeds it is wide, and rightly so.",
        ),
        (
            f"Would it hold on more {unit}s?",
            " ".join(filter(None, (page.about_interval(task, unit=unit, inputs=inputs), narrow))),
        ),
        ("How certain a difference is.", _degrees(plan, data, shown, look)),
    ]
    if page.about_score:
        items.insert(2, ("Score.", page.about_score))
    if plan.match == "params":
        items.insert(
            1,
            (
                "Equal parameters.",
                f"Each mixer's inner width was matched to the parameters of {plan.baseline}: more "
                "heads of the same width first, then their width. The notes below the cost table "
                "say what was chosen.",
            ),
        )
    if plan.cannot_sit:
        items.append(
            (
                "Left out.",
                "No mixers were named, so all were tried; these cannot sit in this model. "
                + " ".join(f"{reason}." for reason in plan.cannot_sit),
            )
        )
    where = "the GPU" if device == "cuda" else "the CPU"
    how = _plural(plan.processes, "process", "processes")
    how += f" of {_plural(plan.threads, 'thread')}"
    items.append(
        (
            "Where it ran.",
            f"{_plural(done, 'run')} on {where}, {how}. Runs that were finished before were read, "
            "not trained again.",
        )
    )
    return tuple(Paragraph(title=title, text=text) for title, text in items)


def _margin_shown(found: Found, alpha: float) -> float | None:
    """Return the margin within which these seeds and units recognise half of true ties."""
    base = found.answers(found.plan.baseline)
    others = [label for label in found.mixers if label != found.plan.baseline]
    made = [crossed_difference(found.answers(label), base) for label in others]
    return smallest_margin([each for each in made if each is not None], alpha)


def _degrees(plan: Plan, data: DataRecord, shown: float | None, look: int) -> str:
    """Say what the degrees of certainty mean; `shown` is what `_margin_shown` returned."""
    score, unit = data.task_kind.score, unit_of(data)
    margin = plan.margin
    equal = ""
    if margin is not None:
        within = score.changed(margin, sign=False)
        equal = (
            f" Equal: from {CLEAR_SEEDS} seeds, the interval of two one-sided tests lies within "
            f"± {within} (--margin)."
        )
        if shown is not None:
            equal += (
                " The seeds and test "
                f"{unit}s of this comparison recognise half of all true ties within ± "
                f"{score.changed(shown, sign=False)}."
            )
    return (
        f"Clear: {CLEAR_SEEDS} seeds or more and a crossed interval without 0 at 5 % after Holm's "
        "correction over the mixers that were named; controls are tested by themselves, references "
        f"not at all. Provisional: {PROVISIONAL_SEEDS} or 4 seeds, all of one sign, an interval "
        f"over seeds without 0, and Holm-corrected p over test {unit}s below 5 %.{equal} Unclear "
        "otherwise. Adding seeds to a finished comparison is a further look, which halves the 5 %."
        + (f" This is look {look}, at {100 * alpha_of_look(look):.3g} %." if look > 1 else "")
    )


def _readout(plan: Plan, page: Page) -> str:
    if plan.pooled_for:
        verb = "brings" if len(plan.pooled_for) == 1 else "bring"
        return (
            f"{listing(plan.pooled_for)} {verb} nothing to a class token, so reading out there "
            "would measure the readout and not the mixer. Therefore every model of this "
            "comparison reads out by the mean of its patch tokens."
        )
    if plan.pooling == "avg":
        return "Every model reads out by the mean of its patch tokens."
    if plan.pooling == "token":
        return "Every model reads out by its class token."
    if not plan.pooling:
        return page.readout
    return f"Every model reads out in the same way (pooling: {plan.pooling})."


def _plural(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


# ---- the check of the data ------------------------------------------------------------------


def checked_data(data: ImageData) -> Checked:
    """Run the cheap part of the data check and return what it found."""
    report = quick_check(data)
    found = tuple(
        DataFinding(
            level=cast(Level, each.level),
            what=each.what,
            count=each.count,
            where=tuple(each.where[:_NAMED]),
            remedy=each.remedy,
        )
        for each in report.findings
        if each.level != NOTE
    )
    return Checked(
        findings=found,
        too_narrow=any(found.what == IN_SEQUENCES for found in report.findings),
        looked_at=report.facts["looked_at"],
        not_looked_at=tuple(report.facts["not_looked_at"]),
    )


def finding_lines(checked: Checked, data: DataRecord) -> list[str]:
    """Write what was found for the terminal: the findings, and what was not looked at."""
    found = data_check(checked, data)
    findings = [
        f"data check, {each.grade}: {each.sentence or _listed(each)} {each.remedy}".rstrip()
        for each in found.findings
    ]
    return [*findings, *filter(None, (found.narrow, found.missed))]


def _listed(found: DataFinding) -> str:
    """Write what was found with its first places."""
    more = "; …" if found.count > _SHOWN else "."
    return f"{found.what} ({found.count:,}): {'; '.join(found.where[:_SHOWN])}{more}"


def narrow_note(checked: Checked | None, data: DataRecord) -> str:
    """Say that intervals over test images, or cases, are too narrow; empty if they are not."""
    if checked is None or not checked.too_narrow:
        return ""
    return NARROW.format(units=f"{unit_of(data)}s", inputs=data.kind.nouns)


def data_check(checked: Checked, data: DataRecord) -> DataCheck:
    """Return what the record keeps of it, in sentences."""
    missed = " and ".join(checked.not_looked_at)
    if missed:
        missed = f"Not looked at, since time was short: {missed}; `keymix data check` looks at all."
    falsified = any(found.level == FALSIFIES for found in checked.findings)
    return DataCheck(
        findings=tuple(_graded(each, data) for each in checked.findings),
        too_narrow=checked.too_narrow,
        looked_at=checked.looked_at,
        not_looked_at=checked.not_looked_at,
        headline="The data falsify results" if falsified else "A warning about the data",
        narrow=narrow_note(checked, data),
        missed=missed,
    )


def _graded(found: DataFinding, data: DataRecord) -> GradedFinding:
    remedy = found.remedy
    return GradedFinding(
        level=found.level,
        what=found.what,
        count=found.count,
        where=found.where,
        remedy=f"{remedy[0].upper()}{remedy[1:]}." if remedy else "",
        grade=SEVERITY[found.level],
        sentence=_sentence(found, data),
    )


def _sentence(found: DataFinding, data: DataRecord) -> str:
    """Say in a sentence what a list of splits would not; empty for what is listed."""
    if found.what != LONE_CASE:
        return ""
    splits = listing([_SPLITS.get(name, name) for name in found.where])
    return f"The {splits} {data.kind.nouns} come from a single case."
