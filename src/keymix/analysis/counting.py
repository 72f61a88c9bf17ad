# SPDX-License-Identifier: Apache-2.0
"""Parameters, multiply-adds and activation memory of a model, layer by layer, without running it.

The model is copied with its tensors replaced by fake ones (shape, type and device, no numbers), so
that a model of any size is counted in seconds, and the original keeps its mode, its BatchNorm
statistics, its caches and the random state. PyTorch's ``FlopCounterMode`` counts the multiply-adds.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import log2, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from keymix.analysis.passes import Inputs, Passes, fitted
from keymix.arguments import Trained, checked, module_of, opened
from keymix.errors import UserError, check_positive, reason
from keymix.layers.folding import is_folded
from keymix.mixers.head_mixer import HeadMixer
from keymix.models.memory import ran_out, within_reach
from keymix.task import Task

_NEEDS_NUMBERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

_UNFIT = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)
"""What models raise over an input that they cannot take."""

_OF_TORCH = ("aten", "prim", "prims", "profiler", "torchvision")
"""Libraries whose operations cost nothing unless their names say so."""

_COMPUTES = re.compile(
    r"(^|_)("
    r"[a-z]*(attention|dist|dot|linear|matmul|mm|mv|solve)|addr|cholesky|conv(?!ert)\w*|"
    r"fft_[cr]2[cr]|linalg(?!_(check|cross|vector_norm))|(gru|lstm|rnn)(?!_cell)|svd"
    r")(_|$)"
)
"""Names of operations that are made of products: of matrices, transforms, recurrent layers."""


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Q K^T and A V; masks and causality are not deducted, as in PyTorch's own formula."""
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _vector_product(a: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(a)


def _fourier(a: Sequence[int], dim: Sequence[int], *_: Any, out_shape: Any, **__: Any) -> int:
    """2 n log2 n multiply-adds of n complex numbers: n log2 n / 2 products of four, and sums."""
    return round(4 * prod(a) * log2(prod(a[i] for i in dim)))


def _real_fourier(a: Sequence[int], *rest: Any, out_shape: Any, **more: Any) -> int:
    """Half of that, of numbers that are real on one side, which has more of them."""
    real = max(a, out_shape, key=prod)
    return _fourier(real, *rest, out_shape=out_shape, **more) // 2


_ATEN: Any = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,  # none in torch 2.11 to 2.13
    _ATEN._scaled_dot_product_attention_math_for_mps: _attention,
    _ATEN.mv: _vector_product,
    _ATEN.dot: _vector_product,
    _ATEN._fft_c2c: _fourier,
    _ATEN._fft_r2c: _real_fourier,
    _ATEN._fft_c2r: _real_fourier,
}
"""FLOPs, from shapes, of operations that PyTorch's own counter takes for nothing."""


def flop_counter() -> FlopCounterMode:
    """Return PyTorch's counter with its formulas, those that users registered, and ours."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


def computes(func: Any) -> bool:
    """Say whether an operation has a cost: by its name, or because nobody knows its library."""
    if func.namespace not in _OF_TORCH:
        return True
    return torch.Tag.pointwise not in func.tags and bool(
        _COMPUTES.search(func._overloadpacket.__name__)
    )


def cannot_count(*names: str) -> UserError:
    """Make the error of what needs all multiply-adds, and meets operations that nobody counts."""
    return UserError(
        f"cannot count {', '.join(names)}: no formula is known. Register one with "
        "torch.utils.flop_counter.register_flop_formula, which returns 2 x the multiply-adds"
    )


@dataclass(frozen=True, kw_only=True)
class LayerCount:
    """The cost of one module, without that of its children.

    Attributes:
        path: Its name in the model, such as ``blocks.3.attn.mixer``; empty for the model itself.
        kind: Its class.
        params: Trainable parameters it owns.
        macs: Multiply-adds that ran while it was the innermost module, one image.
        activation_bytes: Bytes that autograd first saved there for the backward pass, one image.
    """

    path: str
    kind: str
    params: int
    macs: int
    activation_bytes: int


@dataclass(frozen=True, kw_only=True)
class Count:
    """The cost of a model on one image.

    Attributes:
        input_size: Shape of the input without the batch, (channels, height, width) in pixels.
        params: Trainable parameters.
        macs: Multiply-adds of matmul, convolution, linear and attention, at inference.
        activation_bytes: Bytes that autograd keeps for the backward pass, parameters excluded.
        time_steps: T of a model with time steps, else None. Its costs are those of all T steps, its
            multiply-adds dense: as if no input were a spike.
        layers: The same by module, in the model's order, modules without any cost left out.
        macs_by_operation: The multiply-adds by operation.
        uncounted: Operations that compute something and that no formula counts, such as
            ``"aten._cdist_forward"``: they are missing in the multiply-adds.
        kinds: Class of every module by path.
    """

    input_size: tuple[int, ...]
    params: int
    macs: int
    activation_bytes: int
    time_steps: int | None
    layers: tuple[LayerCount, ...]
    macs_by_operation: dict[str, int]
    uncounted: tuple[str, ...]
    kinds: dict[str, str] = field(repr=False)

    @property
    def flops(self) -> int:
        """Floating point operations in the papers' other convention: 2 x multiply-adds."""
        return 2 * self.macs

    def at_depth(self, depth: int) -> tuple[LayerCount, ...]:
        """Sum the layers to at most ``depth`` names of the path, children into their parents.

        Raises:
            UserError: If ``depth`` is less than 1.
        """
        check_positive(depth=depth)
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for layer in self.layers:
            total = sums[".".join(layer.path.split(".")[:depth])]
            for i, value in enumerate((layer.params, layer.macs, layer.activation_bytes)):
                total[i] += value
        return tuple(
            LayerCount(path=p, kind=self.kinds[p], params=v[0], macs=v[1], activation_bytes=v[2])
            for p, v in sums.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it."""
        record = asdict(self)
        del record["kinds"]
        return {**record, "flops": self.flops}


class _Where:
    """Follows which module is running, innermost last; a ``mod_tracker`` for PyTorch's counter."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks = contextlib.ExitStack()
        self.running = [""]

    def __enter__(self) -> None:
        for path, module in self._model.named_modules():
            for handle in (
                module.register_forward_pre_hook(self._entering(path), prepend=True),
                module.register_forward_hook(self._left, always_call=True),
            ):
                self._hooks.callback(handle.remove)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _entering(self, path: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            self.running.append(path)

        return hook

    def _left(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        self.running.pop()

    @property
    def parents(self) -> set[str]:
        """What PyTorch's counter adds an operation to."""
        return {"Global", self.running[-1]}


class _Uncounted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations under a counter that compute and have no formula."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counter.flop_registry
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet = getattr(func, "_overloadpacket", func)
        if packet not in self._counted and computes(func):
            self.names.add(str(packet))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _untouched_surroundings() -> Iterator[None]:
    """Leave random states as they were, and keep nn.MultiheadAttention on countable operations."""
    states = random.getstate(), np.random.get_state()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        running = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if running else ()
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        random.setstate(states[0])
        np.random.set_state(states[1])


def by_equation(model: nn.Module) -> None:
    """Have mixers compute by their equation, so that a kernel's padding is not taken for work."""
    for module in model.modules():
        if isinstance(module, HeadMixer):
            module.backend = "reference"


class Macs(NamedTuple):
    """Multiply-adds of a run, and the operations that nobody counts."""

    by_path: dict[str, int]  # by the innermost module
    by_operation: dict[str, int]
    uncounted: tuple[str, ...]


def run_counting(model: nn.Module, inputs: Inputs) -> Macs:
    """Run a model, whose mixers compute by their equations from now on, and count."""
    by_equation(model)
    counter = flop_counter()
    counter.mod_tracker = _Where(model)  # type: ignore[assignment]
    uncounted = _Uncounted(counter)
    with torch.no_grad(), _untouched_surroundings(), uncounted, counter:
        model(inputs)
    flops = counter.get_flop_counts()
    by_operation = {str(packet): n // 2 for packet, n in flops.pop("Global", {}).items()}
    by_path = {path: sum(counts.values()) // 2 for path, counts in flops.items()}
    return Macs(by_path, by_operation, tuple(sorted(uncounted.names)))


class _OneForward(Passes):
    """What is counted of a model of one tensor: its forward pass, whatever it gives back."""

    def example(self, shape: tuple[int, ...], batch_size: int) -> Tensor:
        return torch.zeros(batch_size, *shape)

    def training_pass(self, model: nn.Module, inputs: Inputs) -> Any:
        return model(inputs)


class _Trial:
    """Runs copies of a model on made inputs of one size, with fake tensors or real ones."""

    def __init__(self, model: nn.Module, size: tuple[int, ...], passes: Passes, *, fake: bool):
        self.model, self.size, self.passes = model, size, passes
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None

    def _copy(self) -> nn.Module:
        if self.mode is None:
            return copy.deepcopy(self.model)
        on_cpu: dict[int, Any] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_meta:
                with self.mode:
                    fake = torch.empty_like(tensor, device="cpu", requires_grad=False)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                on_cpu[id(tensor)] = fake
        with FakeCopyMode(self.mode):
            return copy.deepcopy(self.model, on_cpu)

    def _inputs(self, copied: nn.Module, images: int) -> Inputs:
        return fitted(self.passes.example(self.size, images), copied)

    def macs(self) -> Macs:
        """Count one image in inference."""
        copied = self._copy().eval()
        with self.mode or contextlib.nullcontext():
            return run_counting(copied, self._inputs(copied, 1))

    def saved_bytes(self, images: int = 1) -> dict[str, int]:
        """Run a training pass and add up what autograd saves in it, by module."""
        copied = self._copy()
        if not (copied.training or is_folded(copied)):
            copied.train()
        where = _Where(copied)
        by_path: dict[str, int] = defaultdict(int)
        # kept alive, since an address that is free may be used again
        seen = {
            t.untyped_storage()._cdata: t.untyped_storage()
            for t in (*copied.parameters(), *copied.buffers())
        }

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            inside = len(where.running) > 1  # and not what a step computes with the outputs
            if inside and storage._cdata not in seen:
                seen[storage._cdata] = storage
                by_path[where.running[-1]] += storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with self.mode or contextlib.nullcontext(), torch.enable_grad(), where, hooks:
            self.passes.training_pass(copied, self._inputs(copied, images))
        return by_path

    def saved_bytes_per_image(self) -> dict[str, int]:
        """Return them for one image, which BatchNorm refuses where it sees one position."""
        try:
            return self.saved_bytes()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
        two, three = (self.saved_bytes(images) for images in (2, 3))  # affine in the images
        return {path: 2 * two[path] - three[path] for path in two}


def default_input_size(model: nn.Module) -> tuple[int, int, int]:
    """Return the input (channels, height, width) a timm model was made for.

    What a model says of itself as it is now goes before what its ``pretrained_cfg`` says of its
    weights; both before the first layer of its patches, which may follow a stem.
    """
    from timm.models import get_model_traits  # late: a layer alone is counted without timm

    embed, now = getattr(model, "patch_embed", None), get_model_traits(model)
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    published = cfg.get("input_size") or (None,)
    channels = (
        getattr(embed, "in_chans", None)
        or now.get("in_chans")
        or published[0]
        or getattr(getattr(embed, "proj", None), "in_channels", None)
    )
    size = getattr(embed, "img_size", None) or now.get("img_size") or published[1:]
    if not size or channels is None:
        raise UserError(
            f"{type(model).__name__} does not say which input it takes; give input_size=(3, H, W)"
        )
    return int(channels), int(size[0]), int(size[1])


@checked
def count(
    model: nn.Module | Trained | str | Path,
    input_size: Sequence[int] | None = None,
    *,
    task: str = "",
) -> Count:
    """Count a model; see `keymix.count`, which shows what was counted."""
    trained = opened(model)
    network = module_of(trained)
    if isinstance(trained_on := getattr(trained, "task", None), Task) and trained_on.whole_images:
        task = task or trained_on.name
    size = default_input_size(network) if input_size is None else tuple(input_size)
    if not size or min(size) < 1:
        raise UserError(f"input_size={size} must hold whole numbers of at least 1")
    passes = Passes(task) if task else _OneForward()
    try:
        return _count(network, size, passes)
    except _UNFIT as error:
        if len(size) == 4 and size[0] == 1:
            return count(network, size[1:], task=task)  # a batch first, as torchinfo takes it
        if isinstance(error, UserError) or ran_out(error):
            raise
        batch = "; give it without the batch" if len(size) > 3 else ""
        raise UserError(
            f"{type(network).__name__} cannot take input_size={size}{batch}: {reason(error)}"
        ) from error


def _count(model: nn.Module, size: tuple[int, ...], passes: Passes) -> Count:
    """Count a model on one input of exactly this size."""
    with _untouched_surroundings(), within_reach(f"{type(model).__name__} on an input of {size}"):
        try:
            trial = _Trial(model, size, passes, fake=True)
            macs, saved = trial.macs(), trial.saved_bytes_per_image()
        except _NEEDS_NUMBERS:
            # the model's way depends on numbers, or an operation has no fake form: run it
            trial = _Trial(model, size, passes, fake=False)
            macs, saved = trial.macs(), trial.saved_bytes_per_image()
    params: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            params[name.rpartition(".")[0]] += parameter.numel()
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    layers = tuple(
        LayerCount(
            path=path,
            kind=kind,
            params=params.get(path, 0),
            macs=macs.by_path.get(path, 0),
            activation_bytes=saved.get(path, 0),
        )
        for path, kind in kinds.items()
        if path in params or macs.by_path.get(path) or saved.get(path)
    )
    return Count(
        input_size=size,
        params=sum(params.values()),
        macs=sum(macs.by_path.values()),
        activation_bytes=sum(saved.values()),
        time_steps=getattr(model, "time_steps", None),
        layers=layers,
        macs_by_operation=macs.by_operation,
        uncounted=macs.uncounted,
        kinds=kinds,
    )
