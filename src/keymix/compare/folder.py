# SPDX-License-Identifier: Apache-2.0
"""The folder of a comparison: whose it is, what may be deleted in it, the files of the result.

Its manifest says which runs it made and what was planned last. With it a comparison is read again
from its folder alone: by `keymix report`, on another machine, and after a crash.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any

from keymix.compare import tune
from keymix.compare.costs import COSTS, SPIKES
from keymix.compare.plan import Plan, Planned
from keymix.compare.references import ARRAYS, FACTS
from keymix.compare.runs import DAMAGED, Finished, Reading
from keymix.data.record import DataRecord, SameImages
from keymix.errors import KeymixWarning, UserError, one_line
from keymix.records import FormatError, differences, from_json, to_json
from keymix.report import frames
from keymix.report.checked import Checked
from keymix.report.comparison import DIFFERENCES, REPORT, RESULTS, TABLE
from keymix.report.comparison_page import render
from keymix.report.record import FORMAT, ComparisonRecord
from keymix.train import folder as run_folder
from keymix.train.files import clear_parts, read_json, write_json, write_text
from keymix.train.folder import recorded_recipe
from keymix.train.recipe import Recipe, is_name

MANIFEST = "comparison.json"
RUNS, LOCK = "runs", ".lock"
_RUN = re.compile(r"runs/([^/]+)/seed\d{1,20}")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What must be equal for runs to be in one comparison.

    Mixers, seeds and the baseline may change: an existing comparison grows by them.
    """

    recipe: Recipe
    match: str | None
    data: SameImages

    @classmethod
    def of(cls, plan: Plan, data: DataRecord) -> Identity:
        """Take it from a plan and the record of its images."""
        return cls(recipe=plan.recipe, match=plan.match, data=SameImages.of(data))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the folder records of itself: its ``comparison.json``."""

    format: int = FORMAT
    identity: Identity
    runs: tuple[str, ...]  # folders of all runs that it ever planned, relative to it
    planned: Planned
    checked: Checked | None = None  # what the check of the data found before the first run
    looks: tuple[int, ...] = ()  # seeds of each time that all runs were finished
    images: bool = True  # whether its report has pictures of the data

    def __post_init__(self) -> None:
        wrong = next((name for name in self.runs if not _is_run(name)), None)
        if wrong is not None:
            raise UserError(f"runs has {wrong!r}, which is no run's folder")


def claim(plan: Plan, data: DataRecord, *, overwrite: bool, images: bool) -> None:
    """Take the folder for this comparison: a new one, or the one that is there to resume.

    `images` says whether its report has pictures of the data.

    A UserError refuses a folder of another comparison, or with files that are no comparison's.
    """
    out = plan.out
    check_folder(out)
    clear_parts(out)
    made: Sequence[str] = ()
    checked = None
    looks: tuple[int, ...] = ()
    if (out / MANIFEST).exists():
        try:
            there = read_manifest(out)
        except UserError as error:  # every run records by itself which it is
            if not overwrite:
                if isinstance(error, FormatError):
                    raise
                wrong = str(error).partition(". ")[0]
                warnings.warn(f"{wrong}; it is written again", KeymixWarning, stacklevel=2)
            made, differing = runs_in(out), []
        else:
            made, checked, looks = there.runs, there.checked, there.looks
            identity = to_json(Identity.of(plan, data))
            differing = [*differences(to_json(there.identity), identity)]
        if differing and not overwrite:
            listed = "; ".join(
                f"{key.removeprefix('recipe.')} is {_short(a)} there and {_short(b)} here"
                for key, a, b in differing[:3]
            )
            raise UserError(
                f"the folder {str(out)!r} holds another comparison: {listed}. Name another with "
                "--out, or throw that one away with --overwrite."
            )
        if overwrite:
            clear(out, made)
            made, checked, looks = (), None, ()
    write_manifest(plan, data, before=made, checked=checked, looks=looks, images=images)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def check_folder(out: Path) -> None:
    """Refuse a place that no comparison can use: a file, or a folder with other files."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {str(out)!r} is a file. Name a folder.")
    foreign = out.exists() and not (out / MANIFEST).exists()
    # what one leaves that was killed, or that tunes
    before_the_first = (LOCK, f".{MANIFEST}.part", tune.FOLDER, tune.FACTS)
    if foreign and any(path.name not in before_the_first for path in out.iterdir()):
        raise UserError(
            f"the folder {str(out)!r} is not empty and holds no comparison. Name another with "
            "--out."
        )


def clear(out: Path, runs: Sequence[str]) -> None:
    """Delete what a comparison made in its folder, and nothing else."""
    for place in (out / f"{name}{ending}" for name in runs for ending in ("", DAMAGED)):
        if place.is_dir() and place.resolve().is_relative_to(out.resolve()):
            clear_parts(place)
            run_folder.clear(place)
            (place / LOCK).unlink(missing_ok=True)  # of a run that was killed
            for empty in (place, place.parent):
                _remove_if_empty(empty)
    for log in (out / RUNS).glob("worker*.log"):
        log.unlink()
    _remove_if_empty(out / RUNS)
    _clear_tuning(out / tune.FOLDER)
    results = (RESULTS, TABLE, DIFFERENCES, REPORT, MANIFEST)
    for name in (*results, tune.FACTS, COSTS, SPIKES, FACTS, ARRAYS):
        (out / name).unlink(missing_ok=True)


def _clear_tuning(place: Path) -> None:
    """Delete the runs at which the learning rate was chosen."""
    for run in place.glob(f"lr*/{RUNS}/*/seed*"):
        run_folder.clear(run)
        (run / LOCK).unlink(missing_ok=True)
        for empty in (run, run.parent):
            _remove_if_empty(empty)
    for runs in place.glob(f"lr*/{RUNS}"):
        for log in runs.glob("worker*.log"):
            log.unlink()
        for empty in (runs, runs.parent):
            _remove_if_empty(empty)
    _remove_if_empty(place)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


# ---- the manifest ---------------------------------------------------------------------------


def write_manifest(
    plan: Plan,
    data: DataRecord,
    *,
    before: Iterable[str] = (),
    checked: Checked | None = None,
    looks: Sequence[int] = (),
    images: bool = True,
) -> None:
    """Write the manifest of a plan; `before` are run folders that it named before."""
    ours = [plan.folder(mixer, s).relative_to(plan.out).as_posix() for mixer, s in plan.pairs]
    planned = Planned(**{each.name: getattr(plan, each.name) for each in fields(Planned)})
    plan.out.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(
        identity=Identity.of(plan, data),
        runs=tuple(sorted({*before, *ours})),
        planned=planned,
        checked=checked,
        looks=tuple(looks),
        images=images,
    )
    write_json(plan.out / MANIFEST, manifest)


def read_manifest(out: Path) -> Manifest:
    """Read the manifest of a folder, or raise a UserError if it is damaged."""
    path = out / MANIFEST
    try:
        return from_json(Manifest, read_json(path), where=repr(str(path)))
    except FormatError:
        raise
    except UserError as error:
        raise UserError(
            f"{str(error).rstrip('.')}. Run the same `keymix compare` command again, which writes "
            f"{str(path)!r} again; finished runs are kept."
        ) from None


def recorded_in(out: Path) -> Recipe | None:
    """Return the recipe that the runs of a comparison's folder share; None where there is none.

    Where the manifest is damaged, a run has it.
    """
    if not (out / MANIFEST).is_file():
        return None
    try:
        return read_manifest(out).identity.recipe
    except FormatError:
        raise
    except UserError:
        for name in runs_in(out):
            with suppress(UserError):
                return recorded_recipe(out / name)
    return None


def keep_checked(out: Path, checked: Checked) -> None:
    """Add to the manifest what the check of the data found."""
    write_json(out / MANIFEST, replace(read_manifest(out), checked=checked))


def keep_look(plan: Plan, runs: Sequence[Reading]) -> tuple[int, ...]:
    """Record that all runs of a comparison are finished and looked at; return all such looks.

    Further seeds make a further look, a repetition does not.
    """
    manifest, seeds = read_manifest(plan.out), len(plan.seeds)
    done = all(isinstance(reading, Finished) for reading in runs)
    if done and seeds > max(manifest.looks, default=0):
        manifest = replace(manifest, looks=(*manifest.looks, seeds))
        write_json(plan.out / MANIFEST, manifest)
    return manifest.looks


def shows_images(out: Path) -> bool:
    """Whether the report of a folder has pictures of the data, as it was asked for last.

    Where the manifest is damaged, the record says it.
    """
    for name in (MANIFEST, RESULTS):
        with suppress(UserError):
            return read_json(out / name).get("images") is not False
    return True


def keep_images(out: Path, images: bool) -> None:  # the manifest has it
    """Record whether the report has pictures of the data."""
    write_json(out / MANIFEST, replace(read_manifest(out), images=images))


def planned_in(out: Path) -> Planned | None:
    """Return the last plan of a folder; None where there is none."""
    if not (out / MANIFEST).is_file():
        return None
    with suppress(UserError):
        return read_manifest(out).planned
    return None


def imports_note(out: Path, given: Iterable[str | Path]) -> str:
    """Say which files of the user's a folder was made with that were not given, and are not run.

    One line; empty where all were given, and where the manifest is damaged.
    """
    planned = None
    with suppress(UserError):
        planned = read_manifest(out).planned if (out / MANIFEST).exists() else None
    names = {Path(file).name for file in given}
    recorded = () if planned is None else planned.imports
    left = [file for file in recorded if PurePath(file).name not in names]
    if not left:
        return ""
    options = " ".join(f"--import {shlex.quote(file)}" for file in left)
    return one_line(
        f"the comparison was made with mixers from {', '.join(map(repr, left))}; a file that a "
        f"folder names is not run. If you trust it, add {options}"
    )


def _is_run(name: object) -> bool:
    """Whether a text is the folder of a run in a comparison's: ``runs/<slug>/seed<N>``."""
    found = _RUN.fullmatch(name) if isinstance(name, str) else None
    return found is not None and is_name(found[1])


def runs_in(out: Path) -> list[str]:
    """Return the folders of runs in a comparison's, for a manifest that was lost."""
    found = (place.relative_to(out).as_posix() for place in out.glob("runs/*/seed*"))
    return sorted(name for name in found if _is_run(name))


def plan_of(out: Path, manifest: Manifest) -> Plan:
    """Return the plan of the last call, as the folder records it.

    The user's files are left out: who reads a folder says which files run.
    """
    known: dict[str, Any] = {f.name: getattr(manifest.planned, f.name) for f in fields(Planned)}
    known |= {"imports": (), "command": one_line(manifest.planned.command)}
    return Plan(recipe=manifest.identity.recipe, out=out, **known)


# ---- the result -----------------------------------------------------------------------------


def write_results(record: ComparisonRecord, out: Path) -> None:
    """Write ``results.json``, both CSV files and ``report.html`` from a record."""
    write_record(out / RESULTS, record)
    write_text(out / TABLE, frames.results_table(record).csv())
    write_text(out / DIFFERENCES, frames.differences_table(record).csv())
    write_text(out / REPORT, render(record))


def write_record(path: Path, record: object) -> None:
    """Write JSON whole or not at all; numbers that are not finite are refused."""
    plain = to_json(record)
    write_text(path, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
