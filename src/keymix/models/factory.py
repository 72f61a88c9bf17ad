# SPDX-License-Identifier: Apache-2.0
"""Models by name: keymix's own and, through the hosts, any that an adapter knows."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm.layers import to_2tuple
from timm.models import list_models as timm_list_models
from timm.models import model_entrypoint
from torch import nn

from keymix.arguments import checked, whole_size
from keymix.errors import KeymixWarning, UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions, find_mixers, put_mixers
from keymix.mixers.base import probability
from keymix.mixers.registry import get_mixer_class
from keymix.mixers.spec import MixerSpec, spec_of
from keymix.models.arguments import arguments_of, check_most, check_value
from keymix.models.family import check_patches, family_names, family_of
from keymix.models.match import matched, trainable
from keymix.models.memory import check_weights_fit, ran_out
from keymix.models.pretrained import fetching
from keymix.task import DEFAULT

_UNFIT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What constructors raise over values that they cannot take."""
_LARGE = 4_096
"""Above this number in a mixer's options, its model is first built without memory."""
_OF_THE_DATA = ("num_classes", "in_chans", "img_size")
_OF_WEIGHTS = ("pretrained", "checkpoint_path")
"""Models that are built for their shapes alone are built without these."""


@checked
def list_models(pattern: str = "*") -> list[str]:
    """List keymix's own models.

    Args:
        pattern: Shell-style pattern, e.g. ``"*ska*"``.
    """
    import keymix.models  # noqa: F401 # registers them

    return sorted(fnmatch.filter(family_names(), pattern))


@checked
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
        mixer: One name, or one per stage, or one per block; None for what the name says.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        num_classes: Classes of the head.
        in_chans: Channels of the image.
        img_size: Side, or height and width, in pixels.
        match: ``"params"`` widens the mixer until the model has about the parameters that it has
            with its own mixer; see :func:`keymix.models.match.matched` for how.
        options: The family's further arguments, as timm takes them.

    Example:
        >>> model = create_model("vit_small_p4_32", mixer="ska", num_classes=10)

    Raises:
        UserError: If the name or an argument is unknown, a mixer cannot sit in the model, memory
            does not hold it, or ``pretrained=True`` and the weights cannot be fetched or read.
    """
    given = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size, **options}
    given = {key: value for key, value in given.items() if value is not None}
    _check(given)
    bare = {key: value for key, value in given.items() if key not in _OF_WEIGHTS}
    if match is not None:
        spec = _matched(name, mixer, mixer_options, bare)
        mixer, mixer_options = list(spec.names), [dict(pairs) for pairs in spec.options]
    large = {key: value for key, value in given.items() if check_most(key, value)}
    if _holds_large(mixer_options):
        large["mixer_options"] = mixer_options
    if large:
        label = f"model {name!r} with {_arguments_text(large)}"
        check_weights_fit(label, lambda: _create(name, mixer, mixer_options, bare))
    return _create(name, mixer, mixer_options, given)


def _check(given: dict[str, Any]) -> None:
    """Refuse values out of range before a constructor stumbles over them."""
    if "img_size" in given:
        whole_size("img_size", given["img_size"])
    for name, value in given.items():
        check_most(name, value)
        if name in ("num_classes", "in_chans"):
            check_value(name, value, int)
        if name.endswith("_rate"):
            probability(name, value)


def _holds_large(options: object) -> bool:
    """Whether options of mixers have a number for which memory may not suffice."""
    if isinstance(options, Mapping):
        return any(map(_holds_large, options.values()))
    if isinstance(options, list | tuple):
        return any(map(_holds_large, options))
    return isinstance(options, int | float) and options > _LARGE


def _matched(
    name: str, mixer: MixerNames | None, options: MixerOptions, given: dict[str, Any]
) -> MixerSpec:
    """The mixers as given, wide enough for the parameters that the model has with its own."""
    if mixer is None:
        raise UserError("match='params' widens another mixer than the model's own; give mixer=…")

    def build(spec: MixerSpec) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return _create(name, list(spec.names), [dict(pairs) for pairs in spec.options], given)

    spec = spec_of(mixer, options)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        own = _create(name, None, None, given)
    found = matched(spec, trainable(own), build, build(spec), own_mixers(name, own))
    if found.spec == spec and found.params != trainable(own):
        text = f"match='params' leaves mixer {spec.label!r} as it is: {found.note}"
        warnings.warn(text, KeymixWarning, stacklevel=3)
    return found.spec


def own_mixers(name: str, model: nn.Module) -> MixerSpec | None:
    """Return the mixers that a model of ours has of its own; None for timm's, with attention.

    The model has its own mixers, or some of them swapped for others.
    """
    if name not in list_models():
        return None
    given = _own_names(name)
    if given is None:  # a backbone of timm's is in it, or no attention
        return None
    own = spec_of(given, family_of(name)[1].get("mixer_options"))
    blocks = tuple(mixer.mixer_name for mixer in find_mixers(model).values())
    if len(own.names) == 1 and len(set(blocks)) > 1:  # a variant's last blocks have another
        return MixerSpec(blocks, own.options * len(blocks))
    return own


def _own_names(name: str) -> MixerNames | None:
    """Name the mixers that a model of ours is built with; None if it has no attention of ours."""
    build, row = family_of(name)
    default, _ = arguments_of(build).get("mixer", (None, None))
    names: MixerNames | None = row.get("mixer", default)
    return names


def domain_of(name: str) -> Literal["dense", "spiking"]:
    """Say what a model's tokens are, by the mixers that it has of its own; timm's are dense."""
    if name not in list_models():
        return "dense"
    given = _own_names(name)
    names = () if given is None else spec_of(given).names
    domains = {get_mixer_class(each).traits.domain for each in names}
    return "spiking" if "spiking" in domains else "dense"


def task_of_model(name: str) -> str:
    """Return the name of the task that a model says it is for; `keymix.task.DEFAULT` if it is mute.

    What builds a model says it: the attribute ``task`` of the class of keymix's own, or of the
    function that ``timm.models.register_model`` registered.

    Args:
        name: Of the model, or any other text.
    """
    if name in list_models():
        return str(getattr(family_of(name)[0], "task", DEFAULT))
    if timm.is_model(name):
        return str(getattr(model_entrypoint(name), "task", DEFAULT))
    return DEFAULT


def check_model(name: str) -> None:
    """Refuse a model that there is not, before any work, with the nearest names."""
    own = list_models()
    if name not in own and not timm.is_model(name):
        raise unknown("model", name, [*own, *timm_list_models()])


def takes_images_alone(name: str) -> bool:
    """Whether a model is one of keymix's that has no time steps, so takes no frames."""
    return name in list_models() and "time_steps" not in arguments_of(family_of(name)[0])


def _create(
    name: str, mixer: MixerNames | None, mixer_options: MixerOptions, given: dict[str, Any]
) -> nn.Module:
    own = list_models()
    fetched = fetching(name, given) if given.get("pretrained") else nullcontext()
    try:
        if name in own:
            chosen: dict[str, Any] = {}
            if mixer is not None:
                # a mixer named here brings its own options, not those of the name's mixer
                chosen = {"mixer": mixer, "mixer_options": mixer_options}
            elif mixer_options is not None:
                chosen = {"mixer_options": mixer_options}
            with fetched:
                model: nn.Module = timm.create_model(name, **given, **chosen)
            return model
        check_model(name)
        with fetched:
            model = build_timms(name, given)
        if mixer is not None:
            if "img_size" in given:
                check_patches(model)
            put_mixers(model, mixer, mixer_options)
        elif mixer_options:
            raise UserError(f"mixer_options were given for {name!r}, but no mixer")
    except (UserError, torch.OutOfMemoryError):
        raise
    except _UNFIT as error:
        if given and ran_out(error):
            label = f"model {name!r} with {_arguments_text(given)} does not fit into memory"
            raise UserError(f"{label}: make it smaller") from error
        odd = re.search(r"unexpected keyword argument(?:\(s\): \[)? ?'(\w+)'", str(error))
        if odd is not None and name in own and odd[1] in given:
            known = arguments_of(family_of(name)[0])
            kind = f"argument of model {name!r}:"
            raise unknown(kind, odd[1], known, listed=False) from error
        values = given | ({"mixer_options": mixer_options} if mixer_options else {})
        if not values:
            raise  # it is not for a value of the user's
        raise UserError(_unfit(name, values, error)) from error
    return model


def _unfit(name: str, values: dict[str, Any], error: Exception) -> str:
    """Say which arguments a model cannot be built with, and why."""
    free = {key: value for key, value in values.items() if key not in _OF_THE_DATA}
    why = " ".join(str(error).split())
    if not why or not isinstance(error, AssertionError | TypeError | ValueError):
        why = f"{type(error).__name__}: {why}".removesuffix(": ")
    return f"model {name!r} cannot be built with {_arguments_text(free or values)}: {why}"


def _arguments_text(values: dict[str, Any]) -> str:
    """Write arguments as in a call."""
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def build_timms(name: str, given: dict[str, Any]) -> nn.Module:
    """Build a timm model; one that takes images of any size is only given theirs.

    A host reads there how large the grid will be.
    """
    checkpoint = given.get("checkpoint_path")
    if checkpoint and not Path(checkpoint).is_file():
        raise UserError(f"checkpoint_path={str(checkpoint)!r}: no such file")
    try:
        model: nn.Module = timm.create_model(name, **given)
    except TypeError as error:
        if "img_size" not in given or "img_size" not in str(error):
            raise
        height, width = to_2tuple(given["img_size"])
        size: dict[str, Any] = {"input_size": (given.get("in_chans", 3), height, width)}
        published = timm.models.get_pretrained_cfg(name)
        if published is None or published.input_size[1:] != (height, width):
            size["pool_size"] = None  # what is published is that of the other size
        rest = {key: value for key, value in given.items() if key != "img_size"}
        overlay = {**rest.pop("pretrained_cfg_overlay", {}), **size}
        model = timm.create_model(name, pretrained_cfg_overlay=overlay, **rest)
    return model
