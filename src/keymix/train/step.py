# SPDX-License-Identifier: Apache-2.0
"""The training step on Lightning Fabric: forward, backward, update, and what a checkpoint keeps.

Fabric brings device and precision. Its own wrapper would convert the images and autocast the
model alone; here the whole step, the teacher and the loss included, runs under one autocast.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning_fabric
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn

from keymix.errors import UserError, unknown
from keymix.train import ranks
from keymix.train.model import device_of_this_machine
from keymix.train.recipe import OptimConfig, Recipe
from keymix.train.scoring import ImageBatch, autocast, effective_precision
from keymix.train.task import TrainingTask

_FABRIC_PRECISION: dict[str, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    "32": "32-true",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
}


_FUSED = (
    "adam",
    "adamw",
    "sgd",
)  # torch's own whose fused step is several times faster on small nets


_OF_WHOLE_TENSORS = (
    *("adafactor", "adahessian", "adamp", "clamb", "kron"),
    *("mars", "muon", "novograd", "sgdp"),
)  # of timm's, by parts of names: they fail on sharded tensors, or come to other weights


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse operations without a deterministic form within the block, if wanted.

    After it torch is as it was: the next run of this process may not want it.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads it at its first use and then never again, so it stays
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


def check_precision(precision: str) -> None:
    """Refuse a precision that this machine's device does not train in: float16 on a CPU."""
    if precision == "16" and device_of_this_machine().type == "cpu":
        raise UserError("precision = '16' needs a CUDA device: use 'bf16' or '32' on this machine.")


def make_fabric(precision: str) -> Fabric:
    """Make Fabric for one device of this machine, or for one per rank."""
    device = device_of_this_machine()
    several, machine = ranks.size() > 1, ranks.on_this_machine()
    chosen = device.type == "cuda" and not several
    with _quiet():
        fabric = Fabric(
            accelerator=device.type,
            devices=[torch.cuda.current_device()] if chosen else machine,
            num_nodes=ranks.size() // machine,
            strategy=ranks.strategy() if several else "auto",
            precision=_FABRIC_PRECISION[effective_precision(precision, device)],
            # a scheduler's signals are ours
            plugins=[TorchElasticEnvironment() if several else LightningEnvironment()],
        )
        if several:
            fabric.launch()
    return fabric


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Fabric's hints to itself, and from it what ``fabric run`` sets: a recipe decides."""
    logger = logging.getLogger(lightning_fabric.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    removed = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("LT_")}
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.update(removed)


def check_optimizer(config: OptimConfig) -> None:
    """Refuse an optimiser that there is not, or betas where it has none, before any work."""
    known = [str(name) for name in list_optimizers(exclude_filters=["bnb*", "apex*"])]
    if config.name not in known:
        raise unknown("optimiser", config.name, known)
    if config.betas is not None and not get_optimizer_info(config.name).has_betas:
        raise UserError(f"optim.betas: optimiser {config.name!r} has none; leave them out.")


def check_strategy(strategy: ranks.Strategy, config: OptimConfig) -> None:
    """Refuse what parts of a model are not trained with."""
    if strategy == "ddp":
        return
    if ranks.size() == 1:
        raise UserError(
            "strategy 'fsdp' gives each device a part of the model, and there is one device: ask "
            "for more (--devices 2, or torchrun), or leave --strategy out."
        )
    if any(name in config.name for name in _OF_WHOLE_TENSORS):
        raise UserError(
            f"optim.name = {config.name!r} computes with whole tensors, and strategy 'fsdp' has "
            "parts of them on each device: take an optimiser such as adamw, or strategy 'ddp'."
        )


def make_optimizer(
    config: OptimConfig, model: nn.Module, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Make timm's optimiser; biases, norms and ``model.no_weight_decay()`` are not decayed.

    `fused` takes torch's fused step where there is one.
    """
    check_optimizer(config)
    options: dict[str, Any] = {} if config.betas is None else {"betas": config.betas}
    if fused and config.name in _FUSED:
        options["fused"] = True
    if config.layer_decay < 1:  # a factor for each group, which the schedule applies
        options["layer_decay"] = config.layer_decay
    made: torch.optim.Optimizer = create_optimizer_v2(
        model, opt=config.name, lr=config.lr, weight_decay=config.weight_decay, **options
    )
    return made


def make_schedule(
    recipe: Recipe, optimizer: torch.optim.Optimizer, updates_per_epoch: int
) -> Scheduler | None:
    """Make timm's schedule of the learning rate, counted in updates; None where it is constant."""
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
        decay_milestones=list(schedule.milestones or ()),
        decay_rate=schedule.power if schedule.name == "poly" else 0.1,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return made


class Training:
    """A task with its optimiser and schedule under Fabric, and how far it is: `steps` an epoch."""

    def __init__(
        self, task: TrainingTask, fabric: Fabric, *, steps: int, strategy: ranks.Strategy = "ddp"
    ) -> None:
        recipe = task.recipe
        self.task, self.fabric, self.steps = task, fabric, steps
        self.accumulate = recipe.optim.accumulate
        self.batch = self.updates = 0
        with _quiet():
            fabric.to_device(task)
        self.sharded = strategy == "fsdp"
        if self.sharded:
            ranks.shard(task.model)
            if task.ema is not None:
                ranks.shard(task.evaluated)
                task.ema.foreach = False  # it would mix parameters with buffers, which are whole
        task.global_rank = fabric.global_rank
        # to clip, a scaler needs to see unfused gradients; fused SGD takes no sharded ones
        fused = recipe.precision != "16" and not self.sharded
        self._optimizer = make_optimizer(recipe.optim, task.model, fused=fused)
        updates = math.ceil(steps / self.accumulate)
        self._schedule = make_schedule(recipe, self._optimizer, updates)

    @cached_property
    def _forward(self) -> nn.Module:
        """The task as a step calls it, wrapped once its weights are those that it starts from."""
        return ranks.wrapped(self.fabric, self.task)

    @property
    def epoch(self) -> int:
        """The epoch that is trained; `batch` of its batches are done."""
        return self.task.current_epoch

    @property
    def done(self) -> int:
        """Batches that are done since the start of the run."""
        return self.epoch * self.steps + self.batch

    def step(self, batch: ImageBatch) -> None:
        """Train on the epoch's next batch; the last of an accumulation window ends in an update."""
        last = (self.batch + 1) % self.accumulate == 0 or self.batch + 1 == self.steps
        with ranks.averaged(self._forward, last):
            with self._autocast():
                loss = self._forward(batch, self.batch)
            if self.batch % self.accumulate == 0:
                self._optimizer.zero_grad()
            self.fabric.backward(loss / self.accumulate)
        self.batch += 1
        if last:
            self.update()

    def update(self) -> None:
        """Update weights, moving average and learning rate."""
        task, optimizer = self.task, self._optimizer
        self.fabric.strategy.precision.unscale_gradients(optimizer)
        norm = None
        if largest := task.recipe.optim.clip_grad:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norm = ranks.norm(parameters)
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        task.losses.before_update(norm)
        self.fabric.strategy.optimizer_step(optimizer)
        self.updates += 1
        if task.ema is not None:
            task.ema.update(task.model, step=self.updates)
        if self._schedule is not None:
            task.last_lr = max(group["lr"] for group in optimizer.param_groups)
            self._schedule.step_update(self.updates)

    def clear_gradients(self) -> None:
        """Free the gradients for the validation, once the losses have noted them."""
        self.task.losses.before_clearing()
        self.task.zero_grad()

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.task.current_epoch += 1
        self.batch = 0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put all modules into evaluation, and each back into the mode that it had."""
        modes = {module: module.training for module in self.task.modules()}
        self.task.eval()
        try:
            with ranks.whole(self.task.evaluated):  # shares of a split have not as many batches
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def validation_step(self, batch: ImageBatch) -> None:
        """Score a batch of the validation split."""
        with torch.inference_mode(), self._autocast():
            self.task.validation_step(batch)

    def _autocast(self) -> torch.autocast:
        """The precision of a whole step: Fabric's own sums gradients in it (see ``cache``)."""
        return autocast(self.fabric.device, self.task.recipe.precision, cache=False)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; `keymix.train.checkpoints` lists it."""
        task = self.task
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "updates": self.updates,
            "model": task.model.state_dict(),
            "ema": None if task.ema is None else task.evaluated.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._schedule is None else self._schedule.state_dict(),
            "scaler": self.fabric.strategy.precision.state_dict(),  # empty but of float16
            "task": task.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint stands."""
        task = self.task
        if "shards" in state:
            state = ranks.read_shards(Path(state["shards"]), state, task.model)
        task.current_epoch, self.batch = state["epoch"], state["batch"]
        self.updates = state["updates"]
        ranks.load_model(task.model, state["model"])
        if task.ema is not None:
            ranks.load_model(task.evaluated, state["ema"])
        ranks.load_optimizer(self._optimizer, state["optimizer"])
        if self._schedule is not None:
            self._schedule.load_state_dict(state["scheduler"])
        if state["scaler"]:
            self.fabric.strategy.precision.load_state_dict(state["scaler"])
        task.restore(state["task"])
