# SPDX-License-Identifier: Apache-2.0
"""How a comparison is shown: its progress while it runs, then its table and verdicts, or JSON.

Progress is live bars at a terminal, and a line per run, or per minute, when piped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from keymix.cli import console
from keymix.errors import one_line
from keymix.records import to_json
from keymix.train.callbacks import SIGN_OF_LIFE

if TYPE_CHECKING:
    from rich.progress import TaskID

    from keymix.compare.events import Event, Watcher
    from keymix.report.comparison import Comparison
    from keymix.report.record import Results

MOST_MISSING = 6
"""Missing runs that are named; the page names all."""


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


def _plain(text: str) -> str:
    """Write plain spaces, which any terminal has."""
    return text.replace("\u00a0", " ")


class Lines:
    """A line on standard error for every run that ends and every step after training.

    Where none ends for a minute, the next epoch gets a line.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        from keymix.compare.events import Remaining

        self._ended = self._total = 0
        self._left = Remaining(clock=clock)
        self._clock = clock
        self._said = clock()
        self._scores: dict[tuple[str, int], str] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        run = (event.mixer, event.seed)
        self._left.see(event)
        if event.kind == "plan":
            self._ended, self._total = event.done, event.total
            kept = f", {event.done} of them done before" if event.done else ""
            self._note(f"{event.total} runs{kept}")
        elif event.kind in ("estimate", "note"):
            self._note(event.text)
        elif event.kind == "epoch":
            if event.shown:
                self._scores[run] = f"validation {event.text} {_plain(event.shown)}"
            if self._clock() - self._said >= SIGN_OF_LIFE:
                place = f"epoch {event.epoch} of {event.epochs}"
                self._note(f"{event.mixer}, seed {event.seed}: {place}" + self._rest(run, ", "))
        elif event.kind in ("done", "failed"):
            self._ended += 1
            if event.kind == "failed":
                self._scores[run] = event.text
            self._note(
                f"{self._ended}/{self._total} {event.kind}: {event.mixer}, seed {event.seed}"
                + self._rest(run, ": ")
            )
        elif event.kind == "stage" and self._total:  # before the plan, only mistakes are shown
            self._note(event.text)

    def _rest(self, run: tuple[str, int], joint: str) -> str:
        """Say after `joint` how a run did, and the time that all will still take."""
        how, left = self._scores.get(run, ""), str(self._left)
        return (f"{joint}{how}" if how else "") + (f"; {left}" if left else "")

    def _note(self, text: str) -> None:
        console.note(text)
        self._said = self._clock()


class Bars:
    """One bar over all epochs of all runs with the time left, and one for each run under way."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        from keymix.compare.events import Remaining

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", style="dim", markup=False),
            TextColumn("{task.fields[left]}", style="cyan", markup=False),
            console=console.err,
            refresh_per_second=4,
            transient=True,
        )
        self._all: TaskID | None = None
        self._runs: dict[tuple[str, int], TaskID] = {}
        self._left = Remaining()
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
        if event.kind == "plan":
            self._ended, self._total = event.done, event.total
            todo = float(event.total - event.done)
            if todo:
                self._all = self._add("all runs", total=todo, left=self._left)
                self._overall()
        elif event.kind in ("estimate", "note", "stage"):
            self._progress.console.print(one_line(event.text), style="dim", markup=False)
        elif event.kind == "start":
            name = f"{event.mixer}, seed {event.seed}"
            self._runs[run] = self._add(name, text="starting")
        elif event.kind == "epoch":
            self._fraction[run] = event.epoch / event.epochs
            score = f"  validation {_plain(event.shown)}" if event.shown else ""
            text = f"epoch {event.epoch} of {event.epochs}{score}"
            task = self._runs[run]
            self._progress.update(task, completed=event.epoch, total=event.epochs, text=text)
            self._overall()
        elif event.kind == "elsewhere":
            self._progress.remove_task(self._runs.pop(run))
        else:
            self._ended += 1
            self._fraction[run] = 1.0
            self._progress.remove_task(self._runs.pop(run))
            if event.kind == "failed":
                line = f"failed: {event.mixer}, seed {event.seed}: {event.text}"
                self._progress.console.print(one_line(line), style="red", markup=False)
            self._overall()

    def _add(
        self, name: str, *, total: float | None = None, text: str = "", left: object = ""
    ) -> TaskID:
        return self._progress.add_task(one_line(name), total=total, text=text, left=left)

    def _overall(self) -> None:
        if self._all is not None:
            done = sum(self._fraction.values())
            text = f"{self._ended} of {self._total} runs"
            self._progress.update(self._all, completed=done, text=text)


# ---- the result ----------------------------------------------------------------------------


def print_result(result: Comparison) -> None:
    """Print the table and the verdicts; the last lines are the answer and the report's path."""
    from keymix.report.answer import answer
    from keymix.report.sections.mixers import decision
    from keymix.report.words import said

    record = result.record
    found = answer(record)
    for line in said("findings", record):
        console.prose(line)
    console.show(decision(record, further=True))
    _print_spikes(record)
    console.say()
    for line in [] if found.means_nothing else said("verdicts", record):
        console.prose(line, hang="  ")
    for line in said("notes", record):
        console.prose(line)
    print_open_runs(result)
    console.say()
    console.say(f"results  {result.out / 'results.csv'}  {result.out / 'results.json'}")
    for line in said("answer", found):
        console.prose(line)
    if found.next is not None and found.next.command:
        console.say(f"  {found.next.command}")  # on one line, to be copied
    console.say(f"report   {result.report}")


def _print_spikes(record: Results) -> None:
    """Print what the spikes of a spiking model cost."""
    from keymix.analysis.energy import ENERGIES
    from keymix.report.sections import spikes
    from keymix.report.words import say

    if not record.spikes:
        return
    console.say()
    console.show(spikes.table(record))
    console.prose(say("energies", ENERGIES["fp32"]))
    for note, labels in spikes.notes(record).items():
        console.prose(f"- {', '.join(labels)}: {note}", hang="  ")


def print_open_runs(result: Comparison) -> None:
    """Say on standard error which runs failed or are missing, and what could not be done."""
    from keymix.report.words import said, say

    record = result.record
    missing = record.unfinished("missing")
    shown = missing if len(missing) <= MOST_MISSING else missing[: MOST_MISSING - 1]
    lines = [say("open_run", run) for run in (*record.unfinished("failed"), *shown)]
    if len(shown) < len(missing):
        lines.append(f"missing: {len(missing) - len(shown)} more runs")
    lines += [f"note: {note}" for note in (*result.notes, *said("environments", record))]
    for line in lines:
        console.warn(line)


def plain(result: Comparison) -> dict[str, Any]:
    """Return the result as plain values for ``--json``."""
    from keymix.report.answer import answer

    record = to_json(result.record)
    spikes = to_json(result.record.spikes)
    return {
        "answer": to_json(answer(result.record)),
        "report": str(result.report),
        "results": str(result.out / "results.json"),
        "baseline": record["baseline"],
        "seeds": record["seeds"],
        "data_check": record.get("data_check"),
        **{key: record[key] for key in ("findings", "references", "recommendation")},
        "mixers": [
            {
                **row,
                "costs": record["costs"][row["mixer"]],
                **({"spikes": spikes[row["mixer"]]} if spikes else {}),
            }
            for row in record["outcome"]["last"]
        ],
        **{
            status: [
                {key: getattr(run, key) for key in ("mixer", "seed", "reason")} for run in runs
            ]
            for status, runs in (("failed", result.failed), ("missing", result.missing))
        },
    }
