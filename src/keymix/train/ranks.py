# SPDX-License-Identifier: Apache-2.0
"""The ranks of a training: processes that share each of its batches, and where they agree.

``torchrun`` and ``keymix train --devices`` start them. The first writes, and speaks for all. With
one process every function here returns at once, and nothing is initialised.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from keymix.analysis.threads import cores
from keymix.errors import KeymixWarning, Reported, UserError

T = TypeVar("T")

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def size() -> int:
    """Number of ranks; 1 outside `together`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_this_machine() -> int:
    """Number of ranks that share the cores of this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if size() > 1 else 1


@contextmanager
def together() -> Iterator[None]:
    """Join the processes that were started for one training; with one process do nothing.

    Within, the first rank alone warns. A rank that another one leaves alone ends as `Reported`.
    """
    alone = any(name not in os.environ for name in _NAMES) or os.environ["WORLD_SIZE"] == "1"
    if alone or dist.is_initialized():
        yield
        return
    _check_devices()
    if sys.platform == "linux":  # no rank outlives what started it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # gloo for what is on the CPU, NCCL for tensors of GPUs
    try:
        with warnings.catch_warnings():
            if rank():
                warnings.simplefilter("ignore", KeymixWarning)
            yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise Reported(f"another rank ended ({error})") from error
        raise
    finally:
        dist.destroy_process_group()


def _check_devices() -> None:
    """Refuse more processes than this machine has devices; its first one says so."""
    asked, there, what = int(os.environ["LOCAL_WORLD_SIZE"]), cores(), "CPU core"
    if torch.cuda.is_available():
        there, what = torch.cuda.device_count(), "GPU"
    why = ""
    if asked > there:
        some = f"{there} {what}" + ("" if there == 1 else "s")
        why = f"{asked} devices were asked for, and this machine has {some}: ask for at most that."
    elif int(os.environ["WORLD_SIZE"]) % asked:
        why = "every machine must start as many processes as the others (--nproc-per-node)."
    if why:
        raise (Reported if int(os.environ["LOCAL_RANK"]) else UserError)(why)


def largest(*values: int) -> list[int]:
    """Return the largest of each value over the ranks: where they agree on what to do next."""
    if size() == 1:
        return [*values]
    every = torch.tensor(values)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return cast(list[int], every.tolist())


def total(values: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks, the same to the bit on all."""
    found = values.clone()
    if size() > 1:
        dist.all_reduce(found)
    return found


def mean(values: Tensor) -> Tensor:
    """Return the mean of a tensor over the ranks, the same to the bit on all."""
    return values if size() == 1 else total(values) / size()


def summed(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks, with gradients: of a loss that is no mean over images."""
    if size() > 1:
        values = differentiable.all_reduce(values)  # type: ignore[no-untyped-call]
    return values


def gathered(value: T) -> list[T]:
    """Return what each rank has, in their order."""
    if size() == 1:
        return [value]
    every: list[Any] = [None] * size()
    dist.all_gather_object(every, value)
    return every


def raised(error: UserError | None) -> UserError:
    """Return what each rank raises where all stop at once: the error of the lowest that has one.

    The first rank has it as its own, so that it is said once.
    """
    texts = gathered(None if error is None else str(error))
    owner = next(number for number, text in enumerate(texts) if text is not None)
    if rank():
        return Reported(texts[owner] or "")
    return error if error is not None and owner == 0 else UserError(texts[owner] or "")


@contextmanager
def agreed() -> Iterator[None]:
    """End the block on every rank if a `UserError` ended it on one; nothing in it is collective."""
    if size() == 1:
        yield
        return
    wrong = None
    try:
        yield
    except UserError as error:
        wrong = error
    if largest(int(wrong is not None))[0]:
        raise raised(wrong)


def first(do: Callable[[], T]) -> T:
    """Let the first rank do something; all return what it returned, or end as it ended."""
    if size() == 1:
        return do()
    found: list[Any] = [None]
    with agreed():
        if rank() == 0:
            found[0] = do()
    dist.broadcast_object_list(found)
    return cast(T, found[0])


@contextmanager
def held(block: AbstractContextManager[None]) -> Iterator[None]:
    """Let the first rank enter a block, such as a lock, for all."""
    with ExitStack() as stack:
        first(lambda: stack.enter_context(block))
        yield


def strategy() -> DDPStrategy:
    """Return how Fabric trains over ranks."""
    return DDPStrategy(
        broadcast_buffers=False,  # statistics of batches are summed over ranks
        find_unused_parameters=True,  # as one process has it: no gradient, no step
    )


def wrapped(fabric: Fabric, task: nn.Module) -> nn.Module:
    """Return a task whose backward pass averages gradients over the ranks; with one, itself."""
    if size() == 1:
        return task
    with warnings.catch_warnings():  # of an option whose new name older versions do not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        return fabric.strategy.setup_module(task)


def averaged(task: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Average the gradients of a backward pass over ranks now, or with those of a later one."""
    if now or not isinstance(task, DistributedDataParallel):
        return nullcontext()
    found: AbstractContextManager[None] = task.no_sync()
    return found
