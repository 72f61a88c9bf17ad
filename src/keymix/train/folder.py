# SPDX-License-Identifier: Apache-2.0
"""A run's folder: whose it is, what it says of the run, and whether its files are whole.

Weights that were taken away are missed only where they are read: what came out of the run holds
without them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from keymix.analysis.answers import Answers
from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.records import FormatError, differences, from_json
from keymix.train import files
from keymix.train.checkpoints import DamagedRun
from keymix.train.parts import answers_of
from keymix.train.recipe import Recipe, from_dict
from keymix.train.record import Environment, EpochLine, RunRecord

Which = Literal["last", "best"]
WEIGHTS: tuple[Which, ...] = ("last", "best")
"""Of which epochs a run keeps weights and answers."""


class FinishedRun(NamedTuple):
    """What the files of a finished run say."""

    recipe: Recipe
    summary: RunRecord
    lines: Sequence[EpochLine]
    answers: Mapping[Which, Answers]
    environment: Environment


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
    try:
        there = recorded_recipe(folder).to_dict()
    except UserError as error:
        raise DamagedRun(str(error)) from None
    found = differences(there, recipe.to_dict())
    differing = "; ".join(f"{key} is {a!r} there, {b!r} here" for key, a, b in found)
    if differing:
        raise UserError(
            f"the folder {str(folder)!r} holds another run: {differing}. Name another folder with "
            "--out, or throw that run away with --overwrite."
        )
    return is_finished(folder)


def is_finished(folder: Path) -> bool:
    """Whether a run is done and its files are whole."""
    return (folder / files.SUMMARY).exists() and not damage(folder)


def _is_content(path: Path) -> bool:
    """Whether a file is more than what a run leaves that was killed before its first one."""
    part = files.part_of(path.parent / files.RECIPE).name
    return not path.name.startswith((files.LOCK, part))


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


def damage(folder: Path) -> str:
    """Say which file of a finished run cannot be read, the first of them; nothing if none."""
    try:
        read_finished(folder)
        for path in (folder / files.weights_file(which) for which in WEIGHTS):
            if path.exists():
                files.read_weights(path)
    except FormatError:
        raise
    except UserError as error:
        return str(error).rstrip(".")
    return ""


def read_finished(folder: Path) -> FinishedRun:
    """Read the files of a finished run but for its weights, or raise a UserError that names one."""
    recipe, summary = recorded_recipe(folder), read_summary(folder)
    answers = read_answers(folder / files.PREDICTIONS, summary.data)
    metrics = folder / files.METRICS
    lines = files.read_metrics(metrics)
    if [line.epoch for line in lines] != [*range(summary.epochs)]:
        raise UserError(f"{str(metrics)!r} is damaged: it has not one line of each epoch")
    return FinishedRun(recipe, summary, lines, answers, read_environment(folder))


def read_summary(folder: Path) -> RunRecord:
    """Read what came out of a run."""
    path = folder / files.SUMMARY
    return from_json(RunRecord, files.read_json(path), where=repr(str(path)))


def read_answers(path: Path, data: DataRecord) -> Mapping[Which, Answers]:
    """Read what a run answered on the test split, by whose weights, in the order of the index."""
    stored, part = files.read_arrays(path), answers_of(data.task_kind)
    try:
        found = {which: part.read(stored, which, data) for which in WEIGHTS}
    except KeyError as error:
        raise UserError(f"cannot read {str(path)!r}: it lacks {error}") from None
    number, tested = len(found["last"].index), data.sizes["test"]
    if number != tested:
        raise UserError(f"{str(path)!r} has {number:,} answers, and {tested:,} inputs were tested")
    return found


def read_environment(folder: Path) -> Environment:
    """Read what a run was computed with; nothing is known where there is no such file."""
    path = folder / files.ENVIRONMENT
    if not path.exists():
        return Environment()
    return from_json(Environment, files.read_json(path), where=repr(str(path)))


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has a recipe."""
    return (folder / files.RECIPE).exists()


def recorded_recipe(folder: Path) -> Recipe:
    """Read the recipe of a run."""
    path = folder / files.RECIPE
    try:
        return from_dict(files.read_json(path))
    except UserError as error:
        raise UserError(f"{str(path)!r} holds no recipe: {error}") from None
