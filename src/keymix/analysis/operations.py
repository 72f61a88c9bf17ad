# SPDX-License-Identifier: Apache-2.0
"""What each operation costs in multiply-adds: a formula, nothing, or unknown, which is an error.

Counted are the products of matrices: matmul, convolution, linear, attention, recurrent layers, the
distances of all pairs; and Fourier transforms. PyTorch's registry (``torch.utils.flop_counter``)
has most formulas, and an operation of your own joins it with ``register_flop_formula``; `FORMULAS`
and `TRANSFORMS` below add what the registry lacks. Everything else that may run is stated to be
free: every operation that PyTorch tags as pointwise, every view, and `FREE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import log2, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

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


def _add_outer(_base: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return a.numel() * b.numel()


def _linear(x: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return x.numel() * out_val.shape[-1]


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Rows meet one group's matrix; where only ``b`` is one matrix, its columns are the groups'."""
    return prod(a.shape[-2:] if b.ndim == 2 else a.shape) * b.shape[-1]


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    summed: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """First a b, summed over what c lacks, then the result times c, as PyTorch computes it."""
    sizes = []
    for tensor, expanded in ((a, expand_a), (b, expand_b), (c, expand_c)):
        sizes.append(list(tensor.shape))
        for dim in sorted(expanded):
            sizes[-1].insert(dim, 1)
    first = [max(pair) for pair in zip(sizes[0], sizes[1], strict=True)]
    left = [1 if d in summed and d in expand_c else size for d, size in enumerate(first)]
    return prod(first) + prod(max(pair) for pair in zip(left, sizes[2], strict=True))


def _convolved(_x: Tensor, weight: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Each output meets the weights of one output channel; sampling between pixels is free."""
    return out_val.numel() * weight[0].numel()


def _time_convolved(_x: Tensor, weight: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Weights are ``[kernel, in, out]``."""
    return out_val.numel() * weight.shape[0] * weight.shape[1]


def _every_step(x: Tensor, weights: Iterable[Tensor]) -> int:
    """A recurrent layer: each step of the sequence meets every matrix; biases are free."""
    return x.numel() // x.shape[-1] * sum(w.numel() for w in weights if w.ndim == 2)


def _one_recurrent_layer(x: Tensor, *weights: Any, **__: Any) -> int:
    return _every_step(x, weights[:4])


def _recurrent_layers(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _every_step(x, weights)


def _recurrent_layers_of_mps(
    x: Tensor, _state: Any, weights: Sequence[Tensor], *_: Any, **__: Any
) -> int:
    return _every_step(x, weights)


def _bag(_table: Tensor, indices: Tensor, *rest: Any, out_val: Any, **more: Any) -> int:
    """Rows that are added up are free; those with a weight each are a product."""
    weights = rest[4] if len(rest) > 4 else more.get("per_sample_weights")
    return 0 if weights is None else indices.numel() * int(out_val[0].shape[-1])


def _distances(a: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return out_val.numel() * a.shape[-1]


def _positions(theta: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return out_val.numel() * theta.shape[-1]


def _fft(x: Tensor, dims: Sequence[int], *_: Any, out_val: Tensor, **__: Any) -> int:
    """5 n log2 n operations for n complex numbers, half of that for n real ones (FFTW's)."""
    real = next((t for t in (x, out_val) if not t.is_complex()), None)
    whole = x if real is None else real
    length = prod(whole.shape[dim] for dim in dims)
    return round((2.5 if real is None else 1.25) * whole.numel() * log2(length))


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
    "aten._grouped_mm": _grouped_product,
    "aten.addmv": _add_product,
    "aten.addbmm": _add_product,
    "aten.addr": _add_outer,
    "aten._addmm_activation": _add_product,
    "aten.mkldnn_linear": _linear,
    "aten._weight_int8pack_mm": _linear,
    "aten._weight_int4pack_mm": _linear,
    "aten._weight_int4pack_mm_for_cpu": _linear,
    "aten._trilinear": _trilinear,
    "aten.conv_tbc": _time_convolved,
    "aten.mkldnn_rnn_layer": _one_recurrent_layer,
    "aten._cudnn_rnn": _recurrent_layers,
    "aten.miopen_rnn": _recurrent_layers,
    "aten._lstm_mps": _recurrent_layers_of_mps,
    "aten._embedding_bag": _bag,
    "aten._embedding_bag_forward_only": _bag,
    "aten._cdist_forward": _distances,
    "aten._pdist_forward": _distances,
    "aten.affine_grid_generator": _positions,
    "torchvision.deform_conv2d": _convolved,
}

# The same of transforms, which have real multiply-adds of complex numbers in their formula.
TRANSFORMS: dict[str, Callable[..., int]] = {
    "aten._fft_c2c": _fft,
    "aten._fft_r2c": _fft,
    "aten._fft_c2r": _fft,
}

_MOVES = """
    _reshape_alias _to_copy _unsafe_index _unsafe_masked_index _unsafe_view alias as_strided
    as_strided_scatter block_diag cat channel_shuffle clone col2im complex constant_pad_nd copy
    detach diag_embed diagonal diagonal_scatter embedding expand flip gather im2col index index_copy
    index_fill index_put index_select lift lift_fresh masked_scatter masked_select max_unpool2d
    max_unpool3d native_channel_shuffle nonzero nonzero_static permute pixel_shuffle
    pixel_unshuffle polar reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d resize resize_as roll
    rot90 scatter scatter_add scatter_reduce select select_scatter set slice slice_scatter split
    split_with_sizes split_with_sizes_copy squeeze stack t take transpose tril triu unbind unfold
    unfold_backward unsafe_split unsafe_split_with_sizes unsqueeze view _conj resolve_conj
    resolve_neg
"""
_MAKES = """
    _efficientzerotensor arange bartlett_window blackman_window empty empty_like empty_permuted
    empty_strided eye fill full full_like hamming_window hann_window kaiser_window linspace
    logspace new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
    scalar_tensor tril_indices triu_indices zero zeros zeros_like
    bernoulli binomial cauchy exponential geometric log_normal multinomial native_dropout normal
    poisson rand rand_like randint randint_like randn randn_like random randperm uniform
"""
_REDUCES = """
    all amax amin aminmax any argmax argmin argsort bincount bucketize count_nonzero cummax cummin
    cumprod cumsum histc index_add index_reduce kthvalue linalg_vector_norm logcumsumexp logsumexp
    max mean median min mode nanmedian nansum norm prod searchsorted segment_reduce sort std
    std_mean sum topk trace unique_consecutive unique_dim _unique2 var var_mean
"""
_NORMALISES = """
    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
    _fused_rms_norm _log_softmax _masked_softmax _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _safe_softmax
    _softmax cudnn_batch_norm miopen_batch_norm native_batch_norm native_group_norm
    native_layer_norm renorm _weight_norm_interface
"""
_POOLS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d
    fractional_max_pool2d fractional_max_pool3d grid_sampler_2d grid_sampler_3d
    max_pool2d_with_indices max_pool3d_with_indices upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
"""
# of activations all that there are: which of them are tagged pointwise differs between versions
_ACTIVATES = """
    _prelu_kernel _thnn_fused_gru_cell _thnn_fused_lstm_cell celu elu gelu glu hardshrink
    hardsigmoid hardswish hardtanh leaky_relu linalg_cross log_sigmoid_forward mish relu rrelu
    rrelu_with_noise selu sigmoid silu softplus softshrink tanh threshold threshold_backward
"""
_JUDGES = """
    _ctc_loss binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss
    multi_margin_loss multilabel_margin_loss_forward nll_loss2d_forward nll_loss_forward
    smooth_l1_loss soft_margin_loss
"""
_ROUNDS = """
    _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
"""
_ASKS = """
    _assert_async _assert_scalar _assert_tensor_metadata _local_scalar_dense allclose dim equal
    is_contiguous is_non_overlapping_and_dense is_same_size is_strides_like_format isin numel size
    storage_offset stride sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
"""

# Names of ATen operations that cost no multiply-adds, other than views and those tagged pointwise.
# An in-place form (a name with an underscore at its end) is as free as its name.
FREE = frozenset(
    " ".join(
        (_MOVES, _MAKES, _REDUCES, _NORMALISES, _POOLS, _ACTIVATES, _JUDGES, _ROUNDS, _ASKS)
    ).split()
)

# The same of other libraries: pooling, and choosing among boxes.
FREE_ELSEWHERE = frozenset(
    f"torchvision.{name}"
    for name in ("nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
)


@cache
def _in_place_of(packet: Any) -> Any:
    """Return the operation whose in-place form this is; itself if it is none."""
    name = packet.__name__
    if not name.endswith("_") or name.endswith("__"):
        return packet
    return getattr(torch.ops.aten, name[:-1], packet)


@cache
def _is_pointwise(packet: Any) -> bool:
    """Say whether one form of an operation is tagged pointwise: not all forms of one are."""
    forms = (getattr(packet, name) for name in packet.overloads())
    return any(torch.Tag.pointwise in form.tags for form in forms)


def is_free(func: Any) -> bool:
    """Say whether an operation is stated to cost no multiply-adds."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return False
    if func.namespace == "prim":
        return True
    if func.namespace != "aten":
        return str(func._overloadpacket) in FREE_ELSEWHERE
    packet = _in_place_of(func._overloadpacket)
    return packet.__name__ in FREE or bool(getattr(func, "is_view", False)) or _is_pointwise(packet)


def formula(func: Any) -> Callable[[tuple[Any, ...], dict[str, Any], Any], int] | None:
    """Find an operation's multiply-adds as a function of ``(args, kwargs, result)``, if known."""
    packet = getattr(func, "_overloadpacket", func)
    if getattr(func, "namespace", "") == "aten":
        packet = _in_place_of(packet)
    registered = flop_counter.flop_registry.get(packet)
    if registered is not None:
        # PyTorch counts operations: a multiply-add is two
        return lambda args, kwargs, out: _real(
            args, int(registered(*args, **kwargs, out_val=out)) // 2
        )
    transform = TRANSFORMS.get(str(packet))
    if transform is not None:
        return lambda args, kwargs, out: transform(*args, **kwargs, out_val=out)
    own = FORMULAS.get(str(packet))
    if own is not None:
        return lambda args, kwargs, out: _real(args, own(*args, **kwargs, out_val=out))
    return None


def _real(args: tuple[Any, ...], products: int) -> int:
    """Turn products into real multiply-adds: those of complex numbers are four."""
    return products * (4 if any(isinstance(a, Tensor) and a.is_complex() for a in args) else 1)


def run_in_parts(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operation of unknown cost as the operations that it is made of, under a mode."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        raise uncounted(func)
    with mode:
        out = func.decompose(*args, **kwargs)
    if out is NotImplemented:
        raise uncounted(func)
    return out


def uncounted(func: Any) -> UserError:
    """Make the error for an operation that is neither counted nor free."""
    name = str(getattr(func, "_overloadpacket", func))
    return UserError(
        f"cannot count operation {name}: it has no formula and is not stated to be free. Register "
        f"one with torch.utils.flop_counter.register_flop_formula(torch.ops.{name}), which returns "
        "2 x its multiply-adds, or 0 if it has none"
    )
