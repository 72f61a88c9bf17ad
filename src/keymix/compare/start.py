# SPDX-License-Identifier: Apache-2.0
"""Start all runs of a comparison from one trained model, with each mixer swapped into it.

``start/<mixer>.safetensors`` in the comparison's folder has the weights that a mixer's runs start
from, as ``model.weights`` of their recipes: those of the trained model with the mixer in place of
its attention, learned keys estimated on training images. The baseline is the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keymix.compare.folder import START
from keymix.compare.question import Plan, PlannedMixer, Question
from keymix.data.dataset import ImageData
from keymix.data.kinds import IMAGE
from keymix.errors import UserError
from keymix.hosts.layers import find_layers
from keymix.mixers.registry import get_mixer_class
from keymix.mixers.spec import MixerSpec, parse_mixer
from keymix.models.factory import create_model
from keymix.models.image_size import set_image_size
from keymix.models.swapped import is_swapped
from keymix.models.weights import classifier_of, load_weights
from keymix.report.record import Start
from keymix.swap.as_run import collapsed, each_layer, own_spec, recipe_of
from keymix.swap.images import MIN_IMAGES
from keymix.swap.plans import choose
from keymix.swap.run import swap
from keymix.train import files
from keymix.train.evaluation import eval_loader, of_other_data, score_split
from keymix.train.exported import Shipped
from keymix.train.model import digest_of, find_weights, model_for, start_from
from keymix.train.predict import load
from keymix.train.recipe import ModelConfig, Recipe, replace_path
from keymix.train.record import WeightsFacts

IMAGES = 256
"""Training images that keys are estimated on, at most."""
FINE_TUNING: Mapping[str, Any] = {
    "optim.lr": 3e-4,
    "optim.layer_decay": 0.75,
    "schedule.name": "cosine",
    "schedule.epochs": 10,
    "schedule.warmup_epochs": 1.0,
    "schedule.min_lr": 0.0,
    "schedule.cooldown_epochs": 0,
}
"""What is changed in a recipe where a trained model is trained on."""


def is_file(start: str) -> bool:
    """Whether a trained model is named by a file of weights alone, so that the model is asked."""
    path = Path(start).expanduser()
    return path.is_file() and not is_swapped(path)


def fine_tuning(question: Question, default: Callable[[str], Recipe]) -> Recipe:
    """Return the recipe that trains the model on: a run's own, else the `default` for the data."""
    start, spec = str(question.start), question.data
    trained = None if is_file(start) else load(start)
    if trained is not None and not isinstance(trained.source, Shipped):
        recipe = trained.recipe
        if spec not in (None, recipe.data.spec):
            recipe = replace(recipe, data=of_other_data(recipe.data, str(spec)))
        loss = replace(recipe.loss, distill=0.0, distill_teacher=None, distill_temperature=2.0)
        recipe = replace(recipe, loss=loss)
    elif spec is None:
        raise UserError(f"--from {start!r} brings no images: name them with --data")
    else:
        recipe = default(spec)
    recipe = with_model(replace(recipe, name=f"{recipe.name}_fine_tuned"), question)
    return replace_path(recipe, FINE_TUNING)


def with_model(recipe: Recipe, question: Question) -> Recipe:
    """Return a recipe with the trained model, at the size of the images that it has seen."""
    start, name = str(question.start), question.model
    if is_file(start):
        if name is None:
            raise UserError(f"--from {start!r} is a file of weights: name their model with --model")
        return replace(recipe, model=ModelConfig(name=name, weights=start))
    if name is not None:
        raise UserError(f"--model {name!r}: --from {start!r} says itself which model it is")
    trained = load(start)
    model = replace(trained.model_config, weights=start)
    changes: dict[str, Any] = {"data.image_size": trained.image_size}
    if trained.data.kind is IMAGE and trained.data.in_chans in (1, 3):
        changes["data.channels"] = trained.data.in_chans
    return replace_path(replace(recipe, model=model), changes)


def seated(
    question: Question, recipe: Recipe, specs: Sequence[MixerSpec]
) -> tuple[Question, list[MixerSpec]]:
    """Let mixers stand where the trained model attends; its own joins them, as the baseline."""
    if question.start is None:
        return question, [*specs]
    config, model = _trained(recipe)
    layers, own = find_layers(model), own_spec(config, model)
    there, here = own, [not get_mixer_class(name).traits.control for name in own.names]
    if question.layers is not None:
        chosen = choose(layers, question.layers)
        there, here = each_layer(own, layers), [layer in chosen for layer in layers]
    found = [_seat(spec, there, here) for spec in specs]
    every = each_layer(own, layers)
    own = next((spec for spec in found if each_layer(spec, layers) == every), own)
    found = found if own in found else [own, *found]
    return replace(question, baseline=question.baseline or own.label), found


def _trained(recipe: Recipe) -> tuple[ModelConfig, nn.Module]:
    """Return the trained model of a recipe; without its weights where a file has these alone."""
    start = str(recipe.model.weights)
    if not is_file(start):
        trained = load(start)
        return trained.model_config, trained.model
    with torch.device("meta"):
        model = create_model(recipe.model.name, **recipe.model.options)
    return replace(recipe.model, mixer=None), model


def _seat(spec: MixerSpec, there: MixerSpec, here: Sequence[bool]) -> MixerSpec:
    """Put one mixer where it is wanted, next to what the model has elsewhere."""
    if len(spec.names) > 1 or all(here):
        return spec
    own, wanted = zip(there.names, there.options, strict=True), (spec.names[0], spec.options[0])
    each = [wanted if yes else one for one, yes in zip(own, here, strict=True)]
    made = MixerSpec(tuple(name for name, _ in each), tuple(options for _, options in each))
    return collapsed(made)


def started(plan: Plan, data: ImageData, *, say: Callable[[str], None]) -> Plan:
    """Write the weights that each mixer's runs start from, if they are not there, into the plan.

    A trained model that has changed since is refused, and a mixer that cannot start from it.
    """
    origin = _Origin(plan, data)
    if plan.start is not None and plan.start.sha256 != origin.sha256:
        raise UserError(
            f"--from {origin.name!r} is another model than the comparison began with: restore it, "
            "or name another folder with --out"
        )
    mixers, scores = [], {}
    for mixer in plan.mixers:
        path = plan.out / START / f"{mixer.slug}.safetensors"
        if not path.exists():
            say(f"putting {mixer.label} into {origin.name}")
            origin.write(path, mixer)
        facts = files.read_weights(path)[1]
        built = facts.recipe.model.mixer or ""
        mixers.append(replace(mixer, weights=str(path), built=built))
        if facts.val is not None:
            scores[mixer.label] = facts.val
    start = Start(
        name=origin.name,
        sha256=origin.sha256,
        images=len(origin.images),
        same_classes=origin.same_classes,
        scores=scores,
    )
    return replace(plan, mixers=tuple(mixers), start=start)


class _Origin:
    """The trained model, at the size of a comparison's images, and images to estimate keys on."""

    def __init__(self, plan: Plan, data: ImageData) -> None:
        self.plan, self.data, self.name = plan, data, str(plan.question.start)
        self.config = replace(plan.recipe.model, weights=None)
        self.same_classes = True
        if is_file(self.name):
            recipe = replace(plan.recipe, model=replace(self.config, weights=self.name))
            self.model, path = model_for(recipe, data.record()), find_weights(recipe.model)
            assert path is not None
            start_from(self.model, path)
        else:
            trained = load(self.name)
            self.model, self.config = trained.model.cpu(), trained.model_config
            self.same_classes = trained.data.classes == data.classes
            if trained.data.image_size != data.image_size:
                set_image_size(self.model, data.image_size)
        self.model.eval()
        self.sha256 = digest_of(self.model)

    @cached_property
    def images(self) -> Sequence[Tensor]:
        """Training images as evaluation shows them; none where a model takes no batch of images."""
        if self.data.kind.axes != IMAGE.axes or self.data.task.whole_images:
            return ()
        if self.data.train.listed:  # which are of several sizes: their centres
            return self.data.some(self.data.train, IMAGES)
        batches = eval_loader(self.plan.recipe, self.data, "train")
        found: list[Tensor] = []
        for batch in batches:
            found += [*batch.images.cpu()]
            if len(found) >= IMAGES:
                break
        return found[:IMAGES]

    def write(self, path: Path, mixer: PlannedMixer) -> None:
        """Put a mixer into a copy of the model, and write what its runs start from."""
        model, layers = deepcopy(self.model), find_layers(self.model)
        own = each_layer(own_spec(self.config, model), layers)
        wanted = each_layer(parse_mixer(mixer.label), layers)
        there, here = ([*zip(each.names, each.options, strict=True)] for each in (own, wanted))
        changed = [number for number, pair in enumerate(here) if pair != there[number]]
        if changed:
            swap(
                model,
                [wanted.names[number] for number in changed],
                changed,
                mixer_options=[dict(wanted.options[number]) for number in changed],
                calibration=torch.stack([*self.images]) if len(self.images) >= MIN_IMAGES else None,
                drift=False,
            )
        recipe = self.plan.recipe_for(mixer, 0)
        built = recipe_of(replace(recipe, model=self.config), model).model.mixer
        recipe = replace(recipe, model=replace(recipe.model, mixer=built, weights=None))
        target = model_for(recipe, self.data.record())
        loaded = load_weights(target, model.state_dict(), img_size=self.data.image_size)
        state, head = target.state_dict(), classifier_of(target)
        lost = [name for name in loaded.missing if not name.startswith(head)]
        if lost:
            raise UserError(
                f"{mixer.label} cannot start from {self.name!r}: that has no {lost[0]}; leave the "
                "mixer out"
            )
        if not self.same_classes:
            state = {name: each for name, each in state.items() if not name.startswith(head)}
        found = score_split(recipe, target, self.data, "val").scores if self.same_classes else None
        facts = WeightsFacts(recipe=recipe, data=self.data.record(), val=found)
        files.make_folder(path.parent)
        files.write_weights(path, state, facts)
