# SPDX-License-Identifier: Apache-2.0
"""SETR: a Transformer encodes the image, a decoder gives every pixel its class.

Papers: SETR, https://arxiv.org/abs/2012.15840; KV attention in SETR (Hwa et al.),
https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.2 and Table 2: ViT-B/16, the same behind the
stages of a ResNet-50 (``…_ce``), and CvT-13 (``…_cvt``), each with and without the query of
attention. Where the paper is silent: ViT's class token, qkv biases and final norm are kept, the
token is dropped before the decoder; 4 classes, the background and 3 organs. Table 2 has 0.15 M
parameters more in the rows of the ViT than anything the text names; what is missing does no
multiply-adds.

The CvT's keys and values have stride 1 in all stages, which the paper does not say: of all strides
only these come near the multiply-adds of Table 2, and without a query there must be as many keys
as tokens. Dropping the query drops its convolution and norm too.

``setr`` is no paper's: the decoder meets other encoders than its own, convolutional ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from timm.models._features import FeatureGetterNet
from torch import Tensor

from keymix.decoders.segmentation.pup import WIDTHS, PUPDecoder
from keymix.errors import UserError
from keymix.hosts.base import MixerNames, MixerOptions
from keymix.hosts.stages import cvt_grids
from keymix.layers.patches import ResNetPatchEmbed
from keymix.mixers.base import Grid, to_image
from keymix.models.backbone import OnBackbone, checked_options, with_maps
from keymix.models.cvt import CvT
from keymix.models.encoder_decoder import CLASSES, EncoderDecoder
from keymix.models.family import Row, check_patches, register_variants
from keymix.models.vit import MixerVisionTransformer

DEEPEST = 16
"""Reduction that the decoder's four doublings undo: the deepest map of at most this is decoded."""


class SETR(EncoderDecoder):
    """An encoder with token mixers, and the progressive upsampling decoder behind it.

    The decoder's weights are drawn first, then the encoder's and the mixers', so at one seed all
    but the mixers are equal whatever the mixer.

    Args:
        dim: Channels of the encoder's features.
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel.
        decoder_widths: Channels behind each convolution of the decoder; each doubles the size.
        drop_rate: Probability of dropping a channel before the classifier.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes, H, W]``.
    """

    def __init__(
        self,
        *,
        dim: int,
        img_size: int | Grid,
        in_chans: int,
        num_classes: int,
        decoder_widths: Sequence[int],
        drop_rate: float,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        decoder = PUPDecoder(
            dim,
            num_classes,
            widths=decoder_widths,
            drop_rate=drop_rate,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            decoder, dim=dim, img_size=img_size, in_chans=in_chans, num_classes=num_classes
        )


class SETRViT(SETR):
    """SETR on a ViT, or on one that gets its patches from a ResNet.

    Mixers sit at ``encoder.blocks.<i>.attn.mixer``.

    Args:
        img_size: Side, or height and width, of the images, pixels; patches fill them.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel.
        patch_size: Side, or height and width, of a patch, pixels; 16 behind a ResNet.
        embed_dim: Width of the tokens.
        depth: Blocks.
        num_heads: Heads of every block.
        mlp_ratio: Hidden width of the MLPs over that of the tokens.
        qkv_bias: Biases of the mixers' input projections.
        class_token: Whether a class token passes through the blocks; it is not decoded.
        stem_depths: Bottlenecks of the ResNet's stages before the patches; None for no ResNet.
        decoder_widths: Channels behind each convolution of the decoder; each doubles the size.
        weight_init: timm's name of how weights start: ``""`` N(0, 0.02), ``"jax"`` Xavier.
        drop_rate: Probability of dropping a channel before the classifier.
        pos_drop_rate: Probability of dropping a value behind the position embeddings.
        proj_drop_rate: Probability of dropping a value behind mixers and in MLPs.
        attn_drop_rate: Probability of dropping an entry of an attention map.
        drop_path_rate: Probability of dropping a branch in the last block; rises from 0.
        mixer: One name, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
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
        patch_size: int | Grid = 16,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        stem_depths: Sequence[int] | None = None,
        decoder_widths: Sequence[int] = WIDTHS,
        weight_init: Literal["", "jax", "jax_nlhb", "moco"] = "",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim=embed_dim,
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            decoder_widths=decoder_widths,
            drop_rate=drop_rate,
            device=device,
            dtype=dtype,
        )
        stem: dict[str, Any] = {}
        if stem_depths is not None:
            stem["embed_layer"] = partial(ResNetPatchEmbed, depths=stem_depths)
        self.encoder = MixerVisionTransformer(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=0,
            global_pool="",
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            class_token=class_token,
            weight_init=weight_init,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            mixer=mixer,
            mixer_options=mixer_options,
            device=device,
            dtype=dtype,
            **stem,
        )

    def _as_map(self, features: Tensor, x: Tensor) -> Tensor:
        patches = features[:, self.encoder.num_prefix_tokens :]
        grid: Grid = self.encoder.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        return to_image(patches, grid)


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
        kv_stride: Step of the convolutions of keys and values, for all stages or one per stage.
        qkv_bias: Biases of the mixers' input projections.
        class_token: Whether a class token passes through the last stage; it is not decoded.
        decoder_widths: Channels behind each convolution of the decoder; each doubles the size.
        drop_rate: Probability of dropping a channel before the classifier.
        proj_drop_rate: Probability of dropping a value behind mixers and in MLPs.
        attn_drop_rate: Probability of dropping an entry of an attention map.
        drop_path_rate: Probability of dropping a branch in the last block; rises from 0.
        mixer: One name, or one per stage, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
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


class SETRBackbone(OnBackbone, SETR):
    """A timm backbone's map of features, decoded.

    Maps are those of ``features_only``: those of a ViT come without its final norm. Mixers sit
    where the backbone has attention, if its family has an adapter, at ``encoder.model.…``. All
    weights but the mixers' are equal at one seed.

    Args:
        backbone: Name of the backbone, timm's or keymix's.
        backbone_options: Its further arguments; ``pretrained=True`` for the model is
            ``{"pretrained": True}`` here.
        out_index: Number of the map that is decoded, from 0; None for the deepest that is reduced
            by at most 16.
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel.
        decoder_widths: Channels behind each convolution of the decoder, which doubles the size
            then; None for as many of the paper's as bring the map near to the image's size.
        drop_rate: Probability of dropping a channel before the classifier.
        drop_path_rate: Stochastic depth of the backbone, probability; above 0 for those that have
            it.
        mixer: One name, put where the backbone attends, or one per stage, or one per block; None
            for the backbone's own attention.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes, H, W]``.

    Raises:
        UserError: If there is no such backbone or map, or a mixer cannot sit in it.
    """

    def __init__(
        self,
        *,
        backbone: str = "resnet50",
        backbone_options: Mapping[str, Any] | None = None,
        out_index: int | None = None,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = CLASSES,
        decoder_widths: Sequence[int] | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: MixerNames | None = None,
        mixer_options: MixerOptions = None,
    ) -> None:
        options = checked_options(backbone, backbone_options, drop_path_rate, in_chans)
        options["img_size"] = img_size
        encoder, reduction = _encoder(backbone, out_index, options)
        if decoder_widths is None:
            doublings = max(1, min(len(WIDTHS), reduction.bit_length() - 1))
            decoder_widths = WIDTHS[:doublings]
        super().__init__(
            dim=encoder.feature_info.channels()[-1],
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            decoder_widths=decoder_widths,
            drop_rate=drop_rate,
        )
        self.encoder = encoder
        self.take_mixers(backbone, mixer, mixer_options)


def _encoder(name: str, index: int | None, options: Mapping[str, Any]) -> tuple[Any, int]:
    """Build what gives the maps up to the one wanted, and say by how much that one is reduced."""
    body, reductions = with_maps(name, options)
    if index is None:
        fitting = [i for i, reduction in enumerate(reductions) if reduction <= DEEPEST]
        index = fitting[-1] if fitting else 0
    if not 0 <= index < len(reductions):
        raise UserError(
            f"out_index={index}: {name!r} gives maps 0 to {len(reductions) - 1}, reduced by "
            f"{', '.join(map(str, reductions))}"
        )
    check_patches(body)
    return FeatureGetterNet(body, out_indices=tuple(range(index + 1))), reductions[index]


_CE = {"stem_depths": (3, 4, 9)}
_KV = {"mixer": "key_value"}

_ON_VIT: dict[str, dict[str, Any]] = {
    "setr_qkv": {},
    "setr_kv": _KV,
    "setr_kv_pos": {**_KV, "mixer_options": {"pos_dim": 50}},
    "setr_qkv_ce": _CE,
    "setr_kv_ce": {**_CE, **_KV},
    # not a paper's: small enough to train on two cores
    "setr_micro": {
        "img_size": 96,
        "patch_size": 8,
        "embed_dim": 96,
        "depth": 4,
        "num_heads": 3,
        "mlp_ratio": 2.0,
        "decoder_widths": (64, 32, 16),
        "weight_init": "jax",  # Xavier: timm's N(0, 0.02) starts a net this narrow very slowly
    },
}
_ON_CVT: dict[str, dict[str, Any]] = {"setr_qkv_cvt": {}, "setr_kv_cvt": _KV}
_ON_BACKBONE: dict[str, dict[str, Any]] = {"setr": {}}
VARIANTS = {**_ON_VIT, **_ON_CVT, **_ON_BACKBONE}


def _register(build: type[SETR], variants: dict[str, dict[str, Any]], first: str | None) -> None:
    """Register models whose first convolution is at this path, None where it is not known."""

    def cfg(row: Row) -> Row:
        conv = "encoder.patch_embed.backbone.conv1" if "stem_depths" in row else first
        return {"first_conv": conv, "classifier": "decoder.head", "num_classes": CLASSES}

    register_variants(__name__, build, variants, cfg=cfg, maps="depth")


_register(SETRViT, _ON_VIT, "encoder.patch_embed.proj")
_register(SETRCvT, _ON_CVT, "encoder.stages.0.patch_embed.proj")
_register(SETRBackbone, _ON_BACKBONE, None)
