# SPDX-License-Identifier: Apache-2.0
"""Gather a comparison again from its folder: nothing is trained, no cost is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from keymix.compare import cost_store, folder, gather, manifest, spike_costs
from keymix.compare.events import Event, Watcher
from keymix.compare.executor import FAILURES
from keymix.compare.manifest import MANIFEST, Manifest, Planned
from keymix.compare.plan import Plan
from keymix.compare.run import Comparison, ignore, write
from keymix.compare.runs import Finished, Reading
from keymix.compare.worker import reason
from keymix.data.record import SameImages
from keymix.errors import UserError, one_line
from keymix.records import Own
from keymix.report.part import page_of
from keymix.report.record import ComparisonRecord, OpenRun, opened
from keymix.task import DEFAULT, Task, get_task, list_tasks

PICTURES = ("attention", "collapse")
"""What of the record is read off the models and the images, besides the task's own."""


@dataclass(frozen=True, kw_only=True)
class Before:
    """What a folder had before.

    Args:
        record: Its record; None if there is none or it is damaged.
        damage: What is wrong with its record, or with the pictures of it, which are left out then.
    """

    record: ComparisonRecord | None = None
    damage: str = ""


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
    before = _before(out)
    there = manifest.read(out)
    plan = manifest.plan_of(out, there, before.record)
    unread = manifest.imports_note(manifest.recorded_imports(out), imports)
    known: list[Planned | ComparisonRecord] = []
    if there.planned is not None:
        known.append(there.planned)
    if before.record is not None:
        known.append(before.record)
    command = one_line(next((each.command for each in known if each.command), "keymix compare"))
    runs = gather.read_runs(plan, images=there.identity.data, failures=_failures(before.record))
    data = next((reading.data for reading in runs if isinstance(reading, Finished)), None)
    if data is None:
        failed = (r.reason for r in runs if isinstance(r, OpenRun) and r.status == "failed")
        why = next(failed, "")
        raise UserError(
            f"no run of the comparison in {str(out)!r} is finished yet. Go on with: {command}"
            + (f". The first that failed says: {why}" if why else "")
        )
    table, measured = cost_store.known(plan, data, before.record)
    watch(Event(kind="stage", text="reading attention maps"))
    pictures, note = _pictures(plan, there, runs, before)
    record = gather.make_record(
        plan,
        data,
        runs,
        command=command,
        costs=table,
        measured=measured,
        spikes=spike_costs.known(plan, runs),
        checked=there.checked,
        processes=next((each.processes for each in known if each.processes > 0), 1),
        threads=next((each.threads for each in known if each.threads > 0), 1),
        pictures=pictures,
    )
    if note and record.attention is not None and not _shows(record):
        kept = {k: v for k, v in record.own.values.items() if k not in _drawn(record.task_kind)}
        record = replace(record, attention=None, collapse=None, own=Own(kept))
        note = f"attention maps are left out: those in {folder.RESULTS} are damaged, and {note}"
    if _stamp(out) != stamp:  # a comparison ended here meanwhile; its record is the newer one
        newer = _before(out).record
        if newer is not None:
            return Comparison(out=out, record=newer)
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


def _before(out: Path) -> Before:
    """Open the earlier record, of any format; where only pictures are damaged, without them."""
    from keymix.train.files import read_json

    path, damage = out / folder.RESULTS, ""
    try:
        values = read_json(path)
    except UserError:
        return Before()
    task = values.get("task", DEFAULT)
    drawn = _drawn(get_task(task)) if task in list_tasks() else ()
    without = {key: value for key, value in values.items() if key not in drawn}
    for given in (values, {**without, **dict.fromkeys(PICTURES)}):
        try:
            return Before(record=opened(given, where=repr(str(path))), damage=damage)
        except UserError as error:
            damage = damage or str(error)
    return Before(damage=damage)


def _drawn(task: Task) -> tuple[str, ...]:
    """Name what of the record is the task's own pictures."""
    kind = page_of(task).pictures
    return () if kind is None else tuple(each.name for each in fields(kind))


def _failures(before: ComparisonRecord | None) -> dict[tuple[str, int], str]:
    """Return why runs failed when they were last tried."""
    runs = before.runs if before else ()
    return {
        (run.mixer, run.seed): run.reason
        for run in runs
        if isinstance(run, OpenRun) and run.status == "failed"
    }


def _shows(record: ComparisonRecord) -> bool:
    """Whether a record with earlier pictures can be shown; a damaged one may hold anything."""
    from keymix.report.comparison import render

    try:
        render(record)
    except FAILURES:
        return False
    return True


def _pictures(
    plan: Plan, there: Manifest, runs: Sequence[Reading], before: Before
) -> tuple[gather.Pictures, str]:
    """Look into the models again; where that cannot be done, keep the earlier ones and say why."""
    from keymix.compare.gallery import pictures
    from keymix.train.model import load_data

    try:
        images = load_data(plan.recipe.data)
        if SameImages.of(images.record()) != there.identity.data:
            raise UserError(f"the data {images.spec!r} has changed since")
        return pictures(plan, runs, images), ""
    except FAILURES as error:  # UserError included: the images or a mixer may be elsewhere
        why = reason(error)
    if before.damage:
        return gather.Pictures(), f"attention maps are left out: {before.damage}; {why}"
    record = before.record
    if record is None or record.attention is None:
        return gather.Pictures(), f"attention maps are left out: {why}"
    own = {key: record.own.values.get(key) for key in _drawn(record.task_kind)}
    kept = gather.Pictures(attention=record.attention, collapse=record.collapse, own=Own(own))
    return kept, f"attention maps are kept as they were: {why}"
