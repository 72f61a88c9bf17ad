# SPDX-License-Identifier: Apache-2.0
"""Vision Transformers on timm's class, with a mixer in every block.

The paper's rows (SKA Tables 1, 8 and 9): width 512, 6 blocks, 8 heads of 64, MLP ratio 1, patch 4
on 32x32 images, no qkv bias. ``vit_small_p4_32`` embeds patches plainly; ``vit_small_spt_p4_32``
is the published baseline, with shifted patch tokens and locality self-attention (learned
temperature, masked diagonal); with ``norm_eps=1e-5`` it equals the network of the code behind it,
which shifts by one pixel along the axes. Dropout rates are the recipe's, not the model's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions, find_host, put_mixers
from keymix.layers.patches import EarlyConvs, ShiftedPatchEmbed
from keymix.models.family import (
    MixerModel,
    asked_grid,
    check_patches,
    register_variants,
    with_norm_eps,
)

STEMS = {"conv": EarlyConvs}
"""Embeddings of patches by name, in place of timm's linear map."""


class MixerVisionTransformer(MixerModel, VisionTransformer):
    """timm's VisionTransformer with a token mixer in every block, at ``blocks.<i>.attn.mixer``.

    The backbone's weights are drawn before the mixers', so at one seed they are equal whatever
    the mixer.

    Args:
        mixer: One name, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        mixer_defaults: Options of the family for those mixers that know them.
        shifted_patches: Embed patches with their shifted copies.
        shifts: How these are moved, ``"axes"``, ``"half_patch"`` or ``"diagonal"``, as
            :class:`keymix.layers.patches.ShiftedPatchEmbed` takes it; None is ``"axes"``
            until weights are loaded whose record says another.
        stem: ``"conv"`` embeds patches by strided 3x3 convolutions, whose patches have a power
            of two of pixels a side (:class:`keymix.layers.patches.EarlyConvs`); timm's linear map
            if None.
        norm_eps: What LayerNorms of the blocks and the last one add to the variance; timm's, 1e-6,
            if None. The code behind SKA's baseline has PyTorch's 1e-5.
        timm: Arguments of timm's VisionTransformer.

    Raises:
        UserError: If shifts are unknown, or given without shifted patches; if the stem is unknown,
            given with shifted patches, or cannot have the patch size; or a mixer cannot sit in a
            block.
    """

    patch_embed: Any  # timm's

    def __init__(
        self,
        *,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        mixer_defaults: MixerOptions = None,
        shifted_patches: bool = False,
        shifts: str | None = None,
        stem: str | None = None,
        norm_eps: float | None = None,
        **timm: Any,
    ) -> None:
        if stem is not None and stem not in STEMS:
            raise unknown("stem", stem, STEMS)
        if stem is not None and shifted_patches:
            raise UserError(
                f"{stem=} and {shifted_patches=} both embed the patches; leave one of them out"
            )
        if stem is not None:
            timm["embed_layer"] = STEMS[stem]
        if shifted_patches:
            timm["embed_layer"] = partial(ShiftedPatchEmbed, shifts=shifts or "axes")
        elif shifts is not None:
            raise UserError(
                f"{shifts=} is of models with shifted patches, such as vit_small_spt_p4_32; leave "
                "it out (on the command line --model.options.shifts null)"
            )
        super().__init__(**with_norm_eps(norm_eps, timm))
        check_patches(self)
        put_mixers(self, mixer, mixer_options, defaults=mixer_defaults)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take another image size, as timm's: position embeddings are resampled.

        Mixers that hold something per position do as their option ``resize`` says.

        Args:
            img_size: Side, or height and width, in pixels; as it is if None.
            patch_size: Side, or height and width, of a patch in pixels; as it is if None.

        Raises:
            UserError: If patches do not fill the image, or a mixer cannot take the new grid; it
                names the mixer and the remedy, and nothing has changed.
        """
        asked_grid(self, img_size, patch_size)
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        find_host(self).update_grids(self)


_SMALL = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 512,
    "depth": 6,
    "num_heads": 8,
    "mlp_ratio": 1.0,
    "qkv_bias": False,
}
_LSA = {"temperature": True, "mask_diagonal": True}
_SPT = {**_SMALL, "shifted_patches": True, "mixer_defaults": _LSA}
_WIDE = {"num_heads": 10, "head_dim": 64}  # SKA's parameter-matched row: 10 heads x 64

_MICRO = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 128,
    "depth": 4,
    "num_heads": 4,
    "mlp_ratio": 2.0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "vit_small_p4_32": _SMALL,
    "ska_vit_small_p4_32": {**_SMALL, "mixer": "static_key"},
    "cska_vit_small_p4_32": {**_SMALL, "mixer": "conv_static_key"},
    "ska_vit_small_p4_32_wide": {**_SMALL, "mixer": "static_key", "mixer_options": _WIDE},
    "vit_small_spt_p4_32": _SPT,
    "ska_vit_small_spt_p4_32": {**_SPT, "mixer": "static_key"},
    "cska_vit_small_spt_p4_32": {**_SPT, "mixer": "conv_static_key"},
    "ska_vit_small_spt_p4_32_wide": {**_SPT, "mixer": "static_key", "mixer_options": _WIDE},
    # not a paper's: small enough to compare on two cores
    "vit_micro_p4_32": _MICRO,
    "vit_micro_conv_p4_32": {**_MICRO, "stem": "conv"},
    "vit_nano_p4_12": {
        "img_size": 12,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "class_token": False,
        "global_pool": "avg",
        "weight_init": "jax",  # Xavier: timm's N(0, 0.02) starts a net this narrow very slowly
    },
    "vit_nano_p2_12": {
        "img_size": 12,
        "patch_size": 2,
        "in_chans": 1,
        "embed_dim": 64,
        "depth": 4,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "class_token": False,
        "global_pool": "avg",
        "weight_init": "jax",  # Xavier: timm's N(0, 0.02) starts a net this narrow very slowly
    },
}


def _fitting(state: dict[str, Any], model: MixerVisionTransformer) -> dict[str, Any]:
    """Make a checkpoint fit as timm does, which knows of no patches with shifted copies."""
    own = isinstance(model.patch_embed, ShiftedPatchEmbed)
    return state if own else checkpoint_filter_fn(state, model)


register_variants(
    __name__,
    MixerVisionTransformer,
    VARIANTS,
    cfg=lambda row: {
        "first_conv": "patch_embed.convs.0" if "stem" in row else "patch_embed.proj",
        "classifier": "head",
        "reduction": row["patch_size"],
    },
    maps="depth",
    filter_fn=_fitting,
)
