# SPDX-License-Identifier: Apache-2.0
"""What tests need to try any registered mixer: sites, weights, and other values of its options.

All is made on the CPU, so that the numbers are the same everywhere, and moved to the device of the
run. Its dtype is that of weights and tokens; autocast to a narrower one is around the whole test
(``tests/contract/conftest.py``).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

import run_options
import tolerances
from each import each
from keymix.errors import UserError
from keymix.layers.neurons import Neurons
from keymix.mixers import contract
from keymix.mixers.base import Site, TokenMixer
from keymix.mixers.contract import Accuracy, spiking, stir
from keymix.mixers.registry import create_mixer, mixer_options, option_hints
from tolerances import CHANGE, TOLERANCE

DIM, HEADS, GRID = 12, 3, (2, 3)
DEVICE = torch.device(run_options.device)
# of weights and tokens, and what products are computed in
DTYPE, ARITHMETIC = {
    "64": (torch.float64, torch.float64),
    "32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "16": (torch.float32, torch.float16),
}[run_options.precision]
ACCURACY = Accuracy(dtype=DTYPE, near=TOLERANCE[ARITHMETIC], far=CHANGE, device=DEVICE)

# where an effect must be distinguished from rounding, though both are small
in_64_bits = pytest.mark.skipif(
    run_options.precision != "64", reason="asks whether something acts, which 64 bits answer"
)

# other values of options that hold numbers; an option whose annotation lists its values (Literal,
# bool) needs no entry. A new option with a number gets a line here.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "head_dim": (6,),
    "attn_drop": (0.5,),
    "temperature": (True, 0.5),
    "proj_drop": (0.5,),
    "key_init_std": (0.3,),
    "num_features": (7,),
    "lambda_init": (0.3,),
    "memory": (5,),
    "rows": (4,),
    "landmarks": ((1, 2), 2),
    "iterations": (1,),
    "conv_size": (3,),
    "agents": ((1, 2),),
    "kernel_size": (1, 5),
    "pool_size": (1, 5),
    "key_grid": ("1/4", (1, 2)),
    "expansion": (2.0,),
    "pos_dim": (3, 6),
    "attn_threshold": (1.0,),
    "scale": (0.25,),  # of spiking_self; the others list theirs
}

# options that act only with another
NEEDED_WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("re_attention", "attn_drop_stage"): {"attn_drop": 0.5},
    ("nystrom", "iterations"): {"landmarks": 2},  # fewer than tokens, which 64 are not here
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


def values_of(name: str) -> dict[str, tuple[str, Any]]:
    """Every option of a mixer at every other value, one at a time; not the way of computing."""
    return {
        f"{option}={value}": (option, value)
        for option in mixer_options(name)
        if option != "backend"
        for value in alternatives(name, option)
    }


def options_of(name: str) -> dict[str, tuple[dict[str, Any]]]:
    """The options of a mixer's cases: its defaults, and each other value of an option."""
    varied = {case: ({option: value},) for case, (option, value) in values_of(name).items()}
    return {"defaults": ({},), **varied}


# a test of a mixer, ``name``, with each of its ``options``
each_options = each("options", options_of)


def make(
    name: str,
    options: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = DTYPE,
    stirred: bool = True,
    seed: int = 0,
    site_neuron: Neurons | None = None,
    **site: Any,
) -> TokenMixer:
    """Build a small mixer, with weights away from their start."""
    torch.manual_seed(seed)
    where = {"dim": DIM, "num_heads": HEADS, "grid": GRID, **site}
    mixer = create_mixer(name, Site(**where, neuron=site_neuron), dtype=dtype, **(options or {}))
    mixer.to(dtype)  # those that take no dtype
    if stirred:
        stir(mixer)
    if spiking(mixer) and dtype != torch.float64:
        _take_short_numbers(mixer)
    return mixer.to(DEVICE)


def _take_short_numbers(mixer: TokenMixer) -> None:
    """Round the weights of a spiking mixer to eighths, so that sums of them over spikes are exact.

    Then potentials do not hang on the order of a sum, whatever the precision, and no spike is
    another one because tokens lie elsewhere in memory: 256 eighths fit into bfloat16.
    """
    with torch.no_grad():
        for linear in mixer.projections:
            for p in linear.parameters():
                p.mul_(8).round_().div_(8)


def numbers(*shape: int) -> Tensor:
    """Draw normal numbers for the mixers of this run."""
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, DTYPE)


def close(result: Tensor, wanted: Tensor) -> None:
    """Hold ``result`` to ``wanted`` as far as the precision of this run allows."""
    tolerances.close(result, wanted, ARITHMETIC)


tokens = ACCURACY.tokens
images = contract.image_axis
gradients = contract.gradients


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
