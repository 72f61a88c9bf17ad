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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import empty as empty_shards
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from keymix.analysis.threads import cores
from keymix.errors import KeymixWarning, Reported, UserError

T = TypeVar("T")
Strategy = Literal["ddp", "fsdp"]
"""Each rank has a copy of the model, or a part of each of its parameters."""

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
    """Return how Fabric trains over ranks; what `shard` has made needs it for its devices alone."""
    return DDPStrategy(
        broadcast_buffers=False,  # statistics of batches are summed over ranks
        find_unused_parameters=True,  # as one process has it: no gradient, no step
    )


def wrapped(fabric: Fabric, task: nn.Module) -> nn.Module:
    """Return a task whose backward pass averages gradients over the ranks; with one, itself."""
    if size() == 1 or _units(task):
        return task
    with warnings.catch_warnings():  # Fabric makes the module, and its option is named so
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        return fabric.strategy.setup_module(task)


def averaged(task: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Average the gradients of a backward pass over ranks now, or with those of a later one."""
    for unit in _units(task):
        unit.set_requires_gradient_sync(now, recurse=False)
    if now or not isinstance(task, DistributedDataParallel):
        return nullcontext()
    found: AbstractContextManager[None] = task.no_sync()
    return found


# ---- a model in parts: every rank has a part of each parameter, of its gradient and its moments


def shard(model: nn.Module) -> None:
    """Keep a part of each parameter on each rank; a block's are put together while it computes.

    Outside its forward and backward pass and `whole`, the model's parameters are DTensors.
    """
    seen = set[nn.Parameter]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        why = "is one number" if parameter.ndim == 0 else "stands in two places of the model"
        if parameter.ndim == 0 or parameter in seen:
            raise UserError(f"strategy 'fsdp' cannot take this model: {name} {why}. Take 'ddp'.")
        seen.add(parameter)
    for unit in (*_blocks(model), model):
        unit.register_forward_hook(_no_view)
        fully_shard(unit, reshard_after_forward=True)


def _no_view(_: nn.Module, __: Any, output: Any) -> Any:
    """Copy an output that is a view: changed in place, it would lose FSDP's hook without a word."""
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: what its lists repeat, or what holds a mixer; the innermost of these.

    A mixer is never split.
    """
    from keymix.hosts import find_mixers

    mixers, found = [*find_mixers(model)], dict[str, nn.Module]()
    for path, parent in model.named_modules():
        within = any(f"{path}.".startswith(f"{mixer}.") for mixer in mixers)
        if within or not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = Counter(map(type, parent))
        for name, child in parent.named_children():
            place = f"{path}.{name}".removeprefix(".")
            holds = any(mixer.startswith(f"{place}.") for mixer in mixers)
            callable_ = type(child).forward is not nn.Module.forward
            parts = any(child.children()) and any(p is not None for p in child.parameters())
            if parts and callable_ and (holds or kinds[type(child)] > 1):
                found[place] = child
    return [
        block
        for place, block in found.items()
        if not any(other.startswith(f"{place}.") for other in found)
    ]


def _units(model: nn.Module) -> list[FSDPModule]:
    """What is put together at once of a sharded model; nothing of another."""
    return [each for each in model.modules() if isinstance(each, FSDPModule)] if size() > 1 else []


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Hold a model whole on every rank, so that each may call it as often as it has batches."""
    units = _units(model)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def full(tensor: Tensor) -> Tensor:
    """Put a tensor together of its parts; all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients, of sharded ones over all their parts."""
    return full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict; of a sharded one, which all take part in, on the first alone."""
    state = dict[str, Tensor]()
    for name, value in model.state_dict().items():
        together = full(value)
        if rank() == 0:  # and on no other rank are all of them in memory at a time
            state[name] = together if together is value else together.cpu()
    return state


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict, whole or sharded, into a model, whole or sharded."""
    own = model.state_dict()
    model.load_state_dict({name: _like(value, own.get(name)) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimiser, whole or sharded, into one of a model, whole or sharded."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_each = {
        number: {name: _like(value, own[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": of_each})


def _like(value: Any, own: Tensor | None) -> Any:
    """Take this rank's part of a whole tensor where there is a sharded one of its shape."""
    here = isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape
    if not here or isinstance(value, DTensor):
        return value
    assert isinstance(own, DTensor)
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def write_shards(folder: Path, state: T) -> T:
    """Write the parts of a state's sharded tensors, each rank into a file of its own.

    In what is returned such a tensor has no values (``device="meta"``): the nth of these is tensor
    n of the files. Raises an OSError on all ranks if one cannot write.
    """
    named = dict[str, Tensor]()

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        named[str(len(named))] = leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    rest = cast(T, tree_map(taken, state))
    try:
        save_shards(
            named, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True)
        )
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise cause if isinstance(cause, OSError) else OSError(str(cause)) from error
    return rest


def read_shards(folder: Path, state: T, model: nn.Module) -> T:
    """Fill in what `write_shards` wrote: whole tensors, or this rank's parts for a sharded model.

    The number of ranks need not be the same.
    """
    own, named = next(model.parameters()).data, dict[str, Tensor]()

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        there: dict[str, Any] = (
            {"device_mesh": own.device_mesh, "placements": own.placements}
            if isinstance(own, DTensor)
            else {}
        )
        new: Tensor = (empty_shards if there else torch.empty)(
            leaf.shape, dtype=leaf.dtype, **there
        )
        named[str(len(named))] = new
        return new

    filled = cast(T, tree_map(given, state))
    with warnings.catch_warnings():  # that it reads alone
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load_shards(named, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return filled
