# SPDX-License-Identifier: Apache-2.0
"""What is counted and measured of models of other inputs and outputs than one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix import task as tasks
from keymix.analysis.counting import count
from keymix.analysis.measure import measure_interleaved
from keymix.analysis.memory import run_pass
from keymix.analysis.passes import Passes, example_for, tensors_in
from keymix.errors import UserError
from keymix.task import Score, Task

SCORE = Score(key="error", name="error", short="error", label="error", better="less", high=None)


class Ragged(nn.Module):
    """Images of unequal sizes to a mapping; in training it wants its targets and gives losses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, images: list[Tensor], targets: Tensor | None = None) -> dict[str, Any]:
        pooled = torch.stack([self.stem(each[None]).mean((0, 2, 3)) for each in images])
        found = self.head(pooled)
        if not self.training:
            return {"points": [(row,) for row in found], "names": "ab"}
        assert targets is not None
        return {"loss": (found - targets).abs().mean(), "points": found}


class Points:
    """The training of the task: what `Ragged` takes."""

    def example(self, shape: tuple[int, ...], batch_size: int) -> list[Tensor]:
        channels, height, width = shape
        return [torch.randn(channels, height, width - i % 2) for i in range(batch_size)]

    def training_pass(self, model: nn.Module, inputs: Any) -> Tensor:
        loss: Tensor = model(inputs, torch.zeros(len(inputs), 2))["loss"]
        return loss.exp()


@dataclass
class Given:
    a: Tensor
    b: list[Tensor]


@pytest.fixture
def points() -> Iterator[str]:
    before = dict(tasks._OWN)
    tasks.register_task(
        Task(
            name="points",
            does="finds points",
            holds="images with points",
            scores=(SCORE,),
            whole_images=True,
            training=Points(),
            answers=object(),
        )
    )
    yield "points"
    tasks._OWN.clear()
    tasks._OWN.update(before)


def test_a_model_of_a_list_is_counted_by_its_task(points: str) -> None:
    found = count(Ragged(), (3, 4, 6), task=points)
    assert found.macs == 3 * 4 * 4 * 6 + 4 * 2
    assert found.params == 3 * 4 + 4 * 2
    images, pooled, difference = 3 * 4 * 6, 4, 2
    saved = {layer.path: layer.activation_bytes for layer in found.layers}
    assert saved["stem"] == 4 * images
    assert saved["head"] == 4 * pooled
    # the exponential of the step is not the model's
    assert found.activation_bytes == saved["stem"] + saved["head"] + 4 * difference


def test_a_model_of_a_list_is_measured_by_its_task(points: str) -> None:
    models = {"one": Ragged(), "two": Ragged()}
    costs = measure_interleaved(models, (3, 4, 6), batch_size=2, repeats=1, threads=1, task=points)
    assert {cost.input_size for cost in costs.values()} == {(3, 4, 6)}
    model = Ragged().train()
    passes = Passes(points)
    run_pass(model, example_for(model, passes, (3, 4, 6), 2), "training", passes=passes)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_images_of_their_own_sizes_come_as_a_list_unless_the_task_makes_one(
    points: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Points, "example", lambda self, shape, batch: torch.zeros(batch, *shape))
    made = Passes(points).example((3, 2, 2), 3)
    assert isinstance(made, list)
    assert [tuple(each.shape) for each in made] == [(3, 2, 2)] * 3


def test_tensors_are_found_in_whatever_a_model_gives() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    for given in (a, [a, (b,)], {"x": a, "y": {"z": b}, "n": "text"}, Given(a, [b]), (None, 3, a)):
        found = list(tensors_in(given))
        assert found[0] is a
        assert len(found) in (1, 2)


def test_outputs_that_nothing_can_be_derived_of_are_refused() -> None:
    class Mute(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return {"number": 3}

    with pytest.raises(ValueError, match="Mute"):
        run_pass(Mute(2, 2), torch.zeros(1, 2), "training")


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(UserError, match="pionts"):
        count(Ragged(), (3, 4, 6), task="pionts")
