# SPDX-License-Identifier: Apache-2.0
"""What is run for counting and measuring, and whether outputs say anything of their inputs.

A model of one tensor in needs nothing else; what a task's models take, and what their step computes
with the outputs, its ``training`` part says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor, nn

from keymix.task import get_task

Inputs = Tensor | list[Tensor]
"""A batch of inputs: one tensor, or a list where they keep their own sizes."""


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of an output, whatever sequences, mappings or dataclasses it is made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, each.name) for each in fields(value)])
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for each in value:
            yield from tensors_in(each)


def normal_inputs(shape: tuple[int, ...], batch_size: int) -> Tensor:
    """Make a batch of standard normal numbers."""
    return torch.randn(batch_size, *shape)


def squared_outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    """Run a model and return the mean square of its outputs, summed where they are several.

    What a step's loss is does not matter for its cost.
    """
    outputs = model(inputs)
    means = [each.float().square().mean() for each in tensors_in(outputs) if each.requires_grad]
    if not means:
        raise ValueError(f"{type(model).__name__} gives no output to derive")
    return torch.stack(means).sum() if len(means) > 1 else means[0]


@dataclass(frozen=True)
class Passes:
    """What is run of a task's models, as its training says; of models of one tensor, if empty."""

    task: str = ""

    def example(self, shape: tuple[int, ...], batch_size: int) -> Inputs:
        """Make a batch; a list where the task's images keep their own sizes."""
        if not self.task:
            return normal_inputs(shape, batch_size)
        task = get_task(self.task)
        made: Inputs = task.load("training").example(shape, batch_size)
        return list(made) if task.whole_images and isinstance(made, Tensor) else made

    def training_pass(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Run the forward pass of a training step and return a number to derive."""
        if not self.task:
            return squared_outputs(model, inputs)
        loss: Tensor = get_task(self.task).load("training").training_pass(model, inputs)
        return loss


ONE_TENSOR = Passes()


def fitted(inputs: Inputs, model: nn.Module) -> Inputs:
    """Put inputs where a model is, in its precision."""
    like = next(model.parameters(), torch.empty(0))
    if isinstance(inputs, Tensor):
        return inputs.to(like.device, like.dtype)
    return [each.to(like.device, like.dtype) for each in inputs]


def example_for(
    model: nn.Module, passes: Passes, shape: tuple[int, ...], batch_size: int
) -> Inputs:
    """Make the batch that seed 0 gives, fitted to a model; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made = passes.example(shape, batch_size)
    return fitted(made, model)


def first_of(inputs: Inputs) -> Tensor:
    """Return a tensor of a batch: that which it is, or its first."""
    return inputs if isinstance(inputs, Tensor) else inputs[0]


class Varies:
    """Compares outputs, batch after batch, with the first of them."""

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._seen, self._differ = 0, False

    def see(self, outputs: Tensor) -> None:
        """Take in a batch ``[B, ...]``."""
        first = outputs[:1] if self._first is None else self._first
        self._first, self._seen = first, self._seen + len(outputs)
        same = torch.allclose(
            outputs, first.expand_as(outputs), rtol=1e-6, atol=1e-12, equal_nan=True
        )
        self._differ = self._differ or not same

    def varied(self) -> bool:
        """Say whether any differed from the first by more than rounding; true of a single one."""
        return self._differ or self._seen < 2
