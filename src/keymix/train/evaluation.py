# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model: the data it is shown, its scores by the task, answers that say nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from keymix.analysis.answers import Answers
from keymix.data.kinds import SLICES
from keymix.data.specs import Setting, parse
from keymix.errors import KeymixWarning, UserError
from keymix.models.factory import domain_of
from keymix.records import Own
from keymix.train import ranks
from keymix.train.model import device_of_this_machine, load_data, warn_of_sparse
from keymix.train.parts import Evaluated, answers_of
from keymix.train.recipe import DataConfig, ModelConfig, Recipe
from keymix.train.record import SplitScores

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.data.loaders import Loader
    from keymix.data.record import DataRecord

SplitName = Literal["train", "val", "test"]

DIVERGED = "its outputs are NaN or infinite, so training diverged: lower --optim.lr"
SILENT = (
    "its spikes die out on the way, or it has learned nothing yet: train more epochs, or with a "
    "lower --optim.lr"
)
UNTRAINED = "it has learned nothing yet, or training diverged: train more epochs, lower --optim.lr"


def eval_loader(recipe: Recipe, data: ImageData, split: SplitName) -> Loader:
    """Serve a split, or this rank's share, in order, without augmentation, on the device."""
    from keymix.data.loaders import Loader

    return Loader(
        getattr(data, split),
        data,
        batch_size=recipe.data.eval_batch_size if data.facts.window_overlap is None else 1,
        train=False,
        seed=recipe.seed,
        rank=ranks.rank(),
        world_size=ranks.size(),
        workers=recipe.data.workers,
        device=device_of_this_machine(),
    )


def score_split(
    recipe: Recipe,
    model: nn.Module,
    data: ImageData,
    split: SplitName,
) -> Evaluated:
    """Answer all of a split and score the answers."""
    batches = eval_loader(recipe, data, split)
    return answers_of(data.task).evaluate(
        model,
        batches,
        batches.split,
        data,
        device=device_of_this_machine(),
        precision=recipe.precision,
    )


def record_of(found: Evaluated) -> SplitScores:
    """Return what records keep of an evaluation."""
    return SplitScores(scores=found.scores, own=Own.of(found.own))


def warn_of_degenerate(
    answers: Answers, model: ModelConfig, inputs: str, loss: float | None
) -> None:
    """Warn of answers that say nothing of a model, and say why: its mean loss may not be finite.

    `inputs` is what was answered, such as ``test images``.
    """
    if loss is not None and not math.isfinite(loss):
        why = DIVERGED
    elif domain_of(model.name) == "spiking" and model.options.get("neuron") != "relu":
        why = f"probably {SILENT}"
    else:
        why = f"probably {UNTRAINED}"
    unscorable = answers.unscorable()
    found = [unscorable] if unscorable else [f"{each}: {why}" for each in answers.degenerate()]
    for text in found:
        warnings.warn(text.replace("{inputs}", inputs), KeymixWarning, stacklevel=3)


def data_for(
    config: DataConfig,
    seen: DataRecord,
    spec: str | None,
    size: tuple[int, int],
    time_steps: int | None = None,
) -> ImageData:
    """Load data as a run's model wants it, its labels by the numbers of the run's classes.

    `seen` is the record of the data that the run was trained on; `spec` names other data; images
    that keep their own size ignore `size`. `time_steps` are frames per recording, of events.
    """
    own = config.spec
    wanted = own if spec is None else spec
    entry, kind = parse(wanted)[0], seen.kind
    if entry.input_kind.axes != kind.axes:
        holds = entry.input_kind.holds
        raise UserError(f"data {wanted!r} holds {holds}; the run was trained on {kind.holds}.")
    _same_task(wanted, seen)
    if wanted != own:
        options = answers_of(seen.task_kind).options_for(seen, wanted)
        config = of_other_data(config, wanted, options)
    if seen.window_overlap is not None:
        of_task = {**config.task_options, "window_overlap": seen.window_overlap}
        config = replace(config, task_options=of_task)
    if time_steps is not None and entry.takes("time_steps"):
        config = replace(config, time_steps=time_steps)
    white = seen.white_level if entry.takes("white_level") else None
    config = replace(config, white_level=white)
    own_sizes = seen.task_kind.own_sizes and config.image_size is None
    given = None if own_sizes else size
    data = warn_of_sparse(load_data(config, image_size=given, crop_pct=seen.crop_pct))
    if data.in_chans != seen.in_chans:
        raise UserError(
            f"data {data.spec!r} has {kind.nouns} of {data.in_chans} channels; the run was trained "
            f"on {seen.in_chans}."
        )
    answers_of(data.task).check_data(data, seen)
    if wanted == own and _changed(seen, data.record()):
        text = f"the {kind.nouns} of data {data.spec} are not those that the run was trained with: "
        warnings.warn(f"{text}what is scored may have been trained on", KeymixWarning, stacklevel=2)
    theirs, data = data.classes, replace(data, classes=seen.classes, mean=seen.mean, std=seen.std)
    if theirs == seen.classes[: len(theirs)]:
        return data
    if data.train.stream is not None:
        raise UserError(
            f"data {data.spec!r} is a stream whose classes are not in the run's order: write its "
            "shards again, or name the data that they were made of."
        )
    numbers = torch.tensor([seen.classes.index(name) for name in theirs])
    splits: dict[str, Any] = {
        split.name: replace(split, values=numbers[split.labels]) for split in data.splits
    }
    return replace(data, **splits)


def of_other_data(
    config: DataConfig, spec: str, options: Mapping[str, Setting] | None = None
) -> DataConfig:
    """Take a run's settings over to other data, but those that were its own data's alone.

    `options` are those of the task with which the data is read as the run's own was; None where
    only the images are looked at. A run on stacks needs data whose images have neighbours.
    """
    entry = parse(spec)[0]
    scans = entry.input_kind is SLICES  # images are stacked as asked
    if config.stack not in (None, 1) and not scans:
        raise UserError(
            f"the run was trained on stacks of {config.stack} slices; data {spec!r} has no "
            "neighbours. Name data of scans, such as uwgi:PATH."
        )
    return replace(config, spec=spec, limit=None, test_fraction=None, task_options=options or {})


def _same_task(spec: str, seen: DataRecord) -> None:
    """Refuse data of another task."""
    holds, trained = parse(spec)[0].task, seen.task
    if holds != trained:
        raise UserError(
            f"data {spec!r} is for {holds}; the run was trained for {trained}. Name data of that "
            "kind (`keymix list data`)."
        )


def _changed(seen: DataRecord, now: DataRecord) -> bool:
    """Whether images, labels or splits differ from the record of the training.

    A fingerprint of pixels says nothing about images of another size, or about other frames, nor
    about files.
    """
    same = seen.image_size == now.image_size and seen.time_steps == now.time_steps
    if same and seen.fingerprint_of == now.fingerprint_of and seen.fingerprint != now.fingerprint:
        return True
    return seen.index_sha256 != now.index_sha256
