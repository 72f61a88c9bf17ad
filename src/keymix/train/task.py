# SPDX-License-Identifier: Apache-2.0
"""What is trained: the loss of a batch, its mixing of images, optimiser, schedule, scores.

All randomness of a step is a function of (seed, epoch, step, rank): dropout and stochastic depth
are paired between mixers at a seed, and a resumed run has no random state to restore.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from keymix.data.mixing import Mixing
from keymix.data.tasks import CLASSIFICATION
from keymix.errors import KeymixWarning, UserError, unknown
from keymix.task import Task
from keymix.train.distill import Teacher
from keymix.train.forward import TrainingForward
from keymix.train.mask_scoring import MaskScores
from keymix.train.nonfinite import Losses, Step
from keymix.train.recipe import OptimConfig, Recipe
from keymix.train.scoring import ImageBatch, Scores
from keymix.train.similarity import MapSimilarity
from keymix.train.young_norms import YoungNorms

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


class TrainingTask(nn.Module):
    """A loss under a recipe; validation by the averaged weights where they are kept.

    Subclasses say what the loss is, and what each image's is should it turn out not to be finite.
    The loop sets ``current_epoch``, ``global_rank`` and ``last_lr``, the rate of the last update.

    Args:
        recipe: The run.
        model: Whose parameters train.
        scores: Takes in the answers of the validation.
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
        scores: Scores | MaskScores,
        steps_per_epoch: int,
        losses: Losses,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = model
        self.ema = ModelEmaV3(model, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        if self.ema is not None:
            self.ema.requires_grad_(False)
        self.scores = scores
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
        seed_step(seed, batch.images.device)
        images, targets = self.served(batch)
        terms: dict[str, Tensor] = {}
        with self._young_norms.even():
            logits = self.answered(images, targets, terms)
        loss = self.loss(logits, targets)
        answers = logits.detach()  # a step that is looked at later must not hold its graph
        task = weakref.proxy(self)  # nor a cycle, which would keep a run's memory until gc
        self.losses.take(
            Step(
                epoch=self.current_epoch,
                step=batch_idx,
                rate=self.last_lr,
                loss=loss.detach(),
                each=lambda: task.loss_of_each(answers, targets),
                index=batch.index,
                terms={name: term.detach() for name, term in terms.items()},
            )
        )
        return self.whole(loss, terms)

    def served(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Return images and targets as the step sees them."""
        return batch.images, batch.targets

    @abstractmethod
    def answered(self, images: Tensor, targets: Tensor, terms: dict[str, Tensor]) -> Tensor:
        """Return the logits, float32, and put what the loss has besides into ``terms``."""

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that is told, 0-dimensional."""

    @abstractmethod
    def loss_of_each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the same of each image, ``[B]``."""

    @abstractmethod
    def whole(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the loss that trains: the one that is told and the weighted terms beside it."""

    def validation_step(self, batch: ImageBatch) -> None:
        """Score a batch of the validation split."""
        self.scores.update(self.evaluated(batch.images), batch.targets)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps for the epoch's line, of the steps that are done."""
        return {"losses": self.losses.state(), "lr": self.last_lr}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the epoch's line from a checkpoint."""
        self.losses.restore(state["losses"])
        self.last_lr = float(state["lr"])


class ClassificationTask(TrainingTask):
    """Cross entropy on images, mixed where asked, with a teacher's answers beside it.

    Args:
        recipe: The run.
        model: A classifier whose parameters train.
        num_classes: Its classes.
        steps_per_epoch: Batches a training epoch.
        losses: Keeps the training losses.
        teacher: Whose answers the model learns too, where the recipe has that term.
    """

    kind = CLASSIFICATION

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        *,
        num_classes: int,
        steps_per_epoch: int,
        losses: Losses,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__(
            recipe,
            model,
            scores=Scores(num_classes),
            steps_per_epoch=steps_per_epoch,
            losses=losses,
        )
        self._teacher = teacher
        mixup, cutmix = recipe.loss.mixup, recipe.loss.cutmix
        chance = recipe.loss.mixup_prob
        self._mix = (
            Mixing(mixup, cutmix, num_classes, recipe.seed, chance) if mixup or cutmix else None
        )
        self._similarity = (
            MapSimilarity(model, recipe.loss.similarity_blocks) if recipe.loss.similarity else None
        )

    def served(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Mix images where asked."""
        off = self.recipe.loss.mixup_off_epoch
        if self._mix is None or (off is not None and self.current_epoch >= off):
            return batch.images, batch.targets
        return self._mix(batch.images, batch.targets, batch.index, self.current_epoch)

    def answered(self, images: Tensor, targets: Tensor, terms: dict[str, Tensor]) -> Tensor:
        """Classify, and compare maps and answers where the loss asks for it."""
        if self._similarity is None:
            logits = self.trained(images).float()
        else:
            with self._similarity.listening() as calls:
                logits = self.trained(images).float()
            terms["similarity"] = self._similarity.mean(calls)
        if self._teacher is not None:
            terms["distill"] = self._teacher.term(images, logits)
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        smoothing = self.recipe.loss.label_smoothing
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def loss_of_each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of each image."""
        smoothing = self.recipe.loss.label_smoothing
        return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")

    def whole(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """The cross entropy and the weighted terms beside it."""
        config = self.recipe.loss
        if "distill" in terms:
            loss = (1 - config.distill) * loss + config.distill * terms["distill"]
        if self._similarity is not None:
            loss = loss + config.similarity * self._similarity.pairs * terms["similarity"]
        return loss

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: whose answers were learned, too."""
        teacher = {} if self._teacher is None else {"teacher": self._teacher.digest}
        return super().state() | teacher

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the epoch's line from a checkpoint, and warn of another teacher."""
        super().restore(state)
        if self._teacher is not None and state["teacher"] != self._teacher.digest:
            text = f"the teacher {self.recipe.loss.distill_teacher!r} has other weights than the "
            warnings.warn(f"{text}one that this run began with", KeymixWarning, stacklevel=1)
