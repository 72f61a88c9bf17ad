# SPDX-License-Identifier: Apache-2.0
"""Linear maps and convolutions that keep their input for the backward pass in bytes.

Spikes are 0 or 1, and sums of some spikes are small whole numbers: a byte holds them exactly. What
a byte does not hold exactly is kept as it is, so that nothing is lost either way. Bytes have a
sign: PyTorch turns floats into them in an eighth of the time that it takes without.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from keymix.ops.spikes.recompute import refuse_unkept

_CHUNK = 1 << 20  # numbers that stay in a processor's cache
_CHUNK_CUDA = 1 << 26  # of a GPU, which is waited for behind each
_WORTH = 1 << 15  # numbers from which on a convolution's calls are paid for


_MOST = 127  # that a byte holds

_WHOLE = WeakIdKeyDictionary()


def mark_whole(x: Tensor, most: int = 1) -> None:
    """Note that all numbers of a tensor are whole and within 0 to ``most``, as it is now."""
    if not x.is_inference():  # whose tensors have no version, and are not kept
        _WHOLE[x] = (x._version, most)


def whole_to(x: Tensor) -> int | None:
    """The largest number that a tensor may hold by its mark; None if it has none, or changed."""
    if torch.compiler.is_compiling() or x not in _WHOLE:
        return None
    version, most = _WHOLE[x]
    return int(most) if version == x._version else None


def added(x: Tensor, y: Tensor) -> Tensor:
    """Compute ``x + y``, marked where both are."""
    out = x + y
    marks = whole_to(x), whole_to(y)
    if marks[0] is not None and marks[1] is not None:
        mark_whole(out, marks[0] + marks[1])
    return out


def viewed(x: Tensor, view: Tensor) -> Tensor:
    """Return a view, or some of the numbers of x, marked as x is."""
    most = whole_to(x)
    if most is not None:
        mark_whole(view, most)
    return view


class Kept:
    """What maps of one and the same tensor keep of it for their backward passes, together."""

    def __init__(self) -> None:
        self._packed: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """Pack the tensor, which is the same in every call, or return what was packed of it."""
        if self._packed is None:
            self._packed = pack(x)
        return self._packed


def _dense(x: Tensor) -> Tensor | None:
    """Give the memory of a tensor without gaps as one row; None if it has gaps."""
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    turned = x.permute(order)
    return turned.view(-1) if turned.is_contiguous() else None


def pack(x: Tensor) -> Tensor:
    """Return the same numbers as bytes if all are whole and -128 to 127, else ``x`` itself."""
    if x.numel() == 0 or not x.is_floating_point() or torch.is_inference_mode_enabled():
        return x  # in inference mode nothing is kept, and tensors have no version
    most = whole_to(x)
    if most is not None and most <= _MOST:
        return x.detach().to(torch.int8)
    packed = _packed(x.detach())
    return x if packed is None else packed


def _packed(x: Tensor) -> Tensor | None:
    result = torch.empty_like(x, dtype=torch.int8)
    flat, into = _dense(x), _dense(result)
    if flat is None or into is None or result.stride() != x.stride():
        result.copy_(x)
        return result if torch.equal(result.to(x.dtype), x) else None
    size = _CHUNK_CUDA if x.is_cuda else _CHUNK
    for part, room in zip(torch.split(flat, size), torch.split(into, size), strict=True):
        room.copy_(part)
        # a byte is a whole number: what equals it is one
        if not torch.equal(room.to(x.dtype), part):
            return None
    return result


def _by_convolution(x: Tensor) -> bool:
    """Whether a product with ``x[*, C]`` goes through oneDNN as a 1x1 convolution.

    PyTorch's own product in float32 calls MKL, which leaves the wide registers of AMD's processors
    unused: there the convolution takes a third to a half of its time.
    """
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() >= _WORTH
        and bool(torch.backends.mkldnn.enabled)
        and torch._C._has_mkldnn
    )


def _image(x: Tensor) -> Tensor:
    """View ``[*, N, C]`` as images ``[*, C, N, 1]``, channels last, without a copy."""
    tokens, channels = x.shape[-2:]
    return x.reshape(-1, tokens, 1, channels).permute(0, 3, 1, 2)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear``."""
    if not _by_convolution(x):
        return F.linear(x, weight, bias)
    image = F.conv2d(_image(x), weight[..., None, None], bias)
    return image.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """Sum the outer products of ``[*, N, D]`` and ``[*, N, C]`` to ``[D, C]``."""
    if not _by_convolution(grad):
        return grad.flatten(0, -2).T @ x.flatten(0, -2)
    weight = x.new_empty(grad.shape[-1], x.shape[-1], 1, 1)
    found: Tensor = torch.ops.aten.convolution_backward(
        *(_image(grad), _image(x), weight, None),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]),
    )[1]
    return found[..., 0, 0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept) -> Tensor:
        ctx.save_for_backward(kept.of(x) if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_unkept(grad)
        x, weight = ctx.saved_tensors
        return (
            _product(grad, weight.T) if ctx.needs_input_grad[0] else None,
            _outer(grad, x.to(grad.dtype)) if ctx.needs_input_grad[1] else None,
            grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None,
            None,
        )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        # the gradient of x needs no numbers of x, but its shape and memory format
        ctx.save_for_backward(pack(x) if any(ctx.needs_input_grad[:2]) else None, weight)
        ctx.options = options
        ctx.shape = x.shape
        return F.conv2d(x.flatten(0, -4), weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_unkept(grad)
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        if x is None:  # the bias alone has a gradient
            return None, None, grad.sum((0, 2, 3)), None
        needs = ctx.needs_input_grad
        found = torch.ops.aten.convolution_backward(
            grad,
            x.flatten(0, -4).to(grad.dtype),
            weight,
            [len(weight)] if needs[2] else None,
            stride,
            padding,
            dilation,
            False,
            [0, 0],
            groups,
            needs[:3],
        )
        grad_x = None if found[0] is None else found[0].view(ctx.shape)
        return grad_x, *found[1:], None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept | None = None) -> Tensor:
    """Compute ``F.linear`` of ``[*, N, C]``; small whole numbers are kept in bytes for backward.

    Its backward pass cannot be differentiated and says so. Maps of the same ``x`` share ``kept``.
    """
    if not torch.is_grad_enabled():  # an autograd function would keep its input all the same
        return _product(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias, kept or Kept())
    return out


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Compute ``F.conv2d`` of ``[*, B, C, H, W]``, all axes before C as one, kept in bytes too."""
    options = (stride, padding, dilation, groups)
    if not torch.is_grad_enabled():
        return F.conv2d(x.flatten(0, -4), weight, bias, *options)
    out: Tensor = _Conv.apply(x, weight, bias, options)
    return out
