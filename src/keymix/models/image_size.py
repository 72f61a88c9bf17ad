# SPDX-License-Identifier: Apache-2.0
"""A trained model takes images of another size, or more or fewer time steps, than in training."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import torch
from torch import nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.hosts.base import find_host, find_mixers
from keymix.mixers.base import Grid
from keymix.mixers.resize import GridBound
from keymix.models.family import MixerModel, check_patches

Policy = Literal["interpolate", "pool_values"]
POLICIES: tuple[str, ...] = get_args(Policy)


def set_image_size(
    model: nn.Module, image_size: int | tuple[int, int], *, resize: str | None = None
) -> None:
    """Let a trained model take another image size, as timm's ``set_input_size`` does.

    Position embeddings are resampled; mixers that hold something per position do as their
    ``resize`` says. It serves timm's own models with mixers too, whose ``set_input_size`` knows no
    mixers. What is refused changes nothing: it is tried on a copy without memory first.

    Args:
        model: The model, changed in place.
        image_size: Side, or height and width, pixels.
        resize: The policy of all mixers that have one, in place of what they were built with.

    Raises:
        UserError: If a mixer, or the model, cannot take the size; with the remedy.
    """
    if resize is not None and resize not in POLICIES:
        raise UserError(f"resize={resize!r} must be one of {', '.join(POLICIES)}")
    size = whole_size("image_size", image_size)
    check_patches(model, size)
    if not hasattr(model, "set_input_size"):
        if getattr(model, "pretrained_cfg", {}).get("fixed_input_size", True):
            raise UserError(
                f"{type(model).__name__} takes one image size: it has no set_input_size"
            )
        if not find_mixers(model):
            return  # a convolutional model slides over any image
    try:
        _take(without_memory(model), size, resize, trial=True)
    except UserError as error:
        serving = _policies_that_serve(model, size)
        if not serving:
            raise
        raise UserError(
            f"{error}. A trained run takes the choice afterwards: --resize {' or '.join(serving)}"
        ) from error
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"{type(model).__name__} cannot take images of {size[0]}x{size[1]}: {why}"
        ) from error
    _take(model, size, resize)


def _take(model: nn.Module, size: Grid, resize: str | None, *, trial: bool = False) -> None:
    """Change policies and size; a model whose mixers get the grid with each call is tried."""
    for mixer in find_mixers(model).values():
        if resize is not None and isinstance(mixer, GridBound):
            mixer.take_policy(resize)  # type: ignore[arg-type] # one of POLICIES
    take: Any = getattr(model, "set_input_size", None)
    if take is not None:
        take(img_size=size)
        update_mixers(model)
    elif trial:
        channels = next(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
        weight = next(model.parameters())
        with torch.no_grad():
            model.eval()(weight.new_zeros(1, channels, *size))


def _policies_that_serve(model: nn.Module, size: Grid) -> list[str]:
    """Return the policies under which the model takes the size."""
    found = []
    for policy in POLICIES:
        try:
            _take(without_memory(model), size, policy, trial=True)
        except (UserError, AssertionError, RuntimeError, TypeError, ValueError):
            continue
        found.append(policy)
    return found


def update_mixers(model: nn.Module) -> None:
    """Update the grids of the mixers in a model of timm's after it took another image size.

    keymix's own models do so themselves; timm's classes know no mixers.
    """
    if find_mixers(model) and not isinstance(model, MixerModel):
        find_host(model).update_grids(model)


def without_memory(model: nn.Module) -> Any:
    """Copy a model without the memory of its weights, to try on it what may be refused."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def take_time_steps(model: nn.Module, time_steps: int) -> None:
    """Let a spiking model take T time steps, 1 or more, from the next call on, or refuse.

    Paper: QKFormer, https://arxiv.org/abs/2403.16552, Table 5 varies T. No weight depends on it.
    """
    change = getattr(model, "set_time_steps", None)
    if change is None:
        raise UserError(
            f"time_steps={time_steps} is for spiking models such as qkformer_micro_32; "
            f"{type(model).__name__} has no time steps. Leave --time-steps out."
        )
    change(time_steps)
