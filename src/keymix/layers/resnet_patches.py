# SPDX-License-Identifier: Apache-2.0
"""Patches of 16 pixels cut from a ResNet's features instead of the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from timm.layers import PatchEmbed
from timm.models._features import FeatureListNet
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.patches import whole_size

REDUCTION = 16  # of three stages: convolution 2, pooling 2, stages 1, 2, 2


class ResNetPatchEmbed(PatchEmbed):
    """The first three stages of a ResNet-50, then a 1x1 convolution to the tokens' width.

    Papers: TransUNet, https://arxiv.org/abs/2102.04306, Sec. 3.2 (the hybrid encoder); KV attention
    in SETR, https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.2: 3, 4 and 9 bottlenecks, 1024
    channels, no skip connections. The ResNet is timm's, which strides in the 3x3 convolution.

    Args:
        img_size: Height and width of the image, pixels.
        patch_size: 16: the ResNet's reduction.
        in_chans: Channels of the image.
        embed_dim: Width C of the tokens.
        depths: Bottlenecks of the three stages, of 256, 512 and 1024 channels.
        bias: Bias of the 1x1 convolution.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
        timm: What else timm's ViT passes to its patch embedding (``dynamic_img_pad`` and the
            like); any that is set is refused.

    Shape: x ``[B, in_chans, H, W]`` -> ``[B, (H / 16) * (W / 16), C]``.

    Raises:
        UserError: If the patch size is another, or for an option that it does not have.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = REDUCTION,
        in_chans: int = 3,
        embed_dim: int = 768,
        depths: Sequence[int] = (3, 4, 9),
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **timm: Any,
    ) -> None:
        asked = sorted(name for name, value in timm.items() if value)
        if asked:
            raise UserError(f"the ResNet's patch embedding does not take {', '.join(asked)}")
        _check_patch(patch_size)
        super().__init__(img_size, REDUCTION, in_chans, embed_dim, device="meta")
        factory = {"device": device, "dtype": dtype}
        channels = (64, 128, 256)[: len(depths)]
        resnet = ResNet(
            Bottleneck, tuple(depths), 0, in_chans=in_chans, channels=channels, **factory
        )
        self.backbone = FeatureListNet(resnet, out_indices=(len(depths),))
        self.proj = nn.Conv2d(resnet.num_features, embed_dim, 1, bias=bias, **factory)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take another image size; the patch size is the ResNet's reduction.

        Raises:
            UserError: If another patch size is asked for.
        """
        if patch_size is not None:
            _check_patch(patch_size)
        super().set_input_size(img_size=img_size)

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B N C"]:
        """Embed the features of the image."""
        if self.img_size is not None and tuple(x.shape[-2:]) != tuple(self.img_size):
            raise UserError(
                f"image is {tuple(x.shape[-2:])}, the model was built for {self.img_size}"
            )
        features = self.proj(self.backbone(x)[-1])
        out: Tensor = features.flatten(2).transpose(1, 2)
        return out


def _check_patch(patch_size: Any) -> None:
    if whole_size("patch_size", patch_size) != (REDUCTION, REDUCTION):
        raise UserError(
            f"{patch_size=}: a ResNet's patches are its reduction, {REDUCTION} pixels; leave it out"
        )
