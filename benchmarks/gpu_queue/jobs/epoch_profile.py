# SPDX-License-Identifier: Apache-2.0
"""Where the time of an epoch goes: recipe ``vit_small_cifar10`` through keymix's own training.

The parts of an epoch are timed on the host in every epoch, by wrapping the functions that do them;
one epoch in the middle runs under `torch.profiler`, whose trace says what the GPU did for which
part. Profiling slows the host and not the kernels, so the share in which the GPU is busy is the
kernels' time of the profiled epoch over the training time of the others.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import json
import math
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from gpu_queue import trace
from gpu_queue.job import Context, Job, Result, Step, table

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.recipe import Recipe

MIXERS = {"softmax": None, "static_key": "ska"}
BUSY = 0.8
"""A GPU that is busy for a smaller share of the training waits for the host."""
WANTED = 21_000
"""Images a second at which 200 epochs take eight minutes."""

TRAINING = (
    "first batch",
    "draws of the epoch",
    "augmentation",
    "forward",
    "record of losses",
    "backward",
    "optimizer",
    "schedule",
    "training loop",
    "wait at the end",
)
_SAVING = ("checkpoint", "best weights", "metrics", "old checkpoints")
_VALIDATION = "validation"
_WHOLE = (_VALIDATION, "mean losses")  # parts that are not divided
_DATA = ("first batch", "draws of the epoch", "augmentation")
_OWNERS = {**dict.fromkeys(_DATA, "data augmentation"), "optimizer": "optimizer"}
_OWNERS |= {"record of losses": "losses and gradients looked at"}
_PLACES = (  # module, class, function, name of the part
    ("keymix.train.step", "Training", "step", "training loop"),  # a step, but for what is in it
    ("keymix.train.loop", None, "save", "checkpoint"),
    ("keymix.data.loaders", "InMemoryBatches", "_draw", "draws of the epoch"),
    ("keymix.tasks.classification.training", "ClassificationTask", "training_step", "forward"),
    ("lightning_fabric", "Fabric", "backward", "backward"),
    ("keymix.train.step", "Training", "update", "optimizer"),
    ("timm.scheduler.scheduler", "Scheduler", "step_update", "schedule"),
    ("keymix.train.nonfinite", "Losses", "take", "record of losses"),
    ("keymix.train.nonfinite", "Losses", "before_update", "record of losses"),
    ("keymix.train.nonfinite", "Losses", "look", "record of losses"),
    ("keymix.train.nonfinite", "Losses", "means", "mean losses"),
    ("keymix.train.loop", "EpochRecord", "write_weights", "best weights"),
    ("keymix.train.loop", None, "prune", "old checkpoints"),
    ("keymix.train.files", None, "write_metrics", "metrics"),
    ("keymix.train.files", None, "write_atomically", "write"),
    ("os", None, "fsync", "fsync"),
)
_LEVEL = 0.01  # of calling compiled epochs faster or slower
_TRACED_STEPS = 4  # steps of which a trace is kept, if it is small
_LARGEST_TRACE = 4 << 20  # bytes

# Process start 5, 60,000 images 7, CUDA and the model 5, six epochs of 88 steps at 30 ms with
# validation and 115 MB saved 4 each 24, the test 2, profiler: stop, write and read 300 MB 30
_PROFILE_SECONDS = 75.0
# The same start 17; 4 + 4 epochs as they are at 4, five compiled at 2.5, compilation of the
# training 50, three tests 5
_COMPILE_SECONDS = 120.0


class Parts:
    """Times the parts of an epoch on the host, each without those within it, and labels them.

    Args:
        synchronize: Waits for the GPU.
    """

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.trained = 0.0
        self._synchronize = synchronize
        self._open: list[tuple[str, list[float]]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part; within one of saving its name goes before."""
        from torch.profiler import record_function

        outer = self._open[-1][0] if self._open else ""
        if outer in _WHOLE:
            yield
            return
        if outer.partition(":")[0] in _SAVING:
            name = f"{outer.partition(':')[0]}: {name}"
        within: list[float] = []
        self._open.append((name, within))
        start = time.perf_counter()
        try:
            with record_function(trace.PREFIX + name):
                yield
        finally:
            spent = time.perf_counter() - start
            self._open.pop()
            self.seconds[name] += spent - sum(within)
            if self._open:
                self._open[-1][1].append(spent)

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Time the parts of whatever is trained within the block."""
        from keymix.data.loaders import Loader
        from keymix.train import loop

        with contextlib.ExitStack() as stack:
            for module, owner, function, name in _PLACES:
                place = importlib.import_module(module)
                place = place if owner is None else getattr(place, owner)
                wrapped = self._wrapped(getattr(place, function), name)
                stack.enter_context(mock.patch.object(place, function, wrapped))
            batches = self._each_batch(Loader.batches)
            stack.enter_context(mock.patch.object(Loader, "batches", batches))
            validate = self._after_training(loop.validate)
            stack.enter_context(mock.patch.object(loop, "validate", validate))
            yield

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def _each_batch(self, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            name, batches = "first batch", iter(function(*args, **kwargs))
            while True:
                with self.part(name):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
                name = "augmentation"

        return timed

    def _after_training(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for the steps that are still on the GPU, which are no part of the validation."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part("wait at the end"):
                self._synchronize()
            self.trained = time.perf_counter()
            with self.part(_VALIDATION):
                return function(*args, **kwargs)

        return timed


class Watch:
    """Takes the times of each epoch, and profiles one: keymix calls it at the end of an epoch.

    Args:
        parts: Times the parts.
        profiled: The epoch to profile; None for none.
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, parts: Parts, profiled: int | None, device: str) -> None:
        self.epochs: list[Result] = []
        self.profile: Any = None
        self._parts, self._profiled, self._device = parts, profiled, device
        self._start = time.perf_counter()

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write down the epoch that ends, and prepare the next one."""
        now, parts = time.perf_counter(), self._parts
        self.epochs.append(
            {
                "profiled": line["epoch"] == self._profiled,
                "seconds": now - self._start,
                "training_s": parts.trained - self._start,
                "parts": dict(parts.seconds),
            }
        )
        if self._profiled is not None and line["epoch"] == self._profiled - 1:
            self._begin()
        elif line["epoch"] == self._profiled:
            self.profile.stop()
        parts.seconds.clear()
        self._start = time.perf_counter()

    def _begin(self) -> None:
        """Begin to profile; a first profile of next to nothing bears the cost of loading CUPTI."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities):
            torch.ones(1, device=self._device).add_(1)
        self.profile = profile(activities=activities)
        self.profile.start()


def recipe_of(context: Context, mixer: str | None) -> Recipe:
    """The recipe on the whole set."""
    from keymix import recipes
    from keymix.train.recipe import replace_path

    changes: dict[str, Any] = {"data.spec": context.cifar10, "model.mixer": mixer}
    if context.tiny:
        changes |= {"data.limit": 120, "data.batch_size": 32, "data.image_size": 16}
        sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2}
        changes |= {f"model.options.{name}": size for name, size in sizes.items()}
    return replace_path(recipes.get("vit_small_cifar10"), changes)


def trained(
    context: Context,
    recipe: Recipe,
    data: ImageData,
    name: str,
    epochs: int,
    *,
    profiled: int | None = None,
) -> tuple[Watch, dict[str, float]]:
    """Train some epochs; return what was seen of them, and the sizes of files in MiB."""
    import torch

    from keymix.train.engine import train
    from keymix.train.recipe import replace_path

    synchronize = torch.cuda.synchronize if context.device == "cuda" else lambda: None
    parts = Parts(synchronize)
    watch = Watch(parts, profiled, context.device)
    out = context.work / name
    with parts.everywhere():
        recipe = replace_path(recipe, {"schedule.epochs": epochs})
        train(recipe, out, progress=watch, data=data, overwrite=out.exists())
    largest = max(path.stat().st_size for path in out.rglob("*.ckpt"))
    weights = (out / "weights_last.safetensors").stat().st_size
    shutil.rmtree(out)
    return watch, {"checkpoint": largest / 2**20, "weights": weights / 2**20}


def _facts(context: Context, recipe: Recipe, data: ImageData) -> Result:
    """What was trained, with which memory."""
    import torch

    cuda = context.device == "cuda"
    return {
        "device": context.device,
        "recipe": recipe.name,
        "model": {"name": recipe.model.name, "mixer": recipe.model.mixer},
        "precision": ("bf16" if cuda else "32") if recipe.precision == "auto" else recipe.precision,
        "batch": recipe.data.batch_size,
        "images": len(data.train),
        "steps": -(-len(data.train) // recipe.data.batch_size),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def profile_epoch(context: Context, mixer: str | None) -> Result:
    """Time epochs, and profile one in the middle."""
    from keymix.train.model import load_data

    recipe = recipe_of(context, mixer)
    data = load_data(recipe.data)
    profiled = 2 if context.tiny else 3
    watch, sizes = trained(context, recipe, data, "run", profiled + 3, profiled=profiled)
    facts = _facts(context, recipe, data)
    path = context.work / "trace.json"
    watch.profile.export_chrome_trace(str(path))
    events = trace.read(path)
    path.unlink()
    found = trace.summary(
        events, steps=facts["steps"], parts=TRAINING, ends=_VALIDATION, owners=_OWNERS
    )
    _keep_few(events, context.keep / f"trace-{_TRACED_STEPS}-steps.json.gz")
    return facts | {"mib": sizes, "epochs": watch.epochs, "profile": found}


def _keep_few(events: Sequence[trace.Event], path: Path) -> None:
    """Keep the trace of a few steps, from the middle, if it is small."""
    starts = sorted(e["ts"] for e in events if e["name"] == f"{trace.PREFIX}training loop")
    first = len(starts) // 2
    window = starts[first : first + _TRACED_STEPS + 1]
    few = trace.cut(events, window[0], window[-1])
    packed = gzip.compress(json.dumps({"traceEvents": few}).encode())
    if len(packed) < _LARGEST_TRACE:
        path.write_bytes(packed)


def compare_compiled(context: Context, mixer: str | None) -> Result:
    """Time epochs as they are, compiled, and as they are again."""
    import torch

    from keymix.train.model import load_data
    from keymix.train.recipe import replace_path

    plain = recipe_of(context, mixer)
    compiled = replace_path(plain, {"compile": True})
    data = load_data(plain.data)
    turns = {"before": (plain, 4), "compiled": (compiled, 5), "after": (plain, 4)}
    seen = {}
    with contextlib.ExitStack() as stack:
        if context.tiny:  # the same code but for the compiler, which takes longer than all of this
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, (recipe, epochs) in turns.items():
            watch, _ = trained(context, recipe, data, name, 2 if context.tiny else epochs)
            seen[name] = watch.epochs
    return _facts(context, plain, data) | {"turns": seen}


def steps(tiny: bool) -> list[Step]:
    """A profiled epoch of each mixer, then the compiled ones."""
    kinds = {"profile": (profile_epoch, _PROFILE_SECONDS)}
    kinds |= {"compile": (compare_compiled, _COMPILE_SECONDS)}
    mixers = {"static_key": MIXERS["static_key"]} if tiny else MIXERS
    return [
        Step(
            name=f"{kind}/{name}",
            seconds=seconds,
            measure=functools.partial(measure, mixer=mixer),
            data=() if tiny else ("cifar10",),
            gpu_gib=16.0,
        )
        for kind, (measure, seconds) in kinds.items()
        for name, mixer in mixers.items()
    ]


def plain_epochs(epochs: Sequence[Result]) -> list[Result]:
    """Those behind the first, which warms up, and without the profiled one."""
    return [epoch for epoch in epochs[1:] if not epoch["profiled"]]


def median(epochs: Sequence[Result], key: str) -> float:
    """The median of one of the times of epochs, seconds."""
    return statistics.median(epoch[key] for epoch in epochs)


def part_seconds(epochs: Sequence[Result]) -> dict[str, float]:
    """Median seconds of each part, over the epochs that have it: not each has better weights."""
    found = defaultdict(list)
    for epoch in epochs:
        for name, seconds in epoch["parts"].items():
            found[name].append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def saving_seconds(parts: Mapping[str, float]) -> float:
    """Seconds of checkpoint, weights and metrics together."""
    return sum(value for name, value in parts.items() if name.partition(":")[0] in _SAVING)


def busy_share(result: Result) -> float:
    """Share of the training time, without the profiler, in which the GPU computes."""
    seconds = median(plain_epochs(result["epochs"]), "training_s")
    return min(1.0, result["profile"]["busy_ms"] / 1e3 / seconds)


def is_resident(result: Result) -> bool:
    """Whether nothing is uploaded for a batch but the first, with which the epoch's draws come."""
    copies = result["profile"]["copies"]
    return not any(each["way"] == "HtoD" and each["part"] == "augmentation" for each in copies)


def limit(result: Result) -> str:
    """Say what an epoch waits for most, by rule."""
    if result["device"] != "cuda":
        return "not asked without a GPU"
    epochs, found = plain_epochs(result["epochs"]), result["profile"]
    parts, training = part_seconds(epochs), median(epochs, "training_s")
    saving, validation = saving_seconds(parts), parts[_VALIDATION]
    if saving > training:
        return f"saving ({saving:.2f} s against {training:.2f} s of training)"
    if validation > training:
        return f"validation ({validation:.2f} s against {training:.2f} s of training)"
    if busy_share(result) < BUSY:
        gaps = {name: gap for name, gap in found["idle_ms"].items() if gap > 0}
        most = f"; most of the gaps before kernels of: {max(gaps, key=gaps.__getitem__)}"
        return f"the host ({found['launches_per_step']:.0f} launches a step{most if gaps else ''})"
    groups = {name: each["ms"] for name, each in found["groups"].items()}
    most = max(groups, key=groups.__getitem__)
    return f"GPU kernels, most of all {most} ({groups[most] / sum(groups.values()):.0%} of them)"


def section(results: Mapping[str, Result]) -> str:
    """Say where the time goes, by mixer, and what compilation changes."""
    pages = {"profile": _profile_page, "compile": _compile_page}
    parts = []
    for name, result in results.items():
        kind, _, mixer = name.partition("/")
        parts.append(pages[kind](mixer, result))
    return "\n\n".join(parts)


def _profile_page(mixer: str, result: Result) -> str:
    epochs = plain_epochs(result["epochs"])
    parts, seconds = part_seconds(epochs), median(epochs, "seconds")
    training, saving = median(epochs, "training_s"), saving_seconds(parts)
    rates = sorted(result["images"] / epoch["training_s"] for epoch in epochs)
    profiled = next(epoch for epoch in result["epochs"] if epoch["profiled"])
    resident = "yes" if is_resident(result) else "no"
    cuda = result["device"] == "cuda"
    after = parts[_VALIDATION] + saving
    fast = result["images"] / WANTED
    text = [
        f"**{mixer}**: an epoch takes {seconds:.2f} s, of which training {training:.2f} s "
        f"({result['images'] / training:,.0f} images/s, {rates[0]:,.0f} to {rates[-1]:,.0f}), "
        f"validation {parts[_VALIDATION]:.2f} s, saving {saving:.2f} s if it is the best so far. "
        f"Limited by: "
        f"{limit(result)}. "
        + (f"Data path resident on the GPU: {resident}. " if cuda else "")
        + f"At {WANTED:,} images/s the training of an epoch would take {fast:.2f} s; validation "
        f"and saving as they are would be {after / (after + fast):.0%} of the epoch.",
        _host_table(parts, training, seconds, result["steps"]),
    ]
    if cuda:
        text += _gpu_tables(result)
    text.append(
        f"`{result['recipe']}` with {mixer} in {result['precision']}, batch {result['batch']}, "
        f"{result['images']:,} images in {result['steps']} steps, on {result['device']}"
        + (f", {result['peak_gib']:.1f} GiB at most" if cuda else "")
        + f"; medians of {len(epochs)} epochs behind one of warm-up ("
        + ", ".join(f"{epoch['seconds']:.2f}" for epoch in epochs)
        + f" s). The profiled one took {profiled['seconds']:.2f} s. Seconds on the host do not "
        "wait for the GPU but where the program does. A checkpoint has "
        f"{result['mib']['checkpoint']:.0f} MiB, weights {result['mib']['weights']:.0f} MiB."
    )
    return "\n\n".join(text)


def _host_table(parts: Mapping[str, float], training: float, seconds: float, steps: int) -> str:
    own = {name: value for name, value in parts.items() if name in TRAINING}
    rows = [
        [f"training: {name}", f"{value:.3f}", f"{1e3 * value / steps:.2f}"]
        for name, value in sorted(own.items(), key=lambda item: -item[1])
    ]
    rows.append(["training: rest", f"{max(0.0, training - sum(own.values())):.3f}", ""])
    others = {name: value for name, value in parts.items() if name not in own}
    rows += [
        [name, f"{value:.3f}", ""] for name, value in sorted(others.items(), key=lambda i: -i[1])
    ]
    rest = seconds - training - sum(others.values())
    rows.append(["rest of the epoch", f"{max(0.0, rest):.3f}", ""])
    return table(["part, on the host", "s an epoch", "ms per step"], rows)


def _gpu_tables(result: Result) -> list[str]:
    found, steps = result["profile"], result["steps"]
    total = sum(each["ms"] for each in found["groups"].values()) or 1.0
    groups = sorted(found["groups"].items(), key=lambda item: -item[1]["ms"])
    kernels = found["top"][:10]
    gaps = sorted(found["idle_ms"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {gap / steps:.2f} ms" for name, gap in gaps if gap > 0)
    copies = [
        f"{each['copies']} {each['way']} in {each['part']} ({each['bytes'] / 2**20:.2f} MiB)"
        for each in found["copies"]
    ]
    waits = [f"{each['calls']} {each['call']} in {each['part']}" for each in found["waits"]]
    asked = [f"{count} in {name}" for name, count in found["asked"].items()]
    return [
        f"The GPU is busy for {busy_share(result):.0%} of the training "
        f"({found['busy_ms'] / found['wall_ms']:.0%} under the profiler); "
        f"{found['launches_per_step']:.0f} launches a step. Gaps a step under the profiler, by the "
        f"part whose kernel ends them: {shown or 'none'}. Copies in training: "
        f"{', '.join(copies) or 'none'}. Waits: {', '.join(waits) or 'none'}; numbers asked for: "
        f"{', '.join(asked) or 'none'}.",
        table(
            ["kernels in training", "share", "ms per step", "calls a step"],
            [[name, f"{each['ms'] / total:.0%}", *_each(each, steps)] for name, each in groups],
        ),
        table(
            ["longest kernels", "counted as", "ms per step", "calls a step"],
            [[f"`{e['kernel']}`", e["group"], *_each(e, steps)] for e in kernels],
        ),
    ]


def _each(sums: Result, steps: int) -> list[str]:
    return [f"{sums['ms'] / steps:.3f}", f"{sums['calls'] / steps:.1f}"]


def _compile_page(mixer: str, result: Result) -> str:
    turns = {name: epochs[1:] for name, epochs in result["turns"].items()}
    plain, compiled = [*turns["before"], *turns["after"]], turns["compiled"]
    slow, fast = median(plain, "training_s"), median(compiled, "training_s")
    first = result["turns"]["compiled"][0]["seconds"] - median(compiled, "seconds")
    ranges = [sorted(epoch["training_s"] for epoch in each) for each in (plain, compiled)]
    word = "not distinguishable from it as it is"
    if 2 / math.comb(len(plain) + len(compiled), len(compiled)) > _LEVEL:
        word = "not tested against it as it is, too few epochs"
    elif ranges[1][-1] < ranges[0][0]:
        word = "faster than as it is"
    elif ranges[1][0] > ranges[0][-1]:
        word = "slower than as it is"
    rows = []
    for name, epochs in turns.items():
        times = sorted(epoch["training_s"] for epoch in epochs)
        middle = statistics.median(times)
        rows.append(
            [
                name,
                len(epochs),
                f"{middle:.3f} ({times[0]:.3f} to {times[-1]:.3f})",
                f"{result['images'] / middle:,.0f}",
                f"{median(epochs, 'seconds'):.3f}",
            ]
        )
    heads = ["turn", "epochs", "training, s an epoch", "images/s", "whole epoch, s"]
    return (
        f"**{mixer}, compiled**: {word}: {result['images'] / fast:,.0f} against "
        f"{result['images'] / slow:,.0f} images/s in training, {slow / fast:.2f} times. The first "
        f"compiled epoch took {first:.1f} s longer than those behind it.\n\n"
        f"{table(heads, rows)}\n\n"
        f"`{result['recipe']}` in {result['precision']}, batch {result['batch']}, on "
        f"{result['device']}: epochs as they are, compiled, and as they are again, in one process, "
        "the first of each left out; medians, smallest to largest. Faster or slower is said if all "
        f"compiled epochs are so against all others, and chance does that in {_LEVEL:.0%} of cases "
        "at most."
    )


JOB = Job(
    number=4,
    name="epoch_profile",
    title="An epoch under the profiler",
    purpose=(
        "Where does the time of an epoch of `vit_small_cifar10` go, does the data path stay on "
        "the GPU, what limits it, and what does compilation change?"
    ),
    form={
        "epochs": "seconds of each: all, training, and the host's seconds by part",
        "profile": "of the training in the profiled epoch: GPU busy and idle, kernels by group, "
        "the 25 longest as they are named, launches, copies and waits by part",
        "mib": "sizes of a checkpoint and of weights",
        "turns": "epochs as they are, compiled, and as they are again",
    },
    steps=steps,
    section=section,
)
