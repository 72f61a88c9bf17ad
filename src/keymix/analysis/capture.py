# SPDX-License-Identifier: Apache-2.0
"""Which layers are read, which of their queries, and the one forward pass it takes."""

from __future__ import annotations

import contextlib
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from keymix.arguments import unwrapped
from keymix.errors import NoAttentionMap, UserError, unknown
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.base import Encoded, encoder_of, find_host, find_mixers
from keymix.hosts.layers import Layer, by_name, find_layers
from keymix.mixers.base import Grid, Queries, Stage, TokenMixer

T = TypeVar("T")
Layers = str | int | Sequence[str | int]
Call = tuple[tuple[Any, ...], dict[str, Any]]

_NUMBERS = re.compile(r"(-?\d+)(?:\s*-\s*(\d+))?")
_BUDGET = 2**22
"""Entries of a map that are formed at a time where all rows are wanted but none is kept."""

MOST_LAYERS = 12
"""Layers that are shown at most where none are chosen."""


@dataclass(frozen=True)
class At:
    """A query token by its place on the image."""

    # row of the layer's grid of patches, from 0; or, as a float in [0, 1), the height from the
    # top as a share of the image
    row: float
    column: float  # likewise from the left

    def token(self, layout: Layout) -> int:
        """Return the token's index in a layer."""
        place = []
        for given, side, image in zip(
            (self.row, self.column), layout.grid, layout.image, strict=True
        ):
            share = not isinstance(given, numbers.Integral)
            at = int(given * image * side) if share and given >= 0 else int(given)
            if not 0 <= at < side or (share and not 0 <= given < 1):
                raise UserError(
                    f"the query at {self.row},{self.column} lies outside: give row and column of "
                    f"a patch on the grid of {layout.grid[0]}x{layout.grid[1]}, or shares of the "
                    "image from 0.0 to below 1.0"
                )
            place.append(at)
        return layout.prefix + place[0] * layout.grid[1] + place[1]


Asked = Queries | At | Literal["cls", "mean"]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A layer that can be read: a host's place, or a mixer that sits outside of any."""

    path: str
    module: nn.Module  # that module
    layer: Layer | None  # what the host says of it, None outside of any host

    @property
    def stage(self) -> int:
        """Stage of a hierarchical model."""
        return 0 if self.layer is None else self.layer.place.stage

    def map(self, call: Call, rows: Queries | None, stage: Stage) -> Tensor:
        """Return rows of the map of a call, ``[*, h, Q, M]``."""
        args, kwargs = call
        try:
            if self.layer is not None:
                return self.layer.map(args, kwargs, rows, stage).detach()
            assert isinstance(self.module, TokenMixer)  # find_seats made it
            named = by_name(args, kwargs)
            return self.module.attention_map(**named, queries=rows, stage=stage).detach()
        except NoAttentionMap as error:
            message = f"layer {self.path}: {error}; choose other layers with layers="
            raise NoAttentionMap(message) from error
        except UserError as error:
            raise UserError(f"layer {self.path}: {error}") from error

    def layout(self, model: nn.Module) -> Layout | None:
        """Say where the tokens of the model's present or last call lie; None if unknown."""
        try:
            if self.layer is not None:
                return self.layer.layout(model)
        except UserError:
            return None
        assert isinstance(self.module, TokenMixer)
        site = self.module.site
        if site.grid is None or site.windows > 1:
            return None
        keys = site.key_grid or site.grid
        return Layout(grid=site.grid, key_grid=keys, prefix=site.num_prefix_tokens)


def find_seats(model: nn.Module) -> dict[str, Seat]:
    """List all layers of a model that may have a map: path to seat, in the model's order."""
    model = unwrapped(model)
    mixers = find_mixers(model)
    try:
        find_host(model)
    except UserError as error:
        if not mixers:
            message = f"{type(model).__name__} hosts no keymix mixer, and {error}"
            raise UserError(message) from error
        layers = []
    else:
        layers = find_layers(model)
    seats = {each.path: Seat(path=each.path, module=each.module, layer=each) for each in layers}
    for path, mixer in mixers.items():
        seats.setdefault(path, Seat(path=path, module=mixer, layer=None))
    if not seats:
        raise UserError(f"{type(model).__name__} has no layer of attention, so it has no maps")
    return seats


def select_layers(model: nn.Module, layers: Layers | None = None) -> dict[str, Seat]:
    """Choose layers in which attention sits, the model's own or a mixer; see `chosen_numbers`."""
    seats = find_seats(model)
    wanted = chosen(list(seats), layers, "layers")
    return {path: seats[path] for path in wanted}


def chosen(paths: Sequence[str], layers: Layers | None, what: str) -> list[str]:
    """Choose among paths, as :func:`select_layers` has it."""
    return [paths[i] for i in chosen_numbers([(path,) for path in paths], layers, what)]


def shown_layers(found: Sequence[T]) -> list[T]:
    """Choose `MOST_LAYERS` evenly, first and last included."""
    last = len(found) - 1
    if last < MOST_LAYERS:
        return list(found)
    return [found[round(i * last / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]


@contextlib.contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Put every module into inference mode for a while; each gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def run_once(
    model: nn.Module,
    images: Tensor,
    seats: Mapping[str, Seat],
    on_call: Callable[[Seat, Call, Layout | None], None],
) -> None:
    """Run the images through a model once and report every call of the chosen layers.

    In inference mode and without gradients; a layer is reported when it has run, with the layout of
    the call, None where it is unknown. The model is left as it was, also after an error. A layer
    must run exactly once.
    """
    whole, taken = unwrapped(model), list[Grid]()
    ran: set[str] = set()
    own: list[bool] = []  # True where what failed is the reading, not the model

    def hook(seat: Seat) -> Any:
        def report(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
        ) -> None:
            if seat.path in ran:
                raise UserError(
                    f"layer {seat.path} runs more than once in a forward pass; leave it out"
                )
            ran.add(seat.path)
            own.append(True)
            layout = seat.layout(whole)
            if layout is not None:
                named = layout.prefix > 0 and _may_have_class_token(whole, seat.path)
                given, of = images.shape[-2:], taken[0] if taken else images.shape[-2:]
                share = min(1.0, given[0] / of[0]), min(1.0, given[1] / of[1])
                layout = replace(layout, image=share, class_token=named)
            on_call(seat, (args, kwargs), layout)
            own.clear()

        return report

    parameter = next(model.parameters(), None)
    if parameter is not None:
        images = images.to(device=parameter.device, dtype=parameter.dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(inference_mode_of(model))
        # compiled graphs would not see the hooks
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_following_image(whole, images, taken))
        for seat in seats.values():
            handle = seat.module.register_forward_hook(hook(seat), with_kwargs=True)
            stack.callback(handle.remove)
        with refusing(model, images, ours=own):
            whole(images)
    idle = [path for path in seats if path not in ran]
    if idle:
        raise NoAttentionMap(f"layer {idle[0]} did not run in the forward pass, so it has no map")


@contextlib.contextmanager
def _following_image(model: nn.Module, images: Tensor, taken: list[Grid]) -> Iterator[None]:
    """Note the height and width at which the images come to the first convolution, if any does."""

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        found = args[0] if args else None
        if taken or not isinstance(found, Tensor) or found.ndim != 4:
            return
        height, width = found.shape[-2:]
        as_large = height >= images.shape[-2] and width >= images.shape[-1]
        if as_large and found.shape[1] == images.shape[-3]:
            taken.append((height, width))

    with contextlib.ExitStack() as stack:
        for module in encoder_of(model)[0].modules():
            if isinstance(module, nn.Conv2d):
                stack.callback(module.register_forward_pre_hook(note).remove)
        yield


@contextlib.contextmanager
def refusing(model: nn.Module, images: Tensor, *, ours: Sequence[object] = ()) -> Iterator[None]:
    """Turn what a model raises at images into an error that names them.

    What fails while `ours` has an entry is no fault of the images and is raised as it is.
    """
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        if ours or isinstance(error, UserError | torch.OutOfMemoryError):
            raise
        raise cannot_take(model, images, error) from error


def cannot_take(
    model: nn.Module, images: Tensor, error: Exception, what: str = "images"
) -> UserError:
    """Make the error for a model that failed on images, in one line."""
    why = str(error).strip().partition("\n")[0]
    return UserError(
        f"{type(unwrapped(model)).__name__} cannot take {what} of shape {tuple(images.shape)}: "
        f"{type(error).__name__}: {why}"
    )


def row_chunks(count: int, read: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows and their map ``[*, h, Q, M]``, in chunks of bounded size, until all were read."""
    start, size = 0, 16
    while start < count:
        rows = torch.arange(start, min(start + size, count))
        maps = read(rows)
        yield rows, maps
        start += len(rows)
        size = max(16, _BUDGET * len(rows) // max(1, maps.numel()))


def class_token_of(layout: Layout | None, path: str) -> int:
    """Return the index of the class token in a layer."""
    if layout is None or not layout.class_token:
        raise UserError(
            f"no class token passes through layer {path}: ask for the mean over its patches "
            "('mean') or for single ones"
        )
    return 0


def readout(model: nn.Module, layouts: Iterable[Layout | None]) -> Literal["cls", "mean"]:
    """Name what a model reads out: a class token that passes through some layers, or the mean."""
    whole = unwrapped(model)
    pooled = getattr(whole, "global_pool", "token") not in ("token", "")
    if pooled or isinstance(whole, Encoded):  # whose class token is not decoded
        return "mean"
    return "cls" if all(layout is not None and layout.class_token for layout in layouts) else "mean"


def _may_have_class_token(model: nn.Module, path: str) -> bool:
    """Whether the nearest module around a layer that could have a class token has one."""
    while path:
        path = path.rpartition(".")[0]
        around = model.get_submodule(path)
        if hasattr(around, "cls_token"):
            return around.cls_token is not None
    return True


def chosen_numbers(
    names: Sequence[Sequence[str]], layers: Layers | None, what: str = "layers"
) -> list[int]:
    """Return the numbers of the layers meant, in the model's order.

    `layers` is a number (0 is the first, -1 the last); text with commas between numbers, ranges
    ``"6-11"`` (both ends count), shell-style patterns on module paths (``"blocks.[0-5].attn"``) and
    modules above some (``"stages.2"``); a list of these; or None for all. `names` are the paths
    that each layer goes by, the first of which errors name; `what` is what they call the layers.
    """
    if layers is None:
        return list(range(len(names)))
    wanted: set[int] = set()
    several = [layers] if isinstance(layers, str) or not isinstance(layers, Sequence) else layers
    for given in several:
        for part in str(given).split(","):
            wanted.update(_meant(names, part.strip(), what))
    if not wanted:
        raise UserError(f"{layers=} names no layer; leave it out for all {len(names)}")
    return sorted(wanted)


def _meant(names: Sequence[Sequence[str]], text: str, what: str) -> Sequence[int]:
    numbers = _NUMBERS.fullmatch(text)
    if numbers is None:
        exact = [any(fnmatchcase(path, text) for path in paths) for paths in names]
        above = [any(path.startswith(f"{text}.") for path in paths) for paths in names]
        if not any(exact + above):
            raise unknown("layer", text, [paths[0] for paths in names], listed=False)
        return [i for i, hit in enumerate(exact if any(exact) else above) if hit]
    count, ends = len(names), [int(end) for end in numbers.groups() if end is not None]
    if not all(-count <= end < count for end in ends):
        raise UserError(
            f"layers={text!r}: this model has {count} {what}, 0 ({names[0][0]}) to {count - 1} "
            f"({names[-1][0]})"
        )
    first, last = ends[0] % count, ends[-1] % count
    if last < first:
        raise UserError(f"layers={text!r} runs backwards; write '{last}-{first}'")
    return range(first, last + 1)
