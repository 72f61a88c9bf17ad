# SPDX-License-Identifier: Apache-2.0
"""What is said of a network that gives every image the same answer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from keymix.errors import KeymixWarning
from keymix.models.factory import domain_of
from keymix.train.recipe import ModelConfig

FEW = 8
"""Images below which the same answer for all means little."""

DIVERGED = "its outputs are NaN or infinite, so training diverged: lower --optim.lr"
SILENT = (
    "its spikes die out on the way, or it has learned nothing yet: train more epochs, or with a "
    "lower --optim.lr"
)
UNTRAINED = "it has learned nothing yet, or training diverged: train more epochs, lower --optim.lr"


def warn_of_one_answer(
    model: ModelConfig,
    classes: Sequence[str],
    split: str,
    predicted: Sequence[int],
    targets: Sequence[int],
    loss: float | None,
    *,
    items: str = "images",
) -> None:
    """Warn where a network gave all images of several classes one answer, and say why it may be so.

    Args:
        model: What was trained.
        classes: Names of the classes.
        split: What the images are, such as ``"test"``.
        predicted: Most likely class of each image.
        targets: True class of each.
        loss: Mean loss over them.
        items: What they are called.
    """
    same = len(set(predicted)) == 1 and len(set(targets)) > 1
    if not same or len(predicted) < FEW:
        return
    if loss is None or not math.isfinite(loss):
        why = DIVERGED
    elif domain_of(model.name) == "spiking" and model.options.get("neuron") != "relu":
        why = f"probably {SILENT}"
    else:
        why = f"probably {UNTRAINED}"
    told = (
        f"every one of the {len(predicted):,} {split} {items} got the same answer, "
        f"{classes[predicted[0]]!r}: {why}"
    )
    warnings.warn(told, KeymixWarning, stacklevel=3)
