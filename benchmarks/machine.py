# SPDX-License-Identifier: Apache-2.0
"""What a machine is, what it can do at most, and whether it is busy."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import keymix
from keymix.analysis.timing import Pass, Samples, Turns, quartiles

BUSY = "BUSY: other programs took processor time. The times below mean nothing."
_STAT = Path("/proc/stat")
_MUCH = 0.1  # of the machine's time


def machine(threads: int) -> str:
    """Describe where and with what this runs."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        processor = f"{named[0]}, {len(named)} cores" if named else processor
    return (
        f"keymix {keymix.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()}; {processor}; {threads} threads, "
        f"float32, CPU capability {torch.backends.cpu.get_cpu_capability()}"
    )


class Watch:
    """Notes from when on other programs are watched.

    The samples of `keymix.analysis.timing` see what stops the thread that calls an operation. A
    thread that waits for a stopped helper of its own spins, so that with several threads the
    machine's books are read as well.
    """

    def __init__(self) -> None:
        self._since, self._others = time.perf_counter(), _others()

    def busy(self, samples: Iterable[Samples]) -> bool:
        """Say whether other programs took a tenth of the machine's time, or part of most samples.

        Args:
            samples: What was timed meanwhile.
        """
        passed = (time.perf_counter() - self._since) * (os.cpu_count() or 1)
        taken = (_others() - self._others) / max(passed, 1e-9)
        return taken > _MUCH or statistics.fmean(each.quiet_share() for each in samples) < 0.5


def _others() -> float:
    """Seconds of processor time that all but this process have had (Linux), the host's included."""
    if not _STAT.exists():
        return 0.0
    ticks = [int(each) for each in _STAT.read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # and waiting for disks
    own = os.times()
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - own.user - own.system


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The highest rates that this machine was measured at."""

    macs: float  # multiply-adds a second of a matrix product, by the faster of two libraries
    bytes: float  # bytes a second that a copy reads and writes
    busy: bool  # whether the machine was while they were measured

    def __str__(self) -> str:
        """Write both rates."""
        return (
            f"ceilings: matrix product {self.macs / 1e9:.0f} GMAC/s, copy {self.bytes / 1e9:.1f} "
            "GB/s read and written"
        )


def ceiling(*, side: int = 2048, copied: int = 2**26, rounds: int = 5) -> Ceiling:
    """Measure them, in float32 with the threads that are set.

    Args:
        side: Rows and columns of the matrices.
        copied: Numbers that are copied.
        rounds: Rounds.
    """
    left, right = torch.randn(2, side, side)
    image, kernel = left.T.reshape(1, side, side, 1), right.reshape(side, side, 1, 1)
    source, target = torch.randn(copied), torch.empty(copied)
    turns = Turns(
        {
            "BLAS": Pass(lambda: left @ right),
            "oneDNN": Pass(lambda: F.conv2d(image, kernel)),  # a 1x1 convolution is a product
            "copy": Pass(lambda: target.copy_(source)),
        }
    )
    watch = Watch()
    for _ in range(rounds):
        turns.round()
    disturbed = watch.busy(turns.samples.values())
    blas, one_dnn, copy = (quartiles(each.kept())[0] for each in turns.samples.values())
    most = side**3 / min(blas, one_dnn)
    return Ceiling(macs=most, bytes=2 * 4 * copied / copy, busy=disturbed)
