# SPDX-License-Identifier: Apache-2.0
"""Folding for inference: what evaluation keeps constant goes into the weights before it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from timm.models._features import FeatureListNet
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from keymix.arguments import Trained, module_of, opened
from keymix.errors import UserError

Model = TypeVar("Model", bound=nn.Module)

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# timm's modules that call a norm right behind a layer
_IN_TIMM: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {
    ResNet: (("conv1", "bn1"),),
    BasicBlock: (("conv1", "bn1"), ("conv2", "bn2")),
    Bottleneck: (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3")),
}
_IN_ORDER = (nn.Sequential.forward, FeatureListNet.forward)  # call their modules one by one


class Foldable(nn.Module):
    """A module that :func:`fold_for_inference` lets fold its own parts."""

    def fold(self) -> None:
        """Compute the same with less from now on; here nothing changes.

        Called once, on a copy in eval mode, without gradients. Parameters and submodules are
        replaced, not written into, since others may share them.
        """


def watched(module: nn.Module) -> bool:
    """Whether somebody listens to a module or has changed what it does."""
    return "forward" in vars(module) or any(getattr(module, name) for name in HOOKS)


def constant_norm(norm: nn.Module | None) -> bool:
    """Whether a norm is a BatchNorm that is the same affine map in every call."""
    return (
        type(norm) in _NORMS
        and isinstance(norm, _NORMS)
        and not (norm.training or watched(norm))
        and norm.running_mean is not None
        and norm.weight is not None
    )


def fold_norm(owner: nn.Module, layer: str, norm: str) -> None:
    """Fold a BatchNorm into the layer that it directly follows; an identity takes its place.

    Both stay as they are if the norm is not constant, the layer is no plain convolution or linear
    map, or somebody listens to either.

    Args:
        owner: The module that calls one after the other.
        layer: Path in it of a linear map or convolution, or of a sequence that ends with one.
        norm: Path in it of what follows.
    """
    before, after = owner.get_submodule(layer), owner.get_submodule(norm)
    while type(before) is nn.Sequential and len(before) and not watched(before):
        layer, before = f"{layer}.{len(before) - 1}", before[-1]
    known = type(before) in (nn.Linear, *_CONVS) and not watched(before)
    if not (known and constant_norm(after)):
        return
    fuse: Any = fuse_linear_bn_eval if isinstance(before, nn.Linear) else fuse_conv_bn_eval
    owner.set_submodule(layer, fuse(before, after))
    owner.set_submodule(norm, nn.Identity())


def _neighbours(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of a convolution and what follows it in other libraries' modules.

    Behind a linear map a norm may be over another axis than its outputs.
    """
    if watched(module):
        return
    if type(module).forward in _IN_ORDER:
        shown = getattr(module, "return_layers", ())  # what FeatureListNet returns besides the last
        # named_children() leaves out a module that stands here a second time
        for (name, part), (following, _) in pairwise(list(module._modules.items())):
            if isinstance(part, _CONVS) and name not in shown:
                yield name, following
    yield from _IN_TIMM.get(type(module), ())


def replaced(old: Tensor, new: Tensor) -> nn.Parameter:
    """Make the parameter that stands for an old one, of its type and frozen if it was."""
    return nn.Parameter(new.to(old), requires_grad=old.requires_grad)


def joined(layers: Sequence[nn.Module]) -> nn.Linear | None:
    """Make the linear map whose outputs are those of several of one width, one behind the other.

    None if one is no plain linear map, is listened to, or has a bias where another has none.
    """
    plain = [each for each in layers if type(each) is nn.Linear and not watched(each)]
    biases: list[Tensor] = [each.bias for each in plain if each.bias is not None]
    alike = len({each.weight.shape for each in plain}) == 1 and len(biases) in (0, len(plain))
    if len(plain) < len(layers) or not alike:
        return None
    made = copy.copy(plain[0])  # on its device, in its type
    made._parameters = dict(made._parameters)
    made.weight = replaced(made.weight, torch.cat([each.weight for each in plain]))
    if biases:
        made.bias = replaced(made.bias, torch.cat(biases))
    made.out_features = len(made.weight)
    return made


class _NoTraining:
    """Stands as the ``train`` of a folded module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        if mode:
            raise UserError(
                f"{type(self.module).__name__} is folded for inference and cannot train: its norms "
                "are in other weights; train the model that it was folded from, and fold again"
            )
        return type(self.module).train(self.module, False)


def is_folded(model: nn.Module) -> bool:
    """Whether a model, or a part of it, came out of :func:`fold_for_inference`."""
    return any(isinstance(vars(m).get("train"), _NoTraining) for m in model.modules())


def refuse_folded(model: nn.Module, what: str) -> None:
    """Refuse to do ``what`` with a folded model."""
    if is_folded(model):
        raise UserError(
            f"{type(model).__name__} is folded for inference: {what} takes the model that it was "
            "folded from"
        )


def fold_for_inference(model: Model | Trained | str | Path) -> Model:
    r"""Return a copy of a model that computes the same with less, for inference alone.

    Each module folds what it owns: a BatchNorm into the convolution or linear map that it follows,
    :math:`\gamma (W x + b - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta = W' x + b'`; that of
    re-attention's maps into :math:`\Theta` and one constant per head; a learned temperature and
    the scale into queries or keys; the position bias of ``key_value`` into one table; a static key
    into the query's projection where a head has no more keys than channels. A mixer says what is
    folded in :meth:`keymix.mixers.base.TokenMixer.fold`. What somebody listens to by a hook, and
    norms that have no running statistics, stay.

    In a plain ``nn.Sequential`` a norm goes into what runs right before it, so a model that calls
    one part of such a sequence by itself cannot be folded: compare its answers before you use it.

    The result is the same up to rounding, which in a spiking model can turn a spike where a
    potential lies at the threshold.

    Args:
        model: Any model or mixer with its weights; what `keymix.load` returns; or the folder of a
            run. It is not changed.

    Returns:
        The copy, in eval mode. Names and number of its parameters differ from the model's. It
        refuses ``train()``, ``keymix.swap`` and being saved as a swapped model. Of other image
        sizes it takes those that the model takes.

    Raises:
        UserError: If it is no model, is folded already, or is on the ``meta`` device.
    """
    network = module_of(opened(model))
    refuse_folded(network, "folding")
    if any(t.is_meta for t in (*network.parameters(), *network.buffers())):
        raise UserError(f"{type(network).__name__} is on the meta device; load its weights first")
    folded: Any = copy.deepcopy(network).eval()
    with torch.no_grad():
        for module in list(folded.modules()):
            for layer, norm in _neighbours(module):
                fold_norm(module, layer, norm)
            if isinstance(module, Foldable):
                module.fold()
    folded.eval()
    for module in folded.modules():
        vars(module)["train"] = _NoTraining(module)
    return folded  # type: ignore[no-any-return]
