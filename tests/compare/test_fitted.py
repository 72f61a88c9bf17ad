# SPDX-License-Identifier: Apache-2.0
"""Defaults that follow from the data, points of reference, looks, and what a plan says."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from few_digits import small
from few_masks import made_masks
from PIL import Image

from keymix.analysis.answers import whole
from keymix.compare import plain
from keymix.compare.defaults import (
    AIM,
    FITTED,
    HOST,
    LEAST_EPOCHS,
    fit_to_count,
    fit_to_images,
    is_symbols,
    kept_choices,
    sized,
    updates,
)
from keymix.compare.plan import choose_recipe, equal_within
from keymix.compare.references import known_references
from keymix.compare.run import compare, plan_comparison, rebuild
from keymix.data import load
from keymix.data.headers import Headers, read_headers
from keymix.errors import UserError
from keymix.task import FRACTION, get_task
from keymix.tasks.classification.answers import ClassAnswers
from keymix.tasks.classification.references import _pixels
from keymix.train.parts import answers_of
from keymix.train.recipe import Recipe, replace_path

MakeFolder: TypeAlias = Callable[[dict[str, int], tuple[int, int]], Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Write images of noise, a folder per class; sizes are height and width."""

    def make(counts: dict[str, int], size: tuple[int, int]) -> Path:
        rng, root = np.random.default_rng(0), tmp_path / "images"
        for name, count in counts.items():
            (root / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / name / f"{i}.png")
        return root

    return make


def headers(height: int, width: int, *, same: bool = True) -> Headers:
    return Headers(count=100, size=(height, width), same=same, grey=False, classes=("a", "b"))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((32, 32), ((32, 32), 4)),
        ((28, 30), ((28, 28), 4)),
        ((40, 32), ((40, 32), 4)),
        ((64, 64), ((64, 64), 8)),
        ((41, 300), ((64, 64), 8)),
        ((81, 81), ((128, 128), 16)),
        ((375, 500), ((128, 128), 16)),
    ],
)
def test_the_model_sees_about_64_tokens_of_images_of_any_size(
    size: tuple[int, int], expected: tuple[tuple[int, int], int]
) -> None:
    assert sized(headers(*size), cuda=False) == expected


def test_on_a_gpu_large_images_get_224_pixels() -> None:
    assert sized(headers(375, 500), cuda=True) == ((224, 224), 16)
    assert sized(headers(128, 128), cuda=True) == ((128, 128), 16)


def test_small_images_of_different_sizes_get_one_side() -> None:
    assert sized(headers(30, 34, same=False), cuda=False) == ((28, 28), 4)


def fitted(spec: str, given: dict[str, Any] | None = None) -> tuple[Recipe, str]:
    recipe, _ = choose_recipe(data=spec, recipe=None, overrides=given or {})
    found = fit_to_images(recipe, {*(given or {})}, cuda=False)
    return found.recipe, found.used


def test_size_patches_and_colour_follow_from_the_files(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 6, "dog": 6}, (150, 200))
    recipe, used = fitted(f"folder:{root}")
    assert recipe.data.image_size == 128
    assert (recipe.model.name, recipe.model.options) == (HOST, {"patch_size": 16})
    assert recipe.augment.flip
    assert "12 images of 200x150, resized to 128x128, 25 % of their area cut off" in used
    for i, path in enumerate(sorted(root.rglob("*.png"))):
        Image.fromarray(np.full((64, 64), i, np.uint8)).save(path)
    grey, said = fitted(f"folder:{root}")
    assert (grey.data.image_size, grey.data.channels) == (64, 1)
    assert "grey images of 64x64, as they are" in said
    assert load(f"folder:{root}", image_size=64, channels=1).in_chans == 1


def test_what_is_given_stays(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 6, "dog": 6}, (150, 200))
    given = {"data.image_size": 32, "augment.flip": False}
    recipe, _ = fitted(f"folder:{root}", given)
    assert recipe.data.image_size == 32
    assert not recipe.model.options
    assert not recipe.augment.flip
    own, _ = fitted(f"folder:{root}", {"model.name": "vit_tiny_patch16_224"})
    assert (own.model.name, own.model.options) == ("vit_tiny_patch16_224", {})


@pytest.mark.parametrize(
    ("spec", "classes", "symbols"),
    [
        ("svhn", (), True),
        ("folder:x", ("0", "1", "12"), True),
        ("folder:x", ("A", "b"), True),
        ("folder:traffic_signs", ("stop", "yield"), True),
        ("folder:photos", ("cat", "dog"), False),
        ("cifar10", ("0a", "dog"), False),
    ],
)
def test_digits_letters_and_signs_are_not_mirrored(
    spec: str, classes: tuple[str, ...], symbols: bool
) -> None:
    assert is_symbols(spec, classes) is symbols


@pytest.mark.parametrize("train", [40, 450, 9_000, 60_000])
def test_a_default_training_makes_enough_updates(train: int) -> None:
    recipe, _ = choose_recipe(data="cifar10", recipe=None)
    assert recipe.name == FITTED
    found = fit_to_count(recipe, set(), train=train, before=None)
    assert updates(found, train) >= AIM
    assert found.schedule.epochs >= LEAST_EPOCHS
    assert found.schedule.warmup_epochs == pytest.approx(found.schedule.epochs / 10, abs=1e-3)
    asked = replace_path(recipe, {"schedule.epochs": 2})
    assert fit_to_count(asked, {"schedule.epochs"}, train=train, before=None).schedule.epochs == 2


def test_a_recipe_that_makes_enough_keeps_its_epochs_and_another_gets_more() -> None:
    digits, _ = choose_recipe(data="digits", recipe=None)
    assert fit_to_count(digits, set(), train=1_213, before=None) == digits
    assert updates(fit_to_count(digits, set(), train=100, before=None), 100) >= AIM


def test_a_comparison_that_is_resumed_keeps_its_choices() -> None:
    recipe, _ = choose_recipe(data="cifar10", recipe=None)
    changes = {"data.image_size": 64, "model.options.patch_size": 8, "schedule.epochs": 9}
    before = replace_path(recipe, changes)
    kept = kept_choices(recipe, before, set())
    assert kept is not None
    assert (kept.data.image_size, kept.model.options) == (64, {"patch_size": 8})
    assert fit_to_count(kept, set(), train=50, before=before).schedule.epochs == 9
    assert kept_choices(recipe, None, set()) is None
    assert kept_choices(recipe, replace_path(before, {"data.spec": "svhn"}), set()) is None


def test_the_margin_is_given_in_units_of_the_score() -> None:
    assert equal_within(None, FRACTION) == pytest.approx(0.02)
    assert equal_within(1.5, FRACTION) == pytest.approx(0.015)
    with pytest.raises(UserError, match="margin"):
        equal_within(-1, FRACTION)


# ---- points of reference --------------------------------------------------------------------


def test_logistic_regression_chooses_its_penalty_and_learns() -> None:
    data = load("digits", limit=600)
    largest, linear = answers_of(data.task).references(data)
    assert not largest.learned
    assert linear.learned
    assert whole(linear.evaluated.answers) > whole(largest.evaluated.answers) + 0.1
    assert linear.evaluated.scores["top1"] == pytest.approx(whole(linear.evaluated.answers))
    assert "chosen on validation" in linear.about
    assert linear.validated is not None
    assert linear.validated > (largest.validated or 0) + 0.1
    found = ClassAnswers.of(linear.evaluated.answers)
    assert found.probabilities is not None
    assert np.allclose(found.probabilities.astype(float).sum(1), 1, atol=0.01)


def test_frames_and_large_images_are_averaged_to_few_pixels(make_folder: MakeFolder) -> None:
    data = load("moving_digits:100", time_steps=3)
    assert _pixels(data.test).shape == (len(data.test), 2 * 16 * 16)
    root = make_folder({"a": 4, "b": 4}, (40, 24))
    data = load(f"folder:{root}", image_size=(40, 24))
    assert _pixels(data.train).shape[1] == 3 * 16 * 16


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Let a network of a width take this many times the baseline's time."""
    times: dict[int, float] = {width: (width / 29) ** 1.5 for width in plain.WIDTHS}

    def timed(models: dict[str, Any], *_: object, **__: object) -> dict[str, float]:
        width = models["plain"].get_classifier().in_features // 8
        return {"base": 10.0, "plain": 10.0 * times[width]}

    monkeypatch.setattr(plain, "training_ms", timed)
    return times


@pytest.mark.slow
def test_references_join_are_outside_tests_and_survive_a_rebuild(
    tmp_path: Path, sizes: dict[int, float]
) -> None:
    for width in sizes:
        sizes[width] = width / 6
    done = small(tmp_path / "out", reference=True, seeds=3)
    record = done.record
    assert record.labels == ["softmax", "static_key", "identity", "plain network"]
    (network,) = [m for m in record.mixers if m.reference]
    assert "width 6" in network.note
    rows = {row.mixer: row for row in record.outcome.last}
    assert rows["plain network"].degree is None
    assert rows["plain network"].degree is None
    assert [row.name for row in record.references] == ["largest class", "logistic regression"]
    assert record.recommendation.pick in (None, "softmax", "static_key")
    assert (done.out / "references.json").is_file()
    learning = done.report.read_text(encoding="utf-8").partition("How they learned")[2]
    curves = learning.partition("</section>")[0]
    assert curves.count(">logistic regression</text>") == 1  # in the chart of validation alone
    assert known_references(done.out, record.data).answers
    sizes.clear()  # a second call measures nothing
    again = small(tmp_path / "out", reference=True, seeds=3)
    assert again.record.outcome == record.outcome
    assert rebuild(done.out).record.references == record.references
    page = done.report.read_text(encoding="utf-8")
    assert "chosen on validation; accuracy" in page
    assert "plain network" in page


def test_the_width_is_the_one_whose_step_takes_the_baselines_time(
    sizes: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("keymix.compare.run.expected", lambda plan, _: found.append(plan) or "")
    plan_comparison(data="digits", limit=60, mixers="mhsa,ska", seeds=1)
    (network,) = [m for m in found[0].mixers if m.reference]
    assert network.options == {"width": 28}  # (28 / 29) ** 1.5 is nearer to 1 than of 32
    assert "0.95 of the time" in network.note


@pytest.mark.parametrize(
    ("given", "share", "upside_down"),
    [
        ({}, 0.25, False),
        ({"data.test_fraction": 0.1, "augment.vertical_flip": True}, 0.1, True),
    ],
)
def test_few_cases_give_a_quarter_to_the_test_split(
    given: dict[str, Any],
    share: float,
    upside_down: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("keymix.compare.run.expected", lambda *both: found.append(both) or "")
    root = made_masks(tmp_path / "data")
    plan_comparison(data=f"masks:{root}", mixers="mhsa,kv", reference=False, overrides=given)
    ((plan, images),) = found
    assert plan.recipe.data.test_fraction == share
    assert plan.recipe.augment.vertical_flip is upside_down
    assert plan.recipe.augment.flip
    cases = images.record().cases
    assert cases is not None
    assert cases["test"] == (2 if share == 0.25 else 1)


def test_a_resumed_comparison_keeps_its_test_split(tmp_path: Path) -> None:
    before, _ = choose_recipe(data=f"masks:{tmp_path}", recipe=None)
    kept = kept_choices(before, replace_path(before, {"data.test_fraction": 0.04}), set())
    assert kept is not None
    assert kept.data.test_fraction == 0.04


# ---- looks and files ------------------------------------------------------------------------


@pytest.mark.slow
def test_further_seeds_are_a_further_look_and_a_repetition_is_none(tmp_path: Path) -> None:
    first = small(tmp_path / "out", seeds=2)
    assert (first.record.looks, first.record.alpha) == ((2,), pytest.approx(0.05))
    assert small(tmp_path / "out", seeds=2).record.looks == (2,)
    second = small(tmp_path / "out", seeds=3)
    assert (second.record.looks, second.record.alpha) == ((2, 3), pytest.approx(0.025))
    row = second.record.outcome.last[1]
    assert row.interval is not None
    assert row.interval.level == pytest.approx(0.975)
    assert (first.record.look, second.record.look) == (1, 2)
    assert "This is look 2, at 2.5 %." in second.report.read_text(encoding="utf-8")
    assert rebuild(second.out).record.looks == (2, 3)


def test_differences_are_written_with_their_certainty(finished: Path) -> None:
    with (finished / "differences.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    record = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    assert {(r["mixer"], r["epoch"]) for r in rows} == {
        (mixer, epoch) for mixer in ("static_key", "identity") for epoch in ("last", "best")
    }
    mine = {row["mixer"]: row for row in record["outcome"]["last"]}
    for row in rows:
        if row["epoch"] == "last":
            assert float(row["difference"]) == mine[row["mixer"]]["interval"]["difference"]
            assert row["degree"] == mine[row["mixer"]]["degree"]


def test_a_plan_writes_nothing_and_says_what_is_used(tmp_path: Path) -> None:
    said: list[str] = []
    text = plan_comparison(
        data="digits",
        limit=60,
        mixers="mhsa,ska",
        seeds=1,
        reference=False,
        out=tmp_path / "out",
        progress=lambda event: said.append(event.text),
    )
    assert "runs" in text
    assert not (tmp_path / "out").exists()
    assert "cannot" in text  # one seed shows no equality
    assert any("54 to train on" in line and "vit_nano_p4_12" in line for line in said)
    with pytest.raises(TypeError, match="nothing"):
        plan_comparison(nothing=1)


# ---- the score that decides -----------------------------------------------------------------


def test_uneven_classes_are_compared_by_balanced_accuracy(make_folder: MakeFolder) -> None:
    task = get_task("classification")
    assert task.decided_by([100, 100, 100]) is None
    assert task.decided_by([130, 100, 70]) is None
    assert task.decided_by([140, 100, 60]) == "balanced"
    assert task.decided_by([]) is None
    data = load(f"folder:{make_folder({'a': 30, 'b': 10}, (12, 12))}", image_size=12)
    assert data.task.score.key == data.record().task_kind.score.key == "balanced"
    assert {s.key for s in data.task.scores} == {s.key for s in task.scores}


@pytest.mark.slow
def test_a_run_on_uneven_classes_ranks_epochs_and_reports_by_it(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder({"a": 60, "b": 20}, (12, 12))
    done = compare(
        data=f"folder:{root}",
        recipe="digits_vit",
        mixers="mhsa",
        seeds=1,
        epochs=2,
        reference=False,
        processes=1,
        out=tmp_path / "out",
        overrides={"data.channels": 1, "data.image_size": 12},
    )
    assert done.record.data.compared_by == "balanced"
    row = done.record.outcome.last[0]
    stored = done.record.finished("softmax")[0].last.test
    assert row.scores["balanced"].mean == stored["balanced"]
    assert "balanced accuracy" in done.report.read_text(encoding="utf-8")


def test_headers_pass_over_broken_images(make_folder: MakeFolder) -> None:
    root = make_folder({"a": 5, "b": 5}, (50, 40))
    next(iter(sorted(root.rglob("*.png")))).write_bytes(b"no image")
    found = read_headers(f"folder:{root}")
    assert (found.count, found.size, found.same) == (10, (50, 40), True)
