# SPDX-License-Identifier: Apache-2.0
"""The report in words: title, facts, what was held equal, what the intervals mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from keymix.analysis.statistics import VERDICT_SEEDS
from keymix.compare.plan import Plan
from keymix.compare.words_masks import SCORE, over_cases, split_by
from keymix.data.record import DataRecord
from keymix.data.specs import named
from keymix.data.tasks import SEGMENTATION
from keymix.report.record import Paragraph

T = TypeVar("T")

_OVER_IMAGES = (
    "The interval over test images: for each image how often mixer minus baseline gets it right, "
    "averaged over seeds; the mean with a normal interval, 95 %, adjusted after Bonett and Price "
    "(2012) so that it stays honest when few images are in dispute. It covers other images of the "
    "same kind, for these trained models."
)


def title(data: DataRecord) -> str:
    """Name the comparison."""
    return f"Token mixers compared on {_place(data)}"


def of_data(value: T, data: DataRecord) -> T:
    """Call images recordings in all that is said of data of events.

    Args:
        value: Text, or records, tuples and mappings of it; mixers' names stay.
        data: The data's record.
    """
    return cast(T, _of_recordings(value)) if data.events else value


def _of_recordings(value: Any) -> Any:
    if isinstance(value, str):
        return named(value, events=True)
    if isinstance(value, tuple):
        return tuple(map(_of_recordings, value))
    if isinstance(value, dict):
        return {key: _of_recordings(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value) if each.name != "mixer"]
        return replace(value, **{name: _of_recordings(getattr(value, name)) for name in names})
    return value


def _place(data: DataRecord) -> str:
    """Return the last part of a path in a data spec: ``folder:~/photos`` is photos."""
    kind, _, path = data.spec.partition(":")
    return path.rstrip("/").rpartition("/")[2] or kind


def facts(plan: Plan, data: DataRecord) -> tuple[str, ...]:
    """List the few facts under the title."""
    epochs, seeds = plan.recipe.schedule.epochs, len(plan.seeds)
    sizes = data.sizes
    height, width = data.image_size
    left_out = data.left_out_count
    return (
        plan.recipe.model.name,
        f"{len(plan.entrants)} mixers × {_plural(seeds, 'seed')}",
        _plural(epochs, "epoch"),
        f"{sizes['train']:,} training, {sizes['val']:,} validation, {sizes['test']:,} test images",
        f"{height}×{width} px, {_plural(len(data.scored_classes), 'class', 'classes')}"
        + (" of masks" if data.task_kind is SEGMENTATION else ""),
        *([f"{_plural(left_out, 'broken image')} left out"] if left_out else []),
    )


def data_line(data: DataRecord) -> str:
    """Tell the data and its fingerprint in one line."""
    return f"{'; '.join((data.spec, *data.notes))}; fingerprint {data.fingerprint[:16]}"


def curves_note(plan: Plan) -> str:
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
    text = "Training loss is of augmented images"
    if softened:
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
        narrow: Why the intervals over test images are too narrow; empty if they are not.
    """
    sizes = data.sizes
    left_out = data.left_out_count
    masks = data.task_kind is SEGMENTATION
    items = [
        (
            "What was held equal.",
            "Every mixer was trained with the same recipe: optimiser, schedule, augmentation, "
            "number of epochs and evaluation. At one seed all mixers see the same images in the "
            "same order with the same augmentation, and the weights and dropout draw from that "
            "seed; so runs are paired by seed. Nothing was tuned for any one mixer.",
        ),
        ("Readout.", _readout(plan)),
        (
            "Splits.",
            f"{sizes['train']:,} images train, {sizes['val']:,} validate, {sizes['test']:,} test. "
            "Validation is apart from the test images and its split has a seed of its own "
            f"({data.split_seed}). The test images were touched once, at the end of each "
            "run. The headline is the last epoch, which needs no choice; the epoch that was best "
            "on validation is told beside it."
            + (split_by(plan.recipe.data.split_by) if masks else "")
            + (
                f" {_plural(left_out, 'broken image')} {'was' if left_out == 1 else 'were'} left "
                "out; the splits stayed as they were chosen, and every mixer saw the same images."
                if left_out
                else ""
            ),
        ),
        (
            "Would it hold if trained again?",
            "The interval over seeds: the mean of the differences at shared seeds with Student's "
            "t, 95 %. It covers new weights and new data order, on these same test images. From "
            "two or three seeds it is wide, and rightly so.",
        ),
        (
            f"Would it hold on more {'cases' if masks else 'images'}?",
            " ".join(filter(None, (over_cases() if masks else _OVER_IMAGES, narrow))),
        ),
        (
            "Verdicts.",
            f"From {VERDICT_SEEDS} seeds up a mixer is called better or worse when both questions "
            "agree at 5 % after Holm's correction over all mixers compared, controls included. "
            "The intervals themselves are not widened for that. ‘No difference shown’ does not "
            "mean equal: the interval says how large a difference could hide.",
        ),
    ]
    if masks:
        items.insert(2, ("Score.", SCORE))
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


def _readout(plan: Plan) -> str:
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
        return "Every model reads out all of its patch tokens, to answer every pixel."
    return f"Every model reads out in the same way (pooling: {plan.pooling})."


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _plural(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
