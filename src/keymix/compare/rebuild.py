# SPDX-License-Identifier: Apache-2.0
"""Gather a comparison again from its folder: nothing is trained, no cost is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keymix.compare import cost_store, folder, gather, manifest, spike_costs
from keymix.compare.events import Event, Watcher
from keymix.compare.manifest import MANIFEST, Manifest
from keymix.compare.plan import Plan
from keymix.compare.run import Comparison, ignore, write
from keymix.compare.runs import Reading
from keymix.compare.worker import FAILURES, reason
from keymix.errors import UserError, one_line
from keymix.report.html import FORMAT

PICTURES = ("attention", "collapse", "gallery")
"""What of the record is read off the models and the images."""


def rebuild(
    out: str | Path, *, imports: Sequence[str | Path] = (), progress: Watcher | None = None
) -> Comparison:
    """Make ``report.html``, ``results.csv`` and ``results.json`` anew from the run folders.

    Runs that finished since are read, wherever they were trained. Costs are those that were
    measured before. Where the images cannot be read any more, the attention maps of the earlier
    record stay.

    Args:
        out: The comparison's folder.
        imports: Files that register mixers of one's own. Those that the folder names are not run:
            a note names them.
        progress: Called with every :class:`keymix.compare.events.Event`.

    Returns:
        The results.

    Raises:
        UserError: If the folder holds no comparison, or no run of it is finished.
    """
    from keymix.mixers.registry import import_file

    out = Path(out)
    watch = progress or ignore
    _check(out)
    watch(Event(kind="stage", text="reading the runs"))
    for path in imports:
        import_file(path)
    stamp = _stamp(out)
    before = _record(out)
    there = manifest.read(out)
    plan = manifest.plan_of(out, there, before)
    unread = manifest.imports_note(manifest.recorded_imports(out), imports)
    command = one_line(
        str(there.planned.get("command") or before.get("command") or "keymix compare")
    )
    runs = gather.read_runs(plan, images=there.images, failures=_failures(before))
    data = next((reading.data for reading in runs if reading.answers is not None), None)
    if data is None:
        failed = (reading.run["reason"] for reading in runs if reading.run["status"] == "failed")
        why = next(failed, "")
        raise UserError(
            f"no run of the comparison in {str(out)!r} is finished yet. Go on with: {command}"
            + (f". The first that failed says: {why}" if why else "")
        )
    table, measured = cost_store.known(plan, data, before)
    watch(Event(kind="stage", text="reading attention maps"))
    maps, note = _maps(plan, there, runs, before)
    record = gather.make_record(
        plan,
        data,
        runs,
        command=command,
        costs=table,
        measured=measured,
        spikes=spike_costs.known(plan, runs),
        checked=there.checked,
        processes=_number("processes", there, before),
        threads=_number("threads", there, before),
        **maps,
    )
    if note and record["attention"] is not None and not _shows(record):
        record |= dict.fromkeys(PICTURES)
        note = f"attention maps are left out: those in {folder.RESULTS} are damaged, and {note}"
    if _stamp(out) != stamp:  # a comparison ended here meanwhile; its record is the newer one
        return Comparison(out=out, record=_record(out))
    write(record, out)
    return Comparison(out=out, record=record, notes=tuple(filter(None, (unread, note))))


def _check(out: Path) -> None:
    from keymix.train.files import RECIPE

    if (out / MANIFEST).is_file():
        return
    if not out.exists():
        raise UserError(
            f"there is no folder {str(out)!r}. Name the one given as --out to `keymix compare`."
        )
    if (out / RECIPE).is_file():
        raise UserError(
            f"{str(out)!r} is a single run and no comparison: `keymix eval {out}` tells how good "
            "it is."
        )
    raise UserError(
        f"{str(out)!r} holds no comparison: it has no {MANIFEST}. Name the folder given as --out "
        "to `keymix compare`."
    )


def _stamp(out: Path) -> int | None:
    path = out / folder.RESULTS
    return path.stat().st_mtime_ns if path.exists() else None


def _record(out: Path) -> dict[str, Any]:
    """Return the earlier record, of any format; an empty one if there is none or it is damaged."""
    from keymix.train.files import read_json

    try:
        return read_json(out / folder.RESULTS)
    except UserError:
        return {}


def _failures(before: dict[str, Any]) -> dict[tuple[str, int], str]:
    """Return why runs failed when they were last tried."""
    runs = before.get("runs")
    if before.get("format") != FORMAT or not isinstance(runs, list):
        return {}
    return {
        (str(run.get("mixer")), run["seed"]): run["reason"]
        for run in runs
        if isinstance(run, dict) and run.get("status") == "failed"
        if type(run.get("seed")) is int and isinstance(run.get("reason"), str)
    }


def _number(key: str, there: Manifest, before: dict[str, Any]) -> int:
    known = (values.get(key) for values in (there.planned, before))
    return next((number for number in known if type(number) is int and number > 0), 1)


def _shows(record: dict[str, Any]) -> bool:
    """Whether a record with earlier pictures can be shown; a damaged one may hold anything."""
    from keymix.report.html import render

    try:
        render(record)
    except FAILURES:
        return False
    return True


def _maps(
    plan: Plan, there: Manifest, runs: Sequence[Reading], before: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Look into the models again; where that cannot be done, keep the earlier ones and say why."""
    from keymix.compare.gallery import pictures
    from keymix.train.model import load_data

    try:
        images = load_data(plan.recipe.data)
        found = images.record()
        if any(found[key] != value for key, value in there.images.items()):
            raise UserError(f"the data {images.spec!r} has changed since")
        read = pictures(plan, runs, images)
    except FAILURES as error:  # UserError included: the images or a mixer may be elsewhere
        same = before.get("format") == FORMAT
        kept = {key: before.get(key) if same else None for key in PICTURES}
        what = "kept as they were" if kept["attention"] else "left out"
        return kept, f"attention maps are {what}: {reason(error)}"
    return read, ""
