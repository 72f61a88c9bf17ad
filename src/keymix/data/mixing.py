# SPDX-License-Identifier: Apache-2.0
r"""Mixup and cutmix, a share and a box for each sample, made where the images are.

Mixup: x = lambda x_i + (1 - lambda) x_j, lambda ~ Beta(alpha, alpha). Paper: mixup,
https://arxiv.org/abs/1710.09412. Cutmix: a box of x_j, of the share 1 - lambda before it is cut at
the border, covers x_i; lambda becomes the share that stays visible. Paper: CutMix,
https://arxiv.org/abs/1905.04899. Targets are mixed by the same lambda.

Differs: the papers, and torchvision's MixUp and CutMix, whose distribution is kept, draw one lambda
and one box for a whole batch; here each sample has its own.
"""

from __future__ import annotations

import functools

import torch
from scipy import special
from torch import Tensor

from keymix.data.streams import Stream, device_uniforms

_QUANTILES = 1 << 16  # the drawn distribution differs by at most 1 / 2^16 in probability


class Mixing:
    """Mixes each image of a batch with the one before it.

    What happens to a sample is a function of (seed, epoch, sample index); its partner is the sample
    before it in the batch. The first call for a device uploads two tables; later ones bring nothing
    from the host and ask the device nothing.

    Shape: images ``[B, C, H, W]`` or frames ``[B, T, C, H, W]``, targets int64 ``[B]``, index int64
    ``[B]`` -> the same shape, targets float32 ``[B, num_classes]``.
    """

    def __init__(
        self, mixup: float, cutmix: float, num_classes: int, seed: int, probability: float = 1.0
    ) -> None:
        if min(mixup, cutmix) < 0 or max(mixup, cutmix) <= 0:
            raise ValueError(f"{mixup=} and {cutmix=} must be 0 or more, and one above 0.")
        self.mixup = mixup
        self.cutmix = cutmix
        self.num_classes = num_classes
        self.seed = seed
        self.probability = probability

    def __call__(
        self, images: Tensor, targets: Tensor, index: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mix a batch of an epoch."""
        draws = device_uniforms(4, self.seed, epoch, Stream.MIXING, index=index.to(images.device))
        visible = self._visible(draws, *images.shape[-2:])  # [B, H, W]
        shares = visible.mean((1, 2))[:, None]  # of an image in its own mixture
        # [B, 1, H, W], or [B, 1, 1, H, W] with frames
        weights = visible.view(len(visible), *(1,) * (images.ndim - 3), *images.shape[-2:])
        weights = weights.to(images.dtype)
        mixed = images.roll(1, 0).lerp(images, weights)
        classes = torch.arange(self.num_classes, device=targets.device)
        own = (targets[:, None] == classes).to(torch.float32)  # [B, num_classes]
        return mixed, own.roll(1, 0).lerp(own, shares)

    def _visible(self, draws: Tensor, height: int, width: int) -> Tensor:
        """Say how much of each pixel stays the image's own; draws ``[B, 4]`` -> ``[B, H, W]``."""
        coin, share, x, y = draws.unbind(1)
        device = draws.device
        blended = boxed = None
        if self.mixup:
            blended = _quantile(_beta(self.mixup, device), share).float()
            blended = blended[:, None, None].expand(-1, height, width)
        if self.cutmix:
            shown = _quantile(_beta(self.cutmix, device), share)
            boxed = _outside_boxes(shown, x, y, height, width).float()
        if blended is None or boxed is None:
            (visible,) = (way for way in (blended, boxed) if way is not None)
        else:
            visible = torch.where((coin < 0.5 * self.probability)[:, None, None], blended, boxed)
        if self.probability == 1:
            return visible
        return visible.masked_fill((coin >= self.probability)[:, None, None], 1.0)


def _outside_boxes(share: Tensor, x: Tensor, y: Tensor, height: int, width: int) -> Tensor:
    """Mark what a box of the area ``1 - share`` around a random pixel leaves; ``[B, H, W]``."""
    half = 0.5 * (1.0 - share).sqrt()
    inside = []
    for side, centre in ((height, y), (width, x)):
        middle = (centre * side).long()[:, None]
        reach = (half * side).long()[:, None]
        place = torch.arange(side, device=share.device)
        inside.append((place >= middle - reach) & (place < middle + reach))  # [B, side]
    return ~(inside[0][:, :, None] & inside[1][:, None, :])


def _quantile(table: Tensor, probability: Tensor) -> Tensor:
    """Read a quantile function between its knots."""
    place = probability * _QUANTILES
    knot = place.long()
    return torch.lerp(table[knot], table[knot + 1], place - knot)


@functools.lru_cache(maxsize=8)
def _beta(alpha: float, device: torch.device) -> Tensor:
    """Tabulate the quantiles of Beta(alpha, alpha), float64 ``[2^16 + 1]``, on the device."""
    at = torch.linspace(0.0, 1.0, _QUANTILES + 1, dtype=torch.float64)
    return torch.from_numpy(special.betaincinv(alpha, alpha, at.numpy())).to(device)
