# SPDX-License-Identifier: Apache-2.0
"""Whether a model fits into memory, asked before its weights are made."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from keymix.errors import UserError

_ALLOCATORS = (
    *("can't allocate memory", "not enough memory", "out of memory", "bad_alloc"),
    # sizes whose product is more than a whole number of 64 bits holds
    *("Storage size calculation overflowed", "Overflow when unpacking long"),
)


_CGROUP = Path("/sys/fs/cgroup")


def memory_of_this_machine() -> float:
    """Bytes of its memory that this process may use; infinite where the system does not say."""
    limit, _ = memory_of_this_group()
    try:
        return min(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), limit)
    except (AttributeError, OSError, ValueError):
        return limit


def memory_of_this_group() -> tuple[float, float]:
    """Return the limit of the process's control group and what is used of it, in bytes.

    Without a limit, or where the system does not say, infinite and 0.
    """
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return (math.inf, 0.0) if limit is None else (float(limit), float(used or 0))


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is an allocator's; on a CPU PyTorch has no class for it."""
    if error is None:
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    allocator = isinstance(error, RuntimeError) and any(w in str(error) for w in _ALLOCATORS)
    return allocator or ran_out(error.__cause__)


@contextmanager
def within_reach(label: str) -> Iterator[None]:
    """Say in one line that tensors without memory are larger than PyTorch can express.

    Its own log reports each such failure with a stack of calls.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise UserError(f"{label} has more numbers than memory can hold") from error
        raise
    finally:
        log.disabled = before


def check_weights_fit(label: str, build: Callable[[], nn.Module]) -> None:
    """Refuse a model whose weights this machine's memory does not hold.

    It is built without memory; a model that cannot be built so is left to the attempt.
    """
    if torch.get_default_device().type == "meta":
        return
    try:
        with within_reach(label), torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build()
    except (RuntimeError, UserError) as error:
        if ran_out(error):
            raise
        return  # it looks at the numbers that it is built from, or the attempt says what is wrong
    refuse_beyond_memory(label, model)


def refuse_beyond_memory(label: str, model: nn.Module) -> None:
    """Refuse weights, of a model on the meta device, that this machine's memory does not hold."""
    tensors = (*model.parameters(), *model.buffers())
    need = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**30
    there = memory_of_this_machine() / 2**30
    if need > there:
        raise UserError(
            f"{label} has weights of {need:,.1f} GiB, and this machine has {there:,.1f} GiB of "
            "memory: make it smaller"
        )
