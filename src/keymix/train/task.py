# SPDX-License-Identifier: Apache-2.0
"""What is trained: the loss of a batch, the model's forward pass in a step, validation scores.

All randomness of a step is a function of (seed, epoch, step, rank): dropout and stochastic depth
are paired between mixers at a seed, and a resumed run has no random state to restore.
"""

from __future__ import annotations

import hashlib
import itertools
import types
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from keymix.errors import UserError, one_line
from keymix.task import Task
from keymix.train import ranks
from keymix.train.batchnorm_warmup import BatchNormWarmup
from keymix.train.nonfinite import Losses, Step
from keymix.train.recipe import Recipe
from keymix.train.scoring import ImageBatch, Inputs, ValidationScores, device_of

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_BACKEND = "inductor"  # tests take a quicker one
_NUMBER = itertools.count()


def own_code(function: Callable[..., Any], name: str) -> Any:
    """Copy a function that closes over nothing, under a name that no other copy has.

    PyTorch counts the compilations of a code object and gives up at some; each copy has its own.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name)


def step_seed(seed: int, epoch: int, step: int, rank: int = 0) -> int:
    """A seed for one training step, in [0, 2^63): unrelated for different arguments."""
    words = f"{seed}/{epoch}/{step}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the random numbers that a step draws: the CPU's, and the device's own.

    ``torch.manual_seed`` does as much, but without a CUDA device it formats a stack trace for
    each of its deferred calls and keeps them all: 5 ms per step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss of a training step.

    Args:
        recorded: What the record shows as ``train_loss``, 0-dimensional.
        trained: What trains: the recorded loss and the weighted terms next to it.
        terms: Further terms of the loss, by name and without weights, each 0-dimensional.
        each: Makes the loss of each input, ``[B]``, should the loss turn out not to be finite; it
            must not hold the step's graph. None where inputs have no loss of their own.
    """

    recorded: Tensor
    trained: Tensor
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    each: Callable[[], Tensor] | None = None

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor]) -> StepLoss:
        """Sum up losses that a model returns by name in training; each is recorded as a term."""
        total = torch.stack(list(parts.values())).sum()
        return cls(recorded=total, trained=total, terms=parts)


class TrainingForward:
    """Call a model in a training step, perhaps compiled: for `full` inputs, None for any number.

    What is compiled is this call alone. Full batches have one shape, so that one compilation
    serves a run. The short batch at the end of an epoch runs without: compiling it would take as
    long as it saves in thousands of epochs (one step in 88 of CIFAR-10 at batch 512 gains some
    20 ms, and a compilation takes half a minute). So does evaluation: the forward pass of 5,000
    validation images is 4 % of the work of an epoch of 45,000, and scores are then those that the
    weights have elsewhere.

    It is no module, so that a task that holds one neither saves it nor names the weights otherwise.
    """

    def __init__(self, model: nn.Module, *, compile: bool, full: int | None = None) -> None:
        self._model, self._full = model, full
        self._compiled: Any = None
        if compile:  # each run with code of its own: PyTorch compiles a code object 8 times at most
            own = own_code(_call, f"training_forward_{next(_NUMBER)}")
            self._compiled = torch.compile(own, dynamic=False, backend=_BACKEND)

    def __call__(self, images: Inputs, *more: Any) -> Any:
        """Return the model's answers, or its losses if `more` has the targets.

        Neither such a model nor a list of images is compiled.
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


class TrainingTask(nn.Module):
    """A loss under a recipe; validation by the averaged weights where they are kept.

    Subclasses say what the loss of a step is. The loop sets ``current_epoch``, ``global_rank`` and
    ``last_lr``, the rate of the last update.

    Args:
        recipe: The run.
        model: Whose parameters train.
        scores: Takes in the answers of the validation; None to score it as the test is scored.
        data: The data set, needed without `scores`.
        steps_per_epoch: Batches a training epoch.
        losses: Keeps the training losses.
    """

    kind: Task
    current_epoch: int = 0
    global_rank: int = 0

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        *,
        scores: ValidationScores | None = None,
        data: ImageData | None = None,
        steps_per_epoch: int,
        losses: Losses,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = model
        self.ema = ModelEmaV3(model, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        if self.ema is not None:
            self.ema.requires_grad_(False)
        self.scores, self.data = scores, data
        if data is not None:
            self.kind = data.task
        self.last_lr = recipe.optim.lr
        self.losses = losses
        full = None if steps_per_epoch == 1 else recipe.data.batch_size // ranks.size()
        self.trained = TrainingForward(model, compile=recipe.compile, full=full)
        self._warmup = BatchNormWarmup(model)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is validated and kept: the averaged one where there is one."""
        return self.model if self.ema is None else cast(nn.Module, self.ema.module)

    def forward(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Take a training step: a task is called as a module, so that ranks can wrap it."""
        return self.training_step(batch, batch_idx)

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Seed the step and return the loss."""
        seed = step_seed(self.recipe.seed, self.current_epoch, batch_idx, self.global_rank)
        seed_step(seed, device_of(batch.images))
        images, targets = self.served(batch)
        with self._warmup.averaging():
            loss = self.step_loss(images, targets)
        self.losses.take(
            Step(
                epoch=self.current_epoch,
                step=batch_idx,
                rate=self.last_lr,
                loss=loss.recorded.detach(),
                each=loss.each,
                index=batch.index,
                terms={name: term.detach() for name, term in loss.terms.items()},
            )
        )
        return loss.trained

    def served(self, batch: ImageBatch) -> tuple[Inputs, Any]:
        """Return inputs and targets as the step sees them."""
        return batch.images, batch.targets

    @abstractmethod
    def step_loss(self, images: Inputs, targets: Any) -> StepLoss:
        """Run the model on a batch and return the loss."""

    def validation_step(self, batch: ImageBatch) -> None:
        """Score a batch of the validation split."""
        if self.scores is not None:
            self.scores.update(self.evaluated(batch.images), batch.targets)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps for the epoch's line, of the steps that are done."""
        return {"losses": self.losses.state(), "lr": self.last_lr}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the epoch's line from a checkpoint."""
        self.losses.restore(state["losses"])
        self.last_lr = float(state["lr"])
