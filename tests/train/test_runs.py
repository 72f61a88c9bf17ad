# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from keymix.data import load
from keymix.data.decode import fit
from keymix.errors import KeymixWarning, UserError
from keymix.tasks.classification.answers import Scores
from keymix.train import files
from keymix.train.engine import train
from keymix.train.evaluation import data_for
from keymix.train.predict import predict
from keymix.train.recipe import Recipe, replace_path
from keymix.train.runs import Run, evaluate, load_run
from keymix.train.scoring import Metrics
from tolerances import close


@pytest.fixture(scope="module")
def done(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = replace_path(tiny_recipe, {"schedule.epochs": 2, "optim.lr": 5e-3})
    return train(recipe, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def copy(done: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done.folder, tmp_path / "copy"))


@pytest.mark.parametrize("which", ["last", "best"])
def test_evaluation_repeats_the_final_test(done: Run, which: str) -> None:
    scores = evaluate(done.folder, which=which)  # type: ignore[arg-type]
    recorded = getattr(done.summary, which).test.scores
    assert scores["top1"] == recorded["top1"]
    assert scores["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
    assert scores["images"] == done.summary.data.sizes["test"]


def test_the_best_epoch_is_that_of_the_score_then_of_the_loss_and_is_tested_itself(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated = [(0.5, 0.1), (0.7, 1.5), (0.7, 2.0)]  # top-1 and loss of each epoch
    computed = Scores.metrics

    def scripted(self: Scores) -> Metrics:
        scores = computed(self)
        if validated:
            scores["top1"], scores["loss"] = validated.pop(0)
        return scores

    monkeypatch.setattr(Scores, "metrics", scripted)
    swift = {"optim.lr": 2e-2, "schedule.name": "constant", "schedule.warmup_epochs": 0}
    run = train(replace_path(tiny_recipe, swift), tmp_path / "run")
    assert [run.summary.best.epoch, run.summary.last.epoch] == [1, 2]
    answers = np.load(run.folder / files.PREDICTIONS)
    assert (answers["best_pred"] != answers["last_pred"]).any()
    for which in ("best", "last"):
        right = (answers[f"{which}_pred"] == answers["target"]).mean()
        assert getattr(run.summary, which).test.scores["top1"] == pytest.approx(right)
        assert evaluate(run.folder, which=which)["top1"] == pytest.approx(right)


def test_model_comes_back_in_eval_mode_without_touching_random_numbers(done: Run) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    model = load_run(done.folder).model()
    assert torch.equal(torch.rand(1), expected)
    assert not model.training


@pytest.mark.parametrize("which", ["last", "best"])
def test_timm_shows_a_loaded_model_the_images_of_its_training(
    done: Run, which: str, tmp_path: Path
) -> None:
    model, data = load_run(done.folder).model(which), load(done.recipe.data.spec)  # type: ignore[arg-type]
    seen = done.summary.data
    assert model.pretrained_cfg["mean"] == tuple(seen.mean)
    assert model.pretrained_cfg["label_names"] == tuple(seen.classes)
    assert model.pretrained_cfg["num_classes"] == len(seen.classes)
    config = resolve_model_data_config(model)
    assert config["input_size"] == (seen.in_chans, *seen.image_size)
    transform = create_transform(**config, is_training=False)
    pixels = data.test.read(0)
    shown = transform(Image.fromarray(pixels[0].numpy()))
    close(shown[None], replace(data, mean=seen.mean, std=seen.std).prepared(pixels[None]))


def test_truncated_weights_are_one_clear_error(copy: Path) -> None:
    path = copy / "weights_last.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"weights_last\.safetensors.* damaged") as refused:
        load_run(copy).model()
    assert "\n" not in str(refused.value)
    assert load_run(copy).model("best") is not None


def test_weights_of_another_model_are_refused(copy: Path) -> None:
    recipe = json.loads((copy / "recipe.json").read_text())
    recipe["model"]["options"]["embed_dim"] = 32
    (copy / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(UserError, match="do not fit"):
        load_run(copy).model()


def test_unfinished_run_says_how_to_go_on(copy: Path) -> None:
    (copy / "summary.json").unlink()
    with pytest.raises(UserError, match="keymix train"):
        _ = load_run(copy).summary


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_folder_without_a_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="run"):
        load_run(tmp_path / name)


def _digit_files(done: Run, folder: Path, count: int) -> list[int]:
    from keymix import data

    digits = data.load("digits", limit=done.recipe.data.limit)
    for i in range(count):
        image = Image.fromarray(digits.test.read(i)[0].numpy())
        target = folder / digits.classes[int(digits.test.labels[i])]
        target.mkdir(parents=True, exist_ok=True)
        image.save(target / f"{i:03d}.png")
    return digits.test.labels[:count].tolist()


def test_prediction_of_files_repeats_the_runs_own(done: Run, tmp_path: Path) -> None:
    import numpy as np

    _digit_files(done, tmp_path, 20)
    answers = predict(done, [tmp_path])
    saved = np.load(done.folder / files.PREDICTIONS)
    classes = done.summary.data.classes
    by_index = dict(zip(saved["index"].tolist(), saved["last_pred"].tolist(), strict=True))
    for answer in answers:
        index = int(Path(answer.path).stem)
        assert answer.error is None
        assert answer.classes[0] == classes[by_index[index]]
        assert len(answer.classes) == 5
        assert list(answer.probabilities) == sorted(answer.probabilities, reverse=True)


@pytest.mark.parametrize("size", [16, (16, 12)])
def test_prediction_at_a_size_is_what_evaluation_scores_there(
    done: Run, tmp_path: Path, size: int | tuple[int, int]
) -> None:
    scores = evaluate(done, image_size=size)
    targets = _digit_files(done, tmp_path, scores["images"])
    answers = predict(done, [tmp_path], top=1, image_size=size)
    right = sum(answer.classes[0] == Path(answer.path).parent.name for answer in answers)
    assert right / len(targets) == scores["top1"]
    own = predict(done, [tmp_path], top=1)
    assert [a.probabilities for a in own] != [a.probabilities for a in answers]


def test_images_larger_than_the_runs_are_cropped_as_it_cropped_them(
    vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    noise = np.random.default_rng(0)
    for split, name in product(("train", "val", "test"), ("a", "b")):
        (tmp_path / "images" / split / name).mkdir(parents=True)
        for i in range(6):
            pixels = noise.integers(0, 255, (140, 140, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{i}.png")
    spec = f"folder:{tmp_path / 'images'}"
    changes = {"data.spec": spec, "data.image_size": 150, "data.limit": None}
    changes |= {"model.options.patch_size": 25, "schedule.epochs": 1}
    run = train(vary(changes), tmp_path / "run")
    model, data = run.model(), load(spec, image_size=150)
    config = resolve_model_data_config(model)
    assert config["crop_pct"] == run.summary.data.crop_pct == 0.875
    transform = create_transform(**config, is_training=False)
    shown = transform(Image.open(tmp_path / "images" / "test" / "a" / "0.png"))
    close(shown[None], data.prepared(data.test.read(0)[None]))


def test_another_size_shows_as_much_of_an_image_as_training_did(done: Run) -> None:
    """In memory or not: what evaluation crops does not depend on the size."""
    seen = replace(done.weights()[1].data, crop_pct=0.75)
    for side in (14, 16, 150):
        loaded = data_for(done.recipe.data, seen, None, (side, side))
        assert loaded.crop_pct == 0.75
        image = fit(loaded.test.own(0), (side, side), 0.75)
        assert torch.equal(loaded.test.read(0), image)


def test_broken_image_is_named_and_the_others_answered(done: Run, tmp_path: Path) -> None:
    _digit_files(done, tmp_path, 3)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG not really")
    (tmp_path / "._000.png").write_bytes(b"a Mac's notes")  # hidden: left out, as in training
    answers = predict(done, [tmp_path], top=2)
    errors = [answer for answer in answers if answer.error is not None]
    assert [Path(answer.path).name for answer in errors] == ["broken.png"]
    assert "broken.png" in str(errors[0].error)
    assert [len(answer.classes) for answer in answers if answer.error is None] == [2, 2, 2]


def test_missing_image_and_empty_folder_are_refused(done: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.png"):
        predict(done, [tmp_path / "gone.png"])
    with pytest.raises(UserError, match="no images"):
        predict(done, [tmp_path])


def test_data_with_unknown_classes_is_refused(done: Run, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(4):
            Image.new("L", (12, 12), 10 * i).save(tmp_path / name / f"{i}.png")
    with pytest.raises(UserError, match=r"cat, dog|channels"):
        evaluate(done, f"folder:{tmp_path}")


def test_data_with_some_of_the_classes_has_the_runs_numbers(
    tiny_recipe: Recipe, tmp_path: Path
) -> None:
    def spec(place: str, *labels: str) -> str:
        for label in labels:
            (tmp_path / place / label).mkdir(parents=True)
            for i in range(12):
                image = Image.new("RGB", (12, 12), (80 * "abc".index(label) + i,) * 3)
                image.save(tmp_path / place / label / f"{i}.png")
        return f"folder:{tmp_path / place}"

    changes = {"data.spec": spec("all", *"abc"), "schedule.epochs": 1}
    run = train(replace_path(tiny_recipe, changes), tmp_path / "run")
    seen = run.summary.data
    data = data_for(run.recipe.data, seen, spec("some", *"bc"), seen.image_size)
    assert data.classes == ("a", "b", "c")
    assert set(data.test.labels.tolist()) == {1, 2}
    classes = [int(data.test.ids(i).split("/")[-2] == "c") + 1 for i in range(len(data.test))]
    assert data.test.labels.tolist() == classes
    found = predict(run, [tmp_path / "some" / "b", tmp_path / "some" / "c"], top=1)
    right = {answer.path: answer.classes[0] == Path(answer.path).parent.name for answer in found}
    share = sum(right[data.test.ids(i)] for i in range(len(data.test))) / len(data.test)
    assert evaluate(run, f"folder:{tmp_path / 'some'}")["top1"] == pytest.approx(share)


def test_run_on_images_that_are_not_square_is_evaluated(
    tiny_recipe: Recipe, tmp_path: Path
) -> None:
    for label, grey in (("dark", 40), ("light", 200)):
        (tmp_path / "set" / label).mkdir(parents=True)
        for i in range(20):
            image = Image.new("RGB", (16, 12), (grey + i,) * 3)
            image.save(tmp_path / "set" / label / f"{i}.png")
    spec = f"folder:{tmp_path / 'set'}"
    recipe = replace_path(tiny_recipe, {"data.spec": spec, "schedule.epochs": 1})
    for given, size in ((None, (12, 16)), ((8, 20), (8, 20))):
        recipe = replace_path(recipe, {"data.image_size": given})
        run = train(recipe, tmp_path / str(given))
        assert train(recipe, run.folder).recipe == recipe  # done: the record is the same recipe
        assert run.summary.data.image_size == size
        evaluated, scored = evaluate(run), run.summary.last.test.scores
        assert {name: evaluated[name] for name in scored} == scored


def _photos(folder: Path, turned: bool = False) -> str:
    for label, grey in (("dark", 40), ("light", 200)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for i in range(20):
            image = Image.new("L", (12, 12), grey + i)
            image.putpixel((0, 0), 255 if turned else 0)
            image.save(folder / label / f"{i:02d}.png")
    return f"folder:{folder}"


def test_images_whose_pixels_changed_are_named(
    tiny_recipe: Recipe, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    spec = _photos(tmp_path / "set")
    changes = {"data.spec": spec, "data.limit": None, "schedule.epochs": 1}
    run = train(replace_path(tiny_recipe, changes), tmp_path / "run")
    evaluate(run)
    assert not [w for w in recwarn if w.category is KeymixWarning]
    _photos(tmp_path / "set", turned=True)  # the same names and splits
    with pytest.warns(KeymixWarning, match="not those that the run was trained with"):
        evaluate(run)
