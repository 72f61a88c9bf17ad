# SPDX-License-Identifier: Apache-2.0
"""Score a model on a split, by the task that the data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from torch import nn

from keymix.records import Own
from keymix.train.model import device_of_this_machine
from keymix.train.parts import Evaluated, answers_of
from keymix.train.recipe import Recipe
from keymix.train.record import SplitScores
from keymix.train.scoring import ImageBatch

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split
    from keymix.data.loaders import Loader


def score_split(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    split: Split,
    data: ImageData,
    *,
    precision: str,
) -> Evaluated:
    """Answer every image of a split and score the answers.

    Args:
        model: Evaluated as it stands, in eval mode.
        batches: The split's, on the device, their targets the model's classes.
        split: The split.
        data: The data set, its classes those of the model.
        precision: As in a recipe.
    """
    return answers_of(data.task).evaluate(
        model, batches, split, data, device=device_of_this_machine(), precision=precision
    )


def record_of(found: Evaluated) -> SplitScores:
    """Return what records keep of an evaluation."""
    return SplitScores(scores=found.scores, own=Own.of(found.own))


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
