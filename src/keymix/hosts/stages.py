# SPDX-License-Identifier: Apache-2.0
"""Adapters to keymix's models of stages: CvT, and the spiking QKFormer and Spikformer.

The mixer sits at ``stages.<s>.blocks.<i>.attn`` and gets the grid of its tokens at every call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.base import Host, Place, draw_truncated, layout_on
from keymix.hosts.call_grid import CallSize, attach_call_hook, size_of_last_call
from keymix.hosts.hosted import GridMixer
from keymix.layers.cvt_stage import CvTStage, RoleProjections
from keymix.layers.spiking_stage import SpikingStage
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.head_mixer import HeadMixer

Stage = TypeVar("Stage", CvTStage, SpikingStage)


def _stages(model: nn.Module, kind: type[Stage]) -> list[Stage]:
    stages = getattr(model, "stages", None)
    if not isinstance(stages, nn.ModuleList):
        return []
    found = [stage for stage in stages if isinstance(stage, kind)]
    return found if len(found) == len(stages) else []


def cvt_stages(model: nn.Module) -> list[CvTStage]:
    """The stages of a CvT; none if it is another model."""
    return _stages(model, CvTStage)


def spiking_stages(model: nn.Module) -> list[SpikingStage]:
    """The stages of a spiking Transformer; none if it is another model."""
    return _stages(model, SpikingStage)


def cvt_grids(model: nn.Module, image: Grid) -> list[Grid]:
    """Grid of the tokens in every stage, for images of this height and width in pixels."""
    grids, grid = [], image
    for stage in cvt_stages(model):
        grid = stage.patch_embed.grid(grid)
        if min(grid) < 1:
            raise UserError(f"images of {image[0]}x{image[1]} pixels are too small for this CvT")
        grids.append(grid)
    return grids


def spiking_grids(model: nn.Module, image: Grid) -> list[Grid]:
    """Grid of the tokens in every stage, for images of this height and width in pixels."""
    grids, (height, width) = [], image
    for stage in spiking_stages(model):
        height, width = -(-height // stage.reduction), -(-width // stage.reduction)
        grids.append((height, width))
    return grids


class StageHost(Host):
    """A host of models whose stages each have a grid, which follows from the image's size."""

    @abstractmethod
    def first(self, model: nn.Module) -> nn.Module:
        """The module that gets the images."""

    def image(self, model: nn.Module) -> Grid:
        """Height and width of the images it was made for, pixels."""
        owner: Any = model
        return owner.img_size[0], owner.img_size[1]

    @abstractmethod
    def grids(self, model: nn.Module, image: Grid) -> list[Grid]:
        """Grid of the tokens in every stage."""

    def follow_calls(self, model: nn.Module) -> None:
        """Follow the size of the images of every call, from now on."""
        attach_call_hook(self.first(model), CallSize())

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of the model's last call are in the place's stage."""
        size = size_of_last_call(self.first(model)) or self.image(model)
        return layout_on(model, place, self.grids(model, size)[place.stage])


class CvT(StageHost):
    """keymix's own Convolutional vision Transformer.

    Convolutions make each role's tokens. Queries keep the grid, keys and values are on a coarser
    one; a mixer that needs as many keys as tokens, since it has no query, say, or masks the
    diagonal, gets convolutions of stride 1. Mixers that project nothing sit on the plain tokens.
    """

    name = "keymix CvT"

    def serves(self, model: nn.Module) -> bool:
        """Whether all its stages are CvT's."""
        return bool(cvt_stages(model))

    def first(self, model: nn.Module) -> nn.Module:
        """The first stage."""
        return cvt_stages(model)[0]

    def grids(self, model: nn.Module, image: Grid) -> list[Grid]:
        """Grid of the tokens in every stage."""
        return cvt_grids(model, image)

    def places(self, model: nn.Module) -> list[Place]:
        """One place per block."""
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
                zip(cvt_stages(model), cvt_grids(model, self.image(model)), strict=True)
            )
            for i in range(len(stage.blocks))
        ]

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Give a mixer the projections that it can use."""
        if not issubclass(mixer, HeadMixer):
            return replace(place.site, key_grid=None, project=None)
        if mixer.needs_all_keys(options):
            project = place.site.project
            assert isinstance(project, RoleProjections)  # made in places
            return replace(place.site, key_grid=None, project=replace(project, stride=1))
        return place.site

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its linear maps initialised as the backbone's."""
        for linear in mixer.projections:
            draw_truncated(linear)
        before = model.get_submodule(place.path)
        model.set_submodule(place.path, GridMixer(mixer, place).train(before.training))


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


class Spiking(StageHost):
    """keymix's own QKFormer and Spikformer.

    The mixer gets spikes ``[T, B, N, C]``, and makes its neurons as the model does.
    """

    name = "keymix spiking Transformers"

    def serves(self, model: nn.Module) -> bool:
        """Whether all its stages are spiking ones."""
        return bool(spiking_stages(model))

    def first(self, model: nn.Module) -> nn.Module:
        """The first stage."""
        return spiking_stages(model)[0]

    def grids(self, model: nn.Module, image: Grid) -> list[Grid]:
        """Grid of the tokens in every stage."""
        return spiking_grids(model, image)

    def places(self, model: nn.Module) -> list[Place]:
        """One place per block."""
        return [
            Place(
                path=f"stages.{s}.blocks.{i}.attn",
                stage=s,
                site=Site(dim=stage.dim, num_heads=stage.num_heads, grid=grid, neuron=stage.neuron),
                defaults={"qkv_bias": stage.qkv_bias},
                domain="spiking",
            )
            for s, (stage, grid) in enumerate(
                zip(spiking_stages(model), spiking_grids(model, self.image(model)), strict=True)
            )
            for i in range(len(stage.blocks))
        ]

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its linear maps as PyTorch starts them, as the backbone's are."""
        before = model.get_submodule(place.path)
        model.set_submodule(place.path, GridMixer(mixer, place).train(before.training))


HOSTS = (CvT(), Spiking())
