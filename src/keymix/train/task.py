# SPDX-License-Identifier: Apache-2.0
"""The training step: loss, mixing of images, optimiser, schedule, weight averaging, scores.

All randomness of a step is a function of (seed, epoch, step, rank): dropout and stochastic depth
are paired between mixers at a seed, and a resumed run has no random state to restore.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from keymix.data.mixing import Mixing
from keymix.errors import KeymixWarning, UserError, unknown
from keymix.train.checkpoints import OURS
from keymix.train.distill import Teacher
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


class ClassificationTask(pl.LightningModule):
    """Cross entropy on images under a recipe; validation by the averaged weights where kept.

    Args:
        recipe: The run.
        model: A classifier whose parameters train.
        num_classes: Its classes.
        steps_per_epoch: Batches a training epoch, for the schedule.
        losses: Keeps the training losses.
        teacher: Whose answers the model learns too, where the recipe has that term.
    """

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
        super().__init__()
        self.recipe = recipe
        self.model = model
        self.ema = ModelEmaV3(model, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        if self.ema is not None:
            self.ema.requires_grad_(False)
        self.scores = Scores(num_classes)
        self.val_scores: dict[str, float | None] = {}
        self.last_lr = recipe.optim.lr
        self.losses, self._teacher = losses, teacher
        mixup, cutmix = recipe.loss.mixup, recipe.loss.cutmix
        chance = recipe.loss.mixup_prob
        self._mix = (
            Mixing(mixup, cutmix, num_classes, recipe.seed, chance) if mixup or cutmix else None
        )
        self._similarity = (
            MapSimilarity(model, recipe.loss.similarity_blocks) if recipe.loss.similarity else None
        )
        self._young_norms = YoungNorms(model)
        self._updates = math.ceil(steps_per_epoch / recipe.optim.accumulate)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is validated and kept: the averaged one where there is one."""
        return self.model if self.ema is None else cast(nn.Module, self.ema.module)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make timm's optimiser, and its schedule counted in updates."""
        recipe = self.recipe
        scaled = recipe.precision == "16"  # the scaler needs to see unfused gradients to clip them
        optimizer = make_optimizer(recipe.optim, self.model, fused=not scaled)
        schedule = recipe.schedule
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched=schedule.name,
            num_epochs=schedule.epochs - schedule.cooldown_epochs,
            cooldown_epochs=schedule.cooldown_epochs,
            warmup_epochs=schedule.warmup_epochs,
            warmup_lr=schedule.warmup_lr,
            min_lr=schedule.min_lr,
            decay_epochs=None,
            step_on_epochs=False,
            updates_per_epoch=self._updates,
        )
        if scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Move timm's schedule to the number of updates done."""
        self.last_lr = max(group["lr"] for group in scheduler.optimizer.param_groups)
        scheduler.step_update(self.global_step)

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Seed the step, mix images where asked, and return the loss."""
        seed_step(
            step_seed(self.recipe.seed, self.current_epoch, batch_idx, self.global_rank),
            self.device,
        )
        images, targets = batch.images, batch.targets
        off = self.recipe.loss.mixup_off_epoch
        if self._mix is not None and (off is None or self.current_epoch < off):
            images, targets = self._mix(images, targets, batch.index, self.current_epoch)
        terms: dict[str, Tensor] = {}
        with self._young_norms.even():
            if self._similarity is None:
                logits = self.model(images).float()
            else:
                with self._similarity.listening() as calls:
                    logits = self.model(images).float()
                terms["similarity"] = self._similarity.mean(calls)
        if self._teacher is not None:
            terms["distill"] = self._teacher.term(images, logits)
        smoothing = self.recipe.loss.label_smoothing
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)

        answers = logits.detach()  # a step that is looked at later must not hold its graph

        def each() -> Tensor:
            return F.cross_entropy(answers, targets, label_smoothing=smoothing, reduction="none")

        self.losses.take(
            Step(
                epoch=self.current_epoch,
                step=batch_idx,
                rate=self.last_lr,
                loss=loss.detach(),
                each=each,
                index=batch.index,
                terms={name: term.detach() for name, term in terms.items()},
            )
        )
        return self._whole(loss, terms)

    def _whole(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """The loss that trains: the cross entropy and the weighted terms beside it."""
        config = self.recipe.loss
        if "distill" in terms:
            loss = (1 - config.distill) * loss + config.distill * terms["distill"]
        if self._similarity is not None:
            loss = loss + config.similarity * self._similarity.pairs * terms["similarity"]
        return loss

    def transfer_batch_to_device(
        self, batch: ImageBatch, device: torch.device, dataloader_idx: int
    ) -> ImageBatch:
        """Leave a batch where it is: loaders make it on the device."""
        return batch

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the losses note the gradients."""
        self.losses.before_update()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of all gradients together."""
        if gradient_clip_val:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.losses.clip(parameters, gradient_clip_val)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, and follow them with their moving average."""
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:
            self.ema.update(self.model, step=self.global_step + 1)  # Lightning counts afterwards

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the epoch's line needs of the steps that are done."""
        checkpoint[OURS] = {"losses": self.losses.state(), "lr": self.last_lr}
        if self._teacher is not None:
            checkpoint[OURS]["teacher"] = self._teacher.digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the epoch's line."""
        self.losses.restore(checkpoint[OURS]["losses"])
        self.last_lr = float(checkpoint[OURS]["lr"])
        if self._teacher is not None and checkpoint[OURS]["teacher"] != self._teacher.digest:
            text = f"the teacher {self.recipe.loss.distill_teacher!r} has other weights than the "
            warnings.warn(f"{text}one that this run began with", KeymixWarning, stacklevel=1)

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients for the validation."""
        self.losses.before_clearing()
        super().on_validation_model_zero_grad()

    def on_validation_epoch_start(self) -> None:
        """Refuse to validate an epoch that diverged.

        Raises:
            UserError: If a loss was not finite.
        """
        self.losses.look()

    def validation_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Score a batch of the validation split."""
        self.scores.update(self.evaluated(batch.images), batch.targets)

    def on_validation_epoch_end(self) -> None:
        """Keep the epoch's validation scores for the record."""
        self.val_scores = self.scores.compute()
