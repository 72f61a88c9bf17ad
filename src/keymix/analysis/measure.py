# SPDX-License-Identifier: Apache-2.0
"""What a model costs on this machine: latency with its spread, images per second, peak memory."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.attention import inference_mode_of
from keymix.analysis.counting import default_input_size
from keymix.analysis.memory import Build, Peak, cuda_growth, peak_memory
from keymix.errors import UserError

_SHORTEST = 0.005  # seconds a sample lasts at least; the clock and the call are small beside it
_NOT_HERE = "not measured: on a CPU a fresh process is needed; measure_models starts one"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Measured cost of inference, and peak memory, on one machine.

    Attributes:
        latency_ms: Median time of one image alone, milliseconds.
        latency_q1_ms: First quartile.
        latency_q3_ms: Third quartile.
        images_per_s: Images a second in batches of ``batch_size``, from the median batch.
        images_per_s_q1: The same from the third quartile of the time: a slow batch.
        images_per_s_q3: The same from the first quartile of the time: a fast batch.
        batch_size: Images a batch.
        input_size: Shape of the input without the batch.
        repeats: Samples behind each median.
        threads: CPU threads within an operation.
        device: Where it ran, e.g. ``"cpu"``.
        dtype: Precision of the weights, e.g. ``"float32"``.
        peak_inference_mib: Memory a forward pass of one batch adds to weights and input, MiB.
        peak_training_mib: The same of forward and backward, parameter gradients included.
        peak_note: How the peak was measured, or why it is None.
    """

    latency_ms: float
    latency_q1_ms: float
    latency_q3_ms: float
    images_per_s: float
    images_per_s_q1: float
    images_per_s_q3: float
    batch_size: int
    input_size: tuple[int, ...]
    repeats: int
    threads: int
    device: str
    dtype: str
    peak_inference_mib: float | None = None
    peak_training_mib: float | None = None
    peak_note: str = _NOT_HERE

    @property
    def peak_mib(self) -> float | None:
        """Peak memory of training one batch, MiB: what decides whether a model fits."""
        return self.peak_training_mib

    @property
    def latency_iqr_ms(self) -> float:
        """Distance of the quartiles of the latency, milliseconds."""
        return self.latency_q3_ms - self.latency_q1_ms

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it."""
        return {**asdict(self), "input_size": list(self.input_size), "peak_mib": self.peak_mib}


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Latency of one image by two models in turns.

    Attributes:
        base_ms: Median time of one image by the first, milliseconds.
        other_ms: The same of the second.
        ratio: Median over the rounds of the second's time over the first's in the same round.
        ratio_q1: First quartile of these ratios.
        ratio_q3: Third quartile.
    """

    base_ms: float
    other_ms: float
    ratio: float
    ratio_q1: float
    ratio_q3: float


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


class _Runner:
    """Times one model on one input."""

    def __init__(self, model: nn.Module, x: Tensor, warmup: int) -> None:
        self.model, self.x = model, x
        self.samples: list[float] = []
        self.inner = 1
        for _ in range(warmup):
            single = self._seconds()
            self.inner = max(1, math.ceil(_SHORTEST / max(single, 1e-7)))

    def _wait(self) -> None:
        if self.x.device.type == "cuda":
            torch.cuda.synchronize(self.x.device)

    def _seconds(self, inner: int = 1) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(inner):
            self.model(self.x)
        self._wait()
        return (time.perf_counter() - start) / inner

    def sample(self) -> None:
        self.samples.append(self._seconds(self.inner))

    def quartiles(self) -> tuple[float, float, float]:
        return quartiles(self.samples)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile of at least one sample."""
    if len(samples) == 1:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def _input(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    anchor = next(model.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(0)  # the caller's random state stays
    return torch.randn(shape, generator=generator).to(anchor.device, anchor.dtype)


def measure_interleaved(
    models: Mapping[str, nn.Module],
    input_size: Sequence[int] | None = None,
    *,
    batch_size: int = 64,
    repeats: int = 20,
    warmup: int = 3,
    threads: int | None = None,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Cost]:
    """Measure models in turns, so that a machine that drifts is unfair to none of them.

    Each round times every model once, alone and in a batch, starting with another model each
    time. Models run where they are, in their own precision, in inference mode, and get their mode
    back. Peak memory is measured here on CUDA only. A batch of one image is an image alone and is
    timed once.

    Args:
        models: Name to model.
        input_size: Shape without the batch; by default what the first model was made for.
        batch_size: Images a batch for images per second.
        repeats: Rounds.
        warmup: Passes before the first round.
        threads: CPU threads within an operation; as they are if None.
        on_round: Told the number of rounds that are done, after each.

    Raises:
        UserError: If there are no models or a number is less than 1.
    """
    if not models:
        raise UserError("there is no model to measure")
    numbers = {"batch_size": batch_size, "repeats": repeats, "warmup": warmup}
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name}={number} must be at least 1")
    if threads is not None and threads < 1:
        raise UserError(f"{threads=} must be at least 1")
    if input_size is None:
        input_size = default_input_size(next(iter(models.values())))
    size = tuple(int(s) for s in input_size)
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(_threads(threads))
        for model in models.values():
            stack.enter_context(inference_mode_of(model))
        stack.enter_context(torch.no_grad())
        sizes = dict.fromkeys((1, batch_size))
        runners = {
            name: [_Runner(model, _input(model, (images, *size)), warmup) for images in sizes]
            for name, model in models.items()
        }
        names = list(models)
        for turn in range(repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                for runner in runners[name]:
                    runner.sample()
            if on_round is not None:
                on_round(turn + 1)
    return {
        name: _cost(models[name], each[0], each[-1], repeats=repeats, threads=used)
        for name, each in runners.items()
    }


def measure_paired(
    base: nn.Module,
    other: nn.Module,
    input_size: Sequence[int],
    *,
    repeats: int = 20,
    warmup: int = 3,
) -> Paired:
    """Compare the latency of one image by two models on a machine that others use too.

    Each round times both, one right after the other, and the next round in the other order: what
    slows the machine for longer than a round slows both, and leaves the ratio of the round.

    Args:
        base: The model that is compared with.
        other: The model that is compared.
        input_size: Shape without the batch.
        repeats: Rounds.
        warmup: Passes of each before the first round.
    """
    size = tuple(int(s) for s in input_size)
    models = (base, other)
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(inference_mode_of(model))
        stack.enter_context(torch.no_grad())
        pair = [_Runner(model, _input(model, (1, *size)), warmup) for model in models]
        for turn in range(repeats):
            for runner in pair if turn % 2 == 0 else reversed(pair):
                runner.sample()
    first, second = (runner.samples for runner in pair)
    low, middle, high = quartiles([b / a for a, b in zip(first, second, strict=True)])
    return Paired(
        base_ms=1e3 * statistics.median(first),
        other_ms=1e3 * statistics.median(second),
        ratio=middle,
        ratio_q1=low,
        ratio_q3=high,
    )


def _cost(model: nn.Module, alone: _Runner, batch: _Runner, *, repeats: int, threads: int) -> Cost:
    fast, middle, slow = alone.quartiles()
    batch_fast, batch_middle, batch_slow = batch.quartiles()
    images = len(batch.x)
    cost = Cost(
        latency_ms=middle * 1e3,
        latency_q1_ms=fast * 1e3,
        latency_q3_ms=slow * 1e3,
        images_per_s=images / batch_middle,
        images_per_s_q1=images / batch_slow,
        images_per_s_q3=images / batch_fast,
        batch_size=images,
        input_size=tuple(batch.x.shape[1:]),
        repeats=repeats,
        threads=threads,
        device=str(batch.x.device),
        dtype=str(batch.x.dtype).removeprefix("torch."),
    )
    if batch.x.device.type == "cuda":
        x = batch.x.clone()
        return replace(
            cost,
            peak_inference_mib=cuda_growth(model, x, "inference"),
            peak_training_mib=cuda_growth(model, x, "training"),
            peak_note=f"CUDA memory allocated beyond weights and input at batch {images}",
        )
    return cost


def measure(
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    *,
    batch_size: int = 64,
    repeats: int = 20,
    warmup: int = 3,
    threads: int | None = None,
) -> Cost:
    """Measure one model; see :func:`measure_interleaved`, which is fairer for several."""
    costs = measure_interleaved(
        {"model": model},
        input_size,
        batch_size=batch_size,
        repeats=repeats,
        warmup=warmup,
        threads=threads,
    )
    return costs["model"]


def with_peak(cost: Cost, peak: Peak) -> Cost:
    """Put a peak that another process measured into a cost."""
    return replace(
        cost,
        peak_inference_mib=peak.inference_mib,
        peak_training_mib=peak.training_mib,
        peak_note=peak.note,
    )


def measure_models(
    builds: Mapping[str, Build],
    input_size: Sequence[int],
    *,
    batch_size: int = 64,
    repeats: int = 20,
    warmup: int = 3,
    threads: int | None = None,
) -> dict[str, Cost]:
    """Make models and measure them on the CPU: times here, peak memory in a process of its own.

    Args:
        builds: Name to how the model is made.
        input_size: Shape without the batch.
        batch_size: Images a batch.
        repeats: Rounds.
        warmup: Passes before the first round.
        threads: CPU threads within an operation; as they are if None.

    Raises:
        UserError: If a model cannot be made, or a number is less than 1.
    """
    models = {name: build.make() for name, build in builds.items()}
    costs = measure_interleaved(
        models,
        input_size,
        batch_size=batch_size,
        repeats=repeats,
        warmup=warmup,
        threads=threads,
    )
    del models
    peaks = peak_memory(builds, input_size, batch_size=batch_size, threads=threads)
    return {name: with_peak(cost, peaks[name]) for name, cost in costs.items()}


def measure_model(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    input_size: Sequence[int] = (3, 32, 32),
    *,
    imports: Sequence[str] = (),
    batch_size: int = 64,
    repeats: int = 20,
    warmup: int = 3,
    threads: int | None = None,
) -> Cost:
    """Measure a model by name, peak memory included.

    Args:
        name: As :func:`keymix.create_model` takes it.
        kwargs: Its other arguments, plain data.
        input_size: Shape without the batch.
        imports: Files of a user's own mixers.
        batch_size: Images a batch.
        repeats: Rounds.
        warmup: Passes before the first round.
        threads: CPU threads within an operation; as they are if None.
    """
    build = Build(kwargs={"name": name, **(kwargs or {})}, imports=tuple(imports))
    costs = measure_models(
        {name: build},
        input_size,
        batch_size=batch_size,
        repeats=repeats,
        warmup=warmup,
        threads=threads,
    )
    return costs[name]
