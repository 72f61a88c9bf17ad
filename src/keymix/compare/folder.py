# SPDX-License-Identifier: Apache-2.0
"""The folder of a comparison: whose it is, what may be deleted in it, the files of the result."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keymix.compare import manifest
from keymix.compare.manifest import MANIFEST, Identity
from keymix.compare.plan import Plan
from keymix.data.record import DataRecord
from keymix.errors import KeymixWarning, UserError
from keymix.records import to_json
from keymix.report.part import page_of
from keymix.report.record import ComparisonRecord, DoneRun

RESULTS, TABLE, REPORT, COSTS = "results.json", "results.csv", "report.html", "costs.json"
SPIKES = "spikes.json"
RUNS, LOCK = "runs", ".lock"

MEASURED_COLUMNS = ("latency_ms", "images_per_s", "peak_mib")
"""Columns of ``results.csv`` that were measured; all others the same comparison gives again."""

COLUMNS = (
    "mixer",
    "seed",
    "epoch",
    "split",
    "metric",
    "value",
    "params",
    "macs",
    *MEASURED_COLUMNS,
)

STEPS = "time_steps"
"""A further column where the model is spiking: T, all of which ``macs`` counts."""

SPIKE_COLUMNS = ("firing_rate", "sops", "energy_uj", "energy_low_uj", "energy_high_uj")
"""The columns behind it: of each run's weights of the last epoch."""


def claim(
    plan: Plan,
    data: DataRecord,
    *,
    overwrite: bool,
    command: str,
    processes: int,
    threads: int,
) -> None:
    """Take the folder for this comparison: a new one, or the one that is there to go on with.

    Args:
        plan: What is wanted.
        data: The record of its images.
        overwrite: Throw away another comparison that is there.
        command: The command that repeats it, for the manifest; so are the next two.
        processes: Training processes side by side.
        threads: Threads of each.

    Raises:
        UserError: If the folder holds another comparison, or files that are no comparison's.
    """
    from keymix.train.files import clear_parts

    out = plan.out
    check_folder(out)
    clear_parts(out)
    made: Sequence[str] = ()
    checked = None
    if (out / MANIFEST).exists():
        try:
            there = manifest.read(out)
        except UserError as error:  # every run tells of itself whose it is
            told = str(error).partition(". ")[0]
            warnings.warn(f"{told}; it is written again", KeymixWarning, stacklevel=2)
            made, differing = manifest.runs_in(out), []
        else:
            made, checked = there.runs, there.checked
            differing = differences(to_json(there.identity), to_json(Identity.of(plan, data)))
        if differing and not overwrite:
            told = "; ".join(
                f"{key} is {_short(a)} there and {_short(b)} here" for key, a, b in differing[:3]
            )
            raise UserError(
                f"the folder {str(out)!r} holds another comparison: {told}. Name another with "
                "--out, or throw that one away with --overwrite."
            )
        if overwrite:
            clear(out, made)
            made, checked = (), None
    manifest.write(
        plan,
        data,
        before=made,
        checked=checked,
        command=command,
        processes=processes,
        threads=threads,
    )


def check_folder(out: Path) -> None:
    """Refuse a place that no comparison can use, before any work.

    Raises:
        UserError: If it is a file, or a folder with files that are no comparison's.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {str(out)!r} is a file. Name a folder.")
    foreign = out.exists() and not (out / MANIFEST).exists()
    before_the_first = (LOCK, f".{MANIFEST}.part")  # what a killed one leaves
    if foreign and any(path.name not in before_the_first for path in out.iterdir()):
        raise UserError(
            f"the folder {str(out)!r} is not empty and holds no comparison. Name another with "
            "--out."
        )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder against a second comparison at the same time.

    Raises:
        UserError: If another process holds it.
    """
    from keymix.train.files import locked as held

    with held(out, "comparison"):
        yield


def clear(out: Path, runs: Sequence[str]) -> None:
    """Delete what a comparison made in its folder, and nothing else."""
    from keymix.train import folder as run_folder
    from keymix.train.files import clear_parts

    for name in runs:
        place = out / name
        if place.is_dir() and place.resolve().is_relative_to(out.resolve()):
            clear_parts(place)
            run_folder.clear(place)
            (place / LOCK).unlink(missing_ok=True)  # of a run that was killed
            for empty in (place, place.parent):
                _remove_if_empty(empty)
    for log in (out / RUNS).glob("worker*.log"):
        log.unlink()
    _remove_if_empty(out / RUNS)
    for name in (RESULTS, TABLE, REPORT, COSTS, SPIKES, MANIFEST):
        (out / name).unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def differences(a: Any, b: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """List where two nested mappings differ, as dotted key and both values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in {**a, **b}:
            path = f"{prefix}.{key}" if prefix else str(key)
            found += differences(a.get(key), b.get(key), path)
        return found
    return [] if a == b else [(prefix.removeprefix("recipe."), a, b)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def write_json(path: Path, record: object) -> None:
    """Write JSON whole or not at all; numbers that are not finite are refused."""
    from keymix.train.files import write_text

    plain = to_json(record)
    write_text(path, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: Path, record: ComparisonRecord) -> None:
    """Write ``results.csv``: a row a number, with the mixer's costs beside it."""
    from keymix.report.tables import csv_text
    from keymix.train.files import write_text

    columns = COLUMNS + ((STEPS, *SPIKE_COLUMNS) if record.spikes else ())
    write_text(path, csv_text(columns, csv_rows(record)))


def csv_rows(record: ComparisonRecord) -> Iterator[list[Any]]:
    """Yield the rows of ``results.csv``, in the order of its columns."""
    spikes, steps = record.spikes, record.time_steps
    named = _named_by_unit(record)
    for run in record.runs:
        if not isinstance(run, DoneRun):
            continue
        cost = record.costs.get(run.mixer)
        costs = [getattr(cost, name) if cost else None for name in COLUMNS[6:]]
        for epoch, mark in (("last", run.last), ("best", run.best)):
            told: list[Any] = []
            if spikes:
                row = spikes.runs.get(run.folder) if epoch == "last" else None
                told = [getattr(row, name) if row else None for name in SPIKE_COLUMNS]
                told = [steps.get(run.mixer), *told]
            for split, scores in (("val", mark.val), ("test", mark.test)):
                for name, value in scores.items():
                    if value is not None:
                        metric = named.get(name, name)
                        yield [run.mixer, run.seed, epoch, split, metric, value, *costs, *told]


def _named_by_unit(record: ComparisonRecord) -> dict[str, str]:
    """Name scores by the unit that the record tells, where their keys end in another."""
    named = {}
    for score in page_of(record.task_kind).test_scores:
        unit = record.own.values.get(score.unit_key)
        if unit and score.key.endswith(f"_{score.unit}"):
            named[score.key] = f"{score.key.removesuffix(score.unit)}{unit}"
    return named
