# SPDX-License-Identifier: Apache-2.0
"""The training loop: epochs of batches, a validation after each, what it leaves, when to save.

A signal ends a step and saves; it ends a wait for data at once, with the steps before it saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from keymix.errors import Interrupted
from keymix.records import to_json
from keymix.train import files, ranks
from keymix.train.callbacks import Callback
from keymix.train.checkpoints import prune, save
from keymix.train.parts import answers_of
from keymix.train.record import EpochLine, EpochsDone, SameData, Validated, WeightsFacts
from keymix.train.resume import Progress
from keymix.train.scoring import ImageBatch, Metrics
from keymix.train.signals import Interrupts
from keymix.train.step import Training
from keymix.train.task import TrainingTask

if TYPE_CHECKING:
    from keymix.data.loaders import Loader

GRACE = 10.0
"""Seconds that a wait for data may last after a signal while gradients are being accumulated."""


class EpochRecord:
    """Write what an epoch leaves behind, in an order that a crash at any moment survives.

    Weights of a better epoch come first, then the line, then the checkpoint: a run that resumes
    from a checkpoint drops later lines and makes them again. `facts` stand in the files of weights.
    """

    def __init__(
        self,
        folder: Path,
        *,
        images: int,
        facts: WeightsFacts,
        before: Progress,
    ) -> None:
        self.folder, self.images, self.facts = folder, images, facts
        self.lines, self.best = list(before.lines), before.best
        self._trained, self._before = 0.0, before.seconds
        self._start = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """The epochs' lines, the seconds of the unfinished epoch, and whose images it saw."""
        done = EpochsDone(
            seconds=self._elapsed(),
            data=SameData.of(self.facts.data),
            lines=tuple(self.lines),
        )
        state: dict[str, Any] = to_json(done)
        return state

    def start(self) -> None:
        """Start the clock of an epoch."""
        self._start, self._before = time.perf_counter(), 0.0

    def trained(self, device: torch.device) -> None:
        """Stop the training clock: validation is not throughput, steps still on the GPU are."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._trained = self._elapsed()

    def end(self, task: TrainingTask, scores: Mapping[str, float | None]) -> None:
        """Write the epoch down, with the scores of its validation."""
        line = EpochLine(
            epoch=task.current_epoch,
            train=task.losses.means(),
            val=dict(scores),
            lr=task.last_lr,
            seconds=self._elapsed(),
            images_per_s=self.images / max(self._trained, 1e-9),
        )
        found, kind = line.validated, task.kind
        better = self.best is None or found.rank(kind) > self.best.rank(kind)
        self.best = found if better else self.best
        self.lines.append(line)
        if better:
            self._write_weights("best", task, found)
        ranks.first(lambda: files.write_metrics(self.folder / files.METRICS, self.lines))
        self.start()

    def latest(self) -> dict[str, float | None]:
        """The last epoch's metrics, how many epochs are planned and which was best."""
        best = None if self.best is None else self.best.epoch
        epochs = self.facts.recipe.schedule.epochs
        return {**to_json(self.lines[-1]), "epochs": epochs, "best_epoch": best}

    def _write_weights(self, which: str, task: TrainingTask, validated: Validated) -> None:
        """Write the weights as they are now, as ``last`` or ``best``, with epoch and scores."""
        path, state = self.folder / files.weights_file(which), ranks.full_state(task.evaluated)
        ranks.first(lambda: files.write_weights(path, state, self.facts.of(validated)))

    def keep_last(self, task: TrainingTask) -> None:
        """Write the weights of the last epoch."""
        self._write_weights("last", task, self.lines[-1].validated)

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._start


class Saver:
    """Save a run's checkpoints: at ends of epochs, every few minutes, and before it stops."""

    def __init__(
        self,
        training: Training,
        record: EpochRecord,
        interrupts: Interrupts,
        *,
        minutes: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record, self.interrupts = record, interrupts
        self._training = training
        self._seconds, self._clock = 60 * minutes, clock
        self._saved = clock()

    def due(self) -> bool:
        """Whether to save now.

        At the end of an epoch always; within one after an update, if a signal asks for it or it is
        time, on any rank. Not after an epoch's last step, which its end saves after validation.
        """
        place = self._training
        if place.batch == 0:
            return True
        if place.batch == place.steps or place.batch % place.accumulate:
            return False
        late = self._clock() - self._saved >= self._seconds
        return any(ranks.largest(self.interrupts.signum or 0, int(late)))

    def save(self) -> None:
        """Write a checkpoint of where the run stands."""
        state = self._training.state() | {"record": self.record.state()}
        save(self.record.folder, state, sharded=self._training.sharded)
        ranks.first(lambda: prune(self.record.folder))
        self._saved = self._clock()

    def look(self) -> None:
        """End the work here if a signal waits, on any rank: it ends all."""
        (signum,) = ranks.largest(self.interrupts.signum or 0)
        if signum:
            self.interrupts.signum = signum
            raise self.interrupts.stopped()

    def after_step(self) -> None:
        """Save if it is time, and end a run that was asked to, unless gradients would be lost."""
        if self.due():
            self.save()
            self.look()
        elif self._training.batch == self._training.steps:
            self.look()

    def after_wait(self, stop: Interrupted) -> None:
        """Save what was done before a signal ended a wait for data, and say so.

        A rank that has waited too long ends without: the others are in another step.
        """
        mine = stop is self.interrupts.ended_wait and ranks.size() == 1
        if mine and self._training.batch and self.due():
            self.save()
            stop.args = self.interrupts.stopped().args


def fit(
    training: Training,
    train: Loader,
    val: Loader,
    saver: Saver,
    callback: Callback,
) -> None:
    """Train the epochs that are left of a run; a signal ends it, with what can be saved saved."""
    epochs = training.task.recipe.schedule.epochs
    record, interrupts = saver.record, saver.interrupts
    with torch.enable_grad():
        while training.epoch < epochs:
            train.set_epoch(training.epoch)
            if training.batch == 0:
                record.start()
            try:
                for batch in served(
                    train, interrupts, start=training.batch, accumulate=training.accumulate
                ):
                    training.step(batch)
                    callback.on_step_end(training.done, training.task.losses.mean_so_far())
                    saver.after_step()
            except Interrupted as stop:
                saver.after_wait(stop)
                raise
            training.clear_gradients()
            record.trained(training.fabric.device)
            callback.on_validation_start()
            record.end(training.task, validate(training, val, interrupts))
            training.next_epoch()
            if saver.due():  # always, at the end of an epoch
                saver.save()
            callback.on_epoch_end(record.latest())
            saver.look()


def served(
    loader: Loader, interrupts: Interrupts, *, start: int = 0, accumulate: int = 1
) -> Iterator[ImageBatch]:
    """Serve the batches of an epoch after `start`; a signal ends the wait for one.

    Where gradients are being accumulated, or ranks have to agree, it does so only if the batch does
    not come soon: a run is saved between two updates.
    """
    batches, done = loader.batches(start=start), start
    while True:
        with interrupts.waiting(grace=GRACE if done % accumulate or ranks.size() > 1 else 0.0):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        done += 1


def looked(loader: Loader, interrupts: Interrupts) -> Iterator[ImageBatch]:
    """Serve a split; a signal ends the work after a batch. Ranks go on to where they agree."""
    for batch in served(loader, interrupts):
        yield batch
        if ranks.size() == 1:
            interrupts.look()


def validate(training: Training, batches: Loader, interrupts: Interrupts) -> Metrics:
    """Score the validation split; an epoch that diverged is refused before."""
    task = training.task
    task.losses.look()
    with training.evaluating():
        if task.scores is None:
            return _tested(training, batches, interrupts)
        for batch in looked(batches, interrupts):
            training.validation_step(batch)
    return task.scores.metrics()


def _tested(training: Training, batches: Loader, interrupts: Interrupts) -> Metrics:
    """Score the validation split as the test split is scored."""
    task = training.task
    if task.data is None:
        raise ValueError(f"{type(task).__name__} has neither scores nor data to validate with")

    found = answers_of(task.kind).evaluate(
        task.evaluated,
        looked(batches, interrupts),
        batches.split,
        task.data,
        device=training.fabric.device,
        precision=task.recipe.precision,
    )
    return dict(found.scores)
