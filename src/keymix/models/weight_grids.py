# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors in the shapes of a model: layouts, grids of positions, whole mixers.

The grid of its positions follows from its image size, or else from their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.hosts.base import encoder_of, find_mixers
from keymix.hosts.windows import HostedWindows, table_rows, window_grid
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.resize import GridBound
from keymix.mixers.static_key import LearnedKeys
from keymix.models.image_size import update_mixers, without_memory

_REMEDY = "give img_size=, the height and width in pixels of the images they were trained on"
_OTHER = "they were trained on images of another size: give that one, img_size=(height, width)"


@dataclass(frozen=True)
class Geometry:
    """Grids of a model at the image size (pixels) that weights were made at, None if unknown.

    ``model`` is the model at that size, without memory.
    """

    size: Grid | None = None
    model: nn.Module | None = None

    def resolve(self, count: int, mine: Grid, there: Grid | None) -> Grid:
        """Return the grid that the positions of a checkpoint are on.

        It is ``there``, the model's at the size of the weights, where that is known; else ``mine``,
        the model's own, or a square. Refused if the size contradicts the count, or the count alone
        leaves it open.
        """
        if self.size is not None and there is not None:
            if math.prod(there) != count:
                raise UserError(
                    f"holds {count} positions, and images of {self.size[0]}x{self.size[1]} make "
                    f"{there[0]}x{there[1]} here; {_OTHER}"
                )
            return there
        if count == math.prod(mine) and mine[0] == mine[1]:
            return mine
        side = math.isqrt(max(count, 0))
        if count == math.prod(mine) or not side or side * side != count:
            raise UserError(
                f"holds {count} positions, which may lie on more than one grid (the model's is "
                f"{mine[0]}x{mine[1]}); {_REMEDY}"
            )
        return side, side

    def patches(self) -> Grid | None:
        """Grid of the patches at the size of the weights."""
        encoder = None if self.model is None else encoder_of(self.model)[0]
        embed: Any = getattr(encoder, "patch_embed", None)
        size = getattr(embed, "grid_size", None)
        return None if size is None else (size[0], size[1])

    def keys(self, path: str) -> Grid | None:
        """Grid of a mixer's keys at the size of the weights; of tokens where keys lie there."""
        if self.model is None:
            return None
        site = find_mixers(self.model)[path].site
        return site.key_grid or site.grid

    def windows(self, path: str, window: Grid) -> Grid | None:
        """Grid of windows of a size at the image size of the weights."""
        if self.model is None:
            return None
        block: Any = self.model.get_submodule(path.removesuffix(".attn.mixer"))
        resolution = getattr(block, "input_resolution", None)
        return None if resolution is None else window_grid(resolution, window)

    def window(self, path: str, rows: int, mine: Grid) -> Grid:
        """Return the window that a table of ``rows`` rows is for; ``mine`` is the model's there."""
        there: Any = None if self.model is None else self.model.get_submodule(path)
        known = None if there is None else tuple(there.window_size)
        if rows == table_rows(mine) and (mine[0] == mine[1] or known == mine):
            return mine
        side = math.isqrt(rows)
        if rows != table_rows(mine) and side * side == rows and side % 2:
            return (side + 1) // 2, (side + 1) // 2
        if known is not None and table_rows((known[0], known[1])) == rows:
            return known[0], known[1]
        table = f"{path}.relative_position_bias_table has {rows} rows"
        if known is not None and self.size is not None:
            raise UserError(
                f"{table}, and images of {self.size[0]}x{self.size[1]} make windows of "
                f"{known[0]}x{known[1]} here; build the model with window_size=, the height and "
                "width in tokens of the windows that they were trained with"
            )
        raise UserError(
            f"{table}, which fit more than one window (the model's is {mine[0]}x{mine[1]}); "
            f"{_REMEDY}, or build the model with window_size=, that of their windows"
        )


def geometry_at(model: nn.Module, img_size: Any) -> Geometry:
    """Say how a model's grids are at another image size (pixels); the model is left alone."""
    if img_size is None:
        return Geometry()
    size = whole_size("img_size", img_size)
    ghost = _ghost(model)
    try:
        _take(ghost, size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"img_size={size}: {type(model).__name__} has no grid for it: {why}"
        ) from None
    return Geometry(size, ghost)


def _ghost(model: nn.Module) -> nn.Module:
    """Copy a model without its memory; its mixers take any grid."""
    ghost: nn.Module = without_memory(model)
    for mixer in find_mixers(ghost).values():
        if isinstance(mixer, GridBound):
            mixer.resize = "interpolate"
        mixer.refuses_grid = lambda *_, **__: None  # type: ignore[method-assign]
    return ghost


def _take(ghost: Any, size: Grid) -> None:
    """Let a model take an image size."""
    if hasattr(ghost, "set_input_size"):
        ghost.set_input_size(img_size=size)
    elif hasattr(getattr(ghost, "patch_embed", None), "set_input_size"):
        ghost.patch_embed.set_input_size(img_size=size)
    else:
        ghost.img_size = size
    update_mixers(ghost)


def windowed(model: nn.Module, path: str) -> bool:
    """Whether a table of relative positions at a path is one of windows."""
    module: Any = model.get_submodule(path)
    return isinstance(module, HostedWindows) or hasattr(module, "window_size")


def pointwise(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Turn a 1x1 convolution's weight into a linear map's or back, if that gives ``shape``."""
    linear, convolution = sorted((tensor.shape, shape), key=len)
    if len(linear) == 2 and convolution == (*linear, 1, 1):
        return tensor.reshape(shape)
    return tensor


def adapted_mixer(
    mixer: TokenMixer,
    state: Mapping[str, Tensor],
    path: str,
    geometry: Geometry,
    window: Grid | None = None,
) -> dict[str, tuple[Tensor, bool]]:
    """Fit the tensors that a checkpoint has at a mixer's place to the mixer, or refuse them all.

    They are the mixer's if all its projections are among them (all it has, if it has none) and none
    is left over or of another shape, after learned keys were resampled. ``path`` is the mixer's,
    ``window`` the sides of the checkpoint's windows, known from its table of relative positions.

    Returned are, by name, the tensor and whether it was resampled; nothing if they are another
    mixer's.
    """
    # optional state counts as its own
    own = {name: getattr(mixer, name) for name in mixer.optional_state} | mixer.state_dict()
    linears = {id(linear.weight) for linear in mixer.projections}
    weights = {name for name, p in mixer.named_parameters() if id(p) in linears}
    if not state or not (weights or own.keys()) <= state.keys() or not state.keys() <= own.keys():
        return {}
    shaped = {name: pointwise(tensor, own[name].shape) for name, tensor in state.items()}
    try:
        moved = _on_this_grid(mixer, shaped, own, _Origin(path, geometry, window))
    except UserError as error:
        raise UserError(f"{path} ({mixer.mixer_name}) {error}") from None
    if any(tensor.shape != own[name].shape for name, tensor in moved.items()):
        return {}
    return {name: (tensor, tensor is not shaped.get(name)) for name, tensor in moved.items()}


@dataclass(frozen=True)
class _Origin:
    """Where a checkpoint's keys may lie: the mixer's path, the grids known, its windows' sides."""

    path: str
    geometry: Geometry
    window: Grid | None


def _on_this_grid(
    mixer: TokenMixer, state: dict[str, Tensor], own: Mapping[str, Tensor], origin: _Origin
) -> dict[str, Tensor]:
    """Resample what is learned per position, as far as shapes fit it; empty where it cannot be."""
    key_grid = mixer.site.key_grid or mixer.site.grid
    stored, implied = state.keys() & set(mixer.grid_parameters), mixer.optional_state - state.keys()
    wrong = {name for name, tensor in state.items() if tensor.shape != own[name].shape}
    if key_grid is None or not wrong <= stored:
        return state
    keys: Grid
    windows: Grid | None = None
    if implied and not stored:  # by the grid itself, which no shape shows
        keys = origin.window or origin.geometry.keys(origin.path) or key_grid
    elif not stored:
        whole = mixer.tied_to_grid and not mixer.grid_parameters  # a map of all positions
        there = origin.geometry.keys(origin.path)
        positions = math.prod(key_grid)
        fits = not whole or origin.geometry.resolve(positions, key_grid, there) == key_grid
        return state if fits else {}
    else:
        axis = (1,) if mixer.site.own_windows else ()  # of windows, which one window's keys lack
        ratios = {_ratio(state[name].shape, own[name].shape, axis) for name in wrong} or {(1, 1)}
        if len(ratios) != 1 or ratios == {(0, 1)}:  # shapes of something else than positions
            return state
        keys, windows = _saved_grids(mixer, key_grid, ratios.pop(), origin)
    if keys == key_grid and windows in (None, mixer.site.window_grid):
        return state
    if mixer.keeps_grid:
        raise _kept(mixer, key_grid, _grids_text(keys, windows), windows)
    try:
        there = mixer.site.grid or keys
        return mixer.adapt_state(state, there, key_grid=keys, window_grid=windows)
    except UserError:
        return state


def _kept(mixer: TokenMixer, key_grid: Grid, theirs: str, windows: Grid | None = None) -> UserError:
    ours = _grids_text(key_grid, windows and mixer.site.window_grid)
    few = isinstance(mixer, LearnedKeys) and mixer.chosen_key_grid is not None
    other = f"build it with key_grid={theirs!r}" if few else "take resize='interpolate'"
    return UserError(
        f"keeps what it learned on the grid of its training (resize='pool_values'): theirs on "
        f"{theirs}, the model's on {ours}; build the model at the image size of the training, "
        f"load, then call set_input_size, or {other}"
    )


def _grids_text(keys: Grid, windows: Grid | None) -> str:
    grid = f"{keys[0]}x{keys[1]}"
    return grid if windows is None else f"{grid} in each of {windows[0]}x{windows[1]} windows"


def _saved_grids(
    mixer: TokenMixer, key_grid: Grid, ratio: tuple[int, int], origin: _Origin
) -> tuple[Grid, Grid | None]:
    """Return the grid of a checkpoint's keys, and that of windows with keys of their own."""
    site, geometry = mixer.site, origin.geometry
    theirs, ours = ratio
    if site.own_windows and site.window_grid is not None:
        keys = origin.window or key_grid
        number = site.windows * math.prod(key_grid) * theirs // (ours * math.prod(keys))
        there = geometry.windows(origin.path, keys)
        return keys, geometry.resolve(number, site.window_grid, there)
    count = site.num_keys * theirs // ours - site.num_prefix_tokens
    there = geometry.keys(origin.path)
    if mixer.keeps_grid and there is not None and count != math.prod(there):
        if count == math.prod(key_grid):  # built like this one, it took the other size afterwards
            return key_grid, None
        raise _kept(mixer, key_grid, f"one of {count} positions")
    return geometry.resolve(count, key_grid, there), None


def _ratio(
    theirs: Sequence[int], ours: Sequence[int], axis: tuple[int, ...] = ()
) -> tuple[int, int]:
    """Return how many times more positions there are, as a fraction; 0 if the shapes say otherwise.

    Positions are along one axis, or, of windows, along two that both differ: windows and keys.
    ``axis`` comes before the shape that is an axis short.
    """
    theirs = (*axis, *theirs) if len(theirs) < len(ours) else tuple(theirs)
    ours = (*axis, *ours) if len(ours) < len(theirs) else tuple(ours)
    if len(theirs) != len(ours):
        return 0, 1
    axes = [i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b]
    if len(axes) != 1 and not (axis and axes == [0, 2]):
        return 0, 1
    more, fewer = (math.prod(shape[i] for i in axes) for shape in (theirs, ours))
    common = math.gcd(more, fewer)
    return more // common, fewer // common
