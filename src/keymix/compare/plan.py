# SPDX-License-Identifier: Apache-2.0
"""From a question to a plan: resolved and checked before anything trains, and only read afterwards.

Every mixer's model is built once on the meta device, and the data is loaded, so that a mistake in
any input shows at once and not after the first hour. `resolve` is read from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from keymix import recipes
from keymix.analysis.certainty import CLEAR_SEEDS, TYPICAL_ACCURACY, foreseen_margin
from keymix.compare import budget, defaults, start
from keymix.compare.budget import Load, Trial
from keymix.compare.models import (
    CONTROL,
    SEEDS,
    SPIKING_MODEL,
    by_tokens,
    choose_baseline,
    choose_mixers,
    choose_seeds,
    fitting,
    make_plan,
    share_out,
)
from keymix.compare.on_ray import shares
from keymix.compare.plain import with_its_width, with_plain_network
from keymix.compare.question import Plan, PlannedMixer, Question
from keymix.data.dataset import ImageData
from keymix.data.kinds import IMAGE, RECORDING, InputKind
from keymix.data.sample import Faults
from keymix.data.specs import kind_of_spec, parse, task_name
from keymix.errors import FAILURES, UserError
from keymix.report.formats import seeds as in_words
from keymix.task import DEFAULT, Task, get_task
from keymix.train.callbacks import roughly
from keymix.train.folder import is_finished
from keymix.train.model import device_of_this_machine, load_data, warn_of_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.validate import check_recipe, training_batches

DATA = "digits"
"""The data set where neither data nor a recipe is named."""
_SIDE = 32  # pixels per side of the images and frames that the spiking model is made for

Say = Callable[[str], None]


def resolve(question: Question, before: Plan | None, *, say: Say) -> tuple[Plan, ImageData]:
    """Turn a question into a plan, and load its data; a UserError refuses any bad argument.

    `before` is the folder's plan, `say` gets a line before what takes time. The recipe is what
    these decide, in this order; a default changes nothing that was asked for:

    1. the folder's plan, if it was made for this question: its recipe, seconds and the width of its
       plain network are taken as they are, and nothing below but 2 and 6 is done;
    2. the recipe that was named; else the task's, for the data set, the kind of input, the tokens
       of the mixers; then ``--model``, ``--epochs``, ``--limit`` and fields of the recipe;
    3. the images: size, patches, colour, flips (`defaults.fit_to_images`);
    4. the cases: the share that is tested on (`defaults.with_enough_cases`);
    5. the number of training inputs: epochs (`defaults.fit_to_count`);
    6. the mixers: how all models read out (`make_plan`);
    7. the budget: pixels, epochs, mixers (`_within`).
    """
    kept = before if before is not None and question.repeats(before.question) else None
    if kept is not None:
        question = replace(question, minutes=kept.question.minutes)
    given, cuda = question.given, device_of_this_machine().type == "cuda"
    fresh = question.recipe is None and question.start is None and kept is None
    recipe, why = _before_the_data(question, kept, cuda=cuda)
    named = question.mixers
    if named is None and kept is not None:
        named = [each for each in kept.specs if each != CONTROL]
    elif question.first:
        named = defaults.FIRST
    specs = choose_mixers(
        named,
        controls=question.controls,
        model=recipe.model.name,
        least=2 if question.start is None else 1,  # next to the model's own
    )
    question, specs = start.seated(question, recipe, specs)
    asked = (SEEDS if kept is None else kept.seeds) if question.seeds is None else question.seeds
    seeds = choose_seeds(asked, len(specs))
    choose_baseline(specs, question.baseline)  # or refuse, before the data is read
    check_recipe(recipe)

    def planned(recipe: Recipe) -> tuple[Plan, ImageData]:
        say("loading the data")
        data = load_data(recipe.data)
        if fresh:
            larger = defaults.with_enough_cases(recipe, given, data.record())
            recipe, data = larger, data if larger == recipe else load_data(larger.data)
            recipe = defaults.fit_to_count(recipe, given, train=len(data.train))
        sitting, reasons = (specs, ()) if named is not None else fitting(specs, recipe, data)
        reasons = kept.cannot_sit if kept and question.mixers is None else reasons
        training_batches(recipe, data)  # or refuse the augmentation
        plan = make_plan(question, recipe, data, sitting)
        notes = (default_note(recipe, why),) if why else ()
        used = (fresh and defaults.used(recipe)) or _loaded(data)
        plan = replace(
            plan, seeds=seeds, cannot_sit=plan.cannot_sit + reasons, used=used, notes=notes
        )
        plan = with_plain_network(plan, data, before, kept)
        kept_threads = before.threads if before else 0  # results depend on it, in their last bits
        processes, threads = share_out(len(plan.pairs), question.processes, kept_threads, cuda=cuda)
        if question.on is not None:
            processes, threads, _ = shares(question, threads, fixed=kept_threads > 0)
        return replace(plan, processes=processes, threads=threads), data

    def at_other_size(larger: bool) -> tuple[Plan, ImageData] | None:
        other = defaults.resized(recipe, given, larger=larger) if fresh else None
        return None if other is None else planned(other)

    plan, data = planned(recipe)
    known = {} if kept is None else {**kept.seconds}
    load = _load(plan, data, [e for e in plan.mixers if e.label not in known], say=say)
    minutes = _minutes(question, recipe)
    if kept is not None:
        plan = replace(plan, notes=kept.notes, used=kept.used, tuning=kept.tuning, start=kept.start)
    elif minutes is not None and plan.baseline in load.trials:
        plan, data, load = _within(plan, data, load, minutes, at_other_size)
    plan = with_its_width(plan, data, load, say=say)
    runs = known | load.runs(plan.recipe)
    plan = replace(
        plan,
        seconds={label: runs[label] for label in plan.labels if label in runs},
        after=load.after(plan.labels) if kept is None else kept.after,
    )
    return plan, warn_of_data(data)


def _minutes(question: Question, recipe: Recipe) -> float | None:
    """Return the minutes that a comparison may take: those given, or for one's own data."""
    own = question.recipe is None and recipe.data.spec != DATA
    bounded = own and "schedule.epochs" not in question.given
    return budget.DEFAULT if question.minutes is None and bounded else question.minutes


def _before_the_data(question: Question, kept: Plan | None, *, cuda: bool) -> tuple[Recipe, str]:
    """Return the recipe as far as it is known before the data is loaded, and why that one."""
    recipe, why = named_recipe(question)
    if question.recipe is None and question.start is None and kept is None:
        recipe = at_the_models_size(defaults.fit_to_images(recipe, question.given, cuda=cuda))
    elif kept is not None and question.recipe is None:
        model = replace(kept.recipe.model, global_pool=recipe.model.global_pool)
        recipe = replace(kept.recipe, model=model)
    elif kept is not None and kept.question.minutes is not None:  # that epochs gave way to
        epochs = kept.recipe.schedule.epochs
        recipe = defaults.with_epochs(recipe, question.given, epochs)
    if kept is not None and kept.tuning is not None:
        recipe = replace_path(recipe, {"optim.lr": kept.tuning.chosen})
    return recipe, why


def _loaded(images: ImageData) -> str:
    """Say what was loaded."""
    count, (height, width) = sum(map(len, images.splits)), images.image_size
    return f"{count:,} {images.kind.nouns} of {width}x{height}"


# ---- the recipe -----------------------------------------------------------------------------


def named_recipe(question: Question) -> tuple[Recipe, str]:
    """Return the recipe that was named, or the task's and why it is not that of images."""
    overrides = dict(question.overrides or {})
    short = {
        "data.spec": question.data,
        "model.name": question.model,
        "data.limit": question.limit,
        "schedule.epochs": question.epochs,
    }
    changes: dict[str, Any] = {key: value for key, value in short.items() if value is not None}
    why = ""
    if question.start is not None and question.recipe is None:
        recipe = start.fine_tuning(question, lambda data: _default_recipe(data, None, None)[0])
    elif question.recipe is None:
        named = changes | overrides
        spec, model = named.get("data.spec"), named.get("model.name")
        recipe, why = _default_recipe(spec, model, question.mixers)
    elif isinstance(question.recipe, str):
        recipe = recipes.resolve(question.recipe)
    else:
        recipe = question.recipe
    if question.start is not None and question.recipe is not None:
        recipe = start.with_model(recipe, question)
    changes |= overrides
    for key, flag in (("model.mixer", "--mixers"), ("seed", "--seeds")):
        if key in changes:
            raise UserError(f"{key} is what a comparison varies. Use {flag} instead.")
    chosen = replace_path(recipe, changes)
    return replace(chosen, model=replace(chosen.model, mixer=None), seed=0), why


def _default_recipe(
    data: str | None, model: str | None, mixers: str | Sequence[str] | None
) -> tuple[Recipe, str]:
    """Return the recipe that the data's task has for data, model and mixers, and why that one.

    A task has recipes by data set and by kind of input. Mixers of spiking tokens want a spiking
    model.
    """
    task, kind = get_task(task_name(data)), kind_of_spec(data)
    if task.name != DEFAULT or kind is not IMAGE:
        holds = kind.holds if task.name == DEFAULT else task.holds
        return recipes.resolve(_recipe_name(task, data, kind)), f"{data} holds {holds}"
    if model is not None or [*by_tokens(mixers)] != ["spiking"]:
        return recipes.resolve(_recipe_name(task, data or DATA, kind)), ""
    why = "these mixers take spiking tokens"
    if data is None:
        return recipes.resolve(_recipe_name(task, None, RECORDING)), why
    recipe = recipes.resolve(_recipe_name(task, data, kind))
    return replace_path(recipe, {"data.image_size": _SIDE, "model.name": SPIKING_MODEL}), why


def _recipe_name(task: Task, data: str | None, kind: InputKind) -> str:
    """Name a task's recipe: of the data set, else of its kind of input, else of any data."""
    spec = kind.name if data is None else data.partition(":")[0]
    found = (task.recipes[key] for key in (spec, kind.name, "") if key in task.recipes)
    name = next(found, None)
    if name is None:
        given = "no data" if data is None else f"data {data!r}"
        raise UserError(
            f"task {task.name!r} has no recipe of its own for {given}: name one with --recipe"
        )
    return name


def at_the_models_size(recipe: Recipe) -> Recipe:
    """Give frames of a larger sensor the spiking model's 32 x 32 pixels, unless a size is set."""
    own = recipe.model.name == SPIKING_MODEL and kind_of_spec(recipe.data.spec) is RECORDING
    if not own or recipe.data.image_size is not None:
        return recipe
    entry, argument = parse(recipe.data.spec)
    sensor = entry.open(argument, Faults()).facts.sensor_size
    small = sensor is None or min(sensor) < _SIDE or max(sensor) == _SIDE
    return recipe if small else replace_path(recipe, {"data.image_size": _SIDE})


def default_note(recipe: Recipe, why: str) -> str:
    """Say in one line which recipe and model were chosen, and why."""
    size = f" at {_SIDE}x{_SIDE} pixels" if recipe.data.image_size == _SIDE else ""
    return (
        f"{why}: recipe {recipe.name} with model {recipe.model.name}{size} is taken; --recipe and "
        "--model name others"
    )


# ---- time -----------------------------------------------------------------------------------


def _load(
    plan: Plan, data: ImageData, mixers: Sequence[PlannedMixer], *, say: Say | None = None
) -> Load:
    """Time a few steps of mixers; one that makes none is left out, for its runs will fail as soon.

    The plain network takes as long as the baseline.
    """
    trials: dict[str, Trial] = {}
    if mixers and say is not None:
        say("timing a few steps of each mixer")
    for mixer in mixers:
        with suppress(*FAILURES):
            if mixer.reference:
                trials[mixer.label] = trials[plan.baseline]
            else:
                recipe = plan.recipe_for(mixer, 0)
                trials[mixer.label] = budget.timed(recipe, data, threads=plan.threads)
    sizes = data.record().sizes
    return Load(trials=trials, sizes=sizes, seeds=len(plan.seeds), processes=plan.processes)


def _within(
    plan: Plan,
    data: ImageData,
    load: Load,
    minutes: float,
    at_other_size: Callable[[bool], tuple[Plan, ImageData] | None],
) -> tuple[Plan, ImageData, Load]:
    """Fit a plan into minutes, and note in a line what gave way.

    `at_other_size` plans for larger images, or for smaller ones, where there are such; of them only
    the baseline's steps are timed.
    """
    question, first, whole = plan.question, plan.recipe, load.seconds(plan.recipe)
    tight = whole > 60 * minutes
    room = question.minutes is not None and budget.ROOM * whole <= 60 * minutes
    other = at_other_size(room) if tight or room else None
    if other is not None:
        base = other[0].mixers[other[0].labels.index(plan.baseline)]
        there = _load(*other, [base]).trials[base.label]
        scaled = load.times(there.step / load.trials[base.label].step)
        if tight or scaled.seconds(other[0].recipe) <= 60 * minutes:
            (plan, data), load = other, scaled
    free = [e.label for e in plan.mixed if not (e.control or e.ann_of) and e.label in load.trials]
    free = sorted({*free} - {plan.baseline}, key=lambda label: load.trials[label].step)
    plain = [e.label for e in plan.mixers if e.reference]
    found = budget.fit(
        load,
        plan.recipe,
        minutes,
        epochs_stay="schedule.epochs" in question.given,
        may_grow=question.minutes is not None,
        may_go=[*plain, *(free[1:] if question.mixers is None else [])],
    )
    stay = [each.label not in found.left_out for each in plan.mixers]
    recipe = defaults.with_epochs(plan.recipe, question.given, found.epochs)
    parts = []
    sides = [each.data.image_size for each in (recipe, first)]
    if sides[0] != sides[1]:
        shorter = [min(side) if isinstance(side, tuple) else side for side in sides]
        parts.append(f"{shorter[0]} pixels instead of {shorter[1]}")
    was, now = (defaults.updates(each, len(data.train)) for each in (first, recipe))
    if was != now:
        parts.append(f"{now:,} updates instead of {was:,}")
    if found.left_out:
        parts.append(f"without {', '.join(found.left_out)}")
    gave_way = [f"to fit into {minutes:g} minutes: {', '.join(parts)}"] if parts else []
    plan = replace(
        plan,
        recipe=recipe,
        mixers=tuple(each for each, stays in zip(plan.mixers, stay, strict=True) if stays),
        specs=tuple(each for each, stays in zip(plan.specs, stay, strict=False) if stays),
        notes=(*gave_way, *plan.notes),
    )
    return plan, data, load


# ---- in words -------------------------------------------------------------------------------


def summary(plan: Plan, data: ImageData) -> str:
    """Say in a line what a comparison uses and does.

    Such as ``13,165 grey images of 64x64, as they are · limited to 1,800 to train on, 200 to
    validate, 2,000 to test · vit_micro_conv_p4_32, patches of 8 · 1,026 updates of 32 · 6 mixers +
    plain network × 3 seeds``.
    """
    model, train = plan.recipe.model, len(data.train)
    sizes = f"{train:,} to train on, {len(data.val):,} to validate, {len(data.test):,} to test"
    patch = model.options.get("patch_size")
    runs = [f"{len(plan.mixed)} mixers", *(e.label for e in plan.mixers if e.reference)]
    updates = defaults.updates(plan.recipe, train)
    parts = [
        plan.used,
        sizes if plan.recipe.data.limit is None else f"limited to {sizes}",
        model.name if patch is None else f"{model.name}, patches of {patch}",
        f"{updates:,} updates of {min(plan.recipe.data.batch_size, train)}",
        f"{' + '.join(runs)} × {in_words(len(plan.seeds))}",
    ]
    return " · ".join(parts)


def what_it_can_show(plan: Plan, data: ImageData) -> str:
    """Say the least margin within which mixers could be found equal; empty if nothing is known."""
    units = len(data.test)
    if not data.task.right_or_wrong or data.facts.compared_by or units < 2:
        return ""
    seeds = max(CLEAR_SEEDS, len(plan.seeds))
    margin = data.task.score.changed(foreseen_margin(units, seeds), sign=False)
    text = (
        f"{units:,} test {data.kind.nouns} and {seeds} seeds can show that mixers are equal within "
        f"{margin} (at {100 * TYPICAL_ACCURACY:.0f} % accuracy)"
    )
    few = len(plan.seeds) < CLEAR_SEEDS
    return f"{text}; {in_words(len(plan.seeds))} cannot" if few else text


def time_left(plan: Plan) -> str:
    """Say how long the runs will take that are left; empty if none is, or none was timed."""
    left = [e for e, seed in plan.pairs if not is_finished(plan.folder(e, seed))]
    seconds = [plan.seconds[each.label] for each in left if each.label in plan.seconds]
    if not seconds:
        return ""
    side_by_side = min(plan.processes, len(left))
    number = f"{len(left)} run{'s' * (len(left) > 1)}"
    number += f", {side_by_side} at a time" if side_by_side > 1 else ""
    slowest = max(plan.seconds, key=lambda label: plan.seconds[label])
    return (
        f"about {roughly(sum(seconds) / side_by_side + plan.after)} ({number}, up to "
        f"{roughly(plan.seconds[slowest])} each for {slowest}; then {roughly(plan.after)} for "
        "costs and maps)"
    )
