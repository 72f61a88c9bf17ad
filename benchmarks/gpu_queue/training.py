# SPDX-License-Identifier: Apache-2.0
"""A training run as a step: it stops in time, resumes, and leaves its small files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_queue.job import Context, Unfinished

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.recipe import Recipe
    from keymix.train.runs import Run

TEXTS = ("metrics.jsonl", "summary.json", "recipe.json", "environment.json")
PREDICTIONS = "predictions_test.npz"


def train_in_time(context: Context, recipe: Recipe, data: ImageData | None = None) -> Run:
    """Train a recipe in the step's folder, or resume there as the run began.

    Its small files go to ``context.keep``, without the folder of the data in them.

    Args:
        context: Of the step.
        recipe: What to train; a run that has begun keeps its own.
        data: The images, if they are loaded already.

    Raises:
        Unfinished: If it was asked to stop: it goes on from its checkpoint.
    """
    from keymix.errors import Interrupted, UserError
    from keymix.train import files
    from keymix.train.engine import train
    from keymix.train.recipe import read_recipe

    folder = context.work / "run"
    if (folder / files.RECIPE).is_file():
        recipe = read_recipe(folder)
    try:
        run = train(recipe, folder, data=data)
    except (Interrupted, UserError, RuntimeError) as stop:
        if not isinstance(stop, Interrupted) and context.left() > 0:
            raise  # else processes that compile were asked to stop as well, and ended so
        lines = folder / files.METRICS
        done = len(files.read_metrics(lines)) if lines.is_file() else 0
        raise Unfinished({"epochs": done, "of": recipe.schedule.epochs}) from stop
    for name in TEXTS:
        text = (folder / name).read_text(encoding="utf-8")
        if context.data is not None:
            text = text.replace(str(context.data), "DATA")
        (context.keep / name).write_text(text, encoding="utf-8")
    (context.keep / PREDICTIONS).write_bytes((folder / PREDICTIONS).read_bytes())
    return run
