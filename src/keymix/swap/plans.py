# SPDX-License-Identifier: Apache-2.0
"""What is to be put where, with which options, and the putting itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from keymix.analysis import capture
from keymix.analysis.capture import chosen_numbers
from keymix.arguments import accepted
from keymix.errors import UserError
from keymix.hosts.base import MixerOptions, Plan, known_of
from keymix.hosts.layers import Layer
from keymix.mixers.base import Site, TokenMixer
from keymix.mixers.head_mixer import HeadMixer
from keymix.mixers.map_mixer import MapMixer, scale_options
from keymix.mixers.registry import get_mixer_class
from keymix.mixers.spec import spec_of

PREFIX = "prefix queries"  # in `TokenMixer.learned_keys`


def learned_keys_of(
    cls: type[TokenMixer], site: Site, options: Mapping[str, Any]
) -> Mapping[str, tuple[str, ...]]:
    """Return what :meth:`TokenMixer.learned_keys` says of a mixer with options, and defaults."""
    defaults = {name: parameter.default for name, (parameter, _) in accepted(cls).items()}
    return cls.learned_keys(site, {**defaults, **options})


def plans_for(
    layers: Sequence[Layer], mixer: str | Sequence[str], mixer_options: MixerOptions
) -> list[Plan]:
    """Plan a mixer for each of some layers, with the options that its attention has now.

    Mixers and options that are unknown, or not as many as the layers, are refused.
    """
    spec = spec_of(mixer, mixer_options)
    names, options = list(spec.names), [dict(pairs) for pairs in spec.options]
    if len(names) == 1:
        names, options = names * len(layers), options * len(layers)
    if len(names) != len(layers):
        raise UserError(
            f"{len(names)} mixers were given; name one, or {len(layers)}, one a chosen layer"
        )
    return [
        Plan(path=layer.place.path, mixer=name, options=_options(layer, name, own))
        for layer, name, own in zip(layers, names, options, strict=True)
    ]


def _options(layer: Layer, name: str, own: dict[str, Any]) -> dict[str, Any]:
    mixer, site = layer.mixer, layer.place.site
    if mixer is None:
        shared = scale_options(scale_of(layer), head_width(layer), site.dim)
    else:
        built = mixer.built_with if mixer.mixer_name == name else {}
        given = {**built, **mixer.transfer_options()}
        shared = {name: value for name, value in given.items() if value is not None}
        if isinstance(mixer, HeadMixer) and mixer.num_heads != site.num_heads:
            shared["num_heads"] = mixer.num_heads
    if {"scale", "temperature"} & own.keys():
        shared = {k: v for k, v in shared.items() if k not in ("scale", "temperature")}
    if "num_heads" in own:  # of the width that there is, unless given
        shared = {k: v for k, v in shared.items() if k not in ("head_dim", "num_heads")}
    maps = issubclass(get_mixer_class(name), HeadMixer)
    heads = {k: v for k, v in shared.items() if k == "num_heads" and maps}
    return {**known_of(name, layer.place, shared), **heads, **own}


def scale_of(layer: Layer) -> float:
    """Return the factor of a layer's logits, 1 where it has none."""
    if layer.mixer is not None:
        if not isinstance(layer.mixer, MapMixer):
            return 1.0
        gain: float | Tensor = layer.mixer.gain()
        return float(gain)
    for name in ("scale", "scaling", "scale_factor"):  # timm's, Hugging Face's, torchvision's
        value = getattr(layer.module, name, None)
        if isinstance(value, float):
            return value
    return float(head_width(layer) ** -0.5)


def head_width(layer: Layer) -> int:
    """Return the width of a head of what sits at a layer."""
    if isinstance(layer.mixer, HeadMixer):
        return layer.mixer.head_dim
    site = layer.place.site
    return int(layer.place.defaults.get("head_dim") or site.dim // site.num_heads)


def refuse_shared(found: Sequence[Layer], chosen: Sequence[Layer]) -> None:
    """Refuse a chosen module that sits at two places: a mixer would sit at one of them alone."""
    first: dict[int, str] = {}
    repeated: dict[int, str] = {}
    for layer in found:
        where = repeated if id(layer.module) in first else first
        where[id(layer.module)] = layer.place.path
    for layer in chosen:
        if id(layer.module) in repeated:
            one, other = first[id(layer.module)], repeated[id(layer.module)]
            raise UserError(
                f"{one} and {other} are one module; give each place its own (copy.deepcopy), or "
                "leave both out (layers=)"
            )


Layers = capture.Layers | None


def choose(found: Sequence[Layer], layers: Layers) -> list[Layer]:
    """Return the layers meant of all, in the model's order; refuse what matches nothing.

    None means those that attend.
    """
    if not found:
        raise UserError("this model has no layer where a mixer could sit")
    if layers is None:
        attending = [layer for layer in found if layer.attends]
        if not attending:
            kind = type(found[0].module).__name__
            raise UserError(f"no layer of this model attends: name some, '*' for each {kind}")
        return attending
    names = [(layer.place.path, layer.path) for layer in found]
    return [found[i] for i in chosen_numbers(names, layers, "layers with attention")]
