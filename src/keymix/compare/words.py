# SPDX-License-Identifier: Apache-2.0
"""The report in words: title, facts, what was equal, what the intervals mean.

What is said of a task's scores, splits and intervals is its page's.
"""

from __future__ import annotations

from collections.abc import Sequence

from keymix.analysis.statistics import VERDICT_SEEDS
from keymix.compare.plan import Plan
from keymix.data.record import DataRecord
from keymix.report.part import Page, page_of
from keymix.report.record import Paragraph
from keymix.report.wording import unit_of


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
    left_out = data.left_out_count
    noun, size = data.kind.noun, f"{height}×{width} px"
    size = f"up to {size}" if data.task_kind.whole_images else size
    about = page_of(data.task_kind).about_data(data)
    return (
        plan.recipe.model.name,
        f"{len(plan.entrants)} mixers × {_plural(seeds, 'seed')}",
        _plural(epochs, "epoch"),
        f"{sizes['train']:,} training, {sizes['val']:,} validation, {sizes['test']:,} test "
        f"{data.kind.nouns}",
        f"{size}, {about}" if about else size,
        *([f"{_plural(left_out, f'broken {noun}')} left out"] if left_out else []),
    )


def data_line(data: DataRecord) -> str:
    """Tell the data and its fingerprint in one line."""
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
    processes: int,
    threads: int,
    done: int,
    device: str,
    narrow: str = "",
) -> tuple[Paragraph, ...]:
    """Tell how it was done, one paragraph a question.

    Args:
        plan: The comparison.
        data: The data's record.
        processes: Training processes side by side.
        threads: Threads of each.
        done: Runs that are finished.
        device: Where they were measured.
        narrow: Why the intervals over the test split are too narrow; empty if they are not.
    """
    sizes = data.sizes
    left_out, inputs = data.left_out_count, data.kind.nouns
    task, unit = data.task_kind, unit_of(data)
    page = page_of(task)
    items = [
        (
            "What was held equal.",
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
            "on validation is told beside it."
            + (f" {about}" if (about := page.about_splits(data)) else "")
            + (
                f" {_plural(left_out, f'broken {data.kind.noun}')} "
                f"{'was' if left_out == 1 else 'were'} left out; the splits stayed as they were "
                f"chosen, and every mixer saw the same {inputs}."
                if left_out
                else ""
            ),
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
        (
            "Verdicts.",
            f"From {VERDICT_SEEDS} seeds up a mixer is called better or worse when both questions "
            "agree at 5 % after Holm's correction over all mixers compared, controls included. "
            "The intervals themselves are not widened for that. ‘No difference shown’ does not "
            "mean equal: the interval says how large a difference could hide.",
        ),
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
                "Nobody named mixers, so that all were tried; these cannot sit in this model. "
                + " ".join(f"{reason}." for reason in plan.cannot_sit),
            )
        )
    where = "the GPU" if device == "cuda" else "the CPU"
    how = _plural(processes, "process", "processes") + f" of {_plural(threads, 'thread')}"
    items.append(
        (
            "Where it ran.",
            f"{_plural(done, 'run')} on {where}, {how}. Runs that were finished before were read, "
            "not trained again.",
        )
    )
    return tuple(Paragraph(title=title, text=text) for title, text in items)


def _readout(plan: Plan, page: Page) -> str:
    if plan.unheard:
        verb = "brings" if len(plan.unheard) == 1 else "bring"
        return (
            f"{_listing(plan.unheard)} {verb} nothing to a class token, so that reading out there "
            "would tell of the readout and not of the mixer. Therefore every model of this "
            "comparison reads out by the mean of its patch tokens."
        )
    if plan.pooling == "avg":
        return "Every model reads out by the mean of its patch tokens."
    if plan.pooling == "token":
        return "Every model reads out by its class token."
    if not plan.pooling:
        return page.readout
    return f"Every model reads out in the same way (pooling: {plan.pooling})."


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _plural(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
