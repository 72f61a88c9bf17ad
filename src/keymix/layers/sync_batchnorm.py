# SPDX-License-Identifier: Apache-2.0
"""BatchNorm over all ranks of a distributed training: statistics of the whole batch, on any device.

torch's ``SyncBatchNorm`` refuses CPUs, and to take its place a norm would become one of another
class, which the paths that know BatchNorm do not know. Here a norm stays what it is, under the same
names in a state dict. A training forward pass of a synced norm is a collective operation: every
rank of the default process group makes it, and the backward pass, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


def sync_batchnorm(model: nn.Module) -> None:
    """Let every BatchNorm of a model take statistics and gradients over all ranks in training.

    To be called after the process group is there; with one rank nothing changes. Ranks may have
    batches of different sizes. In eval mode a norm computes what it always does, and makes no
    collective operation.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            vars(norm)["forward"] = _Synced(norm)


def over_ranks(norm: nn.Module) -> AbstractContextManager[object]:
    """Within it ``F.batch_norm`` runs over all ranks, if this norm does now."""
    return _OverRanks() if _is_synced(norm) else nullcontext()


def sum_over_ranks(norm: nn.Module, total: Tensor) -> Tensor:
    """Sum over ranks, with gradients, what a synced norm's statistics are made of."""
    summed: Tensor = _Sum.apply(total) if _is_synced(norm) else total
    return summed


def counts_over_ranks(norm: nn.Module, counts: Sequence[int], like: Tensor) -> Sequence[int]:
    """Sum counts over ranks for a synced norm, on the device of a tensor."""
    if not _is_synced(norm):
        return counts
    summed: list[int] = _Sum.apply(torch.tensor(counts, device=like.device)).tolist()
    return summed


class _Synced:
    """Stands as the ``forward`` of a synced norm."""

    def __init__(self, norm: _BatchNorm) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        with over_ranks(self.norm):
            out: Tensor = type(self.norm).forward(self.norm, x)
        return out


def _is_synced(norm: nn.Module) -> bool:
    return norm.training and isinstance(vars(norm).get("forward"), _Synced)


class _OverRanks(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


class _Sum(torch.autograd.Function):
    """A sum over ranks. Each rank's loss depends on every part, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Sum.apply(grad)


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``F.batch_norm`` in training, over all ranks."""
    if x.is_cuda:
        running = (running_mean, running_var)
        group = dist.group.WORLD
        synced: Tensor = SyncBatchNorm.apply(
            x, weight, bias, *running, eps, momentum, group, dist.get_world_size()
        )
        return synced
    axes = [0, *range(2, x.ndim)]
    shape = [-1] + [1] * (x.ndim - 2)
    wide = torch.promote_types(x.dtype, torch.float32)
    here = x.sum(axes, dtype=torch.float64)
    sums = _Sum.apply(torch.cat([here, here.new_tensor([x.numel() // x.shape[1]])]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    # of numbers without their mean, so that no digit of the variance is lost
    centred = x - mean.to(wide).view(shape)
    var = _Sum.apply(centred.square().sum(axes, dtype=torch.float64)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = var * (count / (count - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    rate = (var + eps).rsqrt().to(wide)
    out: Tensor = centred * (rate if weight is None else rate * weight).view(shape)
    out = out if bias is None else out + bias.view(shape)
    return out.to(x.dtype)
