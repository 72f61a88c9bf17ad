# SPDX-License-Identifier: Apache-2.0
"""What happens at the end of an epoch: the line of metrics, the best weights, the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from keymix.errors import Interrupted
from keymix.records import from_json, to_json
from keymix.train import files
from keymix.train.checkpoints import checkpoint_path, prune
from keymix.train.record import EpochLine, EpochsDone, SameData, Validated, WeightsFacts
from keymix.train.signals import Interrupts
from keymix.train.task import TrainingTask

Report = Callable[[Mapping[str, float | None]], None]


def is_better(one: Validated, than: Validated | None) -> bool:
    """Whether an epoch validates better than another: by its task's score, then by loss."""
    return than is None or one.rank > than.rank


def best_of(lines: Iterable[EpochLine]) -> Validated | None:
    """The epoch that validated best."""
    best: Validated | None = None
    for line in lines:
        if is_better(line.validated, best):
            best = line.validated
    return best


def epochs_done(content: Mapping[str, Any], path: Path) -> EpochsDone:
    """Read what a checkpoint keeps of the epochs before it.

    Args:
        content: The checkpoint.
        path: Its file, for the message.
    """
    state = content["callbacks"][EpochRecord.__qualname__]
    return from_json(EpochsDone, state, where=f"the checkpoint {str(path)!r}")


def batches_done(trainer: pl.Trainer) -> int:
    """Batches that a run which resumes within an epoch has done of it; 0 between epochs."""
    done = int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
    return done % int(trainer.num_training_batches)


class EpochRecord(Callback):
    """Write what an epoch leaves behind, in an order that a crash at any moment survives.

    Weights of a better epoch come first, then the line, then the checkpoint: a run that resumes
    from a checkpoint drops later lines and makes them again.

    Args:
        folder: The run's folder.
        images: Training images an epoch.
        facts: What the weights need to be used, kept in their file.
        lines: The epochs done before, on a resume.
        best: The epoch and the scores of the weights that are kept as best, on a resume.
        lost: What of the record could not be rebuilt, on a resume.
        report: Called with each line.
        bar: Whether a bar is drawn, too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        images: int,
        facts: WeightsFacts,
        lines: Iterable[EpochLine],
        best: Validated | None,
        lost: Iterable[str] = (),
        report: Report | None = None,
        bar: bool = False,
    ) -> None:
        self.folder, self.images, self.facts = folder, images, facts
        self.report, self.bar = report, bar
        self.lines, self.best, self.lost = list(lines), best, list(lost)
        self._trained = self._before = 0.0
        self._start = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """The epochs' lines, the seconds of the unfinished epoch, and whose images it saw."""
        done = EpochsDone(
            seconds=self._elapsed(),
            data=SameData.of(self.facts.data),
            lines=tuple(self.lines),
            lost=tuple(self.lost),
        )
        state: dict[str, Any] = to_json(done)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the epoch's clock."""
        self._before = float(state_dict["seconds"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, in the middle of an epoch too."""
        self._start = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock anew."""
        self._start, self._before = time.perf_counter(), 0.0

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the training clock: validation is not throughput, steps still on the GPU are."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._trained = self._elapsed()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the epoch down."""
        assert isinstance(pl_module, TrainingTask)
        epoch = trainer.current_epoch
        line = EpochLine(
            epoch=epoch,
            train=pl_module.losses.means(),
            val=dict(pl_module.val_scores),
            lr=pl_module.last_lr,
            seconds=self._elapsed(),
            images_per_s=self.images / max(self._trained, 1e-9),
        )
        first = trainer.is_global_zero
        if is_better(line.validated, self.best):
            self.best = line.validated
            if first:
                self.write_weights("best", pl_module, line.validated)
        self.lines.append(line)
        if first:
            files.write_metrics(self.folder / files.METRICS, self.lines)
        self._before, self._start = 0.0, time.perf_counter()
        trainer.save_checkpoint(checkpoint_path(self.folder, epoch + 1))  # every process takes part
        if first:
            prune(self.folder)
            if self.report is not None and self.best is not None:
                planned = {"epochs": trainer.max_epochs, "best_epoch": self.best.epoch}
                self.report({**to_json(line), **planned})

    def write_weights(self, which: str, task: TrainingTask, validated: Validated) -> None:
        """Write the weights as they are now, as ``last`` or ``best``, with epoch and scores."""
        path = self.folder / files.weights_file(which)
        files.write_weights(path, task.evaluated.state_dict(), self.facts.of(validated))

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._start


class Keeper(Callback):
    """Save within an epoch: from time to time, and when a signal ends the run.

    It saves after an update, never in the middle of accumulating one, and not after an epoch's last
    step, which its end saves. It stands behind `EpochRecord`, whose end of an epoch comes first.

    Args:
        folder: The run's folder.
        minutes: Time between checkpoints.
        interrupts: Tells of signals.
    """

    def __init__(self, folder: Path, *, minutes: float, interrupts: Interrupts) -> None:
        self._folder, self._seconds = folder, 60 * minutes
        self.interrupts = interrupts
        self._saved = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals back from Lightning, and start the clock."""
        self.interrupts.install()
        self._saved = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save if it is time."""
        wanted = self.interrupts.signum is not None
        if not wanted and time.monotonic() - self._saved < self._seconds:
            return
        steps = batch_idx + 1
        if steps >= trainer.num_training_batches:
            self.interrupts.look()
        elif steps % trainer.accumulate_grad_batches == 0:
            path = checkpoint_path(self._folder, trainer.current_epoch, steps)
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                prune(self._folder)
            self._saved = time.monotonic()
            self.interrupts.look()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save what was done before a signal ended a wait for data, and say so."""
        if not isinstance(exception, Interrupted) or exception is not self.interrupts.ended_wait:
            return
        steps = batches_done(trainer)
        if steps and steps % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(checkpoint_path(self._folder, trainer.current_epoch, steps))
            if trainer.is_global_zero:
                prune(self._folder)
            exception.args = self.interrupts.stopped().args

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """End a run that was asked to: a validation has nothing to save."""
        self.interrupts.look()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a run that was asked to: the epoch has just been saved."""
        self._saved = time.monotonic()
        self.interrupts.look()


class ProgressBar(Callback):
    """A bar over all steps of the run at a terminal, drawn a few times a second."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the bar, from where a resumed run stands."""
        steps = int(trainer.num_training_batches)
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]} of {task.fields[epochs]}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._bar.add_task(
            "train",
            total=steps * (trainer.max_epochs or 1),
            completed=steps * trainer.current_epoch + batches_done(trainer),
            epoch=trainer.current_epoch + 1,
            epochs=trainer.max_epochs,
        )
        self._bar.start()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Name the epoch."""
        if self._bar is not None:
            self._bar.update(self._task, epoch=trainer.current_epoch + 1)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Move on by a step."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the bar away before the error is told."""
        self.teardown(trainer, pl_module, "fit")
