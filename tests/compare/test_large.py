# SPDX-License-Identifier: Apache-2.0
"""What is gathered stays small with hundreds of classes and ten thousand test images."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keymix.compare import folder
from keymix.compare.question import Plan, PlannedMixer, Question
from keymix.compare.run import rebuild
from keymix.data.record import DataRecord, SameImages
from keymix.errors import UserError
from keymix.recipes import get
from keymix.records import to_json
from keymix.train import files
from keymix.train.record import EpochLine, RunRecord, SplitScores, Tested

CLASSES, IMAGES, EPOCHS = 300, 10_000, 100
LABELS = ("softmax", "static_key", "conv_static_key", "re_attention", "key_value", "identity")
DATA = DataRecord(
    spec="folder:birds",
    classes=tuple(f"Bird no. {i}, <i>Avis</i>" for i in range(CLASSES)),
    image_size=(224, 224),
    in_chans=3,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    crop_pct=1.0,
    cached=False,
    task="classification",
    sizes={"train": 50_000, "val": 5_000, "test": IMAGES},
    fingerprint="f" * 64,
    index_sha256={"train": "a" * 64, "val": "b" * 64, "test": "c" * 64},
)


def plan_in(out: Path) -> Plan:
    recipe = get("small_images_vit")
    recipe = replace(recipe, schedule=replace(recipe.schedule, epochs=EPOCHS), seed=0)
    recipe = replace(recipe, model=replace(recipe.model, mixer=None))
    mixers = tuple(
        PlannedMixer(label=m, slug=m, control=m == "identity", mixes_prefix=True, params=22_000_000)
        for m in LABELS
    )
    return Plan(
        question=Question(), recipe=recipe, mixers=mixers, specs=LABELS, seeds=(0, 1, 2),
        baseline="softmax", pooling="avg", pooled_for=(), out=out,
    )  # fmt: skip


def make_run(plan: Plan, mixer: PlannedMixer, seed: int, rng: np.random.Generator) -> None:
    place = plan.folder(mixer, seed)
    place.mkdir(parents=True)
    target = np.arange(IMAGES) % CLASSES
    said = np.where(rng.random(IMAGES) < 0.7, target, rng.integers(0, CLASSES, IMAGES))
    order = rng.permutation(IMAGES)
    files.write_arrays(
        place / files.PREDICTIONS,
        {
            "index": order, "target": target[order],
            "last_pred": said[order], "best_pred": said[order],
            **dict.fromkeys(("last_top5", "best_top5"), np.ones(IMAGES, bool)),
            **dict.fromkeys(("last_confidence", "best_confidence"), np.full(IMAGES, 0.5)),
        },
    )  # fmt: skip
    scores = {"top1": float((said == target).mean()), "top5": 0.9, "loss": 1.25, "balanced": 0.7}
    mark = Tested(epoch=EPOCHS - 1, val=scores, test=SplitScores(scores=scores))
    summary = RunRecord(
        status="done", model=plan.recipe.model.name, mixer=mixer.label, seed=seed, params=22,
        epochs=EPOCHS, seconds=3600.5, last=mark, best=mark, data=DATA, task=DATA.task,
    )  # fmt: skip
    files.write_json(place / files.SUMMARY, summary)
    files.write_json(place / files.RECIPE, plan.recipe_for(mixer, seed).to_dict())
    files.write_json(place / files.ENVIRONMENT, {"keymix": "0.1.0", "commit": None})
    lines = [
        EpochLine(
            epoch=e,
            train={"loss": rng.random()},
            val={"loss": rng.random(), "top1": rng.random()},
            lr=rng.random(),
        )
        for e in range(EPOCHS)
    ]
    files.write_metrics(place / files.METRICS, lines)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("large") / "out"
    plan, rng = plan_in(out), np.random.default_rng(0)
    folder.keep(folder.Stored(plan=plan, data=SameImages.of(DATA)))
    for mixer, seed in plan.pairs:
        make_run(plan, mixer, seed, rng)
    return out


@pytest.mark.slow
def test_the_record_of_eighteen_runs_on_ten_thousand_images_is_small(large, monkeypatch):
    def gone(config: Any) -> None:
        raise UserError("the images are elsewhere")

    monkeypatch.setattr("keymix.compare.pictures.load_data", gone)
    record = to_json(rebuild(large).record)
    assert (large / "results.json").stat().st_size < 5e6
    assert len(record["runs"]) == 18
    bits = np.unpackbits(np.frombuffer(base64.b64decode(record["runs"][0]["correct"]), np.uint8))
    run = record["runs"][0]
    assert bits.sum() == sum(run["class_correct"]) == round(run["last"]["test"]["top1"] * IMAGES)
    with np.load(large / run["folder"] / files.PREDICTIONS) as stored:  # in a mixed order
        right = dict(zip(stored["index"], stored["last_pred"] == stored["target"], strict=True))
    assert bits[:IMAGES].tolist() == [int(right[i]) for i in range(IMAGES)]
    assert len(run["class_correct"]) == len(record["classes"]["test_images"]) == CLASSES
    assert all(len(rows) == 10 for rows in record["confusions"].values())
