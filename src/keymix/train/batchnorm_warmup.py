# SPDX-License-Identifier: Apache-2.0
"""Running statistics of spiking models, averaged evenly over the first batches.

They start at mean 0 and variance 1 and forget this start by the momentum: 0.9^n of it is left
after n batches. Currents of a fresh network are far weaker than that, so a network that saw few
batches is normalised to silence in evaluation: no neuron fires, every answer is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from keymix.hosts.stages import spiking_stages


class BatchNormWarmup:
    r"""Keep the running statistics of a spiking model's norms as means of what they saw.

    In batch n, counted from 1, a statistic r moves by max(momentum, 1 / n):

    .. math::
        r_n = r_{n-1} + \max(\mu, 1/n) \, (b_n - r_{n-1})

    so that the start is forgotten in the first batch, and from batch 1 / momentum on all is as
    PyTorch has it. Training itself does not use these statistics and does not change. Other models
    keep PyTorch's start, as their papers do, and so do norms whose statistics were loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = (m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats)
        self._norms = [m for m in norms if m.momentum] if spiking_stages(model) else []

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Average evenly over the batch that is passed within the block."""
        self._norms = [norm for norm in self._norms if _is_fresh(norm)]
        before = [(norm, _seen(norm), _statistics(norm)) for norm in self._norms if norm.training]
        before = [(norm, seen, [s.clone() for s in now]) for norm, seen, now in before]
        for norm, seen, _ in before:  # so that the norm's own step, divided below, gives the mean
            for statistic in _statistics(norm):
                statistic.mul_(seen * _momentum(norm) / (1 - _momentum(norm)))
        try:
            yield
        finally:
            for norm, seen, kept in before:
                momentum, steps = _momentum(norm), _seen(norm) - seen
                for statistic, old in zip(_statistics(norm), kept, strict=True):
                    if steps == 1:
                        statistic.div_(momentum * (seen + 1))
                    else:  # not called, or several times: as without this
                        scaled = old * (seen * momentum / (1 - momentum))
                        statistic.add_((old - scaled) * (1 - momentum) ** steps)


def _is_fresh(norm: _BatchNorm) -> bool:
    """Whether a norm has seen few batches, and none elsewhere that nobody counted."""
    seen = _seen(norm)
    if seen == 0:
        mean, variance = _statistics(norm)
        return not bool(mean.any()) and bool((variance == 1).all())
    return seen + 1 < 1 / _momentum(norm)


def _momentum(norm: _BatchNorm) -> float:
    assert norm.momentum is not None  # chosen so
    return norm.momentum


def _seen(norm: _BatchNorm) -> int:
    """Batches that a norm has seen."""
    assert norm.num_batches_tracked is not None  # it tracks
    return int(norm.num_batches_tracked)


def _statistics(norm: _BatchNorm) -> list[Tensor]:
    """The statistics, to be changed between a forward pass and its backward pass (so ``data``)."""
    assert norm.running_mean is not None  # it tracks
    assert norm.running_var is not None
    return [norm.running_mean.data, norm.running_var.data]
