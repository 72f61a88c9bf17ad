# SPDX-License-Identifier: Apache-2.0
"""How a comparison stands while it runs: live bars at a terminal, a line a run when piped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keymix.cli import console

if TYPE_CHECKING:
    from rich.progress import TaskID

    from keymix.compare.pool import Event, Watcher


def _line(text: str) -> None:
    """Write a line to standard error whole, however narrow the pipe claims to be."""
    console.err.print(text, markup=False, style="dim", soft_wrap=True)


@contextmanager
def watching() -> Iterator[Watcher]:
    """Give the function that shows events, for as long as the block runs."""
    if not console.err.is_terminal:
        yield Lines()
        return
    bars = Bars()
    try:
        yield bars
    finally:
        bars.stop()


class Lines:
    """A line on standard error for every run that ends and every step after training."""

    def __init__(self) -> None:
        self._ended = self._total = 0
        self._accuracy: dict[tuple[str, int], float] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        run = (event.mixer, event.seed)
        if event.kind == "plan":
            self._ended, self._total = event.done, event.total
            kept = f", {event.done} of them done before" if event.done else ""
            _line(f"{event.total} runs{kept}")
        elif event.kind == "epoch" and event.value is not None:
            self._accuracy[run] = event.value
        elif event.kind in ("done", "failed"):
            self._ended += 1
            seen = self._accuracy.get(run)
            told = event.text if event.kind == "failed" else ""
            if event.kind == "done" and seen is not None:
                told = f"validation accuracy {seen * 100:.1f} %"
            _line(
                f"{self._ended}/{self._total} {event.kind}: {event.mixer}, seed {event.seed}"
                + (f": {told}" if told else "")
            )
        elif event.kind == "stage" and self._total:  # before the plan, only mistakes are told
            _line(event.text)


class Bars:
    """One bar over all epochs of all runs with the time left, and one for each run under way."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}", style="dim", markup=False),
            TimeRemainingColumn(compact=True),
            console=console.err,
            refresh_per_second=4,
            transient=True,
        )
        self._all: TaskID | None = None
        self._stage: TaskID | None = None
        self._runs: dict[tuple[str, int], TaskID] = {}
        self._ended = self._total = self._left = 0
        self._fraction: dict[tuple[str, int], float] = {}
        self._progress.start()

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        run = (event.mixer, event.seed)
        if event.kind == "stage":
            self._finish_runs()
            self._stage = self._progress.add_task(event.text, total=None, told="")
        elif event.kind == "plan":
            self._drop_stage()
            self._ended, self._total = event.done, event.total
            self._left = event.total - event.done
            if self._left:
                self._all = self._progress.add_task("all runs", total=float(self._left), told="")
                self._overall()
        elif event.kind == "start":
            name = f"{event.mixer}, seed {event.seed}"
            self._runs[run] = self._progress.add_task(name, total=None, told="starting")
        elif event.kind == "epoch":
            self._fraction[run] = event.epoch / event.epochs
            accuracy = "" if event.value is None else f"  validation {event.value * 100:.1f} %"
            told = f"epoch {event.epoch} of {event.epochs}{accuracy}"
            task = self._runs[run]
            self._progress.update(task, completed=event.epoch, total=event.epochs, told=told)
            self._overall()
        else:
            self._ended += 1
            self._fraction[run] = 1.0
            self._progress.remove_task(self._runs.pop(run))
            if event.kind == "failed":
                line = f"failed: {event.mixer}, seed {event.seed}: {event.text}"
                self._progress.console.print(line, style="red", markup=False)
            self._overall()

    def _overall(self) -> None:
        if self._all is not None:
            done = sum(self._fraction.values())
            told = f"{self._ended} of {self._total} runs"
            self._progress.update(self._all, completed=done, told=told)

    def _drop_stage(self) -> None:
        if self._stage is not None:
            self._progress.remove_task(self._stage)
            self._stage = None

    def _finish_runs(self) -> None:
        self._drop_stage()
        if self._all is not None:
            self._progress.remove_task(self._all)
            self._all = None
