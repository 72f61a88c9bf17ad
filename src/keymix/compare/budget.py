# SPDX-License-Identifier: Apache-2.0
"""How long a comparison will take, from a few timed steps, and what gives way to a budget.

A comparison of one's own data, of which nobody says minutes, epochs or a recipe, has `DEFAULT`
minutes. What gives way, in this order: pixels (`keymix.compare.plan`), epochs down to those of
`FLOOR` updates, mixers that nobody named, the slowest first. What was named stays, all seeds and
the control too. A budget that cannot hold that is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat

import torch

from keymix.analysis.threads import use_threads
from keymix.compare.defaults import FLOOR, updates
from keymix.data.dataset import ImageData
from keymix.data.loaders import Loader
from keymix.errors import UserError
from keymix.train.engine import make_training
from keymix.train.model import device_of_this_machine, model_for
from keymix.train.recipe import Recipe, replace_path
from keymix.train.step import check_precision

DEFAULT = 30.0
"""Minutes of a comparison of one's own data."""
MOST = 10
"""Times the default updates, at most, where the minutes that were given allow more."""
ROOM = 4
"""Times the plan's time from which on, of given minutes, large images get 224 pixels."""
TRIAL_SECONDS, STEPS, SMALL = 1.0, 20, 2
"""Seconds and most steps of a trial; images in each of the two steps before it."""
EPOCH_SECONDS = 0.02
"""What the end of an epoch adds: scores, the line of metrics, a checkpoint."""
AFTER_SECONDS, AFTER_EACH, AFTER_IMAGES = 20.0, 3.0, 2_000
"""Costs and maps after training: a part for all, one for each mixer, and images through it."""

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a few steps of one mixer took, in seconds."""

    step: float  # one training step of a full batch, its data included
    image: float  # one image in evaluation
    start: float = 0.0  # before the first step of a run: compiling

    def run(self, recipe: Recipe, sizes: Mapping[str, int]) -> float:
        """Return the seconds of one run; `sizes` counts images by split."""
        steps = math.ceil(sizes["train"] / recipe.data.batch_size)
        epoch = steps * self.step + sizes["val"] * self.image + EPOCH_SECONDS
        return self.start + recipe.schedule.epochs * epoch + 2 * sizes["test"] * self.image


Trials = Mapping[str, Trial]
"""By mixer's label; one that makes no step has none, and its runs will fail as soon."""


def timed(recipe: Recipe, data: ImageData, *, threads: int, clock: Clock | None = None) -> Trial:
    """Time a few training steps of a recipe in this process, on a model of its own.

    On a CPU in processor time, which other programs on the machine hardly change. First steps of
    few images say how many a second allows; a compiled model takes full batches. No run and no
    random state is touched.
    """
    device = device_of_this_machine()
    workers, full = recipe.data.workers, min(recipe.data.batch_size, len(data.train))

    def now() -> float:
        if clock is not None:
            return clock()
        if device.type != "cuda":
            return time.process_time() / threads
        torch.cuda.synchronize(device)
        return time.perf_counter()

    def steps(size: int, *, most: int) -> list[float]:
        """Return the seconds of steps of `size` images, each with the wait for its batch."""
        serve = partial(Loader, data.train, data, batch_size=size, device=device)
        loader = serve(train=True, augment=recipe.augment, seed=recipe.seed)
        batches, begun, taken = chain.from_iterable(repeat(loader)), now(), list[float]()
        while len(taken) < most and now() - begun < TRIAL_SECONDS:
            start = now()
            batch = next(batches)
            made = now()
            training.step(batch)
            step, wait = now() - made, (made - start) / max(1, workers)
            taken.append(max(step, wait) if workers else step + wait)
        return taken

    with (
        use_threads(threads),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        check_precision(recipe.precision)
        recipe = replace_path(recipe, {"optim.accumulate": 1})
        model = model_for(recipe, data.record())
        training = make_training(recipe, data, model, None, steps=math.ceil(len(data.train) / full))
        size = full if recipe.compile else min(SMALL, full)
        first = steps(size, most=2)
        if not recipe.compile and first[-1] < TRIAL_SECONDS:
            size = max(size, min(full, int(TRIAL_SECONDS / 4 * size / max(first[-1], 1e-6))))
        short = recipe.compile or first[-1] < TRIAL_SECONDS
        taken = steps(size, most=STEPS) if short else first
        batch = next(iter(Loader(data.val, data, batch_size=size, train=False, device=device)))
        with training.evaluating():
            begun = now()
            training.validation_step(batch)
            image = (now() - begun) / len(batch.images)
    each = sum(taken[1:] or taken) / len(taken[1:] or taken) * full / size
    return Trial(step=each, image=image, start=max(first[0] - each, 0.0) if recipe.compile else 0.0)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of a comparison: its trials, images of each split, seeds, and processes."""

    trials: Trials
    sizes: Mapping[str, int]
    seeds: int
    processes: int

    def times(self, factor: float) -> Load:
        """Return the load where a step and an image take `factor` times as long."""
        trials = {
            label: replace(each, step=factor * each.step, image=factor * each.image)
            for label, each in self.trials.items()
        }
        return replace(self, trials=trials)

    def runs(self, recipe: Recipe) -> dict[str, float]:
        """Return the seconds of a whole run of each mixer."""
        return {label: trial.run(recipe, self.sizes) for label, trial in self.trials.items()}

    def after(self, labels: Collection[str]) -> float:
        """Return the seconds for costs and maps of some mixers, after training."""
        images = [trial.image for label, trial in self.trials.items() if label in labels]
        return AFTER_SECONDS + sum(AFTER_EACH + AFTER_IMAGES * image for image in images)

    def seconds(self, recipe: Recipe, without: Collection[str] = ()) -> float:
        """Return the seconds of a whole comparison but for some mixers."""
        runs = {label: s for label, s in self.runs(recipe).items() if label not in without}
        return self.seeds * sum(runs.values()) / self.processes + self.after(runs)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits: the epochs, and the mixers that are left out."""

    epochs: int
    left_out: tuple[str, ...] = ()


def fit(
    load: Load,
    recipe: Recipe,
    minutes: float,
    *,
    epochs_stay: bool,
    may_grow: bool,
    may_go: Sequence[str],
) -> Fit:
    """Fit epochs, then mixers, into minutes; refuse fewer than the least that can hold it.

    `may_go` are the mixers that may be left out, the last first.
    """
    asked, wanted = recipe.schedule.epochs, 60 * minutes
    steps = updates(recipe, load.sizes["train"]) // asked
    least = asked if epochs_stay else min(asked, math.ceil(FLOOR / steps))
    most = asked if epochs_stay or not may_grow else MOST * asked

    def seconds(epochs: int, left_out: Collection[str]) -> float:
        return load.seconds(replace_path(recipe, {"schedule.epochs": epochs}), left_out)

    for gone in range(len(may_go) + 1):
        left_out = tuple(may_go[len(may_go) - gone :])
        if seconds(least, left_out) <= wanted:
            per_epoch = seconds(least + 1, left_out) - seconds(least, left_out)
            more = int((wanted - seconds(least, left_out)) / max(per_epoch, 1e-9))
            return Fit(epochs=min(most, least + more), left_out=left_out)
    smallest = math.ceil(seconds(least, may_go) / 60)
    raise UserError(
        f"{minutes:g} minutes are too few for this comparison: on this machine it takes about "
        f"{smallest}. Give --minutes {smallest}, or name fewer mixers, seeds or epochs."
    )
