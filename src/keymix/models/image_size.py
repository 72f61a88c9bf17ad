# SPDX-License-Identifier: Apache-2.0
"""A trained model takes images of another size than it was trained on."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import torch
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import find_host, find_mixers
from keymix.mixers.resize import GridBound
from keymix.models.family import MixerModel

Policy = Literal["interpolate", "pool_values"]
POLICIES: tuple[str, ...] = get_args(Policy)


def set_image_size(
    model: nn.Module, image_size: tuple[int, int], *, resize: str | None = None
) -> None:
    """Let a trained model take another image size, as timm's ``set_input_size`` does.

    Position embeddings are resampled; mixers that hold something a position do as their
    ``resize`` says. It serves timm's own models with mixers too, whose ``set_input_size`` knows no
    mixers.

    Args:
        model: The model, changed in place.
        image_size: Height and width, pixels.
        resize: The policy of all mixers that have one, in place of what they were built with.

    Raises:
        UserError: If a mixer, or the model, cannot take the size; with the remedy.
    """
    if resize is not None and resize not in POLICIES:
        raise UserError(f"resize={resize!r} must be one of {', '.join(POLICIES)}")
    mixers = find_mixers(model)
    for mixer in mixers.values():
        if resize is not None and isinstance(mixer, GridBound):
            mixer.resize = resize  # type: ignore[assignment]
    _check_patches(model, image_size)
    take: Any = getattr(model, "set_input_size", None)
    if take is None:
        if getattr(model, "pretrained_cfg", {}).get("fixed_input_size", True):
            raise UserError(
                f"{type(model).__name__} takes one image size: it has no set_input_size"
            )
        if mixers:
            _try(model, image_size)  # they hear of the grid with each call
        return  # a convolutional model slides over any image
    try:
        take(img_size=image_size)
    except UserError as error:
        serving = _policies_that_serve(model, image_size)
        if not serving:
            raise
        raise UserError(
            f"{error}. A trained run takes the choice afterwards: --resize {' or '.join(serving)}"
        ) from error
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"{type(model).__name__} cannot take images of {image_size[0]}x{image_size[1]}: {why}"
        ) from error
    if mixers and not isinstance(model, MixerModel):  # timm's own class knows no mixers
        for place in find_host(model).places(model):
            grid, windows = place.site.grid, place.site.window_grid
            if grid is not None:
                mixers[f"{place.path}.mixer"].set_grid(grid, window_grid=windows)


def _try(model: nn.Module, image_size: tuple[int, int]) -> None:
    """Run one blank image of a size, so that a mixer's refusal comes now."""
    channels = next(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    weight = next(model.parameters())
    training = model.training
    with torch.no_grad():
        model.eval()(weight.new_zeros(1, channels, *image_size))
    model.train(training)


def _policies_that_serve(model: nn.Module, image_size: tuple[int, int]) -> list[str]:
    """Return the policies under which the model takes the size, tried on a copy."""
    found = []
    for policy in POLICIES:
        trial: Any = copy.deepcopy(model)
        for mixer in find_mixers(trial).values():
            if isinstance(mixer, GridBound):
                mixer.resize = policy  # type: ignore[assignment]
        try:
            trial.set_input_size(img_size=image_size)
        except (UserError, AssertionError, RuntimeError, TypeError, ValueError):
            continue
        found.append(policy)
    return found


def _check_patches(model: nn.Module, image_size: tuple[int, int]) -> None:
    """Refuse sides that patches do not fill, where the rest would be dropped unsaid."""
    embed: Any = getattr(model, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)
    if patch is None or getattr(embed, "dynamic_img_pad", False):
        return
    for side, size in zip(image_size, tuple(patch), strict=True):
        if side % size:
            low = side - side % size
            near = f"{low} or {low + size}" if low else f"{size}"
            raise UserError(
                f"images of {image_size[0]}x{image_size[1]}: the model cuts patches of "
                f"{patch[0]}x{patch[1]} pixels, which {side} does not hold in full; take {near}"
            )
