# SPDX-License-Identifier: Apache-2.0
"""Adapter to keymix's CvT: the mixer sits at ``stages.<s>.blocks.<i>.attn``.

Convolutions make each role's tokens. Queries keep the grid, keys and values lie on a coarser one;
a mixer that needs as many keys as tokens, since it has no query or masks the diagonal, gets
convolutions of stride 1. Mixers that project nothing sit on the plain tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from timm.layers import trunc_normal_
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import Host, Place, laid_out
from keymix.hosts.call_grid import CallSize, call_size, heard_by
from keymix.hosts.grid_mixer import GridMixer
from keymix.hosts.reading import Layout
from keymix.layers.cvt_stage import CvTStage, RoleProjections
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer


def stage_grids(model: nn.Module, image: Grid) -> list[Grid]:
    """Grid of the tokens in every stage, for images of this height and width in pixels.

    Raises:
        UserError: If the image is too small for the convolutions.
    """
    grids, grid = [], image
    for stage in stages_of(model):
        grid = stage.patch_embed.grid(grid)
        if min(grid) < 1:
            raise UserError(f"images of {image[0]}x{image[1]} pixels are too small for this CvT")
        grids.append(grid)
    return grids


def stages_of(model: nn.Module) -> list[CvTStage]:
    """The stages of a CvT; none if it is another model."""
    stages = getattr(model, "stages", None)
    if not isinstance(stages, nn.ModuleList):
        return []
    found = [stage for stage in stages if isinstance(stage, CvTStage)]
    return found if len(found) == len(stages) else []


class CvT(Host):
    """keymix's own Convolutional vision Transformer."""

    name = "keymix CvT"

    def serves(self, model: nn.Module) -> bool:
        """Whether all its stages are CvT's."""
        return bool(stages_of(model))

    def places(self, model: nn.Module) -> list[Place]:
        """One place a block."""
        image: Any = model.img_size
        return [
            Place(
                path=f"stages.{s}.blocks.{i}.attn",
                stage=s,
                site=_site(stage, grid),
                defaults={
                    "qkv_bias": stage.qkv_bias,
                    "attn_drop": stage.attn_drop,
                    "proj_drop": stage.proj_drop,
                },
            )
            for s, (stage, grid) in enumerate(
                zip(stages_of(model), stage_grids(model, image), strict=True)
            )
            for i in range(len(stage.blocks))
        ]

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Give a mixer the projections that it can use."""
        if not issubclass(mixer, MapMixer):
            return replace(place.site, key_grid=None, project=None)
        if "q" not in mixer.roles or options.get("mask_diagonal"):
            project = place.site.project
            assert isinstance(project, RoleProjections)  # made in places
            return replace(place.site, key_grid=None, project=replace(project, stride=1))
        return place.site

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its linear maps initialised as the backbone's."""
        for linear in mixer.projections:
            trunc_normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        before = model.get_submodule(place.path)
        model.set_submodule(place.path, GridMixer(mixer, place).train(before.training))

    def listen(self, model: nn.Module) -> None:
        """Hear the size of the images of every call, from now on."""
        call_size(stages_of(model)[0])

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of the model's last call lie in the place's stage."""
        heard = heard_by(stages_of(model)[0], CallSize)
        owner: Any = model
        size = heard.size if heard is not None else None
        grid = stage_grids(model, size or owner.img_size)[place.stage]
        return laid_out(model, place, grid)


def _site(stage: CvTStage, grid: Grid) -> Site:
    weight = stage.patch_embed.proj.weight
    return Site(
        dim=stage.dim,
        num_heads=stage.num_heads,
        grid=grid,
        key_grid=(-(-grid[0] // stage.kv_stride), -(-grid[1] // stage.kv_stride)),
        num_prefix_tokens=stage.num_prefix_tokens,
        project=RoleProjections(
            stage.dim, stage.kv_stride, stage.num_prefix_tokens, weight.device, weight.dtype
        ),
    )


HOST = CvT()
