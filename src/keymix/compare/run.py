# SPDX-License-Identifier: Apache-2.0
"""Train several mixers under one recipe, and report accuracy, cost and how certain they are.

`compare` trains what is left; `rebuild` makes the report again from the folder alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from keymix.analysis.threads import busy
from keymix.compare import folder, record
from keymix.compare.budget import Budget, Trials, as_before, fit_to_budget, has_room
from keymix.compare.costs import known_costs, known_spikes, measured_costs, measured_spikes
from keymix.compare.defaults import more_pixels
from keymix.compare.events import Event, Watcher
from keymix.compare.execute import expected, train_runs, trials_here
from keymix.compare.executor import FAILURES, reason
from keymix.compare.folder import MANIFEST, Manifest
from keymix.compare.pictures import Pictures, pictures
from keymix.compare.plain import with_plain_network
from keymix.compare.plan import Plan, resolve
from keymix.compare.record import make_record
from keymix.compare.references import References, known_references, references
from keymix.compare.runs import Finished, Reading, read_runs
from keymix.compare.summary import summary, what_it_can_show
from keymix.compare.tune import known_tuning, tuned
from keymix.data.dataset import ImageData
from keymix.data.record import SameImages
from keymix.errors import UserError, unknown
from keymix.mixers.registry import import_file
from keymix.records import Own, to_json
from keymix.report.checked import Checked
from keymix.report.comparison import render
from keymix.report.record import ComparisonRecord, OpenRun, opened
from keymix.task import Task, get_task, list_tasks
from keymix.train.files import RECIPE, locked, read_json
from keymix.train.model import load_data
from keymix.train.recipe import Recipe
from keymix.train.validate import check_processes

SEEDS = 3
"""Seeds of a comparison where nobody says how many."""
PICTURES = ("attention", "collapse")
"""What of the record is read off the models and the images, in addition to the task's own."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out.

    Args:
        out: The comparison's folder.
        record: The content of ``results.json``.
        notes: What could not be done, in words.
    """

    out: Path
    record: ComparisonRecord
    notes: tuple[str, ...] = ()

    @property
    def report(self) -> Path:
        """The offline HTML report."""
        return self.out / folder.REPORT

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per mixer: the score of the last epoch, intervals, verdict."""
        return [to_json(row) for row in self.record.outcome.last]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The runs that failed, with their reasons."""
        return [to_json(run) for run in self.record.runs if run.status == "failed"]

    @property
    def missing(self) -> list[dict[str, Any]]:
        """The runs that have not started, or are not finished yet."""
        return [to_json(run) for run in self.record.runs if run.status == "missing"]


def compare(
    *,
    data: str | None = None,
    model: str | None = None,
    mixers: str | Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    recipe: str | Recipe | None = None,
    overrides: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    limit: int | None = None,
    out: str | Path = "keymix-compare",
    match: Literal["params"] | None = None,
    baseline: str | None = None,
    controls: bool = True,
    ann: bool = False,
    reference: bool = True,
    margin: float | None = None,
    tune: Literal["lr"] | None = None,
    minutes: float | None = None,
    processes: int | None = None,
    imports: Sequence[str | Path] = (),
    overwrite: bool = False,
    images: bool | None = None,
    command: str | None = None,
    progress: Watcher | None = None,
) -> Comparison:
    """Train mixers × seeds under one recipe, paired, and write the results into a folder.

    Everything is checked before anything trains. A comparison that is run again with the same
    recipe and data resumes: finished runs are read, and further mixers and seeds join them. A run
    that fails is recorded with its reason, and the others continue.

    Args:
        data: Data spec; the recipe's, or ``digits``, if None.
        model: Model name; the recipe's if None, or a spiking one for mixers of spiking tokens.
        mixers: Mixers as on the command line (``"mhsa,ska(activation=relu)"``) or one text each;
            all registered mechanisms for the model's tokens, dense or spiking, if None.
        seeds: A number N for seeds 0 … N-1, or the seeds; 3 if None.
        recipe: A recipe, its name or file; if None, that which the data's task has for it: for
            classification ``digits_vit`` for digits, ``moving_digits_qkformer`` for recordings of
            events and for mixers of spiking tokens alone, else ``small_images_vit``; for
            segmentation ``small_masks_setr``.
        overrides: Recipe fields by dotted key, e.g. ``{"optim.lr": 1e-3}``.
        epochs: Epochs of each run.
        limit: Training and validation images together.
        out: The comparison's folder.
        match: ``"params"`` widens each mixer to the baseline's parameters.
        baseline: The mixer that the others are compared with; softmax or spiking self-attention,
            else the first, if None.
        controls: Whether the identity control joins.
        ann: Whether the baseline's ANN counterpart joins: the same spiking model with ReLU for its
            neurons and one time step.
        reference: Whether points of reference join, outside every test: the largest class, or the
            most frequent class of each pixel; logistic regression on few pixels; and a plain
            convolutional network whose training step takes the baseline's time.
        margin: Differences up to this count as equal, in units of the score: points of a fraction,
            of which 2 if None; no other score has a margin by default.
        tune: ``"lr"`` tries half and twice the recipe's learning rate with every mixer, at a seed
            of its own, and takes one better on validation by more than one standard error.
        minutes: About how long it may take: updates, mixers that are not named, and seeds that are
            not, give way in this order, or updates grow up to ten times.
        processes: Training processes side by side; decided by cores and device if None.
        imports: Python files that register mixers, tasks or data sources of one's own. Those of an
            earlier call are not run again unless they are given again; a note names them.
        overwrite: Throw away another comparison that is in the folder.
        images: Whether the report has pictures of the data; if None, as the folder was last asked,
            and at first it has.
        command: The command that repeats this, for the record; the call itself if None.
        progress: Called with every :class:`keymix.compare.events.Event`.

    Returns:
        The results; ``report.html``, ``results.csv`` and ``results.json`` are in the folder.

    Raises:
        UserError: On any bad input, before training; or if no run at all could be finished.

    Example:
        >>> result = keymix.compare(data="digits", mixers="mhsa,ska", seeds=2, out="digits-cmp")
        >>> result.rows[1]["headline"]
    """
    out = Path(out)
    _check_tune(tune)
    watch: Watcher = progress or ignore
    if command is None:
        command = _call(locals())

    plan, loaded = _prepared(
        watch,
        reference=reference,
        processes=processes,
        imports=imports,
        overwrite=overwrite,
        out=out,
        data=data,
        model=model,
        mixers=mixers,
        seeds=seeds,
        recipe=recipe,
        overrides=overrides,
        epochs=epochs,
        limit=limit,
        match=match,
        baseline=baseline,
        controls=controls,
        ann=ann,
        margin=margin,
        command=command,
        minutes=minutes,
    )

    def say(text: str) -> None:
        watch(Event(kind="stage", text=text))

    known = loaded.record()
    shown = folder.shows_images(out) if images is None else images
    with locked(out, "comparison"):
        tuning = None
        if tune is not None:
            plan, tuning = tuned(plan, loaded, watch=watch)
        folder.claim(plan, known, overwrite=overwrite, images=shown)
        checked = _checked(out, loaded, watch)
        failures = train_runs(plan, loaded, watch=watch)
        identity = folder.read_manifest(out).identity
        runs = read_runs(plan, images=identity.data, failures=failures)
        if not any(isinstance(reading, Finished) for reading in runs):
            why = next(reading.reason for reading in runs if isinstance(reading, OpenRun))
            raise UserError(f"no run could be finished; the first says: {why}")
        found = references(out, loaded, say=say) if reference else References()
        trained = {each.run.mixer for each in runs if isinstance(each, Finished)}
        costs, measured = measured_costs(plan, known, trained=trained, say=say)
        spikes = measured_spikes(plan, loaded, runs, say=say)
        say("reading attention maps")
        try:
            looked = pictures(plan, runs, loaded, images=shown)
        except UserError as error:  # where weights cannot be read, the scores are reported without
            looked = Pictures(notes=(f"attention maps are left out: {error}",))
        result = make_record(
            plan,
            known,
            runs,
            costs=costs,
            measured=measured,
            pictures=looked,
            images=shown,
            spikes=spikes,
            checked=checked,
            references=found,
            looks=folder.keep_look(plan, runs),
            tuning=tuning,
        )
        folder.write_results(result, out)
    return Comparison(out=out, record=result, notes=looked.notes)


def _prepared(
    watch: Watcher,
    *,
    reference: bool,
    processes: int | None,
    imports: Sequence[str | Path],
    overwrite: bool,
    out: Path,
    minutes: float | None,
    seeds: int | Sequence[int] | None,
    overrides: Mapping[str, Any] | None,
    **asked: Any,
) -> tuple[Plan, ImageData]:
    """Resolve and check everything, and say what was chosen; `asked` are arguments of `resolve`."""
    given = {"mixers": asked["mixers"], "seeds": seeds, "epochs": asked["epochs"]}
    named = {name for name, value in given.items() if value is not None}
    budget = None if minutes is None else Budget(minutes=minutes, named=named)

    def say(text: str) -> None:
        watch(Event(kind="stage", text=text))

    if processes is not None:
        check_processes("processes", processes, least=1)
    folder.check_folder(out)
    unread = "" if overwrite else folder.imports_note(out, imports)
    if unread:
        watch(Event(kind="note", text=unread))
    for path in imports:
        import_file(path)
    before = None if overwrite else folder.planned_in(out)
    fields = overrides or {}

    def planned(larger: Mapping[str, int]) -> tuple[Plan, ImageData]:
        plan, images = resolve(
            reference=reference,
            processes=processes,
            imports=imports,
            out=out,
            recorded=None if overwrite else partial(folder.recorded_in, out),
            say=say,
            seeds=SEEDS if seeds is None else seeds,
            overrides={**fields, **larger},
            **asked,
        )
        if before is not None and before.threads:  # which results depend on, in their last bits
            plan = replace(plan, threads=before.threads)
        if reference:
            plan = with_plain_network(plan, images, before=before, say=say)
        return plan, images

    def tried(plan: Plan, images: ImageData) -> Trials:
        say("timing a few steps of each mixer")
        return trials_here(plan, [plan.job(mixer, seed) for mixer, seed in plan.pairs], images)

    plan, images = planned({})
    if budget is not None and before is not None:
        plan = as_before(plan, before, named)
    elif budget is not None:
        trials, sizes = tried(plan, images), images.record().sizes
        larger: dict[str, int] = {}
        if asked["recipe"] is None and has_room(plan, trials, budget, sizes=sizes):
            larger = more_pixels(plan.recipe, {*fields, *(("model.name",) * bool(asked["model"]))})
        if larger:
            plan, images = planned(larger)
            trials = tried(plan, images)
        plan, gave_way = fit_to_budget(plan, trials, budget, sizes=sizes)
        if gave_way:
            plan = replace(plan, notes=(gave_way, *plan.notes))
    for text in (summary(plan, images), *plan.notes, *filter(None, [busy()])):
        watch(Event(kind="note", text=text))
    return plan, images


def plan_comparison(*, progress: Watcher | None = None, **arguments: Any) -> str:
    """Say what `compare` would do and how long it would take; nothing is written.

    Args:
        progress: Called with every :class:`keymix.compare.events.Event`; notes say what is used.
        arguments: Those of `compare`.

    Returns:
        What the test split could show, and the time that it would take, in words.

    Raises:
        UserError: As `compare`, before training.
        TypeError: If `compare` has no such argument.
    """
    watch: Watcher = progress or ignore
    bound = inspect.signature(compare).bind(**arguments)
    bound.apply_defaults()
    unread = ("progress", "tune", "images")
    given = {key: each for key, each in bound.arguments.items() if key not in unread}
    given |= {"out": Path(given["out"]), "command": given["command"] or ""}
    tune = bound.arguments["tune"]
    _check_tune(tune)
    plan, images = _prepared(watch, **given)
    text = expected(plan, images)
    if tune is not None:
        text = f"{text}; the tuning before it is not counted"
    return "\n".join(filter(None, (what_it_can_show(plan, images), text)))


def _check_tune(tune: str | None) -> None:
    if tune not in (None, "lr"):
        raise unknown("tune", str(tune), ["lr"])


def _checked(out: Path, data: ImageData, watch: Watcher) -> Checked:
    """Report what the cheap part of the data check finds; a resumed comparison reads it."""
    checked = folder.read_manifest(out).checked
    if checked is None:
        watch(Event(kind="stage", text="checking the data"))
        checked = record.checked_data(data)
        folder.keep_checked(out, checked)
    for line in record.finding_lines(checked, data.record()):
        watch(Event(kind="note", text=line))
    return checked


def ignore(event: Event) -> None:
    """Watch nothing."""
    del event


def _call(arguments: Mapping[str, Any]) -> str:
    """Write the call of `compare` with the arguments that are not at their defaults."""
    skip = ("progress", "command", "overwrite")
    given = {**arguments, "out": str(arguments["out"])}
    if given["recipe"] is not None and not isinstance(given["recipe"], str):
        given["recipe"] = given["recipe"].name
    words = [
        f"{name}={given[name]!r}"
        for name, parameter in inspect.signature(compare).parameters.items()
        if name not in skip and given[name] != parameter.default
    ]
    return f"keymix.compare({', '.join(words)})"


# ---- again from the folder ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Before:
    """What a folder had before.

    The record is None if there is none or it is damaged; `damage` says what is wrong with it, or
    with its pictures, which are left out then.
    """

    record: ComparisonRecord | None = None
    damage: str = ""


def rebuild(
    out: str | Path,
    *,
    imports: Sequence[str | Path] = (),
    images: bool | None = None,
    progress: Watcher | None = None,
) -> Comparison:
    """Make ``report.html``, ``results.csv`` and ``results.json`` again from the run folders.

    Runs that finished since are read, wherever they were trained. Costs are those that were
    measured before. Where the images cannot be read any more, the attention maps of the earlier
    record stay.

    Args:
        out: The comparison's folder.
        imports: Files that register mixers of one's own. Those that the folder names are not run:
            a note names them.
        images: Whether the report has pictures of the data; if None, as the folder was last asked.
        progress: Called with every :class:`keymix.compare.events.Event`.

    Returns:
        The results.

    Raises:
        UserError: If the folder holds no comparison, or no run of it is finished.
    """
    out = Path(out)
    watch = progress or ignore
    _check(out)
    watch(Event(kind="stage", text="reading the runs"))
    for path in imports:
        import_file(path)
    stamp = _stamp(out)
    before = _before(out)
    shown = folder.shows_images(out) if images is None else images
    there = folder.read_manifest(out)
    plan = folder.plan_of(out, there)
    runs = read_runs(plan, images=there.identity.data, failures=_failures(before.record))
    data = next((reading.data for reading in runs if isinstance(reading, Finished)), None)
    if data is None:
        failed = (r.reason for r in runs if isinstance(r, OpenRun) and r.status == "failed")
        why = next(failed, "")
        raise UserError(
            f"no run of the comparison in {str(out)!r} is finished yet. "
            f"Resume it with: {plan.command}"
            + (f". The first that failed says: {why}" if why else "")
        )
    costs, measured = known_costs(plan, data, before.record)
    watch(Event(kind="stage", text="reading attention maps"))
    looked, note = _pictures(plan, there, runs, before, images=shown)
    result = make_record(
        plan,
        data,
        runs,
        costs=costs,
        measured=measured,
        pictures=looked,
        images=shown,
        spikes=known_spikes(plan, runs),
        checked=there.checked,
        references=known_references(out, data),
        looks=there.looks,
        tuning=known_tuning(out),
    )
    if note and result.attention is not None and not _shows(result):
        kept = {k: v for k, v in result.own.values.items() if k not in _drawn(result.task_kind)}
        result = replace(result, attention=None, collapse=None, own=Own(kept))
        note = f"attention maps are left out: those in {folder.RESULTS} are damaged, and {note}"
    if _stamp(out) != stamp:  # a comparison ended here meanwhile; its record is the newer one
        newer = _before(out).record
        if newer is not None:
            return Comparison(out=out, record=newer)
    if shown != there.images:
        folder.keep_images(out, shown)
    folder.write_results(result, out)
    notes = filter(None, (folder.imports_note(out, imports), note, *looked.notes))
    return Comparison(out=out, record=result, notes=tuple(notes))


def _check(out: Path) -> None:
    if (out / MANIFEST).is_file():
        return
    if not out.exists():
        raise UserError(
            f"there is no folder {str(out)!r}. Name the one given as --out to `keymix compare`."
        )
    if (out / RECIPE).is_file():
        raise UserError(
            f"{str(out)!r} is a single run and no comparison: `keymix eval {out}` shows how good "
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
    """Open the earlier record; where only pictures are damaged, without them."""
    path, damage = out / folder.RESULTS, ""
    try:
        values = read_json(path)
    except UserError:
        return Before()
    data = values.get("data")
    task = data.get("task") if isinstance(data, dict) else None
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
    del task
    return ("galleries",)


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
    try:
        render(record)
    except FAILURES:
        return False
    return True


def _pictures(
    plan: Plan, there: Manifest, runs: Sequence[Reading], before: Before, *, images: bool
) -> tuple[Pictures, str]:
    """Look into the models again; where that cannot be done, keep the earlier ones and say why."""
    try:
        data = load_data(plan.recipe.data)
        if SameImages.of(data.record()) != there.identity.data:
            raise UserError(f"the data {data.spec!r} has changed since")
        return pictures(plan, runs, data, images=images), ""
    except FAILURES as error:  # UserError included: the images or a mixer may be elsewhere
        why = reason(error)
    if before.damage:
        return Pictures(), f"attention maps are left out: {before.damage}; {why}"
    record = before.record
    if record is None or record.attention is None:
        return Pictures(), f"attention maps are left out: {why}"
    own = {key: record.own.values.get(key) for key in _drawn(record.task_kind)}
    kept = Pictures(attention=record.attention, collapse=record.collapse, own=Own(own))
    kept = kept if images else kept.bare()
    return kept, f"attention maps are kept as they were: {why}"
