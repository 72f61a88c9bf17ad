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

from keymix.train import files
from keymix.train.task import TrainingTask

SAME_DATA = ("fingerprint", "index_sha256", "classes")
"""What of the data's record must not change within a run."""

Line = dict[str, Any]
"""An epoch's line of metrics; of weights that are kept, the epoch and the scores alone."""
Report = Callable[[Mapping[str, Any]], None]


def is_better(line: Mapping[str, Any], than: Mapping[str, Any] | None) -> bool:
    """Whether an epoch validates better than another: by its task's score, then by loss."""
    if than is None:
        return True
    score = next(key for key in files.SCORES if key in line)
    return (line[score], -line["val_loss"]) > (than[score], -than["val_loss"])


def best_of(lines: Iterable[Line]) -> Line | None:
    """The best-on-validation epoch's line."""
    best: Line | None = None
    for line in lines:
        if is_better(line, best):
            best = line
    return best


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
        facts: Mapping[str, Any],
        lines: Iterable[Line],
        best: Line | None,
        lost: Iterable[str] = (),
        report: Report | None = None,
    ) -> None:
        self.folder, self.images, self.facts, self.report = folder, images, facts, report
        self.lines, self.best, self.lost = list(lines), best, list(lost)
        self._trained = self._before = 0.0
        self._start = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """The epochs' lines, the seconds of the unfinished epoch, and whose images it saw."""
        kept = {name: self.facts["data"][name] for name in SAME_DATA}
        lines = [dict(line) for line in self.lines]
        return {"seconds": self._elapsed(), "data": kept, "lines": lines, "lost": self.lost}

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
        line: Line = {"epoch": task.current_epoch}
        line |= {f"train_{name}": mean for name, mean in task.losses.means().items()}
        line |= {f"val_{name}": score for name, score in scores.items()}
        line["lr"] = task.last_lr
        line["seconds"] = self._elapsed()
        line["images_per_s"] = self.images / max(self._trained, 1e-9)
        if is_better(line, self.best):
            self.best = line
            self.write_weights("best", task, line)
        self.lines.append(line)
        files.write_metrics(self.folder / files.METRICS, self.lines)
        self.start()

    def announce(self, epochs: int) -> None:
        """Report the last line, once its epoch is saved.

        Args:
            epochs: How many are planned.
        """
        if self.report is not None and self.best is not None:
            self.report({**self.lines[-1], "epochs": epochs, "best_epoch": self.best["epoch"]})

    def write_weights(self, which: str, task: TrainingTask, line: Line) -> None:
        """Write the weights as they are now, as ``last`` or ``best``, with epoch and scores."""
        path = self.folder / files.weights_file(which)
        val = {key.removeprefix("val_"): line[key] for key in line if key.startswith("val_")}
        facts = {**self.facts, "epoch": line["epoch"], "val": val}
        files.write_weights(path, task.evaluated.state_dict(), facts)

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
