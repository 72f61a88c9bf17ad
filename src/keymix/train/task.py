# SPDX-License-Identifier: Apache-2.0
"""What is trained: the loss of a batch, its mixing of images, optimiser, schedule, scores.

All randomness of a step is a function of (seed, epoch, step, rank): dropout and stochastic depth
are paired between mixers at a seed, and a resumed run has no random state to restore.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from keymix.errors import UserError, unknown
from keymix.task import Task
from keymix.train.forward import TrainingForward
from keymix.train.nonfinite import Losses, Step
from keymix.train.recipe import OptimConfig, Recipe
from keymix.train.scoring import ImageBatch, Inputs, ValidationScores, device_of
from keymix.train.young_norms import YoungNorms

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_FUSED = (
    "adam",
    "adamw",
    "sgd",
)  # torch's own whose fused step is several times faster on small nets


def step_seed(seed: int, epoch: int, step: int, rank: int = 0) -> int:
    """A seed for one training step, in [0, 2^63): unrelated for different arguments."""
    words = f"{seed}/{epoch}/{step}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the random numbers that a step draws: the CPU's, and the device's own.

    ``torch.manual_seed`` does as much, but without a CUDA device it formats a stack trace for
    each of its deferred calls and keeps them all: 5 ms a step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def check_optimizer(config: OptimConfig) -> None:
    """Refuse an optimiser that there is not, or betas where it has none, before any work."""
    known = [str(name) for name in list_optimizers(exclude_filters=["bnb*", "apex*"])]
    if config.name not in known:
        raise unknown("optimiser", config.name, known)
    if config.betas is not None and not get_optimizer_info(config.name).has_betas:
        raise UserError(f"optim.betas: optimiser {config.name!r} has none; leave them out.")


def make_optimizer(
    config: OptimConfig, model: nn.Module, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Make timm's optimiser; biases, norms and ``model.no_weight_decay()`` are not decayed.

    Args:
        config: Name and settings.
        model: Whose parameters to train.
        fused: Take torch's fused step where there is one.

    Raises:
        UserError: On an unknown optimiser, or settings that it does not take.
    """
    check_optimizer(config)
    options: dict[str, Any] = {} if config.betas is None else {"betas": config.betas}
    if fused and config.name in _FUSED:
        options["fused"] = True
    made: torch.optim.Optimizer = create_optimizer_v2(
        model, opt=config.name, lr=config.lr, weight_decay=config.weight_decay, **options
    )
    return made


def make_schedule(
    recipe: Recipe, optimizer: torch.optim.Optimizer, updates_per_epoch: int
) -> Scheduler | None:
    """Make timm's schedule of the learning rate, counted in updates; None where it is constant.

    Args:
        recipe: The run.
        optimizer: Whose rate it sets.
        updates_per_epoch: Updates of the weights an epoch.
    """
    schedule = recipe.schedule
    made, _ = create_scheduler_v2(
        optimizer,
        sched=schedule.name,
        num_epochs=schedule.epochs - schedule.cooldown_epochs,
        cooldown_epochs=schedule.cooldown_epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        decay_epochs=None,
        decay_rate=schedule.power if schedule.name == "poly" else 0.1,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return made


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss of a training step.

    Args:
        recorded: What the record shows as ``train_loss``, 0-dimensional.
        trained: What trains: the recorded loss and the weighted terms next to it.
        terms: What the loss has besides, by name and without weights, each 0-dimensional.
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
        full = None if steps_per_epoch == 1 else recipe.data.batch_size
        self.trained = TrainingForward(model, compile=recipe.compile, full=full)
        self._young_norms = YoungNorms(model)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is validated and kept: the averaged one where there is one."""
        return self.model if self.ema is None else cast(nn.Module, self.ema.module)

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Seed the step and return the loss."""
        seed = step_seed(self.recipe.seed, self.current_epoch, batch_idx, self.global_rank)
        seed_step(seed, device_of(batch.images))
        images, targets = self.served(batch)
        with self._young_norms.even():
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
