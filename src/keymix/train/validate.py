# SPDX-License-Identifier: Apache-2.0
"""Whether a recipe fits: said before its data is read, and before a file of the run is written.

A run that is refused here leaves no folder behind that would be in the corrected one's way.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keymix.data.augment import check_augment
from keymix.data.dataset import ImageData
from keymix.data.loaders import Loader
from keymix.data.specs import OF_ONE_KIND, parse
from keymix.errors import KeymixWarning, UserError, require
from keymix.mixers.spec import parse_mixer
from keymix.models.factory import check_model, takes_images_alone, task_of_model
from keymix.task import Task, get_task
from keymix.train import files, ranks
from keymix.train.losses import Teacher
from keymix.train.model import device_of_this_machine, takes_no_frames
from keymix.train.parts import training_of
from keymix.train.recipe import LossConfig, Recipe
from keymix.train.runs import Run, load_run
from keymix.train.step import check_optimizer

if TYPE_CHECKING:
    from keymix.data.record import DataRecord

_NAMED = 3  # classes of a message
_FEW_PROCESSES, _PROCESSES_PER_CORE = 16, 8


def check_recipe(recipe: Recipe) -> None:
    """Refuse what is known to be wrong without the data.

    The weights that it starts from are not looked for: a run that is resumed does without.
    """
    check_optimizer(recipe.optim)
    _check_rates(recipe)
    config = recipe.data
    check_processes("data.workers", config.workers)
    entry, _ = parse(config.spec)
    of_one_kind = {name: getattr(config, name) for name in OF_ONE_KIND if hasattr(config, name)}
    entry.check_settings(config.spec, of_one_kind)
    check_augment(recipe.augment, entry.input_kind, entry.target_kind)
    check_model(recipe.model.name)
    _check_task(recipe, get_task(entry.task))
    if entry.events and takes_images_alone(recipe.model.name):
        raise takes_no_frames(recipe)
    if recipe.model.mixer is not None:
        parse_mixer(recipe.model.mixer)
    find_teacher(recipe.loss)


def _check_rates(recipe: Recipe) -> None:
    """Refuse a learning rate that is above its own peak at the start or the end."""
    schedule, peak = recipe.schedule, f"optim.lr = {recipe.optim.lr!r}, the peak; set both"
    low = schedule.min_lr <= recipe.optim.lr
    require(low, "schedule.min_lr", schedule.min_lr, f"must be at most {peak}")
    low = not schedule.warmup_epochs or schedule.warmup_lr <= recipe.optim.lr
    require(low, "schedule.warmup_lr", schedule.warmup_lr, f"must be at most {peak}")
    decay, applied = recipe.optim.layer_decay, schedule.name not in ("constant", "none")
    remedy = f"is applied by a schedule, and schedule.name is {schedule.name!r}; name cosine"
    require(decay == 1 or applied, "optim.layer_decay", decay, remedy)


def check_processes(name: str, number: int, *, least: int = 0) -> None:
    """Refuse fewer processes than `least`, and far more than this machine has cores."""
    require(number >= least, name, number, f"must be {least} or more")
    cores = os.cpu_count() or 1
    most = max(_FEW_PROCESSES, _PROCESSES_PER_CORE * cores)
    remedy = f"must be at most {most} on this machine, which has {cores} CPU cores"
    require(number <= most, name, number, remedy)


def _check_task(recipe: Recipe, task: Task) -> None:
    """Refuse a model of another task, and what the task does not have."""
    model, spec = recipe.model.name, recipe.data.spec
    if task_of_model(model) != task.takes:
        raise UserError(
            f"model {model!r} is not for data {spec!r}, which has {task.holds}: choose a model for "
            f"{task.takes} (`keymix list models`), or other data."
        )
    training_of(task).check(recipe)


def training_batches(recipe: Recipe, data: ImageData) -> Loader:
    """Make what serves a run's training images, or refuse settings that do not fit them.

    A last batch of a single image gets another, whatever the model, so that all see the same: over
    one image a batch norm of a map of one pixel has nothing to normalise over.
    """
    if why := data.facts.unfit:
        raise UserError(f"data {data.spec}: {why}")
    batches = Loader(
        data.train,
        data,
        batch_size=_share(recipe, data),
        pair_last=True,
        train=True,
        augment=recipe.augment,
        seed=recipe.seed,
        rank=ranks.rank(),
        world_size=ranks.size(),
        workers=recipe.data.workers,
        device=device_of_this_machine(),
    )
    _check_sizes(recipe, data, len(batches))
    return batches


def _share(recipe: Recipe, data: ImageData) -> int:
    """The part of a batch that each rank takes; refuse a batch or a split that cannot be shared."""
    batch, number = recipe.data.batch_size, ranks.size()
    remedy = f"must be a multiple of {number}, the devices: each takes as many of a batch"
    require(batch % number == 0, "data.batch_size", batch, remedy)
    least = min(len(data.train), len(data.val), len(data.test))
    if least < number:
        raise UserError(
            f"a split of data {data.spec} has {least} {data.kind.nouns}, and {number} devices were "
            "asked for: ask for fewer."
        )
    return batch // number


def _check_sizes(recipe: Recipe, data: ImageData, batches: int) -> None:
    """Refuse what is larger than the data, and warn where a step takes all of it."""
    padding, side = recipe.augment.crop_padding, min(data.image_size)
    remedy = f"must be below {side}, the side of the images: a crop could show padding alone"
    require(padding < side, "augment.crop_padding", padding, remedy)
    summed = recipe.optim.accumulate
    remedy = f"must be at most {batches}, the batches of an epoch; or make data.batch_size smaller"
    require(summed <= batches, "optim.accumulate", summed, remedy)
    size, images = recipe.data.batch_size, len(data.train)
    if size > images:
        text = f"data.batch_size = {size}: there are {images} training {data.kind.nouns}, so an "
        warnings.warn(f"{text}epoch is one step on all of them", KeymixWarning, stacklevel=3)


def find_teacher(config: LossConfig) -> Run | None:
    """Open the folder of a recipe's teacher; None where nobody teaches."""
    if config.distill_teacher is None:
        return None
    try:
        run = load_run(config.distill_teacher)
        path = run.folder / files.weights_file("last")
        if not path.exists():
            raise UserError(f"it holds no {path.name}: finish that run first.")
    except UserError as error:
        raise _refusal(config, str(error)) from None
    return run


def make_teacher(config: LossConfig, data: ImageData, device: torch.device) -> Teacher | None:
    """Build a recipe's teacher for a student of some data; None where nobody teaches."""
    run = find_teacher(config)
    if run is None:
        return None
    try:
        model, seen = run.model_and_data()
    except UserError as error:
        raise _refusal(config, str(error)) from None
    here = {
        "image_size": data.image_size,
        "in_chans": data.in_chans,
        "time_steps": data.time_steps,
    }
    words = {
        "image_size": "images of {0[0]}x{0[1]} pixels",
        "in_chans": "images of {0} channels",
        "time_steps": "{0} frames per recording",
    }
    for key, now in here.items():
        form = words[key]
        if (then := getattr(seen, key)) != now:
            what = f"it takes {form.format(then)}, and the data has {form.format(now)}"
            raise _refusal(config, f"{what}.")
    weights = run.folder / files.weights_file("last")
    return Teacher(
        model.to(device),
        config.distill_temperature,
        order=_order(config, list(seen.classes), list(data.classes), device),
        rescale=_rescale(seen, data, device),
        digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
    )


def _order(
    config: LossConfig, theirs: list[str], ours: list[str], device: torch.device
) -> Tensor | None:
    """The teacher's class of each of the student's, by name."""
    for whose, lacking in (
        ("it lacks classes of the data", [name for name in ours if name not in theirs]),
        ("the data lacks classes of it", [name for name in theirs if name not in ours]),
    ):
        if lacking:
            more = " …" if len(lacking) > _NAMED else ""
            raise _refusal(config, f"{whose}: {', '.join(lacking[:_NAMED])}{more}.")
    if theirs == ours:
        return None
    return torch.tensor([theirs.index(name) for name in ours], device=device)


def _rescale(
    seen: DataRecord, data: ImageData, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """From (pixel - mean) / std of the student's to the teacher's: a factor and an offset."""
    theirs = list(seen.mean), list(seen.std)
    ours = list(data.mean), list(data.std)
    if theirs == ours:
        return None
    (their_mean, their_std), (our_mean, our_std) = (
        [torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in pair]
        for pair in (theirs, ours)
    )
    factor, offset = our_std / their_std, (our_mean - their_mean) / their_std
    return factor.float().to(device), offset.float().to(device)


def _refusal(config: LossConfig, why: str) -> UserError:
    return UserError(f"loss.distill_teacher = {config.distill_teacher!r} cannot teach: {why}")
