# SPDX-License-Identifier: Apache-2.0
"""From images to tokens: sizes in pixels, patch embeddings of four kinds, and patch merging."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import PatchEmbed
from timm.models._features import FeatureListNet
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError, unknown

Grid = tuple[int, int]


def patch_grid(size: Grid, patch: Grid, *, padded: bool = False) -> Grid:
    """Return the grid of patches that an image is cut into, all in pixels (height, width).

    Refuses images that patches do not fill, whose last rows or columns would be dropped; the error
    has the nearest sizes. An image that is ``padded`` to whole patches has the grid of those that
    are in the image as a whole, as timm's position embeddings have it.
    """
    for side, step in zip(size, patch, strict=True):
        if side < step if padded else side % step:
            low = side - side % step
            near = f"{low} or {low + step}" if low else f"{step}"
            raise UserError(
                f"images of {size[0]}x{size[1]}: the model cuts patches of {patch[0]}x{patch[1]} "
                f"pixels, which {side} does not hold in full; take {near}"
            )
    return size[0] // patch[0], size[1] // patch[1]


class _OwnPatchEmbed(PatchEmbed, ABC):
    """timm's patch embedding with layers of its own in place of the convolution.

    Images ``[B, in_chans, H, W]`` of the size that it was built for become tokens ``[B, N, C]``.
    The patch size is built in. What else timm's ViT passes (``dynamic_img_pad`` and the like) is
    refused if it is set.
    """

    called: str

    def __init__(
        self,
        img_size: int | Grid | None,
        patch_size: int | Grid,
        in_chans: int,
        embed_dim: int,
        timm: Mapping[str, Any],
    ) -> None:
        asked = sorted(name for name, value in timm.items() if value)
        if asked:
            raise UserError(f"{self.called} does not take {', '.join(asked)}")
        super().__init__(img_size, patch_size, in_chans, embed_dim, device="meta")

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take another image size; refuse another patch size, and images that it does not fill."""
        if patch_size is not None and whole_size("patch_size", patch_size) != self.patch_size:
            raise UserError(
                f"{self.called} cannot change its patch size, {self.patch_size[0]}x"
                f"{self.patch_size[1]} pixels; leave it out"
            )
        if img_size is not None:
            patch_grid(whole_size("img_size", img_size), self.patch_size)
        super().set_input_size(img_size=img_size)

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B N C"]:
        """Embed the patches."""
        if self.img_size is not None and tuple(x.shape[-2:]) != tuple(self.img_size):
            raise UserError(
                f"image is {tuple(x.shape[-2:])}, the model was built for {self.img_size}"
            )
        return self.tokens(x)

    @abstractmethod
    def tokens(self, x: Tensor) -> Tensor:
        """Embed an image of the right size."""


class ConvStem(_OwnPatchEmbed):
    """Three convolutions: 7x7 of stride 2, 3x3, and one as wide as half a patch.

    ``conv``: 7x7 (stride 2, padding 3) to 64 channels without bias, BatchNorm, ReLU; 3x3 (padding
    1) likewise; ``proj``: p/2 x p/2 of stride p/2 to C channels, with bias; p is even. A token sees
    a little beyond its p x p pixels.
    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Sec. 5.4, "three CNN layers ... the same
    configurations as" T2T-ViT; the sizes are those that make the published parameter counts.
    Cost: 49 c 64 / 4 + 9 64^2 / 4 + 64 C / 4 multiply-adds per pixel.
    """

    called = "a convolutional stem"
    width = 64  # channels of the two inner convolutions

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int | Grid = 16,
        in_chans: int = 3,
        embed_dim: int = 384,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **timm: Any,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embed_dim, timm)
        factory = {"device": device, "dtype": dtype}
        if any(side % 2 for side in self.patch_size):
            raise UserError(f"patch_size={self.patch_size} of a convolutional stem must be even")
        patch_grid(self.img_size, self.patch_size)
        self.in_chans = in_chans
        self.conv = nn.Sequential(
            nn.Conv2d(in_chans, self.width, 7, stride=2, padding=3, bias=False, **factory),
            nn.BatchNorm2d(self.width, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(self.width, self.width, 3, padding=1, bias=False, **factory),
            nn.BatchNorm2d(self.width, **factory),
            nn.ReLU(inplace=True),
        )
        half = (self.patch_size[0] // 2, self.patch_size[1] // 2)
        self.proj = nn.Conv2d(self.width, embed_dim, half, stride=half, bias=bias, **factory)

    def tokens(self, x: Tensor) -> Tensor:
        """Embed an image of the right size."""
        out: Tensor = self.proj(self.conv(x))
        return out.flatten(2).transpose(1, 2)


class EarlyConvs(_OwnPatchEmbed):
    """A stack of 3x3 convolutions of stride 2, then a 1x1 convolution to the tokens' width.

    For patches of p = 2^k pixels there are k strided convolutions, each without bias and followed
    by BatchNorm and ReLU, under ``convs``; ``proj`` is the 1x1 convolution, with bias. Channels
    double: C / 2^(k-1), ..., C / 2, C, but never fewer than 16. With patches of 16 and C of 192
    or 384 these are the paper's 24, 48, 96, 192 and 48, 96, 192, 384. Where patches are not
    square, the last convolutions have stride 1 along the shorter side. A token sees 2p - 1 pixels
    a side.
    Paper: Early Convolutions Help Transformers See Better, https://arxiv.org/abs/2106.14881,
    Sec. 3, "convolutional stem design". Differs: the paper drops one Transformer block in exchange;
    the depth here is the model's.
    Cost: sum over i = 1..k of 9 c_(i-1) c_i / 4^i, plus C^2 / 4^k, multiply-adds per pixel, where
    c_0 is the number of image channels and c_k = C if C is at least 16.
    """

    called = "a stem of strided convolutions"
    least = 16  # channels

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int | Grid = 16,
        in_chans: int = 3,
        embed_dim: int = 384,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **timm: Any,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embed_dim, timm)
        if any(side < 2 or side.bit_count() != 1 for side in self.patch_size):
            raise UserError(
                f"{patch_size=}: each convolution of the stem halves the image, so patches have "
                "2, 4, 8, 16 or 32 pixels a side; take one of these, or leave stem='conv' out"
            )
        patch_grid(self.img_size, self.patch_size)
        factory = {"device": device, "dtype": dtype}
        self.in_chans = in_chans
        halvings = [side.bit_length() - 1 for side in self.patch_size]
        count, before = max(halvings), in_chans
        layers: list[nn.Module] = []
        for i in range(count):
            width = max(self.least, embed_dim >> (count - 1 - i))
            stride = (1 + (i < halvings[0]), 1 + (i < halvings[1]))
            layers += [
                nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False, **factory),
                nn.BatchNorm2d(width, **factory),
                nn.ReLU(inplace=True),
            ]
            before = width
        self.convs = nn.Sequential(*layers)
        self.proj = nn.Conv2d(before, embed_dim, 1, bias=bias, **factory)

    def tokens(self, x: Tensor) -> Tensor:
        """Embed an image of the right size."""
        out: Tensor = self.proj(self.convs(x))
        return out.flatten(2).transpose(1, 2)


class ResNetPatchEmbed(_OwnPatchEmbed):
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

    called = "a ResNet's patch embedding"
    reduction = 16  # of three stages: convolution 2, pooling 2, stages 1, 2, 2

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int | Grid = reduction,
        in_chans: int = 3,
        embed_dim: int = 768,
        depths: Sequence[int] = (3, 4, 9),
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **timm: Any,
    ) -> None:
        if whole_size("patch_size", patch_size) != (self.reduction, self.reduction):
            raise UserError(
                f"{patch_size=}: a ResNet's patches are its reduction, {self.reduction} pixels; "
                "leave it out"
            )
        super().__init__(img_size, self.reduction, in_chans, embed_dim, timm)
        factory = {"device": device, "dtype": dtype}
        channels = (64, 128, 256)[: len(depths)]
        resnet = ResNet(
            Bottleneck, tuple(depths), 0, in_chans=in_chans, channels=channels, **factory
        )
        self.backbone = FeatureListNet(resnet, out_indices=(len(depths),))
        self.proj = nn.Conv2d(resnet.num_features, embed_dim, 1, bias=bias, **factory)

    def tokens(self, x: Tensor) -> Tensor:
        """Embed an image of the right size."""
        out: Tensor = self.proj(self.backbone(x)[-1])
        return out.flatten(2).transpose(1, 2)


SHIFTS = ("axes", "half_patch")
# direction of each copy's content: right and down are positive
_AXES = ((1, 0), (-1, 0), (0, 1), (0, -1))
_DIAGONALS = ((1, 1), (1, -1), (-1, 1), (-1, -1))


class ShiftedPatchEmbed(_OwnPatchEmbed):
    """Patch embedding of the image with four shifted copies of it.

    Paper: Vision Transformer for Small-Size Datasets, https://arxiv.org/abs/2112.13492, Sec. 4.1;
    part of the ViT-S baseline of SKA. The shifted copies are concatenated over channels, cut into
    patches, normalised (LayerNorm over 5 * in_chans * p^2 values) and projected.

    ``shifts`` says how the copies are moved, zeros following: ``"axes"`` by one pixel right, left,
    down and up, as in the code behind SKA's baseline; ``"half_patch"`` along the diagonals by
    p // 2 pixels, as in the paper and its code.
    """

    called = "shifted patch embedding"

    def __init__(
        self,
        img_size: int | Grid = 32,
        patch_size: int | Grid = 4,
        in_chans: int = 3,
        embed_dim: int = 512,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        shifts: str = "axes",
        **timm: Any,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embed_dim, timm)
        if shifts not in SHIFTS:
            raise unknown("shifts", shifts, SHIFTS)
        height, width = self.patch_size
        if shifts == "half_patch" and min(height, width) < 2:
            raise UserError(
                f"{shifts=} moves by half a patch, which is no whole pixel of patches of "
                f"{height}x{width}; take shifts='axes', or larger patches"
            )
        self.shifts = shifts
        width = 5 * in_chans * self.patch_size[0] * self.patch_size[1]
        self.norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.proj = nn.Linear(width, embed_dim, bias=bias, device=device, dtype=dtype)

    def _copies(self, x: Float[Tensor, "B c H W"]) -> list[Float[Tensor, "B c H W"]]:
        """Return the image moved in the four directions."""
        down, right = (side // 2 for side in self.patch_size)
        steps = [(right * across, down * along) for across, along in _DIAGONALS]
        steps = [*_AXES] if self.shifts == "axes" else steps
        # padding of one side and cropping of the other: left, right, top, bottom
        return [F.pad(x, (dx, -dx, dy, -dy)) for dx, dy in steps]

    def tokens(self, x: Tensor) -> Tensor:
        """Embed an image of the right size."""
        x = torch.cat((x, *self._copies(x)), 1)
        patches = F.unfold(x, self.patch_size, stride=self.patch_size).transpose(1, 2)
        out: Tensor = self.proj(self.norm(patches))
        return out


class PatchMerge(nn.Module):
    """Concatenate f x f neighbouring tokens and map them to the next stage's width.

    The merging of the Swin behind SKA's rows (Table 9, "downscaling"): a linear map with bias of
    the unfolded tokens, column by column as in timm's PatchMerging. A factor of 1 only widens.
    Differs from timm's, which normalises first, has no bias and always halves. Sides that f does
    not divide are padded with zeros at the bottom and the right, as timm does.

    Shape: x ``[B, H, W, dim]`` -> ``[B, ceil(H / f), ceil(W / f), out_dim]``.
    Cost: f^2 dim out_dim multiply-adds per token that goes out.
    """

    def __init__(
        self, dim: int, out_dim: int, factor: int = 2, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        if factor < 1:
            raise UserError(f"merging {factor=} must be at least 1")
        self.factor = factor
        self.reduction = nn.Linear(factor**2 * dim, out_dim, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B h w D"]:
        """Merge them."""
        f = self.factor
        x = F.pad(x, (0, 0, 0, -x.shape[2] % f, 0, -x.shape[1] % f))
        B, H, W, C = x.shape
        x = x.reshape(B, H // f, f, W // f, f, C).permute(0, 1, 3, 4, 2, 5)
        out: Tensor = self.reduction(x.flatten(3))  # of [B, h, w, column, row, C]
        return out
