# SPDX-License-Identifier: Apache-2.0
"""What a model costs on this machine: latency with its spread, images per second, peak memory."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.capture import inference_mode_of
from keymix.analysis.counting import default_input_size
from keymix.analysis.memory import Build, Peak, cuda_growth, peak_memory, run_pass
from keymix.analysis.passes import Inputs, Passes, example_for, first_of
from keymix.analysis.threads import use_threads
from keymix.analysis.timing import Paired, Pass, Samples, Turns, compare, quartiles
from keymix.errors import UserError, check_positive

_LEAST_ROUNDS = 3
_NOT_HERE = "not measured: on a CPU a fresh process is needed, which a Build gets"


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
        repeats: Rounds behind each median. A short pass has several samples a round.
        threads: CPU threads within an operation.
        device: Where it ran, e.g. ``"cpu"``.
        dtype: Precision of the weights, e.g. ``"float32"``.
        peak_inference_mib: Memory a forward pass of one batch adds to weights and input, MiB.
        peak_training_mib: The same of forward and backward, parameter gradients included.
        peak_note: How the peak was measured, or why it is None.
        quiet_share: Share of the samples of one image in which no other program took processor
            time, as far as CPU time shows it. The others are left out where enough are quiet.
        against: The latency next to that of the baseline; None without one, and for itself.
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
    quiet_share: float = 1.0
    against: Paired | None = None

    @property
    def busy(self) -> bool:
        """Whether other programs took processor time in most of the samples."""
        return self.quiet_share < 0.5

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


def timed(call: Callable[[], object], device: torch.device) -> Pass:
    """Make a pass of a call whose work is done on a device."""
    if device.type == "cuda":
        return Pass(call, functools.partial(torch.cuda.synchronize, device))
    return Pass(call)


class _Turns(Turns):
    """Times models; those of one device and precision see the same batch."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        size: tuple[int, ...],
        batch_size: int,
        warmup: int,
        *,
        passes: Passes,
    ) -> None:
        self.inputs: dict[str, Inputs] = {}
        made: dict[tuple[torch.device, torch.dtype], Inputs] = {}
        timed_passes = {}
        for name, model in models.items():
            anchor = next(model.parameters(), torch.empty(0))
            where = (anchor.device, anchor.dtype)
            if where not in made:
                made[where] = example_for(model, passes, size, batch_size)
            x = self.inputs[name] = made[where]
            timed_passes[name] = timed(functools.partial(model, x), first_of(x).device)
        super().__init__(timed_passes, warmup)


def measure_interleaved(
    models: Mapping[str, nn.Module | Build],
    input_size: Sequence[int] | None = None,
    *,
    batch_size: int = 64,
    repeats: int = 20,
    warmup: int = 3,
    threads: int | None = None,
    baseline: str | None = None,
    on_round: Callable[[int], None] | None = None,
    task: str = "",
) -> dict[str, Cost]:
    """Measure models in turns, so that a machine that drifts is unfair to none of them.

    Each round times every model, alone and in a batch, in an order that is drawn at random. All
    have the same number of inner repeats. Models run where they are, in their own precision, in
    inference mode, and get their mode back. Peak memory is measured here on CUDA only; on a CPU, in
    a process of its own, of what is given as a `keymix.analysis.memory.Build`. A batch of one image
    is an image alone and is timed once.

    Args:
        models: Name to model, or to how it is made on the CPU.
        input_size: Shape without the batch; by default what the first model was made for.
        batch_size: Images a batch for images per second.
        repeats: Rounds.
        warmup: Passes before the first round, three at least.
        threads: CPU threads within an operation; as they are if None.
        baseline: Name of the model that the others' latencies are compared with, as
            `keymix.analysis.timing.compare` does it, at one level for all; none if None. With fewer
            rounds than `keymix.analysis.timing.fewest_rounds` nothing is called different, and the
            verdict says so.
        on_round: Called with the number of rounds that are done, after each.
        task: Name of the task whose example batch the models take; one tensor if empty.

    Raises:
        UserError: If there are no models, one cannot be made, or a number is less than 1.
    """
    if not models:
        raise UserError("there is no model to measure")
    builds = {name: each for name, each in models.items() if isinstance(each, Build)}
    task = task or next((build.task for build in builds.values()), "")
    check_positive(batch_size=batch_size, repeats=repeats, warmup=warmup)
    if threads is not None:
        check_positive(threads=threads)
    made = {n: m.make() if isinstance(m, Build) else m for n, m in models.items()}
    if input_size is None:
        input_size = default_input_size(next(iter(made.values())))
    size = tuple(int(s) for s in input_size)
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(use_threads(threads))
        for model in made.values():
            stack.enter_context(inference_mode_of(model))
        stack.enter_context(torch.no_grad())
        sizes = dict.fromkeys((1, batch_size))
        passes = Passes(task)
        turns = [_Turns(made, size, images, warmup, passes=passes) for images in sizes]
        for turn in range(repeats):
            for each in turns:
                each.round()
            if on_round is not None:
                on_round(turn + 1)
    alone, batch = turns[0].samples, turns[-1].samples
    costs = {}
    for name, model in made.items():
        x = turns[-1].inputs[name]
        cost = _cost(x, size, alone[name], batch[name], repeats=repeats, threads=used)
        costs[name] = _with_cuda_peak(cost, model, x, passes)
        if baseline in alone and name != baseline:
            paired = compare(alone[baseline], alone[name], comparisons=len(models) - 1)
            costs[name] = replace(costs[name], against=paired)
    if not builds:
        return costs
    del made, model, turns, each  # their memory is the fresh process's
    peaks = peak_memory(builds, size, batch_size=batch_size, threads=threads)
    return costs | {name: with_peak(costs[name], peak) for name, peak in peaks.items()}


def training_quartiles_ms(
    models: Mapping[str, nn.Module],
    input_size: Sequence[int],
    *,
    batch_size: int,
    seconds: float,
    repeats: int = 20,
    threads: int | None = None,
    task: str = "",
) -> dict[str, tuple[float, float, float]]:
    """Time forward and backward of a training batch, all models in turns: quartiles, milliseconds.

    Args:
        models: Name to model, each on its device; they get their mode back and keep no gradients.
        input_size: Shape without the batch.
        batch_size: Inputs per batch.
        seconds: About how long it may take; three rounds at least.
        repeats: Rounds at most.
        threads: CPU threads within an operation; as they are if None.
        task: Name of the task whose example batch the models take; one tensor if empty.
    """
    passes = Passes(task)
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_threads(threads))
        timed_passes = {}
        for name, model in models.items():
            stack.enter_context(_training_mode(model))
            x = example_for(model, passes, tuple(input_size), batch_size)
            call = functools.partial(run_pass, model, x, "training", passes=passes)
            timed_passes[name] = timed(call, first_of(x).device)
        start = time.perf_counter()
        turns, rounds = Turns(timed_passes, 1), 0
        while rounds < _LEAST_ROUNDS or (
            rounds < repeats and time.perf_counter() - start < seconds
        ):
            turns.round()
            rounds += 1
    found = {name: quartiles(each.kept()) for name, each in turns.samples.items()}
    return {name: (1e3 * low, 1e3 * mid, 1e3 * high) for name, (low, mid, high) in found.items()}


@contextlib.contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in training mode; afterwards modes, statistics and gradients are as before."""
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    with inference_mode_of(model):  # which gives each module its own mode back
        try:
            model.train()
            yield
        finally:
            with torch.no_grad():
                for name, each in model.named_buffers():
                    each.copy_(buffers[name])
            model.zero_grad(set_to_none=True)


def measure_paired(
    base: nn.Module,
    other: nn.Module,
    input_size: Sequence[int],
    *,
    batch_size: int = 1,
    repeats: int = 20,
    warmup: int = 3,
    comparisons: int = 1,
    task: str = "",
) -> Paired:
    """Compare the latency of two models on a machine that others use too.

    Each round times both, one right after the other, in an order that is drawn at random and with
    the same number of inner repeats: what slows the machine for longer than a round slows both,
    and leaves the ratio of the round.

    Args:
        base: The model that is compared with.
        other: The model that is compared.
        input_size: Shape without the batch.
        batch_size: Images at once.
        repeats: Rounds; below `keymix.analysis.timing.fewest_rounds` of them, ten for one
            comparison, the verdict is ``"too few rounds"``.
        warmup: Passes of each before the first round, three at least.
        comparisons: Comparisons that are read together, which share the test's level.
        task: As in `measure_interleaved`.
    """
    size = tuple(int(s) for s in input_size)
    models = {"base": base, "other": other}
    with contextlib.ExitStack() as stack:
        for model in models.values():
            stack.enter_context(inference_mode_of(model))
        stack.enter_context(torch.no_grad())
        turns = _Turns(models, size, batch_size, warmup, passes=Passes(task))
        for _ in range(repeats):
            turns.round()
    return compare(turns.samples["base"], turns.samples["other"], comparisons=comparisons)


def _cost(
    x: Inputs,
    size: tuple[int, ...],
    alone: Samples,
    batch: Samples,
    *,
    repeats: int,
    threads: int,
) -> Cost:
    fast, middle, slow = quartiles(alone.kept())
    batch_fast, batch_middle, batch_slow = quartiles(batch.kept())
    images, like = len(x), first_of(x)
    return Cost(
        latency_ms=middle * 1e3,
        latency_q1_ms=fast * 1e3,
        latency_q3_ms=slow * 1e3,
        images_per_s=images / batch_middle,
        images_per_s_q1=images / batch_slow,
        images_per_s_q3=images / batch_fast,
        batch_size=images,
        input_size=size,
        repeats=repeats,
        threads=threads,
        device=str(like.device),
        dtype=str(like.dtype).removeprefix("torch."),
        quiet_share=alone.quiet_share(),
    )


def _with_cuda_peak(cost: Cost, model: nn.Module, x: Inputs, passes: Passes) -> Cost:
    """Add the peak memory of CUDA's passes; a cost of another device is as it was."""
    if first_of(x).device.type != "cuda":
        return cost
    x = x.clone() if isinstance(x, Tensor) else [each.clone() for each in x]
    return replace(
        cost,
        peak_inference_mib=cuda_growth(model, x, "inference", passes=passes),
        peak_training_mib=cuda_growth(model, x, "training", passes=passes),
        peak_note=f"CUDA memory allocated beyond weights and input at batch {cost.batch_size}",
    )


def with_peak(cost: Cost, peak: Peak) -> Cost:
    """Put a peak that another process measured into a cost."""
    return replace(
        cost,
        peak_inference_mib=peak.inference_mib,
        peak_training_mib=peak.training_mib,
        peak_note=peak.note,
    )
