# SPDX-License-Identifier: Apache-2.0
"""Shifted patch tokenisation: each patch sees its image and four shifted copies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import PatchEmbed
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.patches import whole_size

# left/right and top/bottom padding of the four diagonal shifts; negative padding crops
SHIFTS = ((1, -1, 1, -1), (1, -1, -1, 1), (-1, 1, 1, -1), (-1, 1, -1, 1))


class ShiftedPatchEmbed(PatchEmbed):
    """Patch embedding of the image with its four one-pixel diagonal shifts.

    Paper: Vision Transformer for Small-Size Datasets, https://arxiv.org/abs/2112.13492, Sec. 4.1;
    part of the ViT-S baseline of SKA. The shifted copies are concatenated over channels, cut into
    patches, normalised (LayerNorm over 5 * in_chans * p^2 values) and projected.
    Differs: the shift is one pixel, not half a patch. The code behind SKA's baseline shifts by one
    pixel too, but along the axes, not the diagonals; the counts are the same.

    Args:
        img_size: Height and width of the image in pixels.
        patch_size: Side p of a patch in pixels.
        in_chans: Channels of the image.
        embed_dim: Width C of the tokens.
        bias: Bias of the projection.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
        timm: What else timm's ViT passes to its patch embedding (``dynamic_img_pad`` and the
            like); any that is set is refused.

    Shape: x ``[B, in_chans, H, W]`` -> ``[B, (H / p) * (W / p), C]``.

    Raises:
        UserError: If asked for an option of timm's patch embedding that it does not have.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 4,
        in_chans: int = 3,
        embed_dim: int = 512,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **timm: Any,
    ) -> None:
        asked = sorted(name for name, value in timm.items() if value)
        if asked:
            raise UserError(f"shifted patch embedding does not take {', '.join(asked)}")
        super().__init__(img_size, patch_size, in_chans, embed_dim, device="meta")
        width = 5 * in_chans * self.patch_size[0] * self.patch_size[1]
        self.norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.proj = nn.Linear(width, embed_dim, bias=bias, device=device, dtype=dtype)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take another image size; the patch size is built in.

        Raises:
            UserError: If another patch size is asked for.
        """
        if patch_size is not None and whole_size("patch_size", patch_size) != self.patch_size:
            raise UserError("shifted patch embedding cannot change its patch size")
        super().set_input_size(img_size=img_size)

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B N C"]:
        """Embed the patches."""
        if self.img_size is not None and tuple(x.shape[-2:]) != tuple(self.img_size):
            raise UserError(
                f"image is {tuple(x.shape[-2:])}, the model was built for {self.img_size}"
            )
        x = torch.cat((x, *(F.pad(x, shift) for shift in SHIFTS)), 1)
        patches = F.unfold(x, self.patch_size, stride=self.patch_size).transpose(1, 2)
        out: Tensor = self.proj(self.norm(patches))
        return out
