# SPDX-License-Identifier: Apache-2.0
"""Models by name: keymix's own and, through the hosts, any that an adapter knows."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

import timm
import torch
from timm.layers import to_2tuple
from timm.models import list_models as timm_list_models
from timm.models import model_entrypoint
from torch import nn

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions, put_mixers
from keymix.layers.patches import whole_size
from keymix.mixers.base import probability
from keymix.mixers.spec import MixerSpec, spec_of
from keymix.models.family import arguments_of
from keymix.models.input_size import check_patches
from keymix.models.match import matched, trainable


def list_models(pattern: str = "*") -> list[str]:
    """List keymix's own models.

    Args:
        pattern: Shell-style pattern, e.g. ``"*ska*"``.
    """
    import keymix.models  # registers them

    room = keymix.models.__name__
    names = {
        name
        for module_name, module in sys.modules.items()
        if module_name.startswith(f"{room}.") and hasattr(module, "VARIANTS")
        for name in module.VARIANTS
    }
    return sorted(name for name in names if fnmatch.fnmatch(name, pattern))


def create_model(
    name: str,
    *,
    mixer: MixerNames | None = None,
    mixer_options: MixerOptions = None,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    match: Literal["params"] | None = None,
    **options: Any,
) -> nn.Module:
    """Build a model, with another mixer than its own if asked.

    Args:
        name: A keymix model, or any timm model; with ``mixer`` one whose family has an adapter.
        mixer: One name, or one a stage, or one a block; None for what the name says.
        mixer_options: One dict for all, one a mixer name, or a list as long as ``mixer``.
        num_classes: Classes of the head.
        in_chans: Channels of the image.
        img_size: Side, or height and width, in pixels.
        match: ``"params"`` widens the mixer until the model has about the parameters that it has
            with its own mixer; see :func:`keymix.models.match.matched` for how.
        options: The family's further arguments, as timm takes them.

    Example:
        >>> model = create_model("vit_small_p4_32", mixer="ska", num_classes=10)

    Raises:
        UserError: If the name or an argument is unknown, or a mixer cannot sit in the model.
    """
    given = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size, **options}
    given = {key: value for key, value in given.items() if value is not None}
    _check(mixer, given)
    if match is not None:
        spec = _matched(name, match, mixer, mixer_options, given)
        mixer, mixer_options = list(spec.names), [dict(pairs) for pairs in spec.options]
    return _create(name, mixer, mixer_options, given)


def _check(mixer: object, given: dict[str, Any]) -> None:
    """Refuse values of a wrong kind before a constructor stumbles over them."""
    several = isinstance(mixer, Sequence) and all(isinstance(name, str) for name in mixer)
    if mixer is not None and not several:
        raise UserError(f"{mixer=} must be the name of a mixer, or a list of names")
    if "img_size" in given:
        whole_size("img_size", given["img_size"])
    for name, value in given.items():
        if name.endswith("_rate"):
            probability(name, value)


def _matched(
    name: str, match: str, mixer: MixerNames | None, options: MixerOptions, given: dict[str, Any]
) -> MixerSpec:
    """The mixers as given, wide enough for the parameters that the model has with its own."""
    if match != "params":
        raise unknown("match", match, ["params"])
    if mixer is None:
        raise UserError("match='params' widens another mixer than the model's own; give mixer=…")

    def build(spec: MixerSpec) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return _create(name, list(spec.names), [dict(pairs) for pairs in spec.options], given)

    spec = spec_of(mixer, options)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        target = trainable(_create(name, None, None, given))
    return matched(spec, target, build, build(spec)).spec


def _create(
    name: str, mixer: MixerNames | None, mixer_options: MixerOptions, given: dict[str, Any]
) -> nn.Module:
    own = list_models()
    try:
        if name in own:
            if mixer is not None:
                # a mixer named here brings its own options, not those of the name's mixer
                given = given | {"mixer": mixer, "mixer_options": mixer_options}
            elif mixer_options is not None:
                given = given | {"mixer_options": mixer_options}
            model: nn.Module = model_entrypoint(name)(**given)
            return model
        if not timm.is_model(name):
            raise unknown("model", name, [*own, *timm_list_models()])
        model = _timms(name, given)
    except (TypeError, AssertionError) as error:
        odd = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if odd is not None and name in own:
            raise unknown(f"argument of model {name!r}:", odd[1], arguments_of(name)) from error
        raise UserError(f"model {name!r}: {error}") from error
    if mixer is not None:
        if "img_size" in given:
            check_patches(model)
        put_mixers(model, mixer, mixer_options)
    elif mixer_options:
        raise UserError(f"mixer_options were given for {name!r}, but no mixer")
    return model


def _timms(name: str, given: dict[str, Any]) -> nn.Module:
    """Build a timm model; one that takes images of any size is only told theirs.

    A host reads there how large the grid will be.
    """
    try:
        model: nn.Module = timm.create_model(name, **given)
    except TypeError as error:
        if "img_size" not in given or "img_size" not in str(error):
            raise
        height, width = to_2tuple(given["img_size"])
        size = {"input_size": (given.get("in_chans", 3), height, width)}
        rest = {key: value for key, value in given.items() if key != "img_size"}
        overlay = {**rest.pop("pretrained_cfg_overlay", {}), **size}
        model = timm.create_model(name, pretrained_cfg_overlay=overlay, **rest)
    return model
