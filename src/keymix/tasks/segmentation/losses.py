# SPDX-License-Identifier: Apache-2.0
"""Losses of masks: cross entropy of pixels, and a soft Dice loss.

The paper on KV attention in SETR (Hwa et al. 2025, https://doi.org/10.1007/978-3-658-47422-5_71,
Sec. 2.3) names no loss; cross entropy is that of SETR (https://arxiv.org/abs/2012.15840).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from keymix.data.kinds import IGNORE


def pixel_losses(logits: Tensor, targets: Tensor, *, multilabel: bool) -> tuple[Tensor, Tensor]:
    """Cross entropy of each pixel, 0 where it is ignored, and which pixels count.

    Args:
        logits: ``[B, K, H, W]``.
        targets: ``[B, H, W]`` class numbers; ``[B, K, H, W]`` of 0 and 1 where ``multilabel``.
        multilabel: Whether classes are answered each for itself (binary cross entropy).

    Shape: -> losses and booleans, both like targets.
    """
    counted = targets != IGNORE
    if not multilabel:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none"), counted
    wanted = (targets * counted).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * counted, counted


def mean_loss(logits: Tensor, targets: Tensor, *, multilabel: bool) -> Tensor:
    """Mean cross entropy over the pixels that count; 0 where none does."""
    losses, counted = pixel_losses(logits, targets, multilabel=multilabel)
    return losses.sum() / counted.sum().clamp(min=1)


def loss_of_each(logits: Tensor, targets: Tensor, *, multilabel: bool) -> Tensor:
    """Mean cross entropy of each image over its pixels that count, ``[B]``; 0 where none does."""
    losses, counted = pixel_losses(logits, targets, multilabel=multilabel)
    return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def soft_dice_loss(
    logits: Tensor, targets: Tensor, *, multilabel: bool, classes: Sequence[int]
) -> Tensor:
    r"""Mean over classes of :math:`1 - (2 \sum p y + 1) / (\sum p + \sum y + 1)`, over the batch.

    Milletari et al. 2016, V-Net, https://arxiv.org/abs/1606.04797, Sec. 3, with the plain sums in
    the denominator, 1 added above and below, and p the softmax (sigmoid where ``multilabel``). Of
    a class that the batch has not there remains :math:`1 - 1 / (\sum p + 1)`: nearly 1 in value
    until p is small in all pixels together, and :math:`1 / (\sum p + 1)^2` in gradient by p, which
    is little as long as that sum is large.

    Args:
        logits: ``[B, K, H, W]``.
        targets: As in `pixel_losses`; ignored pixels count nowhere.
        multilabel: Whether classes are answered each for itself.
        classes: Those that count, all but the background.
    """
    counted = targets != IGNORE
    if multilabel:
        shares = logits.sigmoid() * counted
        wanted = (targets * counted).to(shares.dtype)
    else:
        shares = logits.softmax(1) * counted[:, None]
        planes = F.one_hot(targets * counted, logits.shape[1]).movedim(-1, 1)
        wanted = (planes * counted[:, None]).to(shares.dtype)
    shares, wanted = shares[:, list(classes)], wanted[:, list(classes)]
    both, all_ = (shares * wanted).sum((0, 2, 3)), (shares + wanted).sum((0, 2, 3))
    return (1 - (2 * both + 1) / (all_ + 1)).mean()
