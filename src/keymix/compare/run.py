# SPDX-License-Identifier: Apache-2.0
"""Train several mixers under one recipe, and report accuracy, cost and how certain they are.

`compare` trains what is left; `rebuild` makes the report again from the folder alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from keymix.arguments import checked
from keymix.compare import folder
from keymix.compare.costs import known_costs, measure_costs
from keymix.compare.events import Event, Watcher
from keymix.compare.execute import train_runs
from keymix.compare.folder import Stored
from keymix.compare.on_ray import joined
from keymix.compare.pictures import look
from keymix.compare.plan import resolve, summary, time_left, what_it_can_show
from keymix.compare.question import Plan, Question
from keymix.compare.references import References, compute_references, known_references
from keymix.compare.results import Known, checked_data, results
from keymix.compare.runs import Finished, Reading, read_runs, state_of
from keymix.compare.start import started
from keymix.compare.tune import tuned
from keymix.data.dataset import ImageData
from keymix.errors import FAILURES, UserError, reason
from keymix.mixers.registry import import_file
from keymix.report.comparison import Comparison
from keymix.report.record import OpenRun
from keymix.report.words import said, say
from keymix.train.files import Lock, locked, make_folder
from keymix.train.folder import is_finished
from keymix.train.recipe import Recipe


@checked
def compare(
    *,
    data: str | None = None,
    model: str | None = None,
    start: str | Path | None = None,
    layers: str | int | Sequence[str | int] | None = None,
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
    on: str | None = None,
    gpus_per_run: float | None = None,
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
        start: A trained model that all runs start from, each mixer swapped in where it attends: a
            run's folder, what `keymix.load` opens of pushed or swapped models and of the Hub, or a
            file of weights of ``model``. The model itself, trained on, is the baseline. The recipe
            is the run's own or that of the data, changed for fine-tuning, unless ``recipe`` names
            one.
        layers: Of ``start``, where mixers are swapped in, as `keymix.swap` takes them; those that
            attend if None.
        mixers: Mixers as on the command line (``"mhsa,ska(activation=relu)"``) or one text each;
            all registered mechanisms for the model's tokens, dense or spiking, if None.
        seeds: A number N for seeds 0 … N-1, or the seeds; 3 if None.
        recipe: A recipe, its name or file; if None, that which the data's task has for it: for
            classification ``digits_vit`` for digits, ``moving_digits_qkformer`` for recordings of
            events and for mixers of spiking tokens alone, else ``small_images_vit``; for
            segmentation ``small_masks_unet``.
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
        minutes: About how long it may take on this machine, from a few timed steps of each mixer.
            Pixels, epochs (down to those of 800 updates) and mixers that are not named give way in
            this order; named minutes also let epochs grow up to ten times. If None, 30 for data of
            one's own of which neither recipe nor epochs are named, else without bound. The plan is
            made once: when the call is repeated, the folder's plan is followed.
        processes: Training processes side by side; decided by cores and device if None.
        on: ``"ray"`` trains every run as a task of Ray: of this machine's cluster, or one that is
            started here; ``"ray://HOST:PORT"`` of another cluster. Its nodes share the folder.
        gpus_per_run: GPUs of a run on Ray, such as 0.5; one if the cluster has GPUs, if None.
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
        >>> result.differences
    """
    asked = {name: value for name, value in locals().items() if name != "progress"}
    return answer(Question(**asked), progress=progress)


def answer(question: Question, *, progress: Watcher | None = None) -> Comparison:
    """Answer a question: see `compare`."""
    watch: Watcher = progress or ignore
    with joined(question.on) if question.on else nullcontext():
        plan, data = _decided(question, watch, trains=True)
        if text := time_left(plan):
            watch(Event(kind="estimate", text=text))
        train_runs(plan, data, watch=watch)
    out, known = plan.out, data.record()

    def say(text: str) -> None:
        watch(Event(kind="stage", text=text))

    with _alone(out, watch):
        stored = folder.claim(plan, known)
        runs = read_runs(plan, images=stored.data)
        if why := _none_finished(runs):
            raise UserError(f"no run could be finished; the first says: {why}")
        if question.reference:
            compute_references(out, data, say=say)
        try:
            measure_costs(plan, known, runs, say=say)
        except FAILURES as error:  # a mixer of the user's may raise anything
            watch(Event(kind="note", text=f"costs could not be measured: {reason(error)}"))
        return _gathered(folder.look(stored, runs), runs, data, say=say)


def train_one(question: Question, number: int, *, progress: Watcher | None = None) -> bool:
    """Train one run of the comparison that answers a question, and return whether it is done.

    Several processes may do so at once, on several machines: one of them decides the plan.

    Args:
        question: The arguments of `compare`.
        number: The run, as `plan_comparison` numbers them.
        progress: Called with every :class:`keymix.compare.events.Event`.

    Raises:
        UserError: As `compare`, before training; or if there is no such run.
    """
    watch: Watcher = progress or ignore
    plan = folder.kept(question)
    if plan is None or not _is_done(plan, number):
        plan, data = _decided(question, watch, trains=True)
        if number not in range(len(plan.pairs)):
            raise UserError(f"--run {number}: the runs are 0 to {len(plan.pairs) - 1}; see --plan.")
        train_runs(plan, data, watch=watch, only=number)
    return _is_done(plan, number)


def _is_done(plan: Plan, number: int) -> bool:
    return number in range(len(plan.pairs)) and is_finished(plan.folder(*plan.pairs[number]))


@contextmanager
def _alone(out: Path, watch: Watcher) -> Iterator[None]:
    """Do what one process at a time may do in a comparison's folder, with a line if it has to wait.

    Training is not among it.
    """
    lock = Lock(out)
    if not lock.free():
        watch(Event(kind="note", text=f"waiting for {lock.who}, which plans or reports"))
    with locked(out, "comparison", wait=True):
        yield


def _decided(question: Question, watch: Watcher, *, trains: bool) -> tuple[Plan, ImageData]:
    """Decide the plan with what is trained or looked for before the runs, or follow the folder's.

    One process decides: its timing says how many epochs fit. The others wait and read it.
    """
    folder.check_folder(question.folder)
    first = not folder.decided(question, trains=trains)
    with _alone(question.folder, watch) if first else nullcontext():
        if first and not folder.decided(question, trains=trains):
            return _settled(*_planned(question, watch), watch, trains=trains)
    plan, data = _planned(question, watch)
    with _alone(question.folder, watch):
        return _settled(plan, data, watch, trains=trains)


def _settled(
    plan: Plan, data: ImageData, watch: Watcher, *, trains: bool
) -> tuple[Plan, ImageData]:
    """Keep a plan in its folder; what is to be known before its runs is found out, or said."""
    known = data.record()
    stored = folder.claim(plan, known)
    if not trains:
        return stored.plan, data
    make_folder(plan.out / folder.RUNS)  # from now on, the plan stays
    if plan.question.start is not None:
        plan = started(stored.plan, data, say=lambda text: watch(Event(kind="stage", text=text)))
        stored = folder.keep(replace(stored, plan=plan))
    if plan.question.tune is not None:
        stored = folder.keep(replace(stored, plan=tuned(stored.plan, data, watch=watch)))
    checked = stored.checked
    if checked is None:
        watch(Event(kind="stage", text="checking the data"))
        checked = checked_data(data)
        stored = folder.keep(replace(stored, checked=checked))
    if stored.plan.start is not None:
        watch(Event(kind="note", text=say("start", stored.plan.start)))
    for line in said("data_check", checked, known):
        watch(Event(kind="note", text=line))
    return stored.plan, data


def _planned(question: Question, watch: Watcher) -> tuple[Plan, ImageData]:
    """Resolve and check everything, and say what was chosen; nothing is written."""
    out = question.folder
    folder.check_folder(out)
    resumes = (out / folder.PLAN).is_file() and not question.overwrite
    before = folder.read(out).plan if resumes else None
    if before is not None and (unread := folder.imports_note(before, question.imports)):
        watch(Event(kind="note", text=unread))
    for path in question.imports:
        import_file(path)
    if question.images is None:
        question = replace(question, images=before is None or before.question.images)
    plan, data = resolve(question, before, say=lambda text: watch(Event(kind="stage", text=text)))
    notes = [summary(plan, data), *plan.notes]
    notes += [f"left out of the comparison: {sentence}" for sentence in plan.cannot_sit]
    notes += [f"{each.label}: {each.note}" for each in plan.mixers if each.note]
    for text in filter(None, notes):
        watch(Event(kind="note", text=text))
    return plan, data


def plan_comparison(question: Question, *, progress: Watcher | None = None) -> str:
    """Say what `compare` would do and how long it would take; nothing is trained.

    The plan is kept in the folder, so that all processes follow it. A plan of which nothing was
    trained gives way to another.

    Args:
        question: The arguments of `compare`.
        progress: Called with every :class:`keymix.compare.events.Event`; notes say what is used.

    Returns:
        The runs with their numbers, and how they are; what the test split could show, and the time
        that it would take, in words.

    Raises:
        UserError: As `compare`, before training.
    """
    plan, data = _decided(question, progress or ignore, trains=False)
    rows = [("run", "mixer", "seed", "folder", "state")]
    for number, (mixer, seed) in enumerate(plan.pairs):
        place = plan.folder(mixer, seed)
        shown = place.relative_to(plan.out).as_posix()
        rows.append((str(number), mixer.label, str(seed), shown, state_of(place)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    text = time_left(plan) or "all runs are finished"
    if question.tune is not None:
        text = f"{text}; the tuning before it is not counted"
    return "\n".join(filter(None, (*table, what_it_can_show(plan, data), text)))


def ignore(event: Event) -> None:
    """Watch nothing."""
    del event


# ---- from the folder to the page ------------------------------------------------------------


def rebuild(
    out: str | Path,
    *,
    imports: Sequence[str | Path] = (),
    images: bool | None = None,
    progress: Watcher | None = None,
) -> Comparison:
    """Make ``report.html``, ``results.csv`` and ``results.json`` again from the run folders.

    Runs that finished since are read, wherever they were trained. Costs are those that were
    measured before. Where the images cannot be read any more, the pictures are those that the
    folder keeps of the same runs.

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
    watch = progress or ignore

    def say(text: str) -> None:
        watch(Event(kind="stage", text=text))

    say("reading the runs")
    for path in imports:
        import_file(path)
    folder.read(Path(out))  # or refuse
    with _alone(Path(out), watch):
        stored = folder.read(Path(out))
        question = stored.plan.question
        if images is not None and images != question.images:
            plan = replace(stored.plan, question=replace(question, images=images))
            stored = folder.keep(replace(stored, plan=plan))
        runs = read_runs(stored.plan, images=stored.data)
        if why := _none_finished(runs):
            raise UserError(
                f"no run of the comparison in {str(out)!r} is finished yet. Resume it with: "
                f"{stored.plan.command}. The first says: {why}"
            )
        return _gathered(
            stored, runs, None, say=say, note=folder.imports_note(stored.plan, imports)
        )


def _none_finished(runs: Sequence[Reading]) -> str:
    """Return why no run is finished, if none is: the reason of the first that failed, if any."""
    left = [each for each in runs if isinstance(each, OpenRun)]
    failed = [each for each in left if each.status == "failed"]
    return "" if len(left) < len(runs) else (failed or left)[0].reason


def _gathered(
    stored: Stored,
    runs: Sequence[Reading],
    data: ImageData | None,
    *,
    say: Callable[[str], None],
    note: str = "",
) -> Comparison:
    """Write results and page from runs that were read and what the folder keeps of them.

    `data` are the images if they are loaded already.
    """
    plan = stored.plan
    out = plan.out
    known = next(each.data for each in runs if isinstance(each, Finished))
    say("looking into the trained models")
    seen = look(plan, runs, data, stored.data, images=bool(plan.question.images))
    beside = Known(
        costs=known_costs(plan, known, runs),
        spikes=seen.spikes,
        checked=stored.checked,
        references=known_references(out, known) if plan.question.reference else References(),
        looks=stored.looks,
    )
    found = results(plan, known, runs, beside)
    folder.write_results(found, out, seen.pictures)
    notes = (*filter(None, [note]), *seen.pictures.notes)
    return Comparison(out=out, record=found, pictures=seen.pictures, notes=notes)
