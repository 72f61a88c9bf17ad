# SPDX-License-Identifier: Apache-2.0
"""The records of a run and of its data: what stands in their files, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.records import FormatError, Own, from_json, to_json
from keymix.task import Score, Task, get_task
from keymix.tasks.segmentation.facts import MaskDetails
from keymix.train import record
from keymix.train.record import (
    FORMAT,
    Environment,
    EpochLine,
    Machine,
    RunRecord,
    SplitScores,
)

SPLITS = ("train", "val", "test")
DATA = DataRecord(
    spec="digits",
    classes=("0", "1"),
    image_size=(12, 12),
    in_chans=1,
    mean=(0.5,),
    std=(0.5,),
    crop_pct=1.0,
    cached=True,
    task="classification",
    sizes=dict.fromkeys(SPLITS, 3),
    index_sha256=dict.fromkeys(SPLITS, "a"),
    fingerprint="b",
)
MASKS = replace(DATA, task="segmentation", multilabel=False, split_by="case")
LINE = {
    "epoch": 0,
    "train_loss": 1.0,
    "val_loss": 2.0,
    "val_top1": 0.5,
    "val_top5": None,
    "val_balanced": 0.5,
    "lr": 0.1,
}
SCORES = {"loss": 1.0, "top1": 0.5, "top5": None, "balanced": 0.5}
MARK = record.Tested(epoch=1, val=SCORES, test=SplitScores(scores=SCORES))
RUN = RunRecord(
    status="done",
    model="m",
    mixer=None,
    seed=0,
    params=9,
    epochs=2,
    seconds=1.0,
    last=MARK,
    best=MARK,
    data=DATA,
    task="classification",
)


def test_a_line_is_flat_and_comes_back_the_same() -> None:
    line = from_json(EpochLine, LINE | {"train_distill": 0.5}, where="it")
    assert line.train == {"loss": 1.0, "distill": 0.5}
    assert line.val == SCORES | {"loss": 2.0}
    assert from_json(EpochLine, to_json(line), where="it") == line
    assert to_json(line)["train_distill"] == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": -1},
        {"epoch": 0.0},
        {"train_loss": None},
        {"val_loss": "1"},
        {"val_loss": None, "val_top1": None, "val_balanced": None},
        {"train_distill": "1"},
    ],
)
def test_what_is_no_line_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        from_json(EpochLine, LINE | changes, where="it")


def test_epochs_are_ranked_by_score_then_by_loss() -> None:
    line = from_json(EpochLine, LINE, where="it").validated
    assert line.rank(get_task("classification")) == (0.5, -2.0)
    error = Score(key="rmse", name="error", short="rmse", label="error", better="less", high=None)
    numbers = Task(name="n", does="", holds="", scores=(error,), validation_loss=False)
    assert replace(line, val={"rmse": 3.0}).rank(numbers) == (-3.0, 0.0)


def test_the_details_of_a_task_come_back_and_are_checked() -> None:
    own = {"hd95_mm": 2.0, "hd95_px": None, "surface_dice": 0.5, "calibration_error": 0.1}
    own |= {"missed": 1, "distance_unit": "mm", "true_pixels": 9}
    own |= {"cases": [{"name": "a", "images": 2, "jaccard": 0.5, "dice": [None]}]}
    leaf = {"name": "leaf", "jaccard": 0.5, "dice": None, "hd95": None, "missed": 1}
    leaf |= {"surface_dice": None}
    scores = {"loss": 1.0, "jaccard": 0.5, "weighted_jaccard": 0.4, "dice": None}
    test = SplitScores(scores=scores, own=Own({**own, "classes": [leaf]}))
    mark = record.Tested(epoch=1, val=scores, test=test)
    run = replace(RUN, task="segmentation", data=MASKS, last=mark, best=mark)
    values = to_json(run)
    assert from_json(RunRecord, values, where="it") == run
    assert values["last"]["test"] == {**scores, **own, "classes": [leaf]}
    assert run.last.test.own.read(MaskDetails).classes[0].name == "leaf"
    for name, value in (("classes", None), ("distance_unit", "inch"), ("missed", None)):
        wrong = {**values["last"]["test"], name: value}
        bad = {**values, "last": {**values["last"], "test": wrong}}
        with pytest.raises(UserError, match=name):
            from_json(RunRecord, bad, where="it")


@pytest.mark.parametrize(
    ("data", "there", "absent"),
    [
        (DATA, {"limit", "task"}, {"multilabel", "test_fraction", "time_steps", "event_split"}),
        (MASKS, {"task", "test_fraction", "split_by"}, {"time_steps", "unfit"}),
        (
            replace(DATA, time_steps=4, sensor_size=(128, 128)),
            {"time_steps", "sensor_size"},
            {"event_split"},
        ),
    ],
)
def test_a_data_record_has_the_keys_of_its_kind(
    data: DataRecord, there: set[str], absent: set[str]
) -> None:
    values = to_json(data)
    assert there <= values.keys()
    assert not absent & values.keys()
    assert from_json(DataRecord, values, where="it") == data


@pytest.mark.parametrize(
    "changes", [{"classes": ()}, {"sizes": {"train": 1}}, {"task": "tracking"}]
)
def test_a_data_record_that_lacks_something_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(changes))):
        replace(DATA, **changes)


def test_scores_are_averaged_over_all_classes_but_a_background() -> None:
    masks = replace(MASKS, classes=("background", "a", "b"))
    assert masks.scored_classes == (1, 2)
    assert replace(masks, multilabel=True).scored_classes == (0, 1, 2)
    assert DATA.scored_classes == (0, 1)


def test_a_summary_comes_back_the_same() -> None:
    values = to_json(RUN)
    assert from_json(RunRecord, values, where="it") == RUN


@pytest.mark.parametrize("key", ["model", "mixer", "seed", "params", "epochs"])
def test_a_summary_without_a_key_is_refused(key: str) -> None:
    values = to_json(RUN)
    del values[key]
    with pytest.raises(UserError, match=f"'{key}'"):
        from_json(RunRecord, values, where="it")


@pytest.mark.parametrize("number", [2, None])
def test_a_summary_of_another_format_names_both_numbers(number: int | None) -> None:
    values = {**to_json(RUN), "format": number}
    with pytest.raises(FormatError, match=rf"it has .*{number or 'no format'}.* format {FORMAT}"):
        from_json(RunRecord, values, where="it")


def test_a_summary_of_a_run_that_is_not_done_is_refused() -> None:
    with pytest.raises(UserError, match="status"):
        from_json(RunRecord, to_json(RUN) | {"status": "begun"}, where="it")


def test_a_summary_without_a_score_of_its_task_is_refused() -> None:
    poor = replace(MARK, test=SplitScores(scores={"loss": 1.0, "top5": None}))
    with pytest.raises(UserError, match=r"best\.test has no top1"):
        replace(RUN, best=poor)
    with pytest.raises(UserError, match=r"task"):
        replace(RUN, data=MASKS)


def test_an_unknown_environment_is_an_empty_mapping() -> None:
    assert to_json(Environment()) == {}
    assert not from_json(Environment, {}, where="it").known
    now = Environment(python="3", earlier=(Machine(),))
    assert to_json(now)["earlier"] == [{}]
    assert to_json(now)["cuda"] is None
    assert now.machine == Machine(python="3")
