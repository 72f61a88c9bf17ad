# SPDX-License-Identifier: Apache-2.0
"""How a comparison is shown: its progress while it runs, then its table and verdicts, or JSON.

Progress is live bars at a terminal, and a line per run, or per minute, when piped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from keymix.cli import console
from keymix.errors import one_line
from keymix.records import to_json
from keymix.report.tables import Cell, Column, Table
from keymix.train.callbacks import SIGN_OF_LIFE, roughly

if TYPE_CHECKING:
    from rich.progress import TaskID

    from keymix.analysis.statistics import Interval
    from keymix.compare.events import Event, Remaining, Watcher
    from keymix.compare.run import Comparison
    from keymix.report.record import ComparisonRecord, OpenRun, OutcomeRow
    from keymix.report.wording import ScoreColumn

FURTHER = 6
"""Scores next to the first give way at a narrow terminal before costs, which are 1 to 5."""

MOST_MISSING = 6
"""Missing runs that are named; the page names all."""

SPIKE_COLUMNS = {
    "spikes/neuron/step": "rate",
    "SOPs": "sops",
    "MACs, real inputs": "macs",
    "energy µJ": "energy",
    "bounds µJ": "bounds",
    "without spikes µJ": "dense",
    "times": "times",
}
"""Heading to the key of the page's column."""

SPIKES_LINE = (
    "Energy: 4.6 pJ per multiply-add, 0.9 pJ per synaptic operation; batch norm folded, memory "
    "access not counted; docs/spikes.md has the rest."
)


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
    """The time that is left, computed each time it is shown."""

    def __init__(self) -> None:
        self._remaining: Remaining | None = None

    def see(self, event: Event) -> None:
        from keymix.compare.events import Remaining

        if event.estimate is not None:
            self._remaining = Remaining(event.estimate)
        elif self._remaining is not None:
            self._remaining.see(event)

    def __str__(self) -> str:
        seconds = None if self._remaining is None else self._remaining.seconds()
        return "" if seconds is None else f"about {roughly(seconds)} left"


def _plain(text: str) -> str:
    """Write plain spaces, which any terminal has."""
    return text.replace("\u00a0", " ")


class Lines:
    """A line on standard error for every run that ends and every step after training.

    Where none ends for a minute, the next epoch gets a line.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ended = self._total = 0
        self._left = _Left()
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
            self._runs[run] = self._add(name, text="starting")
        elif event.kind == "epoch":
            self._fraction[run] = event.epoch / event.epochs
            score = f"  validation {_plain(event.shown)}" if event.shown else ""
            text = f"epoch {event.epoch} of {event.epochs}{score}"
            task = self._runs[run]
            self._progress.update(task, completed=event.epoch, total=event.epochs, text=text)
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
        self, name: str, *, total: float | None = None, text: str = "", left: object = ""
    ) -> TaskID:
        return self._progress.add_task(one_line(name), total=total, text=text, left=left)

    def _overall(self) -> None:
        if self._all is not None:
            done = sum(self._fraction.values())
            text = f"{self._ended} of {self._total} runs"
            self._progress.update(self._all, completed=done, text=text)

    def _drop_stage(self) -> None:
        if self._stage is not None:
            self._progress.remove_task(self._stage)
            self._stage = None

    def _finish_runs(self) -> None:
        self._drop_stage()
        if self._all is not None:
            self._progress.remove_task(self._all)
            self._all = None


# ---- the result ----------------------------------------------------------------------------


def print_result(result: Comparison) -> None:
    """Print the table and the verdicts; the last lines are the answer and the report's path."""
    from keymix.report import formats
    from keymix.report.answer import answer
    from keymix.report.part import page_of
    from keymix.report.wording import columns, dense_over, wording

    record = result.record
    found_out = answer(record)
    score, words = record.task_kind.score, wording(record)
    dense, steps = dense_over(record)

    def difference(row: OutcomeRow) -> str:
        if row.mixer == record.baseline:
            return "baseline"
        if row.mixer in known:
            return "reference"
        return formats.changed(row.seeds.difference if row.seeds else None, score)

    rows = [*record.outcome.last]
    known = {mixer.label for mixer in record.mixers if mixer.reference}

    def scored(row: OutcomeRow) -> str:
        found = row.scores[score.key]
        spread = "" if found.sd is None else f" ± {score.digits(found.sd)}"
        return formats.scored(found.mean, score) + spread

    def span(found: Interval | None) -> str:
        return formats.interval(found, score)

    def macs(row: OutcomeRow) -> str:
        others = f" ({steps[row.mixer]})" if row.mixer in steps else ""
        return formats.count(record.costs[row.mixer].macs) + others

    def further(column: ScoreColumn, row: OutcomeRow) -> str:
        return formats.scored(row.scores[column.key].mean, column.score)

    shown: list[tuple[Column, Callable[[OutcomeRow], str]]] = [
        (Column("mixer", "mixer"), lambda row: row.mixer),
        (_number(f"{score.label} {score.unit}".rstrip()), scored),
        *(
            (_number(column.head.replace(", ", " "), FURTHER), partial(further, column))
            for column in columns(record)
            if column.key in page_of(record.task_kind).terminal
        ),
        (_number("difference"), difference),
        (_number(f"{100 * (1 - record.alpha):.4g}% interval"), lambda row: span(row.interval)),
        (_number("certainty"), lambda row: row.degree or ""),
        (_number("params", 2), lambda row: formats.count(record.costs[row.mixer].params)),
        (_number(f"MACs, {dense}" if dense else "MACs", 3), macs),
        (
            _number("ms", 1),
            lambda row: formats.three_digits(record.costs[row.mixer].latency_ms),
        ),
        (
            _number(f"{words.inputs}/s", 5),
            lambda row: formats.rate(record.costs[row.mixer].images_per_s),
        ),
        (_number("MiB", 4), lambda row: formats.mib(record.costs[row.mixer].peak_mib)),
    ]
    references = [
        [row.name, formats.scored(row.scores.get(score.key), score), *[""] * (len(shown) - 2)]
        for row in record.references
    ]
    title = f"{record.title}: test {words.score}, last epoch"
    cells = [*([cell(row) for _, cell in shown] for row in rows), *references]
    made = [[Cell(text, text) for text in row] for row in cells]
    _print_findings(record)
    console.show(Table("", title, [column for column, _ in shown], made))
    _print_spikes(record)
    console.say()
    for row in () if found_out.means_nothing else record.outcome.last:
        if row.headline:
            console.prose(f"- {row.headline}", hang="  ")
        if row.seeds and (why := formats.no_spread(row.seeds)):
            console.prose(f"  no interval over seeds: {why}.", hang="  ")
    if about := page_of(record.task_kind).missing(record):
        console.prose(about)
    _print_data(record)
    print_open_runs(result)
    console.say()
    console.say(f"results  {result.out / 'results.csv'}  {result.out / 'results.json'}")
    if not found_out.means_nothing:
        console.prose(record.lead)
    console.prose(f"{found_out.title}. {found_out.certainty}.")
    if found_out.decision:
        console.prose(found_out.decision)
    if found_out.next is not None:
        console.prose(f"Next: {found_out.next.text}.")
        if found_out.next.command:
            console.say(f"  {found_out.next.command}")  # on one line, to be copied
    console.say(f"report   {result.report}")


def _number(heading: str, gives_way: int = 0) -> Column:
    """Return a column whose cells are written already, on the right."""
    return Column(heading, heading, "count", gives_way=gives_way)


def _print_findings(record: ComparisonRecord) -> None:
    """Print what the comparison found out about itself, before any difference."""
    from keymix.report.wording import said

    for found in (said(record, each) for each in record.findings):
        console.prose(f"{found.heading}. {found.text} {found.remedy}")
    if record.findings:
        console.say()


def _print_data(record: ComparisonRecord) -> None:
    """Print what the check of the data found, in short; the page has all of it."""
    checked = record.data_check
    if checked is None:
        return
    for found in checked.findings:
        console.prose(f"Data check, {found.grade}: {found.said}")
    for line in filter(None, (checked.narrow, checked.missed)):
        console.prose(line)


def _print_spikes(record: ComparisonRecord) -> None:
    """Print what the spikes of a spiking model cost."""
    from keymix.report.sections import spikes

    if record.spikes is None:
        return
    found = spikes.table(record)
    keys = [column.key for column in found.columns]
    shown = [keys.index(key) for key in ("mixer", *SPIKE_COLUMNS.values())]
    rows = [[cells[i] for i in shown] for cells in found.cells()]
    console.say()
    console.table(
        ("mixer", *SPIKE_COLUMNS),
        rows,
        title=f"what spikes cost, {record.data.kind.one}",
    )
    console.prose(SPIKES_LINE)
    for note, labels in spikes.notes(record).items():
        console.prose(f"- {', '.join(labels)}: {note}", hang="  ")


def print_open_runs(result: Comparison) -> None:
    """Say on standard error which runs failed or are missing, and what could not be done."""
    record = result.record
    lines = [_line(run) for run in record.unfinished("failed")]
    missing = [_line(run) for run in record.unfinished("missing")]
    shown = missing if len(missing) <= MOST_MISSING else missing[: MOST_MISSING - 1]
    lines += shown
    if len(shown) < len(missing):
        lines.append(f"missing: {len(missing) - len(shown)} more runs")
    lines += [f"note: {note}" for note in result.notes]
    if record.environment_warning:
        lines.append(f"note: {record.environment_warning}")
    for line in lines:
        console.warn(line)


def _line(run: OpenRun) -> str:
    return f"{run.status}: {run.mixer}, seed {run.seed}: {run.reason}"


def _units(record: ComparisonRecord) -> list[str]:
    """Name where the task's part of a record has the units of scores."""
    from keymix.report.part import page_of

    task = record.task_kind
    keys = (score.unit_key for score in (*task.scores, *page_of(task).test_scores))
    return [key for key in keys if key]


def plain(result: Comparison) -> dict[str, Any]:
    """Return the result as plain values for ``--json``."""
    from keymix.report.answer import answer

    record = to_json(result.record)
    spikes = record["spikes"]["mixers"] if "spikes" in record else {}
    return {
        "answer": to_json(answer(result.record)),
        "report": str(result.report),
        "results": str(result.out / "results.json"),
        "baseline": record["baseline"],
        "seeds": record["seeds"],
        "data_check": record.get("data_check"),
        **{key: record[key] for key in ("findings", "references", "recommendation")},
        **{key: record[key] for key in ("task", *_units(result.record)) if key in record},
        "mixers": [
            {
                **row,
                "costs": record["costs"][row["mixer"]],
                **({"spikes": spikes[row["mixer"]]} if spikes else {}),
            }
            for row in result.rows
        ],
        **{
            status: [{key: run[key] for key in ("mixer", "seed", "reason")} for run in runs]
            for status, runs in (("failed", result.failed), ("missing", result.missing))
        },
    }
