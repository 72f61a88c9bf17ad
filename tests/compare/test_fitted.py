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

from keymix import recipes
from keymix.analysis.answers import whole
from keymix.compare import budget, defaults, plain
from keymix.compare.budget import Trial
from keymix.compare.defaults import (
    AIM,
    FITTED,
    HOST,
    LEAST_EPOCHS,
    fit_to_count,
    fit_to_images,
    is_symbols,
    resized,
    sized,
    updates,
)
from keymix.compare.models import equal_within
from keymix.compare.plan import named_recipe, resolve
from keymix.compare.question import Plan, Question
from keymix.compare.references import known_references
from keymix.compare.run import compare, plan_comparison, rebuild
from keymix.data import load
from keymix.data.dataset import ImageData
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


def recipe_of(data: str, given: dict[str, Any] | None = None) -> Recipe:
    return named_recipe(Question(data=data, overrides=given))[0]


def fitted(spec: str, given: dict[str, Any] | None = None) -> tuple[Recipe, str]:
    recipe = fit_to_images(recipe_of(spec, given), {*(given or {})}, cuda=False)
    return recipe, defaults.used(recipe)


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
    recipe = recipe_of("cifar10")
    assert recipe.name == FITTED
    found = fit_to_count(recipe, set(), train=train)
    assert updates(found, train) >= AIM
    assert found.schedule.epochs >= LEAST_EPOCHS
    assert found.schedule.warmup_epochs == pytest.approx(found.schedule.epochs / 10, abs=1e-3)
    asked = replace_path(recipe, {"schedule.epochs": 2})
    found = fit_to_count(asked, {"schedule.epochs"}, train=train)
    assert (found.schedule.epochs, found.schedule.warmup_epochs) == (2, pytest.approx(0.2))


def test_a_recipe_that_makes_enough_keeps_its_epochs_and_another_gets_more() -> None:
    digits = recipe_of("digits")
    assert fit_to_count(digits, set(), train=1_213) == digits
    assert updates(fit_to_count(digits, set(), train=100), 100) >= AIM


def test_half_the_pixels_have_as_many_tokens_and_a_size_that_is_named_stays(
    make_folder: MakeFolder,
) -> None:
    spec = f"folder:{make_folder({'cat': 6, 'dog': 6}, (250, 300))}"
    recipe, _ = fitted(spec)
    half = resized(recipe, set(), larger=False)
    assert half is not None
    assert (half.data.image_size, half.model.options["patch_size"]) == (64, 8)
    assert half.augment.crop_padding == 8
    whole = resized(recipe, set(), larger=True)
    assert whole is not None
    assert (whole.data.image_size, whole.model.options["patch_size"]) == (224, 16)
    assert resized(recipe, {"data.image_size"}, larger=False) is None
    assert resized(fitted("digits")[0], set(), larger=False) is None


def test_images_that_keep_their_proportions_are_halved_where_they_are_large() -> None:
    recipe = recipes.get("mask_rcnn_small")
    half = resized(recipe, set(), larger=False)
    assert half is not None
    assert half.data.image_size == (96, 160)
    assert resized(half, set(), larger=False) is None
    assert resized(recipe, set(), larger=True) is None
    assert resized(recipe, {"data.image_size"}, larger=False) is None


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
    sure = ClassAnswers.of(linear.evaluated.answers).confidence
    assert ((sure > 1 / len(data.classes)) & (sure <= 1)).all()


def test_frames_and_large_images_are_averaged_to_few_pixels(make_folder: MakeFolder) -> None:
    data = load("moving_digits:100", time_steps=3)
    assert _pixels(data.test).shape == (len(data.test), 2 * 16 * 16)
    root = make_folder({"a": 4, "b": 4}, (40, 24))
    data = load(f"folder:{root}", image_size=(40, 24))
    assert _pixels(data.train).shape[1] == 3 * 16 * 16


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Let a network of a width take this many times the baseline's time."""
    times = {width: (width / 29) ** 1.7 for width in range(plain.LEAST, plain.MOST + 1)}

    def timed(recipe: Recipe, *_: object, **__: object) -> Trial:
        width = recipe.model.options.get("width")
        return Trial(step=10.0 * (times[width] if width else 1.0), image=1e-4)

    monkeypatch.setattr(budget, "timed", timed)
    return times


def planned(**asked: Any) -> tuple[Plan, ImageData]:
    return resolve(Question(**asked), None, say=lambda text: None)


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_references_join_are_outside_tests_and_survive_a_rebuild(
    tmp_path: Path, sizes: dict[int, float]
) -> None:
    for width in sizes:
        sizes[width] = (width / 6) ** 3
    done = small(tmp_path / "out", reference=True)
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
    again = small(tmp_path / "out", reference=True)
    assert again.record.outcome == record.outcome
    assert rebuild(done.out).record.references == record.references
    page = done.report.read_text(encoding="utf-8")
    assert "chosen on validation; accuracy" in page
    assert "plain network" in page


def test_the_width_is_the_one_whose_step_takes_the_baselines_time(sizes: dict[int, float]) -> None:
    plan, _ = planned(data="digits", limit=60, mixers="mhsa,ska", seeds=1)
    (network,) = [m for m in plan.mixers if m.reference]
    assert network.options["width"] in (28, 30)
    assert network.params > 0
    assert f"width {network.options['width']}" in network.note


def test_sizing_ends_in_time_with_the_nearest_width_so_far() -> None:
    now, tried = [0.0], []

    def step(width: int) -> float:
        tried.append(width)
        now[0] += 0.6 * plain.SECONDS
        return 100.0

    assert plain.sized(step, 1.0, clock=lambda: now[0]) == (plain.FIRST, 100.0)
    assert tried == [plain.FIRST]


def test_no_width_is_measured_twice_and_few_are() -> None:
    tried: list[int] = []

    def step(width: int) -> float:
        tried.append(width)
        return 50.0

    width, ratio = plain.sized(step, 1.0)
    assert (width, ratio) == (tried[0], 50.0)
    assert len({*tried}) == len(tried) <= plain.WIDTHS


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
) -> None:
    root = made_masks(tmp_path / "data")
    plan, images = planned(data=f"masks:{root}", mixers="mhsa,kv", reference=False, overrides=given)
    assert plan.recipe.data.test_fraction == share
    assert plan.recipe.augment.vertical_flip is upside_down
    assert plan.recipe.augment.flip
    cases = images.record().cases
    assert cases is not None
    assert cases["test"] == (2 if share == 0.25 else 1)


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


def test_a_plan_trains_nothing_and_says_what_is_used(tmp_path: Path) -> None:
    said: list[str] = []
    question = Question(
        data="digits",
        limit=60,
        mixers="mhsa,ska",
        seeds=1,
        reference=False,
        out=tmp_path / "out",
    )
    text = plan_comparison(question, progress=lambda event: said.append(event.text))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]
    assert "cannot" in text  # one seed shows no equality
    assert any("54 to train on" in line and "vit_nano_p4_12" in line for line in said)


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
