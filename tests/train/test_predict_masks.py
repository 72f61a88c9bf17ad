# SPDX-License-Identifier: Apache-2.0
"""Masks that a run predicts: as files, as run lengths, of files and of splits."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import keymix
from keymix.analysis import mean_jaccard, overlap_counts
from keymix.analysis.mask_pictures import PALETTE, rim
from keymix.data import load
from keymix.data.loaders import Loader
from keymix.data.slices import read_stack
from keymix.errors import KeymixWarning, UserError
from keymix.tasks.segmentation.predict_masks import COLUMNS, predict_masks
from keymix.train.evaluation import data_for
from keymix.train.files import read_weights, weights_file, write_weights
from keymix.train.predict_folder import MANIFEST
from keymix.train.runs import Run
from made_masks import ORGANS, write_uwgi
from written_masks_run import written_masks_run

SIDE, SEEN = 31, 24  # pixels of a slice, and of the images that the model sees


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uwgi(tmp_path_factory.mktemp("uwgi"), cases=5, slices=4, side=SIDE)


@pytest.fixture(scope="module")
def runs(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run on exclusive masks, one on masks of several classes, one on stacks."""
    folder, spec = tmp_path_factory.mktemp("runs"), f"uwgi:{scans}"
    kinds = {"exclusive": {}, "multilabel": {"masks": "multilabel"}, "stack": {"stack": 3}}
    return {
        name: written_masks_run(folder / name, spec, test_fraction=0.4, **given)
        for name, given in kinds.items()
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as stream:
        reader = csv.DictReader(stream)
        assert tuple(reader.fieldnames or ()) == COLUMNS == ("id", "class", "segmentation")
        return list(reader)


def painted(text: str, height: int, width: int) -> np.ndarray:
    """Paint run lengths pixel by pixel: starts from 1, row after row."""
    flat = [0] * (height * width)
    numbers = [int(word) for word in text.split()]
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        for place in range(start - 1, start - 1 + length):
            flat[place] = 1
    return np.array(flat).reshape(height, width)


def mask_of(folder: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(folder / "masks" / name))


def logits_of(run: Run, planes: list[np.ndarray]) -> torch.Tensor:
    """Show a model slices of 16 bits as training does, and bring its logits to their size."""
    model, seen = run.model_and_data()
    low_high = [(p.min(), p.max()) for p in planes]
    grey = [
        np.rint((p.astype(np.float64) - low) * 255 / (high - low))
        for p, (low, high) in zip(planes, low_high, strict=True)
    ]
    image = torch.tensor(np.stack(grey), dtype=torch.float32)[None]
    image = F.interpolate(image, (SEEN, SEEN), mode="bilinear", antialias=True).round()
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (seen.mean, seen.std))
    with torch.inference_mode():
        logits = model((image / 255 - mean) / std)
    return F.interpolate(logits, (SIDE, SIDE), mode="bilinear", align_corners=False)[0]


def slice_of(scans: Path, case: int, number: int) -> Path:
    folder = scans / "train" / f"case{case}" / f"case{case}_day1" / "scans"
    return folder / f"slice_{number:04d}_{SIDE}_{SIDE}_1.50_1.50.png"


def test_masks_are_the_models_classes_at_the_size_of_each_image(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    path = slice_of(scans, 2, 1)
    predict_masks(runs["exclusive"], [path], out=tmp_path / "one")
    logits = logits_of(runs["exclusive"], [np.asarray(Image.open(path))])
    found = mask_of(tmp_path / "one", "case2_day1_slice_0001.png")
    assert len(np.unique(found)) > 2
    np.testing.assert_array_equal(found, logits.argmax(0).numpy())
    predict_masks(runs["multilabel"], [path], out=tmp_path / "several")
    logits = logits_of(runs["multilabel"], [np.asarray(Image.open(path))])
    for k, organ in enumerate(ORGANS):
        found = mask_of(tmp_path / "several", f"{organ}/case2_day1_slice_0001.png")
        np.testing.assert_array_equal(found, np.where(logits[k].numpy() > 0, 255, 0))


def scan(height: int, width: int) -> np.ndarray:
    """A slice in memory."""
    return np.random.default_rng(0).integers(0, 9000, (height, width)).astype(np.uint16)


@pytest.mark.parametrize("side", [SEEN, 32])
def test_a_window_that_covers_the_image_answers_as_the_model_does(
    side: int, runs: dict[str, Run]
) -> None:
    image = scan(side, side)
    for kind in ("exclusive", "multilabel"):
        whole = keymix.load(runs[kind], image_size=side).predict(image)
        window = keymix.load(runs[kind], image_size=side, overlap=0.5).predict(image)
        np.testing.assert_array_equal(window.mask, whole.mask)
        np.testing.assert_array_equal(window.probabilities, whole.probabilities)
        flipped = keymix.load(runs[kind], image_size=side, flips="horizontal").predict(image)
        assert (flipped.probabilities != whole.probabilities).any()


@pytest.mark.parametrize("kind", ["exclusive", "multilabel"])
def test_scores_in_windows_are_those_of_the_masks_at_the_images_own_size(
    kind: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    run, given = runs[kind], {"image_size": 16, "overlap": 0.25, "flips": "both"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeymixWarning)
        scores = keymix.evaluate(run, **given)
        keymix.evaluate(run, overlap=0.25)  # of the training's size: the images are its own
    trained, counts = keymix.load(run, **given), []
    data = data_for(run.recipe.data, trained.data, None, trained.image_size)
    for row in data.test.rows:
        found, true = trained.predict(row.id).mask, row.read_target().numpy()
        assert found.shape == true.shape
        assert true.shape[-2:] == (SIDE, SIDE)
        counts.append(
            overlap_counts(
                found[None],
                true[None],
                num_classes=len(data.classes),
                multilabel=kind == "multilabel",
            )
        )
    pooled = np.concatenate(counts).sum(0)
    assert scores["jaccard"] == pytest.approx(
        float(mean_jaccard(pooled, trained.data.scored_classes)), rel=1e-12
    )
    assert (scores["image_size"], scores["overlap"], scores["flips"]) == ([16, 16], 0.25, "both")
    assert scores["jaccard"] != keymix.evaluate(run)["jaccard"]
    predict_masks(run, out=tmp_path / "out", **given)
    stored = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert (stored["image_size"], stored["overlap"], stored["flips"]) == ([16, 16], 0.25, "both")
    if kind == "exclusive":
        np.testing.assert_array_equal(
            mask_of(tmp_path / "out", f"{data.test.rows[0].name}.png"),
            trained.predict(data.test.rows[0].id).mask,
        )


def test_a_mirrored_image_has_the_mirrored_mask(runs: dict[str, Run]) -> None:
    trained = keymix.load(runs["exclusive"], image_size=16, overlap=0.5, flips="both")
    image = scan(32, 32)  # whose windows lie alike in the mirror
    found = trained.predict(image).mask
    np.testing.assert_array_equal(trained.predict(image[:, ::-1]).mask, found[:, ::-1])
    np.testing.assert_array_equal(trained.predict(image[::-1]).mask, found[::-1])
    assert type(trained.model) is type(keymix.load(runs["exclusive"]).model)  # which is exported
    alone = keymix.load(runs["exclusive"], image_size=16, overlap=0.5)
    assert (alone.predict(image[:, ::-1]).mask != alone.predict(image).mask[:, ::-1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [None, 0.5])
@pytest.mark.parametrize("kind", ["exclusive", "multilabel", "stack"])
def test_probabilities_and_overlays_are_those_of_the_mask(
    kind: str, overlap: float | None, runs: dict[str, Run], scans: Path, tmp_path: Path
) -> None:
    run = runs[kind]
    trained, path = keymix.load(run, overlap=overlap), slice_of(scans, 2, 1)
    found = trained.predict(path)
    likely = found.probabilities
    assert likely.dtype == np.float32
    assert likely.shape == (len(trained.classes), SIDE, SIDE)
    if kind == "multilabel":
        np.testing.assert_array_equal(likely > 0.5, found.mask == 1)
    else:
        np.testing.assert_array_equal(likely.argmax(0), found.mask)
        np.testing.assert_allclose(likely.sum(0), 1, atol=1e-6)
    predict_masks(run, [path], out=tmp_path / "out", overlap=overlap)
    drawn = np.asarray(Image.open(tmp_path / "out" / "overlays" / f"{found.id}.png"))
    np.testing.assert_array_equal(found.overlay, drawn)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    batch = trained.predict([broken, slice_of(scans, 2, 2), path])
    assert (batch[0].probabilities, batch[0].overlay) == (None, None)
    np.testing.assert_allclose(batch[2].probabilities, likely, rtol=0, atol=1e-5)
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again.probabilities, likely)
    np.testing.assert_array_equal(again.overlay, drawn)
    assert trained.predict(trained.transform(path)).overlay is None  # whose pixels are not there
    keymix.export(run, tmp_path / "run.onnx")
    of_file = keymix.load(tmp_path / "run.onnx", overlap=overlap).predict(path)
    np.testing.assert_allclose(of_file.probabilities, likely, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(of_file.overlay, drawn)


def test_scans_in_memory_have_any_values(runs: dict[str, Run]) -> None:
    trained, image = keymix.load(runs["exclusive"]), scan(SIDE, SIDE)
    found = trained.predict(image).mask
    moved = image.astype(np.float32) - 1024  # Hounsfield units, say
    np.testing.assert_array_equal(trained.predict(moved).mask, found)
    np.testing.assert_array_equal(trained.predict(moved.astype(np.int16)).mask, found)
    moved[3, 3] = np.nan
    with pytest.raises(UserError, match="finite"):
        trained.predict(moved)


def test_names_in_the_table_of_run_lengths_are_neutralised(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    odd = tmp_path / "=1\x1b\r.png"
    shutil.copy(slice_of(scans, 2, 1), odd)
    predict_masks(runs["exclusive"], [odd], out=tmp_path / "out")
    assert {row["id"] for row in rows_of(tmp_path / "out")} == {"'=1\\x1b\\r"}


def test_the_model_is_shown_the_pixels_of_an_evaluation_to_the_bit(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shown = runs["stack"], []
    model, seen = run.model_and_data()
    model.register_forward_pre_hook(lambda _, given: shown.append(given[0].clone()))
    monkeypatch.setattr(Run, "model_and_data", lambda *_: (model, seen))
    predict_masks(run, out=tmp_path / "out")
    data = data_for(run.recipe.data, seen, None, (SEEN, SEEN))
    evaluated = [batch.images for batch in Loader(data.test, data, batch_size=8, train=False)]
    assert torch.equal(torch.cat(shown).cpu(), torch.cat(evaluated))


def test_run_lengths_read_back_are_the_masks(runs: dict[str, Run], tmp_path: Path) -> None:
    empty = 0
    for kind, run in runs.items():
        out = tmp_path / kind
        found = predict_masks(run, out=out)
        rows = rows_of(out)
        assert [(r["id"], r["class"]) for r in rows] == [(t.id, o) for t in found for o in ORGANS]
        empty += sum(row["segmentation"] == "" for row in rows)
        for row in rows:
            back = painted(row["segmentation"], SIDE, SIDE)
            if kind == "multilabel":
                wanted = mask_of(out, f"{row['class']}/{row['id']}.png") == 255
            else:
                wanted = mask_of(out, f"{row['id']}.png") == 1 + ORGANS.index(row["class"])
            np.testing.assert_array_equal(back, wanted)
    assert 0 < empty < len(rows)


def test_predicted_run_lengths_are_a_data_set_again(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    found = predict_masks(runs["multilabel"], [scans / "train"], out=tmp_path / "out")
    shutil.copytree(scans / "train", tmp_path / "again" / "train")
    shutil.copy(tmp_path / "out" / "predictions.csv", tmp_path / "again" / "train.csv")
    data = load(f"uwgi:{tmp_path / 'again'}", masks="multilabel", test_fraction=0.2)
    rows = [row for split in data.splits for row in split.rows]
    for row in rows:
        for organ, plane in zip(ORGANS, row.read_target().numpy(), strict=True):
            wanted = mask_of(tmp_path / "out", f"{organ}/{row.name}.png")
            np.testing.assert_array_equal(plane * 255, wanted)
    assert len(rows) == len(found)


def test_files_are_answered_as_the_split_that_they_are_of(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    for kind in ("exclusive", "stack"):
        of_split = predict_masks(runs[kind], out=tmp_path / f"{kind}-split", split="val")
        assert of_split
        assert len(of_split) % 4 == 0
        files = [answer.path for answer in of_split]
        of_files = predict_masks(runs[kind], files, out=tmp_path / f"{kind}-files")
        assert of_files == of_split
        for name in ("predictions.csv", *(f"masks/{each.id}.png" for each in of_split)):
            ours, theirs = (tmp_path / f"{kind}-{how}" / name for how in ("files", "split"))
            assert ours.read_bytes() == theirs.read_bytes()


def test_a_stack_is_made_of_the_slices_next_to_the_file(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    path = slice_of(scans, 3, 2)
    planes = [np.asarray(Image.open(slice_of(scans, 3, number))) for number in (1, 2, 3)]
    predict_masks(runs["stack"], [path], out=tmp_path / "out")
    found = mask_of(tmp_path / "out", "case3_day1_slice_0002.png")
    np.testing.assert_array_equal(found, logits_of(runs["stack"], planes).argmax(0).numpy())
    alone = tmp_path / path.name
    shutil.copy(path, alone)
    read = read_stack(alone, 3)
    assert (read[0] == read[1]).all()
    assert (read[2] == read[1]).all()


def test_a_broken_image_is_answered_with_its_error(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    half = tmp_path / "half" / "slice_0001_31_31_1.50_1.50.png"
    half.parent.mkdir()
    half.write_bytes(slice_of(scans, 1, 1).read_bytes()[:600])
    other = tmp_path / "slice_0002_40_40_1.50_1.50.png"  # of 31 pixels
    shutil.copy(slice_of(scans, 1, 2), other)
    colour = tmp_path / "colour.png"
    Image.new("RGB", (SIDE, SIDE), "red").save(colour)
    out = tmp_path / "out"
    paths = [half, other, colour, slice_of(scans, 1, 1)]
    *broken, good = predict_masks(runs["exclusive"], paths, out=out)
    for answer, why in zip(broken, ("cannot read", "40x40", "RGB"), strict=True):
        assert why in (answer.error or "")
        assert answer.path in (answer.error or "")
        assert "skip_corrupt" not in (answer.error or "")
        assert answer.pixels is None
    assert {row["id"] for row in rows_of(out)} == {good.id} == {"case1_day1_slice_0001"}
    assert [path.name for path in (out / "masks").iterdir()] == [f"{good.id}.png"]
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["complete"]
    assert [image.get("error") for image in manifest["images"]] == [
        *(b.error for b in broken),
        None,
    ]


def test_pixels_and_areas_are_those_of_the_masks(runs: dict[str, Run], tmp_path: Path) -> None:
    path = tmp_path / "slice_0007_20_33_0.50_3.00.png"  # 20 columns of 0.5 mm, 33 rows of 3 mm
    pixels = np.random.default_rng(0).integers(0, 65536, (33, 20)).astype(np.uint16)
    Image.fromarray(pixels).save(path)
    (answer,) = predict_masks(runs["exclusive"], [path], out=tmp_path / "out")
    assert (answer.size, answer.spacing) == ((33, 20), (3.0, 0.5))
    mask = mask_of(tmp_path / "out", f"{path.stem}.png")
    assert mask.shape == (33, 20)
    counts = {organ: int((mask == k).sum()) for k, organ in enumerate(ORGANS, start=1)}
    assert answer.pixels == counts
    assert sum(counts.values()) > 0
    assert answer.area == {organ: 1.5 * number for organ, number in counts.items()}


def test_overlays_outline_the_truth_where_it_is_known(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    predict_masks(runs["exclusive"], out=tmp_path / "split", split="train")
    data = load(f"uwgi:{scans}", test_fraction=0.4, val_fraction=0.2)
    row = data.train.rows[0]
    name, truth = row.name, row.read_target().numpy()
    drawn = np.asarray(Image.open(tmp_path / "split" / "overlays" / f"{name}.png"))
    last = rim(truth == 3)
    assert last.any()
    assert (drawn[last] == PALETTE[2]).all()
    predict_masks(runs["exclusive"], [row.id], out=tmp_path / "files")
    plain = np.asarray(Image.open(tmp_path / "files" / "overlays" / f"{name}.png"))
    assert not (plain[last] == PALETTE[2]).all(-1).any()


def test_a_folder_with_other_things_is_left_as_it_is(runs: dict[str, Run], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="not empty and holds no predicted masks"):
            predict_masks(runs["exclusive"], out=tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        predict_masks(runs["exclusive"], out=tmp_path / "thesis.tex", overwrite=True)


@pytest.mark.parametrize("bad", ["../../../outside", "/outside", "..", "a/b", ""])
def test_recorded_names_lead_out_of_no_folder(
    scans: Path, runs: dict[str, Run], tmp_path: Path, bad: str
) -> None:
    """Classes of a run's facts are folders of masks; those of a manifest are cleared away."""
    run = Run(
        shutil.copytree(runs["multilabel"].folder, tmp_path / "run"), runs["multilabel"].recipe
    )
    path = run.folder / weights_file("last")
    state, facts = read_weights(path)
    data = replace(facts.data, classes=(bad, *facts.data.classes[1:]))
    write_weights(path, state, replace(facts, data=data))
    with pytest.raises(UserError, match="class"):
        predict_masks(run, [slice_of(scans, 1, 1)], out=tmp_path / "a" / "b" / "out")
    assert not (tmp_path / "a").exists()
    out, mine = tmp_path / "out", tmp_path / "holiday.png"
    predict_masks(runs["multilabel"], [slice_of(scans, 1, 1)], out=out)
    mine.write_bytes(b"mine")
    edited = json.loads((out / MANIFEST).read_text())
    edited["images"] += [{"id": "holiday"}, {"id": "../holiday"}, {"id": 3}, "x"]
    (out / MANIFEST).write_text(json.dumps(edited))
    predict_masks(runs["multilabel"], [slice_of(scans, 1, 1)], out=out, overwrite=True)
    assert mine.read_bytes() == b"mine"


def test_two_images_of_one_name_are_refused_before_anything_is_written(
    scans: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(slice_of(scans, 1, 1), tmp_path / folder / "scan.png")
    with pytest.raises(UserError, match="same name 'scan'"):
        predict_masks(runs["exclusive"], [tmp_path / "a", tmp_path / "b"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    twice = [tmp_path / "a", tmp_path / "a" / "scan.png"]
    assert len(predict_masks(runs["exclusive"], twice, out=tmp_path / "out")) == 1
