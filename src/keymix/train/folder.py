# SPDX-License-Identifier: Apache-2.0
"""A run's folder: whose it is, what it says of the run, and which of its files are damaged.

A run with a damaged file is not done: `keymix.train` rebuilds it from the run's checkpoint or
weights. Weights that were taken away are missed only where they are read: what came out of the run
holds without them.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from keymix.analysis.answers import Answers
from keymix.data.record import DataRecord
from keymix.errors import KeymixWarning, UserError
from keymix.records import FormatError, differences, from_json
from keymix.task import Task
from keymix.train import files
from keymix.train.checkpoints import usable
from keymix.train.parts import answers_of
from keymix.train.recipe import Recipe, from_dict
from keymix.train.record import Environment, RunRecord

Which = Literal["last", "best"]
WEIGHTS: tuple[Which, ...] = ("last", "best")
"""Of which epochs a run keeps weights and answers."""
RETESTED = (files.SUMMARY, files.PREDICTIONS, files.weights_file("last"))
"""Files that only another test of the weights can give; the others are records of the training."""


def is_done(folder: Path, recipe: Recipe, *, overwrite: bool) -> bool:
    """Whether a run is done in a folder, which it may have: else it is refused. Nothing is touched.

    With `overwrite` a run that is there may be thrown away; then nothing is done.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {str(folder)!r} is a file: name a folder.")
    if not folder.exists() or not any(map(_is_content, folder.iterdir())):
        return False
    if not holds_run(folder):
        raise UserError(
            f"the folder {str(folder)!r} is not empty and holds no run: name another with --out."
        )
    if overwrite:
        return False
    if (folder / files.SWAP).exists():
        raise UserError(
            f"the folder {str(folder)!r} holds a swapped model: train it into another, with "
            f"--model.weights {folder} --out DIR."
        )
    found = differences(recorded_recipe(folder).to_dict(), recipe.to_dict())
    differing = "; ".join(f"{key} is {there!r} there, {here!r} here" for key, there, here in found)
    if differing:
        raise UserError(
            f"the folder {str(folder)!r} holds another run: {differing}. Name another folder with "
            "--out, or throw that run away with --overwrite."
        )
    return is_finished(folder)


def is_finished(folder: Path) -> bool:
    """Whether a run is done and its files are whole; refuses damage that nothing can mend."""
    if not (folder / files.SUMMARY).exists():
        return False
    found = damage(folder)
    wrong = next((found[name] for name in RETESTED if name in found), "")
    if wrong and not can_be_tested(folder):
        raise UserError(
            f"{wrong.rstrip('.')}. Neither checkpoints nor weights are left to write it from: "
            "restore the file, or train again from the start with --overwrite."
        )
    return not found


def can_be_tested(folder: Path) -> bool:
    """Whether a finished run has something left that can be tested again."""
    left = [*(folder / files.CHECKPOINTS).glob("*.ckpt"), folder / files.weights_file("last")]
    return any(path.exists() for path in left)


def _is_content(path: Path) -> bool:
    """Whether a file is more than what a run leaves that was killed before its first one."""
    return path not in (path.parent / files.LOCK, files.part_of(path.parent / files.RECIPE))


def run_folder(path: Path) -> Path:
    """A run's folder, given itself or a file in it."""
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise UserError(f"there is no run {str(path)!r}: name the folder given as --out to train.")
    if holds_run(folder):
        return folder
    below = _runs_below(folder)
    if not below:
        raise UserError(f"{str(path)!r} is no run's folder: it holds no {files.RECIPE}.")
    raise UserError(
        f"{str(path)!r} is no run's folder, but has runs; name one: {', '.join(below)}."
    )


def _runs_below(folder: Path) -> list[str]:
    """List the runs of a comparison's folder, a mixer's together: ``…/seed0 to seed2``."""
    found: dict[Path, list[str]] = {}
    for recipe in sorted(folder.glob(f"*/*/*/{files.RECIPE}"), key=lambda p: (len(str(p)), p)):
        found.setdefault(recipe.parent.parent, []).append(recipe.parent.name)
    return [
        str(place / names[0]) + (f" to {names[-1]}" if names[1:] else "")
        for place, names in found.items()
    ]


def clear(folder: Path, *, recipe: bool = True) -> None:
    """Remove a run's own files from its folder, the recipe last of all."""
    shutil.rmtree(folder / files.CHECKPOINTS, ignore_errors=True)
    names = [
        files.SUMMARY,
        files.METRICS,
        files.PREDICTIONS,
        files.ENVIRONMENT,
        files.NONFINITE,
        files.SWAP,
        files.LOGGERS,
        files.weights_file("last"),
        files.weights_file("best"),
    ]
    for name in [*names, files.RECIPE] if recipe else names:
        (folder / name).unlink(missing_ok=True)


def damage(folder: Path) -> dict[str, str]:
    """Say of each damaged file of a finished run what is wrong with it."""
    found: dict[str, str] = {}

    def look(name: str, read: Callable[[], object]) -> Any:
        try:
            return read()
        except FormatError:
            raise
        except UserError as error:
            found[name] = str(error)
        return None

    summary: RunRecord | None = look(files.SUMMARY, partial(read_summary, folder))
    look(files.RECIPE, partial(_own_recipe, folder))
    if summary is not None:
        look(
            files.PREDICTIONS,
            partial(read_answers, folder / files.PREDICTIONS, summary.data),
        )
        if not summary.lost:  # which says what metrics cannot be had any more
            task = summary.task_kind
            look(files.METRICS, partial(check_metrics, folder, summary.epochs, task))
    look(files.ENVIRONMENT, partial(read_environment, folder))
    wrong = _last_weights(folder)
    return found | ({files.weights_file("last"): wrong} if wrong else {})


def _last_weights(folder: Path) -> str:
    """What is wrong with the last epoch's weights, where a checkpoint can restore them.

    Not so without the best epoch's: a test of the others would lose what came out of those.
    """
    last, best = (folder / files.weights_file(which) for which in ("last", "best"))
    try:
        if last.exists():
            files.read_facts(last)
    except UserError as error:
        with suppress(UserError):
            files.read_facts(best)
            return str(error) if usable(folder) else ""
    return ""


def read_summary(folder: Path) -> RunRecord:
    """Read what came out of a run."""
    path = folder / files.SUMMARY
    return from_json(RunRecord, files.read_json(path), where=repr(str(path)))


def read_answers(path: Path, data: DataRecord) -> Mapping[Which, Answers]:
    """Read what a run answered on the test split, by whose weights, in the order of the index."""
    stored, part = files.read_arrays(path), answers_of(data.task_kind)
    wrong = next(part.faults(stored, data), "")
    if wrong:
        raise UserError(f"cannot read {str(path)!r}: {wrong}")
    return {which: part.read(stored, which, data) for which in WEIGHTS}


def read_environment(folder: Path) -> Environment:
    """Read what a run was computed with; nothing is known where there is no such file."""
    path = folder / files.ENVIRONMENT
    if not path.exists():
        return Environment()
    return from_json(Environment, files.read_json(path), where=repr(str(path)))


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has a recipe, or weights that keep theirs."""
    return (folder / files.RECIPE).exists() or bool(_of_weights(folder))


def recorded_recipe(folder: Path) -> Recipe:
    """Read the recipe of a run; that of its weights where the file is missing or damaged."""
    try:
        return _own_recipe(folder)
    except UserError as error:
        damaged = str(error).rstrip(".")
    kept = _of_weights(folder)
    if not kept:
        raise UserError(
            f"{damaged}. No weights of the run keep the recipe: restore the file, or train into "
            "the folder with --overwrite."
        )
    text = f"{damaged}; the recipe that the run's weights keep is taken instead"
    warnings.warn(text, KeymixWarning, stacklevel=2)
    return kept[0]


def _own_recipe(folder: Path) -> Recipe:
    path = folder / files.RECIPE
    values = files.read_json(path)
    try:
        return from_dict(values)
    except UserError as error:
        raise UserError(f"{str(path)!r} holds no recipe: {error}") from None


def _of_weights(folder: Path) -> list[Recipe]:
    """The recipes that a run's weights keep."""
    found = []
    for which in ("last", "best"):
        with suppress(UserError):
            found.append(files.read_facts(folder / files.weights_file(which)).recipe)
    return found


def check_metrics(folder: Path, epochs: int, task: Task | None = None) -> None:
    """Refuse metrics that lack an epoch, or have one that was not trained."""
    path = folder / files.METRICS
    there = {line.epoch for line in files.read_metrics(path, task=task)}
    planned = set(range(epochs))
    for verb, wrong in (("lacks", planned - there), ("has", there - planned)):
        if wrong:
            lines = epoch_lines(sorted(wrong))
            raise UserError(f"{str(path)!r} is damaged: it {verb} {lines} of {epochs}")


def epoch_lines(epochs: list[int]) -> str:
    """Name epochs, counted from one, a few of many."""
    numbers = [str(epoch + 1) for epoch in epochs[:5]]
    more = ", …" if len(epochs) > len(numbers) else ""
    lines = "the line of epoch" if len(epochs) == 1 else "the lines of epochs"
    return f"{lines} {', '.join(numbers)}{more}"
