# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's MetaFormer: the mixer sits at ``stages.<s>.blocks.<i>.token_mixer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from timm.layers import trunc_normal_
from timm.models.metaformer import Attention, MetaFormer
from torch import Tensor, nn

from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.base import Host, Place, laid_out
from keymix.hosts.call_grid import CallSize, call_size, heard_by
from keymix.hosts.grid_mixer import GridMixer
from keymix.hosts.metaformer_block import grid_blocks, why_not
from keymix.hosts.plain import UNKNOWN, patched
from keymix.hosts.reading import Layout, Reading
from keymix.hosts.timm_heads import own_weights, read_call
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer

HEAD_DIM = 32  # width of a head in CAFormer

# the family's own mixers: MetaFormer Baselines, https://arxiv.org/abs/2210.13452, Sec. 3
FORMS: dict[str, dict[str, Any]] = {
    "sep_conv": {"kernel_size": 7, "expansion": 2.0, "act": "star_relu", "conv_bias": False},
}


@dataclass(frozen=True, kw_only=True)
class BlockPlace(Place):
    """A place in a block.

    Attributes:
        refused: Why the block cannot take a mixer that works on images (True), on tokens (False);
            empty where it can.
    """

    refused: Mapping[bool, str] = field(default_factory=dict)


class TimmMetaFormer(Host):
    """timm's MetaFormer: PoolFormer, ConvFormer, CAFormer.

    A block whose mixer forms a map works on tokens, any other on images, as timm has it of its
    attention; where a part has no other form (PoolFormer's norms), as the block does already.
    """

    name = "timm MetaFormer"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class."""
        return isinstance(model, MetaFormer)

    def places(self, model: nn.Module) -> list[Place]:
        """One place a block."""
        if not isinstance(model, MetaFormer):
            raise UserError(f"{type(model).__name__} is not timm's MetaFormer")
        return [
            _place(s, i, grid, model)
            for s, (stage, grid) in enumerate(
                zip(model.stages, stage_grids(model, image_size(model)), strict=True)
            )
            for i in range(len(stage.blocks))
        ]

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Return the place's site; refuse a block that would lose what somebody put there."""
        use_nchw = _on_images(mixer)
        if isinstance(place, BlockPlace) and use_nchw in place.refused:
            raise UserError(place.refused[use_nchw])
        return place.site

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its linear maps initialised as timm initialises the model's."""
        mine = mixer.modules() if mixer.mixer_name in FORMS else mixer.projections
        for part in mine:
            if isinstance(part, nn.Linear | nn.Conv2d):
                trunc_normal_(part.weight, std=0.02)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        stage_path, _, index = place.path.removesuffix(".token_mixer").rpartition(".blocks.")
        stage: Any = model.get_submodule(stage_path)
        block = grid_blocks(stage, int(index))
        block.token_mixer = GridMixer(mixer, place).train(block.training)
        block.set_layout(use_nchw=_on_images(type(mixer)))

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what attention makes of a call.

        Raises:
            NoAttentionMap: If a convolution or pooling sits there.
        """
        _check(attention)
        return read_call(attention, args, kwargs)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the own projections of attention, by their role in a mixer.

        Raises:
            NoAttentionMap: If a convolution or pooling sits there, which has none.
        """
        _check(attention)
        return own_weights(attention)

    def listen(self, model: nn.Module) -> None:
        """Hear the size of the images of every call, from now on."""
        call_size(_stem(model))

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of the model's last call lie in the place's stage."""
        heard = heard_by(_stem(model), CallSize)
        size = heard.size if heard is not None else None
        return laid_out(model, place, stage_grids(model, size or image_size(model))[place.stage])


def _stem(model: nn.Module) -> nn.Module:
    return model.get_submodule("stem")


def _check(mixer: nn.Module) -> None:
    """Refuse what is not attention as timm computes it."""
    name = type(mixer).__name__
    if not isinstance(mixer, Attention):
        raise NoAttentionMap(f"{name} of timm's MetaFormer is no attention: it forms no map")
    if patched(mixer):
        raise UserError(f"the forward of timm's MetaFormer's {name} was replaced: {UNKNOWN}")


def image_size(model: nn.Module) -> Grid:
    """Height and width in pixels of the images a MetaFormer is made for.

    Ours know; timm's say it in their ``pretrained_cfg``, and are 224x224 where they have none.
    """
    known: Any = getattr(model, "img_size", None)
    if known is None:
        described: Any = getattr(model, "pretrained_cfg", None) or {}
        known = described.get("input_size", (3, 224, 224))[-2:]
    return known[0], known[1]


def stage_grids(model: nn.Module, image: Grid) -> list[Grid]:
    """Grid of every stage, for images of this height and width in pixels.

    Raises:
        UserError: If the image is too small for the convolutions.
    """
    assert isinstance(model, MetaFormer)
    grids, grid = [], _after(model.stem.conv, image)
    for stage in model.stages:
        conv = getattr(stage.downsample, "conv", None)
        grid = _after(conv, grid) if conv is not None else grid
        if min(grid) < 1:
            raise UserError(
                f"images of {image[0]}x{image[1]} pixels are too small for this MetaFormer"
            )
        grids.append(grid)
    return grids


def _after(conv: Any, grid: Grid) -> Grid:
    """Grid that a convolution makes of another."""
    sides = [
        (side + 2 * conv.padding[axis] - conv.kernel_size[axis]) // conv.stride[axis] + 1
        for axis, side in enumerate(grid)
    ]
    return sides[0], sides[1]


def _on_images(mixer: type[TokenMixer]) -> bool:
    """Whether a block with such a mixer works on images; with a map it works on tokens."""
    return not issubclass(mixer, MapMixer)


def _place(s: int, i: int, grid: Grid, model: MetaFormer) -> Place:
    stage: Any = model.stages[s]
    block: Any = stage.blocks[i]
    mixer = block.token_mixer
    reasons = {
        on_images: why_not(stage, f"stages.{s}", i, use_nchw=on_images)
        for on_images in (True, False)
    }
    refused = {layout: reason for layout, reason in reasons.items() if reason is not None}
    if isinstance(mixer, GridMixer):
        before = mixer.place
        site = replace(before.site, grid=grid)
        return BlockPlace(**{**vars(before), "site": site, "refused": refused})
    dim = len(block.norm1.weight)
    if isinstance(mixer, Attention):
        heads, defaults = mixer.num_heads, _of_attention(mixer)
    else:
        head_dim = getattr(model, "head_dim", HEAD_DIM)
        heads = max(dim // head_dim, 1)
        defaults = {
            "head_dim": head_dim,
            "qkv_bias": False,
            "proj_bias": False,
            "attn_drop": getattr(model, "attn_drop_rate", 0.0),
            "proj_drop": block.mlp.drop1.p,
        }
    return BlockPlace(
        path=f"stages.{s}.blocks.{i}.token_mixer",
        stage=s,
        site=Site(dim=dim, num_heads=heads, grid=grid),
        defaults=defaults,
        forms=FORMS,
        refused=refused,
    )


def _of_attention(attention: Attention) -> Mapping[str, Any]:
    return {
        "head_dim": attention.head_dim,
        "qkv_bias": attention.qkv.bias is not None,
        "proj_bias": attention.proj.bias is not None,
        "attn_drop": attention.attn_drop.p,
        "proj_drop": attention.proj_drop.p,
    }


HOST = TimmMetaFormer()
