# SPDX-License-Identifier: Apache-2.0
"""Losses of predicted masks: of pixels, of overlap, and of distance to the true outline.

The paper on KV attention in SETR (Hwa et al. 2025, https://doi.org/10.1007/978-3-658-47422-5_71,
Sec. 2.3) names no loss; cross entropy is that of SETR (https://arxiv.org/abs/2012.15840). Of a
batch over several ranks the mean of what each returns is the loss of the batch, which the losses
of libraries do not give.

Shape: logits ``[B, K, H, W]``, targets ``[B, H, W]`` of class numbers, or ``[B, K, H, W]`` of 0 and
1 where ``multilabel``; 255 is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.kinds import IGNORE
from keymix.train import ranks


def pixel_losses(logits: Tensor, targets: Tensor, *, multilabel: bool) -> tuple[Tensor, Tensor]:
    """Cross entropy of each pixel, 0 where it is ignored, and which pixels count.

    With ``multilabel`` each class is answered for itself, by binary cross entropy.

    Returns losses and booleans, both of the shape of the targets.
    """
    counted = targets != IGNORE
    if not multilabel:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none"), counted
    wanted = (targets * counted).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * counted, counted


def mean_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    multilabel: bool,
    focal: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Mean over the pixels that count of :math:`(1 - p)^\gamma` times the cross entropy.

    Lin et al. 2017, Focal Loss, https://arxiv.org/abs/1708.02002, Eq. 4 and 5, where p is the
    share that the model gives to what is true of the pixel; cross entropy with ``focal = 0``.
    0 where no pixel counts.

    `weights` of each class ``[K]`` say how much a pixel of it weighs in the mean; with
    ``multilabel`` a pixel inside of it, where those outside weigh 1. `focal` is :math:`\gamma`.
    """
    losses, counted = pixel_losses(logits, targets, multilabel=multilabel)
    if focal:
        losses = losses * (-torch.expm1(-losses)) ** focal
    share = counted.to(losses.dtype)
    if weights is not None and multilabel:
        share = share * torch.where(targets == 1, weights[:, None, None], 1.0)
    elif weights is not None:
        share = share * weights[targets * counted]
    total = ranks.mean(share.sum()).clamp(min=torch.finfo(losses.dtype).tiny)
    return (losses * share).sum() / total


def loss_of_each(logits: Tensor, targets: Tensor, *, multilabel: bool) -> Tensor:
    """Mean cross entropy of each image over its pixels that count, ``[B]``; 0 where none does."""
    losses, counted = pixel_losses(logits, targets, multilabel=multilabel)
    return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def overlap_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    multilabel: bool,
    classes: Sequence[int],
    tversky: tuple[float, float] = (0.5, 0.5),
) -> Tensor:
    r"""Mean over classes of one minus the Tversky index, by default the soft Dice loss.

    .. math::

        1 - \frac{2 \sum p y + 1}{2 (\sum p y + \alpha \sum p (1 - y) + \beta \sum (1 - p) y) + 1}

    over the batch, with p the softmax (sigmoid where ``multilabel``). Salehi et al. 2017,
    https://arxiv.org/abs/1706.05721, Eq. 3. With :math:`\alpha = \beta = 1/2` the denominator is
    :math:`\sum p + \sum y + 1`: Dice, Milletari et al. 2016, V-Net,
    https://arxiv.org/abs/1606.04797, Sec. 3, with plain sums. 1 is added above and below: of a
    class that the batch has not there remains :math:`1 - 1 / (2 \alpha \sum p + 1)`.

    `tversky` are :math:`\alpha`, the weight of pixels found too much, and :math:`\beta`, that of
    pixels that were missed. Ignored pixels count nowhere; `classes` are all but the background.
    """
    shares, wanted, _ = _planes(logits, targets, multilabel=multilabel)
    shares, wanted = shares[:, list(classes)], wanted[:, list(classes)]
    sums = [each.sum((0, 2, 3)) for each in (shares * wanted, shares, wanted)]
    both, found, true = ranks.summed(torch.stack(sums)).unbind()
    wrong = tversky[0] * (found - both) + tversky[1] * (true - both)
    return (1 - (2 * both + 1) / (2 * (both + wrong) + 1)).mean()


def boundary_loss(
    logits: Tensor, targets: Tensor, *, multilabel: bool, classes: Sequence[int]
) -> Tensor:
    r"""Mean over classes and pixels that count of :math:`p \phi`, pixels.

    Kervadec et al. 2019, https://arxiv.org/abs/1812.07032, Eq. 5: :math:`\phi` is the distance to
    the true outline, negative inside, so that what is found far from the truth costs most; below 0
    where a mask is right. It is 0 for a class that an image does not have, or has everywhere.
    The outline lies between pixels, half of one from the centres of both. Distances are made on
    the CPU at every step.

    Ignored pixels are outside of every class, and count nowhere; `classes` are all but the
    background.
    """
    shares, wanted, counted = _planes(logits, targets, multilabel=multilabel)
    shares, wanted = shares[:, list(classes)], wanted[:, list(classes)]
    masks = (wanted == 1).cpu().numpy()
    distances = np.array([[signed_distance(mask) for mask in image] for image in masks])
    total = ranks.mean(counted[:, list(classes) if multilabel else slice(None)].sum() / 1.0)
    total = total if multilabel else total * len(classes)
    phi = torch.from_numpy(distances).to(shares)
    return (shares * phi).sum() / total.clamp(min=1 / ranks.size())


def signed_distance(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Distance of each pixel's centre to the outline of a mask, negative inside; 0 without one."""
    from scipy.ndimage import distance_transform_edt

    if mask.all() or not mask.any():
        return np.zeros(mask.shape)
    outside, inside = distance_transform_edt(~mask), distance_transform_edt(mask)
    signed: NDArray[np.float64] = np.where(mask, 0.5 - inside, outside - 0.5)
    return signed


def _planes(logits: Tensor, targets: Tensor, *, multilabel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shares and truth of each class, 0 where a pixel is ignored, and which count, ``[B, K, ..]``.

    What counts is ``[B, 1, H, W]`` of exclusive masks.
    """
    counted = targets != IGNORE
    if multilabel:
        shares = logits.sigmoid() * counted
        return shares, (targets * counted).to(shares.dtype), counted
    counted = counted[:, None]
    shares = logits.softmax(1) * counted
    planes = F.one_hot(targets * counted[:, 0], logits.shape[1]).movedim(-1, 1)
    return shares, (planes * counted).to(shares.dtype), counted
