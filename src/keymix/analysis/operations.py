# SPDX-License-Identifier: Apache-2.0
"""What each operation costs in multiply-adds: a formula, nothing, or unknown, which is an error.

Counted are the products of matrices: matmul, convolution, linear, attention. PyTorch's registry
(``torch.utils.flop_counter``) has most formulas, and an operation of your own joins it with
``register_flop_formula``; `FORMULAS` below adds what the registry lacks. Everything else that may
run is stated to be free: every operation that PyTorch tags as pointwise, every view, and `FREE`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from keymix.errors import UserError


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Q K^T and A V; masks and causality are not deducted, as in PyTorch's own formula."""
    rows, keys = prod(q.shape[:-1]), k.shape[-2]
    return rows * keys * (q.shape[-1] + v.shape[-1])


def _dot(a: Tensor, *_: Any, **__: Any) -> int:
    return a.numel()


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def _add_product(_base: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return _product(a, b)


def _linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return x.numel() * weight.shape[0]


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(max(sizes) for sizes in zip(a.shape, b.shape, c.shape, strict=True))


# Multiply-adds of an operation from its arguments; PyTorch's registry goes first where it knows.
# torch 2.11 to 2.13 count the CPU's fused attention as nothing, hence its line here.
FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten._scaled_dot_product_attention_math_for_mps": _attention,
    "aten.dot": _dot,
    "aten.vdot": _dot,
    "aten.mv": _product,
    "aten._int_mm": _product,
    "aten.addmv": _add_product,
    "aten.addbmm": _add_product,
    "aten._addmm_activation": _add_product,
    "aten.mkldnn_linear": _linear,
    "aten._trilinear": _trilinear,
}

_MOVES = """
    _reshape_alias _to_copy _unsafe_view alias as_strided as_strided_scatter cat channel_shuffle
    clone col2im constant_pad_nd copy detach diag_embed diagonal diagonal_scatter embedding
    expand flip gather im2col index index_copy index_fill index_put index_select lift lift_fresh
    masked_scatter masked_select native_channel_shuffle permute pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad1d
    replication_pad2d resize roll rot90 scatter scatter_add scatter_reduce select select_scatter
    set slice slice_scatter split split_with_sizes split_with_sizes_copy squeeze stack t take
    transpose tril triu unbind unfold unsqueeze view _conj resolve_conj resolve_neg
"""
_MAKES = """
    _efficientzerotensor arange empty empty_like empty_permuted empty_strided eye fill full
    full_like linspace logspace new_empty new_empty_strided new_full new_ones new_zeros ones
    ones_like scalar_tensor tril_indices triu_indices zero zeros zeros_like
    bernoulli exponential multinomial native_dropout normal rand rand_like randint randint_like
    randn randn_like randperm uniform
"""
_REDUCES = """
    all amax amin aminmax any argmax argmin argsort bucketize count_nonzero cummax cummin cumprod
    cumsum kthvalue linalg_vector_norm logcumsumexp logsumexp max mean median min mode norm prod
    searchsorted sort std std_mean sum topk var var_mean
"""
_NORMALISES = """
    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
    _fused_rms_norm _log_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _safe_softmax _softmax cudnn_batch_norm
    miopen_batch_norm native_batch_norm native_group_norm native_layer_norm renorm
    _weight_norm_interface
"""
_POOLS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    adaptive_max_pool2d avg_pool1d avg_pool2d avg_pool3d grid_sampler_2d max_pool2d_with_indices
    max_pool3d_with_indices upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_trilinear3d _upsample_nearest_exact2d
"""
_ACTIVATES = """
    _prelu_kernel glu nll_loss2d_forward nll_loss_forward rrelu_with_noise threshold
    threshold_backward
"""
_ASKS = """
    _assert_async _assert_scalar _assert_tensor_metadata _local_scalar_dense dim equal
    is_contiguous is_non_overlapping_and_dense is_same_size is_strides_like_format numel size
    storage_offset stride sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
"""

# Names of ATen operations that cost no multiply-adds, besides views and those tagged pointwise.
# An in-place form (a name with an underscore behind it) is as free as its name.
FREE = frozenset(
    " ".join((_MOVES, _MAKES, _REDUCES, _NORMALISES, _POOLS, _ACTIVATES, _ASKS)).split()
)


def is_free(func: Any) -> bool:
    """Say whether an operation is stated to cost no multiply-adds.

    Args:
        func: The operator overload that is about to run.
    """
    if func.namespace == "prim":
        return True
    if func.namespace != "aten":
        return False
    name = func._overloadpacket.__name__
    listed = name in FREE or (name.endswith("_") and name[:-1] in FREE)
    return listed or torch.Tag.pointwise in func.tags or bool(getattr(func, "is_view", False))


def formula(func: Any) -> Callable[[tuple[Any, ...], dict[str, Any], Any], int] | None:
    """Find the formula of an operation: its multiply-adds from arguments and result.

    Args:
        func: The operator overload, or a higher-order operator.

    Returns:
        A function of ``(args, kwargs, result)``, or None where nobody registered one.
    """
    packet = getattr(func, "_overloadpacket", func)
    registered = flop_counter.flop_registry.get(packet)
    if registered is not None:
        # PyTorch counts operations: a multiply-add is two
        return lambda args, kwargs, out: int(registered(*args, **kwargs, out_val=out)) // 2
    own = FORMULAS.get(str(packet))
    if own is not None:
        return lambda args, kwargs, out: int(own(*args, **kwargs))
    return None


def uncounted(func: Any) -> UserError:
    """Make the error for an operation that is neither counted nor free."""
    name = str(getattr(func, "_overloadpacket", func))
    return UserError(
        f"cannot count operation {name}: it has no formula and is not stated to be free. Register "
        f"one with torch.utils.flop_counter.register_flop_formula(torch.ops.{name}), which returns "
        "2 x its multiply-adds, or 0 if it has none"
    )
