# SPDX-License-Identifier: Apache-2.0
"""What tests need to try any registered mixer: sites, weights, and other values of its options."""

from __future__ import annotations

import types
import typing
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.neurons import Neurons
from keymix.mixers.base import Site, TokenMixer
from keymix.mixers.registry import create_mixer, list_mixers, mixer_options, option_hints

DIM, HEADS, GRID = 12, 3, (2, 3)
STEPS = 3  # of spiking mixers

# what moves the norms in front of spiking neurons to where enough of them fire
FIRING = {"q_bn.bias": 1.0, "k_bn.bias": 1.8, "v_bn.bias": 1.8, "proj_bn.bias": 1.6}

# other values of options that hold numbers; an option whose annotation lists its values (Literal,
# bool) needs no entry. A new option with a number gets a line here.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "head_dim": (5,),
    "attn_drop": (0.5,),
    "temperature": (True, 0.5),
    "proj_drop": (0.5,),
    "key_init_std": (0.3,),
    "kernel_size": (1, 5),
    "pool_size": (1, 5),
    "expansion": (2.0,),
    "pos_dim": (3, 6),
    "attn_threshold": (1.0,),
    "scale": (0.25,),  # of spiking_self; the others list theirs
}

# options that act only beside another
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("key_value", "resize"): {"pos_dim": 6},  # without a code, any number of tokens is served
}

# options that choose a way of computing and leave the result as it is, apart from "backend"
SAME_RESULT = {("spiking_self", "order")}


def _values(hint: Any) -> list[Any] | None:
    """All values an annotation lists, or None if it lists none."""
    if hint is bool:
        return [True, False]
    if hint is types.NoneType:
        return [None]
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_values(part) for part in typing.get_args(hint)]
        return None if None in parts else [v for part in parts for v in part or []]
    return None


def hints(name: str) -> dict[str, Any]:
    """Annotations of a mixer's options."""
    return option_hints(name)


def alternatives(name: str, option: str) -> list[Any]:
    """Values of an option other than its default.

    Fails the test if it cannot tell any: then a line in ``NUMBERS`` is missing.
    """
    default = mixer_options(name)[option].default
    listed = _values(hints(name)[option])
    values = list(NUMBERS.get(option, ())) if listed is None else listed
    others = [v for v in values if v is not default and v != default]
    if not others:
        pytest.fail(
            f"option {option!r} of mixer {name!r} is annotated {hints(name)[option]}, which lists "
            "no values: give it a Literal annotation, or other numbers in tests/mixer_cases.py"
        )
    return others


def option_cases(*, backend: bool = True) -> list[Any]:
    """Every mixer with every option at every other value, one at a time, as pytest parameters."""
    cases = []
    for name in list_mixers():
        for option in mixer_options(name):
            if option == "backend" and not backend:
                continue
            try:
                values = alternatives(name, option)
            except pytest.fail.Exception:
                values = ["?"]  # the test itself asks again and fails with the reason
            cases += [pytest.param(name, option, v, id=f"{name}-{option}={v}") for v in values]
    return cases


def mixer_cases() -> list[Any]:
    """Every mixer with its defaults, and with every other option value: name and options."""
    plain = [pytest.param(name, {}, id=name) for name in list_mixers()]
    varied = [
        pytest.param(*(c.values[0], {c.values[1]: c.values[2]}), id=c.id)
        for c in option_cases(backend=False)
        if c.values[2] != "?"
    ]
    return plain + varied


def stir(module: nn.Module) -> None:
    """Move every parameter away from its neutral start, the same way for the same name.

    The norms in front of spiking neurons are moved to where about every third fires.
    """
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.add_(0.3 * torch.randn(p.shape, generator=noise, dtype=torch.float64).to(p))
        for name, b in module.named_buffers():
            if name.endswith("running_mean"):
                b.add_(0.1)
            elif name.endswith("running_var"):
                b.mul_(0.5)
        for name, p in module.named_parameters():
            p.add_(FIRING.get(name, 0.0))


def make(
    name: str,
    options: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    stirred: bool = True,
    seed: int = 0,
    site_neuron: Neurons | None = None,
    **site: Any,
) -> TokenMixer:
    """Build a small mixer in float64, with weights away from their start."""
    torch.manual_seed(seed)
    where = {"dim": DIM, "num_heads": HEADS, "grid": GRID, **site}
    mixer = create_mixer(name, Site(**where, neuron=site_neuron), dtype=dtype, **(options or {}))
    mixer.to(dtype)  # those that take no dtype
    if stirred:
        stir(mixer)
    return mixer


def spiking(mixer: TokenMixer) -> bool:
    """Whether a mixer takes spikes, time steps first."""
    return mixer.claims.domain == "spiking"


def images(mixer: TokenMixer) -> int:
    """The axis of the images in a mixer's tokens: behind the time steps, if there are any."""
    return 1 if spiking(mixer) else 0


def tokens(
    mixer: TokenMixer, *lead: int, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Random tokens that fit a mixer's site, two images if no leading axes are named.

    Spiking mixers get spikes, ``STEPS`` in front of the leading axes.
    """
    noise = torch.Generator().manual_seed(seed)
    steps = (STEPS,) if spiking(mixer) else ()
    shape = (*steps, *(lead or (2,)), mixer.site.num_tokens, mixer.site.dim)
    x = torch.randn(shape, generator=noise, dtype=torch.float64)
    return (x > 0).to(dtype) if steps else x.to(dtype)


def gradients(mixer: nn.Module, x: Tensor, **call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and the gradient of a fixed random sum of it, of the tokens and every parameter."""
    x = x.detach().clone().requires_grad_()
    y = mixer(x, **call)
    noise = torch.Generator().manual_seed(7)
    weight = torch.randn(y.shape, generator=noise, dtype=torch.float64).to(y)
    named = {"x": x, **dict(mixer.named_parameters())}
    grads = torch.autograd.grad((y * weight).sum(), list(named.values()), allow_unused=True)
    return y.detach(), {
        name: torch.full_like(named[name], torch.nan) if g is None else g
        for name, g in zip(named, grads, strict=True)
    }


@contextmanager
def refused(match: str = "") -> Iterator[None]:
    """Expect a :class:`UserError`; where shapes are checked, the checker may be the first."""
    with pytest.raises((UserError, jaxtyping.TypeCheckError)) as caught:
        yield
    if isinstance(caught.value, UserError):
        caught.match(match)


def refusal(action: Callable[[], Any]) -> str | None:
    """What a :class:`UserError` of ``action`` says, None if there is none."""
    try:
        action()
    except UserError as error:
        return str(error)
    return None
