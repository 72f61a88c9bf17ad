# SPDX-License-Identifier: Apache-2.0
"""How a comparison stands while it runs: live bars at a terminal, a line a run when piped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.errors import one_line

if TYPE_CHECKING:
    from rich.progress import TaskID

    from keymix.compare.events import Event, Remaining, Watcher


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


class _Left:
    """The time that is left, written anew each time it is shown."""

    def __init__(self) -> None:
        self._remaining: Remaining | None = None

    def see(self, event: Event) -> None:
        if event.estimate is not None:
            from keymix.compare.events import Remaining

            self._remaining = Remaining(event.estimate)
        elif self._remaining is not None:
            self._remaining.see(event)

    def __str__(self) -> str:
        if self._remaining is None:
            return ""
        from keymix.compare.eta import roughly

        return f"about {roughly(self._remaining.seconds())} left"


def _plain(text: str) -> str:
    """Write plain spaces, which any terminal has."""
    return text.replace("\u00a0", " ")


class Lines:
    """A line on standard error for every run that ends and every step after training."""

    def __init__(self) -> None:
        self._ended = self._total = 0
        self._left = _Left()
        self._scores: dict[tuple[str, int], str] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        run = (event.mixer, event.seed)
        self._left.see(event)
        if event.kind == "plan":
            self._ended, self._total = event.done, event.total
            kept = f", {event.done} of them done before" if event.done else ""
            console.note(f"{event.total} runs{kept}")
        elif event.kind in ("estimate", "note"):
            console.note(event.text)
        elif event.kind == "epoch" and event.shown:
            self._scores[run] = f"validation {event.text} {_plain(event.shown)}"
        elif event.kind in ("done", "failed"):
            self._ended += 1
            told = event.text if event.kind == "failed" else self._scores.get(run, "")
            console.note(
                f"{self._ended}/{self._total} {event.kind}: {event.mixer}, seed {event.seed}"
                + (f": {told}" if told else "")
                + (f"; {left}" if (left := str(self._left)) else "")
            )
        elif event.kind == "stage" and self._total:  # before the plan, only mistakes are told
            console.note(event.text)


class Bars:
    """One bar over all epochs of all runs with the time left, and one for each run under way."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}", style="dim", markup=False),
            TextColumn("{task.fields[left]}", style="cyan", markup=False),
            console=console.err,
            refresh_per_second=4,
            transient=True,
        )
        self._all: TaskID | None = None
        self._stage: TaskID | None = None
        self._runs: dict[tuple[str, int], TaskID] = {}
        self._left = _Left()
        self._ended = self._total = 0
        self._fraction: dict[tuple[str, int], float] = {}
        self._progress.start()

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        run = (event.mixer, event.seed)
        self._left.see(event)
        if event.kind == "stage":
            self._finish_runs()
            self._stage = self._add(event.text)
        elif event.kind == "plan":
            self._drop_stage()
            self._ended, self._total = event.done, event.total
            todo = float(event.total - event.done)
            if todo:
                self._all = self._add("all runs", total=todo, left=self._left)
                self._overall()
        elif event.kind in ("estimate", "note"):
            self._progress.console.print(one_line(event.text), style="dim", markup=False)
        elif event.kind == "start":
            name = f"{event.mixer}, seed {event.seed}"
            self._runs[run] = self._add(name, told="starting")
        elif event.kind == "epoch":
            self._fraction[run] = event.epoch / event.epochs
            score = f"  validation {_plain(event.shown)}" if event.shown else ""
            told = f"epoch {event.epoch} of {event.epochs}{score}"
            task = self._runs[run]
            self._progress.update(task, completed=event.epoch, total=event.epochs, told=told)
            self._overall()
        else:
            self._ended += 1
            self._fraction[run] = 1.0
            self._progress.remove_task(self._runs.pop(run))
            if event.kind == "failed":
                line = f"failed: {event.mixer}, seed {event.seed}: {event.text}"
                self._progress.console.print(one_line(line), style="red", markup=False)
            self._overall()

    def _add(
        self, name: str, *, total: float | None = None, told: str = "", left: object = ""
    ) -> TaskID:
        return self._progress.add_task(one_line(name), total=total, told=told, left=left)

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
