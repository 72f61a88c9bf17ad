# SPDX-License-Identifier: Apache-2.0
"""Mixers made alone, for counting and measuring: on which grid, with which options, or why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from keymix.analysis.counting import cannot_count, count
from keymix.errors import UserError, one_line
from keymix.mixers.base import Grid, Site, checked_device
from keymix.mixers.registry import build, get_mixer_class, list_mixers, option_hints
from keymix.mixers.spec import MixerSpec, parse_mixers

TIME_STEPS = 4
"""Steps T of a spiking mixer's input, where it is not said."""

MOST_TOKENS, MOST_DIM, MOST_STEPS = 2**20, 2**14, 2**10
"""Beyond these sizes even the shapes of a map overflow what PyTorch counts."""

_SMALL = 4096  # tokens up to which a mixer may be made for counting alone, if it must

T = TypeVar("T")

# what a mixer, a user's own too, may raise when it is built or run where it cannot serve
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def near_square(tokens: int) -> Grid:
    """Return the grid of exactly ``tokens`` tokens nearest to a square, such as 12 on 3 x 4."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"{tokens=} must be at least 1 and at most {MOST_TOKENS:,}")
    rows = next(r for r in range(math.isqrt(tokens), 0, -1) if tokens % r == 0)
    return rows, tokens // rows


def check_site(*, dim: int, time_steps: int = TIME_STEPS) -> None:
    """Refuse a width or a number of time steps that no mixer is looked at with."""
    for name, number, most in (("dim", dim, MOST_DIM), ("time_steps", time_steps, MOST_STEPS)):
        if number > most:
            raise UserError(f"{name}={number} must be at most {most:,}")


def usable_device(device: str | torch.device) -> torch.device:
    """Return a device that holds numbers here."""
    where = checked_device(device)
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, ImportError) as error:  # the last of 'hpu'
        first = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(f"device {str(device)!r} cannot be used here: {first}") from error
    if where.type == "meta":
        raise UserError("device 'meta' holds no numbers, so nothing can be timed on it")
    return where


class OverTime(nn.Module):
    """A spiking mixer as a still image meets it: the tokens ``[B, N, C]`` repeated T times."""

    def __init__(self, mixer: nn.Module, steps: int) -> None:
        super().__init__()
        self.mixer, self.steps = mixer, steps

    def forward(self, x: Tensor) -> Tensor:
        """Run all T steps."""
        out: Tensor = self.mixer(x.expand(self.steps, *x.shape))
        return out


def make(
    name: str,
    options: dict[str, Any],
    dim: int,
    num_heads: int,
    grid: Sequence[int],
    time_steps: int = TIME_STEPS,
) -> nn.Module:
    """Make a mixer that takes tokens ``[B, N, C]``, none a prefix, as a fresh process can."""
    site = Site(dim=dim, num_heads=num_heads, grid=(grid[0], grid[1]))
    mixer = build(name, site, options)
    if get_mixer_class(name).traits.domain == "spiking":
        return OverTime(mixer, time_steps)
    return mixer


@dataclass(frozen=True, kw_only=True)
class SizedMixer:
    """A mixer to look at, with its options."""

    label: str  # how it is written, e.g. ``"static_key(activation=relu)"``
    name: str
    options: dict[str, Any]  # its options
    dim: int  # width of the tokens
    num_heads: int  # heads
    time_steps: int = TIME_STEPS  # steps of a spiking mixer

    def arguments(self, grid: Grid, *, dim: int | None = None, biases: bool = True) -> Any:
        """Return what `make` takes for a grid; `biases` that options can switch are on or off."""
        off = {} if biases else dict.fromkeys(bias_options(self.name), False)
        return {
            "name": self.name,
            "options": {**off, **self.options},
            "dim": dim or self.dim,
            "num_heads": self.num_heads,
            "grid": list(grid),
            "time_steps": self.time_steps,
        }


def bias_options(name: str) -> list[str]:
    """List the options of a mixer that are true or false and switch a bias, by their name."""
    return [o for o, hint in option_hints(name).items() if hint is bool and o.endswith("bias")]


def sized_mixers(
    mixers: str | Sequence[str] | None, *, dim: int, num_heads: int, time_steps: int = TIME_STEPS
) -> list[SizedMixer]:
    """Read which mixers to look at; all that are registered if None."""
    if mixers is None:
        specs = [MixerSpec((name,), ((),)) for name in list_mixers()]
    else:
        specs = parse_mixers(mixers if isinstance(mixers, str) else ",".join(mixers))
    for spec in specs:
        if len(spec.names) > 1:
            raise UserError(
                f"mixer {spec.label!r} names one per stage; here each mixer is measured alone: put "
                "commas between them"
            )
    return [
        SizedMixer(
            label=spec.label,
            name=spec.names[0],
            options=dict(spec.options[0]),
            dim=dim,
            num_heads=num_heads,
            time_steps=time_steps,
        )
        for spec in specs
    ]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a mixer alone costs on one image."""

    params: int  # trainable parameters
    macs: int  # multiply-adds; of all time steps of a spiking mixer
    activation_bytes: int  # bytes kept for the backward pass
    state_bytes: int  # bytes of parameters and buffers
    biases: dict[str, int]  # the biases among the parameters, by name
    layers: dict[str, tuple[int, int]]  # parameters and multiply-adds by the path of the layer

    @property
    def ratio(self) -> float | None:
        """Multiply-adds per parameter; None without parameters."""
        return self.macs / self.params if self.params else None


def counted(arguments: dict[str, Any]) -> Counted:
    """Count a mixer made from :func:`make`'s arguments, without weights where that can be."""
    shape = (math.prod(arguments["grid"]), arguments["dim"])
    try:
        with torch.device("meta"):
            model = make(**arguments)
        found = count(model, shape)
    except UserError:
        raise
    except FAILURES:  # looks at the numbers it is built from, which meta tensors lack
        if shape[0] > _SMALL:
            raise
        model = make(**arguments)
        found = count(model, shape)
    if found.uncounted:
        raise cannot_count(*found.uncounted)
    return Counted(
        params=found.params,
        macs=found.macs,
        activation_bytes=found.activation_bytes,
        state_bytes=sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        biases={
            name: p.numel()
            for name, p in model.named_parameters()
            if name.rpartition(".")[2].endswith("bias")
        },
        layers={layer.path: (layer.params, layer.macs) for layer in found.layers},
    )


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Run something of a mixer's: what it returned and None, or None and the reason in a line."""
    try:
        return action(), None
    except UserError as error:
        return None, one_line(str(error))
    except FAILURES as error:
        first = (str(error).splitlines() or [""])[0]
        return None, one_line(f"{type(error).__name__}: {first}")
