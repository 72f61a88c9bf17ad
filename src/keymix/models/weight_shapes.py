# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint in the shapes of a model: layouts, grids, whole mixers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import Grid, TokenMixer
from keymix.models.weight_grids import Geometry


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

    They are the mixer's if all its projections are among them (all it has, if it has none) and
    none is left over or of another shape, after learned keys were resampled.

    Args:
        mixer: The mixer.
        state: The checkpoint's tensors by their names in the mixer.
        path: The mixer's path in its model.
        geometry: What is known of the checkpoint's grids.
        window: Sides of the checkpoint's windows, where its table of relative positions tells.

    Returns:
        Name to tensor and whether it was resampled; empty if they are another mixer's.

    Raises:
        UserError: If nothing tells the grid of its keys, or they cannot leave it.
    """
    # what it may hold besides counts as its own
    own = {name: getattr(mixer, name) for name in mixer.optional_state} | mixer.state_dict()
    linears = {id(linear.weight) for linear in mixer.projections}
    weights = {name for name, p in mixer.named_parameters() if id(p) in linears}
    if not state or not (weights or own.keys()) <= state.keys() or not state.keys() <= own.keys():
        return {}
    shaped = {name: pointwise(tensor, own[name].shape) for name, tensor in state.items()}
    try:
        moved = _on_this_grid(mixer, shaped, own, _Lay(path, geometry, window))
    except UserError as error:
        raise UserError(f"{path} ({mixer.mixer_name}) {error}") from None
    if any(tensor.shape != own[name].shape for name, tensor in moved.items()):
        return {}
    return {name: (tensor, tensor is not shaped.get(name)) for name, tensor in moved.items()}


@dataclass(frozen=True)
class _Lay:
    """Where a checkpoint's keys may lie: the mixer's path, the grids known, its windows' sides."""

    path: str
    geometry: Geometry
    window: Grid | None


def _on_this_grid(
    mixer: TokenMixer, state: dict[str, Tensor], own: Mapping[str, Tensor], lay: _Lay
) -> dict[str, Tensor]:
    """Resample what is learned a position, as far as shapes fit it; empty where it cannot be."""
    home = mixer.site.key_grid or mixer.site.grid
    laid, implied = state.keys() & set(mixer.grid_parameters), mixer.optional_state - state.keys()
    wrong = {name for name, tensor in state.items() if tensor.shape != own[name].shape}
    if home is None or not wrong <= laid:
        return state
    keys: Grid
    windows: Grid | None = None
    if implied and not laid:  # by the grid itself, which no shape tells
        keys = lay.window or lay.geometry.keys(lay.path) or home
    elif not laid:
        whole = mixer.tied_to_grid and not mixer.grid_parameters  # a map of all positions
        there = lay.geometry.keys(lay.path)
        fits = not whole or lay.geometry.resolve(math.prod(home), home, there) == home
        return state if fits else {}
    else:
        axis = (1,) if mixer.site.own_windows else ()  # of windows, which one window's keys lack
        ratios = {_ratio(state[name].shape, own[name].shape, axis) for name in wrong} or {(1, 1)}
        if len(ratios) != 1 or ratios == {(0, 1)}:  # shapes of something else than positions
            return state
        keys, windows = _lain(mixer, home, ratios.pop(), lay)
    if keys == home and windows in (None, mixer.site.window_grid):
        return state
    if mixer.keeps_grid:
        raise _kept(mixer, home, _told(keys, windows), windows)
    try:
        there = mixer.site.grid or keys
        return mixer.adapt_state(state, there, key_grid=keys, window_grid=windows)
    except UserError:
        return state


def _kept(mixer: TokenMixer, home: Grid, theirs: str, windows: Grid | None = None) -> UserError:
    return UserError(
        f"keeps what it learned on the grid of its training (resize='pool_values'): theirs on "
        f"{theirs}, the model's on {_told(home, windows and mixer.site.window_grid)}; build the "
        "model at the image size of the training, load, then call set_input_size, or take "
        "resize='interpolate'"
    )


def _told(keys: Grid, windows: Grid | None) -> str:
    grid = f"{keys[0]}x{keys[1]}"
    return grid if windows is None else f"{grid} in each of {windows[0]}x{windows[1]} windows"


def _lain(
    mixer: TokenMixer, home: Grid, ratio: tuple[int, int], lay: _Lay
) -> tuple[Grid, Grid | None]:
    """Return the grid of a checkpoint's keys, and how windows with keys of their own lay."""
    site, geometry = mixer.site, lay.geometry
    theirs, ours = ratio
    if site.own_windows and site.window_grid is not None:
        keys = lay.window or home
        number = site.windows * math.prod(home) * theirs // (ours * math.prod(keys))
        there = geometry.windows(lay.path, keys)
        return keys, geometry.resolve(number, site.window_grid, there)
    count = site.num_keys * theirs // ours - site.num_prefix_tokens
    there = geometry.keys(lay.path)
    if mixer.keeps_grid and there is not None and count != math.prod(there):
        if count == math.prod(home):  # built like this one, it took the other size afterwards
            return home, None
        raise _kept(mixer, home, f"one of {count} positions")
    return geometry.resolve(count, home, there), None


def _ratio(
    theirs: Sequence[int], ours: Sequence[int], axis: tuple[int, ...] = ()
) -> tuple[int, int]:
    """Return how many times more positions there are, as a fraction; 0 if shapes tell otherwise.

    Positions are along one axis, or, of windows, along two that both differ: windows and keys.

    Args:
        theirs: Shape in the checkpoint.
        ours: Shape in the model.
        axis: What stands before the shape that is an axis short.
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
