# SPDX-License-Identifier: Apache-2.0
"""Damaged files of a run: written again from a whole checkpoint, or a clear stop."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import traces

from keymix.cli import main
from keymix.errors import KeymixWarning, UserError
from keymix.models import create_model, load_weights
from keymix.records import FormatError
from keymix.train import files
from keymix.train.checkpoints import DamagedRun, checkpoints
from keymix.train.engine import train
from keymix.train.recipe import Recipe, replace_path
from keymix.train.record import FORMAT
from keymix.train.runs import Run, load_run

Spoil = Callable[[Path], object]
LAST, BEST = files.weights_file("last"), files.weights_file("best")


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe) -> Recipe:
    """A run whose best epoch is not its last."""
    changes = {"schedule.epochs": 4, "schedule.warmup_epochs": 0.0, "schedule.name": "constant"}
    return replace_path(tiny_recipe, {**changes, "optim.lr": 0.02})


@pytest.fixture(scope="module")
def done(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(recipe, tmp_path_factory.mktemp("damage") / "run")
    assert run.summary.best.epoch < run.summary.last.epoch
    return run


@pytest.fixture
def copy(done: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done.folder, tmp_path / "copy"))


@pytest.fixture
def cut(copy: Path) -> Path:
    """The run as a kill in its last epoch leaves it, with one checkpoint."""
    for name in (files.SUMMARY, files.PREDICTIONS, LAST):
        (copy / name).unlink()
    checkpoints(copy)[0].path.unlink()
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def torn(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flipped(path: Path, place: str) -> None:
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    number = content.index(b'\\"lr\\":')  # of the recipe, among the facts
    at = {"facts": number + 10, "first number": 8 + header, "last number": len(content) - 2}[place]
    content[at] ^= 1
    path.write_bytes(content)


def written(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def halved(name: str) -> Spoil:
    return lambda folder: torn(folder / name)


def other_answers(folder: Path) -> None:
    with np.load(folder / files.PREDICTIONS) as stored:
        arrays = {name: array[1:] for name, array in stored.items()}
    files.write_arrays(folder / files.PREDICTIONS, arrays)


def without_a_score(folder: Path) -> None:
    summary = files.read_json(folder / files.SUMMARY)
    del summary["best"]["val"]["top1"]
    files.write_json(folder / files.SUMMARY, summary)


def torn_line(folder: Path) -> None:
    path = folder / files.METRICS
    path.write_bytes(path.read_bytes()[:-30])


DERIVED: dict[str, tuple[str, Spoil]] = {
    "half a summary": (files.SUMMARY, halved(files.SUMMARY)),
    "summary without a score": (files.SUMMARY, without_a_score),
    "half the predictions": (files.PREDICTIONS, halved(files.PREDICTIONS)),
    "predictions of other images": (files.PREDICTIONS, other_answers),
    "half the environment": (files.ENVIRONMENT, halved(files.ENVIRONMENT)),
    "a torn line": (files.METRICS, torn_line),
    "half the weights": (LAST, halved(LAST)),
    "a flipped number": (LAST, lambda folder: flipped(folder / LAST, "last number")),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DERIVED)
def test_a_damaged_file_of_a_finished_run_is_written_again(
    done: Run, copy: Path, recipe: Recipe, what: str
) -> None:
    name, spoil = DERIVED[what]
    spoil(copy)
    with pytest.warns(KeymixWarning, match=name.replace(".", r"\.")):
        again = train(recipe, copy)
    assert again.summary == done.summary
    for each in (files.SUMMARY, files.PREDICTIONS, files.METRICS, files.RECIPE, LAST, BEST):
        assert (copy / each).read_bytes() == (done.folder / each).read_bytes()
    unknown = [{}] if name == files.ENVIRONMENT else None  # what it was trained with before
    assert files.read_json(copy / files.ENVIRONMENT).get("earlier") == unknown
    before = contents(copy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(recipe, copy)
    assert contents(copy) == before


@pytest.mark.parametrize("which", [LAST, BEST])
@pytest.mark.parametrize("place", ["facts", "first number", "last number"])
def test_a_flipped_bit_of_weights_is_refused_in_one_line(
    done: Run,
    copy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
    which: str,
) -> None:
    flipped(copy / which, place)
    weights = which.removeprefix("weights_").removesuffix(".safetensors")
    assert main(["eval", str(copy), "--weights", weights]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert which in said
    assert "keymix train" in said
    if which == LAST:  # what a training starts from
        sizes = {"img_size": 12, "in_chans": 1, "num_classes": 10}
        model = create_model("vit_nano_p2_12", **sizes, **done.recipe.model.options)
        load_weights(model, done.folder)
        with pytest.raises(UserError, match=r"weights_last\.safetensors"):
            load_weights(model, copy)


def test_a_run_without_a_checkpoint_starts_from_the_beginning(
    done: Run, cut: Path, recipe: Recipe
) -> None:
    """As one that was killed before its first one, with the weights of an epoch there."""
    checkpoints(cut)[0].path.unlink()
    torn_line(cut)
    torn(cut / BEST)
    train(recipe, cut)
    assert traces(cut) == traces(done.folder)


def test_lines_of_a_killed_run_come_from_the_checkpoint(
    done: Run, cut: Path, recipe: Recipe
) -> None:
    torn(cut / files.METRICS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(recipe, cut)
    assert traces(cut) == traces(done.folder)
    kept = (done.folder / files.METRICS).read_bytes().splitlines()[:3]
    assert (cut / files.METRICS).read_bytes().splitlines()[:3] == kept


@pytest.mark.parametrize("finished", [True, False])
def test_checkpoints_of_which_none_loads_stop_the_run(
    copy: Path, recipe: Recipe, finished: bool
) -> None:
    there = checkpoints(copy)
    for checkpoint in there:
        torn(checkpoint.path)
    if finished:
        torn(copy / files.PREDICTIONS)
    else:
        (copy / files.SUMMARY).unlink()
    before = contents(copy)
    with pytest.raises(DamagedRun, match="--overwrite") as refused:
        train(recipe, copy)
    assert "\n" not in str(refused.value)
    assert all(checkpoint.path.name in str(refused.value) for checkpoint in there)
    assert contents(copy) == before


def test_a_finished_run_that_lost_its_checkpoints_is_not_trained_over(
    copy: Path, recipe: Recipe
) -> None:
    shutil.rmtree(copy / files.CHECKPOINTS)
    train(recipe, copy)  # it is whole without them
    torn(copy / files.SUMMARY)
    before = contents(copy)
    with pytest.raises(DamagedRun, match=r"summary\.json.*--overwrite"):
        train(recipe, copy)
    assert contents(copy) == before


@pytest.mark.parametrize("spoil", [torn, Path.unlink])
def test_a_run_whose_best_weights_are_gone_stops(
    cut: Path, recipe: Recipe, spoil: Callable[[Path], object]
) -> None:
    spoil(cut / BEST)
    before = contents(cut)
    with pytest.raises(DamagedRun, match=r"weights_best\.safetensors.*--overwrite"):
        train(recipe, cut)
    assert contents(cut) == before


@pytest.mark.parametrize("content", [b"{}", b'{"name"', b""])
def test_a_run_whose_recipe_is_damaged_stops(copy: Path, recipe: Recipe, content: bytes) -> None:
    (copy / files.RECIPE).write_bytes(content)
    with pytest.raises(DamagedRun, match=r"recipe\.json.*--overwrite"):
        train(recipe, copy)
    assert train(replace_path(recipe, {"schedule.epochs": 1}), copy, overwrite=True).done


def test_weights_of_an_epoch_that_is_trained_again_keep_their_own_scores(
    done: Run, cut: Path, recipe: Recipe
) -> None:
    """As where a run was killed after better weights and before its checkpoint, on a GPU."""
    state, facts = files.read_weights(cut / BEST)
    other = {"loss": 0.5, "top1": 1.0, "top5": 1.0, "balanced": 1.0}
    files.write_weights(cut / BEST, state, replace(facts, epoch=3, val=other))
    again = train(recipe, cut)
    assert again.summary.best.epoch == 3
    assert again.summary.best.val == other
    assert again.summary.best.test == done.summary.best.test  # of these weights


def lines_but_one(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content["record"], "lines": content["record"]["lines"][1:]}


CRAFTED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another program's": lambda content: {"state_dict": content["model"]},
    "no record": lambda content: {k: v for k, v in content.items() if k != "record"},
    "a line less": lambda content: {**content, "record": lines_but_one(content)},
    "weights of a list": lambda content: {**content, "model": [1]},
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_checkpoint_of_wrong_types_does_not_load(
    done: Run, copy: Path, recipe: Recipe, what: str
) -> None:
    (copy / files.SUMMARY).unlink()
    newest, older = checkpoints(copy)
    content = torch.load(newest.path, weights_only=True)
    torch.save(CRAFTED[what](content), newest.path)
    kept = older.path.read_bytes()
    older.path.unlink()
    with pytest.raises(DamagedRun, match=newest.path.name):
        train(recipe, copy)
    older.path.write_bytes(kept)
    with pytest.warns(KeymixWarning, match=newest.path.name):
        train(recipe, copy)
    assert traces(copy) == traces(done.folder)


def test_a_checkpoint_of_another_format_is_refused(cut: Path, recipe: Recipe) -> None:
    path = checkpoints(cut)[0].path
    content = torch.load(path, weights_only=True)
    torch.save({**content, "format": FORMAT - 1}, path)
    with pytest.raises(FormatError, match=rf"{path.name}' has format 2, .* format {FORMAT}"):
        train(recipe, cut)


def test_weights_that_were_taken_away_leave_a_run_done(copy: Path, recipe: Recipe) -> None:
    shutil.rmtree(copy / files.CHECKPOINTS)
    for name in (LAST, BEST):
        (copy / name).unlink()
    assert train(recipe, copy).summary.status == "done"
    with pytest.raises(UserError, match=r"weights_last\.safetensors"):
        load_run(copy).model()


def test_a_damaged_summary_is_named_with_a_remedy_where_it_is_read(copy: Path) -> None:
    without_a_score(copy)
    with pytest.raises(UserError, match=r"summary\.json.*keymix train"):
        _ = load_run(copy).summary
