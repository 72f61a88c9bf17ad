# SPDX-License-Identifier: Apache-2.0
"""Adapter to keymix's spiking Transformers: the mixer sits at ``stages.<s>.blocks.<i>.attn``.

It is handed spikes ``[T, B, N, C]`` and their grid, and makes its neurons as the model does.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from keymix.hosts.base import Host, Place, laid_out
from keymix.hosts.call_grid import CallSize, call_size, heard_by
from keymix.hosts.grid_mixer import GridMixer
from keymix.hosts.reading import Layout
from keymix.layers.spiking_stage import SpikingStage
from keymix.mixers.base import Grid, Site, TokenMixer


def spiking_grids(model: nn.Module, image: Grid) -> list[Grid]:
    """Grid of the tokens in every stage, for images of this height and width in pixels."""
    grids, (height, width) = [], image
    for stage in spiking_stages(model):
        height, width = -(-height // stage.reduction), -(-width // stage.reduction)
        grids.append((height, width))
    return grids


def spiking_stages(model: nn.Module) -> list[SpikingStage]:
    """The stages of a spiking Transformer; none if it is another model."""
    stages = getattr(model, "stages", None)
    if not isinstance(stages, nn.ModuleList):
        return []
    found = [stage for stage in stages if isinstance(stage, SpikingStage)]
    return found if len(found) == len(stages) else []


class Spiking(Host):
    """keymix's own QKFormer and Spikformer."""

    name = "keymix spiking Transformers"

    def serves(self, model: nn.Module) -> bool:
        """Whether all its stages are spiking ones."""
        return bool(spiking_stages(model))

    def places(self, model: nn.Module) -> list[Place]:
        """One place a block."""
        image: Any = model.img_size
        return [
            Place(
                path=f"stages.{s}.blocks.{i}.attn",
                stage=s,
                site=Site(dim=stage.dim, num_heads=stage.num_heads, grid=grid, neuron=stage.neuron),
                defaults={"qkv_bias": stage.qkv_bias},
                domain="spiking",
            )
            for s, (stage, grid) in enumerate(
                zip(spiking_stages(model), spiking_grids(model, image), strict=True)
            )
            for i in range(len(stage.blocks))
        ]

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its linear maps as PyTorch starts them, as the backbone's are."""
        before = model.get_submodule(place.path)
        model.set_submodule(place.path, GridMixer(mixer, place).train(before.training))

    def listen(self, model: nn.Module) -> None:
        """Hear the size of the images of every call, from now on."""
        call_size(spiking_stages(model)[0])

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of the model's last call lie in the place's stage."""
        heard = heard_by(spiking_stages(model)[0], CallSize)
        owner: Any = model
        size = heard.size if heard is not None else None
        return laid_out(model, place, spiking_grids(model, size or owner.img_size)[place.stage])


HOST = Spiking()
