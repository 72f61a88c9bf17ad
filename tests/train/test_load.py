# SPDX-License-Identifier: Apache-2.0
"""A loaded run answers files and images in memory alike, as ``keymix predict`` does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import keymix
from keymix.cli import main
from keymix.data.sources.moving_digits import recordings_of
from keymix.errors import UserError
from keymix.tasks.segmentation.predict_masks import predict_masks
from keymix.train import files
from keymix.train.predict import TrainedModel
from keymix.train.runs import load_run
from tolerances import close
from written_masks_run import written_masks_run


@pytest.fixture(scope="module")
def trained(tiny_run: Path) -> TrainedModel:
    return keymix.load(tiny_run)


@pytest.fixture(scope="module")
def digits(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Test images of the run, as files named by their number."""
    from keymix import data

    folder = tmp_path_factory.mktemp("digits")
    test = data.load("digits", limit=load_run(tiny_run).recipe.data.limit).test
    for i in range(5):
        Image.fromarray(test.read(i)[0].numpy()).save(folder / f"{i:03d}.png")
    return folder


def pixels_of(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def test_a_loaded_run_has_its_model_classes_task_and_recipe(
    trained: TrainedModel, tiny_run: Path
) -> None:
    run = load_run(tiny_run)
    assert trained.classes == run.summary.data.classes
    assert trained.recipe == run.recipe
    assert trained.task.score.key == "top1"
    assert not trained.model.training
    state, own = trained.model.state_dict(), run.model().state_dict()
    assert all(torch.equal(state[name].cpu(), own[name]) for name in own)


def test_answers_are_those_that_the_run_stored(trained: TrainedModel, digits: Path) -> None:
    stored = np.load(trained.run.folder / files.PREDICTIONS)
    row = {int(index): i for i, index in enumerate(stored["index"])}
    for i, found in enumerate(trained.predict(digits, top=10)):
        assert found.classes[0] == trained.classes[stored["last_pred"][row[i]]]
        sure = stored["last_confidence"][row[i]]
        assert found.probabilities[0] == pytest.approx(sure, abs=1e-3)  # stored as halves


def test_answers_are_those_of_the_command(
    trained: TrainedModel, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(trained.run.folder), str(digits), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for line, found in zip(printed, trained.predict(digits), strict=True):
        assert line["image"] == found.path
        assert [each["class"] for each in line["top"]] == list(found.classes)
        assert [each["probability"] for each in line["top"]] == list(found.probabilities)


FORMS: dict[str, Callable[[Path], object]] = {
    "text": str,
    "picture": Image.open,
    "array": pixels_of,
    "array with a channel": lambda path: pixels_of(path)[..., None],
    "colour": lambda path: np.stack([pixels_of(path)] * 3, -1),
    "tensor": lambda path: torch.tensor(pixels_of(path))[None],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_and_its_pixels_are_answered_alike(
    trained: TrainedModel, digits: Path, form: str
) -> None:
    path = digits / "002.png"
    wanted, found = trained.predict(path), trained.predict(FORMS[form](path))
    assert found.classes == wanted.classes
    assert found.probabilities == pytest.approx(wanted.probabilities, rel=1e-5)


def test_what_transform_returns_is_what_the_model_takes(
    trained: TrainedModel, digits: Path
) -> None:
    shown = trained.transform(digits / "001.png")
    data = trained.data
    pixels = torch.tensor(pixels_of(digits / "001.png"))[None].float()
    close(shown, (pixels / 255 - data.mean[0]) / data.std[0])
    with torch.inference_mode():
        shares = trained.model(shown[None].to(next(trained.model.parameters()).device)).softmax(1)
    found = trained.predict(shown, top=1)
    assert found.probabilities[0] == pytest.approx(float(shares.max()), rel=1e-5)
    assert found.classes == (trained.classes[int(shares.argmax())],)


def test_several_are_answered_in_order_whatever_they_are(
    trained: TrainedModel, digits: Path
) -> None:
    paths = sorted(digits.iterdir())
    wanted = [each.probabilities for each in trained.predict(digits)]
    arrays = np.stack([pixels_of(path) for path in paths])[..., None]
    mixed = [
        paths[0],
        str(paths[1]),
        arrays[2],
        Image.open(paths[3]),
        torch.tensor(arrays[4, ..., 0])[None],
    ]
    batches = [mixed, arrays, torch.tensor(arrays).permute(0, 3, 1, 2)]
    batches += [torch.stack([trained.transform(path) for path in paths]), [digits], [[*paths]]]
    for given in batches:
        found = trained.predict(given)
        for each, expected in zip(found, wanted, strict=True):
            assert each.probabilities == pytest.approx(expected, rel=1e-5)
    assert trained.predict([]) == []


@pytest.mark.parametrize(
    ("given", "culprit"),
    [
        (np.full((12, 12), 2.0), "float64"),
        (np.zeros((2, 12, 12), np.uint8), r"\(2, 12, 12\)"),
        (np.zeros((0, 12), np.uint8), r"\(0, 12\)"),
        (torch.zeros(1, 12, 12, dtype=torch.int64), "int64"),
        (torch.zeros(3, 12, 12), r"\(3, 12, 12\)"),
        ({"a": 1}, "'a': 1"),
        (7, "7"),
    ],
)
def test_what_is_no_image_is_refused(trained: TrainedModel, given: object, culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        trained.predict(given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=culprit):
        trained.predict([given])  # type: ignore[list-item]


def test_another_size_and_other_weights_are_loaded_as_evaluation_takes_them(
    tiny_run: Path, digits: Path
) -> None:
    larger = keymix.load(tiny_run, image_size=16)
    assert larger.transform(digits / "000.png").shape == (1, 16, 16)
    command = keymix.predict(tiny_run, [digits], image_size=16)
    assert larger.predict(digits) == command
    best = load_run(tiny_run).model("best").state_dict()
    loaded = keymix.load(tiny_run, which="best").model.state_dict()
    assert all(torch.equal(loaded[name].cpu(), best[name]) for name in best)


def test_the_first_page_of_a_file_is_the_image(trained: TrainedModel, tmp_path: Path) -> None:
    first, second = (Image.fromarray(np.full((12, 12), grey, np.uint8)) for grey in (50, 200))
    first.save(tmp_path / "pages.tif", save_all=True, append_images=[second])
    assert trained.predict(tmp_path / "pages.tif").probabilities == pytest.approx(
        trained.predict(first).probabilities
    )


def test_a_comparisons_folder_names_its_runs(tiny_run: Path, tmp_path: Path) -> None:
    for name in ("softmax/seed0", "softmax/seed2", "softmax/seed10", "static_key/seed0"):
        folder = tmp_path / "cmp" / "runs" / name
        folder.mkdir(parents=True)
        shutil.copy(tiny_run / files.RECIPE, folder)
    with pytest.raises(UserError) as refused:
        keymix.load(tmp_path / "cmp")
    runs = tmp_path / "cmp" / "runs"
    assert f"{runs / 'softmax/seed0'} to seed10, {runs / 'static_key/seed0'}." in str(refused.value)
    with pytest.raises(UserError, match="holds no recipe"):
        keymix.load(tmp_path)


@pytest.mark.parametrize("kind", ["exclusive", "multilabel", "stack"])
def test_masks_are_those_that_predict_masks_writes(
    masks_run: Path, tmp_path: Path, kind: str
) -> None:
    options = {"multilabel": {"masks": "multilabel"}, "stack": {"stack": 3}}.get(kind, {})
    run = written_masks_run(
        tmp_path / "run", f"uwgi:{masks_run / 'uwgi'}", image_size=32, **options
    )
    trained = keymix.load(run)
    paths = sorted((masks_run / "uwgi").rglob("slice_*.png"))[:3]
    written = predict_masks(run, paths, out=tmp_path / "out")
    found = trained.predict(paths)
    assert [replace(each, mask=None) for each in found] == written
    for each in found:
        assert each.mask.shape[-2:] == each.size
        masks = tmp_path / "out" / "masks"
        if kind == "multilabel":
            for number, name in enumerate(trained.classes):
                plane = np.asarray(Image.open(masks / name / f"{each.id}.png")) > 0
                assert (plane == each.mask[number]).all()
        else:
            assert (np.asarray(Image.open(masks / f"{each.id}.png")) == each.mask).all()
    assert max(len(np.unique(each.mask)) for each in found) > 1


def test_slices_in_memory_are_scaled_as_files_are(masks_run: Path, tmp_path: Path) -> None:
    run = written_masks_run(tmp_path / "run", f"uwgi:{masks_run / 'uwgi'}")
    trained, path = keymix.load(run), next((masks_run / "uwgi").rglob("slice_*.png"))
    wanted = trained.predict(path).mask
    for given in (Image.open(path), np.asarray(Image.open(path)).astype(np.uint16)):
        found = trained.predict(given)
        assert (found.mask == wanted).all()
        assert (found.path == "") == isinstance(given, np.ndarray)


def test_a_run_on_events_takes_recordings_and_refuses_pixels(
    events_run: Path, tmp_path: Path
) -> None:
    trained = keymix.load(events_run)
    table = keymix.data.load("moving_digits:100", time_steps=2, frames_by="time", image_size=16)
    (events,) = recordings_of(table.test.index[[0]])
    np.savez(tmp_path / "one.npz", **{name: events[name] for name in "txyp"})
    frames = trained.transform(tmp_path / "one.npz")
    close(frames, table.test.read(0).float())
    assert trained.predict(frames).classes == trained.predict(tmp_path / "one.npz").classes
    with pytest.raises(UserError, match=r"\.npz"):
        trained.predict(np.zeros((16, 16), np.uint8))
    assert keymix.load(events_run, time_steps=3).transform(tmp_path / "one.npz").shape[0] == 3
