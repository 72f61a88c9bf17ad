# SPDX-License-Identifier: Apache-2.0
"""Whether a recipe fits: told before its data is read, and before a file of the run is written.

A run that is refused here leaves no folder behind that would be in the corrected one's way.
"""

from __future__ import annotations

import os
import warnings

from keymix.data.augment import check_augment
from keymix.data.dataset import ImageData
from keymix.data.loaders import Loader
from keymix.data.specs import OF_ONE_KIND, parse
from keymix.errors import KeymixWarning, UserError
from keymix.mixers.spec import parse_mixer
from keymix.models.factory import check_model, takes_images_alone, task_of_model
from keymix.task import Task, get_task
from keymix.train.config import require
from keymix.train.distill import find_teacher
from keymix.train.model import device_of_this_machine, takes_no_frames
from keymix.train.parts import training_of
from keymix.train.recipe import Recipe
from keymix.train.task import check_optimizer

_NO_EVENTS = (
    "Leave it out; where the recipe sets it, set it to null, or take a recipe for images, such as "
    "digits_vit or small_images_vit"
)

_FEW_PROCESSES, _PROCESSES_PER_CORE = 16, 8


def check_recipe(recipe: Recipe) -> None:
    """Refuse what can be told to be wrong without the data.

    Args:
        recipe: The run. The weights that it starts from are not looked for: a run that goes on
            does without.

    Raises:
        UserError: If data, model, mixer, optimiser or teacher are unknown; or learning rates
            contradict each other, or there are far more workers than cores; or model, augmentation
            or settings are for images where the data has frames of events, or for frames where it
            has images.
    """
    check_optimizer(recipe.optim)
    _check_rates(recipe)
    config = recipe.data
    check_processes("data.workers", config.workers)
    entry, _ = parse(config.spec)
    of_one_kind = {name: getattr(config, name) for name in OF_ONE_KIND if hasattr(config, name)}
    entry.check_settings(config.spec, of_one_kind, remedy=_NO_EVENTS)
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


def check_processes(name: str, number: int, *, least: int = 0) -> None:
    """Refuse far more processes than this machine has cores.

    Args:
        name: What asks for them.
        number: How many.
        least: How many there must be.

    Raises:
        UserError: Naming the cores.
    """
    require(number >= least, name, number, f"must be {least} or more")
    cores = os.cpu_count() or 1
    most = max(_FEW_PROCESSES, _PROCESSES_PER_CORE * cores)
    told = f"must be at most {most} on this machine, which has {cores} CPU cores"
    require(number <= most, name, number, told)


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

    Args:
        recipe: The run.
        data: Its data.

    Raises:
        UserError: Naming the field, also where it is larger than the data; or if masks hold
            nothing to learn.
    """
    if why := data.facts.unfit:
        raise UserError(f"data {data.spec}: {why}")
    batches = Loader(
        data.train,
        data,
        batch_size=recipe.data.batch_size,
        train=True,
        augment=recipe.augment,
        seed=recipe.seed,
        workers=recipe.data.workers,
        device=device_of_this_machine(),
    )
    _check_sizes(recipe, data, len(batches))
    return batches


def _check_sizes(recipe: Recipe, data: ImageData, batches: int) -> None:
    """Refuse what is larger than the data, and warn where a step takes all of it."""
    padding, side = recipe.augment.crop_padding, min(data.image_size)
    told = f"must be below {side}, the side of the images: a crop could show padding alone"
    require(padding < side, "augment.crop_padding", padding, told)
    summed = recipe.optim.accumulate
    told = f"must be at most {batches}, the batches of an epoch; or make data.batch_size smaller"
    require(summed <= batches, "optim.accumulate", summed, told)
    size, images = recipe.data.batch_size, len(data.train)
    if size > images:
        text = f"data.batch_size = {size}: there are {images} training {data.kind.nouns}, so an "
        warnings.warn(f"{text}epoch is one step on all of them", KeymixWarning, stacklevel=3)
