# SPDX-License-Identifier: Apache-2.0
"""CAFormer with static keys in some of its stages, on timm's MetaFormer.

Papers: MetaFormer Baselines for Vision, https://arxiv.org/abs/2210.13452; Static Key Attention in
Vision, https://arxiv.org/abs/2412.07049, Sec. 5.1 and Table 5: (C)SKA in the second stage; heads
of 32 are CAFormer's. ``skaformer_s18_noq`` is ``stu_caformer_s18`` of its authors' code: SKA in the
last two stages, without a projection of queries. S18 has 3, 3, 9, 3 blocks of width 64, 128, 320,
512, B36 has 3, 12, 18, 3 of 128, 256, 512, 768.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.layers import to_2tuple, trunc_normal_
from timm.models.metaformer import MetaFormer
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import MixerNames, MixerOptions, put_mixers
from keymix.hosts.timm_metaformer import HEAD_DIM, stage_grids
from keymix.mixers.base import Grid
from keymix.models.family import (
    MixerModel,
    Row,
    register_variants,
    stage_matcher,
    take_input_size,
)

STEM = (7, 4, 2)


class MixerMetaFormer(MixerModel, MetaFormer):
    """timm's MetaFormer with a token mixer at ``stages.<s>.blocks.<i>.token_mixer.mixer``.

    Blocks get the grid at every call, so images of any size go in where the mixers allow it.
    A mixer named ``sep_conv`` is the family's: 7x7, expansion 2, StarReLU, no biases. The
    backbone's weights are drawn before the mixers', so at one seed they are equal whatever the
    mixer.

    Args:
        img_size: Side, or height and width, of the images, pixels.
        mixer: One name, or one per stage, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        head_dim: Width of a head; a stage has its width over this, in heads.
        attn_drop_rate: Probability of dropping an entry of an attention map.
        stem: Kernel size, stride and padding of the first convolution, pixels.
        res_scale_init_values: What the scales of the shortcuts start at, for all stages or one
            per stage; None for no scale.
        global_pool: Pooling before the classifier, as timm's.
        timm: The other arguments of timm's MetaFormer.

    Raises:
        UserError: If an argument is timm's choice of mixers, or a mixer cannot sit here.
    """

    # timm's
    stem: Any
    stages: Any
    feature_info: list[dict[str, Any]]

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        mixer: MixerNames = ("sep_conv", "sep_conv", "softmax", "softmax"),
        mixer_options: MixerOptions = None,
        head_dim: int = HEAD_DIM,
        attn_drop_rate: float = 0.0,
        stem: tuple[int, int, int] = STEM,
        res_scale_init_values: float | Sequence[float | None] | None = (None, None, 1.0, 1.0),
        global_pool: str = "avg",
        **timm: Any,
    ) -> None:
        if "token_mixers" in timm:
            raise UserError("token_mixers= is timm's; name mixers with mixer=")
        timm["res_scale_init_values"] = res_scale_init_values
        super().__init__(token_mixers=nn.Identity, global_pool=global_pool, **timm)
        height, width = to_2tuple(img_size)
        self.img_size: Grid = (height, width)
        self.head_dim, self.attn_drop_rate, self.global_pool = head_dim, attn_drop_rate, global_pool
        if tuple(stem) != STEM:
            first = self.stem.conv
            factory = {"device": first.weight.device, "dtype": first.weight.dtype}
            self.stem.conv = nn.Conv2d(first.in_channels, first.out_channels, *stem, **factory)
            trunc_normal_(self.stem.conv.weight, std=0.02)
            nn.init.zeros_(self.stem.conv.bias)
        reduction = stem[1]
        for info, stage in zip(self.feature_info, self.stages, strict=True):
            conv = getattr(stage.downsample, "conv", None)
            reduction *= conv.stride[0] if conv is not None else 1
            info["reduction"] = reduction
        put_mixers(self, mixer, mixer_options)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Say which parameters make a layer, as timm asks for layer-wise learning rates."""
        return stage_matcher(r"^stem", "downsample", coarse=coarse)

    def reset_classifier(
        self, num_classes: int, global_pool: str | None = None, **timm: Any
    ) -> None:
        """Replace the last layers, as timm's.

        Args:
            num_classes: Outputs; 0 for none.
            global_pool: Pooling before; as it was if None.
            timm: The other arguments of timm's method.
        """
        super().reset_classifier(num_classes, global_pool, **timm)
        if global_pool is not None:
            self.global_pool = global_pool

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size; all mixers are asked before any changes.

        Args:
            img_size: Side, or height and width, pixels; as it is if None.

        Raises:
            UserError: If a mixer cannot take its new grid; it names the mixer and the remedy.
        """
        take_input_size(self, img_size, partial(stage_grids, self))


_S18 = {"depths": (3, 3, 9, 3), "dims": (64, 128, 320, 512)}
_B36 = {"depths": (3, 12, 18, 3), "dims": (128, 256, 512, 768)}
_SKA = ("sep_conv", "static_key", "softmax", "softmax")
_CSKA = ("sep_conv", "conv_static_key", "softmax", "softmax")

VARIANTS: dict[str, dict[str, Any]] = {
    "skaformer_s18": {**_S18, "mixer": _SKA},
    "skaformer_s18_noq": {
        **_S18,
        "mixer": ("sep_conv", "sep_conv", "static_key", "static_key"),
        "mixer_options": {"static_key": {"query_proj": False}},
    },
    "skaformer_b36": {**_B36, "mixer": _SKA},
    "cskaformer_s18": {**_S18, "mixer": _CSKA},
    "cskaformer_b36": {**_B36, "mixer": _CSKA},
    # not a paper's: small enough to compare on two cores, on grids of 16x16, 8x8, 4x4 and 2x2
    "caformer_micro_32": {
        "img_size": 32,
        "depths": (1, 1, 2, 1),
        "dims": (32, 48, 96, 128),
        "head_dim": 16,
        "stem": (7, 2, 3),
        "use_mlp_head": False,
        "mixer": ("sep_conv", "sep_conv", "softmax", "softmax"),
    },
}


def _cfg(row: Row) -> Row:
    last = "head.fc.fc2" if row.get("use_mlp_head", True) else "head.fc"
    reduction = 8 * row.get("stem", STEM)[1]
    return {"first_conv": "stem.conv", "classifier": last, "reduction": reduction}


register_variants(
    __name__,
    MixerMetaFormer,
    VARIANTS,
    cfg=_cfg,
    out_indices=4,
    maps="depths",
)
