# SPDX-License-Identifier: Apache-2.0
"""Linear map or convolution, batch norm, neuron: the step that spiking networks are made of.

In training the step keeps its input in bytes where that is exact, and the output of the linear
map; normalised currents and potentials are recomputed in the backward pass. Where parts are
called one by one, products may be rounded otherwise in float32, and a spike in many fall otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from keymix.layers.folding import HOOKS, watched
from keymix.layers.neurons import IF, LIF, ParametricLIF, SpikingNeuron
from keymix.ops.neuron.multi_step import choose
from keymix.ops.qk_mask import blocked as qk_mask
from keymix.ops.qk_mask.reference import Neuron
from keymix.ops.spikes import normed, packed
from keymix.ops.spikes.attention import attended, self_attention
from keymix.ops.spikes.normed import MaxPool, Statistics, Step
from keymix.ops.spikes.packed import Kept, viewed, whole_to
from keymix.ops.spikes.recompute import Currents, recomputed
from keymix.ops.tracing import forward_mode

_OURS = (
    *(nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.Identity),
    *(nn.MaxPool2d, nn.AvgPool2d),
    *(LIF, IF, ParametricLIF),
)
_PLAIN: ContextVar[bool] = ContextVar("plain_steps", default=False)


@contextmanager
def plain_steps() -> Iterator[None]:
    """Call the parts of all steps one by one within the block, as gradients of gradients need."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def why_plain(x: Tensor, *parts: nn.Module | None) -> str | None:
    """Say why the parts of a step are called one by one; None if little memory is taken.

    Args:
        x: The input of the step.
        parts: Linear map or convolution, norm, what stands behind it, neuron.
    """
    modules = [part for part in parts if part is not None]
    reasons = (_of_the_moment(x), *(_of_a_part(part) for part in modules))
    return next((why for why in reasons if why is not None), None)


def _of_the_moment(x: Tensor) -> str | None:
    """Why no step is taken with little memory just now."""
    why = None
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        why = "a compiler or tracer sees the parts"
    elif type(x) is not Tensor or x.is_meta or torch._C._are_functorch_transforms_active():
        why = "the input is no plain tensor"
    elif forward_mode():
        why = "derivatives are carried along in the forward pass"
    elif torch.is_autocast_enabled(x.device.type):
        why = "autocast chooses a dtype for each part"
    elif _PLAIN.get():
        why = "plain_steps() asks for it"
    elif any(getattr(every_module, f"_global{name}") for name in HOOKS):
        why = "somebody listens to all modules"
    return why


def _of_a_part(part: nn.Module) -> str | None:
    """Why a part cannot be one of a step that is taken with little memory."""
    why = None
    if isinstance(part, (LIF, IF, ParametricLIF)) and part.step_mode != "m":
        why = "neurons take single steps"
    elif type(part) not in _OURS:
        why = f"{type(part).__name__} is not a part whose backward pass is known"
    elif isinstance(part, nn.Conv2d) and (
        part.padding_mode != "zeros" or isinstance(part.padding, str)
    ):
        why = "the padding of the convolution is more than zeros"
    elif isinstance(part, nn.MaxPool2d) and part.return_indices:
        why = "the pooling returns indices"
    elif watched(part):
        why = f"somebody listens to {type(part).__name__}"
    return why


def _normed_spikes(
    y: Tensor,
    norm: nn.Module,
    neuron: SpikingNeuron,
    pool: nn.Module | None,
    lead: tuple[int, ...],
    between: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return ``neuron(between(norm(y)))``, of shape ``[*lead, D]`` or images, and keep y alone."""
    if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):  # folded into what made y
        plain = Currents(
            first=between, recompute=lambda y, *_: between(y), learned=(), constants=()
        )
        return recomputed(y, plain, *neuron.coefficients(), neuron.dynamics, neuron.backend)
    maxima = _max_pool(pool)
    if (
        (pool is None or maxima is not None)
        and choose(neuron.backend, y).name == "blocked"
        and normed.fits(y, norm.weight, maxima)
    ):
        return normed.normed_neurons(
            *(y, norm.weight, norm.bias, _statistics(y, norm)),
            *neuron.coefficients(),
            Step(lead, neuron.dynamics, maxima),
        )
    constants: tuple[Tensor, ...] = ()  # the statistics where they are not those of the batch
    if not norm.training and norm.running_mean is not None and norm.running_var is not None:
        constants = norm.running_mean, norm.running_var
    currents = Currents(
        first=lambda y: between(norm(y)),
        recompute=partial(_recomputed_norm, between, norm.eps),
        learned=() if norm.weight is None else (norm.weight, norm.bias),
        constants=constants,
    )
    return recomputed(y, currents, *neuron.coefficients(), neuron.dynamics, neuron.backend)


def _max_pool(pool: nn.Module | None) -> MaxPool | None:
    """Return what a max pooling module takes maxima of; None if it is none."""
    if not isinstance(pool, nn.MaxPool2d):
        return None
    return MaxPool(pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)


def _statistics(y: Tensor, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> Statistics:
    """Take what a norm takes off and divides by; count and move as a call of the norm does."""
    running = None
    if norm.running_mean is not None and norm.running_var is not None:
        running = norm.running_mean, norm.running_var
    if running is not None and not norm.training:
        return Statistics(*running, norm.eps, of_batch=False)
    factor = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    if not norm.track_running_stats:
        running = None
    return normed.batch_statistics(y, running, factor, norm.eps)


def _recomputed_norm(
    between: Callable[[Tensor], Tensor],
    eps: float,
    y: Tensor,
    learned: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> Tensor:
    weight, bias = learned or (None, None)
    mean, variance = constants or (None, None)
    return between(F.batch_norm(y, mean, variance, weight, bias, mean is None, 0.0, eps))


def spiking_linear(
    x: Float[Tensor, "T *batch N C"],
    linear: nn.Linear,
    norm: nn.Module,
    neuron: nn.Module,
    kept: Kept | None = None,
) -> Float[Tensor, "T *batch N D"]:
    """Return ``neuron(norm(linear(x)))``, the statistics of the norm over all but the last axis.

    Args:
        x: Spikes, steps first.
        linear: Maps C to D.
        norm: Over the D channels; an identity where it is folded into the linear map.
        neuron: Maps currents ``[T, ...]`` to spikes.
        kept: What several maps of the same ``x`` keep of it together; one each if None.
    """
    shape = (*x.shape[:-1], linear.out_features)
    if isinstance(neuron, SpikingNeuron) and why_plain(x, linear, norm, neuron) is None:
        y = packed.linear(x, linear.weight, linear.bias, kept)
        between = partial(Tensor.view, size=shape)
        return _normed_spikes(y.flatten(0, -2), norm, neuron, None, x.shape[:-1], between)
    y = linear(x)
    spikes: Tensor = neuron(norm(y.flatten(0, -2)).view(shape))
    return spikes


def masked_keys(
    x: Float[Tensor, "T *batch N C"],
    linear: nn.Linear,
    norm: nn.Module,
    neuron: nn.Module,
    attention: nn.Module,
    num_heads: int,
    axis: int,
    keys: Float[Tensor, "T *batch N D"],
    kept: Kept | None = None,
) -> Float[Tensor, "T *batch N h d"]:
    """Return ``attention(neuron(norm(linear(x))).sum(axis)) * keys``, heads apart.

    On a CPU queries are summed as they fire; where :func:`why_plain` says otherwise they are whole.

    Args:
        x: Spikes, steps first.
        linear: Maps C to D = h d, the queries' currents.
        norm: Over the D channels; an identity where it is folded into the linear map.
        neuron: Fires the queries.
        attention: Fires on their sums.
        num_heads: Heads h.
        axis: -1 sums over the channels of a head, -3 over the tokens.
        keys: Spikes.
        kept: As :func:`spiking_linear` takes it.
    """
    heads = (*keys.shape[:-1], num_heads, keys.shape[-1] // num_heads)
    apart = keys.reshape(heads)
    if (
        isinstance(neuron, SpikingNeuron)
        and isinstance(attention, SpikingNeuron)
        and isinstance(norm, nn.BatchNorm1d)
    ):
        why = [why_plain(x, linear, norm, each) for each in (neuron, attention)]
        path = _mask_path(x, neuron, attention) if why == [None, None] else None
        queries, sums = (Neuron(*n.coefficients(), n.dynamics) for n in (neuron, attention))
        y = packed.linear(x, linear.weight, linear.bias, kept).flatten(0, -2) if path else None
        if y is not None and path == "blocked" and normed.fits(y, norm.weight, None):
            return qk_mask.masked_keys(
                y,
                norm.weight,
                norm.bias,
                _statistics(y, norm),
                apart,
                queries=queries,
                attention=sums,
                axis=axis,
                whole=whole_to(keys) == 1,
            )
        if y is not None and path == "triton":
            from keymix.ops.qk_mask import triton

            return triton.masked_keys(norm(y).view(apart.shape), apart, queries, sums, axis)
    spikes = spiking_linear(x, linear, norm, neuron, kept).reshape(heads)
    masked: Tensor = attention(spikes.sum(axis, keepdim=True)) * apart
    return masked


def spiking_attention(
    q: Float[Tensor, "T *batch N h d"],
    k: Float[Tensor, "T *batch N h d"],
    v: Float[Tensor, "T *batch N h d"],
    neuron: nn.Module,
    *,
    scale: float,
    linear: bool,
) -> Float[Tensor, "T *batch N h d"]:
    """Return ``neuron(Q K^T V scale)``, heads apart; K^T V is the first product if ``linear``.

    Spikes and what products of them count are kept in bytes where that is exact.
    """
    kept = torch.is_grad_enabled() and why_plain(q, neuron) is None
    if isinstance(neuron, SpikingNeuron) and kept:
        keep, gain = neuron.coefficients()
        spikes = self_attention(
            *(q, k, v),
            scale=scale,
            linear=linear,
            keep=keep,
            gain=gain,
            how=neuron.dynamics,
            backend=neuron.backend,
        )
    else:
        heads = (each.transpose(-3, -2) for each in (q, k, v))
        spikes = neuron(attended(heads, linear)[1] * scale)
    return viewed(spikes, spikes.transpose(-3, -2))


def _mask_path(x: Tensor, *neurons: SpikingNeuron) -> str | None:
    """The backend that sums queries as they fire; None if none does.

    Triton's kernels are taken by name alone until their speed is measured.
    """
    for name in ("blocked", "triton"):
        if all(choose(n.backend, x).name == name for n in neurons):
            by_name = all(n.backend == name for n in neurons)
            return name if name == "blocked" or by_name else None
    return None


def pooled(pool: nn.Module | None, lead: Sequence[int], y: Tensor) -> Tensor:
    """Pool images ``[T B, D, h, w]`` if there is a pool, and split the first axis into T, B."""
    y = y if pool is None else pool(y)
    return y.view(*lead, *y.shape[1:])


def spiking_conv(
    x: Float[Tensor, "T B C H W"],
    conv: nn.Conv2d,
    norm: nn.Module,
    neuron: nn.Module,
    pool: nn.Module | None = None,
    steps: int | None = None,
) -> Float[Tensor, "S B D h w"]:
    """Return ``neuron(pool(norm(conv(x))))``; images that lie channels last stay so.

    Args:
        x: Spikes or images, steps first; or one step ``[1, B, C, H, W]`` that stands for all, so
            that all but the neuron runs once.
        conv: Maps C channels to D, the steps folded into the batch.
        norm: Over the D channels; an identity where it is folded into the convolution.
        neuron: Maps currents ``[T, ...]`` to spikes.
        pool: What stands between norm and neuron; None for nothing.
        steps: Steps T that come out; None for those of ``x``.
    """
    lead = (steps or x.shape[0], x.shape[1])

    def between(y: Tensor) -> Tensor:
        return pooled(pool, x.shape[:2], y).expand(lead[0], -1, -1, -1, -1)

    fits = x.shape[0] in (1, lead[0])  # else expand says what does not
    if fits and isinstance(neuron, SpikingNeuron) and not why_plain(x, conv, norm, neuron, pool):
        y = packed.conv2d(
            x,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,  # type: ignore[arg-type] # words were sent the plain way
            conv.dilation,
            conv.groups,
        )
        return _normed_spikes(y, norm, neuron, pool, lead, between)
    spikes: Tensor = neuron(between(norm(conv(x.flatten(0, 1)))))
    return spikes
