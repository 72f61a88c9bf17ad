# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: options, the machine's line, timing in turns, tables in Markdown."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import keymix
from keymix.analysis.measure import timed
from keymix.analysis.mixer_alone import usable_device
from keymix.analysis.timing import Samples, Turns, compare
from keymix.errors import UserError
from keymix.train.environment import cpu_model

_STAT = Path("/proc/stat")
_MUCH = 0.1  # of the machine's time


def options(doc: str | None, *, threads: int | None = None) -> argparse.ArgumentParser:
    """Begin a command line: what the script is, and ``--threads``."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--threads", type=int, default=threads or torch.get_num_threads())
    return made


def begin(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, set the threads and print the machine."""
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    print(
        f"keymix {keymix.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()}; {cpu_model()}, {os.cpu_count()} cores; "
        f"{given.threads} threads, CPU capability {torch.backends.cpu.get_cpu_capability()}"
    )
    return given


def device_name(name: str) -> str:
    """Check the name of a device, as the ``type`` of an option."""
    try:
        usable_device(name)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def in_turns(
    calls: Mapping[Any, Callable[[], object]],
    *,
    rounds: int,
    seconds: float = 0.0,
    what: str = "",
    device: str | torch.device = "cpu",
    processor: bool = False,
) -> dict[Any, Samples]:
    """Time calls in turns, and say if other programs took time.

    The samples see what stops the thread that calls an operation. A thread that waits for a stopped
    helper of its own spins, so that with several threads the machine's books are read as well.

    Args:
        calls: Name to call.
        rounds: Rounds at least.
        seconds: Up to five times as many rounds are timed within so many seconds.
        what: What is timed, for the line that says that the machine was busy.
        device: Where it runs.
        processor: Take the processor time of the calling thread, which other programs disturb
            little, as the time.
    """
    turns = Turns({name: timed(call, torch.device(device)) for name, call in calls.items()})
    start, others, done = time.perf_counter(), _others(), 0
    while done < rounds or (done < 5 * rounds and time.perf_counter() - start < seconds):
        turns.round()
        done += 1
    if processor:
        return {name: Samples(each.cpu, each.cpu) for name, each in turns.samples.items()}
    taken = (_others() - others) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    quiet = statistics.fmean(each.quiet_share() for each in turns.samples.values())
    if taken > _MUCH or quiet < 0.5:
        print(f"BUSY ({what}): other programs took processor time. Its times mean nothing.")
    return turns.samples


def _others() -> float:
    """Seconds of processor time that all but this process have had (Linux), the host's included."""
    if not _STAT.exists():
        return 0.0
    ticks = [int(each) for each in _STAT.read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # and waiting for disks
    own = os.times()
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def training_step(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    bfloat16: bool = False,
) -> Callable[[], None]:
    """Return what takes a training step of a classifier, under autocast if asked for."""

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()

    return step


def ratio(base: Samples, other: Samples, digits: int = 2) -> str:
    """Write the median [quartiles] of the rounds' ratios; below 1 the other is faster."""
    found = compare(base, other)
    return f"{found.ratio:.{digits}f} [{found.ratio_q1:.{digits}f}, {found.ratio_q3:.{digits}f}]"


def spread(values: Sequence[float], form: str) -> list[str]:
    """Write median, smallest and largest."""
    return [
        format(number, form) for number in (statistics.median(values), min(values), max(values))
    ]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, names: int = 1) -> None:
    """Print a table in Markdown, a row as soon as it is there; its first columns are names."""
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * names}{'--:|' * (len(heads) - names)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    print()
