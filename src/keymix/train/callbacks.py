# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a training: a function for each epoch, or what a person sees while it runs.

A callback changes nothing in the training: no random number, no order of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import progress as rich
from rich.console import Console

from keymix.errors import one_line
from keymix.task import LOSS, Task
from keymix.train.recipe import Recipe
from keymix.train.record import EpochLine, RunRecord

Report = Callable[[Mapping[str, float | None]], None]
"""Takes an epoch's line of metrics, with ``epochs`` (planned) and ``best_epoch``."""

SIGN_OF_LIFE = 60.0
"""Seconds without a line, where there is no terminal, after which a line says what is done."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What is going to be trained, known before the first step.

    Args:
        folder: The run's folder.
        recipe: The run.
        task: The task of its data.
        items: What an input is called, in the plural, such as ``images``.
        sizes: Inputs to train on, to validate and to test.
        steps: Batches of an epoch.
        done: Batches of the run that were done before.
        lines: The epochs that were done before.
        params: Trainable parameters.
        device: Where it trains.
        ranks: Devices that share each batch.
    """

    folder: Path
    recipe: Recipe
    task: Task
    items: str
    sizes: tuple[int, int, int]
    steps: int
    done: int
    lines: Sequence[EpochLine]
    params: int
    device: str
    ranks: int = 1

    @property
    def epochs(self) -> int:
        """Epochs of the run."""
        return self.recipe.schedule.epochs

    def sentence(self) -> str:
        """Say in a line what is trained on what, and for how long."""
        model, (train, val, test) = self.recipe.model, self.sizes
        mixer = "" if model.mixer is None else f" with {model.mixer}"
        parts = [
            f"{train:,} {self.items} to train on, {val:,} to validate, {test:,} to test",
            f"{model.name}{mixer}, {_millions(self.params)} parameters",
            f"{_number(self.epochs, 'epoch')} of {_number(self.steps, 'step')} of "
            f"{min(self.recipe.data.batch_size, train)} on {self.device}",
        ]
        if self.ranks > 1:
            share, summed = self.recipe.data.batch_size // self.ranks, self.recipe.optim.accumulate
            parts.append(
                f"{share} per device x {self.ranks} devices x {_number(summed, 'batch')} per update"
            )
        if self.done >= self.steps * self.epochs:
            parts.append("trained before; tested now")
        elif self.done:
            epoch, step = divmod(self.done, self.steps)
            within = f", step {step + 1:,}" if step else ""
            parts.append(f"resumed at epoch {epoch + 1}{within}")
        return " · ".join(parts)


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _millions(params: int) -> str:
    return f"{params:,}" if params < 100_000 else f"{params / 1e6:.2f} M"


class Callback:
    """Is called while a run trains. Every method does nothing unless a subclass says what."""

    def on_train_start(self, plan: TrainingPlan) -> None:
        """Take what is going to be trained; called once, before the first step."""

    def on_step_end(self, done: int, loss: float) -> None:
        """Take how many steps of the run are done, and the mean loss of the epoch so far."""

    def on_validation_start(self) -> None:
        """Take that the steps of an epoch are done and its validation begins."""

    def on_epoch_end(self, line: Mapping[str, float | None]) -> None:
        """Take an epoch's metrics, once it is saved; see `Report`."""

    def on_test_end(self, record: RunRecord) -> None:
        """Take what came out of the run, its test scores with it."""

    def close(self) -> None:
        """Clear up; called once, whatever happened."""


class ReportEpochs(Callback):
    """Calls a function with the metrics of every epoch."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_epoch_end(self, line: Mapping[str, float | None]) -> None:
        """Call the function."""
        self._report(line)


class Pace:
    """Time left of a training, by its pace since the first step of this process.

    The first step, which may compile or wait for the first batch, is left out; validation is in it
    as soon as one was seen.
    """

    def __init__(self, steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._first: tuple[int, float] | None = None
        self._now = 0

    def see(self, done: int) -> None:
        """Take how many steps of the run are done."""
        self._now = done
        if self._first is None:
            self._first = (done, self._clock())

    def left(self) -> str:
        """Say how long the rest will take; empty where nothing is known yet."""
        start, since = self._first or (self._now, 0.0)
        done, rest = self._now - start, self._steps - self._now
        if not done or not rest:
            return ""
        return f"about {roughly(rest * (self._clock() - since) / done)} left"


class Display(Callback):
    """Writes the plan and every epoch's line to a console, and shows what happens between them.

    At a terminal a bar over the whole training has the loss, inputs per second and the time left;
    elsewhere a line says as much where an epoch takes more than a minute.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._bar: rich.Progress | None = None

    def on_train_start(self, plan: TrainingPlan) -> None:
        """Write the plan; draw the bar at a terminal."""
        self._plan = plan
        self._total = plan.steps * plan.epochs
        self._pace = Pace(self._total, clock=self._clock)
        self._said = self._epoch_began = self._clock()
        self._epoch_from = plan.done
        self._say(plan.sentence())
        if not self._console.is_terminal or plan.done >= self._total:
            return
        self._bar = rich.Progress(
            rich.BarColumn(bar_width=20),
            rich.TextColumn("{task.fields[text]}", markup=False),
            rich.TextColumn("{task.fields[left]}", style="cyan", markup=False),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._bar.add_task(
            "", total=self._total, completed=plan.done, text="starting", left=""
        )
        self._bar.start()

    def on_step_end(self, done: int, loss: float) -> None:
        """Show where the training is."""
        self._pace.see(done)
        epoch, step = divmod(done - 1, self._plan.steps)
        if self._bar is not None:
            text = f"epoch {epoch + 1}/{self._plan.epochs}  loss {loss:.4f}  {self._speed(done)}"
            self._bar.update(self._task, completed=done, text=text, left=self._pace.left())
        elif self._clock() - self._said >= SIGN_OF_LIFE:
            self._say(
                f"epoch {epoch + 1}/{self._plan.epochs}  step {step + 1:,}/"
                f"{self._plan.steps:,}  train loss {loss:.4f}  {self._speed(done)}  "
                f"{self._pace.left()}".rstrip()
            )

    def on_validation_start(self) -> None:
        """Show that the validation is under way."""
        if self._bar is not None:
            self._bar.update(self._task, text="validating")

    def on_epoch_end(self, line: Mapping[str, float | None]) -> None:
        """Write the epoch's line; at a terminal it stays above the bar, in one row if it can."""
        task, number = self._plan.task, int(line["epoch"] or 0) + 1
        loss, score, value = line.get(f"val_{LOSS}"), task.score, line[f"val_{task.score.key}"]
        shown = "–" if value is None else f"{score.digits(value, 2)}{score.unit}"
        parts = {
            "epoch": f"epoch {number}/{line['epochs']}",
            "train": f"train loss {line['train_loss']:.4f}",
            "val": f"val loss {loss:.4f}" if loss is not None else "",
            "score": f"val {score.short} {shown}",
            "lr": f"lr {line['lr']:.2e}",
            "seconds": f"{line['seconds']:.1f} s",
            "speed": f"{line['images_per_s']:,.0f} {self._plan.items}/s",
            "left": self._pace.left(),
        }
        order = ["left", "lr", "seconds", "speed", "val"]
        give_way = order if self._console.is_terminal else []
        text = _joined(parts)
        while give_way and len(text) > self._console.width:
            del parts[give_way.pop(0)]
            text = _joined(parts)
        self._say(text)
        self._epoch_from, self._epoch_began = number * self._plan.steps, self._clock()
        if self._bar is not None and number == self._plan.epochs:
            self._bar.update(self._task, text="testing", left="")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _speed(self, done: int) -> str:
        """Inputs per second of the epoch so far."""
        images = (done - self._epoch_from) * self._plan.recipe.data.batch_size
        seconds = max(self._clock() - self._epoch_began, 1e-9)
        return f"{images / seconds:,.0f} {self._plan.items}/s"

    def _say(self, text: str) -> None:
        """Write a line: broken between words at a terminal, whole in a pipe."""
        whole = not self._console.is_terminal
        self._console.print(one_line(text), markup=False, soft_wrap=whole)
        self._said = self._clock()


def _joined(parts: Mapping[str, str]) -> str:
    return "  ".join(part for part in parts.values() if part)


def roughly(seconds: float) -> str:
    """Write a duration as an estimate deserves: 40 s, 1 min 40 s, 6 min, 1 h 10 min."""
    if seconds < 90:
        step = 1 if seconds < 10 else 5
        return f"{max(1, step * round(seconds / step))} s"
    if seconds < 295:
        minutes, rest = divmod(10 * round(seconds / 10), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    minutes = 5 * round(minutes / 5) if minutes < 600 else 60 * round(minutes / 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"
