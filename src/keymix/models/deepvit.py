# SPDX-License-Identifier: Apache-2.0
"""DeepViT: vision transformers of 12 to 32 blocks, with re-attention in the last of them.

Paper: DeepViT, https://arxiv.org/abs/2103.11886. The ablations (Tables 1, 2 and 4, Fig. 1): width
384, 12 heads, MLP ratio 3, patch 16 on 224x224 images; ``deepvit_12b`` and so on have re-attention
in every block. DeepViT-S and -L (Table 7): a stem of three convolutions and re-attention in the
last 5 of 16 and 12 of 32 blocks; -L is 408 wide in Sec. 5.4 and 420 in Table 7, and both are there.
Widths 256 and 512 do not divide into 12 heads, so those two have 8 (parameters are the same).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from jaxtyping import Float
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Block, checkpoint_filter_fn
from torch import Tensor

from keymix.errors import UserError
from keymix.hosts.base import MixerNames, MixerOptions, find_host
from keymix.layers.checkpoint import checkpointed
from keymix.layers.patches import ConvStem
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import mixer_options as options_of
from keymix.mixers.shared_map import SharedMapAttention
from keymix.mixers.spec import spec_of
from keymix.models.family import (
    Row,
    register_variants,
)
from keymix.models.vit import MixerVisionTransformer


class DeepBlock(Block):
    """timm's block, whose branches may be scaled and whose mixer may be handed a map.

    Both branches are ``x + branch(s x) / s`` with s the ``residual_scale``.
    """

    def __init__(self, *args: Any, residual_scale: float = 1.0, **timm: Any) -> None:
        super().__init__(*args, **timm)
        self.residual_scale = residual_scale

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens, by the map ``shared`` if there is one, then transform each."""
        s = self.residual_scale
        tokens = self.norm1(x if s == 1 else s * x)
        if shared is None:
            mixed = self.attn(tokens, attn_mask=attn_mask, is_causal=is_causal)
        else:
            mixed = self.attn.mixer(tokens, grid=self.attn.grid_of(tokens), source=shared)
        mixed = self.drop_path1(self.ls1(mixed))
        x = x + (mixed if s == 1 else mixed / s)
        changed = self.drop_path2(self.ls2(self.mlp(self.norm2(x if s == 1 else s * x))))
        out: Tensor = x + (changed if s == 1 else changed / s)
        return out

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention map (after the softmax) that the block forms of its input."""
        s = self.residual_scale
        tokens = self.norm1(x if s == 1 else s * x)
        maps: Tensor = self.attn.mixer.attention_map(tokens, grid=self.attn.grid_of(tokens))
        return maps


class DeepVisionTransformer(MixerVisionTransformer):
    """A ViT with the means of DeepViT's comparisons, a mixer at ``blocks.<i>.attn.mixer``.

    Args:
        mixer: One name, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as the mixers.
        mixer_defaults: Options of the family for those mixers that know them.
        last_mixer: Another mixer for the last blocks, where ``mixer`` is one name.
        last_blocks: How many blocks have it (K in Fig. 9); all if None, or if a variant's number
            is above the depth that it is given.
        conv_stem: Embed patches by three convolutions (Sec. 5.4).
        residual_scale: Factor s of the input of both branches of a block, undone at their output:
            ``x + branch(s x) / s``. The published code of DeepViT-S and -L has 0.5, the paper
            does not mention it.
        temperature_decay: Temperature tau of the first and the last block's softmax, linear over
            the blocks between (Table 5, "linearly decayed"; the paper gives no numbers). A
            ``temperature`` in ``mixer_options`` goes before it, and it before one in
            ``mixer_defaults``.
        shared_from: Blocks from this one on, counted from 0, have no queries and keys: they take
            the map of the block before it, each through its own mixing and norm (Eq. 5; Table 3's
            11 of 24 and 15 of 32 shared blocks are 13 and 17). Their mixers are no longer those
            named above, but take over their ``head_dim``, ``qkv_bias``, ``proj_bias``,
            ``attn_drop``, ``proj_drop`` and ``norm`` (for a norm, name ``re_attention`` there with
            ``last_mixer``). ``num_heads`` and what else shapes a map (``temperature``, ``scale``,
            ``mask_diagonal``, …) is as in the block whose map they take; Θ has its bias and no
            ``map_scale``.
        timm: Arguments of timm's VisionTransformer.

    Raises:
        UserError: If a value is out of range, a mixer has no temperature to decay, or the block
            whose map is to be shared has none.
    """

    blocks: Any  # timm's, as the next five
    norm: Any
    norm_pre: Any
    patch_drop: Any
    _pos_embed: Any
    num_prefix_tokens: int

    def __init__(
        self,
        *,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        mixer_defaults: dict[str, Any] | None = None,
        last_mixer: str | None = None,
        last_blocks: int | None = None,
        conv_stem: bool = False,
        residual_scale: float = 1.0,
        temperature_decay: Sequence[float] | None = None,
        shared_from: int | None = None,
        **timm: Any,
    ) -> None:
        depth = timm.get("depth", 12)
        names = _names(mixer, last_mixer, last_blocks, depth)
        family = [dict(mixer_defaults or {}) for _ in range(depth)]
        if temperature_decay is not None:
            given = spec_of(names, mixer_options)
            if all("temperature" in dict(pairs) for pairs in given.options):
                raise UserError(
                    f"{temperature_decay=} and the mixer option temperature set the same; give one"
                )
            decay = _temperatures(temperature_decay, names, depth)
            family = [{**common, **one} for common, one in zip(family, decay, strict=True)]
        if conv_stem:
            timm["embed_layer"] = ConvStem
        timm["block_fn"] = partial(DeepBlock, residual_scale=residual_scale)
        timm["mixer_defaults"] = family
        super().__init__(mixer=names, mixer_options=mixer_options, **timm)
        self.shared_from = shared_from
        if shared_from is not None:
            own = [dict(pairs) for pairs in spec_of(names, mixer_options).options]
            self._share(shared_from, family, own if len(own) > 1 else own * len(self.blocks))

    def _share(self, first: int, family: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
        """Let blocks from ``first`` on take the map of the block before it.

        ``family`` has options of each block for any mixer that knows them, ``own`` those of its
        mixer.
        """
        depth = len(self.blocks)
        if not 0 < first < depth:
            raise UserError(f"shared_from={first!r} must be a block from 1 to {depth - 1}")
        source = self.blocks[first - 1].attn.mixer
        if not isinstance(source, MapMixer):
            raise UserError(
                f"shared_from={first} shares the map of block {first - 1}, whose mixer "
                f"{source.mixer_name!r} forms none; choose a mixer with an attention map"
            )
        host = find_host(self)
        known = signature(SharedMapAttention).parameters.keys()
        for place, common, mine in [*zip(host.places(self), family, own, strict=True)][first:]:
            site = replace(place.site, num_heads=source.num_heads)
            wanted = {"head_dim": source.head_dim, **place.defaults, **common, **mine}
            options = {k: v for k, v in wanted.items() if k in known} | source.factory
            options["key_grid"] = source.key_grid if source.keeps_grid else None
            host.put(self, place, SharedMapAttention(site, **options))

    def _embed(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        return tokens

    def _through(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        *,
        blocks: int | None = None,
        keep: Collection[int] = (),
    ) -> list[Tensor]:
        """Run the first blocks, all if None, and hand the shared map on from one to the next.

        Returned are the tokens after each block of ``keep``, and then those after the last.
        """
        if self.shared_from is not None and (attn_mask is not None or is_causal):
            raise UserError("blocks that share a map take no attention mask: their norm undoes it")
        shared: Tensor | None = None
        kept = []
        for i, block in enumerate(self.blocks[:blocks]):
            run = partial(checkpointed, block) if self.grad_checkpointing else block
            source, x = x, run(x, attn_mask, is_causal, shared)
            if i + 1 == self.shared_from:
                shared = block.attention_map(source)
            if i in keep:
                kept.append(x)
        return [*kept, x]

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Float[Tensor, "B N C"]:
        """Return the normalised tokens after the last block, as timm's."""
        out: Tensor = self.norm(self._through(self._embed(x), attn_mask, is_causal)[-1])
        return out

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Return the tokens after some blocks too, as timm's; the arguments are timm's."""
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"{output_fmt=} must be 'NCHW' or 'NLC'")
        taken, last = feature_take_indices(len(self.blocks), indices)
        blocks = last + 1 if stop_early else None
        *passed, final = self._through(
            self._embed(x), attn_mask, is_causal, blocks=blocks, keep=taken
        )
        kept = [self.norm(tokens) if norm else tokens for tokens in passed]
        prefix = [tokens[:, : self.num_prefix_tokens] for tokens in kept]
        found: list[Any] = [tokens[:, self.num_prefix_tokens :] for tokens in kept]
        if output_fmt == "NCHW":
            size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
            found = [t.unflatten(1, size).permute(0, 3, 1, 2).contiguous() for t in found]
        handing = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            named: dict[str, Any] = {"image_intermediates": found}
            named |= {"image_intermediates_prefix": prefix} if handing else {}
            return named if intermediates_only else {**named, "image_features": self.norm(final)}
        if handing:
            found = list(zip(found, prefix, strict=True))
        return found if intermediates_only else (self.norm(final), found)


def _names(mixer: MixerNames, last: str | None, count: int | None, depth: int) -> MixerNames:
    """Name the mixer of each block."""
    if last is None:
        if count is not None:
            raise UserError(f"last_blocks={count} needs last_mixer=, the mixer of those blocks")
        return mixer
    if not isinstance(mixer, str):
        raise UserError(f"last_mixer={last!r} needs one mixer for the other blocks, not a list")
    changed = depth if count is None else min(count, depth)
    return [mixer] * (depth - changed) + [last] * changed


def _temperatures(ends: Sequence[float], names: MixerNames, depth: int) -> list[dict[str, float]]:
    """Give every block its temperature on the line from the first to the last."""
    if len(ends) != 2 or min(ends) <= 0:
        raise UserError(f"temperature_decay={ends!r} must be two numbers above 0: first, last")
    for name in {names} if isinstance(names, str) else set(names):
        if "temperature" not in options_of(name):
            raise UserError(f"temperature_decay: mixer {name!r} has no softmax with a temperature")
    first, last = ends
    steps = max(depth - 1, 1)
    return [{"temperature": first + (last - first) * i / steps} for i in range(depth)]


_VIT = {
    "img_size": 224,
    "patch_size": 16,
    "embed_dim": 384,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 3.0,
}
_LAST = {"last_mixer": "re_attention"}
_DEEP_S = {**_VIT, "conv_stem": True, "embed_dim": 396, "depth": 16, **_LAST, "last_blocks": 5}
_DEEP_L = {**_DEEP_S, "embed_dim": 408, "depth": 32, "last_blocks": 12}

VARIANTS: dict[str, dict[str, Any]] = {
    "vit_12b": _VIT,
    "vit_16b": {**_VIT, "depth": 16},
    "vit_24b": {**_VIT, "depth": 24},
    "vit_32b": {**_VIT, "depth": 32},
    "vit_12b_256": {**_VIT, "embed_dim": 256, "num_heads": 8},
    "vit_12b_512": {**_VIT, "embed_dim": 512, "num_heads": 8},
    "vit_12b_768": {**_VIT, "embed_dim": 768, "mlp_ratio": 4.0},
    "deepvit_12b": {**_VIT, **_LAST},
    "deepvit_16b": {**_VIT, **_LAST, "depth": 16},
    "deepvit_24b": {**_VIT, **_LAST, "depth": 24},
    "deepvit_32b": {**_VIT, **_LAST, "depth": 32},
    "deepvit_s": _DEEP_S,
    "deepvit_l": _DEEP_L,
    "deepvit_l_420": {**_DEEP_L, "embed_dim": 420},
    # not a paper's: small enough to compare on two cores
    "deepvit_micro_p4_32": {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 64,
        "depth": 12,
        "num_heads": 8,
        "mlp_ratio": 3.0,
        **_LAST,
        "last_blocks": 4,
    },
}


def _cfg(row: Row) -> Row:
    return {
        "crop_pct": 1.0 if row["img_size"] == 32 else 0.9,
        "first_conv": "patch_embed.conv.0" if "conv_stem" in row else "patch_embed.proj",
        "classifier": "head",
        "reduction": row["patch_size"],
    }


register_variants(
    __name__,
    DeepVisionTransformer,
    VARIANTS,
    cfg=_cfg,
    maps="depth",
    filter_fn=checkpoint_filter_fn,
    with_mixer=("last_mixer", "last_blocks"),
)
