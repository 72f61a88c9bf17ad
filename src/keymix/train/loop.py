# SPDX-License-Identifier: Apache-2.0
"""The training loop: epochs of batches, a validation after each, and when to save.

A signal ends a step and saves; it ends a wait for data at once, with the steps before it saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from keymix.errors import Interrupted
from keymix.train.checkpoints import prune, save
from keymix.train.epochs import EpochRecord, ProgressBar
from keymix.train.parts import answers_of
from keymix.train.scoring import ImageBatch, Metrics
from keymix.train.signals import Interrupts
from keymix.train.step import Training

if TYPE_CHECKING:
    from keymix.data.loaders import Loader

GRACE = 10.0
"""Seconds that a wait for data may last after a signal while gradients are being accumulated."""


class Saver:
    """Save a run's checkpoints: at the end of an epoch, from time to time, and before it stops.

    Args:
        training: What is saved.
        record: The run's record, which is saved with it.
        interrupts: Knows of signals.
        minutes: Time between checkpoints within an epoch.
        clock: Seconds that pass.
    """

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
        time. Not after an epoch's last step, which its end saves, after the validation.
        """
        place = self._training
        if place.batch == 0:
            return True
        if place.batch == place.steps or place.batch % place.accumulate:
            return False
        asked = self.interrupts.signum is not None
        return asked or self._clock() - self._saved >= self._seconds

    def save(self) -> None:
        """Write a checkpoint of where the run stands."""
        state = self._training.state() | {"record": self.record.state()}
        save(self.record.folder, state)
        prune(self.record.folder)
        self._saved = self._clock()

    def after_step(self) -> None:
        """Save if it is time, and end a run that was asked to, unless gradients would be lost."""
        if self.due():
            self.save()
            self.interrupts.look()
        elif self._training.batch == self._training.steps:
            self.interrupts.look()

    def after_wait(self, stop: Interrupted) -> None:
        """Save what was done before a signal ended a wait for data, and say so."""
        if stop is self.interrupts.ended_wait and self._training.batch and self.due():
            self.save()
            stop.args = self.interrupts.stopped().args


def fit(
    training: Training,
    train: Loader,
    val: Loader,
    saver: Saver,
    *,
    bar: bool = False,
) -> None:
    """Train the epochs that are left of a run.

    Args:
        training: What is trained, at the place where it starts.
        train: The training batches.
        val: The batches of the validation.
        saver: Saves the run's checkpoints, and knows of signals.
        bar: Draw a bar.

    Raises:
        Interrupted: On a signal, with what was done saved if it can be.
        UserError: If a loss was not finite, or (`WriteError`) the disk does not take a file.
    """
    epochs = training.task.recipe.schedule.epochs
    record, interrupts = saver.record, saver.interrupts
    drawn = ProgressBar(training.steps, epochs, done=training.done, shown=bar)
    with torch.enable_grad(), drawn:
        while training.epoch < epochs:
            train.set_epoch(training.epoch)
            if training.batch == 0:
                record.start()
            try:
                for batch in served(
                    train, interrupts, start=training.batch, accumulate=training.accumulate
                ):
                    training.step(batch)
                    drawn.step(training.done)
                    saver.after_step()
            except Interrupted as stop:
                saver.after_wait(stop)
                raise
            training.clear_gradients()
            record.trained(training.fabric.device)
            record.end(training.task, validate(training, val, interrupts))
            training.next_epoch()
            if saver.due():  # always, at the end of an epoch
                saver.save()
            record.announce(epochs)
            interrupts.look()


def served(
    loader: Loader, interrupts: Interrupts, *, start: int = 0, accumulate: int = 1
) -> Iterator[ImageBatch]:
    """Serve batches; a signal ends the wait for one.

    Where gradients are being accumulated it does so only if the batch does not come soon: a run is
    saved between two updates.

    Args:
        loader: Serves the epoch that it was set to.
        interrupts: Knows of signals.
        start: Batches of the epoch that are done.
        accumulate: Batches of an update.
    """
    batches, done = loader.batches(start=start), start
    while True:
        with interrupts.waiting(grace=GRACE if done % accumulate else 0.0):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        done += 1


def validate(training: Training, batches: Loader, interrupts: Interrupts) -> Metrics:
    """Score the validation split; an epoch that diverged is refused before.

    Args:
        training: Whose weights are scored, the averaged ones where they are kept.
        batches: The split's.
        interrupts: Knows of signals: a validation has nothing to save.

    Raises:
        UserError: If a loss was not finite.
        Interrupted: On a signal.
    """
    task = training.task
    task.losses.look()
    with training.evaluating():
        if task.scores is None:
            return _tested(training, batches, interrupts)
        for batch in served(batches, interrupts):
            training.validation_step(batch)
            interrupts.look()
    return task.scores.told()


def _tested(training: Training, batches: Loader, interrupts: Interrupts) -> Metrics:
    """Score the validation split as the test split is scored."""
    task = training.task
    if task.data is None:
        raise ValueError(f"{type(task).__name__} has neither scores nor data to validate with")

    def looked() -> Iterator[ImageBatch]:
        for batch in served(batches, interrupts):
            yield batch
            interrupts.look()

    found = answers_of(task.kind).evaluate(
        task.evaluated,
        looked(),
        batches.split,
        task.data,
        device=training.fabric.device,
        precision=task.recipe.precision,
    )
    return dict(found.scores)
