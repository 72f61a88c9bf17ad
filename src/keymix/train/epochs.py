# SPDX-License-Identifier: Apache-2.0
"""What an epoch leaves: its line of metrics, the best weights; and the bar that is drawn of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from keymix.records import from_json, to_json
from keymix.task import Task
from keymix.train import files
from keymix.train.record import EpochLine, EpochsDone, SameData, Validated, WeightsFacts
from keymix.train.task import TrainingTask

Report = Callable[[Mapping[str, float | None]], None]


def is_better(one: Validated, than: Validated | None, task: Task) -> bool:
    """Whether an epoch validates better than another: by the task's score, then by loss if any."""
    return than is None or one.rank(task) > than.rank(task)


def best_of(lines: Iterable[EpochLine], task: Task) -> Validated | None:
    """The epoch that validated best."""
    best: Validated | None = None
    for line in lines:
        if is_better(line.validated, best, task):
            best = line.validated
    return best


def epochs_done(content: Mapping[str, Any], path: Path) -> EpochsDone:
    """Read what a checkpoint keeps of the epochs before it.

    Args:
        content: The checkpoint.
        path: Its file, for the message.
    """
    return from_json(EpochsDone, content["record"], where=f"the checkpoint {str(path)!r}")


class EpochRecord:
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
    ) -> None:
        self.folder, self.images, self.facts, self.report = folder, images, facts, report
        self.lines, self.best, self.lost = list(lines), best, list(lost)
        self._trained = self._before = 0.0
        self._start = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """The epochs' lines, the seconds of the unfinished epoch, and whose images it saw."""
        done = EpochsDone(
            seconds=self._elapsed(),
            data=SameData.of(self.facts.data),
            lines=tuple(self.lines),
            lost=tuple(self.lost),
        )
        state: dict[str, Any] = to_json(done)
        return state

    def start(self, seconds: float = 0.0) -> None:
        """Start the clock of an epoch.

        Args:
            seconds: What was spent on the epoch before the run was stopped in it.
        """
        self._start, self._before = time.perf_counter(), seconds

    def trained(self, device: torch.device) -> None:
        """Stop the training clock: validation is not throughput, steps still on the GPU are."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._trained = self._elapsed()

    def end(self, task: TrainingTask, scores: Mapping[str, float | None]) -> None:
        """Write the epoch down.

        Args:
            task: What was trained.
            scores: Of the validation.
        """
        line = EpochLine(
            epoch=task.current_epoch,
            train=task.losses.means(),
            val=dict(scores),
            lr=task.last_lr,
            seconds=self._elapsed(),
            images_per_s=self.images / max(self._trained, 1e-9),
        )
        if is_better(line.validated, self.best, task.kind):
            self.best = line.validated
            self.write_weights("best", task, line.validated)
        self.lines.append(line)
        files.write_metrics(self.folder / files.METRICS, self.lines)
        self.start()

    def announce(self, epochs: int) -> None:
        """Report the last line, once its epoch is saved.

        Args:
            epochs: How many are planned.
        """
        if self.report is not None and self.best is not None:
            planned = {"epochs": epochs, "best_epoch": self.best.epoch}
            self.report({**to_json(self.lines[-1]), **planned})

    def write_weights(self, which: str, task: TrainingTask, validated: Validated) -> None:
        """Write the weights as they are now, as ``last`` or ``best``, with epoch and scores."""
        path = self.folder / files.weights_file(which)
        files.write_weights(path, task.evaluated.state_dict(), self.facts.of(validated))

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._start


class ProgressBar:
    """A bar over all steps of the run at a terminal, drawn a few times a second, in a ``with``.

    Args:
        steps: Steps of an epoch.
        epochs: Epochs of the run.
        done: Steps that a resumed run has done.
        shown: Whether to draw it.
    """

    def __init__(self, steps: int, epochs: int, *, done: int = 0, shown: bool = True) -> None:
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]} of {task.fields[epochs]}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
            transient=True,
            disable=not shown,
        )
        self._steps = steps
        epoch = done // steps + 1
        self._task = self._bar.add_task(
            "train", total=steps * epochs, completed=done, epoch=epoch, epochs=epochs
        )

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, done: int) -> None:
        """Show how many steps of the run are done."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=done, epoch=(done - 1) // self._steps + 1)
