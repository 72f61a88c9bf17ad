# SPDX-License-Identifier: Apache-2.0
"""How the result of a comparison is told: a table with the verdicts, or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keymix.cli import console
from keymix.records import to_json

if TYPE_CHECKING:
    from keymix.compare.run import Comparison
    from keymix.report.record import ComparisonRecord, OpenRun

MOST_MISSING = 6
"""Missing runs that are named; the page names all."""

COSTS = ("params", "MACs", "ms", "{inputs}/s", "MiB")

SPIKE_COLUMNS = {
    "spikes/neuron/step": "rate",
    "SOPs": "sops",
    "MACs beside them": "macs",
    "energy µJ": "energy",
    "bounds µJ": "bounds",
    "without spikes µJ": "dense",
    "times": "times",
}
"""Heading to the key of the page's column."""

SPIKES_LINE = (
    "Energy: 4.6 pJ a multiply-add, 0.9 pJ a synaptic operation; batch norm folded, memory access "
    "not counted; docs/spikes.md tells the rest."
)


def tell(result: Comparison) -> None:
    """Print the table, the verdicts and where the report is.

    Args:
        result: The comparison.
    """
    from keymix.report import formats
    from keymix.report.part import page_of
    from keymix.report.wording import columns, dense_over, wording

    record = result.record
    score, words = record.task_kind.score, wording(record)
    shown = page_of(record.task_kind).terminal
    further = [column for column in columns(record) if column.key in shown]
    dense, at = dense_over(record)
    rows = []
    for row in record.outcome.last:
        label = row.mixer
        cost = record.costs[label]
        found, seeds, units = row.scores[score.key], row.seeds, row.images
        spread = "" if found.sd is None else f" ± {score.digits(found.sd)}"
        base = label == record.baseline
        rows.append(
            [
                label,
                formats.scored(found.mean, score) + spread,
                *(formats.scored(row.scores[column.key].mean, column.score) for column in further),
                "baseline" if base else formats.changed(seeds.difference if seeds else None, score),
                formats.span(seeds.low, seeds.high, score) if seeds else formats.MISSING,
                formats.span(units.low, units.high, score) if units else formats.MISSING,
                formats.count(cost.params),
                formats.count(cost.macs) + (f" ({at[label]})" if label in at else ""),
                formats.milliseconds(cost.latency_ms),
                formats.rate(cost.images_per_s),
                formats.mib(cost.peak_mib),
            ]
        )
    costs = [head.format(inputs=words.inputs) for head in COSTS]
    heads = [
        "mixer",
        f"{score.label} {score.unit}".rstrip(),
        *(column.head.replace(", ", " ") for column in further),
        "difference",
        "95% seeds",
        f"95% {words.units}",
        *(f"MACs, {dense}" if dense and head == "MACs" else head for head in costs),
    ]
    console.table(heads, rows, title=f"{record.title}: test {words.score}, last epoch")
    _tell_spikes(record)
    console.say()
    console.say(record.lead)
    for row in record.outcome.last:
        if row.headline:
            console.say(f"- {row.headline}")
        if row.seeds and (why := formats.no_spread(row.seeds)):
            console.say(f"  no interval over seeds: {why}.")
    if record.caution:
        console.say(record.caution)
    _tell_data(record)
    console.say()
    console.say(f"report   {result.report}")
    console.say(f"results  {result.out / 'results.csv'}  {result.out / 'results.json'}")


def _tell_data(record: ComparisonRecord) -> None:
    """Print what the check of the data found, in short; the page has all of it."""
    checked = record.data_check
    if checked is None:
        return
    for found in checked.findings:
        console.say(f"Data check, {found.grade}: {found.what} ({found.count:,}).")
    for line in filter(None, (checked.narrow, checked.missed)):
        console.say(line)


def _tell_spikes(record: ComparisonRecord) -> None:
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
    console.say(SPIKES_LINE)
    for note, labels in spikes.notes(record).items():
        console.say(f"- {', '.join(labels)}: {note}")


def tell_open(result: Comparison) -> None:
    """Say on standard error which runs failed or are missing, and what could not be done.

    Args:
        result: The comparison.
    """
    from keymix.report.record import DoneRun

    record = result.record
    lines = [_line(run) for run in record.unfinished("failed")]
    missing = [_line(run) for run in record.unfinished("missing")]
    shown = missing if len(missing) <= MOST_MISSING else missing[: MOST_MISSING - 1]
    lines += shown
    if len(shown) < len(missing):
        lines.append(f"missing: {len(missing) - len(shown)} more runs")
    lines += [
        f"note: {run.mixer}, seed {run.seed}: {note}"
        for run in record.runs
        if isinstance(run, DoneRun)
        for note in run.notes or ()
    ]
    lines += [f"note: {note}" for note in result.notes]
    if record.environment_warning:
        lines.append(f"note: {record.environment_warning}")
    for line in lines:
        console.warn(line)


def _line(run: OpenRun) -> str:
    return f"{run.status}: {run.mixer}, seed {run.seed}: {run.reason}"


def _units(record: ComparisonRecord) -> list[str]:
    """Name where the task's part of a record tells the units of scores."""
    from keymix.report.part import page_of

    task = record.task_kind
    keys = (score.unit_key for score in (*task.scores, *page_of(task).test_scores))
    return [key for key in keys if key]


def plain(result: Comparison) -> dict[str, Any]:
    """Return the result as plain values for ``--json``.

    Args:
        result: The comparison.
    """
    record = to_json(result.record)
    spikes = record["spikes"]["mixers"] if "spikes" in record else {}
    return {
        "report": str(result.report),
        "results": str(result.out / "results.json"),
        "baseline": record["baseline"],
        "seeds": record["seeds"],
        "data_check": record.get("data_check"),
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
