# SPDX-License-Identifier: Apache-2.0
"""How long a comparison will take: a few training steps of every mixer, timed where it will train.

A step of B images is taken to cost a + b B. Where a full batch would take long, a and b come from
two small ones. A compiled model is timed on full batches only, and its compilation is counted for
every run, though later ones may find compiled code on the disk. The trial trains a model of its
own: no run and no random state is touched.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from keymix.compare.costs import expected_seconds, expected_spike_seconds
from keymix.compare.plan import Job, Plan
from keymix.data.dataset import ImageData
from keymix.data.loaders import Batch, Loader
from keymix.train.callbacks import roughly
from keymix.train.engine import make_training
from keymix.train.files import METRICS, read_metrics
from keymix.train.model import device_of_this_machine, model_for
from keymix.train.recipe import Recipe, replace_path
from keymix.train.step import Training, check_precision

SHARE = 0.02
"""A trial may take this share of the time that the mixer's runs will take …"""
LEAST_SECONDS, MOST_SECONDS = 0.5, 3.0
"""… but not less or more than so long, apart from its first three steps."""
SMALL, STEPS, WARMUP = 2, 30, 2

EPOCH_SECONDS = 0.01
"""What the end of an epoch adds: scores, the line of metrics, a small checkpoint."""
BYTES_PER_PARAMETER, BYTES_PER_SECOND = 16, 4e8
"""Weights, averaged weights and both moments, and how fast they are written."""
MAPS_SECONDS, MAPS_IMAGES = 2.0, 150
"""What attention maps and the page take: a fixed part, and these images through every model."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a few steps of one mixer took, in seconds."""

    step: float  # one training step of a full batch, its data included
    image: float  # one image in evaluation
    epoch: float  # the end of an epoch
    start: float = 0.0  # before the first step of a run: compiling

    def run(self, recipe: Recipe, sizes: Mapping[str, int], *, epochs_done: int = 0) -> float:
        """Return the seconds of one run, or of the rest of it; `sizes` counts images by split."""
        steps = math.ceil(sizes["train"] / recipe.data.batch_size)
        epoch = steps * self.step + sizes["val"] * self.image + self.epoch
        left = (recipe.schedule.epochs - epochs_done) * epoch + 2 * sizes["test"] * self.image
        return self.start + left


def try_out(
    recipe: Recipe,
    data: ImageData,
    *,
    runs: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Time a few training steps of a recipe on this process's threads and device.

    So many `runs` of it will follow one another, which bounds the effort.
    """
    device = device_of_this_machine()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        training = _training(recipe, data)
        steps = _Steps(training, data, clock)
        full = min(recipe.data.batch_size, len(data.train))
        first = steps.seconds(full, warmup=0, count=1) if recipe.compile else 0.0
        step = _step_seconds(steps, recipe, len(data.train), runs)
        image = steps.evaluation()
    size = sum(p.numel() for p in training.task.model.parameters()) * BYTES_PER_PARAMETER
    return Trial(
        step=step,
        image=image,
        epoch=EPOCH_SECONDS + size / BYTES_PER_SECOND,
        start=max(first - step, 0.0),
    )


def _training(recipe: Recipe, data: ImageData) -> Training:
    """A training as a run's, of a model of its own; each of its steps ends in an update."""
    check_precision(recipe.precision)
    recipe = replace_path(recipe, {"optim.accumulate": 1})
    model = model_for(recipe, data.record())
    steps = math.ceil(len(data.train) / recipe.data.batch_size)
    return make_training(recipe, data, model, None, steps=steps)


def _step_seconds(steps: _Steps, recipe: Recipe, images: int, runs: float) -> float:
    """Time a full batch if the effort allows it, else two small ones."""
    full = min(recipe.data.batch_size, images)
    small = min(SMALL, full)
    if steps.training.fabric.device.type == "cuda" or full == small:
        return steps.seconds(full, warmup=5, count=STEPS)
    if recipe.compile:  # for no other size
        return steps.seconds(full, warmup=1, count=WARMUP)
    a = steps.seconds(small, warmup=1, count=1)
    most = a * full / small
    planned = most * math.ceil(images / full) * recipe.schedule.epochs * runs
    effort = min(max(SHARE * planned, LEAST_SECONDS), MOST_SECONDS)
    if (WARMUP + 3) * most <= effort:
        count = min(STEPS, int(effort / most) - WARMUP)
        return steps.seconds(full, warmup=WARMUP, count=count)
    some = max(2 * small, min(full, int(effort / 2 * small / a)))
    b = steps.seconds(some, warmup=0, count=2)
    slope = max(b - a, 0.0) / (some - small) or b / some
    return b + slope * (full - some)


class _Steps:
    """Times steps of a training, with batches of any size."""

    def __init__(self, training: Training, data: ImageData, clock: Callable[[], float]) -> None:
        self.training, self._data, self._clock = training, data, clock
        self._last: Batch | None = None

    def seconds(self, batch_size: int, *, warmup: int, count: int) -> float:
        """Return the mean seconds of a step, the wait for its batch included.

        The mean, since a run on a busy machine has the slow steps, too.
        """
        recipe = self.training.task.recipe
        loader = Loader(
            self._data.train,
            self._data,
            batch_size=batch_size,
            train=True,
            augment=recipe.augment,
            seed=recipe.seed,
            device=self.training.fabric.device,
        )
        ahead = 1 if self._data.train.images is not None else max(1, recipe.data.workers)
        times: list[float] = []
        batches = iter(loader)
        for _ in range(warmup + count):
            start = self._now()
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            made = self._now()
            self.training.step(batch)
            trained = self._now() - made
            wait = made - start
            # processes that decode ahead leave only what they cannot hide behind the step
            times.append(trained + wait if ahead == 1 else max(trained, wait / ahead))
            self._last = batch
        return sum(times[warmup:]) / count

    def evaluation(self) -> float:
        """Return the seconds of an image in evaluation, in batches of the size tried last."""
        batch = self._last
        assert batch is not None
        times = []
        with self.training.evaluating():
            for _ in range(2):
                start = self._now()
                self.training.validation_step(batch)
                times.append(self._now() - start)
        return min(times) / len(batch.images)

    def _now(self) -> float:
        if self.training.fabric.device.type == "cuda":
            torch.cuda.synchronize(self.training.fabric.device)
        return self._clock()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long what is left of a comparison will take, in seconds."""

    runs: Mapping[tuple[str, int], float]  # each run that is left, in the order of their starts
    whole: Mapping[str, float]  # one whole run of each mixer
    after: float  # costs and maps, after training
    processes: int  # side by side

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first run to the report."""
        return side_by_side(list(self.runs.values()), self.processes) + self.after

    def text(self) -> str:
        """Say it in one line."""
        number = len(self.runs)
        training = "1 run" if number == 1 else f"{number} runs"
        if min(self.processes, number) > 1:
            training += f", {min(self.processes, number)} at a time"
        slowest = max(self.whole, key=lambda label: self.whole[label])
        return (
            f"about {roughly(self.seconds)} ({training}, up to {roughly(self.whole[slowest])} each "
            f"for {slowest}; then {roughly(self.after)} for costs and maps)"
        )


def trial_jobs(plan: Plan, jobs: Sequence[Job]) -> list[Job]:
    """Return a trial for every mixer with runs left."""
    first = {job.mixer: job for job in reversed(jobs)}
    in_a_row = len(jobs) / len(first) / min(plan.processes, len(jobs))
    return [replace(first[label], trial=in_a_row) for label in plan.labels if label in first]


def estimated(
    plan: Plan,
    jobs: Sequence[Job],
    trials: Mapping[str, Trial | None],
    *,
    sizes: Mapping[str, int],
    unmeasured: Sequence[str],
) -> Estimate | None:
    """Add up the trials, by mixer, of the runs that are left; None if no trial succeeded.

    A mixer whose trial failed counts nothing, for its runs will fail as soon. The costs of the
    mixers in `unmeasured` will be measured.
    """
    found = {label: trial for label, trial in trials.items() if trial is not None}
    if not found:
        return None
    runs, whole = {}, {}
    for job in jobs:
        if (trial := found.get(job.mixer)) is not None:
            done = _epochs_done(job)
            runs[job.mixer, job.seed] = trial.run(job.recipe, sizes, epochs_done=done)
            whole[job.mixer] = trial.run(job.recipe, sizes)
    typical = sum(trial.image for trial in found.values()) / len(found)
    images = {label: found[label].image if label in found else typical for label in plan.labels}
    maps = MAPS_SECONDS + MAPS_IMAGES * sum(images.values())
    costs = expected_seconds([images[label] for label in unmeasured])
    return Estimate(
        runs=runs,
        whole=whole,
        after=costs + maps + expected_spike_seconds(plan, images),
        processes=min(plan.processes, len(jobs)),
    )


def _epochs_done(job: Job) -> int:
    return min(len(read_metrics(job.folder / METRICS)), job.recipe.schedule.epochs)


def side_by_side(seconds: Sequence[float], processes: int, busy: Sequence[float] = ()) -> float:
    """Return how long jobs take that go, in order, to whichever process is free first.

    Some processes may be `busy` with something else for some seconds.
    """
    ends = [*busy, *[0.0] * (processes - len(busy))]
    heapq.heapify(ends)
    for length in seconds:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)
