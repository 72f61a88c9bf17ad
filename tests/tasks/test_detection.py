# SPDX-License-Identifier: Apache-2.0
"""Detection end to end on made rectangles: train, evaluate, predict, compare, report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from safetensors.torch import load_file

import keymix
from costs import cheap_costs
from keymix.analysis.answers import whole
from keymix.cli import main
from keymix.compare.run import rebuild
from keymix.data.loaders import Loader
from keymix.errors import UserError
from keymix.recipes import get, names
from keymix.records import from_json
from keymix.report.by_class import OfRun
from keymix.report.charts import looks
from keymix.report.comparison_page import render
from keymix.report.part import page_of
from keymix.studies.attention.result import Attention, AttentionRecord
from keymix.task import get_task
from keymix.tasks.detection.answers import ANSWERS, instances_of
from keymix.tasks.detection.matching import Found
from keymix.tasks.detection.page import OfComparison
from keymix.tasks.detection.predictions import InstancePrediction, found_at
from keymix.tasks.detection.reference import BOXES, frequent_boxes
from keymix.train.files import weights_file
from keymix.train.model import load_data
from keymix.train.recipe import Recipe, replace_path
from made_instances import CATEGORIES, write_instances

SCORES = [score.key for score in get_task("detection").scores]


def small(data: Path, **changes: Any) -> Recipe:
    return replace_path(
        get("mask_rcnn_small"),
        {
            "data.spec": f"coco:{data}",
            "data.image_size": (48, 96),
            "data.val_fraction": 0.25,
            "model.options.backbone_size": 48,
            "model.options.out_channels": 16,
            "model.options.proposals": 40,
            "model.options.score_threshold": 0.0,
            "model.options.detections": 20,
            "schedule.epochs": 1,
            "schedule.warmup_epochs": 0,
            **changes,
        },
    )


@pytest.fixture(scope="session")
def data(made_once: Callable[..., Path]) -> Path:
    """A set of 8 training and 4 test images."""
    return made_once("instances", write_instances)


@pytest.fixture(scope="session")
def trained(made_once: Callable[..., Path], data: Path) -> Path:
    """A run of one epoch; a test that changes it works on a copy."""
    return made_once("detection_run", lambda folder: keymix.train(small(data), folder))


@pytest.fixture(scope="session")
def compared(made_once: Callable[..., Path], data: Path) -> Path:
    """A finished comparison of two mixers at one seed."""

    def write(folder: Path) -> None:
        with cheap_costs():
            found = keymix.compare(
                recipe=small(data),
                mixers="mhsa,identity",
                seeds=1,
                out=folder,
                controls=False,
                reference=False,
                processes=1,
            )
        assert not found.failed

    return made_once("detection_comparison", write)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- export ----------------------------------------------------------------------------------


# ---- train and evaluate ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_records_the_losses_of_the_model_and_all_scores(trained: Path) -> None:
    run = keymix.load_run(trained)
    (line,) = run.metrics()
    parts = [value for key, value in line.items() if key.startswith("train_loss_")]
    assert len(parts) == 5
    assert line["train_loss"] == pytest.approx(sum(part or 0 for part in parts), rel=1e-5)
    assert "val_loss" not in line
    last = run.summary.last.test
    assert set(last.scores) == set(SCORES)
    scores = keymix.evaluate(run)
    assert {key: scores[key] for key in SCORES} == last.scores
    assert scores["instances"] > 0
    assert scores["crowds"] == 1
    assert scores["empty"] == 1
    assert scores["classes"][2]["box_ap"] is None  # no image has it


@pytest.mark.slow
def test_the_command_trains_and_evaluates(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        *("mask_rcnn_small", "--data", f"coco:{data}", "--data.image_size", "48,96"),
        *("--data.val_fraction", "0.25", "--model.options.out_channels", "16"),
        *("--schedule.epochs", "1", "--schedule.warmup_epochs", "0"),
    ]
    assert main(["train", *given, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "val box AP" in said.out + said.err
    assert main(["eval", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^block\t", printed, re.MULTILINE)
    assert not re.search(r"^never\t", printed, re.MULTILINE)  # no image has one


def test_truth_through_the_evaluation_scores_1(data: Path) -> None:
    loaded = load_data(small(data).data)

    class Knowing(torch.nn.Module):
        """Returns the true instances of the images, at the size that it sees."""

        at = 0

        def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            found = []
            for image in images:
                truth = loaded.test.target(self.at)
                self.at += 1
                single = ~truth["iscrowd"]
                number = int(single.sum())
                found.append(
                    {
                        "boxes": truth["boxes"][single],
                        "labels": truth["labels"][single],
                        "scores": torch.ones(number),
                        "masks": torch.ones(number, 28, 28),
                        "size": torch.tensor(image.shape[-2:]),
                    }
                )
            return found

    loader = Loader(loaded.test, loaded, batch_size=3, train=False, workers=0)
    found = ANSWERS.evaluate(Knowing(), loader, loaded.test, loaded, device=torch.device("cpu"))
    assert found.scores["box_ap"] == pytest.approx(1)
    mask_ap = found.scores["mask_ap"]
    assert mask_ap is not None
    assert mask_ap > 0.8  # a mask of 28x28 ends a pixel off on images of this size
    assert whole(found.answers) == found.scores["box_ap"]


def test_detections_are_brought_to_the_size_of_the_image() -> None:
    output = {
        "boxes": torch.tensor([[10.0, 20, 30, 40], [90, 10, 120, 60]]),
        "labels": torch.tensor([1, 2]),
        "scores": torch.tensor([0.9, 0.8]),
        "masks": torch.ones(2, 28, 28),
        "size": torch.tensor([50, 100]),
    }
    found = found_at(output, (100, 300))
    assert found.boxes.tolist() == [[30, 40, 90, 80], [270, 20, 300, 100]]  # cut off at the edges
    area = coco_masks.area(found.masks)
    assert int(area[0]) == pytest.approx(61 * 41, rel=0.1)  # torchvision's boxes include their ends


def test_the_frequent_boxes_are_those_of_training(data: Path) -> None:
    loaded = load_data(small(data).data)
    found = frequent_boxes([row.target for row in loaded.train.rows], len(loaded.classes))
    assert set(found.labels) == {1, 2}
    assert all((found.labels == k).sum() <= BOXES for k in (1, 2))
    assert ((found.boxes >= 0) & (found.boxes <= 1)).all()
    assert ((found.scores > 0) & (found.scores <= 1)).all()
    assert (np.diff(found.scores) <= 0).all()
    placed = found.at((50, 80))
    assert isinstance(placed, Found)
    assert placed.boxes == pytest.approx(found.boxes * [80, 50, 80, 50])
    (reference,) = ANSWERS.references(loaded)
    assert not reference.learned
    assert set(reference.evaluated.scores) == set(SCORES)
    assert reference.validated is not None


def test_other_categories_are_refused(trained: Path, data: Path, tmp_path: Path) -> None:
    other = shutil.copytree(data, tmp_path / "other")
    for file in (other / "annotations").iterdir():
        text = file.read_text(encoding="utf-8").replace('"block"', '"brick"')
        file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="brick"):
        keymix.evaluate(trained, f"coco:{other}")


# ---- predict ---------------------------------------------------------------------------------


def test_predictions_in_python(trained: Path, data: Path) -> None:
    file = sorted((data / "val2017").iterdir())[0]
    image = Image.open(file)
    found = keymix.load(trained).predict(file)
    number = len(found.labels)
    assert number > 0
    assert found.size == (image.height, image.width)
    assert found.boxes.shape == (number, 4)
    assert found.masks.shape == (number, image.height, image.width)
    assert found.masks.dtype == bool
    assert list(found.scores) == sorted(found.scores, reverse=True)
    assert set(found.labels) <= {each["name"] for each in CATEGORIES}
    ids = {each["name"]: each["id"] for each in CATEGORIES}
    assert found.category_ids == tuple(ids[name] for name in found.labels)
    assert found.image_id == int(file.stem)
    (again,) = keymix.load(trained).predict([image])
    assert again.boxes == pytest.approx(found.boxes, abs=1e-3)


@pytest.mark.slow
def test_a_split_is_predicted_as_cocos_results(trained: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = keymix.predict_instances(trained, out=out, split="test", score_threshold=0.0)
    entries = json.loads((out / "detections.json").read_text(encoding="utf-8"))
    truth = json.loads((data / "annotations" / "instances_val2017.json").read_text("utf-8"))
    sizes = {each["id"]: [each["height"], each["width"]] for each in truth["images"]}
    assert len(entries) == sum(len(each.labels) for each in found)
    assert {each["image_id"] for each in entries} <= set(sizes)
    for each in entries:
        assert set(each) == {"image_id", "category_id", "bbox", "score", "segmentation"}
        assert each["category_id"] in {category["id"] for category in CATEGORIES}
        assert each["segmentation"]["size"] == sizes[each["image_id"]]
        assert coco_masks.area(each["segmentation"]) >= 0
    for name, size in sizes.items():
        picture = Image.open(out / "overlays" / f"{name}.jpg")
        assert [picture.height, picture.width] == size
    manifest = json.loads((out / "predictions.json").read_text(encoding="utf-8"))
    assert manifest["complete"]
    assert [each["image_id"] for each in manifest["images"]] == [*sizes]
    with pytest.raises(UserError, match="overwrite"):
        keymix.predict_instances(trained, out=out)
    keymix.predict_instances(trained, [data / "val2017"], out=out, overwrite=True)
    assert "data" not in {k for k, v in _manifest(out).items() if v is not None}


def _manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "predictions.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_results_score_as_the_run_did(trained: Path, data: Path, tmp_path: Path) -> None:
    """COCO's tools on the written files give the scores of the record."""
    keymix.predict_instances(trained, out=tmp_path / "out")
    truth = COCO(str(data / "annotations" / "instances_val2017.json"))
    run = COCOeval(truth, truth.loadRes(str(tmp_path / "out" / "detections.json")), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    recorded = keymix.load_run(trained).summary.last.test.scores
    assert recorded["box_ap"] == pytest.approx(float(run.stats[0]), abs=2e-3)  # rounded boxes


@pytest.mark.slow
def test_the_command_predicts_into_a_folder(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    file = sorted((data / "val2017").iterdir())[0]
    out = str(tmp_path / "out")
    assert main(["predict", str(trained), str(file), str(broken), "--out", out, "--json"]) == 2
    first, second = json.loads(capsys.readouterr().out)
    assert first["detections"][0]["image_id"] == int(file.stem)
    assert "broken.png" in second["error"]
    assert _manifest(Path(out))["images"][1]["error"]
    given = ["predict", str(trained), str(file), "--out", out, "--overwrite"]
    assert main([*given, "--format", "csv"]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split(",")[:3] == ["image", "class", "score"]
    assert len(rows) == len(first["detections"])
    assert main([*given, "--per-image"]) == 0
    assert "found" in capsys.readouterr().out
    drawn = {}
    for threshold, counted in (("0", len(rows)), ("1", 0)):
        assert main([*given, "--per-image", "--score-threshold", threshold]) == 0
        _, (_, number, _) = (line.split("\t") for line in capsys.readouterr().out.splitlines())
        assert int(number) == counted
        assert _manifest(Path(out))["score_threshold"] == float(threshold)
        assert len(json.loads((Path(out) / "detections.json").read_text("utf-8"))) == len(rows)
        drawn[threshold] = (Path(out) / "overlays" / f"{int(file.stem)}.jpg").read_bytes()
    assert drawn["0"] != drawn["1"]
    assert main([*given, "--score-threshold", "1.5"]) == 2
    assert "score_threshold" in capsys.readouterr().err


def test_tables_count_sure_detections() -> None:
    found = [
        InstancePrediction(path="a.png", labels=("ant", "ant", "bee"), scores=(0.9, 0.6, 0.2)),
        InstancePrediction(path="b.png", labels=("bee",), scores=(0.7,)),
    ]
    assert ANSWERS.table(found, "image").rows == [["a.png", 2, "ant 2"], ["b.png", 1, "bee 1"]]
    assert ANSWERS.summary(found, "image").rows == [["ant", "1 of 2", 2], ["bee", "1 of 2", 1]]
    for threshold, ants, bees in ((0.65, 1, 1), (0.2, 2, 2), (0.95, 0, 0)):
        other = [replace(each, score_threshold=threshold) for each in found]
        rows = [["ant", "1 of 2", ants], ["bee", f"{bees} of 2", bees]]
        summary = ANSWERS.summary(other, "image")
        assert sorted(summary.rows) == (rows if ants else [["nothing", "0 of 2", 0]])
        assert [row[1] for row in ANSWERS.table(other, "image").rows] == [
            len(each.surely()) for each in other
        ]
        assert f"{threshold}" in summary.heads[2]


# ---- compare and report ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_shows_precision_classes_and_pictures(compared: Path) -> None:
    result = rebuild(compared)
    record = result.record
    own = record.own.read(OfComparison)
    assert own.classes.names == ("block", "bar", "never")
    assert own.intervals is not None
    assert set(own.intervals) == {"softmax", "identity"}
    for run in record.runs:
        assert run.own.read(OfRun).shares  # type: ignore[union-attr]  # all are done
    page = page_of(get_task("detection"))
    shown = looks(["softmax", "identity"], baseline="softmax", controls=[])
    (precision,) = page.sections(record, shown)
    boxes, masks = precision.tables
    assert [row[0].value if hasattr(row[0], "value") else row[0] for row in boxes.rows] == [
        "softmax",
        "identity",
    ]
    assert len(boxes.columns) == len(masks.columns) == 7
    classes = page.classes(record)
    assert classes is not None
    assert classes.names == ["block", "bar"]
    assert classes.about == {"absent": 1}
    scenes = result.pictures.galleries["detections"].scenes
    assert {tuple(panel.mixers) for scene in scenes for panel in scene.panels} == {
        (),
        ("softmax",),
        ("identity",),
    }
    crowded = [scene for scene in scenes if "crowd" in scene.panels[0].text]
    assert len(crowded) == 1
    assert any(box.text == "block" for scene in scenes for box in scene.panels[0].boxes)


@pytest.mark.slow
def test_the_page_is_complete(compared: Path) -> None:
    result = rebuild(compared)
    record = result.record
    kept = tuple(each for each in record.findings if each.kind != "nothing_learned")
    record = replace(record, findings=kept)  # in one epoch nothing is
    text = unescape(render(record, result.pictures))
    for heading in ("By IoU and size", "By class", "What they detect"):
        assert f"<h2>{heading}</h2>" in text
    for word in ("percentile bootstrap", "crowd", "box AP", "contrast(a, b)"):
        assert word in text
    assert not re.search(r"accurac|Accurac", text)
    assert "data:image/" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "mask AP" in text
    boxed = replace(record, data=replace(record.data, outlines=False))
    assert "mask AP" not in unescape(render(boxed, result.pictures))


# ---- boxes alone -----------------------------------------------------------------------------


@pytest.mark.slow
def test_where_data_have_boxes_alone_they_are_learned_scored_and_predicted(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(data, tmp_path / "boxes")
    for file in (root / "annotations").iterdir():
        found = json.loads(file.read_text(encoding="utf-8"))
        for each in found["annotations"]:
            del each["segmentation"]
        file.write_text(json.dumps(found), encoding="utf-8")
    run, scores = tmp_path / "run", {key for key in SCORES if key.startswith("box")}
    keymix.train(small(root), run)
    assert not any("mask" in name for name in load_file(run / weights_file("last")))
    assert "train_loss_mask" not in keymix.load_run(run).metrics()[0]
    assert set(keymix.load_run(run).summary.last.test.scores) == scores
    assert main(["eval", str(run)]) == 0
    assert "mask" not in capsys.readouterr().out
    keymix.predict_instances(run, out=tmp_path / "out", split="test", score_threshold=0.0)
    entries = json.loads((tmp_path / "out" / "detections.json").read_text(encoding="utf-8"))
    assert entries
    assert all("segmentation" not in each for each in entries)
    for name in (f"{each['image_id']}.jpg" for each in entries):
        assert (tmp_path / "out" / "overlays" / name).is_file()
    loaded = load_data(small(root).data)
    (reference,) = ANSWERS.references(loaded)
    assert set(reference.evaluated.scores) == scores
    (table,) = ANSWERS.details(keymix.load_run(run).summary.last.test)
    row, *_ = table.rows
    assert len(row) == 4


# ---- recipes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "epochs", "steps"), [("1x", 12, (8, 11)), ("3x", 36, (27, 33))])
@pytest.mark.parametrize("model", ["mask_rcnn", "cascade_mask_rcnn"])
def test_schedules_are_those_of_the_field(
    model: str, name: str, epochs: int, steps: tuple[int, int]
) -> None:
    recipe = get(f"{model}_{name}")
    assert recipe.model.name == model
    assert (recipe.schedule.epochs, recipe.schedule.milestones) == (epochs, steps)
    assert recipe.data.batch_size * recipe.optim.accumulate == 16
    assert recipe.data.image_size == (800, 1333)
    assert recipe.augment.multi_scale == (480, 800)
    assert f"{model}_{name}" in names()


def test_instances_are_read_at_their_own_size(data: Path) -> None:
    loaded = load_data(small(data).data)
    for i, row in enumerate(loaded.test.rows):
        found = instances_of(row)
        assert found.masks is not None
        assert all(tuple(mask["size"]) == loaded.test.size(i) for mask in found.masks)
        assert len(found.masks) == len(found.labels) == len(found.area)


# ---- attention -------------------------------------------------------------------------------


@pytest.mark.slow
def test_maps_cover_the_padding_and_pictures_the_image(trained: Path, tmp_path: Path) -> None:
    photo, out = tmp_path / "odd.png", tmp_path / "looks"
    Image.new("RGB", (61, 40), "grey").save(photo)  # short side 48: 73x48, padded to 96x64
    words = ["--queries", "0.99,0.99", "mean", "--layers", "-1", "--out", str(out)]
    assert main(["analyze", "attention", str(trained), "--images", str(photo), *words]) == 0
    record = from_json(
        AttentionRecord, json.loads((out / "attention.json").read_text()), where=str(out)
    )
    (model,) = record.models
    with np.load(out / "attention-maps.npz") as arrays:
        assert arrays[model.photos].shape[-2:] == (48, 73)
        drawn = Attention(record, arrays).drawn
    assert model.image == pytest.approx((48 / 64, 73 / 96))
    (layer,) = model.layers
    assert layer.grid == (4, 6)
    assert layer.places == ((2, 4), None)  # of the patches that have pixels the last
    (cell,) = drawn[0].rows[0].cells
    assert cell.image == model.image
    assert cell.mark == pytest.approx((2.5 / 3, 4.5 / (6 * 73 / 96)))
    assert cell.shown.shape == (3, 5)
