# SPDX-License-Identifier: Apache-2.0
"""What families share in taking another image size: all mixers are asked before any changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import find_host, find_mixers
from keymix.layers.patches import patch_grid, whole_size
from keymix.mixers.base import Grid
from keymix.models.family import MixerModel


def check_patches(model: nn.Module, size: Grid | None = None) -> None:
    """Refuse an image size that a model's patches do not fill, unless it pads them.

    The size that a model of timm's was published for is never refused.

    Args:
        model: Any model; those that do not cut patches take all sizes.
        size: Height and width, pixels; the model's own if None.

    Raises:
        UserError: With the nearest sizes.
    """
    embed: Any = getattr(model, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.img_size is None:
        return
    size = (embed.img_size[0], embed.img_size[1]) if size is None else size
    published = getattr(model, "pretrained_cfg", {}).get("input_size", (0,))[1:]
    if size != tuple(published):
        patch_grid(size, embed.patch_size, padded=embed.dynamic_img_pad)


def grid_of(embed: Any, img_size: Any, patch_size: Any) -> Grid:
    """Return the grid that a patch embedding would have after ``set_input_size``.

    Args:
        embed: timm's patch embedding.
        img_size: Side, or height and width, in pixels; as it is if None.
        patch_size: Side, or height and width, of a patch in pixels; as it is if None.

    Raises:
        UserError: If one is no size, or patches do not fill the image.
    """
    size, patch = embed.img_size, embed.patch_size
    size = size if img_size is None else whole_size("img_size", img_size)
    patch = patch if patch_size is None else whole_size("patch_size", patch_size)
    return patch_grid(size, patch, padded=embed.dynamic_img_pad)


def refuse_unfit(reasons: Mapping[str, str | None]) -> None:
    """Refuse another image size where mixers have a reason against it.

    Args:
        reasons: Path of a mixer to what its ``refuses_grid`` said.

    Raises:
        UserError: With the first reason, its path, and how many more mixers have one.
    """
    against = {path: reason for path, reason in reasons.items() if reason is not None}
    if against:
        path, reason = next(iter(against.items()))
        more = f" (and {len(against) - 1} more)" if len(against) > 1 else ""
        raise UserError(f"{path}{more}: {reason}")


def asked_grid(model: Any, img_size: Any, patch_size: Any) -> Grid:
    """Return the grid of patches at another size, after asking all mixers of a model.

    Args:
        model: A model of one stage.
        img_size: As :func:`grid_of` takes it.
        patch_size: As :func:`grid_of` takes it.

    Raises:
        UserError: If a mixer cannot take the grid; it names the mixer and the remedy.
    """
    grid = grid_of(model.patch_embed, img_size, patch_size)
    mixers = find_mixers(model)
    refuse_unfit({path: mixer.refuses_grid(grid) for path, mixer in mixers.items()})
    return grid


def take_input_size(
    model: nn.Module, img_size: int | Grid | None, grids_of: Callable[[nn.Module, Grid], list[Grid]]
) -> None:
    """Change the image size of a model that has an ``img_size`` and a grid a stage.

    Args:
        model: The model, its mixers at ``stages.<s>.…``.
        img_size: Side, or height and width, in pixels; as it is if None.
        grids_of: Says the grid of every stage, for images of a height and width.

    Raises:
        UserError: If it is no size, or a mixer cannot take its new grid; it names the mixer and
            the remedy, and nothing has changed.
    """
    if img_size is None:
        return
    size = whole_size("img_size", img_size)
    grids = grids_of(model, size)
    changes = []
    for path, mixer in find_mixers(model).items():
        grid = grids[int(path.split(".")[1])]
        changes.append((path, mixer, grid, mixer.site.key_grid_on(grid)))
    refuse_unfit({path: mixer.refuses_grid(to, key_grid=keys) for path, mixer, to, keys in changes})
    for _, mixer, to, keys in changes:
        mixer.set_grid(to, key_grid=keys)
    owner: Any = model
    owner.img_size = size
    record_input_size(model, size)


def tell_mixers(model: nn.Module) -> None:
    """Tell the mixers in a model of timm's where they sit after it took another image size.

    keymix's own models do so themselves; timm's classes know no mixers.

    Raises:
        UserError: If a mixer cannot take its new grid.
    """
    if find_mixers(model) and not isinstance(model, MixerModel):
        find_host(model).tell(model)


def without_memory(model: nn.Module) -> Any:
    """Copy a model without the memory of its weights, to try on it what may be refused."""
    memo: dict[int, Any] = {}
    for held in model.parameters():
        memo[id(held)] = nn.Parameter(torch.empty_like(held, device="meta"), held.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def record_input_size(model: nn.Module, img_size: Grid, **arguments: Any) -> None:
    """Let timm know the present size, for what it writes about the model on export.

    Args:
        model: The model.
        img_size: Height and width in pixels.
        arguments: The model's other arguments that changed with it.
    """
    from timm.models._input import update_model_input_size

    update_model_input_size(model, img_size, **arguments)
