# SPDX-License-Identifier: Apache-2.0
"""What a comparison will do: resolved and checked before anything trains, and only read afterwards.

Every mixer's model is built once on the meta device, and the data is loaded, so that a mistake in
any input shows at once and not after the first hour.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keymix import recipes
from keymix.analysis.certainty import MARGIN
from keymix.analysis.threads import cores, threads_each
from keymix.compare.defaults import fit_to_count, fit_to_images, kept_choices, with_enough_cases
from keymix.data.bounds import MOST_OF_A_SEED
from keymix.data.dataset import ImageData
from keymix.data.events.inputs import sensor_of
from keymix.data.kinds import IMAGE, RECORDING, InputKind
from keymix.data.record import DataRecord
from keymix.data.specs import kind_of_spec, task_name
from keymix.errors import KeymixWarning, UserError, unknown
from keymix.hosts import class_token_reads_image, find_mixers
from keymix.mixers.registry import get_mixer_class, list_mixers
from keymix.mixers.spec import MixerSpec, parse_mixer, parse_mixers
from keymix.models.factory import domain_of
from keymix.models.match import matched, trainable
from keymix.models.memory import refuse_beyond_memory
from keymix.report.record import ComparedMixer
from keymix.task import DEFAULT, Score, Task, get_task
from keymix.train.model import (
    device_of_this_machine,
    find_weights,
    load_data,
    model_for,
    start_from,
    warn_of_data,
)
from keymix.train.recipe import ModelConfig, Recipe, is_name, replace_path
from keymix.train.validate import check_recipe, training_batches

CONTROL = "identity"
DATA = "digits"
"""The data set where neither data nor a recipe is named."""
SPIKING_MODEL = "qkformer_micro_32"
_SIDE = 32  # pixels per side of the images and frames that the spiking model is made for
PREFERRED_BASELINES = {"dense": "softmax", "spiking": "spiking_self"}
"""By what a model's tokens are."""
MOST_RUNS = 10_000
"""Of a comparison: as many as a report's tables and a folder of runs still serve."""
MOST_PROCESSES = 8
"""Default cap, for memory's sake."""


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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the folder of a comparison records of its plan.

    `pooling` is how every model reads out, timm's word (``avg``, ``token``, …), empty where models
    have no pooled readout; `pooled_for` are the mixers that bring nothing to a class token, if
    that decided it.
    """

    mixers: tuple[PlannedMixer, ...]  # in the order of every table
    seeds: tuple[int, ...]  # shared by all mixers
    baseline: str  # label of the mixer that the others are compared with
    match: str | None = None  # ``"params"`` if widths were matched
    pooling: str
    pooled_for: tuple[str, ...]
    cannot_sit: tuple[
        str, ...
    ] = ()  # why mixers that were not named are not in it, one sentence per mixer
    imports: tuple[str, ...] = ()  # the user's files that register mixers, tasks or data sources
    margin: float | None = None  # differences up to this are equal, in units of the score
    command: str = ""  # what repeats the call
    processes: int = 0  # that train side by side
    threads: int = 0  # of each

    def __post_init__(self) -> None:
        wrong = next(self._faults(), "")
        if wrong:
            raise UserError(wrong)

    def _faults(self) -> Iterator[str]:
        """Say what is wrong with it; names of folders must be names, whoever wrote them."""
        if not self.mixers:
            yield "it names no mixers"
        for mixer in self.mixers:
            if not is_name(mixer.slug):
                yield f"slug={mixer.slug!r} of a mixer is no name of a folder"
            if not mixer.label.isprintable():
                yield f"label={mixer.label!r} of a mixer"
        if len({*self.labels}) < len(self.labels):
            yield "a mixer is given twice"
        if not self.seeds or min(self.seeds) < 0 or len({*self.seeds}) < len(self.seeds):
            yield f"seeds={list(self.seeds)!r}"
        if self.baseline not in self.labels:
            yield f"baseline={self.baseline!r}"
        if self.match not in (None, "params"):
            yield f"match={self.match!r}"

    @property
    def labels(self) -> tuple[str, ...]:
        """The mixers' labels, in order."""
        return tuple(mixer.label for mixer in self.mixers)


@dataclass(frozen=True, kw_only=True)
class Plan(Planned):
    """A whole comparison, resolved and checked."""

    recipe: Recipe  # what all runs share; each run replaces the mixer and the seed
    out: Path
    notes: tuple[str, ...] = ()  # what was chosen without being asked for, a line each
    used: str = ""  # what is used of the data

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
        model = replace(model, mixer=mixer.ann_of or mixer.label, options=options)
        return replace(self.recipe, model=model, seed=seed)

    def folder(self, mixer: PlannedMixer, seed: int) -> Path:
        """Return the folder of one run."""
        return self.out / "runs" / mixer.slug / f"seed{seed}"

    def job(self, mixer: PlannedMixer, seed: int) -> Job:
        """Return one run as an executor gets it."""
        recipe, folder = self.recipe_for(mixer, seed), self.folder(mixer, seed)
        return Job(mixer=mixer.label, seed=seed, recipe=recipe, folder=folder)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to do, or a trial of its first steps."""

    mixer: str  # its label
    seed: int
    recipe: Recipe
    folder: Path
    score: Score | None = None  # that its epochs are reported by; None: the first of the task
    trial: float = (
        0.0  # if not 0, a few steps are timed, for an estimate of this number of runs in a row
    )


def resolve(
    *,
    data: str | None,
    model: str | None,
    mixers: str | Sequence[str] | None,
    seeds: int | Sequence[int],
    recipe: str | Recipe | None,
    overrides: Mapping[str, Any] | None,
    epochs: int | None,
    limit: int | None,
    match: str | None,
    baseline: str | None,
    controls: bool,
    ann: bool,
    reference: bool,
    margin: float | None,
    processes: int | None,
    imports: Sequence[str | Path],
    command: str,
    out: Path,
    recorded: Callable[[], Recipe | None] | None,
    say: Callable[[str], None],
) -> tuple[Plan, ImageData]:
    """Turn the arguments of `keymix.compare.run.compare` into a plan, and load its data.

    `recorded` reads the recipe that the folder shares already; `say` gets a line before the data
    is loaded. A UserError refuses any bad argument.
    """
    shared, why = choose_recipe(
        data=data,
        recipe=recipe,
        model=model,
        mixers=mixers,
        epochs=epochs,
        limit=limit,
        overrides=overrides,
    )
    short = {"model.name": model, "schedule.epochs": epochs, "data.limit": limit}
    given = {key for key, value in short.items() if value is not None} | {*(overrides or {})}
    cuda = device_of_this_machine().type == "cuda"
    before = None if recorded is None or recipe is not None else recorded()
    used = ""
    if recipe is None and (kept := kept_choices(shared, before, given)) is not None:
        shared = kept
    elif recipe is None:
        fitted = fit_to_images(shared, given, cuda=cuda)
        shared, used = fitted.recipe, fitted.used
    specs = choose_mixers(mixers, controls=controls, model=shared.model.name)
    chosen_seeds = choose_seeds(seeds, len(specs))
    choose_baseline(specs, baseline)  # or refuse, before the data is read
    check_recipe(shared)
    if why:
        shared = at_the_models_size(shared)

    say("loading the data")
    images = load_data(shared.data)
    if recipe is None and before is None:
        larger = with_enough_cases(shared, given, images.record())
        shared, images = larger, images if larger is shared else load_data(larger.data)
    warn_of_data(images)
    if recipe is None:
        shared = fit_to_count(shared, given, train=len(images.train), before=before)
    cannot_sit: tuple[str, ...] = ()
    if mixers is None:
        specs, cannot_sit = fitting(specs, shared, images)
    chosen = choose_baseline(specs, baseline)
    training_batches(shared, images)  # or refuse the augmentation

    plan = make_plan(
        recipe=shared,
        data=images,
        specs=specs,
        baseline=chosen,
        seeds=chosen_seeds,
        match=match,
        imports=imports,
        out=out,
        cannot_sit=cannot_sit,
    )
    if ann:
        plan = replace(plan, mixers=(*plan.mixers, ann_of_baseline(plan, images)))
    plain = bool(reference and images.task.plain)  # which joins later
    runs = len(plan.pairs) + plain * len(plan.seeds)
    processes, threads = share_out(runs, processes, cuda=cuda)
    plan = replace(plan, margin=equal_within(margin, images.task.score))
    notes = [default_note(shared, why)] if why else []
    notes += [f"{each.label}: {each.note}" for each in plan.mixers if each.note]
    plan = replace(
        plan,
        command=command,
        processes=processes,
        threads=threads,
        notes=tuple(notes),
        used=used or _loaded(images),
    )
    return plan, images


def _loaded(images: ImageData) -> str:
    """Say what was loaded."""
    count, (height, width) = sum(map(len, images.splits)), images.image_size
    return f"{count:,} {images.kind.nouns} of {width}x{height}"


# ---- the recipe -----------------------------------------------------------------------------


def choose_recipe(
    *,
    data: str | None,
    recipe: str | Recipe | None,
    model: str | None = None,
    mixers: str | Sequence[str] | None = None,
    epochs: int | None = None,
    limit: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Recipe, str]:
    """Return the recipe that all runs share, and why it is not that of images where none is named.

    A warm-up or a cool-down that would not fit into fewer epochs keeps its share.
    """
    short = {"data.spec": data, "model.name": model, "data.limit": limit}
    changes: dict[str, Any] = {key: value for key, value in short.items() if value is not None}
    if epochs is not None:
        changes["schedule.epochs"] = epochs
    why = ""
    if recipe is None:
        named = changes | dict(overrides or {})
        recipe, why = _default_recipe(named.get("data.spec"), named.get("model.name"), mixers)
    elif isinstance(recipe, str):
        recipe = recipes.resolve(recipe)
    schedule = recipe.schedule
    if epochs is not None and 1 <= epochs <= schedule.warmup_epochs:
        changes["schedule.warmup_epochs"] = schedule.warmup_epochs * epochs / schedule.epochs
    if epochs is not None and 1 <= epochs <= schedule.cooldown_epochs:
        changes["schedule.cooldown_epochs"] = schedule.cooldown_epochs * epochs // schedule.epochs
    changes |= overrides or {}
    for key, flag in (("model.mixer", "--mixers"), ("seed", "--seeds")):
        if key in changes:
            raise UserError(f"{key} is what a comparison varies. Use {flag} instead.")
    chosen = replace_path(recipe, changes)
    return replace(chosen, model=replace(chosen.model, mixer=None), seed=0), why


def _default_recipe(
    data: str | None, model: str | None, mixers: str | Sequence[str] | None
) -> tuple[Recipe, str]:
    """Return the recipe that the data's task has for data, model and mixers, and why that one.

    A task has recipes by data set and by kind of input. Mixers of spiking tokens want a spiking
    model.
    """
    task, kind = get_task(task_name(data)), kind_of_spec(data)
    if task.name != DEFAULT or kind is not IMAGE:
        holds = kind.holds if task.name == DEFAULT else task.holds
        return recipes.resolve(_recipe_name(task, data, kind)), f"{data} holds {holds}"
    if model is not None or [*_by_tokens(mixers)] != ["spiking"]:
        return recipes.resolve(_recipe_name(task, data or DATA, kind)), ""
    why = "these mixers take spiking tokens"
    if data is None:
        return recipes.resolve(_recipe_name(task, None, RECORDING)), why
    recipe = recipes.resolve(_recipe_name(task, data, kind))
    return replace_path(recipe, {"data.image_size": _SIDE, "model.name": SPIKING_MODEL}), why


def _recipe_name(task: Task, data: str | None, kind: InputKind) -> str:
    """Name a task's recipe: of the data set, else of its kind of input, else of any data."""
    spec = kind.name if data is None else data.partition(":")[0]
    found = (task.recipes[key] for key in (spec, kind.name, "") if key in task.recipes)
    name = next(found, None)
    if name is None:
        given = "no data" if data is None else f"data {data!r}"
        raise UserError(
            f"task {task.name!r} has no recipe of its own for {given}: name one with --recipe"
        )
    return name


def at_the_models_size(recipe: Recipe) -> Recipe:
    """Give frames of a larger sensor the spiking model's 32 x 32 pixels, unless a size is set."""
    own = recipe.model.name == SPIKING_MODEL and kind_of_spec(recipe.data.spec) is RECORDING
    if not own or recipe.data.image_size is not None:
        return recipe

    sensor = sensor_of(recipe.data.spec)
    if min(sensor) < _SIDE or max(sensor) == _SIDE:
        return recipe
    return replace(recipe, data=replace(recipe.data, image_size=_SIDE))


def default_note(recipe: Recipe, why: str) -> str:
    """Say in one line which recipe and model were chosen, and why."""
    size = f" at {_SIDE}x{_SIDE} pixels" if recipe.data.image_size == _SIDE else ""
    return (
        f"{why}: recipe {recipe.name} with model {recipe.model.name}{size} is taken; --recipe and "
        "--model name others"
    )


# ---- mixers, seeds, processes ---------------------------------------------------------------


def choose_mixers(
    mixers: str | Sequence[str] | None, *, controls: bool, model: str = ""
) -> list[MixerSpec]:
    """Return the mixers to compare, the identity control last unless it is declined.

    Where none are named these are all registered mechanisms for the model's tokens (dense if the
    model is none of keymix's), softmax or spiking self-attention first.
    """
    if mixers is None:
        domain = domain_of(model)
        traits = {name: get_mixer_class(name).traits for name in list_mixers(domain=domain)}
        mixers = [name for name, each in traits.items() if not (each.control or each.composed)]
        mixers.sort(key=lambda name: name != PREFERRED_BASELINES[domain])
    named = _by_tokens(mixers)
    if {"dense", "spiking"} <= named.keys():
        spiking, dense = (", ".join(named[kind]) for kind in ("spiking", "dense"))
        raise UserError(
            f"spiking mixers ({spiking}) and dense ones ({dense}) take different tokens and cannot "
            "be compared in one model: name mixers of one kind. --ann adds a spiking "
            "baseline's ANN counterpart."
        )
    specs = _parsed(mixers)
    if controls and all(spec.label != CONTROL for spec in specs):
        specs += parse_mixers(CONTROL)
    if len(specs) < 2:
        raise UserError(f"only {specs[0].label!r} to compare. Name at least two mixers.")
    return specs


def _parsed(mixers: str | Sequence[str]) -> list[MixerSpec]:
    return parse_mixers(mixers if isinstance(mixers, str) else ",".join(mixers))


def _by_tokens(mixers: str | Sequence[str] | None) -> dict[str, list[str]]:
    """List the mixers that were named by the tokens they want, those that take any left out."""
    named: dict[str, list[str]] = {}
    specs = [] if mixers is None else _parsed(mixers)
    for name in dict.fromkeys(name for spec in specs for name in spec.names):
        domain = get_mixer_class(name).traits.domain
        if domain != "any":
            named.setdefault(domain, []).append(name)
    return named


def choose_seeds(seeds: int | Sequence[int], mixers: int = 1) -> tuple[int, ...]:
    """Return the seeds; a number N means 0 … N-1. All mixers have at most `MOST_RUNS` runs."""
    if isinstance(seeds, int) and seeds < 1:
        raise UserError(f"{seeds=} must be at least 1")
    count = seeds if isinstance(seeds, int) else len(seeds)
    if count * mixers > MOST_RUNS:
        raise UserError(
            f"{count:,} seeds of {mixers} mixers are {count * mixers:,} runs, and a comparison "
            f"holds at most {MOST_RUNS:,}: give at most {MOST_RUNS // mixers:,} seeds"
        )
    chosen = tuple(range(count)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or min(chosen) < 0 or len(set(chosen)) != len(chosen):
        raise UserError(f"seeds={list(chosen)} must be different whole numbers, 0 or more")
    if max(chosen) > MOST_OF_A_SEED:
        raise UserError(f"seeds={list(chosen)} must be at most {MOST_OF_A_SEED:,} each")
    return chosen


def choose_baseline(specs: Sequence[MixerSpec], baseline: str | None) -> MixerSpec:
    """Return the mixer that the others are compared with.

    If none was asked for: softmax, or spiking self-attention, if it is there, else the first.
    """
    labels = [spec.label for spec in specs]
    if baseline is None:
        preferred = [name for name in PREFERRED_BASELINES.values() if name in labels]
        return specs[labels.index(preferred[0])] if preferred else specs[0]
    label = parse_mixer(baseline).label
    if label not in labels:
        raise unknown("baseline", baseline, labels)
    return specs[labels.index(label)]


def equal_within(margin: float | None, score: Score) -> float | None:
    """Return the margin in units of a score, of one as it is shown; fractions have a default."""
    if margin is None:
        return MARGIN if score.unit == "%" else None
    if not 0 < margin < math.inf:
        raise UserError(f"margin = {margin!r}: give a positive number of {score.difference_unit}.")
    return margin / score.scale


def share_out(runs: int, processes: int | None, *, cuda: bool) -> tuple[int, int]:
    """Decide how many processes train side by side (unless that is given), and threads of each.

    One process keeps a GPU busy.
    """
    if processes is None:
        processes = 1 if cuda else min(runs, cores(), MOST_PROCESSES)
    return processes, threads_each(processes)


# ---- the models -----------------------------------------------------------------------------


Builder = Callable[["MixerSpec"], "nn.Module"]


def meta_builder(recipe: Recipe, data: ImageData) -> Builder:
    """Return a function that builds the recipe's model with a mixer on the meta device.

    The function raises a `UserError` that names the mixer where it does not fit the model.
    """
    return partial(_built, recipe, data, "meta")


def _built(recipe: Recipe, data: ImageData, device: str, spec: MixerSpec) -> nn.Module:
    mixed = replace(recipe, model=replace(recipe.model, mixer=spec.label))
    with torch.random.fork_rng(devices=[]), torch.device(device):
        try:
            model = model_for(mixed, data.record())
        except UserError as error:
            if str(error).startswith("unknown model"):
                raise
            raise UserError(f"{recipe.model.name} with mixer {spec.label}: {error}") from None
    refuse_beyond_memory(f"{recipe.model.name} with mixer {spec.label}", model)
    return model


def fitting(
    specs: Sequence[MixerSpec], recipe: Recipe, data: ImageData
) -> tuple[list[MixerSpec], tuple[str, ...]]:
    """Keep the mixers that can sit in the recipe's model; warn of the others and say why.

    For mixers that were not named: a named one that cannot sit is an error.
    """
    build = meta_builder(recipe, data)
    kept, reasons = [], []
    for spec in specs:
        try:
            build(spec)
        except UserError as error:
            if str(error).startswith("unknown model"):
                raise
            reasons.append(str(error))
        else:
            kept.append(spec)
    if len(kept) < 2:
        return list(specs), ()  # whose error make_plan raises
    for reason in reasons:
        warnings.warn(f"left out of the comparison: {reason}", KeymixWarning, stacklevel=2)
    return kept, tuple(reasons)


def make_plan(
    *,
    recipe: Recipe,
    data: ImageData,
    specs: Sequence[MixerSpec],
    baseline: MixerSpec,
    seeds: tuple[int, ...],
    match: str | None,
    imports: Sequence[str | Path],
    out: Path,
    cannot_sit: tuple[str, ...] = (),
) -> Plan:
    """Build every model, and settle the readout, widths and weights that all of them share.

    A `UserError` refuses a model that cannot be built or does not take the weights to start from,
    and a readout that starves a mixer.
    """
    weights = find_weights(recipe.model)  # or refuse, before any model is built
    if match not in (None, "params"):
        raise unknown("match", str(match), ["params"])
    build = meta_builder(recipe, data)
    models = {spec.label: build(spec) for spec in specs}
    found = getattr(models[baseline.label], "global_pool", "")
    pooled = found is not None  # else every token is read out
    unmixed = tuple(s.label for s in specs if pooled and not _mixes_prefix(s, models[s.label]))
    pooling = str(found or "token") if pooled else ""
    unread: tuple[str, ...] = ()  # by a class token
    if unmixed and pooling != "avg":
        if recipe.model.global_pool not in (None, "avg"):
            raise UserError(
                f"model.global_pool = {recipe.model.global_pool!r} reads out where "
                f"{', '.join(unmixed)} brings nothing. Leave {unmixed[0]} out (--no-controls) or "
                "set --model.global_pool avg."
            )
        recipe = replace(recipe, model=replace(recipe.model, global_pool="avg"))
        build = meta_builder(recipe, data)
        models = {spec.label: build(spec) for spec in specs}
        pooling, unread = "avg", unmixed
    target = trainable(models[baseline.label])
    mixers = []
    for spec in specs:
        note, chosen, params = "", spec, trainable(models[spec.label])
        if match == "params" and spec != baseline and not spec.control:
            match_ = matched(spec, target, build, models[spec.label], baseline)
            note, chosen, params = match_.note, match_.spec, match_.params
        elif match == "params" and spec != baseline:
            note = f"not matched: a control keeps its size, {params:,} parameters."
        if weights is not None:
            _check_weights(weights, recipe, data, chosen)
        mixers.append(
            PlannedMixer(
                label=chosen.label,
                slug=chosen.slug,
                control=spec.control,
                mixes_prefix=spec.label not in unmixed,
                params=params,
                note=note,
            )
        )
    return Plan(
        recipe=recipe,
        mixers=tuple(mixers),
        seeds=seeds,
        baseline=baseline.label,
        match=match,
        pooling=pooling,
        pooled_for=unread,
        imports=tuple(str(Path(path).resolve()) for path in imports),
        out=out,
        cannot_sit=cannot_sit,
    )


def input_shape(data: DataRecord) -> tuple[int, ...]:
    """Return the shape of one input, by the axes of its kind."""
    sizes = dict(zip("TCHW", (data.time_steps, data.in_chans, *data.image_size), strict=True))
    return tuple(int(sizes[axis] or 0) for axis in re.findall("[TCHW]", data.kind.axes))


def _mixes_prefix(spec: MixerSpec, model: nn.Module) -> bool:
    """Whether the class token of the built model reads the image; options may decide it."""
    return class_token_reads_image(model) if find_mixers(model) else spec.mixes_prefix


def _check_weights(path: Path, recipe: Recipe, data: ImageData, spec: MixerSpec) -> None:
    """Load the weights that all runs start from into a model, or refuse."""
    model = _built(recipe, data, "cpu", spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeymixWarning)
        start_from(model, path)


def ann_of_baseline(plan: Plan, data: ImageData) -> PlannedMixer:
    """Return the ANN counterpart of a spiking baseline, as one more row.

    It is the same model with the same mixer and as many weights, ReLU in place of every
    neuron, and one time step. Recordings of events keep their frames, one after another through
    the network, so that both see the same data.
    """
    if not plan.spiking:
        raise UserError(
            f"--ann: {plan.recipe.model.name} has no spikes to do without. Choose a spiking model "
            f"such as {SPIKING_MODEL}, or leave --ann out."
        )
    frames = "T" in data.kind.axes
    options: dict[str, Any] = {"neuron": "relu"} | ({} if frames else {"time_steps": 1})
    steps = f"on the same {data.time_steps} frames" if frames else "at one time step"
    spec = parse_mixer(plan.baseline)
    model = plan.recipe.model
    shared = replace(plan.recipe, model=replace(model, options=model.options | options))
    sibling = plan.mixers[plan.labels.index(plan.baseline)]
    return PlannedMixer(
        label=f"ANN counterpart of {plan.baseline}",
        slug=f"ann-of-{spec.slug}",
        control=False,
        mixes_prefix=sibling.mixes_prefix,
        params=trainable(meta_builder(shared, data)(spec)),
        note=f"the network of {plan.baseline} with ReLU in place of every neuron, {steps}: no "
        "spikes, every multiply-add made.",
        ann_of=plan.baseline,
        options=options,
    )
