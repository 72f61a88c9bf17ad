# SPDX-License-Identifier: Apache-2.0
"""A swapped model as a folder in the form of a run, which every verb that takes a run reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.capture import inference_mode_of
from keymix.data.record import DataRecord
from keymix.errors import UserError, one_line
from keymix.hosts.base import PLAN, Plan
from keymix.hosts.layers import Layer, find_layers
from keymix.mixers.registry import mixer_options
from keymix.mixers.spec import MixerSpec, parse_mixer
from keymix.models.factory import list_models, own_mixers
from keymix.models.family import family_of
from keymix.models.weights import load_weights
from keymix.train import files
from keymix.train.model import model_for
from keymix.train.recipe import ModelConfig, Recipe
from keymix.train.record import WeightsFacts

_NATIVE = {  # what sits in timm's MetaFormer where no attention does
    "SepConv": "sep_conv",
    "Pooling": "pooling",
    "RandomMixing": "random",
    "Identity": "identity",
}
_OF_MIXERS = ("mixer", "mixer_options", "last_mixer", "last_blocks")  # a mixer a block says all
_LEFT_BEHIND = ("class_heads", "class_head_dim")  # of a row, where another mixer is given
_NEAR = 1e-3  # of the largest logit: another order of sums in float32, no other function


def recipe_of(recipe: Recipe, model: nn.Module, *, name: str | None = None) -> Recipe:
    """Return the recipe that builds a swapped model: the original's with one mixer per block."""
    layers = find_layers(model)
    own = each_layer(own_spec(recipe.model, model), layers)
    named = [
        _named(recipe.model, layer, (name, dict(options)))
        for layer, name, options in zip(layers, own.names, own.options, strict=True)
    ]
    spec = MixerSpec(
        tuple(name for name, _ in named),
        tuple(tuple(sorted(options.items())) for _, options in named),
    )
    row = family_of(recipe.model.name)[1] if recipe.model.name in list_models() else {}
    options = {name: row[name] for name in _LEFT_BEHIND if name in row}
    options |= {k: v for k, v in recipe.model.options.items() if k not in _OF_MIXERS}
    config = replace(recipe.model, mixer=spec.label, weights=None, options=options)
    return replace(recipe, name=name or f"{recipe.name}_swapped", model=config)


def write(folder: Path, recipe: Recipe, model: nn.Module, data: DataRecord, images: Tensor) -> None:
    """Write a swapped model: ``recipe.json`` and ``weights_last.safetensors``.

    The recipe's model is built, gets the weights, and must give what the swapped model gives for
    some images ``[n, C, H, W]``.
    """
    with torch.random.fork_rng(devices=[]):
        rebuilt = model_for(recipe, data)
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if state.keys() == rebuilt.state_dict().keys():
        rebuilt.load_state_dict(state)
    else:  # of timm's names, where its own attention is a mixer in the rebuilt one
        loaded = load_weights(rebuilt, state, img_size=data.image_size)
        if loaded.missing or loaded.unused:
            left = (*loaded.missing, *loaded.unused)
            raise _indescribable(f"{one_line(left[0])} has no place in it")
    device = next(model.parameters()).device
    with inference_mode_of(model), inference_mode_of(rebuilt), torch.no_grad():
        there, here = model(images.to(device)).cpu(), rebuilt(images.cpu())
    if not torch.allclose(there, here, rtol=0, atol=_NEAR * float(there.abs().max())):
        raise _indescribable("the model that it describes gives other answers")
    files.make_folder(folder)
    facts = WeightsFacts(recipe=recipe, data=data)
    files.write_json(folder / files.RECIPE, recipe.to_dict())
    files.write_weights(folder / files.weights_file("last"), rebuilt.state_dict(), facts)


def _indescribable(why: str) -> UserError:
    return UserError(
        f"no recipe describes this swapped model: {why}. Swap in Python, and save it with "
        "keymix.swap.save_swapped"
    )


def own_spec(config: ModelConfig, model: nn.Module) -> MixerSpec:
    """Return the mixers that a model of a recipe has: one, or one per stage or layer."""
    spec = own_mixers(config.name, model) if config.mixer is None else parse_mixer(config.mixer)
    if spec is not None:
        return spec
    names = tuple(_native_name(layer) for layer in find_layers(model))
    return collapsed(MixerSpec(names, ((),) * len(names)))


def each_layer(spec: MixerSpec, layers: list[Layer]) -> MixerSpec:
    """Return the mixers that a spec means, one for each layer of a model."""
    if len(spec.names) == len(layers):
        return spec
    stages = [layer.place.stage if len(spec.names) > 1 else 0 for layer in layers]
    return MixerSpec(tuple(spec.names[i] for i in stages), tuple(spec.options[i] for i in stages))


def collapsed(spec: MixerSpec) -> MixerSpec:
    """Name one mixer that stands everywhere once."""
    same = len({*zip(spec.names, map(str, spec.options), strict=True)}) == 1
    return MixerSpec(spec.names[:1], spec.options[:1]) if same else spec


def _native_name(layer: Layer) -> str:
    return _NATIVE.get(type(layer.module).__name__, "softmax") if layer.mixer is None else ""


def _named(
    config: ModelConfig, layer: Layer, own: tuple[str, dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Name and options of what sits at a layer now, without options that come of themselves."""
    plan = getattr(layer.mixer, PLAN, None)
    if not isinstance(plan, Plan):
        return own
    family = family_of(config.name)[1] if config.name in list_models() else {}
    shared = family.get("mixer_defaults") or {}
    known, place = mixer_options(plan.mixer), layer.place
    forms = {**place.defaults, **place.forms.get(plan.mixer, {})}

    def comes(name: str, value: Any) -> bool:
        if name in shared or name not in known:
            return False
        return bool(forms.get(name, known[name].default) == value)

    return plan.mixer, {k: v for k, v in plan.options.items() if not comes(k, v)}
