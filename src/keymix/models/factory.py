# SPDX-License-Identifier: Apache-2.0
"""Models by name: keymix's own and, through the hosts, any that an adapter knows."""

from __future__ import annotations

import fnmatch
import sys
from typing import Any

import timm
from timm.models import list_models as timm_list_models
from timm.models import model_entrypoint
from torch import nn

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions, put_mixers


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
        options: The family's further arguments, as timm takes them.

    Example:
        >>> model = create_model("vit_small_p4_32", mixer="ska", num_classes=10)

    Raises:
        UserError: If the name or an argument is unknown, or a mixer cannot sit in the model.
    """
    own = list_models()
    given = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size, **options}
    given = {key: value for key, value in given.items() if value is not None}
    try:
        if name in own:
            if mixer is not None:
                # a mixer named here brings its own options, not those of the name's mixer
                given |= {"mixer": mixer, "mixer_options": mixer_options}
            elif mixer_options is not None:
                given["mixer_options"] = mixer_options
            model: nn.Module = model_entrypoint(name)(**given)
            return model
        if not timm.is_model(name):
            raise unknown("model", name, [*own, *timm_list_models()])
        model = timm.create_model(name, **given)
    except (TypeError, AssertionError) as error:
        raise UserError(f"model {name!r}: {error}") from error
    if mixer is not None:
        put_mixers(model, mixer, mixer_options)
    elif mixer_options:
        raise UserError(f"mixer_options were given for {name!r}, but no mixer")
    return model
