# SPDX-License-Identifier: Apache-2.0
"""A network that answers all images alike is warned of, with the probable cause."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keymix.cli import main
from keymix.errors import KeymixWarning
from keymix.tasks.classification.answers import ClassAnswers
from keymix.train import files
from keymix.train.engine import train
from keymix.train.evaluation import warn_of_degenerate
from keymix.train.recipe import ModelConfig, Recipe
from keymix.train.runs import evaluate

CLASSES = ("cat", "dog")
SPIKING = ModelConfig(name="qkformer_micro_32")
ANN = ModelConfig(name="qkformer_micro_32", options={"neuron": "relu"})
DENSE = ModelConfig(name="vit_nano_p2_12")


def warned(
    model: ModelConfig, predicted: list[int], targets: list[int], loss: float = 1.0
) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        answers = ClassAnswers(
            index=np.arange(len(targets)),
            target=np.array(targets),
            predicted=np.array(predicted),
            top5=np.ones(len(targets), dtype=bool),
            confidence=np.ones(len(targets), dtype=np.float16),
            classes=CLASSES,
        )
        warn_of_degenerate(answers, model, "test images", loss)
    return [str(each.message) for each in seen]


@pytest.mark.parametrize(
    ("model", "loss", "why"),
    [
        (SPIKING, 1.0, "spikes die out"),
        (ANN, 1.0, "learned nothing yet"),
        (DENSE, 1.0, "learned nothing yet"),
        (SPIKING, math.nan, "diverged: lower --optim.lr"),
    ],
)
def test_the_line_names_number_answer_and_cause(model: ModelConfig, loss: float, why: str) -> None:
    (message,) = warned(model, [1] * 8, [0, 1] * 4, loss)
    assert message.startswith("every one of the 8 test images got the same answer, 'dog': ")
    assert why in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("predicted", "targets"),
    [([1] * 7 + [0], [0, 1] * 4), ([1] * 8, [1] * 8), ([1] * 7, [0, 1] * 3 + [0])],
)
def test_answers_that_differ_few_images_and_one_class_are_no_fault(
    predicted: list[int], targets: list[int]
) -> None:
    assert warned(DENSE, predicted, targets) == []


def test_nearly_all_alike_is_reported_unless_most_images_are_of_that_class() -> None:
    targets = [0, 1] * 20
    (message,) = warned(SPIKING, [1] * 39 + [0], targets)
    assert message.startswith("39 of the 40 test images got the same answer, 'dog': ")
    assert warned(SPIKING, [1] * 37 + [0] * 3, targets) == []  # below 95 %
    most = [1] * 38 + [0] * 2
    assert warned(SPIKING, most, most) == []
    assert warned(SPIKING, [1] * 40, most) != []
    seven_of_eight = [1] * 35 + [0] * 5  # not uneven, as the check of the data has it
    assert warned(SPIKING, [1] * 39 + [0], seven_of_eight) != []


def test_eval_and_the_end_of_train_warn(
    vary: Callable[[dict[str, Any]], Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(vary({"schedule.epochs": 1, "schedule.warmup_epochs": 0}), tmp_path / "run")
    state, facts = run.weights()
    state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    files.write_weights(run.folder / files.weights_file("last"), state, facts)
    with pytest.warns(KeymixWarning, match="every one of the .* val images got the same"):
        evaluate(run.folder, split="val")
    assert main(["eval", str(run.folder), "--json"]) == 0
    assert capsys.readouterr().err.startswith("keymix: warning: every one of the 80 test images")
    stored = dict(np.load(run.folder / files.PREDICTIONS))
    stored["last_pred"] = np.full_like(stored["last_pred"], 3)
    files.write_arrays(run.folder / files.PREDICTIONS, stored)
    assert main(["train", str(shutil.copytree(run.folder, tmp_path / "copy"))]) == 0
    assert "test images got the same answer, '3': probably" in capsys.readouterr().err
