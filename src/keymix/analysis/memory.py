# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a model's passes, measured from outside: what a fresh process grows by.

On a CPU no allocator of PyTorch's keeps books, so the resident set of a process of its own is
read; on CUDA the caching allocator's peak is. ``python -m keymix.analysis.memory`` is that process.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from keymix.analysis.passes import ONE_TENSOR, Inputs, Passes, example_for, first_of
from keymix.errors import reason
from keymix.models.memory import memory_of_this_group

Phase = Literal["inference", "training"]
PHASES: tuple[Phase, ...] = ("inference", "training")
MIB = 2**20
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class Build:
    """How another process makes a model."""

    # arguments of the factory by name, plain data
    kwargs: dict[str, Any] = field(default_factory=dict)
    # ``module:function`` that returns the model
    factory: str = "keymix.models.factory:create_model"
    # files of a user's own mixers, tasks and data sources, run before
    imports: tuple[str, ...] = ()
    # name of the task that says what the model is run on and how a step runs it; empty for one
    # tensor
    task: str = ""

    def make(self) -> nn.Module:
        """Make the model, with the weights that seed 0 gives."""
        if self.imports:
            from keymix.mixers.registry import import_file

            for path in self.imports:
                import_file(path)
        module, _, function = self.factory.partition(":")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model: nn.Module = getattr(importlib.import_module(module), function)(**self.kwargs)
        return model


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak memory of a model's passes over one batch, beyond its weights and the input."""

    # growth over a forward pass without gradients, MiB; None if unknown
    inference_mib: float | None
    # growth over forward and backward, the gradients of the parameters included
    training_mib: float | None
    note: str  # how it was measured, or why it is unknown


def run_pass(model: nn.Module, x: Inputs, phase: Phase, *, passes: Passes = ONE_TENSOR) -> None:
    """Run one pass: forward alone without gradients, or forward and backward."""
    if phase == "inference":
        with torch.no_grad():
            model(x)
        return
    with torch.enable_grad():
        if not any(p.requires_grad for p in model.parameters()):
            x = _derived(x) if isinstance(x, Tensor) else [_derived(each) for each in x]
        torch.autograd.backward(passes.training_pass(model, x))


def _derived(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def cuda_peak(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of CUDA memory that a call took at once, beyond those before.

    The call runs twice: what libraries keep from the first time on does not count.
    """
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def cuda_growth(model: nn.Module, x: Inputs, phase: Phase, *, passes: Passes = ONE_TENSOR) -> float:
    """Measure the growth of CUDA memory over one pass of a copy of the model, MiB."""
    trial = copy.deepcopy(model).train(phase == "training")

    def call() -> None:
        run_pass(trial, x, phase, passes=passes)
        trial.zero_grad(set_to_none=True)

    return cuda_peak(call, first_of(x).device) / MIB


def _status(key: str) -> int:
    """Read a size in KiB from the process's own status."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise KeyError(key)


def _release() -> None:
    """Give freed memory back to the system, so that it is seen when it is taken again."""
    gc.collect()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cpu_growth(model: nn.Module, x: Inputs, phase: Phase, *, passes: Passes = ONE_TENSOR) -> float:
    """Measure the growth of this process's resident set over one pass, MiB.

    Only a fresh process gives an honest figure: memory that was freed but not returned to the
    system hides what a pass takes.
    """
    model.train(phase == "training")
    run_pass(model, x[:2], phase, passes=passes)  # kernels, thread pools and code are loaded now
    model.zero_grad(set_to_none=True)
    _release()
    _CLEAR.write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    run_pass(model, x, phase, passes=passes)
    return max(0, _status("VmHWM") - before) / 1024


def cpu_peak_unknown() -> str | None:
    """Say why the peak of a CPU pass cannot be measured here; None if it can."""
    if not _STATUS.exists():
        return "unknown: needs /proc, which this system does not have"
    if not os.access(_CLEAR, os.W_OK):
        return "unknown: /proc/self/clear_refs is not writable here, so peaks are not known"
    return None


def available_bytes(device: torch.device) -> float:
    """Return the memory that is free before the machine swaps, infinite where it is not known.

    A CUDA device asks its driver; any other asks the system and its control group.
    """
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    rooms = [math.inf]
    if _MEMINFO.exists():
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        rooms += [1024 * float(line[1]) for line in lines if line[0] == "MemAvailable:"]
    limit, used = memory_of_this_group()
    return max(0.0, min(*rooms, limit - used))


def fresh_python(module: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment that run a module in a process with the imports of this one.

    A file of the working folder named as a library is not taken for it, unless this process looks
    for libraries there. Threads that wait leave their core to others, unless the environment of
    this process says how to wait.
    """
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": places}
    return [sys.executable, "-P", "-m", module], environment


def peak_memory(
    builds: Mapping[str, Build],
    input_size: Sequence[int],
    *,
    batch_size: int = 64,
    threads: int | None = None,
    phases: Sequence[Phase] = PHASES,
) -> dict[str, Peak]:
    """Measure the peak memory of models on the CPU, in a process of their own, by name.

    What could not be measured is None, and the note says why.
    """
    why = cpu_peak_unknown()
    if why is not None:
        return {name: Peak(inference_mib=None, training_mib=None, note=why) for name in builds}
    request = {
        "builds": {name: asdict(build) for name, build in builds.items()},
        "input_size": list(input_size),
        "batch_size": batch_size,
        "threads": threads or torch.get_num_threads(),
        "phases": list(phases),
    }
    # large blocks straight from the system: their coming and going is then seen page by page
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command, environment = fresh_python("keymix.analysis.memory")
    done = subprocess.run(
        command,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env=environment | allocator,
    )
    answers: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"keymix": '):
            answers |= json.loads(line)["keymix"]
    used = "1 thread" if request["threads"] == 1 else f"{request['threads']} threads"
    ended = f"the measuring process ended with {done.returncode}. "
    ended += (done.stderr.strip().splitlines() or [""])[-1]

    def peak(name: str) -> Peak:
        known = {phase: answers.get(f"{name}/{phase}") for phase in PHASES}
        note = f"growth of a fresh process with {used}, at batch {batch_size}"
        if any(known[phase] is None for phase in phases):
            note = "unknown: " + answers.get(f"{name}/failed", ended).strip()
        return Peak(inference_mib=known["inference"], training_mib=known["training"], note=note)

    return {name: peak(name) for name in builds}


def _answer(key: str, value: Any) -> None:
    sys.stdout.write(json.dumps({"keymix": {key: value}}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure what standard input asks for, one JSON line an answer on standard output."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    batch_size, shape = request["batch_size"], tuple(request["input_size"])
    for name, fields in request["builds"].items():
        build = Build(**fields)
        passes, model = Passes(build.task), None  # the memory of the one before is free
        try:
            model = build.make()
            x = example_for(model, passes, shape, max(2, batch_size))[:batch_size]
            for phase in request["phases"]:
                grown = cpu_growth(model, x, phase, passes=passes)
                _answer(f"{name}/{phase}", round(grown, 2))
        except (RuntimeError, ValueError) as error:
            _answer(f"{name}/failed", reason(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
