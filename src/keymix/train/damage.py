# SPDX-License-Identifier: Apache-2.0
"""A finished run's files, each read and held against the others: which of them are damaged.

A run with a damaged file is not done: `keymix.train` writes it again from the run's checkpoint or
weights. Weights that were taken away are missed only where they are read: what came out of the run
holds without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from keymix.analysis.answers import Answers
from keymix.data.record import DataRecord
from keymix.errors import KeymixWarning, UserError
from keymix.records import from_json
from keymix.task import Task
from keymix.train import files
from keymix.train.checkpoints import usable
from keymix.train.parts import answers_of
from keymix.train.recipe import Recipe, from_record
from keymix.train.record import Environment, RunRecord, run_from_json

Which = Literal["last", "best"]
WEIGHTS: tuple[Which, ...] = ("last", "best")
"""Of which epochs a run keeps weights and answers."""
RETESTED = (files.SUMMARY, files.PREDICTIONS, files.weights_file("last"))
"""Files that only another test of the weights can give; the others are records of the training."""


def damage(folder: Path) -> dict[str, str]:
    """Say of each damaged file of a finished run what is wrong with it.

    Args:
        folder: The run's folder, with a summary.
    """
    found: dict[str, str] = {}

    def look(name: str, read: Callable[[], object]) -> Any:
        try:
            return read()
        except UserError as error:
            found[name] = str(error)
        return None

    summary: RunRecord | None = look(files.SUMMARY, partial(read_summary, folder, whole=True))
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
    """What is wrong with the last epoch's weights, where a checkpoint can give them again.

    Not so without the best epoch's: a test of the others would lose what came out of those.
    """
    last, best = (folder / files.weights_file(which) for which in ("last", "best"))
    try:
        if last.exists():
            files.read_facts(last)
    except UserError as error:
        with suppress(UserError):
            files.read_facts(best)
            return str(error) if usable(folder)[0] else ""
    return ""


def read_summary(folder: Path, *, whole: bool = False) -> RunRecord:
    """Read what came out of a run.

    Args:
        folder: The run's folder.
        whole: Ask for every key that this version writes; else for those that a comparison reads.

    Raises:
        UserError: If it is missing or damaged.
    """
    path = folder / files.SUMMARY
    return run_from_json(files.read_json(path), where=repr(str(path)), whole=whole)


def read_answers(path: Path, data: DataRecord) -> Mapping[Which, Answers]:
    """Read what a run answered on the test split, inputs in the order of their index.

    Args:
        path: The run's ``predictions_test.npz``.
        data: Its record of the data.

    Returns:
        The answers with the weights of the ``last`` and the ``best`` epoch.

    Raises:
        UserError: If the file is missing or damaged, or is of other data.
    """
    stored, part = files.read_arrays(path), answers_of(data.task_kind)
    wrong = next(part.faults(stored, data), "")
    if wrong:
        raise UserError(f"cannot read {str(path)!r}: {wrong}")
    return {which: part.read(stored, which, data) for which in WEIGHTS}


def read_environment(folder: Path) -> Environment:
    """Read what a run was computed with; nothing is known where there is no such file.

    Raises:
        UserError: If it is damaged.
    """
    path = folder / files.ENVIRONMENT
    if not path.exists():
        return Environment()
    return from_json(Environment, files.read_json(path), where=repr(str(path)))


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has a recipe, or weights that keep theirs."""
    return (folder / files.RECIPE).exists() or bool(_of_weights(folder))


def recorded_recipe(folder: Path) -> Recipe:
    """Read the recipe of a run; that of its weights where the file is missing or damaged.

    Raises:
        UserError: If neither can be read.
    """
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
        return from_record(values)
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
    """Refuse metrics that lack an epoch, or tell of one that was not trained.

    Args:
        folder: The run's folder.
        epochs: Epochs that are done.
        task: By whose scores epochs are ranked.

    Raises:
        UserError: If they do.
    """
    path = folder / files.METRICS
    there = {line.epoch for line in files.read_metrics(path, task=task)}
    planned = set(range(epochs))
    for verb, wrong in (("lacks", planned - there), ("has", there - planned)):
        if wrong:
            told = epochs_told(sorted(wrong))
            raise UserError(f"{str(path)!r} is damaged: it {verb} {told} of {epochs}")


def epochs_told(epochs: list[int]) -> str:
    """Name epochs, counted from one, a few of many."""
    numbers = [str(epoch + 1) for epoch in epochs[:5]]
    more = ", …" if len(epochs) > len(numbers) else ""
    lines = "the line of epoch" if len(epochs) == 1 else "the lines of epochs"
    return f"{lines} {', '.join(numbers)}{more}"
