# SPDX-License-Identifier: Apache-2.0
"""CPU threads: how many a process takes.

The number decides how sums are split, and with it the last bits of a result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(processes: int = 1) -> int:
    """Return the threads of each of some processes: its share of the cores, at least one.

    They are not more than PyTorch has in this process: ``OMP_NUM_THREADS``, if that is set.
    """
    return max(1, min(cores() // processes, torch.get_num_threads()))


@contextmanager
def use_threads(number: int | None) -> Iterator[int]:
    """Compute with a number of threads, as many as before if None, and give it."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
