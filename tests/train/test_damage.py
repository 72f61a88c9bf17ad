# SPDX-License-Identifier: Apache-2.0
"""Damaged files of a run: what can be had of checkpoint and weights is rebuilt, or named."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from keymix.cli import main
from keymix.errors import KeymixWarning, UserError
from keymix.train import files
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.recipe import Recipe, from_dict
from keymix.train.record import FORMAT
from keymix.train.runs import Run, load_run

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe) -> Recipe:
    """A run whose best epoch is not its last."""
    values = tiny_recipe.to_dict()
    values["schedule"] |= {"epochs": 4, "warmup_epochs": 0.0, "name": "constant"}
    values["optim"]["lr"] = 0.02
    return from_dict(values)


@pytest.fixture(scope="module")
def done(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(recipe, tmp_path_factory.mktemp("damage") / "run")
    assert run.summary.best.epoch < run.summary.last.epoch
    return run


@pytest.fixture
def copy(done: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done.folder, tmp_path / "copy"))


def lines_of(folder: Path) -> list[str]:
    return (folder / files.METRICS).read_text("utf-8").splitlines()


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / files.CHECKPOINTS)


def cut(text: list[str]) -> str:
    return "\n".join(text[:2]) + "\n"


METRICS: dict[str, Callable[[list[str]], str | None]] = {
    "truncated": cut,
    "half a line": lambda text: "\n".join(text)[:-30],
    "garbled": lambda text: '\x00{"epoch":\n[1]\n7\n{"epoch": true}\n' + text[1],
    "empty": lambda text: "",
    "missing": lambda text: None,
    "deep": lambda text: "[" * 100_000,
    "duplicated": lambda text: "\n".join(
        [*text, text[1], text[1].replace('"epoch": 1', '"epoch": 2')]
    ),
    "beyond": lambda text: "\n".join([*text, text[3].replace('"epoch": 3', '"epoch": 4')]),
}


@pytest.mark.parametrize("which", ["last", "best"])
def test_weights_whose_loss_is_lost_are_scored_again(
    done: Run, copy: Path, recipe: Recipe, which: str
) -> None:
    path = copy / files.weights_file(which)
    state, facts = files.read_weights(path)
    files.write_weights(path, state, replace(facts, val={**(facts.val or {}), "loss": None}))
    (copy / files.SUMMARY).unlink()
    (copy / files.METRICS).unlink()
    without_checkpoints(copy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = train(recipe, copy)
    kept, now = getattr(done.summary, which), getattr(again.summary, which)
    assert now.val["loss"] == pytest.approx(kept.val["loss"], rel=1e-6)
    assert now.val["top1"] == kept.val["top1"]


@pytest.mark.slow
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("how", METRICS)
def test_metrics_are_checked_against_the_checkpoint(
    done: Run, copy: Path, recipe: Recipe, how: str, ended: bool
) -> None:
    text = METRICS[how](lines_of(copy))
    (copy / files.METRICS).unlink()
    if text is not None:
        (copy / files.METRICS).write_text(text, "utf-8")
    if not ended:
        (copy / files.SUMMARY).unlink()
        (copy / files.weights_file("last")).unlink()
        checkpoints(copy)[0].path.unlink()  # one epoch is to be trained
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = train(recipe, copy)
    harmless = not ended and how in ("beyond", "half a line")  # as a kill leaves them
    assert any(files.METRICS in str(w.message) for w in said) != harmless
    timeless = ("seconds", "images_per_s")
    kept = [{k: v for k, v in line.items() if k not in timeless} for line in again.metrics()]
    assert kept == [{k: v for k, v in ln.items() if k not in timeless} for ln in done.metrics()]
    for which in ("last", "best"):
        assert getattr(again.summary, which) == getattr(done.summary, which)
    assert not again.summary.lost


@pytest.mark.parametrize("summary", ["done", "missing"])
def test_lines_that_nothing_keeps_are_named_as_lost(
    done: Run, copy: Path, recipe: Recipe, summary: str
) -> None:
    without_checkpoints(copy)
    (copy / files.METRICS).write_text(cut(lines_of(copy)), "utf-8")
    if summary == "missing":
        (copy / files.SUMMARY).unlink()
    with pytest.warns(KeymixWarning, match=r"metrics\.jsonl lacks the lines of epochs 3, 4"):
        again = train(recipe, copy)
    for which in ("last", "best"):  # the weights keep their epochs and scores
        assert getattr(again.summary, which) == getattr(done.summary, which)
    (line,) = again.summary.lost
    assert "3, 4" in line
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeymixWarning)
        assert train(recipe, copy).summary.lost == (line,)  # done, with what is lost


def test_best_weights_that_are_gone_are_named_and_never_paired_with_their_scores(
    done: Run, copy: Path, recipe: Recipe
) -> None:
    (copy / files.SUMMARY).unlink()
    (copy / files.weights_file("best")).write_bytes(b"torn")
    with pytest.warns(KeymixWarning, match=r"weights_best\.safetensors .* missing or damaged"):
        again = train(recipe, copy)
    assert again.summary.last == again.summary.best == done.summary.last
    assert again.model("best") is not None


def test_weights_of_an_epoch_that_is_trained_again_keep_their_own_scores(
    done: Run, copy: Path, recipe: Recipe
) -> None:
    """As where a run was killed after better weights and before its checkpoint, on a GPU."""
    for name in (files.SUMMARY, files.weights_file("last")):
        (copy / name).unlink()
    path = copy / files.weights_file("best")
    state, facts = files.read_weights(path)
    facts = replace(facts, epoch=3, val={"loss": 0.5, "top1": 1.0, "top5": 1.0})
    files.write_weights(path, state, facts)
    checkpoints(copy)[0].path.unlink()
    again = train(recipe, copy)
    assert again.summary.best.epoch == 3
    assert again.summary.best.val == facts.val
    assert again.summary.best.test == done.summary.best.test  # of these weights


def written(name: str, content: str | bytes) -> Spoil:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def halved(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


def keyless(*keys: str) -> Spoil:
    def spoil(folder: Path) -> None:
        summary = json.loads((folder / files.SUMMARY).read_text("utf-8"))
        place = summary
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]
        (folder / files.SUMMARY).write_text(json.dumps(summary), "utf-8")

    return spoil


def other_answers(folder: Path) -> None:
    with np.load(folder / files.PREDICTIONS) as stored:
        arrays = dict(stored)
    arrays["last_pred"] = arrays["last_pred"] + 90
    files.write_arrays(folder / files.PREDICTIONS, arrays)


DAMAGE: dict[str, tuple[str, Spoil]] = {
    "summary without last": (files.SUMMARY, keyless("last")),
    "summary without a score": (files.SUMMARY, keyless("best", "val", "top1")),
    "summary without data": (files.SUMMARY, keyless("data")),
    "summary without model": (files.SUMMARY, keyless("model")),
    "half a summary": (files.SUMMARY, halved(files.SUMMARY)),
    "deep summary": (files.SUMMARY, written(files.SUMMARY, '{"a":' * 5000 + "1" + "}" * 5000)),
    "deeper summary": (files.SUMMARY, written(files.SUMMARY, "[" * 100_000)),
    "summary of a huge number": (files.SUMMARY, written(files.SUMMARY, "9" * 5000)),
    "summary of a list": (files.SUMMARY, written(files.SUMMARY, '[{"status": "done"}]')),
    "summary of nothing": (files.SUMMARY, written(files.SUMMARY, b"\xff\xfe")),
    "half the predictions": (files.PREDICTIONS, halved(files.PREDICTIONS)),
    "no predictions": (files.PREDICTIONS, lambda folder: (folder / files.PREDICTIONS).unlink()),
    "predictions of no class": (files.PREDICTIONS, other_answers),
    "half the environment": (files.ENVIRONMENT, halved(files.ENVIRONMENT)),
    "environment of a list": (files.ENVIRONMENT, written(files.ENVIRONMENT, "[]")),
    "earlier environment": (files.ENVIRONMENT, written(files.ENVIRONMENT, '{"earlier": 3}')),
    "half a recipe": (files.RECIPE, halved(files.RECIPE)),
    "no recipe": (files.RECIPE, lambda folder: (folder / files.RECIPE).unlink()),
    "empty recipe": (files.RECIPE, written(files.RECIPE, "{}")),
    "last weights": ("weights_last.safetensors", halved("weights_last.safetensors")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kept"),
    [
        (what, kept)
        for what, (name, _) in DAMAGE.items()
        for kept in ("checkpoint", "weights")
        if kept == "checkpoint" or not name.startswith("weights")
    ],
)
def test_a_damaged_file_of_a_finished_run_is_written_again(
    done: Run, copy: Path, recipe: Recipe, what: str, kept: str
) -> None:
    name, spoil = DAMAGE[what]
    if kept == "weights":
        without_checkpoints(copy)
    spoil(copy)
    with pytest.warns(KeymixWarning, match=name.replace(".", r"\.")):
        again = train(recipe, copy)
    assert again.summary == done.summary
    assert again.recipe == recipe
    if name == files.ENVIRONMENT:  # which nobody knows any more
        assert files.read_json(copy / name) == {}
    else:
        assert (copy / name).read_bytes() == (done.folder / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    train(recipe, copy)
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


@pytest.mark.parametrize("what", ["half a summary", "half the predictions", "half a recipe"])
def test_what_nothing_is_left_to_write_from_is_one_line_and_trains_nothing(
    copy: Path, recipe: Recipe, what: str
) -> None:
    name, spoil = DAMAGE[what]
    without_checkpoints(copy)
    for which in ("last", "best"):
        (copy / files.weights_file(which)).unlink()
    spoil(copy)
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as refused:
        train(recipe, copy)
    assert "--overwrite" in str(refused.value)
    assert not (copy / files.CHECKPOINTS).exists()


def test_a_finished_run_whose_checkpoints_and_weights_are_all_torn_is_not_trained_over(
    copy: Path, recipe: Recipe
) -> None:
    for checkpoint in checkpoints(copy):
        checkpoint.path.write_bytes(b"torn")
    (copy / files.weights_file("last")).write_bytes(b"torn")
    halved(files.PREDICTIONS)(copy)
    with (
        pytest.warns(KeymixWarning, match="is damaged"),
        pytest.raises(UserError, match="--overwrite"),
    ):
        train(recipe, copy)


def test_weights_that_were_taken_away_leave_a_run_done(copy: Path, recipe: Recipe) -> None:
    without_checkpoints(copy)
    for which in ("last", "best"):
        (copy / files.weights_file(which)).unlink()
    assert train(recipe, copy).summary.status == "done"


def test_a_damaged_summary_is_named_with_a_remedy_where_it_is_read(copy: Path) -> None:
    keyless("last")(copy)
    with pytest.raises(UserError, match=r"summary\.json.*keymix train"):
        _ = load_run(copy).summary


def test_a_run_without_a_whole_recipe_is_read_by_that_of_its_weights(
    copy: Path, recipe: Recipe
) -> None:
    halved(files.RECIPE)(copy)
    with pytest.warns(KeymixWarning, match=r"recipe\.json"):
        assert load_run(copy).recipe == recipe


def test_the_terminal_says_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", "digits_vit", "--limit", "80", "--epochs", "2", "--data.batch_size", "32"]
    words += ["--schedule.warmup_epochs=0", "--out", str(out)]
    assert main(words) == 0
    without_checkpoints(out)
    (out / files.SUMMARY).unlink()
    (out / files.METRICS).write_text("", "utf-8")
    capsys.readouterr()
    assert main(words) == 0
    printed = capsys.readouterr()
    assert any("metrics.jsonl lacks" in line for line in printed.err.splitlines())
    assert "last\t2\t" in printed.out


def test_files_without_weights_or_facts_are_one_line(tmp_path: Path) -> None:
    path, state = tmp_path / "w.safetensors", {"a": torch.ones(1)}
    for facts in ({}, {"recipe": {}}, {"recipe": {}, "data": []}):
        facts["format"] = FORMAT
        files.write_weights(path, state, facts)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"w\.safetensors' are damaged"):
            files.read_facts(path)
