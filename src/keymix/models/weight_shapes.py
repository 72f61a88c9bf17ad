# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint in the shapes of a model: layouts, grids, whole mixers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import Grid, TokenMixer


def pointwise(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Turn a 1x1 convolution's weight into a linear map's or back, if that gives ``shape``."""
    linear, convolution = sorted((tensor.shape, shape), key=len)
    if len(linear) == 2 and convolution == (*linear, 1, 1):
        return tensor.reshape(shape)
    return tensor


def square_like(count: int, like: Grid) -> Grid | None:
    """Return the grid of so many tokens: ``like`` itself, a square, or one of its proportions.

    None if there is none in whole numbers.

    Args:
        count: Tokens.
        like: The model's grid.
    """
    if count == math.prod(like):
        return like
    height = math.isqrt(max(count, 0))
    if height and height * height == count:
        return height, height
    height = math.isqrt(max(count, 0) * like[0] // like[1])
    width = count // height if height else 0
    return (height, width) if width * height == count and width else None


def adapted_mixer(mixer: TokenMixer, state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, bool]]:
    """Fit the tensors that a checkpoint has at a mixer's place to the mixer, or refuse them all.

    They are the mixer's if all its projections are among them (all it has, if it has none) and
    none is left over or of another shape, after learned keys were resampled.

    Args:
        mixer: The mixer.
        state: The checkpoint's tensors by their names in the mixer.

    Returns:
        Name to tensor and whether it was resampled; empty if they are another mixer's.
    """
    own = mixer.state_dict()
    linears = {id(linear.weight) for linear in mixer.projections}
    weights = {name for name, p in mixer.named_parameters() if id(p) in linears}
    if not state or not (weights or own.keys()) <= state.keys() or not state.keys() <= own.keys():
        return {}
    shaped = {name: pointwise(tensor, own[name].shape) for name, tensor in state.items()}
    wrong = [name for name, tensor in shaped.items() if tensor.shape != own[name].shape]
    if wrong:
        shaped = _on_this_grid(mixer, shaped, own, wrong)
    if any(tensor.shape != own[name].shape for name, tensor in shaped.items()):
        return {}
    return {name: (tensor, name in wrong) for name, tensor in shaped.items()}


def _on_this_grid(
    mixer: TokenMixer, state: dict[str, Tensor], own: Mapping[str, Tensor], wrong: list[str]
) -> dict[str, Tensor]:
    """Resample what is learned a position, as far as the shapes tell where it lay."""
    site = mixer.site
    axis = (1,) if site.own_windows else ()  # of windows, which the keys of one window lack
    ratios = {_ratio(state[name].shape, own[name].shape, axis) for name in wrong}
    home = site.key_grid or site.grid
    if len(ratios) != 1 or home is None:
        return state
    theirs, ours = ratios.pop()
    keys, windows = home, site.window_grid
    if site.own_windows and windows is not None:
        found = square_like(site.windows * theirs // max(ours, 1), windows)
        windows = found
    else:
        found = square_like(site.num_keys * theirs // max(ours, 1) - site.num_prefix_tokens, home)
        keys = found or home
    if found is None:
        return state
    try:
        return mixer.adapt_state(state, site.grid or keys, key_grid=keys, window_grid=windows)
    except UserError:  # shapes of something else than positions
        return state


def _ratio(
    theirs: Sequence[int], ours: Sequence[int], axis: tuple[int, ...] = ()
) -> tuple[int, int]:
    """Return how many times longer the one axis is that differs, as a fraction; 0 if not one.

    Args:
        theirs: Shape in the checkpoint.
        ours: Shape in the model.
        axis: What stands before the shape that is an axis short.
    """
    theirs = (*axis, *theirs) if len(theirs) < len(ours) else tuple(theirs)
    ours = (*axis, *ours) if len(ours) < len(theirs) else tuple(ours)
    if len(theirs) != len(ours):
        return 0, 1
    axes = [(a, b) for a, b in zip(theirs, ours, strict=True) if a != b]
    if len(axes) != 1:
        return 0, 1
    common = math.gcd(*axes[0])
    return axes[0][0] // common, axes[0][1] // common
