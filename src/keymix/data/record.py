# SPDX-License-Identifier: Apache-2.0
"""The record of a data set: everything about it that a result depends on, as files keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from keymix.data.kinds import BACKGROUND, RECORDING, InputKind, recorded_kind
from keymix.errors import UserError
from keymix.task import DEFAULT, Task, get_task, list_tasks


@dataclass(frozen=True, kw_only=True)
class LeftOutImage:
    """A broken image that was left out.

    Args:
        id: Where it comes from: a file, or a file and a row.
        reason: What is wrong with it.
    """

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The fields of a record that stand before those of `DataFacts`."""

    spec: str
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    in_chans: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    cached: bool
    sizes: Mapping[str, int]
    index_sha256: Mapping[str, str]
    task: str
    multilabel: bool | None = None


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What loading a data set found and did. Fields of other kinds of data are None.

    Args:
        time_steps: Of events, frames of a recording.
        frames_by: Of events, ``number`` or ``time``.
        sensor_size: Of events, height and width of the sensor in pixels.
        split_seed: Seed of the choice of the splits.
        val_fraction: Share of train that became validation.
        test_fraction: Of masks, share that became test; None if the source brings a test split.
        split_by: Of masks, ``case`` or ``slice``.
        masks: Of masks, ``exclusive`` or ``multilabel``.
        stack: Of masks, neighbouring slices that are the channels of an image.
        limit: Most images of train and validation together, None for all.
        cases: Of masks, number of cases of each split.
        empty: Of masks, number of images of each split whose mask is empty.
        unfit: Of masks, why no model can learn from them; None if one can.
        grouped: Of masks, whether images belong to cases.
        class_images: Of masks, number of images of each split that have each class.
        class_shares: Of masks, share of the training pixels, without ignored ones, of each class.
        mean_std_of: In words, of which images mean and standard deviation are.
        fingerprint: Hash of images and targets.
        fingerprint_of: In words, what is hashed.
        notes: What was done with the data, a sentence each.
        left_out: The first of the broken images that were left out.
        left_out_count: Number of images that were left out.
        white_level: The 16-bit grey value that became white; None for 65,535.
        event_split: Of events, name of the published split; None where there are none.
        compared_by: Key of the score that models are compared by; None for the task's first.
        class_ids: The source's own number of each class; None where it has none.
        outlines: Of instances, whether they have outlines; else boxes alone.
        intensity_window: Of scans, the values that became black and white; None for the least and
            the largest of each slice.
        window_overlap: Of masks, by which share the windows overlap in which images are seen at
            their own size; None if images are resized.
        annotations_left_out: Of instances, number of annotations that were left out of images that
            are used; None where none were.
    """

    time_steps: int | None = None
    frames_by: str | None = None
    sensor_size: tuple[int, int] | None = None
    split_seed: int = 0
    val_fraction: float | None = None
    test_fraction: float | None = None
    split_by: str | None = None
    masks: str | None = None
    stack: int | None = None
    limit: int | None = None
    cases: Mapping[str, int] | None = None
    empty: Mapping[str, int] | None = None
    unfit: str | None = None
    grouped: bool | None = None
    class_images: Mapping[str, tuple[int, ...]] | None = None
    class_shares: tuple[float, ...] | None = None
    mean_std_of: str = ""
    fingerprint: str = ""
    fingerprint_of: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[LeftOutImage, ...] = ()
    left_out_count: int = 0
    white_level: int | None = None
    event_split: str | None = None
    compared_by: str | None = None
    class_ids: tuple[int, ...] | None = None
    outlines: bool | None = None
    intensity_window: tuple[float, float] | None = None
    window_overlap: float | None = None
    annotations_left_out: int | None = None


def task_of(name: str, facts: DataFacts) -> Task:
    """Return a task with the scores that data allow, the one that models are compared by first."""
    task = get_task(name).compared_by(facts.compared_by)
    scores = [s for s in task.scores if not s.needs or getattr(facts, s.needs) is not False]
    return task if len(scores) == len(task.scores) else replace(task, scores=tuple(scores))


def counts_left_out(facts: DataFacts, kind: InputKind) -> list[str]:
    """Say how many broken inputs and unfit annotations were left out; nothing if none were."""
    counts = {
        f"broken {kind.noun}": facts.left_out_count,
        "unfit annotation": facts.annotations_left_out or 0,
    }
    return [f"{n:,} {what}{'' if n == 1 else 's'}" for what, n in counts.items() if n]


@dataclass(frozen=True, kw_only=True)
class DataRecord(DataFacts, _Shape):  # fields of the last base come first
    """Everything about a data set that a result depends on; see `DataFacts` for the rest.

    Args:
        spec: The data spec it was loaded from.
        classes: Names of the classes, by label; none where targets are others.
        image_size: Height and width of the images in pixels; the largest of each where they keep
            their own; short and long side where they keep their proportions (`Task.fits`).
        in_chans: Channels.
        mean: Mean of each channel over train, of values 0..1.
        std: Standard deviation of each channel over train.
        crop_pct: Share of the resized image's side that the evaluation crop keeps.
        cached: Whether the images are decoded in memory.
        sizes: Number of images of ``train``, ``val`` and ``test``.
        index_sha256: Hash of the rows of each of these splits.
        task: Name of the task.
        multilabel: Of masks, whether a pixel may belong to several classes.

    Raises:
        UserError: If a classifier's data have no classes, a split is missing from `sizes` or
            `index_sha256`, or this keymix has no such task.
    """

    def __post_init__(self) -> None:
        if not self.classes and self.task == DEFAULT:
            raise UserError("classes is empty")
        for split in ("train", "val", "test"):
            for name, of in (("sizes", self.sizes), ("index_sha256", self.index_sha256)):
                if split not in of:
                    raise UserError(f"{name} lacks {split}")
        if self.task not in list_tasks():
            raise UserError(
                f"task {self.task!r} is unknown to this keymix; it has {', '.join(list_tasks())}"
            )

    @property
    def task_kind(self) -> Task:
        """The task, with its scores; the first is that which models are compared by."""
        return task_of(self.task, self)

    @property
    def kind(self) -> InputKind:
        """The kind of input."""
        return recorded_kind(self.time_steps, self.stack)

    @property
    def events(self) -> bool:
        """Whether the data are recordings of events."""
        return self.kind is RECORDING

    @property
    def listed(self) -> bool:
        """Whether evaluation sees a batch as a list of images, each of its own size."""
        return self.task_kind.whole_images or self.window_overlap is not None

    @property
    def scored_classes(self) -> tuple[int, ...]:
        """The classes over which scores are averaged: all but the background of masks."""
        whole = self.multilabel is not False  # None: there are no masks
        return tuple(i for i, name in enumerate(self.classes) if whole or name != BACKGROUND)

    def omitted(self) -> tuple[str, ...]:
        """The fields that are not written, since they are of other kinds of data."""
        kept = ("limit", *(("test_fraction",) if self.multilabel is not None else ()))
        none = [each.name for each in fields(self) if getattr(self, each.name) is None]
        return tuple(name for name in none if name not in kept)


@dataclass(frozen=True, kw_only=True)
class SameImages:
    """What says that the images of two runs are the same."""

    fingerprint: str
    index_sha256: Mapping[str, str]  # hash of the rows of each split

    @classmethod
    def of(cls, data: DataRecord) -> SameImages:
        """Take it from the data's record."""
        return cls(fingerprint=data.fingerprint, index_sha256=data.index_sha256)

    def changed(self, now: SameImages) -> list[str]:
        """Return the names of what differs."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(now, f.name)]
