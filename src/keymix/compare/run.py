# SPDX-License-Identifier: Apache-2.0
"""The main job: train several mixers under one recipe and tell accuracy, cost and doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keymix.compare import cost_store, data_check, folder, gather, manifest, spike_costs
from keymix.compare.defaults import default_for
from keymix.compare.events import Event, Failures, Job, Watcher
from keymix.compare.execute import run_here, run_side_by_side, share_out
from keymix.compare.forecast import Forecast
from keymix.compare.plan import (
    Plan,
    choose_baseline,
    choose_mixers,
    choose_recipe,
    choose_seeds,
    fitting,
    make_plan,
)
from keymix.compare.runs import Finished, Reading, is_done
from keymix.compare.twin import with_twin
from keymix.errors import UserError
from keymix.records import to_json
from keymix.report.record import Checked, ComparisonRecord, OpenRun

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.recipe import Recipe


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
    seeds: int | Sequence[int] = 3,
    recipe: str | Recipe | None = None,
    overrides: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    limit: int | None = None,
    out: str | Path = "keymix-compare",
    match: Literal["params"] | None = None,
    baseline: str | None = None,
    controls: bool = True,
    twin: bool = False,
    processes: int | None = None,
    imports: Sequence[str | Path] = (),
    overwrite: bool = False,
    command: str | None = None,
    progress: Watcher | None = None,
) -> Comparison:
    """Train mixers × seeds under one recipe, paired, and write the results into a folder.

    Everything is checked before anything trains. A comparison that is run again with the same
    recipe and data goes on where it stands: finished runs are read, and further mixers and seeds
    join them. A run that fails is recorded with its reason, and the others go on.

    Args:
        data: Data spec; the recipe's, or ``digits``, if None.
        model: Model name; the recipe's if None, or a spiking one for mixers of spiking tokens.
        mixers: Mixers as on the command line (``"mhsa,ska(activation=relu)"``) or one text each;
            all registered mechanisms for the model's tokens, dense or spiking, if None.
        seeds: A number N for seeds 0 … N-1, or the seeds.
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
        twin: Whether the baseline's twin without spikes joins: the same spiking model with ReLU for
            its neurons and one time step.
        processes: Training processes side by side; decided by cores and device if None.
        imports: Python files that register mixers, tasks or data sources of one's own. Those of an
            earlier call are not run again unless they are given again; a note names them.
        overwrite: Throw away another comparison that is in the folder.
        command: The command that repeats this, for the record; the call itself if None.
        progress: Called with every :class:`keymix.compare.events.Event`.

    Returns:
        The results; ``report.html``, ``results.csv`` and ``results.json`` lie in the folder.

    Raises:
        UserError: On any bad input, before training; or if no run at all could be finished.

    Example:
        >>> result = keymix.compare(data="digits", mixers="mhsa,ska", seeds=2, out="digits-cmp")
        >>> result.rows[1]["headline"]
    """
    from keymix.train.model import device_of_this_machine, load_data, settled, warn_of_data
    from keymix.train.validate import check_processes, check_recipe, training_batches

    out = Path(out)
    watch: Watcher = progress or ignore
    if command is None:
        command = _call(locals())
    if processes is not None:
        check_processes("processes", processes, least=1)
    folder.check_folder(out)
    _run_imports(out, imports, overwrite=overwrite, watch=watch)
    named = {"data.spec": data, "model.name": model} | dict(overrides or {})
    default = (
        default_for(data=named["data.spec"], model=named["model.name"], mixers=mixers)
        if recipe is None
        else None
    )
    shared = choose_recipe(
        data=data,
        recipe=recipe if default is None else default.recipe,
        model=model,
        epochs=epochs,
        limit=limit,
        overrides=overrides,
    )
    specs = choose_mixers(mixers, controls=controls, model=shared.model.name)
    chosen_seeds = choose_seeds(seeds, len(specs))
    choose_baseline(specs, baseline)  # or refuse, before the data is read
    check_recipe(shared)
    shared = settled(
        shared if default is None else default.gathered(shared),
        None if overwrite else partial(manifest.recorded_in, out),
    )
    watch(Event(kind="stage", text="loading the data"))
    images = warn_of_data(load_data(shared.data))
    cannot_sit: tuple[str, ...] = ()
    if mixers is None:
        specs, cannot_sit = fitting(specs, shared, images)
    reference = choose_baseline(specs, baseline)
    training_batches(shared, images)  # or refuse the augmentation
    plan = make_plan(
        recipe=shared,
        data=images,
        specs=specs,
        baseline=reference,
        seeds=chosen_seeds,
        match=match,
        imports=[str(path) for path in imports],
        out=out,
        cannot_sit=cannot_sit,
    )
    if twin:
        plan = with_twin(plan, images)
    told = images.record()
    _note(plan, "" if default is None else default.told(shared), watch)
    cuda = device_of_this_machine().type == "cuda"
    processes, threads = share_out(len(plan.pairs), processes, cuda=cuda)
    cost_threads = threads if cuda else 1
    with folder.locked(out):
        folder.claim(
            plan, told, overwrite=overwrite, command=command, processes=processes, threads=threads
        )
        checked = _checked(out, images, watch)
        failures = _train(
            plan,
            images,
            processes=processes,
            threads=threads,
            cost_threads=cost_threads,
            watch=watch,
        )
        runs = gather.read_runs(plan, images=manifest.read(out).identity.data, failures=failures)
        if not any(isinstance(reading, Finished) for reading in runs):
            reason = next(reading.reason for reading in runs if isinstance(reading, OpenRun))
            raise UserError(f"no run could be finished; the first says: {reason}")
        table, measured = cost_store.settled(
            plan,
            told,
            threads=cost_threads,
            say=lambda text: watch(Event(kind="stage", text=text)),
        )
        spikes = spike_costs.settled(
            plan, images, runs, say=lambda text: watch(Event(kind="stage", text=text))
        )
        watch(Event(kind="stage", text="reading attention maps"))
        looked, note = _pictures(plan, runs, images)
        record = gather.make_record(
            plan,
            told,
            runs,
            command=command,
            costs=table,
            measured=measured,
            spikes=spikes,
            checked=checked,
            processes=processes,
            threads=threads,
            pictures=looked,
        )
        write(record, out)
    return Comparison(out=out, record=record, notes=(note,) if note else ())


def _run_imports(
    out: Path, imports: Sequence[str | Path], *, overwrite: bool, watch: Watcher
) -> None:
    """Run the files that were given; name those that the folder was made with, and run none."""
    from keymix.mixers.registry import import_file

    unread = manifest.imports_note(manifest.recorded_imports(out), imports)
    if unread and not overwrite:
        watch(Event(kind="note", text=unread))
    for path in imports:
        import_file(path)


def _pictures(
    plan: Plan, runs: Sequence[Reading], images: ImageData
) -> tuple[gather.Pictures, str]:
    """Look into the models; where their weights cannot be read, the scores stand without."""
    from keymix.compare.gallery import pictures

    try:
        return pictures(plan, runs, images), ""
    except UserError as error:
        return gather.Pictures(), f"attention maps are left out: {error}"


def _note(plan: Plan, chosen: str, watch: Watcher) -> None:
    """Tell which recipe was chosen, and what of its mixers."""
    noted = (f"{each.label}: {each.note}" for each in plan.entrants if each.note)
    for text in filter(None, (chosen, *noted)):
        watch(Event(kind="note", text=text))


def _checked(out: Path, data: ImageData, watch: Watcher) -> Checked:
    """Tell what the cheap part of the data check finds; a comparison that goes on reads it."""
    checked = manifest.read(out).checked
    if checked is None:
        watch(Event(kind="stage", text="checking the data"))
        checked = data_check.judged(data)
        manifest.keep_checked(out, checked)
    for line in data_check.lines(checked, data.record()):
        watch(Event(kind="note", text=line))
    return checked


def _train(
    plan: Plan, data: ImageData, *, processes: int, threads: int, cost_threads: int, watch: Watcher
) -> Failures:
    """Train the runs that are not done, one seed of all mixers after the other."""
    jobs = [
        Job(
            mixer=entrant.label,
            seed=seed,
            recipe=plan.recipe_for(entrant, seed),
            folder=plan.folder(entrant, seed),
        )
        for entrant, seed in plan.pairs
        if not is_done(plan, entrant, seed)
    ]
    watch(Event(kind="plan", done=len(plan.pairs) - len(jobs), total=len(plan.pairs)))
    if not jobs:
        return {}
    forecast = Forecast(
        plan,
        jobs,
        sizes=data.record().sizes,
        processes=processes,
        unmeasured=cost_store.unmeasured(plan, threads=cost_threads),
        watch=watch,
    )
    work = [*forecast.trials(), *jobs]
    if processes == 1:
        return run_here(
            work,
            threads=threads,
            data=(plan.recipe.data, data),
            logs=plan.out / folder.RUNS,
            watch=forecast,
        )
    return run_side_by_side(
        work,
        processes=processes,
        threads=threads,
        imports=plan.imports,
        logs=plan.out / folder.RUNS,
        watch=forecast,
    )


def write(record: ComparisonRecord, out: Path) -> None:
    """Write ``results.json``, ``results.csv`` and ``report.html`` from a record."""
    from keymix.report.comparison import render
    from keymix.train.files import write_text

    folder.write_json(out / folder.RESULTS, record)
    folder.write_csv(out / folder.TABLE, record)
    write_text(out / folder.REPORT, render(record))


def ignore(event: Event) -> None:
    """Watch nothing."""
    del event


def _call(arguments: Mapping[str, Any]) -> str:
    """Write the call of `compare` with the arguments that are not at their defaults."""
    import inspect

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
