# SPDX-License-Identifier: Apache-2.0
"""Which mixers to swap into which layers, so that a trained model is faster at little loss."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.capture import inference_mode_of
from keymix.analysis.images import Images
from keymix.analysis.measure import timed
from keymix.analysis.timing import Turns, quartiles
from keymix.errors import UserError, check_positive
from keymix.hosts.base import shadow
from keymix.hosts.layers import Layer, find_layers
from keymix.mixers.spec import parse_mixer
from keymix.report.formats import duration
from keymix.swap.calibration import Estimate, Statistics, gather
from keymix.swap.held_out import ROUNDS, HeldOut, logits_of
from keymix.swap.images import CalibrationImages, read_pictures
from keymix.swap.plans import Layers, choose
from keymix.swap.record import Search, Step, Trial
from keymix.swap.report import SAYS_NOTHING, SwapReport
from keymix.swap.run import swap

CANDIDATES = (
    "spatial_reduction(key_grid=1/4)",
    "spatial_reduction(key_grid=1/16)",
    "static_key",
    "key_value",
    "identity",
)
"""Mixers that are tried in every layer where none are named."""

LEAST = 20
"""Held-out images that must choose, and as many that must judge."""
REJECTED = 5
"""Changes in a row that lose too much, after which no further one is tried."""
_SEED = 0  # of what a swap draws: a layer starts alike alone and among others

Progress = Callable[[str, float], None]
Chosen = Mapping[int, str]  # mixer by number of a layer


def search(
    model: nn.Module,
    *,
    calibration: Images,
    images: Tensor,
    labels: Tensor | None,
    max_drop: float | None = None,
    speed_up: float | None = None,
    mixers: Sequence[str] = CANDIDATES,
    layers: Layers = None,
    estimate: Estimate = "least_squares",
    batch_size: int = 1,
    balanced: bool = False,
    progress: Progress | None = None,
) -> Search:
    """Find mixers and layers that make a trained model faster, and say what they cost.

    Each mixer is swapped into each layer alone, in a copy: the rise of the loss on held-out images,
    and the time that the layer's attention saves, alone, on a batch. Then changes are made one
    after another, the least rise for the time saved first, and after each the whole model is
    measured again; one that loses more than ``max_drop`` is taken back. That ends when no change is
    left, `REJECTED` in a row were taken back, or the model is ``speed_up`` times as fast.

    Half of the held-out images choose; what the chosen plan costs is measured on the other half,
    which took no part in the choice.

    Args:
        model: The trained model. It is not changed.
        calibration: Images that it was trained on, as `keymix.swap.swap` takes them.
        images: Held-out images ``[n, C, H, W]``, normalised as in the model's evaluation.
        labels: Their classes ``[n]``.
        max_drop: Most accuracy to lose, a fraction: 0.01 is one point. No limit if None.
        speed_up: How many times as fast the model shall be; as fast as can be if None.
        mixers: What to try, each with its options in brackets.
        layers: Those that may be swapped, as in `keymix.swap.swap`.
        estimate: How learned keys are estimated.
        batch_size: Images at once whose latency counts.
        balanced: Whether accuracy is balanced accuracy, the mean over the classes.
        progress: Called with what is done next and the share that is done.

    Raises:
        UserError: If no limit is given, a limit or the images do not fit, the model answers all
            images alike, or no mixer can sit anywhere.
    """
    if max_drop is None and speed_up is None:
        raise UserError("a search needs max_drop= (accuracy to lose) or speed_up= (times as fast)")
    if max_drop is not None and not 0 <= max_drop < 1:
        raise UserError(f"{max_drop=} must be a fraction from 0 to below 1, such as 0.01")
    if speed_up is not None and not speed_up > 1:
        raise UserError(f"{speed_up=} must be above 1, such as 1.2")
    check_positive(batch_size=batch_size)
    if labels is None:
        raise UserError("a search needs the labels of its held-out images; give labels=[n]")
    if len(images) < 2 * LEAST:
        raise UserError(
            f"{len(images)} held-out images are too few for a search: half of them choose and half "
            f"judge, so give {2 * LEAST} or more"
        )
    halves = [
        HeldOut(images[start::2], labels[start::2], timed=batch_size, balanced=balanced)
        for start in (0, 1)
    ]
    work = _Work(shadow(model), halves, mixers, layers, calibration, estimate)
    say = progress or (lambda text, share: None)
    trials, refused = work.trials(say)
    steps = work.steps(trials, max_drop, speed_up, say)
    say("judging the plan on images that took no part in the choice", 0.99)
    original, chosen = work.judge.step(work.model), steps[-1].chosen
    report = work.made(chosen, drift=True) if chosen else None
    judged = original if report is None else work.judge.step(work.model, report.swapped, chosen)
    return Search(
        mixers=tuple(mixers),
        paths=tuple(layer.place.path for layer in work.found),
        max_drop=max_drop,
        speed_up=speed_up,
        batch_size=batch_size,
        scored="balanced accuracy" if balanced else "accuracy",
        refused=refused,
        trials=trials,
        steps=steps,
        original=original,
        judged=judged,
        report=report,
        images=(len(work.choose.labels), len(work.judge.labels)),
    )


class _Work:
    """The model, the images that choose and judge, and what is estimated on calibration images."""

    def __init__(
        self,
        model: nn.Module,
        halves: Sequence[HeldOut],
        mixers: Sequence[str],
        layers: Layers,
        calibration: Images,
        estimate: Estimate,
    ) -> None:
        for spec in map(parse_mixer, mixers):
            if len(spec.names) > 1:
                raise UserError(f"{spec.label!r} is {len(spec.names)} mixers: name one mixer each")
        self.model, self.mixers = model, mixers
        self.choose, self.judge = halves
        self.judge.check(model)
        self.choose.check(model)
        if not self.choose.varies(model):
            raise UserError(f"{SAYS_NOTHING}: a search has nothing to go by. Train it further")
        self.found = find_layers(model)
        chosen = choose(self.found, layers)
        self.candidates = [i for i, layer in enumerate(self.found) if layer in chosen]
        rows = torch.arange(self.choose.timed) % len(self.choose.images)
        self.batch, self.estimate = self.choose.images[rows], estimate
        self.calibration = CalibrationImages(read_pictures(calibration, model)).source
        self.statistics: dict[str, Statistics] = {
            mixer: gather(model, self.calibration, mixer, self.candidates, estimate=estimate)
            for mixer in mixers
        }

    def made(self, chosen: Chosen, *, drift: bool = False) -> SwapReport:
        """Put mixers into layers of a copy; what they draw depends on nothing else."""
        specs = [parse_mixer(mixer) for mixer in chosen.values()]
        at = [self.found[layer].place.path for layer in chosen]
        sums = [self.statistics[mixer].layers for mixer in chosen.values()]
        layers = {path: each[path] for path, each in zip(at, sums, strict=True) if path in each}
        alone = replace(next(iter(self.statistics.values())), layers=layers)
        with drawing(self.model, _SEED):
            return swap(
                copy.deepcopy(self.model),
                [spec.names[0] for spec in specs],
                [*chosen],
                mixer_options=[dict(spec.options[0]) for spec in specs],
                calibration=alone if len(layers) < 2 else self.calibration,  # in order
                estimate=self.estimate,
                drift=drift,
            )

    def trials(self, say: Progress) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
        """Try every mixer in every layer; return what came out, and why some cannot sit there."""
        begun = time.monotonic()
        loss = self.choose.score(self.model)[0]
        each = time.monotonic() - begun
        total = len(self.candidates) * len(self.mixers)
        about = duration(each * (total + len(self.candidates)))
        say(f"trying {total} changes on {len(self.choose.labels)} images, about {about}", 0.0)
        found: list[Trial] = []
        refused: dict[str, None] = {}
        for number in self.candidates:
            swapped: dict[str, nn.Module] = {}
            for mixer in self.mixers:
                done = (len(found) + len(refused)) / (total + len(self.candidates))
                say(f"{mixer} in block {number + 1}", done)
                try:
                    swapped[mixer] = self.made({number: mixer}).swapped
                except UserError as error:
                    refused[f"{mixer} in block {number + 1}: {error}"] = None
            times = _times(self.model, self.found[number], swapped, self.batch)
            for mixer, changed in swapped.items():
                after, score = self.choose.score(changed)
                found.append(
                    Trial(
                        layer=number,
                        mixer=mixer,
                        rise=after - loss,
                        score=score,
                        saved_ms=times[""] - times[mixer],
                        share=1 - times[mixer] / times[""],
                    )
                )
        if not found:
            raise UserError(f"none of the mixers can sit in these layers: {next(iter(refused))}")
        return tuple(found), tuple(refused)

    def steps(
        self,
        trials: Sequence[Trial],
        max_drop: float | None,
        speed_up: float | None,
        say: Progress,
    ) -> tuple[Step, ...]:
        """Make changes one after another; return the original and the model after each."""
        steps, chosen = [self.choose.step(self.model)], dict[int, Trial]()
        left, rejected = [trial for trial in trials if trial.saved_ms > 0], 0
        while left and rejected < REJECTED:
            left = [t for t in left if _more(t, chosen.get(t.layer))[1] > 0]
            if not left:
                break
            trial = min(left, key=lambda t: _price(*_more(t, chosen.get(t.layer))))
            left.remove(trial)
            say(f"{trial.mixer} in block {trial.layer + 1}, among {len(chosen)} others", 0.9)
            tried = {**chosen, trial.layer: trial}
            names = {layer: tried[layer].mixer for layer in sorted(tried)}
            changed = self.made(names).swapped
            lost = steps[0].score - self.choose.score(changed)[1]
            if max_drop is not None and lost > max_drop + 1e-9:
                rejected += 1
                continue
            chosen, rejected = tried, 0
            most = len(self.candidates)
            steps.append(self.choose.step(self.model, changed, names, most))
            if speed_up is not None and steps[-1].latency_ratio <= 1 / speed_up:
                break
        return tuple(steps)


def _more(trial: Trial, instead: Trial | None) -> tuple[float, float]:
    """Return what a change adds to loss and time saved, in place of an earlier one there."""
    if instead is None:
        return trial.rise, trial.saved_ms
    return trial.rise - instead.rise, trial.saved_ms - instead.saved_ms


def _price(rise: float, saved: float) -> tuple[bool, float]:
    """Order changes: those that lose nothing by the time saved, others by the rise for it."""
    return (rise > 0, rise / saved if rise > 0 else -saved)


def _times(
    model: nn.Module, layer: Layer, swapped: Mapping[str, nn.Module], batch: Tensor
) -> dict[str, float]:
    """Return the median time of a layer's attention, milliseconds, in turns; the model's is ""."""
    path, device = layer.place.path, next(model.parameters()).device
    passes = {}
    with inference_mode_of(model), torch.no_grad():
        for name, each in {"": model, **swapped}.items():
            module = each.get_submodule(path)
            call: list[Any] = []
            handle = module.register_forward_pre_hook(
                lambda _, args, kwargs, call=call: call.extend((args, kwargs)), with_kwargs=True
            )
            try:
                logits_of(each, batch)
            finally:
                handle.remove()
            passes[name] = timed(functools.partial(module, *call[0], **call[1]), device)
        turns = Turns(passes)
        for _ in range(ROUNDS):
            turns.round()
    return {name: 1e3 * quartiles(turns.samples[name].kept())[1] for name in passes}


@contextmanager
def drawing(model: nn.Module, seed: int) -> Iterator[None]:
    """Draw from a seed, and leave the random states of the CPU and the model's devices alone."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[*devices]):
        torch.manual_seed(seed)
        yield
