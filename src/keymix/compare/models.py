# SPDX-License-Identifier: Apache-2.0
"""The mixers, seeds and processes of a comparison, and the models that the mixers sit in."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keymix.analysis.certainty import MARGIN
from keymix.analysis.threads import cores, threads_each
from keymix.compare.question import Plan, PlannedMixer, Question
from keymix.data.bounds import MOST_OF_A_SEED
from keymix.data.dataset import ImageData
from keymix.data.record import DataRecord
from keymix.errors import KeymixWarning, UserError, unknown
from keymix.hosts import class_token_reads_image, find_mixers
from keymix.mixers.registry import get_mixer_class, list_mixers
from keymix.mixers.spec import MixerSpec, parse_mixer, parse_mixers
from keymix.models.factory import domain_of
from keymix.models.match import matched, trainable
from keymix.models.memory import refuse_beyond_memory
from keymix.task import Score
from keymix.train.model import find_weights, model_for, start_from
from keymix.train.recipe import Recipe
from keymix.train.validate import check_processes

SEEDS = 3
"""Seeds of a comparison where nobody says how many."""
CONTROL = "identity"
SPIKING_MODEL = "qkformer_micro_32"
PREFERRED_BASELINES = {"dense": "softmax", "spiking": "spiking_self"}
"""By what a model's tokens are."""
MOST_RUNS = 10_000
"""Of a comparison: as many as a report's tables and a folder of runs still serve."""
MOST_PROCESSES = 8
"""Default cap, for memory's sake."""

Builder = Callable[["MixerSpec"], "nn.Module"]


def choose_mixers(
    mixers: str | Sequence[str] | None, *, controls: bool, model: str = "", least: int = 2
) -> list[MixerSpec]:
    """Return the mixers to compare, the identity control last unless it is declined.

    Where none are named these are all registered mechanisms for the model's tokens (dense if the
    model is none of keymix's), softmax or spiking self-attention first.
    """
    if mixers is None:
        domain = domain_of(model)
        traits = {name: get_mixer_class(name).traits for name in list_mixers(domain=domain)}
        mixers = [name for name, each in traits.items() if not (each.control or each.named_only)]
        mixers.sort(key=lambda name: name != PREFERRED_BASELINES[domain])
    named = by_tokens(mixers)
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
    if len(specs) < least:
        raise UserError(f"only {specs[0].label!r} to compare. Name at least two mixers.")
    return specs


def _parsed(mixers: str | Sequence[str]) -> list[MixerSpec]:
    return parse_mixers(mixers if isinstance(mixers, str) else ",".join(mixers))


def by_tokens(mixers: str | Sequence[str] | None) -> dict[str, list[str]]:
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


def share_out(runs: int, processes: int | None, threads: int = 0, *, cuda: bool) -> tuple[int, int]:
    """Decide how many processes train side by side, and threads of each, unless these are given.

    One process keeps a GPU busy.
    """
    if processes is not None:
        check_processes("processes", processes, least=1)
    else:
        processes = 1 if cuda else min(runs, cores(), MOST_PROCESSES)
    return processes, threads or threads_each(processes)


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
    """Keep the mixers that can sit in the recipe's model; say why the others cannot.

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
    return kept, tuple(reasons)


def make_plan(
    question: Question, recipe: Recipe, data: ImageData, specs: Sequence[MixerSpec]
) -> Plan:
    """Build every model, and settle the readout, widths and weights that all of them share.

    A `UserError` refuses a model that cannot be built or does not take the weights to start from,
    and a readout that starves a mixer.
    """
    swapped = question.start is not None  # into a trained model, in weights of their own
    weights = None if swapped else find_weights(recipe.model)  # or refuse, before models are built
    baseline = choose_baseline(specs, question.baseline)
    build = meta_builder(recipe, data)
    models = {spec.label: build(spec) for spec in specs}
    found = getattr(models[baseline.label], "global_pool", "")
    pooled = found is not None  # else every token is read out
    unmixed = tuple(s.label for s in specs if pooled and not _mixes_prefix(s, models[s.label]))
    pooling = str(found or "token") if pooled else ""
    unread: tuple[str, ...] = ()  # by a class token
    left_out: list[str] = []
    if unmixed and pooling != "avg" and swapped:
        if baseline.label in unmixed:
            raise UserError(f"{baseline.label} brings nothing to the class token: name another")
        specs = [spec for spec in specs if spec.label not in unmixed]
        left_out = [f"{each} brings nothing to the model's class token" for each in unmixed]
        unmixed = ()
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
        if question.match and spec != baseline and not spec.control:
            match_ = matched(spec, target, build, models[spec.label], baseline)
            note, chosen, params = match_.note, match_.spec, match_.params
        elif question.match and spec != baseline:
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
    plan = Plan(
        question=question,
        recipe=recipe,
        mixers=tuple(mixers),
        specs=tuple(spec.label for spec in specs),
        seeds=(0,),
        baseline=baseline.label,
        pooling=pooling,
        pooled_for=unread,
        cannot_sit=tuple(left_out),
        margin=equal_within(question.margin, data.task.score),
        out=question.folder,
    )
    if question.ann:
        plan = replace(plan, mixers=(*plan.mixers, ann_of_baseline(plan, data)))
    return plan


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
