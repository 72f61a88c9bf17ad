# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and resumed on CUDA: how far from one that was not, and why.

Runs of one recipe are started at once from one process: some that are left alone, and one that
saves after every update and is killed in the middle of its second epoch, then resumed. How far
those that were left alone are apart says what CUDA itself does not repeat. The sharpest test of
the resume needs no second run: the step in which the run was killed is computed again, from the
same weights, so its loss must be the same to the bit.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_queue.job import Context, Job, Result, Step, table

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.recipe import Recipe

EQUAL = "bit-equal"
AS_FAR = "as far apart as two runs that were not killed"
LOSES = "further apart: resume loses something"
REFUSED = "refuses to train"
APART = 10.0
"""A resumed run is further apart if it is so many times as far from the others as these from each
other. A single weight whose gradient is rounded to the other side of 0 makes five times as much.
"""

_RECIPE = "vit_small_cifar10"
_NEVER = 1e6  # minutes between checkpoints
# Process start 5, 3,000 + 3,000 images 3, CUDA in the children 4, 16 steps that each save 115 MB
# (0.4 s) 7, the resumed run with CUDA and its tests 8, comparing 2
_SECONDS = 30.0


def recipe_of(context: Context, precision: str, deterministic: bool, everything: bool) -> Recipe:
    """The run: a few epochs on few images."""
    import kill_resume
    from keymix import recipes
    from keymix.train.recipe import replace_path

    changes: dict[str, Any] = {
        "data.spec": context.cifar10,
        "data.limit": 3000,
        "data.batch_size": 256,
        "schedule.epochs": 3,
        "precision": precision,
        "deterministic": deterministic,
    }
    if context.tiny:
        changes |= {"data.limit": 120, "data.batch_size": 32, "data.image_size": 16}
        changes |= {"schedule.epochs": 2}
        sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2}
        changes |= {f"model.options.{name}": size for name, size in sizes.items()}
    if everything:
        changes |= kill_resume.WITH_STATE
    return replace_path(recipes.get(_RECIPE), changes)


def measure(
    context: Context, *, precision: str, deterministic: bool, everything: bool = False
) -> Result:
    """Train, kill, resume and compare."""
    import torch

    import kill_resume as runs
    from keymix.train.model import build_model, load_data

    folder = context.work / "runs"
    shutil.rmtree(folder, ignore_errors=True)  # of a step that was cut short
    folder.mkdir(parents=True)
    recipe = recipe_of(context, precision, deterministic, everything)
    # neither CUDA nor threads here: processes that are forked could not use either then
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = load_data(recipe.data)
    # for what it imports: the queue compares modules of this process, and children need not
    sizes = {"in_chans": data.in_chans, "image_size": data.image_size}
    build_model(recipe, num_classes=len(data.classes), **sizes)
    torch.set_num_threads(threads)
    steps = math.ceil(len(data.train) / recipe.data.batch_size)
    place = runs.Place("loss", "", steps + steps // 2)
    whole = [folder / f"whole {i}" for i in range(2 if context.tiny else 3)]
    killed, look = folder / "killed", folder / "look"
    started = {out: runs.run(recipe, out, None, _NEVER, data) for out in whole}
    started[killed] = runs.run(recipe, killed, place, 0.0, data)
    work = functools.partial(_look, recipe, look, data)
    started[look] = runs.fork(work, runs.next_to(look, "failed.txt"))
    codes = {out: runs.wait(child) for out, child in started.items()}
    facts = {
        "device": context.device,
        "precision": precision,
        "deterministic": deterministic,
        "everything": everything,
        "recipe": recipe.name,
        "model": {"name": recipe.model.name, "options": dict(recipe.model.options)},
        "images": len(data.train),
        "batch": recipe.data.batch_size,
        "epochs": recipe.schedule.epochs,
        "steps_per_epoch": steps,
    }
    _must_be({look: codes[look]}, 0)
    facts |= json.loads(runs.next_to(look, "json").read_text())
    if deterministic and all(codes[out] for out in whole):
        why = _failure(whole[0])
        if "deterministic" in why:
            return facts | {"refused": why}
    _must_be({out: codes[out] for out in whole}, 0)
    _must_be({killed: codes[killed]}, -signal.SIGKILL)
    before = runs.losses_of(killed)
    _must_be({killed: runs.wait(runs.run(recipe, killed, None, _NEVER, data))}, 0)
    after = runs.losses_of(killed)[len(before) :]
    firsts = {runs.losses_of(out)[0] for out in whole}
    result = facts | {
        "killed_at": before[-1][:2],
        "resumed_at": after[0][:2],
        "repeated": _repeated(before, after),
        "first_losses": len(firsts),
        "apart": [asdict(runs.distance(*pair)) for pair in itertools.combinations(whole, 2)],
        "resumed": [asdict(runs.distance(out, killed)) for out in whole],
    }
    shutil.rmtree(folder)  # 115 MB a checkpoint
    return result


def _look(recipe: Recipe, out: Path, data: ImageData) -> None:
    """Train an epoch; write which operations have no deterministic form, and torch's switches."""
    import torch

    import kill_resume as runs
    from keymix.tasks.classification.training import ClassificationTask
    from keymix.train.engine import train
    from keymix.train.recipe import replace_path

    facts: Result = {}
    step = ClassificationTask.training_step

    def training_step(task: Any, *args: Any) -> Any:
        if not facts:  # as the run itself has them
            facts["switches"] = {
                "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
                "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
                "cudnn.benchmark": torch.backends.cudnn.benchmark,
                "TF32 in matrix products": torch.backends.cuda.matmul.allow_tf32,
            }
            torch.use_deterministic_algorithms(True, warn_only=True)
        return step(task, *args)

    ClassificationTask.training_step = training_step  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(replace_path(recipe, {"schedule.epochs": 1}), out, data=data)
    texts = [" ".join(str(each.message).split()) for each in seen]
    facts["operations"] = sorted({text[:200] for text in texts if "determinis" in text.lower()})
    runs.next_to(out, "json").write_text(json.dumps(facts))


def _failure(out: Path) -> str:
    """The last line of the traceback that a run left."""
    import kill_resume as runs

    path = runs.next_to(out, "failed.txt")
    return path.read_text().strip().splitlines()[-1] if path.exists() else "no traceback"


def _must_be(codes: Mapping[Path, int], wanted: int) -> None:
    """Refuse exit codes other than the one that is wanted."""
    for out, code in codes.items():
        if code != wanted:
            raise RuntimeError(f"{out.name}: exit code {code}, not {wanted}: {_failure(out)}")


Losses = Sequence[tuple[int, int, float]]


def _repeated(before: Losses, after: Losses) -> Result:
    """The steps whose loss the killed run knew and the resumed one computed again."""
    known = {(epoch, step): loss for epoch, step, loss in before}
    both = [(known[epoch, step], loss) for epoch, step, loss in after if (epoch, step) in known]
    # later ones follow updates, which may differ for other reasons
    gap = abs(both[0][0] - both[0][1]) if both else None
    return {"steps": len(both), "first_differs_by": gap}


def conclude(result: Result) -> str:
    """Say what came of a kill and resume, by rule."""
    if "refused" in result:
        return REFUSED
    if not any(_differ(each) for each in result["resumed"]):
        return EQUAL
    if not any(_differ(each) for each in result["apart"]):
        return LOSES
    # from the same weights; runs that were not killed agree in the first step of all
    if result["first_losses"] == 1 and result["repeated"]["first_differs_by"] != 0:
        return LOSES
    usual = max(each["relative"] for each in result["apart"])
    now = statistics.median(each["relative"] for each in result["resumed"])
    return LOSES if now > APART * usual else AS_FAR


def _differ(distance: Result) -> bool:
    wrong = (distance["differing"], distance["lines"], distance["answers"], distance["first"])
    return any(wrong)


def label(result: Result) -> str:
    """Name a setting."""
    words = {"32": "float32", "bf16": "bfloat16", "16": "float16 with loss scaling"}
    parts = [words[result["precision"]]]
    parts += ["deterministic"] if result["deterministic"] else []
    parts += ["averaged weights, accumulation, mixing"] if result["everything"] else []
    return ", ".join(parts)


def section(results: Mapping[str, Result]) -> str:
    """Say how resumed runs end, in which settings, and why they differ where they do."""
    found = [(label(result), conclude(result), result) for result in results.values()]
    settings = {end: [name for name, its, _ in found if its == end] for end in _SENTENCES}
    answers = [
        _SENTENCES[end].format(where="; ".join(names), n=len(names), of=len(found))
        for end, names in settings.items()
        if names
    ]
    compared = [(name, end, result) for name, end, result in found if end != REFUSED]
    parts = [" ".join(answers), *_why(found)]
    if compared:
        parts.append(table(_HEADS, [_row(*each) for each in compared]))
        parts.append(_method(compared[0][2]))
    return "\n\n".join(parts)


_SENTENCES = {
    LOSES: "**Further apart than runs that were not killed, so resume loses something**, in {n} of "
    "{of} settings ({where}).",
    EQUAL: "Killed in the middle of an epoch and resumed, a run ended bit-equal to one that was "
    "not in {n} of {of} settings ({where}).",
    AS_FAR: "A resumed run was as far from the others as two that were not killed are from each "
    "other, so resume loses nothing that shows, in {n} of {of} settings ({where}).",
    REFUSED: "Training with deterministic operations alone was refused in {n} of {of} settings "
    "({where}).",
}
_HEADS = (
    "setting",
    "two runs not killed, relative distance",
    "resumed and not killed, relative distance",
    "largest difference",
    "weights that differ",
    "epochs' lines that differ",
    "answers that differ",
    "loss of the step that was computed again",
    "the resumed run is",
)


def _why(found: Sequence[tuple[str, str, Result]]) -> list[str]:
    """Say what makes runs differ that were not killed, from what was measured."""
    parts = []
    for name, end, result in found:
        if end == REFUSED:
            parts.append(f"{name}: {result['refused']}")
    free = [each for _, end, each in found if end != REFUSED and not each["deterministic"]]
    strict = [each for _, end, each in found if end != REFUSED and each["deterministic"]]
    differing = [each for each in free if any(map(_differ, each["apart"]))]
    if free:
        text = "Runs that were not killed are equal to the bit as well."
        if differing:
            starts = [tuple(d["first"]) for each in differing for d in each["apart"] if d["first"]]
            since = ""
            if starts:
                epoch, step = min(starts)
                since = f", from step {step + 1} of epoch {epoch + 1} on"
            text = (
                f"Without `deterministic`, runs that were not killed differ too, in "
                f"{len(differing)} of {len(free)} settings{since}: the device does not repeat "
                "itself."
            )
        parts.append(text)
    warned = sorted({text for each in free + strict for text in each["operations"]})
    if warned:
        listed = "\n".join(f"- {text}" for text in warned)
        parts.append(
            f"Operations that warn that they are not deterministic unless asked to be:\n\n{listed}"
        )
    elif differing:
        parts.append("No operation warns that it is not deterministic.")
    if strict:
        equal = sum(not any(map(_differ, each["apart"])) for each in strict)
        configs = sorted({str(each["switches"]["CUBLAS_WORKSPACE_CONFIG"]) for each in strict})
        parts.append(
            f"With `deterministic=True` runs that were not killed were equal to the bit in {equal} "
            f"of {len(strict)} settings (CUBLAS_WORKSPACE_CONFIG {', '.join(configs)})."
        )
    return parts


def _row(name: str, end: str, result: Result) -> list[str]:
    far, resumed = result["apart"], result["resumed"]
    gap = result["repeated"]["first_differs_by"]
    again = "none was" if gap is None else "the same" if gap == 0 else f"off by {gap:.2g}"
    return [
        name,
        _range(far, "relative"),
        _range(resumed, "relative"),
        _range(resumed, "largest"),
        f"{max(d['differing'] for d in resumed):,} of {resumed[0]['values']:,}",
        f"{max(d['lines'] for d in resumed)} of {result['epochs']}",
        f"{max(d['answers'] for d in resumed)} of {resumed[0]['images']}",
        again,
        end,
    ]


def _range(distances: Sequence[Result], key: str) -> str:
    values = [each[key] for each in distances]
    low, high = (f"{value:.1e}" if value else "0" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _method(result: Result) -> str:
    epoch, step = result["killed_at"]
    again, at = result["resumed_at"]
    return (
        f"`{result['recipe']}` on {result['images']:,} images in batches of {result['batch']}, "
        f"{result['epochs']} epochs of {result['steps_per_epoch']} steps, on {result['device']}. "
        f"The killed run saved after every update, got SIGKILL in step {step + 1} of epoch "
        f"{epoch + 1} and went on with step {at + 1} of epoch {again + 1}; "
        f"{len(result['resumed'])} runs were left alone, all at the same time. Distances are of "
        "the last weights, the norm of the difference over the norm; smallest to largest of all "
        f"pairs. A resumed run counts as further apart from {APART:g} times the largest distance "
        "of two runs that were not killed, or if the first step that it computes again, from the "
        "same weights, has another loss although the first steps of all runs agree."
    )


def steps(tiny: bool) -> list[Step]:
    """One for each precision with and without deterministic operations, one with all states."""
    settings = [
        {"precision": precision, "deterministic": deterministic}
        for precision in (("32",) if tiny else ("bf16", "32", "16"))
        for deterministic in ((False,) if tiny else (False, True))
    ]
    every: dict[str, Any] = {"precision": "32", "deterministic": True, "everything": True}
    return [
        Step(
            name=_name(setting),
            seconds=_SECONDS,
            measure=functools.partial(measure, **setting),  # type: ignore[arg-type]
            data=() if tiny else ("cifar10",),
            gpu_gib=32.0,
        )
        for setting in [*settings, every]
    ]


def _name(setting: Mapping[str, Any]) -> str:
    parts = [setting["precision"]]
    parts += [key for key in ("deterministic", "everything") if setting.get(key)]
    return ",".join(parts)


JOB = Job(
    number=8,
    name="kill_resume",
    title="Kill and resume",
    purpose=(
        "How far is a run that was killed in the middle of an epoch and resumed on CUDA from one "
        "that was not, in each precision, and why?"
    ),
    form={
        "precision, deterministic, everything": "the setting",
        "killed_at, resumed_at": "epoch and step, counted from 0",
        "repeated": "steps computed again; by how much the loss of the first of them differs",
        "first_losses": "different losses of the first step among the runs that were not killed",
        "apart": "distances of two runs that were not killed, each pair",
        "resumed": "distances of the resumed run from each that was not killed",
        "switches": "torch's switches during the run",
        "operations": "warnings of operations without a deterministic form",
        "refused": "instead of these, the error of a run that deterministic operations ended",
    },
    steps=steps,
    section=section,
)
