# SPDX-License-Identifier: Apache-2.0
"""A model beside its swapped copy, each new layer fed what the original's layer was fed.

The original runs and its layers' outputs are kept. Then the copy runs, and what each swapped layer
gives is looked at and replaced by what the original's layer gave: so every layer sees the
original's tokens, whatever the ones before it do, and through the calls of the host itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.layers import Layer
from keymix.mixers.base import TokenMixer
from keymix.surgery.images import of_hook, run

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(kw_only=True)
class Pair:
    """One layer before and after, on one batch.

    Attributes:
        layer: The original's.
        mixer: The new one, in the copy.
        before: Arguments that the original's layer was called with.
        after: Arguments that the new mixer was called with.
        old: What the layer gave.
        new: What the layer gives now, in the same layout.
    """

    layer: Layer
    mixer: TokenMixer
    before: Call
    after: Call
    old: Tensor
    new: Tensor


def beside(
    model: nn.Module,
    copy: nn.Module,
    layers: Sequence[Layer],
    mixers: Mapping[str, TokenMixer],
    images: Tensor,
    look: Callable[[Pair], None],
) -> Tensor:
    """Run both on a batch and look at every pair of layers; return the original's output.

    Args:
        model: The original.
        copy: The same with mixers in the places of ``layers``.
        layers: The layers of the original.
        mixers: The new mixers of the copy by path of their place.
        images: A batch.
        look: Called with each pair, in the order of the forward pass.
    """
    calls: dict[str, Call] = {}
    outputs: dict[str, Any] = {}
    with ExitStack() as hooks:
        for layer in layers:
            path = layer.place.path
            call = layer.module.register_forward_pre_hook(
                partial(_keep_call, calls, path), with_kwargs=True
            )
            there = model.get_submodule(path).register_forward_hook(
                partial(_keep_output, outputs, path)
            )
            hooks.callback(call.remove)
            hooks.callback(there.remove)
        out = run(model, images)
    inner: dict[str, Call] = {}
    with ExitStack() as hooks:
        for layer in layers:
            path = layer.place.path
            mixer = mixers[path]
            call = mixer.register_forward_pre_hook(
                partial(_keep_call, inner, path), with_kwargs=True
            )

            def replace(
                _module: nn.Module, _args: Any, got: Any, layer: Layer = layer, path: str = path
            ) -> Any:
                old, new = _tensor(outputs[path]), _tensor(got)
                shown = old.flatten(2).mT if old.ndim == 4 and new.ndim == 3 else old
                look(
                    Pair(
                        layer=layer,
                        mixer=mixers[path],
                        before=calls.pop(path),
                        after=inner.pop(path),
                        old=shown.reshape(new.shape),
                        new=new,
                    )
                )
                forced = shown.reshape(new.shape)
                return (forced, *got[1:]) if isinstance(got, tuple) else forced

            there = copy.get_submodule(path).register_forward_hook(of_hook(replace))
            hooks.callback(call.remove)
            hooks.callback(there.remove)
        run(copy, images)
    return out


def _tensor(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _keep_call(
    calls: dict[str, Call],
    path: str,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if path in calls:
        raise twice(path)
    calls[path] = (args, kwargs)


def twice(path: str) -> UserError:
    """Say that a layer is called more than once for an image."""
    return UserError(
        f"{path} is called more than once in a pass, and no mixer can be compared with all of its "
        "calls; leave it out (layers=), or give each call a module of its own"
    )


def _keep_output(
    outputs: dict[str, Any], path: str, _module: nn.Module, _args: Any, out: Any
) -> None:
    outputs[path] = out
