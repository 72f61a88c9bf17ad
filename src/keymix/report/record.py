# SPDX-License-Identifier: Apache-2.0
"""The results of a comparison as numbers: all that ``results.json`` keeps. No torch.

A field is a key of the file, see `keymix.records`. Fields that default to None are not
written while they are None: they belong to another task, or to models without spikes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from keymix.analysis.certainty import Decision, Degree, Direction, Settle
from keymix.analysis.statistics import Interval, Summary, summarize
from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.records import Own, from_json, spread
from keymix.report.checked import Checked
from keymix.task import Task
from keymix.train.recipe import Recipe

FORMAT = 3
"""Of a comparison's folder: its manifest and its record."""

Lines = Mapping[str, str]
"""An environment in short lines, by what each is about."""
Number = int | float
Which = Literal["last", "best"]
"""The epoch: the last, or that which was best on validation."""


class Sparse:
    """A record whose fields that default to None are not written while they are None."""

    def omitted(self) -> tuple[str, ...]:
        """Names of these fields."""
        return tuple(
            each.name
            for each in fields(self)  # type: ignore[arg-type]  # of a dataclass, as all below are
            if each.default is None and getattr(self, each.name) is None
        )


def check_finite(record: Any) -> None:
    """Refuse with a `UserError` a number that is not finite, which no file takes."""
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{each.name} = {value!r} is not finite")


# ---- the runs -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The scores of a run on validation and test at an epoch, by the names of its task's scores.

    Epochs are counted from 1.
    """

    epoch: int
    val: Mapping[str, Number | None]
    test: Mapping[str, Number | None]


@dataclass(frozen=True, kw_only=True)
class HistoryLine:
    """An epoch of a run, counted from 1: losses and the score on validation, by their keys."""

    epoch: int
    values: Mapping[str, float | None] = field(metadata=spread())


@dataclass(frozen=True, kw_only=True)
class RunSpikes(Sparse):
    """What the spikes of one run's last weights cost; energies in µJ per image.

    `images` are how many of validation were read; None of a network without spikes. `firing_rate`
    is spikes per neuron and step, `silent` the share of neurons that never fired, `sops` the
    synaptic operations of an image, `macs` the multiply-adds that are left, `dense_energy_uj` the
    energy of the same network without spikes.
    """

    images: int | None = None
    firing_rate: Number | None = None
    silent: Number | None = None
    sops: Number | None = None
    macs: Number | None = None
    energy_uj: Number | None = None
    energy_low_uj: Number | None = None
    energy_high_uj: Number | None = None
    dense_energy_uj: Number | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_finite(self)


QUANTITIES = tuple(e.name for e in fields(RunSpikes) if e.name not in ("images", "notes"))
"""Of spikes, whose mean over seeds is shown."""


@dataclass(frozen=True, kw_only=True)
class DoneRun(Sparse):
    """A finished run: training time, scores of the last epoch and of that best on validation.

    `reason` is None, since there is nothing to explain, and `trained_with` is the position of its
    environment in the record's; `spikes` are those of a spiking model, or of its ANN counterpart.
    The task's page's ``run`` is `own`.
    """

    mixer: str
    seed: int
    folder: str
    status: Literal["done"]
    reason: str | None
    seconds: Number
    last: Mark
    best: Mark
    history: tuple[HistoryLine, ...]
    trained_with: int
    spikes: RunSpikes | None = None
    own: Own = field(default_factory=Own, metadata=spread())

    def mark(self, which: Which) -> Mark:
        """Return the scores of an epoch."""
        return self.last if which == "last" else self.best


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that failed, or is not finished yet, with the reason."""

    mixer: str
    seed: int
    folder: str
    status: Literal["failed", "missing"]
    reason: str


# ---- what came out --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OutcomeRow:
    """A mixer's scores over seeds, and how it compares with the baseline.

    `scores` are by name: those of the test split, and that on validation. The difference from the
    baseline has one `interval`, over seeds and test units, and next to it those over `seeds`, None
    without a pair of runs, and over `images` or cases alone. The baseline and points of reference
    have no degree of certainty; `settle` is what would settle an unclear difference.
    """

    mixer: str
    scores: Mapping[str, Summary] = field(metadata=spread())
    seeds: Interval | None
    images: Interval | None
    interval: Interval | None = None
    degree: Degree | None = None
    direction: Direction | None = None
    settle: Settle | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The rows of all mixers, at both epochs."""

    last: tuple[OutcomeRow, ...]
    best: tuple[OutcomeRow, ...]


@dataclass(frozen=True, kw_only=True)
class ReferenceRow(Sparse):
    """A point of reference that no network was trained for, outside every test.

    `learned` says whether it learned anything from the inputs, `about` how it answers; `low` and
    `high` are the 95 % interval of the score that decides, over test units, `validation` that score
    on the validation split, and `seconds` the time that it took.
    """

    name: str
    about: str
    learned: bool
    seconds: Number
    low: float | None
    high: float | None
    scores: Mapping[str, float | None]
    validation: float | None = None


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """The validation scores of the mixers at a learning rate, and their mean."""

    rate: float
    mean: float
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the learning rate was chosen: what was tried, the recipe's, the chosen."""

    rows: tuple[TuningRow, ...]
    default: float
    chosen: float


@dataclass(frozen=True, kw_only=True)
class Start:
    """The trained model that all runs start from, with each mixer swapped into it.

    `sha256` is that of its weights, and `images` are how many keys were estimated on; its
    classifier is kept if the data has the `same_classes`. `scores` are those of the validation
    split before any training, by mixer's label, where there are any.
    """

    name: str
    sha256: str
    images: int
    same_classes: bool
    scores: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a comparison found out about itself, by its kind, and the numbers of it.

    `keymix.compare.findings` has the kinds; ``templates/findings.txt.j2`` says each in words.
    """

    kind: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


# ---- costs ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CostRow(Sparse):
    """What a mixer's model costs; None where it is not known.

    Multiply-adds are per image, and of spiking models of all `time_steps`, without the operations
    `uncounted`; activations are those kept to train, bytes per image; latency is at batch 1, its
    median and quartiles; `peak_mib` that of a training step; `step_ms` its median time, forward and
    backward, for the batch of costs, and `step_low_ms` and `step_high_ms` its quartiles. `busy`
    says that other programs ran meanwhile, `note` why something could not be measured.
    """

    params: int
    macs: Number | None = None
    activation_bytes: Number | None = None
    latency_ms: Number | None = None
    latency_low_ms: Number | None = None
    latency_high_ms: Number | None = None
    images_per_s: Number | None = None
    peak_mib: Number | None = None
    time_steps: int | None = None
    step_ms: Number | None = None
    step_low_ms: Number | None = None
    step_high_ms: Number | None = None
    uncounted: tuple[str, ...] = ()
    busy: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        check_finite(self)


@dataclass(frozen=True, kw_only=True)
class Measured(Sparse):
    """How costs were measured: device, batch, rounds, threads, environment, and when.

    There are 0 rounds where nothing was measured yet.
    """

    device: str
    batch_size: int
    repeats: int
    threads: int
    setting: Lines | None = None
    when: str | None = None


# ---- what the models see --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MapImage:
    """A test image under attention maps: a data URI, its class or name, where it is from."""

    png: str
    label: str
    id: str


@dataclass(frozen=True, kw_only=True)
class PackedMaps(Sparse):
    """A mixer's maps, ``[image, layer, 1 + heads, H, W]``, the mean over heads first.

    `weights` are base64 of little-endian uint16, of which 65535 is `scale`; `grid` is
    (H, W). A ``mask`` is no attention: its weight is the share of time steps in which a head lets
    the token through.
    """

    heads: int
    grid: tuple[int, int]
    weights: str
    scale: float
    kind: Literal["mask"] | None = None


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a model answered to an image, in a few words, and whether that is right."""

    text: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class Attention(Sparse):
    """Where the trained models look, on the same test images, by mixer's label.

    They are of a seed's weights. `class_token` says that it is the class token's attention, and
    else it is the mean over patches; `missing` says why a mixer has no maps, and `said` what these
    models answered to each image, where that is a few words.
    """

    images: tuple[MapImage, ...]
    layers: tuple[str, ...]
    class_token: bool
    seed: int
    maps: Mapping[str, PackedMaps]
    missing: Mapping[str, str]
    said: Mapping[str, tuple[Said, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """How alike the maps of neighbouring blocks are: the mean of each pair, by mixer's label.

    Of the weights of a seed, on the same test images; `missing` says why a mixer has none.
    """

    pairs: tuple[str, ...]
    images: int
    seed: int
    similarity: Mapping[str, tuple[float, ...]]
    missing: Mapping[str, str]


# ---- the rest -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComparedMixer:
    """A mixer of the comparison: label, folder's name, whether it is a control, and a note.

    A reference is a trained model without a mixer, outside every test and the recommendation.
    """

    label: str
    slug: str
    control: bool
    reference: bool = False
    note: str


@dataclass(frozen=True, kw_only=True)
class Results(Sparse):
    """A whole comparison.

    Args:
        format: `FORMAT`.
        created: When the record was made.
        command: What repeats it.
        environment: What the record was made with.
        trained_with: What the runs were trained with.
        data: The data.
        data_check: What the check of the data found; None if it was not made.
        recipe: What all runs share.
        match: ``params`` if widths were matched.
        pooling: How every model reads out, timm's word.
        pooled_for: The mixers that decided it.
        cannot_sit: Why mixers that nobody named were left out.
        baseline: Label of the mixer that the others are compared with.
        seeds: The training seeds.
        processes: Training processes side by side.
        threads: Threads of each.
        mixers: The mixers, in the order of every table.
        mechanisms: What the mixers of which these consist do, in plain words, by name.
        findings: What the comparison found out about itself, the most serious first.
        outcome: Scores, intervals, and how certain the differences are.
        references: Points of reference that no network was trained for.
        recommendation: Which mixer to take.
        tuning: How the learning rate was chosen; None where it is the recipe's.
        start: The trained model that all runs start from; None where they start afresh.
        margin: Differences up to this are equal, in units of the score; None where none is.
        recognised: Margin within which these seeds and test units recognise half of true ties.
        looks: Seeds of each time that all runs were finished and looked at, the last of them now.
        alpha: Significance level of this look.
        test_images: Number of test images.
        costs: By mixer's label.
        measured: How costs were measured.
        runs: The runs, mixer by mixer.
        images: Whether pictures of the data may be in it.
        own: What the task keeps of it: its page's ``comparison``.
    """

    format: int = FORMAT
    created: str
    command: str
    environment: Lines
    trained_with: tuple[Lines, ...]
    data: DataRecord
    data_check: Checked | None = None
    recipe: Recipe
    match: str | None
    pooling: str
    pooled_for: tuple[str, ...]
    cannot_sit: tuple[str, ...] = ()
    baseline: str
    seeds: tuple[int, ...]
    processes: int
    threads: int
    mixers: tuple[ComparedMixer, ...]
    mechanisms: Mapping[str, str]
    findings: tuple[Finding, ...]
    outcome: Outcome
    references: tuple[ReferenceRow, ...]
    recommendation: Decision
    tuning: Tuning | None = None
    start: Start | None = None
    margin: float | None = None
    recognised: float | None = None
    looks: tuple[int, ...]
    alpha: float
    test_images: int
    costs: Mapping[str, CostRow]
    measured: Measured
    runs: tuple[OpenRun | DoneRun, ...]
    images: bool
    own: Own = field(default_factory=Own, metadata=spread())

    @property
    def task_kind(self) -> Task:
        """The task, with its scores."""
        return self.data.task_kind

    @functools.cached_property
    def spikes(self) -> dict[str, dict[str, Summary]]:
        """What each mixer's spikes cost over its seeds, by quantity; empty without spikes."""
        found: dict[str, dict[str, Summary]] = {}
        for label in self.labels:
            if rows := [run.spikes for run in self.finished(label) if run.spikes]:
                values = {key: [getattr(row, key) for row in rows] for key in QUANTITIES}
                found[label] = {
                    key: summarize([value for value in each if value is not None])
                    for key, each in values.items()
                }
        return found

    def cost(self, mixer: str, key: str) -> Number | None:
        """Return what a mixer costs, of `CostRow` or ``energy_uj``; None where it is not known."""
        if key == "energy_uj":
            return self.spikes[mixer][key].mean if mixer in self.spikes else None
        found: Number | None = getattr(self.costs.get(mixer), key, None)
        return found

    @property
    def time_steps(self) -> dict[str, int]:
        """Time steps T of each spiking model by label, all of which its multiply-adds count."""
        found = {label: self.costs[label].time_steps for label in self.spikes}
        return {label: steps for label, steps in found.items() if steps}

    def finished(self, mixer: str) -> list[DoneRun]:
        """Return a mixer's finished runs."""
        return [run for run in self.runs if isinstance(run, DoneRun) and run.mixer == mixer]

    def unfinished(self, status: str) -> list[OpenRun]:
        """Return the runs that failed, or are missing."""
        return [run for run in self.runs if isinstance(run, OpenRun) and run.status == status]

    @property
    def labels(self) -> list[str]:
        """Labels of the mixers, in the order of every table."""
        return [mixer.label for mixer in self.mixers]

    @property
    def controls(self) -> list[str]:
        """Labels of the controls."""
        return [mixer.label for mixer in self.mixers if mixer.control]

    @property
    def trained_references(self) -> list[str]:
        """Labels of the trained models without a mixer."""
        return [mixer.label for mixer in self.mixers if mixer.reference]

    @property
    def named(self) -> list[str]:
        """Labels of the mixers that are neither controls nor references."""
        return [each.label for each in self.mixers if not each.control and not each.reference]

    @property
    def look(self) -> int:
        """Which look at the results this is."""
        return look_number(self.looks, self.seeds)

    @property
    def narrow(self) -> bool:
        """Whether intervals over test units are too narrow, since units belong together."""
        return self.data_check is not None and self.data_check.too_narrow

    @property
    def differing(self) -> list[str]:
        """In what the environments of the runs differ."""
        return differing(self.trained_with)

    @property
    def differing_here(self) -> list[str]:
        """In what the environment of all runs differs from that which made the results."""
        if len(self.trained_with) != 1:
            return []
        found = differing([*self.trained_with, self.environment])
        return [key for key in found if key != "threads"]

    @property
    def found(self) -> dict[str, Finding]:
        """What it found out about itself, by kind."""
        return {each.kind: each for each in self.findings}

    @property
    def learned(self) -> bool:
        """Whether some model learned the data, so that its answers are worth a look."""
        return "nothing_learned" not in self.found


def look_number(looks: Sequence[int], seeds: Sequence[int]) -> int:
    """Say which look at the results it is, from 1: more seeds than at the last make a new one."""
    again = bool(looks) and len(seeds) <= looks[-1]
    return len(looks) + (not again)


def differing(environments: Sequence[Lines]) -> list[str]:
    """Return the keys whose lines are not the same in all environments."""
    known = {key: None for lines in environments for key in lines}
    return [key for key in known if len({lines.get(key) for lines in environments}) > 1]


def opened(values: Mapping[str, Any], *, where: str) -> Results:
    """Return the record that a ``results.json`` holds.

    Args:
        values: The content of the file.
        where: Which file it is, for the message.

    Raises:
        FormatError: If it is of another format.
        UserError: If it is damaged.
    """
    record = from_json(Results, values, where=where)
    if record.task_kind.has("page"):
        record.task_kind.load("page").check(record, where=where)
    return record
