# SPDX-License-Identifier: Apache-2.0
"""What timm rebuilds a model with mixers by; ``keymix_hosted`` builds timm's own with them.

timm rebuilds a model by the name of its architecture and its arguments. keymix's own models take
mixers as arguments. timm's do not, so the architecture ``keymix_hosted`` takes the name of one and
what was put where. The arguments may come from a stranger's folder: they name mixers and places,
which the registry and the host know, and no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import timm
from timm.models import build_model_with_cfg, register_model
from timm.models._features import FeatureGetterNet
from timm.models._input import update_model_args
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import Plan, find_host, find_mixers, install
from keymix.mixers.head_mixer import HeadMixer
from keymix.models.arguments import refuse_weights
from keymix.models.factory import build_timms
from keymix.models.family import MixerModel
from keymix.records import from_json

HOSTED = "keymix_hosted"
_LAST = 3  # maps of a plain ViT, as timm's entry points give them


def mixer_plans(model: nn.Module) -> list[Plan]:
    """Return the mixers at a model's places with all that they are built with, in order."""
    mixers, found = find_mixers(model), []
    for place in find_host(model).places(model) if mixers else ():
        mixer = mixers.get(f"{place.path}.mixer")
        if mixer is not None:
            heads = {"num_heads": mixer.num_heads} if isinstance(mixer, HeadMixer) else {}
            options = {**mixer.built_with, **heads}
            found.append(Plan(path=place.path, mixer=mixer.mixer_name, options=options))
    return found


def record_mixers(model: MixerModel) -> None:
    """Let timm know the mixers of a model of ours, if there is one at each of its places."""
    plans = mixer_plans(model)
    if len(plans) == len(find_host(model).places(model)):
        options = [plan.options for plan in plans]
        update_model_args(model, mixer=[plan.mixer for plan in plans], mixer_options=options)


def rebuilt_by(model: Any) -> tuple[str, dict[str, Any]]:
    """Return the architecture that timm rebuilds a model by, and its arguments but for timm's."""
    cfg, known = getattr(model, "pretrained_cfg", None), getattr(model, "_model_args", None)
    if not cfg or known is None:
        raise UserError(
            f"{type(model).__name__} does not say how it is rebuilt: build it with "
            "keymix.create_model or timm.create_model"
        )
    name = str(cfg["architecture"])
    if isinstance(model, MixerModel) or not find_mixers(model):
        return name, {}
    swaps = [asdict(plan) for plan in mixer_plans(model)]
    made: dict[str, Any] = {"base": known.get("base", name), "swaps": swaps}
    if not model._traits.get("img_size"):  # it takes none, and its mixers do
        made["img_size"] = list(cfg["input_size"][1:])
    return HOSTED, made


class _Maps(FeatureGetterNet):
    """Gives the maps of all stages, or of the last blocks of a model without stages."""

    def __init__(self, model: Any, out_indices: Any = None, **more: Any) -> None:
        if out_indices is None:
            staged = len({info["reduction"] for info in model.feature_info}) > 1
            out_indices = len(model.feature_info) if staged else _LAST
        super().__init__(model, out_indices, **more)


def _build(base: str = "", swaps: Sequence[Mapping[str, Any]] = (), **given: Any) -> nn.Module:
    """Build a model of timm's and put mixers into it."""
    if not isinstance(base, str) or base == HOSTED or not timm.is_model(base):
        raise UserError(f"base={base!r} of {HOSTED} must be the name of a model of timm's")
    if not isinstance(swaps, list | tuple) or not swaps:
        raise UserError(f"swaps={swaps!r} of {HOSTED} must be a list of mixers and places")
    plans = [from_json(Plan, each, where=f"swaps of {HOSTED}") for each in swaps]
    refuse_weights(given)
    model = build_timms(base, given)
    install(model, plans)
    return model


def keymix_hosted(pretrained: bool = False, **given: Any) -> nn.Module:
    """Build a model of timm's with mixers: ``base`` is its name, ``swaps`` say what sits where."""
    maps = {"feature_cls": _Maps, "out_indices": None}
    model: nn.Module = build_model_with_cfg(_build, HOSTED, pretrained, feature_cfg=maps, **given)
    return model


register_model(keymix_hosted)
