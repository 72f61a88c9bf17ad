# SPDX-License-Identifier: Apache-2.0
"""Whose folder is it: whether a run may start, must resume, or is done there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keymix.errors import UserError
from keymix.train import files
from keymix.train.damage import RETESTED, damage, holds_run, recorded_recipe
from keymix.train.lock import LOCK
from keymix.train.recipe import Recipe


def is_done(folder: Path, recipe: Recipe, *, overwrite: bool) -> bool:
    """See whether a run may have a folder, and whether it is done there. Nothing is touched.

    Args:
        folder: The run's folder; it need not exist.
        recipe: The run that wants it.
        overwrite: Whether a run that is there may be thrown away; then nothing is done.

    Raises:
        UserError: If the folder holds another run, or files that are no run's.
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
    there = _flat(recorded_recipe(folder).to_dict())
    here = _flat(recipe.to_dict())
    differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if differing:
        told = "; ".join(f"{k} is {there.get(k)!r} there, {here.get(k)!r} here" for k in differing)
        raise UserError(
            f"the folder {str(folder)!r} holds another run: {told}. Name another folder with "
            "--out, or throw that run away with --overwrite."
        )
    return is_finished(folder)


def is_finished(folder: Path) -> bool:
    """Whether a run is done and its files are whole.

    Args:
        folder: The run's folder.

    Raises:
        UserError: If what came out of it is damaged, and nothing is left to write it from.
    """
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
    """Whether a finished run has something left that can be tested again.

    Args:
        folder: The run's folder.
    """
    left = [*(folder / files.CHECKPOINTS).glob("*.ckpt"), folder / files.weights_file("last")]
    return any(path.exists() for path in left)


def recorded_in(folder: Path) -> Recipe | None:
    """Return the recipe of the run in a folder; None where there is none.

    Raises:
        UserError: If its record is damaged, and no weights keep it.
    """
    return recorded_recipe(folder) if holds_run(folder) else None


def _is_content(path: Path) -> bool:
    """Whether a file is more than what a run leaves that was killed before its first one."""
    return path not in (path.parent / LOCK, files.part_of(path.parent / files.RECIPE))


def run_folder(path: Path) -> Path:
    """A run's folder, given itself or a file in it.

    Raises:
        UserError: If there is no run.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise UserError(f"there is no run {str(path)!r}: name the folder given as --out to train.")
    if not holds_run(folder):
        raise UserError(f"{str(path)!r} is no run's folder: it holds no {files.RECIPE}.")
    return folder


def clear(folder: Path, *, recipe: bool = True) -> None:
    """Remove a run's own files from its folder.

    Args:
        folder: The run's folder.
        recipe: Remove the recipe, too, last of all.
    """
    shutil.rmtree(folder / files.CHECKPOINTS, ignore_errors=True)
    names = [
        files.SUMMARY,
        files.METRICS,
        files.PREDICTIONS,
        files.ENVIRONMENT,
        files.NONFINITE,
        files.SWAP,
        files.weights_file("last"),
        files.weights_file("best"),
    ]
    for name in [*names, files.RECIPE] if recipe else names:
        (folder / name).unlink(missing_ok=True)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return dict(_items(values, prefix))


def _items(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _items(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
