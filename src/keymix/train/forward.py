# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a training step, through ``torch.compile`` where the recipe asks for it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from keymix.errors import UserError, one_line
from keymix.ops.own_code import own_code
from keymix.train.scoring import Inputs

_BACKEND = "inductor"  # tests take a quicker one
_NUMBER = itertools.count()


class TrainingForward:
    """Call a model in a training step.

    What is compiled is this call alone. Full batches have one shape, so that one compilation
    serves a run. The short batch at the end of an epoch runs without: compiling it would take as
    long as it saves in thousands of epochs (one step in 88 of CIFAR-10 at batch 512 gains some
    20 ms, and a compilation takes half a minute). So does evaluation: the forward pass of 5,000
    validation images is 4 % of the work of an epoch of 45,000, and scores are then those that the
    weights have elsewhere.

    It is no module, so that a task that holds one neither saves it nor names the weights otherwise.

    Args:
        model: The model that trains.
        compile: Whether to compile.
        full: Images of a full batch; None if all batches are.
    """

    def __init__(self, model: nn.Module, *, compile: bool, full: int | None = None) -> None:
        self._model, self._full = model, full
        self._compiled: Any = None
        if compile:  # each run with code of its own: PyTorch compiles a code object 8 times at most
            own = own_code(_call, f"training_forward_{next(_NUMBER)}")
            self._compiled = torch.compile(own, dynamic=False, backend=_BACKEND)

    def __call__(self, images: Inputs, *more: Any) -> Any:
        """Return the model's answers, or its losses; lists of images are not compiled.

        Args:
            images: A batch.
            more: Targets, for a model that returns its losses in training; such a one is not
                compiled either.

        Raises:
            UserError: If the model cannot be compiled here.
        """
        plain = self._compiled is None or more or not isinstance(images, Tensor)
        if plain or (self._full is not None and len(images) != self._full):
            return self._model(images, *more)
        try:
            return self._compiled(self._model, images)
        except torch._dynamo.exc.TorchDynamoException as error:
            why = one_line(" ".join(str(error).split()))[:300]
            raise UserError(
                f"compile = True: torch.compile fails on this model and machine ({why}). "
                "Set --compile false, and name another folder with --out or throw this run away "
                "with --overwrite."
            ) from error


def _call(model: nn.Module, images: Tensor) -> Any:
    return model(images)
