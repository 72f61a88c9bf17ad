# SPDX-License-Identifier: Apache-2.0
"""What models of pixels share: an encoder, a decoder behind it, and timm's interface to both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import get_device_dtype, to_2tuple
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from keymix.decoders.segmentation.multi_scale import MultiScaleDecoder
from keymix.hosts.base import Encoded
from keymix.mixers.base import Grid
from keymix.models.arguments import check_value
from keymix.models.family import FeatureModel, Wanted

CLASSES = 4
"""Of the masks of the KV paper: background, large bowel, small bowel, stomach."""
_START = re.compile(r"(?<!\[)\^")  # of a line, not the one that turns a set of letters round


class EncoderDecoder(FeatureModel, Encoded):
    """An encoder, and behind it a decoder whose last layer, ``decoder.head``, classifies pixels.

    The decoder is made before the encoder, so at one seed its weights are equal whatever the
    encoder; ``dim`` is the number of channels that the encoder hands to it.

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
        decoder: nn.Module,
        *,
        dim: int,
        img_size: int | Grid,
        in_chans: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        height, width = to_2tuple(img_size)
        self.img_size: Grid = (height, width)
        self.in_chans, self.num_classes, self.num_features = in_chans, num_classes, dim
        self.encoder = nn.Identity()  # its place, before the decoder's
        self.decoder = decoder
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
        update_model_input_size(self, self.img_size)

    def intermediates(self, x: Tensor, wanted: Wanted) -> Any:
        """Return maps of the encoder's stages or blocks, and what the decoder gets."""
        found = self.encoder.forward_intermediates(
            x,
            indices=wanted.indices,
            norm=wanted.norm,
            stop_early=wanted.stop_early,
            intermediates_only=wanted.alone,
        )
        return found if wanted.alone else (self._as_map(found[0], x), found[1])

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop what stands behind the stages or blocks asked for."""
        prune = getattr(self.encoder, "prune_intermediate_layers", None)
        if prune is None:  # what gives a backbone's maps was cut behind the one that is decoded
            taken = feature_take_indices(len(self.feature_info), indices)[0]
        else:
            taken = prune(indices, prune_norm, prune_head)
        if prune_head:
            self.decoder, self.num_classes = nn.Identity(), 0
        return list(taken)

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
        """Reshape the encoder's features of images to a map, where they are none."""
        return features


class MultiScale(EncoderDecoder):
    """An encoder, and a decoder that joins its maps of several resolutions.

    Images are padded with zeros at the bottom and the right to whole multiples of the deepest map's
    reduction; logits are brought to that size, bilinearly, and cropped to the image.
    """

    def __init__(
        self,
        decoder: MultiScaleDecoder,
        *,
        img_size: int | Grid,
        in_chans: int,
        num_classes: int,
    ) -> None:
        super().__init__(
            decoder,
            dim=decoder.num_features,
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
        )
        self.multiple = decoder.deepest

    def padded_size(self, size: Grid) -> Grid:
        """Height and width of the padded images of a size, pixels."""
        height, width = (side + -side % self.multiple for side in size)
        return height, width

    def padded(self, x: Tensor) -> Tensor:
        """Pad images."""
        return F.pad(x, (0, -x.shape[-1] % self.multiple, 0, -x.shape[-2] % self.multiple))

    def forward_head(
        self,
        x: Float[Tensor, "B D h w"],
        pre_logits: bool = False,
        *,
        size: Grid | None = None,
    ) -> Tensor:
        """Classify every pixel.

        Args:
            x: What :meth:`forward_features` returned: the joined features of the padded image.
            pre_logits: Stop before the classifier.
            size: Height and width of the logits, pixels; the model's ``img_size`` if None.
        """
        x = self.decoder.drop(x)
        if pre_logits:
            return x
        height, width = size or self.img_size
        x = self.decoder.head(x)
        padded = self.padded_size((height, width))
        if (x.shape[-2], x.shape[-1]) != padded:
            x = F.interpolate(x, size=padded, mode="bilinear", align_corners=True)
        return x[..., :height, :width]


def within(path: str, matcher: dict[str, Any]) -> dict[str, Any]:
    """Let a timm model's ``group_matcher`` match it as a part, at this path, of another model."""

    def inside(pattern: str) -> str:
        return rf"^{re.escape(path)}\.(?:{_START.sub('', pattern)})"

    blocks = matcher["blocks"]
    if not isinstance(blocks, str):
        blocks = [(inside(pattern), order) for pattern, order in blocks]
    else:
        blocks = inside(blocks)
    return {"stem": inside(matcher["stem"]), "blocks": blocks}
