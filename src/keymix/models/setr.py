# SPDX-License-Identifier: Apache-2.0
"""SETR: a Transformer encodes the image, a decoder gives every pixel its class.

Papers: SETR, https://arxiv.org/abs/2012.15840; KV attention in SETR (Hwa et al.),
https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.2 and Table 2: here ViT-B/16, and the same
behind the stages of a ResNet-50 (``…_ce``), each with and without the query of attention.
Where the paper is silent: ViT's class token, qkv biases and final norm are kept, the token is
dropped before the decoder; 4 classes, the background and 3 organs. Table 2 has 0.15 M parameters
more in these rows than anything the text names; what is missing does no multiply-adds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from timm.layers import get_device_dtype, to_2tuple
from torch import Tensor, nn

from keymix.decoders.segmentation.pup import WIDTHS, PUPDecoder
from keymix.errors import UserError
from keymix.hosts.base import Encoded, MixerNames, MixerOptions
from keymix.layers.patches import ResNetPatchEmbed
from keymix.mixers.base import Grid, to_image
from keymix.models.arguments import check_value
from keymix.models.family import MixerModel, base_cfg, register_variants
from keymix.models.input_size import record_input_size
from keymix.models.vit import MixerVisionTransformer

FEATURES = {"out_indices": 3, "feature_cls": "getter"}
_START = re.compile(r"(?<!\[)\^")  # of a line, not the one that turns a set of letters round
CLASSES = 4  # of the paper's masks: background, large bowel, small bowel, stomach


class SETR(MixerModel, Encoded):
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

    task: ClassVar[str] = "segmentation"
    preprocessing: ClassVar[Mapping[str, str]] = {
        "crop_mode": "squash",
        "interpolation": "bilinear",
    }
    global_pool: str | None = None  # every token is read out
    encoder: Any
    decoder: Any

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
        super().__init__()
        height, width = to_2tuple(img_size)
        self.img_size: Grid = (height, width)
        self.in_chans, self.num_classes, self.num_features = in_chans, num_classes, dim
        self.encoder = nn.Identity()  # its place, before the decoder's
        self.decoder = PUPDecoder(
            dim,
            num_classes,
            widths=decoder_widths,
            drop_rate=drop_rate,
            device=device,
            dtype=dtype,
        )
        self.head_hidden_size = self.decoder.num_features

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The encoder's stages, or blocks: channels, reduction and path."""
        own: list[dict[str, Any]] = self.encoder.feature_info
        return [{**info, "module": f"encoder.{info['module']}"} for info in own]

    def no_weight_decay(self) -> set[str]:
        """Names that weight decay leaves alone: the encoder's."""
        family = getattr(self.encoder, "no_weight_decay", None)
        names = {f"encoder.{name}" for name in family()} if family is not None else set()
        return super().no_weight_decay() | names

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Say which parameters make a layer: the encoder's, then the decoder."""
        return within("encoder", self.encoder.group_matcher(coarse=coarse))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the encoder's blocks instead of keeping them."""
        self.encoder.set_grad_checkpointing(enable)

    def get_classifier(self) -> nn.Module:
        """The last layer, a 1x1 convolution."""
        head: nn.Module = self.decoder.head
        return head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last layer.

        Args:
            num_classes: Outputs of a pixel; 0 for the decoder's features.
        """
        check_value("num_classes", num_classes, int)
        self.num_classes = num_classes
        head = self.decoder.classifier(num_classes, **get_device_dtype(self))
        self.decoder.head = head.train(self.training)

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size; all mixers are asked before any changes.

        Args:
            img_size: Side, or height and width, pixels; as it is if None.

        Raises:
            UserError: If patches do not fill it, or a mixer cannot take its new grid; it names the
                mixer and the remedy.
        """
        if img_size is None:
            return
        self.encoder.set_input_size(img_size=img_size)
        height, width = to_2tuple(img_size)
        self.img_size = (height, width)
        record_input_size(self, self.img_size)

    def forward_intermediates(
        self,
        x: Float[Tensor, "B c H W"],
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return maps of the encoder's stages or blocks, and what the decoder gets.

        Args:
            x: Images.
            indices: The last so many, or these; all if None.
            norm: Normalise them as the last is.
            stop_early: Run nothing behind the last one asked for.
            output_fmt: ``"NCHW"``.
            intermediates_only: Leave the final features out.
        """
        if output_fmt != "NCHW":
            raise UserError(f"{output_fmt=} must be 'NCHW'")
        found = self.encoder.forward_intermediates(
            x,
            indices=indices,
            norm=norm,
            stop_early=stop_early,
            intermediates_only=intermediates_only,
        )
        return found if intermediates_only else (self._as_map(found[0], x), found[1])

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop what stands behind the stages or blocks asked for."""
        taken: list[int] = self.encoder.prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_head:
            self.decoder, self.num_classes = nn.Identity(), 0
        return taken

    def forward_features(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B D h w"]:
        """Return what the decoder gets: the encoder's patch tokens on their grid."""
        return self._as_map(self.encoder.forward_features(x), x)

    def forward_head(
        self,
        x: Float[Tensor, "B D h w"],
        pre_logits: bool = False,
        *,
        size: Grid | None = None,
    ) -> Tensor:
        """Decode.

        Args:
            x: What :meth:`forward_features` returned.
            pre_logits: Stop before the classifier.
            size: Height and width of the logits, pixels; the model's ``img_size`` if None.
        """
        out: Tensor = self.decoder(x, size or self.img_size, pre_logits=pre_logits)
        return out

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B K H W"]:
        """Classify every pixel; logits have the images' size."""
        return self.forward_head(self.forward_features(x), size=(x.shape[-2], x.shape[-1]))

    def _as_map(self, features: Tensor, x: Tensor) -> Tensor:
        """Lay the encoder's features of images out as a map, where they are none."""
        return features


def within(path: str, matcher: dict[str, Any]) -> dict[str, Any]:
    """Let a timm model's ``group_matcher`` match it as a part of another model.

    Args:
        path: Of the part.
        matcher: What the part's own says.
    """

    def inside(pattern: str) -> str:
        return rf"^{re.escape(path)}\.(?:{_START.sub('', pattern)})"

    blocks = matcher["blocks"]
    if not isinstance(blocks, str):
        blocks = [(inside(pattern), order) for pattern, order in blocks]
    else:
        blocks = inside(blocks)
    return {"stem": inside(matcher["stem"]), "blocks": blocks}


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
        mixer: One name, or one a block.
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
        stem = {} if stem_depths is None else {"embed_layer": _resnet(stem_depths)}
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
        grid: Grid = self.encoder.patch_embed.grid_size
        return to_image(patches, grid)


def _resnet(depths: Sequence[int]) -> Any:
    return partial(ResNetPatchEmbed, depths=depths)


def setr_cfg(img_size: int, first_conv: str | None) -> dict[str, Any]:
    """Return timm's description of a SETR.

    Args:
        img_size: Side of the images it was made for, pixels.
        first_conv: Path of its first convolution; None where it is not known.
    """
    return base_cfg(img_size, first_conv=first_conv, classifier="decoder.head", num_classes=CLASSES)


_CE = {"stem_depths": (3, 4, 9)}
_KV = {"mixer": "key_value"}

VARIANTS: dict[str, dict[str, Any]] = {
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


def _cfg(name: str) -> dict[str, Any]:
    row = VARIANTS[name]
    patches = "proj" if "stem_depths" not in row else "backbone.conv1"
    return setr_cfg(row.get("img_size", 224), f"encoder.patch_embed.{patches}")


register_variants(__name__, SETRViT, VARIANTS, cfg=_cfg, feature_cfg=FEATURES)
