# SPDX-License-Identifier: Apache-2.0
"""What a comparison is asked, and the plan that answers it, as its folder keeps both."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from keymix.errors import UserError, unknown
from keymix.models.factory import domain_of
from keymix.records import to_json
from keymix.report.record import ComparedMixer, Start, Tuning
from keymix.train.recipe import ModelConfig, Recipe, is_name

_SHARED = (
    *("data", "model", "start", "layers", "recipe", "overrides"),
    *("epochs", "limit", "match", "tune"),
)
"""What all runs of a folder share; the rest may change from call to call, or grow."""


_RUNS = ("mixers", "seeds", "baseline", "controls", "ann", "reference")
"""What says which runs there are, besides the budget."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The arguments of `keymix.compare.run.compare`, which describes them; None is not named."""

    data: str | None = None
    model: str | None = None
    start: str | Path | None = None
    layers: str | int | Sequence[str | int] | None = None
    mixers: str | Sequence[str] | None = None
    seeds: int | Sequence[int] | None = None
    recipe: str | Recipe | None = None
    overrides: Mapping[str, Any] | None = None
    epochs: int | None = None
    limit: int | None = None
    out: str | Path = "keymix-compare"
    match: Literal["params"] | None = None
    baseline: str | None = None
    controls: bool = True
    ann: bool = False
    reference: bool = True
    margin: float | None = None
    tune: Literal["lr"] | None = None
    minutes: float | None = None
    processes: int | None = None
    on: str | None = None
    gpus_per_run: float | None = None
    imports: Sequence[str | Path] = ()
    overwrite: bool = False
    images: bool | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("match", "params"), ("tune", "lr")):
            if (value := getattr(self, name)) not in (None, known):
                raise unknown(name, str(value), [known])
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UserError(f"minutes = {self.minutes!r}: give a positive number of minutes.")
        if self.on is not None and not re.fullmatch(r"ray(://\S+:\d+)?", self.on):
            raise UserError(f"on = {self.on!r}: runs train on 'ray', or on 'ray://HOST:PORT'.")
        if (gpus := self.gpus_per_run) is not None and self.on is None:
            raise UserError(f"gpus_per_run = {gpus:g} is for runs on Ray: add --on ray.")
        if gpus is not None and (not gpus >= 0 or (gpus > 1 and gpus % 1)):
            raise UserError(f"gpus_per_run = {gpus:g}: give a part of a GPU, or whole ones.")
        if self.layers is not None and self.start is None:
            raise UserError(f"layers = {self.layers!r} are those of the model of --from: name it")
        if self.start is not None:
            object.__setattr__(self, "start", str(self.start))
            if self.ann:
                raise UserError("--ann trains a network of its own, and --from starts all from one")
        if self.command is None:
            object.__setattr__(self, "command", self._call())
        paths = tuple(str(Path(path).resolve()) for path in self.imports)
        object.__setattr__(self, "imports", paths)

    def omitted(self) -> tuple[str, ...]:
        """The fields that a folder does not keep: where it was, how it was begun, what trained."""
        return ("out", "overwrite", "on", "gpus_per_run")

    @property
    def folder(self) -> Path:
        """Where it is answered."""
        return Path(self.out)

    @property
    def given(self) -> frozenset[str]:
        """The fields of the recipe that were asked for, by dotted key; no default changes them."""
        short = {
            "data.spec": self.data,
            "model.name": self.model,
            "schedule.epochs": self.epochs,
            "data.limit": self.limit,
        }
        named = (key for key, value in short.items() if value is not None)
        return frozenset(named) | frozenset(self.overrides or {})

    @property
    def first(self) -> bool:
        """Whether it names nothing to compare, as the first that a newcomer asks."""
        return not (self.data or self.model or self.start or self.recipe or self.mixers)

    def repeats(self, before: Question) -> bool:
        """Whether what was planned for another question answers this one, but for its growth.

        Minutes that are not named are as they were.
        """
        there, here = to_json(before), to_json(self)
        shared = all(there[name] == here[name] for name in _SHARED)
        return shared and self.minutes in (None, before.minutes)

    def asks_for_runs_of(self, before: Question) -> bool:
        """Whether it asks for the runs that another one did, as far as neither has grown."""
        there, here = to_json(before), to_json(self)
        return self.repeats(before) and all(there[name] == here[name] for name in _RUNS)

    def _call(self) -> str:
        """Write the call of `compare` with the arguments that are not at their defaults."""
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("command", "overwrite") or value == each.default:
                continue
            if isinstance(value, Recipe):
                value = value.name
            shown = str(value) if isinstance(value, Path) else value
            words.append(f"{each.name}={shown!r}")
        return f"keymix.compare({', '.join(words)})"


@dataclass(frozen=True, kw_only=True)
class PlannedMixer(ComparedMixer):
    """One mixer of a comparison, as it is planned.

    Its label reads back to the same mixer; its note says what ``--match`` chose, or what an ANN
    counterpart is. A reference has a model of its own, without a mixer.
    """

    note: str = ""
    mixes_prefix: bool  # whether prefix tokens receive anything from patch tokens
    params: int  # trainable, of the model with it
    model: str = ""  # its model, where that is not the recipe's
    ann_of: str = ""  # label of the mixer whose ANN counterpart this is
    options: dict[str, Any] = field(default_factory=dict)  # of its model, added to the recipe's
    weights: str = ""  # file that its runs start from, where that is not the recipe's
    built: str = ""  # the mixer as a recipe builds it, where that is not the label

    def __post_init__(self) -> None:
        if not is_name(self.slug):
            raise UserError(f"slug={self.slug!r} of a mixer is no name of a folder")

    @property
    def compared(self) -> ComparedMixer:
        """What results keep of it."""
        return ComparedMixer(**{f.name: getattr(self, f.name) for f in fields(ComparedMixer)})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole comparison, resolved and checked, as its folder keeps it.

    `pooling` is how every model reads out, timm's word (``avg``, ``token``, …), empty where models
    have no pooled readout; `pooled_for` are the mixers that bring nothing to a class token, if
    that decided it.
    """

    question: Question
    recipe: Recipe  # what all runs share; each run replaces the mixer and the seed
    mixers: tuple[PlannedMixer, ...]  # in the order of every table
    specs: tuple[str, ...]  # the mixers as they were before ``--match``
    seeds: tuple[int, ...]  # shared by all mixers
    baseline: str  # label of the mixer that the others are compared with
    pooling: str
    pooled_for: tuple[str, ...]
    cannot_sit: tuple[str, ...] = ()  # why mixers that were not named are left out, a sentence each
    margin: float | None = None  # differences up to this are equal, in units of the score
    processes: int = 0  # that train side by side
    threads: int = 0  # of each
    used: str = ""  # what is used of the data
    notes: tuple[str, ...] = ()  # what was chosen without being asked for, a line each
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a run, by label, as timed
    after: float = 0.0  # seconds for costs and maps, after training
    tuning: Tuning | None = None  # how the learning rate was chosen
    start: Start | None = None  # the trained model that all runs start from
    out: Path = Path()

    def __post_init__(self) -> None:
        if not {self.baseline} <= {*self.labels} or not self.seeds or min(self.seeds) < 0:
            raise UserError(f"it has no runs: {self.baseline=}, {self.seeds=}")

    def omitted(self) -> tuple[str, ...]:
        """The folder may be moved."""
        return ("out",)

    @property
    def match(self) -> str | None:
        """``"params"`` if widths were matched."""
        return self.question.match

    @property
    def imports(self) -> tuple[str, ...]:
        """The user's files that register mixers, tasks or data sources."""
        return tuple(map(str, self.question.imports))

    @property
    def command(self) -> str:
        """What repeats the call."""
        return self.question.command or ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The mixers' labels, in order."""
        return tuple(mixer.label for mixer in self.mixers)

    @property
    def spiking(self) -> bool:
        """Whether the model's neurons spike."""
        model = self.recipe.model
        return domain_of(model.name) == "spiking" and model.options.get("neuron") != "relu"

    @property
    def mixed(self) -> tuple[PlannedMixer, ...]:
        """The mixers without the trained references, which have none."""
        return tuple(each for each in self.mixers if not each.reference)

    @property
    def pairs(self) -> list[tuple[PlannedMixer, int]]:
        """Every run as mixer and seed: one seed of all mixers after the other."""
        return [(mixer, seed) for seed in self.seeds for mixer in self.mixers]

    def recipe_for(self, mixer: PlannedMixer, seed: int) -> Recipe:
        """Return the recipe of one run."""
        model = self.recipe.model
        if mixer.model:
            own = ModelConfig(name=mixer.model, options=mixer.options)
            return replace(self.recipe, model=own, seed=seed)
        options = model.options | mixer.options
        built, weights = mixer.built or mixer.label, mixer.weights or model.weights
        model = replace(model, mixer=mixer.ann_of or built, options=options, weights=weights)
        return replace(self.recipe, model=model, seed=seed)

    def folder(self, mixer: PlannedMixer, seed: int) -> Path:
        """Return the folder of one run."""
        return self.out / "runs" / mixer.slug / f"seed{seed}"
