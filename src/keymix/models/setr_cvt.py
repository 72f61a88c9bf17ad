# SPDX-License-Identifier: Apache-2.0
"""SETR on a CvT-13: the hybrid whose convolutions make tokens, queries, keys and values.

Paper: KV attention in SETR (Hwa et al.), https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.2
and Table 2. Keys and values have stride 1 in all stages, which the paper does not say: of all
strides only these come near the multiply-adds of Table 2, and without a query there must be as
many keys as tokens. Dropping the query drops its convolution and norm too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from keymix.decoders.segmentation.pup import WIDTHS
from keymix.hosts.base import MixerNames, MixerOptions
from keymix.hosts.stages import cvt_grids
from keymix.mixers.base import Grid, to_image
from keymix.models.cvt import CvT
from keymix.models.family import register_variants
from keymix.models.setr import CLASSES, FEATURES, SETR, setr_cfg


class SETRCvT(SETR):
    """SETR on a CvT; mixers sit at ``encoder.stages.<s>.blocks.<i>.attn.mixer``.

    Images of any size go in where the mixers allow it.

    Args:
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel.
        embed_dims: Width of every stage.
        depths: Blocks of every stage.
        num_heads: Heads of every stage.
        mlp_ratio: Hidden width of the MLPs over that of the tokens.
        kv_stride: Step of the convolutions of keys and values, for all stages or one a stage.
        qkv_bias: Biases of the mixers' input projections.
        class_token: Whether a class token passes through the last stage; it is not decoded.
        decoder_widths: Channels behind each convolution of the decoder; each doubles the size.
        drop_rate: Probability of dropping a channel before the classifier.
        proj_drop_rate: Probability of dropping a value behind mixers and in MLPs.
        attn_drop_rate: Probability of dropping an entry of an attention map.
        drop_path_rate: Probability of dropping a branch in the last block; rises from 0.
        mixer: One name, or one a stage, or one a block.
        mixer_options: One dict for all, one a mixer name, or a list as long as ``mixer``.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes, H, W]``.

    Raises:
        UserError: If values do not fit one another, or a mixer cannot sit here.
    """

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = CLASSES,
        embed_dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        mlp_ratio: float = 4.0,
        kv_stride: int | Sequence[int] = 1,
        qkv_bias: bool = True,
        class_token: bool = True,
        decoder_widths: Sequence[int] = WIDTHS,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim=embed_dims[-1],
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            decoder_widths=decoder_widths,
            drop_rate=drop_rate,
            device=device,
            dtype=dtype,
        )
        self.encoder = CvT(
            img_size=img_size,
            in_chans=in_chans,
            num_classes=0,
            global_pool="",
            embed_dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            kv_stride=kv_stride,
            qkv_bias=qkv_bias,
            class_token=class_token,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            mixer=mixer,
            mixer_options=mixer_options,
            device=device,
            dtype=dtype,
        )

    def _as_map(self, features: Tensor, x: Tensor) -> Tensor:
        patches = features[:, self.encoder.num_prefix_tokens :]
        grid = cvt_grids(self.encoder, (x.shape[-2], x.shape[-1]))[-1]
        return to_image(patches, grid)


VARIANTS: dict[str, dict[str, Any]] = {"setr_qkv_cvt": {}, "setr_kv_cvt": {"mixer": "key_value"}}


def _cfg(name: str) -> dict[str, Any]:
    return setr_cfg(224, "encoder.stages.0.patch_embed.proj")


register_variants(__name__, SETRCvT, VARIANTS, cfg=_cfg, feature_cfg=FEATURES)
