# SPDX-License-Identifier: Apache-2.0
"""Mixers made alone: on which grid, what they cost there, or why not; and what their products do.

SKA Table 7 sorts mixers by "weight sharing" and by the number of "dynamic weights" and gives no
definition. Here both are read off the operations of a forward pass, nothing is declared:

- Weights are *shared over the image* ("spatially global") where a learned kernel slides over the
  grid: a convolution, wider than one position, whose kernel does not depend on the tokens.
- A *dynamic weight* is a matrix that the tokens give and the tokens are multiplied with: a matrix
  product or convolution both of whose factors depend on the input. Queries times keys is one, the
  map times the values another. Elementwise products (gates) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keymix.analysis.counting import Count, by_equation, cannot_count, count, flop_counter
from keymix.analysis.passes import tensors_in
from keymix.errors import FAILURES, UserError, one_line, reason
from keymix.mixers.base import Grid, Site, TokenMixer, checked_device
from keymix.mixers.head_mixer import HeadMixer, Roles
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import build, get_mixer_class, list_mixers, option_hints
from keymix.mixers.spec import MixerSpec, parse_mixers
from keymix.mixers.spiking import SpikingMixer

TIME_STEPS = 4
"""Steps T of a spiking mixer's input, where it is not said."""

MOST_TOKENS, MOST_DIM, MOST_STEPS = 2**20, 2**14, 2**10
"""Beyond these sizes even the shapes of a map overflow what PyTorch counts."""

GLOBAL, NOT_SHARED = "spatially global", "no"
"""The paper's words for whether learned weights are shared over the image."""

SIDES, HEAD_DIM = (8, 9), 32
"""The facts are read on a grid of these rows and columns, and in heads no wider than this: they
depend on no size beyond the 64 tokens that may all be landmarks."""

_SMALL = 4096  # tokens up to which a mixer may be made for counting alone, if it must

T = TypeVar("T")

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done."""


def no_progress(text: str, share: float) -> None:
    """Show no progress."""


def attempt(action: Callable[..., T], *given: object) -> tuple[T | None, str | None]:
    """Run something of a mixer's: what it returned and None, or None and the reason in a line."""
    try:
        return action(*given), None
    except FAILURES as error:
        return None, one_line(reason(error))


# ---- where, and with which options ------------------------------------------------------------


def near_square(tokens: int) -> Grid:
    """Return the grid of exactly ``tokens`` tokens nearest to a square, such as 12 on 3 x 4."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"{tokens=} must be at least 1 and at most {MOST_TOKENS:,}")
    rows = next(r for r in range(isqrt(tokens), 0, -1) if tokens % r == 0)
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


def too_large(need: float, room: float, what: str = "") -> str | None:
    """Say that something needs more than four fifths of the bytes that are free; else None."""
    if need <= 0.8 * room:
        return None
    return f"would need up to {need / 2**30:.1f} GiB{what}, and {room / 2**30:.1f} GiB are free"


@dataclass(frozen=True, kw_only=True)
class SizedMixer:
    """A mixer to look at, with its options."""

    label: str  # how it is written, e.g. ``"static_key(activation=relu)"``
    name: str
    options: dict[str, Any]  # its options
    dim: int  # width of the tokens
    num_heads: int  # heads
    time_steps: int  # steps of a spiking mixer

    def arguments(self, grid: Grid, *, dim: int | None = None, biases: bool = True) -> Any:
        """Return what `make` takes for a grid; `biases` that options can switch are on or off."""
        hints = {} if biases else option_hints(self.name)
        off = {o: False for o, hint in hints.items() if hint is bool and o.endswith("bias")}
        return {
            "name": self.name,
            "options": {**off, **self.options},
            "dim": dim or self.dim,
            "num_heads": self.num_heads,
            "grid": list(grid),
            "time_steps": self.time_steps,
        }


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


def counted(arguments: dict[str, Any]) -> Count:
    """Count a mixer made from `make`'s arguments on one image, without weights if that can be."""
    shape = (prod(arguments["grid"]), arguments["dim"])
    try:
        with torch.device("meta"):
            model = make(**arguments)
        found = count(model, shape)
    except UserError:
        raise
    except FAILURES:  # looks at the numbers it is built from, which meta tensors lack
        if shape[0] > _SMALL:
            raise
        found = count(make(**arguments), shape)
    if found.uncounted:
        raise cannot_count(*found.uncounted)
    return found


# ---- which weights are learned, and which the image computes ------------------------------------


@dataclass(frozen=True, kw_only=True)
class WeightFacts:
    """What the operations of one forward pass show.

    Attributes:
        kernels: Sizes of the learned kernels that slide over the grid, e.g. ``("3x3",)``.
        dynamic: Products both of whose factors depend on the tokens.
    """

    kernels: tuple[str, ...]
    dynamic: int

    @property
    def sharing(self) -> str:
        """The paper's words for whether learned weights are shared over the image."""
        return GLOBAL if self.kernels else NOT_SHARED


def weight_facts(mixer: SizedMixer) -> WeightFacts:
    """Run a mixer once on a small grid and look at what its products multiply."""
    with torch.random.fork_rng(devices=()):
        dim = min(mixer.dim, mixer.num_heads * HEAD_DIM)
        model = make(**mixer.arguments(SIDES, dim=dim)).eval()
        x = torch.randn(1, prod(SIDES), dim)
    return trace(model, x)


def trace(model: nn.Module, x: Tensor) -> WeightFacts:
    """Follow through one inference pass which tensors depend on the input.

    Args:
        model: Takes ``x``. Mixers in it are set to compute by their equations.
        x: The input.
    """
    by_equation(model)
    follower = _Follower(x)
    with torch.no_grad(), follower:
        model(x)
    return WeightFacts(kernels=tuple(follower.kernels), dynamic=follower.dynamic)


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the storage of everything computed from the input, and looks at products."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # kept alive, since an address that is free may be used again
        self._marked = {x.untyped_storage()._cdata: x.untyped_storage()}
        self._products = flop_counter().flop_registry
        self.kernels: list[str] = []
        self.dynamic = 0

    def _depends(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._marked

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        if packet in self._products:
            self._look(str(packet), args)
        reached = any(self._depends(t) for t in tensors_in((args, kwargs)))
        out = func(*args, **kwargs)
        if reached:
            for tensor in tensors_in(out):  # what is written in place is returned, too
                storage = tensor.untyped_storage()
                self._marked[storage._cdata] = storage
        return out

    def _look(self, name: str, args: tuple[Any, ...]) -> None:
        factors = [self._depends(t) for t in args if isinstance(t, Tensor)]
        if "scaled_dot_product" in name:
            q, k, v = factors[:3]
            self.dynamic += (q and k) + ((q or k) and v)
            return
        if "convolution" in name:
            size = args[1].shape[2:]
            if factors[0] and not factors[1] and prod(size) > 1:
                self.kernels.append("x".join(str(side) for side in size))
            factors = factors[:2]
        elif "add" in name:  # addmm, baddbmm: the first is added
            factors = factors[1:]
        self.dynamic += sum(factors) > 1


# ---- the attention between the projections ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionOperation:
    """What lies between the projections in and out of a mixer, for one image and one step.

    Attributes:
        shapes: Shape of what each role projects to.
        run: Takes such tensors by role and returns what the output projection is given.
    """

    shapes: dict[str, tuple[int, ...]]
    run: Callable[[dict[str, Tensor]], Tensor]

    def inputs(self, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make inputs on a device: ones and zeros, every fourth number a spike."""
        made = {}
        for role, shape in self.shapes.items():
            made[role] = torch.zeros(shape, device=device, dtype=dtype)
            made[role].view(-1)[::4] = 1
        return made


def attention_operation(mixer: TokenMixer, tokens: int) -> AttentionOperation:
    """Take the attention out of a mixer.

    Args:
        mixer: One with queries, keys or values of its own.
        tokens: Tokens N of the image.

    Raises:
        UserError: If the mixer has no such operation.
    """
    if isinstance(mixer, SpikingMixer):
        shape = (1, 1, tokens, mixer.num_heads, mixer.head_dim)  # T, B, N, h, d
        return AttentionOperation(
            shapes=dict.fromkeys(mixer.roles, shape),
            run=lambda parts: mixer.gather(parts, lambda name, spikes: None),
        )
    if isinstance(mixer, HeadMixer):
        grid = mixer.site.grid
        with torch.no_grad():
            made = mixer.inputs(mixer.proj.weight.new_zeros(1, tokens, mixer.site.dim), grid)
        learned = {name: part for name, part in made.items() if name not in mixer.roles}
        return AttentionOperation(
            shapes={role: tuple(made[role].shape) for role in mixer.roles},
            run=lambda parts: _attended(mixer, {**learned, **parts}, grid),
        )
    raise UserError(
        f"mixer {mixer.mixer_name!r} has no attention of its own: it has no queries and keys"
    )


def _attended(mixer: HeadMixer, inputs: Roles, grid: Grid | None) -> Tensor:
    """Return what the heads make of their inputs, by the equation."""
    if isinstance(mixer, MapMixer):
        return mixer.maps(inputs, grid) @ inputs["v"]
    return mixer.attend(inputs, grid)


class Work(NamedTuple):
    """What an attention does for one image in one step, neurons and softmax left out.

    Attributes:
        macs: Multiply-adds of matrix products.
        entries: Numbers added up, masked or scaled entry by entry.
        formed: Numbers formed between the roles and the output of attention.
    """

    macs: int
    entries: int
    formed: int


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the arithmetic of what runs under it; views and copies are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = self.entries = 0
        self.formed: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.macs += out.numel() * args[0].shape[-1]
        elif name in ("sum", "mul"):
            self.entries += (args[0] if name == "sum" else out).numel()
        if name in ("mm", "bmm", "sum", "mul", "_softmax"):
            self.formed.append(out.numel())
        return out


def work(name: str, options: dict[str, Any], tokens: int, dim: int, num_heads: int) -> Work:
    """Count the attention of a mixer alone.

    Args:
        name: The mixer.
        options: Its options.
        tokens: N.
        dim: D.
        num_heads: h.
    """
    grid = near_square(tokens)
    site = Site(dim=dim, num_heads=num_heads, grid=grid, neuron=lambda **factory: nn.Identity())
    with torch.device("meta"):
        operation = attention_operation(build(name, site, options), tokens)
        parts: dict[str, Tensor] = {r: torch.empty(s) for r, s in operation.shapes.items()}
    watch = _Watch()
    with torch.no_grad(), watch:
        operation.run(parts)
    return Work(macs=watch.macs, entries=watch.entries, formed=sum(watch.formed[:-1]))
