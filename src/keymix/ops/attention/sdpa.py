# SPDX-License-Identifier: Apache-2.0
"""The same function through PyTorch's fused attention: the N x M map never stands in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def _flat(t: Tensor, lead: torch.Size) -> Tensor:
    """Give ``t [*keys, h, R, D]`` the leading axes ``lead`` and fold them into one."""
    if len(lead) == 1 and t.shape[:-3] == lead:
        return t
    return t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:])


def _exporting() -> bool:
    """Whether torch.export runs.

    Within torch.compile of PyTorch up to 2.11 ``is_exporting()`` is always true, its flag is not.
    """
    flag = getattr(torch.compiler, "_is_exporting_flag", True)
    return bool(flag) and torch.compiler.is_exporting()


def attention(
    q: Float[Tensor, "*batch h N d"],
    k: Float[Tensor, "*keys h M d"],
    v: Float[Tensor, "*batch h M e"],
    *,
    scale: float | Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch h N e"]:
    """Compute what :func:`keymix.ops.attention.reference.attention` computes, fused.

    A learned ``scale`` multiplies the queries, since the fused kernels take a number only. A bias
    or a mask of any broadcastable shape becomes the kernels' additive mask. Values of another
    width than the keys (e != d) are zero-padded to equal widths: the fused CPU kernel serves only
    those, anything else would build the whole map. ``dropout`` is the probability of dropping an
    entry of the map.
    """
    lead, d, e = q.shape[:-3], q.shape[-1], v.shape[-1]
    if isinstance(scale, Tensor):
        q, scale = q * scale.to(q.dtype), 1.0
    if d < e:
        q, k = F.pad(q, (0, e - d)), F.pad(k, (0, e - d))
    elif e < d:
        v = F.pad(v, (0, d - e))
    if bias is not None:
        # to 4 axes: [*lead or 1, h or 1, N, M]; the kernels broadcast no further
        bias = bias.to(q.dtype)
        if bias.ndim > 3 and len(lead) > 1:
            bias = bias.expand(*lead, *bias.shape[-3:]).reshape(-1, *bias.shape[-3:])
        bias = bias.expand(*bias.shape[:-2], q.shape[-2], k.shape[-2])
        bias = bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    out = F.scaled_dot_product_attention(
        _flat(q, lead),
        _flat(k, lead),
        _flat(v, lead),
        attn_mask=bias,
        dropout_p=dropout,
        scale=scale,
    )
    if _exporting():
        # which kernel serves, and with it these strides, may differ from one pass of an exporter
        # to the next; a view that was recorded in one would then fail in the other
        out = out.clone(memory_format=torch.contiguous_format)
    out = out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])
    return out if out.shape[-1] == e else out[..., :e]
