# SPDX-License-Identifier: Apache-2.0
"""What the trained models see, in pictures: attention maps, collapse, and a task's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keymix.analysis.answers import Answers
from keymix.compare import gather, maps
from keymix.compare.executor import FAILURES
from keymix.compare.plan import Plan
from keymix.compare.runs import Finished, Reading
from keymix.compare.worker import reason
from keymix.records import Own
from keymix.report.part import Page, page_of

if TYPE_CHECKING:
    from torch import nn

    from keymix.data.dataset import ImageData


def pictures(plan: Plan, runs: Sequence[Reading], data: ImageData) -> gather.Pictures:
    """Look into every mixer's model of one seed, last epoch.

    Attention is read where images have one size, so that maps of several lie next to each other.

    Args:
        plan: The comparison.
        runs: Its runs as they were read.
        data: Its images.
    """
    seed, models = gather.trained_models(plan, runs)
    task = data.record().task_kind
    page = page_of(task)
    answers = next(r.answers["last"] for r in runs if isinstance(r, Finished))
    own = Own.of(_drawn(page, models, data, answers, seed=seed))
    if task.whole_images:
        return gather.Pictures(own=own)
    return gather.Pictures(
        attention=maps.attention(
            models,
            data,
            pooling=plan.pooling,
            seed=seed,
            chosen=page.chosen(answers, maps.PICTURES),
            label=page.label,
        ),
        collapse=maps.collapse(models, data, seed=seed),
        own=own,
    )


def _drawn(
    page: Page, models: Mapping[str, nn.Module], data: ImageData, answers: Answers, *, seed: int
) -> object:
    """Let the task draw what each model answers to the test images that it chose."""
    import torch

    chosen = page.drawn(answers)
    if not chosen:
        return None
    images = maps.listed(data, data.test, chosen)
    outputs: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for label, model in models.items():
        try:
            with torch.inference_mode():
                outputs[label] = model.eval()(images)
        except FAILURES as error:
            missing[label] = reason(error)
    return page.draw(data, chosen, outputs, missing, seed=seed)
