# SPDX-License-Identifier: Apache-2.0
"""One training run: the training loop and a folder of plain files.

A run that is killed at any moment resumes from its last checkpoint; a finished one returns at once.
"""

from __future__ import annotations

import filecmp
import math
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from keymix.analysis.threads import threads_each, use_threads
from keymix.arguments import checked
from keymix.data.dataset import ImageData
from keymix.errors import KeymixWarning, UserError, WriteError, check_positive
from keymix.layers.sync_batchnorm import sync_batchnorm
from keymix.task import Task
from keymix.train import files, ranks
from keymix.train.callbacks import Callback, Report, TrainingPlan
from keymix.train.checkpoints import checkpoints, resume_hint
from keymix.train.environment import environment
from keymix.train.evaluation import eval_loader, record_of, score_split
from keymix.train.files import locked
from keymix.train.folder import clear, is_done, read_environment
from keymix.train.loggers import LoggerName, callback_of
from keymix.train.loop import EpochRecord, Saver, fit
from keymix.train.model import (
    device_of_this_machine,
    enough_memory,
    find_weights,
    load_data,
    mixer_label,
    model_for,
    start_from,
    warn_of_data,
    warn_of_unlisted,
)
from keymix.train.nonfinite import Losses
from keymix.train.parts import Evaluated, training_of
from keymix.train.recipe import Recipe
from keymix.train.record import Environment, Machine, RunRecord, Tested, Validated, WeightsFacts
from keymix.train.resume import Progress, resumed, stored
from keymix.train.runs import Run
from keymix.train.signals import interruptible
from keymix.train.step import (
    Training,
    check_precision,
    check_strategy,
    deterministic,
    make_fabric,
)
from keymix.train.validate import check_recipe, make_teacher, training_batches


@checked
def train(
    recipe: Recipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Literal["bar"] | Report | Callback | None = None,
    log: LoggerName | None = None,
    data: ImageData | None = None,
    checkpoint_minutes: float = 10.0,
    threads: int | None = None,
    strategy: ranks.Strategy = "ddp",
) -> Run:
    """Train a recipe into a folder; resume it there, or return at once when it is done.

    SIGINT and SIGTERM end the step, save a checkpoint and raise; a second one ends at once. A run
    that was stopped or killed at any moment resumes, and on a CPU ends with the same weights, to
    the bit, as one that was not.

    Args:
        recipe: The run.
        out: The run's folder. A folder with the same recipe is resumed.
        overwrite: Throw away the run that is in the folder.
        progress: ``"bar"`` writes the plan and a line per epoch to standard error, below them a
            bar if that is a terminal; a function gets each epoch's line of metrics with ``epochs``
            (planned) and ``best_epoch``; a `Callback` gets every step too.
        log: A logger that gets the recipe, each epoch's metrics and the test scores as well. It
            changes nothing in the run, and one that fails is left out with a warning.
        data: The images of ``recipe.data`` if they are loaded already.
        checkpoint_minutes: Time between checkpoints within an epoch; 0 saves after every update.
            The end of an epoch always saves.
        threads: CPU threads of PyTorch; if None, those of the process, but at most one per core.
            A run that resumes has those it began with.
        strategy: What each of several devices has of the model: a copy (``"ddp"``), or a part of
            every parameter, gradient and moment (``"fsdp"``).

    Returns:
        The finished run.

    Raises:
        UserError: If the folder holds another run or other files, another process works in it, the
            logger is not installed, the recipe does not fit the data or the memory, the loss became
            infinite or NaN, or (`WriteError`) the disk does not take a file.
        Interrupted: On SIGINT or SIGTERM; it says what was saved.
    """
    folder = Path(out)
    if not checkpoint_minutes >= 0:
        raise UserError(f"{checkpoint_minutes=} must be 0 or more.")
    if threads is not None:
        check_positive(threads=threads)
    with ranks.together():
        return _train(
            Run(folder, recipe),
            overwrite=overwrite,
            callback=callback_of(progress, log) if ranks.rank() == 0 else Callback(),  # or refuse
            data=data,
            checkpoint_minutes=checkpoint_minutes,
            threads=threads,
            strategy=strategy,
        )


def _train(
    run: Run,
    *,
    overwrite: bool,
    callback: Callback,
    data: ImageData | None,
    checkpoint_minutes: float,
    threads: int | None,
    strategy: ranks.Strategy,
) -> Run:
    """Train among the ranks that there are; the first alone touches the folder."""
    folder, recipe = run.folder, run.recipe
    if ranks.first(lambda: is_done(folder, recipe, overwrite=overwrite)):
        return run
    with ranks.agreed():
        check_recipe(recipe)
        check_precision(recipe.precision)
        check_strategy(strategy, recipe.optim)
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with (
        torch.random.fork_rng(devices=cuda),
        deterministic(recipe.deterministic),
        interruptible(lambda: resume_hint(folder, overwrite=overwrite)) as interrupts,
        enough_memory(recipe.data.image_size, recipe.data.batch_size),
        closing(callback),
        ranks.held(locked(folder, "run")),
        use_threads(
            ranks.first(lambda: None if overwrite else _recorded(folder).threads)
            or threads
            or threads_each(ranks.on_this_machine())
        ),
    ):
        if ranks.first(lambda: is_done(folder, recipe, overwrite=overwrite)):  # meanwhile
            return run
        fresh = ranks.first(lambda: overwrite or not checkpoints(folder))
        with ranks.agreed():
            weights = find_weights(recipe.model) if fresh else None  # or refuse, before data
            images = data if data is not None else _opened(recipe)
            model = model_for(recipe, images.record(), pretrained=fresh)
            _check_readout(model)
            params = sum(p.numel() for p in model.parameters() if p.requires_grad)
            batches = training_batches(recipe, images)
            if weights is not None:  # before the average of weights
                start_from(model, weights)
            training = make_training(
                recipe, images, model, folder, steps=len(batches), strategy=strategy
            )
        found = None if overwrite else ranks.first(lambda: stored(run))
        with ranks.agreed():
            before = Progress() if found is None else resumed(run, found, images, training)
        try:
            ranks.first(lambda: _start(run, before, strategy, fresh=fresh, overwrite=overwrite))
            with ranks.agreed():
                if training.sharded and not (folder / files.RECIPE).exists():
                    raise UserError(
                        f"strategy 'fsdp' writes checkpoints from all machines, and {str(folder)!r}"
                        " is not the same folder on all: name one on shared storage with --out."
                    )
            record = EpochRecord(
                folder,
                images=len(images.train),
                facts=WeightsFacts(recipe=recipe, data=images.record()),
                before=before,
            )
            callback.on_train_start(_plan(run, before, images, training, params=params))
            saver = Saver(training, record, interrupts, minutes=checkpoint_minutes)
            with interrupts.deferred():
                validation = eval_loader(recipe, images, "val")
                fit(training, batches, validation, saver, callback)
            saver.look()
            record.keep_last(training.task)
            _finish(run, images, record, training.task.evaluated, params=params)
            ranks.first(lambda: callback.on_test_end(run.summary))
        except WriteError as error:
            raise WriteError(f"{error}; {resume_hint(folder, overwrite=overwrite)}.") from error
    return run


def _plan(
    run: Run, before: Progress, images: ImageData, training: Training, *, params: int
) -> TrainingPlan:
    """Say what is going to be trained."""
    return TrainingPlan(
        folder=run.folder,
        recipe=run.recipe,
        task=images.task,
        items=images.kind.nouns,
        sizes=(len(images.train), len(images.val), len(images.test)),
        steps=training.steps,
        done=training.done,
        lines=before.lines,
        params=params,
        device=device_of_this_machine().type,
        ranks=ranks.size(),
    )


def _opened(recipe: Recipe) -> ImageData:
    """Load a recipe's data, with a warning of what training passes over."""
    return warn_of_unlisted(warn_of_data(load_data(recipe.data)))


def _check_readout(model: nn.Module) -> None:
    """Refuse to train a model that reads out where nothing of the image arrives."""
    from keymix.hosts import class_token_reads_image, find_mixers

    if getattr(model, "global_pool", None) == "token" and not class_token_reads_image(model):
        names = sorted({mixer.mixer_name for mixer in find_mixers(model).values()})
        raise UserError(
            f"{', '.join(names)} brings nothing to the class token, and this model reads out by "
            "it: every image would get the same answer. Set --model.global_pool avg."
        )


def _start(
    run: Run, before: Progress, strategy: ranks.Strategy, *, fresh: bool, overwrite: bool
) -> None:
    folder = run.folder
    if overwrite:  # nothing was written so far; the recipe is replaced below
        clear(folder, recipe=False)  # so that the folder stays a run's all the time
    now = replace(environment(), strategy=strategy if ranks.size() > 1 else None)
    environment_now = now if fresh else _resumed(now, _recorded(folder))
    files.clear_parts(folder)
    (folder / files.NONFINITE).unlink(missing_ok=True)
    files.write_json(
        folder / files.RECIPE, run.recipe.to_dict()
    )  # first: it makes the folder a run's
    files.make_folder(folder / files.CHECKPOINTS)
    files.write_json(folder / files.ENVIRONMENT, environment_now)
    files.write_metrics(folder / files.METRICS, list(before.lines))


def _resumed(now: Environment, there: Environment) -> Environment:
    """The environment, with those (``earlier``) in which a resumed run was trained before.

    One whose record is missing or damaged stands there as one of which nothing is known.
    """
    if there.known and (there.ranks, there.strategy) != (now.ranks, now.strategy):
        text = f"the run began on {_devices(there)} and resumes on {_devices(now)}: it "
        text += "continues at the same step, but not to the bit as it would have"
        warnings.warn(text, KeymixWarning, stacklevel=3)
    differs = there.machine != now.machine
    return replace(now, earlier=(*there.earlier, *([there.machine] if differs else [])))


def _devices(machine: Machine) -> str:
    return f"{machine.ranks} devices ({machine.strategy})" if machine.ranks else "1 device"


def _recorded(folder: Path) -> Environment:
    """The environment of the run in a folder; an empty one where its record cannot be read."""
    try:
        return read_environment(folder)
    except UserError:
        return Environment()


def make_training(
    recipe: Recipe,
    data: ImageData,
    model: nn.Module,
    folder: Path | None,
    *,
    steps: int,
    strategy: ranks.Strategy = "ddp",
) -> Training:
    """Make a training of a model, by the task that the data set, with `steps` batches per epoch.

    The folder takes the record of a loss that is not finite; a trial has none and ignores it.
    """
    losses = Losses(
        model,
        data.train.ids,
        folder,
        # gradients of parts cannot be looked at by one rank alone
        late=device_of_this_machine().type != "cpu" or strategy == "fsdp",
        scaled=recipe.precision == "16",
        items=data.kind.nouns,
    )
    teacher = make_teacher(recipe.loss, data, device_of_this_machine())
    sync_batchnorm(model)
    part = training_of(data.task)
    task = part.make(recipe, model, data, steps=steps, losses=losses, teacher=teacher)
    return Training(task, make_fabric(recipe.precision), steps=steps, strategy=strategy)


def _finish(
    run: Run, data: ImageData, record: EpochRecord, model: nn.Module, *, params: int
) -> None:
    """Touch the test set, once: with the last and with the best-on-validation weights."""
    folder, recipe = run.folder, run.recipe
    last, best = record.lines[-1].validated, record.best
    assert best is not None  # an epoch is done

    def test(which: str) -> Evaluated:
        path = folder / files.weights_file(which)
        ranks.load_model(model, ranks.first(lambda: files.read_weights(path)[0]))
        with ranks.whole(model):
            return score_split(recipe, model, data, "test")

    scored = {"last": test("last")}
    mine, other = (folder / files.weights_file(which) for which in ("last", "best"))
    # an epoch that is trained again may differ
    one = ranks.first(lambda: filecmp.cmp(mine, other, shallow=False))
    scored["best"] = scored["last"] if one else test("best")
    arrays: dict[str, Any] = dict(scored["last"].answers.shared())
    for which, found in scored.items():
        arrays |= found.answers.arrays(which)
    summary = RunRecord(
        status="done",
        model=recipe.model.name,
        mixer=mixer_label(recipe.model),
        seed=recipe.seed,
        params=params,
        epochs=recipe.schedule.epochs,
        seconds=math.fsum(line.seconds or 0.0 for line in record.lines),
        last=_tested(last, scored["last"], data.task),
        best=_tested(best, scored["best"], data.task),
        data=data.record(),
        task=data.task.name,
    )
    ranks.first(lambda: files.write_arrays(folder / files.PREDICTIONS, arrays))
    ranks.first(lambda: files.write_json(folder / files.SUMMARY, summary))


def _tested(epoch: Validated, test: Evaluated, task: Task) -> Tested:
    val = {name: epoch.val[name] for name in task.keys if name in epoch.val}
    return Tested(epoch=epoch.epoch, val=val, test=record_of(test))
