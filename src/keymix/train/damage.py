# SPDX-License-Identifier: Apache-2.0
"""A finished run's files, each read and held against the others: which of them are damaged.

A run with a damaged file is not done: `keymix.train` writes it again from the run's checkpoint or
weights. Weights that were taken away are missed only where they are read: what came out of the run
holds without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keymix.data.tasks import SEGMENTATION, TaskKind, task_of
from keymix.errors import KeymixWarning, UserError
from keymix.train import files
from keymix.train.checkpoints import usable
from keymix.train.recipe import Recipe, from_record

RETESTED = (files.SUMMARY, files.PREDICTIONS, files.weights_file("last"))
"""Files that only another test of the weights can give; the others are records of the training."""

_OF_RUN = {"model": str, "seed": int, "params": int, "epochs": int}
_OF_DATA = {"spec": str, "fingerprint": str, "image_size": list, "in_chans": int}
_OF_CLASS = {"name": str, "jaccard": float, "dice": float, "hausdorff_mm": float, "missed": int}

Values = Mapping[str, Any]


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

    summary = look(files.SUMMARY, partial(read_summary, folder, whole=True))
    look(files.RECIPE, partial(_own_recipe, folder))
    if summary is not None:
        look(
            files.PREDICTIONS,
            partial(read_predictions, folder / files.PREDICTIONS, summary["data"]),
        )
        if not summary.get("lost"):  # which says what metrics cannot be had any more
            look(files.METRICS, partial(check_metrics, folder, summary["epochs"]))
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


def read_summary(folder: Path, *, whole: bool = False) -> dict[str, Any]:
    """Read what came out of a run.

    Args:
        folder: The run's folder.
        whole: Ask for every key that this version writes; else for those that a comparison reads.

    Raises:
        UserError: If it is missing or damaged.
    """
    path = folder / files.SUMMARY
    found = files.read_json(path)
    wrong = _wrong_in(found, whole=whole)
    if wrong:
        raise UserError(f"{str(path)!r} is damaged: {wrong}.")
    return found


def read_predictions(path: Path, data: Values) -> dict[str, np.ndarray[Any, Any]]:
    """Read what a run answered on the test images, in the order of their index.

    Args:
        path: The run's ``predictions_test.npz``.
        data: Its record of the data.

    Returns:
        ``target``, ``last_pred`` and ``best_pred``; or of masks ``group``, ``last_counts`` and
        ``best_counts``.

    Raises:
        UserError: If the file is missing or damaged, or is of other data.
    """
    arrays = files.read_arrays(path)
    masks = task_of(data) is SEGMENTATION
    names = (
        ("group", "last_counts", "best_counts") if masks else ("target", "last_pred", "best_pred")
    )
    wrong = next(_faults_with(arrays, names, data), "")
    if wrong:
        raise UserError(f"cannot read {str(path)!r}: {wrong}")
    order = np.argsort(arrays["index"], kind="stable")
    return {name: arrays[name][order] for name in names}


def read_environment(folder: Path) -> dict[str, Any]:
    """Read what a run was computed with; nothing where there is no such file.

    Raises:
        UserError: If it is damaged.
    """
    path = folder / files.ENVIRONMENT
    if not path.exists():
        return {}
    found = files.read_json(path)
    earlier = found.get("earlier", [])
    if not (isinstance(earlier, list) and all(isinstance(each, dict) for each in earlier)):
        raise UserError(f"{str(path)!r} is damaged: earlier={earlier!r} is no list of mappings.")
    return found


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
            facts = files.read_facts(folder / files.weights_file(which))
            found.append(from_record(facts["recipe"]))
    return found


def check_metrics(folder: Path, epochs: int) -> None:
    """Refuse metrics that lack an epoch, or tell of one that was not trained.

    Args:
        folder: The run's folder.
        epochs: Epochs that are done.

    Raises:
        UserError: If they do.
    """
    path = folder / files.METRICS
    there = {line["epoch"] for line in files.read_metrics(path)}
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


# ---- what is wrong with plain values, in words; empty if nothing is ---------------------------


def _wrong_in(summary: Values, *, whole: bool) -> str:
    if summary.get("status") != "done":
        return f"status={summary.get('status')!r} is not 'done'"
    data = summary.get("data")
    wrong = _wrong_data(data) if isinstance(data, dict) else "it has no data"
    if not wrong and not _is(summary.get("seconds"), float):
        wrong = "it has no seconds"
    if not wrong and whole:
        lacking = [key for key, kind in _OF_RUN.items() if not _is(summary.get(key), kind)]
        lacking += [] if isinstance(summary.get("mixer", 0), str | None) else ["mixer"]
        wrong = f"it has no {lacking[0]}" if lacking else ""
    if not wrong and not _are(summary.get("lost", []), str):
        wrong = f"lost={summary['lost']!r} is no list of texts"
    if wrong:
        return wrong
    try:
        task = task_of(summary)
    except UserError as error:
        return str(error)
    return next(filter(None, (_wrong_mark(summary.get(w), w, task) for w in ("last", "best"))), "")


def _wrong_mark(mark: object, which: str, task: TaskKind) -> str:
    if not isinstance(mark, dict) or not {"epoch", "val", "test"} <= mark.keys():
        return f"it lacks the epoch, val and test of {which!r}"
    epoch = mark["epoch"]
    if epoch is not None and (type(epoch) is not int or epoch < 0):
        return f"{which}.epoch={epoch!r} is no epoch"
    for split in ("val", "test"):
        scores = mark[split]
        if not isinstance(scores, dict):
            return f"{which}.{split} is no mapping"
        for name in task.scores:
            needed = name in ("loss", task.score)
            if name not in scores or not _is(scores[name], float, none=not needed):
                return f"{which}.{split} has no {name}"
    return _wrong_classes(mark["test"], which) if task is SEGMENTATION else ""


def _wrong_classes(test: Values, which: str) -> str:
    rows = test.get("classes")
    sound = isinstance(rows, list) and all(
        isinstance(row, dict)
        and all(_is(row.get(key), kind, none=kind is float) for key, kind in _OF_CLASS.items())
        for row in rows
    )
    if not sound:
        return f"{which}.test lacks the scores of each class"
    if test.get("hausdorff_unit") not in ("mm", "px"):
        return f"{which}.test.hausdorff_unit={test.get('hausdorff_unit')!r} is neither mm nor px"
    ok = _is(test.get("hausdorff_mm"), float, none=True) and _is(test.get("hausdorff_missed"), int)
    return "" if ok else f"{which}.test has no distances"


def _wrong_data(data: Values) -> str:
    return next(_faults_of(data), "")


def _faults_of(data: Values) -> Iterator[str]:
    for key, kind in _OF_DATA.items():
        if not _is(data.get(key), kind):
            yield f"data.{key}={data.get(key)!r} is none"
    if not (_are(data.get("classes"), str) and data["classes"]):
        yield "data.classes is no list of names"
    if not (_are(data.get("image_size"), int) and len(data["image_size"]) == 2):
        yield "data.image_size is no height and width"
    sizes, index = data.get("sizes"), data.get("index_sha256")
    for split in ("train", "val", "test"):
        if not isinstance(sizes, dict) or not _is(sizes.get(split), int):
            yield f"data.sizes lacks the number of images of {split}"
        if not isinstance(index, dict) or not _is(index.get(split), str):
            yield f"data.index_sha256 lacks the images of {split}"
    for key in ("notes", "left_out"):
        if not isinstance(data.get(key, []), list):
            yield f"data.{key} is no list"


def _faults_with(
    arrays: Mapping[str, np.ndarray[Any, Any]], names: Sequence[str], data: Values
) -> Iterator[str]:
    classes = len(data["classes"])
    for name in ("index", *names):
        if name not in arrays:
            yield f"{name} is not in it"
        if not np.issubdtype(arrays[name].dtype, np.integer):
            yield f"{name} is {arrays[name].dtype}, no whole numbers"
    images = len(np.unique(arrays["index"]))
    wanted = data.get("sizes", {}).get("test", images)
    if images != wanted:
        yield f"index names {images:,} images, and the run was tested on {wanted:,}"
    for name in ("index", *names):
        shape = (images, classes, 3) if name.endswith("_counts") else (images,)
        if arrays[name].shape != shape:
            yield f"{name} is {arrays[name].shape}, not {shape}"
        most = classes if name == "target" or name.endswith("_pred") else None
        numbers = arrays[name]
        if numbers.min(initial=0) < 0 or (most is not None and numbers.max(initial=0) >= most):
            yield f"{name} holds numbers that are no class and no count"


def _is(value: object, kind: type, *, none: bool = False) -> bool:
    """Whether a plain value is of a type; a whole number counts as a float, a truth as neither."""
    if value is None:
        return none
    return type(value) in ((int, float) if kind is float else (kind,))


def _are(values: object, kind: type) -> bool:
    """Whether a value is a list of a type."""
    return isinstance(values, list) and all(_is(value, kind) for value in values)
