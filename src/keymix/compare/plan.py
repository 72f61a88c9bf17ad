# SPDX-License-Identifier: Apache-2.0
"""What a comparison will do, decided and checked before anything trains.

Every mixer's model is built once on the meta device, and the data is loaded, so that a mistake in
any input shows at once and not after the first hour.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.compare.defaults import default_for, refuse_two_kinds
from keymix.data.bounds import MOST_OF_A_SEED
from keymix.errors import KeymixWarning, UserError, unknown
from keymix.train.recipe import Recipe, replace_path

if TYPE_CHECKING:
    from torch import nn

    from keymix.data.dataset import ImageData
    from keymix.mixers.spec import MixerSpec

CONTROL = "identity"
MOST_RUNS = 10_000
"""Of a comparison: as many as a report's tables and a folder of runs still serve."""
PREFERRED_BASELINES = {"dense": "softmax", "spiking": "spiking_self"}
"""By what a model's tokens are."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One mixer of a comparison.

    Args:
        label: Canonical text of the mixer, which reads back to the same mixer.
        slug: The label as a folder's name.
        control: Whether it is a control.
        mixes_prefix: Whether prefix tokens receive anything from patch tokens.
        params: Trainable parameters of the model with it.
        note: What ``--match`` chose, or what a twin is, in words; else empty.
        twin_of: Label of the mixer whose twin without spikes this is; empty for a mixer.
        options: What its model is built with beside the recipe's options.
    """

    label: str
    slug: str
    control: bool
    mixes_prefix: bool
    params: int
    note: str = ""
    twin_of: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole comparison.

    Args:
        recipe: What all runs share; each run replaces the mixer and the seed.
        entrants: The mixers, in the order of every table.
        seeds: The training seeds, shared by all mixers.
        baseline: Label of the mixer that the others are compared with.
        match: ``"params"`` if widths were matched, else ``None``.
        pooling: How every model reads out, timm's word (``avg``, ``token``, …); empty where models
            have no pooled readout.
        unheard: Labels of the mixers that bring nothing to a class token, if that decided it.
        imports: The user's files that register mixers, tasks or data sources.
        out: The comparison's folder.
        cannot_sit: Why mixers that nobody named are not in it, a sentence each.
    """

    recipe: Recipe
    entrants: tuple[Entrant, ...]
    seeds: tuple[int, ...]
    baseline: str
    match: str | None
    pooling: str
    unheard: tuple[str, ...]
    imports: tuple[str, ...]
    out: Path
    cannot_sit: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The mixers' labels, in order."""
        return tuple(entrant.label for entrant in self.entrants)

    @property
    def spiking(self) -> bool:
        """Whether the model's neurons spike."""
        from keymix.models.factory import domain_of

        model = self.recipe.model
        return domain_of(model.name) == "spiking" and model.options.get("neuron") != "relu"

    @property
    def pairs(self) -> list[tuple[Entrant, int]]:
        """Every run as mixer and seed: one seed of all mixers after the other."""
        return [(entrant, seed) for seed in self.seeds for entrant in self.entrants]

    def recipe_for(self, entrant: Entrant, seed: int) -> Recipe:
        """Return the recipe of one run."""
        model = self.recipe.model
        options = model.options | entrant.options
        model = replace(model, mixer=entrant.twin_of or entrant.label, options=options)
        return replace(self.recipe, model=model, seed=seed)

    def folder(self, entrant: Entrant, seed: int) -> Path:
        """Return the folder of one run."""
        return self.out / "runs" / entrant.slug / f"seed{seed}"


def choose_recipe(
    *,
    data: str | None,
    recipe: str | Recipe | None,
    model: str | None = None,
    epochs: int | None = None,
    limit: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Recipe:
    """Resolve the recipe that all runs share.

    Args:
        data: Data spec, ``None`` for the recipe's.
        recipe: A recipe, its name, or a YAML or JSON file; ``None`` chooses by the data.
        model: Model name, ``None`` for the recipe's.
        epochs: Epochs, ``None`` for the recipe's. A warm-up or a cool-down that would not fit
            keeps its share.
        limit: Training images, ``None`` for all.
        overrides: Further fields by dotted key.

    Raises:
        UserError: On an unknown recipe or key, or an unfit value.
    """
    if recipe is None:
        recipe = default_for(data=data, model=model, mixers=None).recipe
    if isinstance(recipe, str):
        from keymix import recipes

        recipe = recipes.resolve(recipe)
    short = {"data.spec": data, "model.name": model, "data.limit": limit}
    changes: dict[str, Any] = {key: value for key, value in short.items() if value is not None}
    if epochs is not None:
        changes["schedule.epochs"] = epochs
        warmup, before = recipe.schedule.warmup_epochs, recipe.schedule.epochs
        if 1 <= epochs <= warmup:
            changes["schedule.warmup_epochs"] = warmup * epochs / before
        if 1 <= epochs <= recipe.schedule.cooldown_epochs:
            changes["schedule.cooldown_epochs"] = recipe.schedule.cooldown_epochs * epochs // before
    changes |= overrides or {}
    for key in ("model.mixer", "seed"):
        if key in changes:
            flag = "--mixers" if key == "model.mixer" else "--seeds"
            raise UserError(f"{key} is what a comparison varies. Use {flag} instead.")
    chosen = replace_path(recipe, changes)
    return replace(chosen, model=replace(chosen.model, mixer=None), seed=0)


def choose_seeds(seeds: int | Sequence[int], mixers: int = 1) -> tuple[int, ...]:
    """Return the seeds: a number N means 0 … N-1.

    Args:
        seeds: How many, or which.
        mixers: How many mixers are trained at each.

    Raises:
        UserError: If there is none, one is no seed, one stands twice, or the runs are more than
            `MOST_RUNS`.
    """
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


def choose_mixers(
    mixers: str | Sequence[str] | None, *, controls: bool, model: str = ""
) -> list[MixerSpec]:
    """Return the mixers to compare.

    Without a choice of the user's these are all registered mechanisms for such tokens as the
    model has, softmax first, or spiking self-attention. The identity control comes last unless it
    is declined.

    Args:
        mixers: Text with commas, or one text a mixer, or ``None`` for all.
        controls: Whether to add the identity control.
        model: Name of the model that they shall sit in; its tokens are dense if it is none of
            keymix's.

    Raises:
        UserError: If a mixer or an option is unknown, or a mixer stands there twice; or
            spiking and dense ones are named together.
    """
    from keymix.mixers.registry import get_mixer_class, list_mixers
    from keymix.mixers.spec import parse_mixers

    if mixers is None:
        from keymix.models.factory import domain_of

        domain = domain_of(model)
        names = [n for n in list_mixers(domain=domain) if _stands_alone(get_mixer_class(n).traits)]
        names.sort(key=lambda name: name != PREFERRED_BASELINES[domain])
        mixers = names
    refuse_two_kinds(mixers)
    text = mixers if isinstance(mixers, str) else ",".join(mixers)
    specs = parse_mixers(text)
    if controls and all(spec.label != CONTROL for spec in specs):
        specs += parse_mixers(CONTROL)
    if len(specs) < 2:
        raise UserError(f"only {specs[0].label!r} to compare. Name at least two mixers.")
    return specs


def _stands_alone(traits: Any) -> bool:
    return not traits.control and not traits.composed


def choose_baseline(specs: Sequence[MixerSpec], baseline: str | None) -> MixerSpec:
    """Return the mixer that the others are compared with.

    If none was asked for: softmax, or spiking self-attention, if it is there, else the first.

    Raises:
        UserError: If the one asked for is not among the mixers.
    """
    labels = [spec.label for spec in specs]
    if baseline is None:
        preferred = [name for name in PREFERRED_BASELINES.values() if name in labels]
        return specs[labels.index(preferred[0])] if preferred else specs[0]
    from keymix.mixers.spec import parse_mixer

    label = parse_mixer(baseline).label
    if label not in labels:
        raise unknown("baseline", baseline, labels)
    return specs[labels.index(label)]


Builder = Callable[["MixerSpec"], "nn.Module"]


def meta_builder(recipe: Recipe, data: ImageData) -> Builder:
    """Return a function that builds the recipe's model with a mixer on the meta device.

    The function raises a `UserError` that names the mixer where it does not fit the model.
    """

    def build(spec: MixerSpec) -> nn.Module:
        return _built(recipe, data, spec, "meta")

    return build


def _built(recipe: Recipe, data: ImageData, spec: MixerSpec, device: str) -> nn.Module:
    import torch

    from keymix.models.memory import refuse_beyond_memory
    from keymix.train.model import model_for

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


def _check_weights(path: Path, recipe: Recipe, data: ImageData, specs: Sequence[MixerSpec]) -> None:
    """Load the weights that all runs start from into each model once; each run tells what is new.

    Raises:
        UserError: If they do not fit one.
    """
    from keymix.train.model import start_from

    for spec in specs:
        model = _built(recipe, data, spec, "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KeymixWarning)
            start_from(model, path)


def fitting(
    specs: Sequence[MixerSpec], recipe: Recipe, data: ImageData
) -> tuple[list[MixerSpec], tuple[str, ...]]:
    """Keep the mixers that can sit in the recipe's model; warn of the others and say why.

    For mixers that nobody named: one that was named and cannot sit is an error.
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
        return list(specs), ()  # whose error make_plan tells
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
    imports: Sequence[str],
    out: Path,
    cannot_sit: tuple[str, ...] = (),
) -> Plan:
    """Check every model and settle what all of them share.

    Raises:
        UserError: If a model cannot be built or does not take the weights to start from, or the
            recipe's readout starves a mixer.
    """
    from keymix.models.match import matched, trainable
    from keymix.train.model import find_weights

    weights = find_weights(recipe.model)  # or refuse, before any model is built
    if match not in (None, "params"):
        raise unknown("match", str(match), ["params"])
    build = meta_builder(recipe, data)
    models = {spec.label: build(spec) for spec in specs}
    found = getattr(models[baseline.label], "global_pool", "")
    pooled = found is not None  # else every token is read out
    deaf = tuple(s.label for s in specs if pooled and not _mixes_prefix(s, models[s.label]))
    pooling = str(found or "token") if pooled else ""
    unheard: tuple[str, ...] = ()
    if deaf and pooling != "avg":
        if recipe.model.global_pool not in (None, "avg"):
            raise UserError(
                f"model.global_pool = {recipe.model.global_pool!r} reads out where "
                f"{', '.join(deaf)} brings nothing. Leave {deaf[0]} out (--no-controls) or set "
                "--model.global_pool avg."
            )
        recipe = replace(recipe, model=replace(recipe.model, global_pool="avg"))
        build = meta_builder(recipe, data)
        models = {spec.label: build(spec) for spec in specs}
        pooling, unheard = "avg", deaf
    target = trainable(models[baseline.label])
    entrants, all_chosen = [], []
    for spec in specs:
        note, chosen, params = "", spec, trainable(models[spec.label])
        if match == "params" and spec != baseline and not spec.control:
            match_ = matched(spec, target, build, models[spec.label], baseline)
            note, chosen, params = match_.note, match_.spec, match_.params
        elif match == "params" and spec != baseline:
            note = f"not matched: a control keeps its size, {params:,} parameters."
        all_chosen.append(chosen)
        entrants.append(
            Entrant(
                label=chosen.label,
                slug=chosen.slug,
                control=spec.control,
                mixes_prefix=spec.label not in deaf,
                params=params,
                note=note,
            )
        )
    if weights is not None:
        _check_weights(weights, recipe, data, all_chosen)
    return Plan(
        recipe=recipe,
        entrants=tuple(entrants),
        seeds=seeds,
        baseline=baseline.label,
        match=match,
        pooling=pooling,
        unheard=unheard,
        imports=tuple(str(Path(path).resolve()) for path in imports),
        out=out,
        cannot_sit=cannot_sit,
    )


def _mixes_prefix(spec: MixerSpec, model: nn.Module) -> bool:
    """Whether the class token of the built model hears of the image; options may decide it."""
    from keymix.hosts import find_mixers, hears_image

    return hears_image(model) if find_mixers(model) else spec.mixes_prefix
