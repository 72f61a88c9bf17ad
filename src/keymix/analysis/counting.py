# SPDX-License-Identifier: Apache-2.0
"""Parameters, multiply-adds and activation memory of a model, layer by layer, without running it.

The model is copied with its tensors replaced by fake ones (shape, type and device, no numbers), so
that a model of any size is counted in seconds, and the original keeps its mode, its BatchNorm
statistics, its caches and the random state.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from keymix.analysis.operations import formula, is_free, run_in_parts
from keymix.analysis.passes import Inputs, Passes, fitted, passes_of
from keymix.errors import UserError, check_positive
from keymix.layers.folding import is_folded
from keymix.mixers.map_mixer import MapMixer
from keymix.models.memory import within_reach

_NEEDS_NUMBERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
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
        kinds: Class of every module by path.
    """

    input_size: tuple[int, ...]
    params: int
    macs: int
    activation_bytes: int
    time_steps: int | None
    layers: tuple[LayerCount, ...]
    macs_by_operation: dict[str, int]
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
    """Follows which module is running, innermost last."""

    def __init__(self, model: nn.Module) -> None:
        self.running: list[str] = [""]
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(path), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, path: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            self.running.append(path)

        return hook

    def _leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        self.running.pop()

    @property
    def path(self) -> str:
        return self.running[-1]

    @property
    def inside(self) -> bool:
        """Whether any module runs, and not what a step computes with its outputs."""
        return len(self.running) > 1


class _MacCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation, adds up what formulas say, refuses operations of unknown cost."""

    supports_higher_order_operators = True

    def __init__(self, where: _Where) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.by_path: dict[str, int] = defaultdict(int)
        self.by_operation: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        macs = formula(func)
        if macs is None and not is_free(func):
            return run_in_parts(self, func, args, kwargs)
        out = func(*args, **kwargs)
        if macs is not None:
            number = macs(args, kwargs, out)
            self.by_path[self.where.path] += number
            self.by_operation[str(getattr(func, "_overloadpacket", func))] += number
        return out


class _SavedBytes:
    """Adds up the storages that autograd saves for the backward pass, each once."""

    def __init__(self, where: _Where, model: nn.Module) -> None:
        self.where = where
        self.by_path: dict[str, int] = defaultdict(int)
        # kept alive, since an address that is free may be used again
        self._seen = {
            t.untyped_storage()._cdata: t.untyped_storage()
            for t in (*model.parameters(), *model.buffers())
        }

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self.where.inside and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.by_path[self.where.path] += storage.nbytes()
        return tensor


def _computed(model: nn.Module) -> dict[int, Any]:
    """Stand-ins, by identity, of what modules computed from parameters: deepcopy refuses it."""
    kept = (value for module in model.modules() for value in vars(module).values())
    return {id(v): v.detach().clone() for v in kept if isinstance(v, Tensor) and not v.is_leaf}


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy the modules, with fake tensors in place of parameters and buffers."""
    stand_ins = _computed(model)
    for tensor in (*model.parameters(), *model.buffers()):
        device = "cpu" if tensor.is_meta else tensor.device
        with mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        stand_ins[id(tensor)] = fake
    return copy.deepcopy(model, stand_ins)


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
        if isinstance(module, MapMixer):
            module.backend = "reference"


class _Zeros:
    """What is counted of a model of one tensor: its forward pass, whatever it gives back."""

    def example(self, shape: tuple[int, ...], batch_size: int) -> Tensor:
        return torch.zeros(batch_size, *shape)

    def training_pass(self, model: nn.Module, inputs: Inputs) -> Any:
        return model(inputs)


def _prepare(
    model: nn.Module, batch: _Example, *, train: bool, mode: FakeTensorMode | None
) -> tuple[nn.Module, Inputs]:
    """Copy the model, in training or inference mode, and make an input for it."""
    copied = copy.deepcopy(model, _computed(model)) if mode is None else _fake_copy(model, mode)
    if not train:
        copied.eval()
    elif not (model.training or is_folded(model)):
        copied.train()
    with mode or contextlib.nullcontext():
        return copied, fitted(batch.passes.example(batch.size, batch.images), copied)


@dataclass(frozen=True)
class _Example:
    """What a pass is run on: a number of images of a size, as the passes make them."""

    passes: Passes
    size: tuple[int, ...]
    images: int = 1


def _saved_bytes(model: nn.Module, batch: _Example, *, fake: bool) -> dict[str, int]:
    """Run one training pass on a copy and add up what autograd saves in it, by module."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    copied, x = _prepare(model, batch, train=True, mode=mode)
    saved = _SavedBytes(_Where(copied), copied)
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, _same)
    with mode or contextlib.nullcontext(), torch.enable_grad(), hooks:
        batch.passes.training_pass(copied, x)
    return saved.by_path


def _saved_bytes_per_image(model: nn.Module, one: _Example, *, fake: bool) -> dict[str, int]:
    try:
        return _saved_bytes(model, one, fake=fake)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
    # BatchNorm refuses one image where it sees one position; bytes are affine in the images
    two, three = (_saved_bytes(model, replace(one, images=n), fake=fake) for n in (2, 3))
    return {path: 2 * two[path] - three[path] for path in two}


def _inference_macs(model: nn.Module, one: _Example, *, fake: bool) -> _MacCounter:
    """Run one inference pass on a copy and add up the multiply-adds."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    copied, x = _prepare(model, one, train=False, mode=mode)
    by_equation(copied)
    counter = _MacCounter(_Where(copied))
    with torch.no_grad(), mode or contextlib.nullcontext(), counter:
        copied(x)
    return counter


def run_counting(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Run a copy of a model, in which hooks stay; return multiply-adds by the innermost module."""
    by_equation(model)
    counter = _MacCounter(_Where(model))
    with torch.no_grad(), _untouched_surroundings(), counter:
        model(x)
    return dict(counter.by_path)


def _same(tensor: Tensor) -> Tensor:
    return tensor


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


def count(model: nn.Module, input_size: Sequence[int] | None = None, *, task: str = "") -> Count:
    """Count trainable parameters, multiply-adds and activation memory, by layer and in total.

    Multiply-adds (MACs) are those of matrix products, convolutions, linear and recurrent layers and
    attention at inference, as the papers count them; softmax, norms, activations, biases, pooling
    and resampling are free. A product of complex numbers is four of them; a Fourier transform of n
    complex numbers is 2.5 n log2 n, of real ones half of that. keymix's own mixers are counted by
    their equations, whichever kernel runs. Activation memory is what autograd saves in a training
    pass, in the model's own precision: each storage once, the input included where a layer saves
    it, parameters and buffers excluded. Of a model that is folded for inference it is that of a
    pass in evaluation.

    Args:
        model: Any PyTorch model that takes one tensor, or what its task's example is. It is not
            run and not changed. A model on the ``meta`` device is counted as on the CPU.
        input_size: Shape without the batch: (channels, height, width) in pixels, or (tokens, dim)
            for a mixer alone. By default what a timm model was made for.
        task: Name of the task that the model is for: its training part says what the model is run
            on and how a step runs it. Empty for one tensor and the forward pass.

    Returns:
        The count. Each cost is attributed to the innermost module that was running.

    Example:
        >>> import timm
        >>> count(timm.create_model("vit_tiny_patch16_224")).macs
        1253683200

    Raises:
        UserError: If an operation ran whose cost nobody stated, the input size is unknown, or
            tensors overflow.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    size = default_input_size(model) if input_size is None else tuple(int(s) for s in input_size)
    if not size or min(size) < 1:
        raise UserError(f"input_size={size} must hold whole numbers of at least 1")
    one = _Example(passes_of(task) if task else _Zeros(), size)
    with _untouched_surroundings(), within_reach(f"{type(model).__name__} on an input of {size}"):
        try:
            counter = _inference_macs(model, one, fake=True)
            saved = _saved_bytes_per_image(model, one, fake=True)
        except _NEEDS_NUMBERS:
            # the model's way depends on numbers, or an operation has no fake form: run it
            counter = _inference_macs(model, one, fake=False)
            saved = _saved_bytes_per_image(model, one, fake=False)
    params: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    kinds: dict[str, str] = {}
    for path, module in model.named_modules():
        kinds[path] = type(module).__name__
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                params[path] += parameter.numel()
    layers = tuple(
        LayerCount(
            path=path,
            kind=kind,
            params=params.get(path, 0),
            macs=counter.by_path.get(path, 0),
            activation_bytes=saved.get(path, 0),
        )
        for path, kind in kinds.items()
        if path in params or counter.by_path.get(path) or saved.get(path)
    )
    return Count(
        input_size=size,
        params=sum(params.values()),
        macs=sum(counter.by_path.values()),
        activation_bytes=sum(saved.values()),
        time_steps=getattr(model, "time_steps", None),
        layers=layers,
        macs_by_operation=dict(counter.by_operation),
        kinds=kinds,
    )
