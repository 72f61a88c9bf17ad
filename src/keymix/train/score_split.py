# SPDX-License-Identifier: Apache-2.0
"""Score a model on a split, by the task that the data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from torch import nn

from keymix.train.mask_scoring import MaskScored, score_masks
from keymix.train.model import device_of_this_machine
from keymix.train.recipe import Recipe
from keymix.train.scoring import ImageBatch, Scored, score

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split
    from keymix.data.loaders import Loader


def score_split(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    split: Split,
    data: ImageData,
    *,
    num_classes: int,
    precision: str,
) -> Scored | MaskScored:
    """Answer every image of a split and score the answers.

    Args:
        model: Evaluated as it stands, in eval mode.
        batches: The split's, on the device, their targets the model's classes.
        split: The split.
        data: The data set.
        num_classes: Outputs of the model.
        precision: As in a recipe.
    """
    device = device_of_this_machine()
    if data.masks is None:
        return score(model, batches, num_classes=num_classes, device=device, precision=precision)
    return score_masks(model, batches, split, data, device=device, precision=precision)


def eval_loader(recipe: Recipe, data: ImageData, split: Literal["val", "test"]) -> Loader:
    """Serve a split's images in order, as a run is validated and tested on them.

    Args:
        recipe: The run.
        data: The data set.
        split: Which of its splits.
    """
    from keymix.data.loaders import Loader

    return Loader(
        data.val if split == "val" else data.test,
        data,
        batch_size=recipe.data.eval_batch_size,
        train=False,
        augment=None,
        seed=recipe.seed,
        workers=recipe.data.workers,
        device=device_of_this_machine(),
    )
