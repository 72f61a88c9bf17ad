# SPDX-License-Identifier: Apache-2.0
"""The folder of a comparison: whose it is, what may be deleted in it, the files of the result.

Its ``plan.json`` has the question and the plan, which is made once. With it a comparison is read
again from its folder alone: by `keymix report`, on another machine, and after a crash.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from keymix.compare.costs import COSTS
from keymix.compare.pictures import PICTURES_FILE
from keymix.compare.question import Plan, Question
from keymix.compare.references import ARRAYS, FACTS
from keymix.compare.runs import ERROR, Finished, Reading
from keymix.data.record import DataRecord, SameImages
from keymix.errors import UserError, one_line
from keymix.records import FormatError, differences, from_json, to_json
from keymix.report import frames
from keymix.report.checked import Checked
from keymix.report.comparison import DIFFERENCES, REPORT, RESULTS, TABLE
from keymix.report.comparison_page import render
from keymix.report.gallery import Pictures
from keymix.report.record import Results
from keymix.train import folder as run_folder
from keymix.train.files import InUse, Lock, clear_parts, read_json, write_json, write_text

PLAN, FORMAT = "plan.json", 4
RUNS, TUNING, START, LOCK = "runs", "tune", "start", ".lock"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The content of ``plan.json``."""

    format: int = FORMAT
    plan: Plan  # with its question
    data: SameImages
    checked: Checked | None = None  # what the check of the data found before the first run
    looks: tuple[int, ...] = ()  # seeds of each time that all runs were finished


def read(out: Path) -> Stored:
    """Read what a folder keeps of its comparison; a UserError says that it is damaged, or none."""
    path = out / PLAN
    if not path.is_file():
        raise UserError(
            f"{str(out)!r} holds no comparison: it has no {PLAN}. Name the folder given as --out "
            "to `keymix compare`."
        )
    try:
        there = from_json(Stored, read_json(path), where=repr(str(path)))
    except FormatError:
        raise
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; --overwrite trains all again") from None
    return replace(there, plan=replace(there.plan, out=out))


def keep(stored: Stored) -> Stored:
    """Write what the folder keeps of its comparison, and return it."""
    stored.plan.out.mkdir(parents=True, exist_ok=True)
    write_json(stored.plan.out / PLAN, stored)
    return stored


def decided(question: Question, *, trains: bool) -> bool:
    """Whether the folder has all of a plan that answers a question, what is trained for it too."""
    out = question.folder
    if question.overwrite or not (out / PLAN).is_file():
        return False
    there = read(out)
    tuned = question.tune is None or there.plan.tuning is not None
    started = question.start is None or there.plan.start is not None
    ready = there.checked is not None and tuned and started and (out / RUNS).exists()
    return question.repeats(there.plan.question) and (ready or not trains)


def kept(question: Question) -> Plan | None:
    """Return the folder's plan if it was made for the same runs as a question asks for."""
    if not decided(question, trains=True):
        return None
    plan = read(question.folder).plan
    return plan if question.asks_for_runs_of(plan.question) else None


def claim(plan: Plan, data: DataRecord) -> Stored:
    """Take the folder for this comparison: a new one, or the one that is there to resume.

    A plan of which nothing is trained gives way. A UserError refuses a folder of another
    comparison, or with files that are no comparison's.
    """
    out = plan.out
    check_folder(out)
    clear_parts(out)
    if plan.question.overwrite:
        clear(out)
        plan = replace(plan, question=replace(plan.question, overwrite=False))
    here = Stored(plan=plan, data=SameImages.of(data))
    if not (out / PLAN).exists() or not (out / RUNS).exists():
        return keep(here)
    there = read(out)
    differing = [*differences(_identity(there), _identity(here))]
    if differing:
        listed = "; ".join(
            f"{key.removeprefix('recipe.')} is {_short(a)} there and {_short(b)} here"
            for key, a, b in differing[:3]
        )
        raise UserError(
            f"the folder {str(out)!r} holds another comparison: {listed}. Name another with --out, "
            "or throw that one away with --overwrite."
        )
    return keep(replace(there, plan=plan))


def _identity(stored: Stored) -> dict[str, Any]:
    """Return what runs of one comparison share; mixers, seeds and the baseline may change."""
    plan = stored.plan
    return {"recipe": to_json(plan.recipe), "match": plan.match, "data": to_json(stored.data)}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def check_folder(out: Path) -> None:
    """Refuse a place that no comparison can use: a file, or a folder with other files."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {str(out)!r} is a file. Name a folder.")
    foreign = out.exists() and not (out / PLAN).exists()
    ours = (LOCK, f".{PLAN}.part")  # and what a lock is taken over with
    if foreign and not all(path.name.startswith(ours) for path in out.iterdir()):
        raise UserError(
            f"the folder {str(out)!r} is not empty and holds no comparison. Name another with "
            "--out."
        )


def clear(out: Path) -> None:
    """Delete what a comparison made in its folder, and nothing else; not below a process."""
    tops = (out / RUNS, *out.glob(f"{TUNING}/lr*/{RUNS}"))
    for place in (place for runs in tops for place in runs.glob("*/seed*")):
        if not (lock := Lock(place)).free():
            raise InUse(
                f"{lock.who} trains the run {str(place)!r}: stop it before --overwrite deletes it. "
                f"If it is dead, remove {lock.lock_file!r}."
            )
    for runs in tops:
        for place in runs.glob("*/seed*"):
            if place.is_dir() and place.resolve().is_relative_to(out.resolve()):
                clear_parts(place)
                run_folder.clear(place)
                for name in (LOCK, ERROR):  # of a run that was killed, or failed
                    (place / name).unlink(missing_ok=True)
        for log in runs.glob("*/seed*.log"):
            log.unlink()
    for weights in (out / START).glob("*.safetensors"):
        weights.unlink()
    (out / PLAN).unlink(missing_ok=True)
    for top in (out / RUNS, out / TUNING, out / START):
        for place in sorted(top.glob("**"), reverse=True):  # what is below a folder before it
            if not place.is_symlink() and not any(place.iterdir()):
                place.rmdir()
    for name in (RESULTS, TABLE, DIFFERENCES, REPORT, COSTS, PICTURES_FILE, FACTS, ARRAYS):
        (out / name).unlink(missing_ok=True)


def look(stored: Stored, runs: Sequence[Reading]) -> Stored:
    """Record that all runs of a comparison are finished and looked at.

    Further seeds make a further look, a repetition does not.
    """
    seeds = len(stored.plan.seeds)
    done = all(isinstance(reading, Finished) for reading in runs)
    again = seeds <= max(stored.looks, default=0)
    return keep(replace(stored, looks=(*stored.looks, seeds))) if done and not again else stored


def imports_note(plan: Plan, given: Iterable[str | Path]) -> str:
    """Say which of the user's files a folder was made with that are not run now; empty if none."""
    names = {Path(file).name for file in given}
    left = [file for file in plan.imports if PurePath(file).name not in names]
    if not left:
        return ""
    options = " ".join(f"--import {shlex.quote(file)}" for file in left)
    return one_line(
        f"the comparison was made with mixers from {', '.join(map(repr, left))}; a file that a "
        f"folder names is not run. If you trust it, add {options}"
    )


# ---- the result -----------------------------------------------------------------------------


def write_results(record: Results, out: Path, pictures: Pictures) -> None:
    """Write ``results.json``, both CSV files and ``report.html``, which has the pictures."""
    write_record(out / RESULTS, record)
    write_text(out / TABLE, frames.results_table(record).csv())
    write_text(out / DIFFERENCES, frames.differences_table(record).csv())
    write_text(out / REPORT, render(record, pictures))


def write_record(path: Path, record: object) -> None:
    """Write JSON whole or not at all; numbers that are not finite are refused."""
    plain = to_json(record)
    write_text(path, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
