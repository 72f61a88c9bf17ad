# SPDX-License-Identifier: Apache-2.0
"""What is said of a network that gives all images, or nearly all, the same answer."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence

from keymix.data.balance import Balance
from keymix.errors import KeymixWarning
from keymix.models.factory import domain_of
from keymix.train.recipe import ModelConfig
from keymix.train.record import SplitScores

FEW = 8
"""Images below which the same answer for all means little."""
NEARLY = 0.95
"""Share of images with one answer that counts as all, unless its class dominates (`Balance`)."""

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
    """Warn where (nearly) all images of several classes got one answer, and say why it may be so.

    A class with ten times the images of all others together may be the answer to nearly all.

    Args:
        model: What was trained.
        classes: Names of the classes.
        split: What the images are, such as ``"test"``.
        predicted: Most likely class of each image.
        targets: True class of each.
        loss: Mean loss over them.
        items: What they are called.
    """
    total = len(predicted)
    if total < FEW or len(set(targets)) == 1:
        return
    answer, count = Counter(predicted).most_common(1)[0]
    nearly = count >= NEARLY * total and not Balance(Counter(targets)).dominates(answer)
    if count < total and not nearly:
        return
    if loss is None or not math.isfinite(loss):
        why = DIVERGED
    elif domain_of(model.name) == "spiking" and model.options.get("neuron") != "relu":
        why = f"probably {SILENT}"
    else:
        why = f"probably {UNTRAINED}"
    who = "every one of" if count == total else f"{count:,} of"
    told = f"{who} the {total:,} {split} {items} got the same answer, {classes[answer]!r}: {why}"
    warnings.warn(told, KeymixWarning, stacklevel=3)


def warn_of_no_overlap(split: str, images: int, test: SplitScores) -> None:
    """Warn where predicted masks and true ones share no pixel of any class that counts.

    Where nothing is true, whatever is predicted is too much, and that is said.

    Args:
        split: What the images are, such as ``"test"``.
        images: How many.
        test: What was scored.
    """
    loss = test.scores["loss"]
    if (test.scores["dice"] or 0.0) > 0:
        return
    if test.true_pixels == 0:
        told = (
            f"none of the {images:,} {split} images has a class that counts: scores of 0 say only "
        )
        warnings.warn(f"{told}that something was predicted", KeymixWarning, stacklevel=3)
        return
    broken = loss is None or not math.isfinite(loss)
    why = DIVERGED if broken else f"probably {UNTRAINED}"
    told = f"the masks predicted for the {images:,} {split} images cover nothing of the true ones"
    warnings.warn(f"{told}: {why}", KeymixWarning, stacklevel=3)
