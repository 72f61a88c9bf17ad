# SPDX-License-Identifier: Apache-2.0
"""A patch embedding of three convolutions, in place of one as wide as the patch."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.layers import PatchEmbed
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.patches import patch_grid, whole_size

WIDTH = 64  # channels of the two inner convolutions


class ConvStem(PatchEmbed):
    r"""Three convolutions: 7x7 of stride 2, 3x3, and one as wide as half a patch.

    ``conv``: 7x7 (stride 2, padding 3) to 64 channels without bias, BatchNorm, ReLU; 3x3 (padding
    1) likewise; ``proj``: p/2 x p/2 of stride p/2 to C channels, with bias. A token sees a little
    beyond its p x p pixels.
    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Sec. 5.4, "three CNN layers ... the same
    configurations as" T2T-ViT; the sizes are those that make the published parameter counts.

    Args:
        img_size: Height and width of the image in pixels, multiples of the patch.
        patch_size: Side p of a patch in pixels, even.
        in_chans: Channels of the image.
        embed_dim: Width C of the tokens.
        bias: Bias of the last convolution.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
        timm: What else timm's ViT passes to its patch embedding (``dynamic_img_pad`` and the
            like); any that is set is refused.

    Shape: x ``[B, in_chans, H, W]`` -> ``[B, (H / p) * (W / p), C]``.
    Cost: 49 c 64 / 4 + 9 64^2 / 4 + 64 C / 4 multiply-adds a pixel.

    Raises:
        UserError: If the patch is not even or does not divide the image, or an option of timm's
            patch embedding is asked for that it does not have.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 384,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **timm: Any,
    ) -> None:
        asked = sorted(name for name, value in timm.items() if value)
        if asked:
            raise UserError(f"the convolutional stem does not take {', '.join(asked)}")
        super().__init__(img_size, patch_size, in_chans, embed_dim, device="meta")
        factory = {"device": device, "dtype": dtype}
        if any(side % 2 for side in self.patch_size):
            raise UserError(f"patch_size={self.patch_size} of a convolutional stem must be even")
        patch_grid(self.img_size, self.patch_size)
        self.in_chans = in_chans
        self.conv = nn.Sequential(
            nn.Conv2d(in_chans, WIDTH, 7, stride=2, padding=3, bias=False, **factory),
            nn.BatchNorm2d(WIDTH, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False, **factory),
            nn.BatchNorm2d(WIDTH, **factory),
            nn.ReLU(inplace=True),
        )
        half = (self.patch_size[0] // 2, self.patch_size[1] // 2)
        self.proj = nn.Conv2d(WIDTH, embed_dim, half, stride=half, bias=bias, **factory)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take another image size; the patch size is built in.

        Raises:
            UserError: If another patch size is asked for, or the patch does not divide the image.
        """
        if patch_size is not None and patch_size not in (self.patch_size, self.patch_size[0]):
            raise UserError("a convolutional stem cannot change its patch size")
        size = self.img_size if img_size is None else whole_size("img_size", img_size)
        patch_grid(size, self.patch_size)
        super().set_input_size(img_size=size)

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B N C"]:
        """Embed the patches."""
        if tuple(x.shape[-2:]) != tuple(self.img_size):
            raise UserError(
                f"image is {tuple(x.shape[-2:])}, the model was built for {self.img_size}"
            )
        out: Tensor = self.proj(self.conv(x))
        return out.flatten(2).transpose(1, 2)
