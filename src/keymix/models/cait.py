# SPDX-License-Identifier: Apache-2.0
"""CaiT on timm's class, with a mixer in every patch block.

The paper's rows (SKA Tables 1, 8 and 9): width 512, 6 patch blocks and 2 class blocks, 8 heads of
64 that talk before and after the softmax (two 8x8 matrices per attention, class attention's too, no
biases), MLP ratio 1, LayerScale 0.1, patch 4 on 32x32 images, no qkv bias. The mixer replaces the
attention among patches; class attention stays. Talking heads belong to the family: every mixer
with an attention map has them unless an option says otherwise.

``cska_cait_small_p4_32`` scales its logits as all our mixers do; the code behind the published row
left them unscaled (``mixer_options={"scale": False}``). Its class layers read patches that are not
normalised; here they are, as in CaiT's paper. docs/papers.md has the lines that do as theirs. No
parameter depends on either.
"""

from __future__ import annotations

from typing import Any

from timm.layers import resample_abs_pos_embed
from timm.models._input import update_model_input_size
from timm.models.cait import Cait, checkpoint_filter_fn
from torch import nn

from keymix.hosts.base import MixerNames, MixerOptions, find_host, put_mixers
from keymix.layers.class_attention import ClassAttention
from keymix.models.family import (
    MixerModel,
    asked_grid,
    check_patches,
    register_variants,
    with_norm_eps,
)


class MixerCait(MixerModel, Cait):
    """timm's Cait with a token mixer in every patch block, at ``blocks.<i>.attn.mixer``.

    The backbone's weights are drawn before the mixers', so at one seed they are equal whatever
    the mixer.

    Args:
        mixer: One name, or one per patch block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        class_heads: Heads of class attention; the model's if None.
        class_head_dim: Their width; ``embed_dim / class_heads`` if None.
        norm_eps: What LayerNorms add to the variance; timm's, 1e-6, if None. The code behind SKA's
            rows has PyTorch's 1e-5.
        timm: Arguments of timm's Cait.
    """

    patch_embed: Any  # timm's, as these
    pos_embed: nn.Parameter
    blocks: Any
    feature_info: list[dict[str, Any]]

    def __init__(
        self,
        *,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        class_heads: int | None = None,
        class_head_dim: int | None = None,
        norm_eps: float | None = None,
        **timm: Any,
    ) -> None:
        def class_attention(dim: int, *, num_heads: int, **given: Any) -> nn.Module:
            heads = class_heads or num_heads
            return ClassAttention(dim, num_heads=heads, head_dim=class_head_dim, **given)

        super().__init__(attn_block_token_only=class_attention, **with_norm_eps(norm_eps, timm))
        check_patches(self)
        for block in self.blocks:
            # the paper's heads talk without biases; the mixers take that from here
            block.attn.proj_l.bias = block.attn.proj_w.bias = None
        put_mixers(self, mixer, mixer_options)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take another image size, as timm's ViT does: position embeddings are resampled.

        Args:
            img_size: Side, or height and width, in pixels; as it is if None.
            patch_size: Side of a patch in pixels; as it is if None.

        Raises:
            UserError: If patches do not fill the image, or a mixer cannot take the new grid;
                nothing has changed then.
        """
        before = tuple(self.patch_embed.grid_size)
        grid = asked_grid(self, img_size, patch_size)
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        if grid != before:
            moved = resample_abs_pos_embed(
                self.pos_embed, new_size=grid, old_size=before, num_prefix_tokens=0
            )
            trains = self.pos_embed.requires_grad
            self.pos_embed = nn.Parameter(moved.detach(), requires_grad=trains)
            find_host(self).update_grids(self)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)


_SMALL = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 512,
    "depth": 6,
    "depth_token_only": 2,
    "num_heads": 8,
    "mlp_ratio": 1.0,
    "mlp_ratio_token_only": 1.0,
    "init_values": 0.1,
    "qkv_bias": False,
}
# SKA's parameter-matched row, in both kinds of layers; another mixer leaves both behind
_WIDE = {"num_heads": 10, "head_dim": 62}

VARIANTS: dict[str, dict[str, Any]] = {
    "cait_small_p4_32": _SMALL,
    "ska_cait_small_p4_32": {**_SMALL, "mixer": "static_key"},
    "cska_cait_small_p4_32": {**_SMALL, "mixer": "conv_static_key"},
    "ska_cait_small_p4_32_wide": {
        **_SMALL,
        "mixer": "static_key",
        "mixer_options": _WIDE,
        "class_heads": 10,
        "class_head_dim": 62,
    },
    # not a paper's: small enough to compare on two cores
    "cait_micro_p4_32": {**_SMALL, "embed_dim": 128, "depth": 4, "num_heads": 4},
}


register_variants(
    __name__,
    MixerCait,
    VARIANTS,
    cfg={"first_conv": "patch_embed.proj", "classifier": "head", "reduction": 4},
    maps="depth",
    filter_fn=checkpoint_filter_fn,
    with_mixer=("class_heads", "class_head_dim"),
)
