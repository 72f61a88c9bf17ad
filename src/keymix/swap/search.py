# SPDX-License-Identifier: Apache-2.0
"""Which layers to swap under a budget: each alone, then all in that order, measured each step."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.analysis.capture import inference_mode_of
from keymix.analysis.counting import count
from keymix.analysis.images import Images
from keymix.analysis.measure import measure_paired, timed
from keymix.analysis.passes import Varies
from keymix.analysis.statistics import bonett_price
from keymix.analysis.timing import Turns, quartiles
from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerOptions, shadow
from keymix.hosts.layers import Layer, find_layers
from keymix.mixers.spec import spec_of
from keymix.swap.calibration import Estimate, Statistics, gather
from keymix.swap.images import MIN_IMAGES, input_size, run
from keymix.swap.plans import Layers, choose
from keymix.swap.record import COSTS, Attention, Cost, Nothing, Search, Step, Trial
from keymix.swap.report import SAYS_NOTHING
from keymix.swap.run import macs_within, swap

ROUNDS = 20
"""Of timing, behind each median."""

Times = tuple[float | None, float | None, float | None]  # quartiles, the median between


def attention_costs(
    model: nn.Module, found: Sequence[Layer], cost: Cost, image: Tensor
) -> tuple[Attention, ...]:
    """Measure what the attention of every layer costs, and its share of what all cost.

    Multiply-adds and latency are those of ``image``, ``[1, C, H, W]``.
    """
    counted = {each.path: each.macs for each in count(model, tuple(image.shape[1:])).layers}
    params = [sum(p.numel() for p in layer.module.parameters()) for layer in found]
    macs = [macs_within(counted, layer.path) for layer in found]
    nothing: Times = (None, None, None)
    times = _times(model, found, image) if cost == "latency" else [nothing] * len(found)
    medians = [median for _, median, _ in times]
    costs = dict(zip(get_args(Cost), (params, macs, medians), strict=True))[cost]
    total = math.fsum(each or 0.0 for each in costs)
    if total == 0:
        raise UserError(f"the layers of this model have no {cost}: count another cost")
    return tuple(
        Attention(
            path=layer.place.path,
            params=params[i],
            macs=macs[i],
            latency_q1_ms=times[i][0],
            latency_ms=times[i][1],
            latency_q3_ms=times[i][2],
            share=(costs[i] or 0.0) / total,
        )
        for i, layer in enumerate(found)
    )


def _times(model: nn.Module, found: Sequence[Layer], image: Tensor) -> list[Times]:
    """Quartiles of the time of each layer's attention alone, milliseconds, all in turns."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def listener(path: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[path] = (args, kwargs)

        return note

    handles = [
        layer.module.register_forward_pre_hook(listener(layer.path), with_kwargs=True)
        for layer in found
    ]
    try:
        _outputs(model, image)
    finally:
        for handle in handles:
            handle.remove()
    device = next(model.parameters()).device
    with inference_mode_of(model), torch.no_grad():
        passes = {}
        for layer in found:
            args, kwargs = calls[layer.path]
            call = functools.partial(layer.module, *args, **kwargs)
            passes[layer.path] = timed(call, device)
        turns = Turns(passes)
        for _ in range(ROUNDS):
            turns.round()
    kept = [turns.samples[layer.path].kept() for layer in found]
    return [quartiles([1e3 * each for each in seconds]) for seconds in kept]


def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Run a model in inference mode, without gradients, on its own device and in its own type."""
    anchor = next(model.parameters())
    with inference_mode_of(model), torch.no_grad():
        return run(model, images.to(anchor.device, anchor.dtype))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Images that neither trained nor calibrated a model, with their classes."""

    images: Tensor  # [n, C, H, W], normalised as in the model's evaluation
    labels: Tensor  # [n]
    batch_size: int = 32
    _answers: WeakKeyDictionary[nn.Module, Tensor] = field(default_factory=WeakKeyDictionary)

    def check(self, model: nn.Module) -> None:
        """Refuse images that a model does not take, and labels that are not theirs."""
        images, labels = self.images, self.labels
        if images.ndim != 4 or not images.is_floating_point() or not len(images):
            raise UserError(
                "held-out images must be floating point numbers [n, C, H, W], got "
                f"{images.dtype} of shape {tuple(images.shape)}"
            )
        wanted = input_size(model)
        if wanted is not None and tuple(images.shape[1:]) != wanted:
            raise UserError(
                "held-out images are {}x{}x{} (channels, height, width) and the model takes "
                "{}x{}x{}".format(*images.shape[1:], *wanted)
            )
        if labels.shape != images.shape[:1] or labels.is_floating_point():
            raise UserError(
                f"labels must be whole numbers, one for each of the {len(images)} held-out "
                f"images, got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        logits = _outputs(model, images[:1])
        low, high = int(labels.min()), int(labels.max())
        if logits.ndim != 2 or not 0 <= low <= high < logits.shape[1]:
            raise UserError(
                f"labels from {low} to {high} are no classes of a model whose output has shape "
                f"{tuple(logits.shape)}"
            )

    def says_nothing(self, model: nn.Module) -> Nothing:
        """Say in what a model answers all images alike; empty if it does not, or they are few."""
        if not self.varies(model):
            return "unvarying"
        several = len(self.labels) >= MIN_IMAGES and len(set(self.labels.tolist())) > 1
        if several and len(set(self._answers_of(model).tolist())) == 1:
            return "one answer"
        return ""

    def varies(self, model: nn.Module) -> bool:
        """Return whether a model's outputs vary over the images, by a batch of them."""
        outputs = Varies()
        outputs.see(_outputs(model, self.images[: self.batch_size]))
        return outputs.varied()

    def score(self, model: nn.Module) -> tuple[float, Tensor]:
        """Return the mean cross entropy and which answers are right, ``[n]`` booleans."""
        loss, answers = 0.0, []
        for start in range(0, len(self.images), self.batch_size):
            rows = slice(start, start + self.batch_size)
            logits = _outputs(model, self.images[rows]).float()
            wanted = self.labels[rows].to(logits.device)
            loss += float(F.cross_entropy(logits, wanted.long(), reduction="sum"))
            answers.append(logits.argmax(1).cpu())
        self._answers[model] = torch.cat(answers)
        return loss / len(self.labels), self._answers[model] == self.labels.cpu()

    def _answers_of(self, model: nn.Module) -> Tensor:
        """Return the classes that a model answers, scored once."""
        if model not in self._answers:
            self.score(model)
        return self._answers[model]

    def step(
        self,
        original: nn.Module,
        model: nn.Module | None = None,
        layers: tuple[int, ...] = (),
        share: float = 0.0,
        comparisons: int = 1,
    ) -> Step:
        """Measure a swapped model, or the original, against the original on the same images.

        ``layers`` are swapped, and make up ``share`` of the attention's cost. Latency is measured
        in turns; all ``comparisons`` with the original share the test's level.
        """
        shown = original if model is None else model
        size = tuple(self.images.shape[1:])
        loss, right = self.score(shown)
        before = self._answers_of(original) == self.labels.cpu()
        change = right.double() - before.double()
        low, high, _ = bonett_price(change.numpy())
        counted = count(shown, size)
        pair = measure_paired(original, shown, size, repeats=ROUNDS, comparisons=comparisons)
        tested = model is not None  # with itself there is nothing to test
        return Step(
            layers=layers,
            share=share,
            loss=loss,
            top1=float(right.double().mean()),
            change_low=low if tested else 0.0,
            change_high=high if tested else 0.0,
            params=counted.params,
            macs=counted.macs,
            latency_ms=pair.other_ms,
            original_ms=pair.base_ms,
            latency_ratio=pair.ratio,
            latency_ratio_q1=pair.ratio_q1,
            latency_ratio_q3=pair.ratio_q3,
            latency_p=pair.p if tested else None,
            latency_verdict=pair.verdict if tested or pair.verdict == "busy" else None,
        )


Progress = Callable[[str, float], None]
_NEAR = 1e-3  # of a loss: another order of sums, no other weights
_SEED = 0  # of what a swap draws: a layer starts alike alone and among others


def search(
    model: nn.Module,
    mixer: str,
    *,
    calibration: Images | Statistics,
    images: Tensor,
    labels: Tensor | None,
    budget: float,
    cost: Cost = "params",
    layers: Layers = None,
    mixer_options: MixerOptions = None,
    estimate: Estimate = "least_squares",
    batch_size: int = 32,
    progress: Progress | None = None,
    known: Search | None = None,
    keep: Callable[[Search], None] | None = None,
) -> Search:
    """Find the layers to swap so that they make up a share of the attention's cost.

    Each layer is swapped alone, in a copy, and the loss on held-out images is measured. Then
    layers are picked, the least rise of the loss per unit of cost first, and after every one the
    whole model is measured again: loss, top-1, parameters, multiply-adds and latency of one image,
    the last in turns with the original. That continues to the last layer, so that the whole curve
    is there; `Search.met` marks the first step whose layers reach the budget.

    The budget is a share of what the attention modules of the original model cost together: their
    parameters, their multiply-adds on one image, or their latency, each timed alone on the tokens
    of one image.

    Args:
        model: The trained model. It is not changed.
        mixer: What to put in.
        calibration: Images that it was trained on, as `keymix.swap.swap` takes them, or the
            `Statistics` gathered from them.
        images: Held-out images ``[n, C, H, W]``, normalised as in the model's evaluation.
        labels: Their classes ``[n]``.
        budget: Above 0, at most 1.
        cost: ``"params"``, ``"macs"`` or ``"latency"``.
        layers: Those that may be swapped, as in `keymix.swap.swap`; all by default.
        mixer_options: Options of the mixer.
        estimate: How learned keys are estimated.
        batch_size: Images at once.
        progress: Called with what is done next and the share that is done.
        known: An earlier search of the same model and setting, to resume from.
        keep: Called with what is known after each measurement.

    Raises:
        UserError: If the budget or the images do not fit, the layers cannot reach the budget, the
            model answers all images alike, or the mixer cannot sit in one of them.
    """
    wanted = checked_budget(budget)
    if cost not in COSTS:
        raise unknown("cost", cost, COSTS)
    if labels is None:
        raise UserError("a search needs the labels of its held-out images; give labels=[n]")
    model = shadow(model)  # to listen to, copy and time; the user's stays as it is
    held_out = HeldOut(images, labels, batch_size)
    held_out.check(model)
    if not held_out.varies(model):
        raise UserError(f"{SAYS_NOTHING}: a search has nothing to go by. Train it further first")
    found = find_layers(model)
    chosen = {layer.place.path for layer in choose(found, layers)}
    candidates = tuple(i for i, layer in enumerate(found) if layer.place.path in chosen)
    options: dict[str, Any] = {
        "mixer_options": mixer_options,
        "estimate": estimate,
        "batch_size": batch_size,
    }
    if not isinstance(calibration, Statistics):
        calibration = gather(model, calibration, mixer, [*candidates], **options)
    with drawing(model, _SEED):  # one that cannot sit somewhere is refused at once
        swap(copy.deepcopy(model), mixer, [*candidates], mixer_options=mixer_options, init="fresh")
    work = _Work(model, mixer, calibration, options, held_out)
    state = Search(
        mixer=spec_of(mixer, mixer_options).label,
        estimate=estimate,
        cost=cost,
        budget=wanted,
        images=len(images),
        candidates=candidates,
    )
    total = 2 * len(candidates) + 2
    note = _Notes(progress or _silent, keep or _silent, total)
    if known is not None:
        state = _same(known, state, held_out, model)

    if not state.attention:
        note.report("measuring the attention of the original model", 0)
        state = note.save(replace(state, attention=attention_costs(model, found, cost, images[:1])))
    most = math.fsum(state.attention[i].share for i in candidates)
    if most < wanted - 1e-9:
        raise UserError(
            f"budget={wanted:g}: the {len(candidates)} layers named make up {most:.0%} of "
            f"{state.basis}; name more layers, or ask for less"
        )
    if not state.steps:
        note.report("measuring the original model", 1)
        state = note.save(replace(state, steps=(held_out.step(model),)))
    done = {trial.layer for trial in state.trials}
    for i in candidates:
        if i not in done:
            note.report(f"block {i + 1} alone", 2 + len(state.trials))
            state = note.save(replace(state, trials=(*state.trials, work.trial(i))))
    grown, picked = copy.deepcopy(model), state.order
    for number, i in enumerate(picked, start=1):
        if state.complete:
            break
        work.put(grown, i)
        if number >= len(state.steps):
            note.report(f"{number} of {len(found)} blocks", 1 + len(candidates) + number)
            share = math.fsum(state.attention[j].share for j in picked[:number])
            step = held_out.step(model, grown, picked[:number], share, len(candidates))
            state = note.save(replace(state, steps=(*state.steps, step)))
    return state


@contextmanager
def drawing(model: nn.Module, seed: int) -> Iterator[None]:
    """Draw from a seed, and leave the random states of the CPU and the model's devices alone."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[*devices]):
        torch.manual_seed(seed)
        yield


class _Work:
    """Swaps and measures."""

    def __init__(
        self,
        model: nn.Module,
        mixer: str,
        calibration: Any,
        options: dict[str, Any],
        held_out: HeldOut,
    ) -> None:
        self.model, self.mixer, self.calibration = model, mixer, calibration
        self.options, self.held_out = options, held_out

    def put(self, model: nn.Module, layer: int) -> None:
        """Swap one layer; what it draws depends on nothing but the layer."""
        with drawing(model, _SEED + layer):
            swap(
                model,
                self.mixer,
                layer,
                calibration=self.calibration,
                drift=False,
                **self.options,
            )

    def trial(self, layer: int) -> Trial:
        """Measure the model with one layer swapped."""
        model = copy.deepcopy(self.model)
        self.put(model, layer)
        loss, right = self.held_out.score(model)
        return Trial(layer=layer, loss=loss, top1=float(right.double().mean()))


class _Notes:
    """Reports progress and hands on the state of the search."""

    def __init__(self, progress: Progress, keep: Callable[[Search], None], total: int) -> None:
        self._progress, self._keep, self._total = progress, keep, total

    def report(self, text: str, done: int) -> None:
        self._progress(text, done / self._total)

    def save(self, state: Search) -> Search:
        self._keep(state)
        return state


def _silent(*_: object) -> None:
    """Report nothing."""


def checked_budget(budget: object) -> float:
    """Refuse a budget that is no share, above 0 and at most 1."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or not 0 < float(budget) <= 1:  # type: ignore[arg-type]
        raise UserError(
            f"{budget=} must be above 0 and at most 1: the share of the attention's cost that the "
            "swapped layers make up"
        )
    return float(budget)  # type: ignore[arg-type]


def _same(known: Search, asked: Search, held_out: HeldOut, model: nn.Module) -> Search:
    """Take what is known; refuse what is of another search, or of a model with another loss."""
    for name in ("mixer", "estimate", "cost", "budget", "images", "candidates"):
        there, here = getattr(known, name), getattr(asked, name)
        if there != here:
            raise UserError(f"the earlier search has {name}={there!r}, this one {here!r}")
    if known.steps:
        there, here = known.steps[0].loss, held_out.score(model)[0]
        if abs(there - here) > _NEAR * abs(there):
            raise UserError(
                f"the earlier search began at a held-out loss of {there:.6g}, this one at "
                f"{here:.6g}: it is of another model or of other images; search again"
            )
    return known
