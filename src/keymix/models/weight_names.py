# SPDX-License-Identifier: Apache-2.0
"""Names of a checkpoint's tensors in a model whose attention is a mixer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import Host, find_host, find_mixers


def target_names(model: nn.Module, names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Say what a checkpoint's tensors are called in a model.

    A name that the model has is its own. One below a host's attention becomes that of the mixer
    which stands there, in the words of the host.

    Args:
        model: The model.
        names: The checkpoint's names.

    Returns:
        The model's name to the checkpoint's, names of mixers that the model lacks included; and
        the checkpoint's names that do nothing.
    """
    own = model.state_dict().keys()
    hosted = _hosted(model)
    host = _host(model)
    parts = {} if host is None else dict(host.parts)
    found: dict[str, str] = {}
    idle: set[str] = set()
    for name in names:
        place = next((p for p in hosted if name.startswith(p)), None)
        if name in own or place is None or name.startswith(f"{place}mixer."):
            found[name] = name
            continue
        part = name.removeprefix(place)
        renamed = parts.get(part, part)
        if renamed is None:
            idle.add(name)
        else:
            found[f"{place}mixer.{renamed}"] = name
    return found, idle


def joined_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join what a checkpoint's attention holds in pieces, where mixers stand that have it in one.

    Args:
        model: The model.
        state: The checkpoint's tensors by their names there.
    """
    host = _host(model)
    found = dict(state)
    if host is None:
        return found
    for place in _hosted(model):
        own = {n.removeprefix(place): t for n, t in state.items() if n.startswith(place)}
        joined = host.joined(own)
        for name in own.keys() - joined.keys():
            del found[f"{place}{name}"]
        found |= {f"{place}{name}": t for name, t in joined.items()}
    return found


def _hosted(model: nn.Module) -> list[str]:
    """Paths of what stands where attention stood, with the dot behind."""
    return [path.removesuffix("mixer") for path in find_mixers(model) if path.endswith(".mixer")]


def _host(model: nn.Module) -> Host | None:
    try:
        return find_host(model)
    except UserError:  # no family that hosts mixers: all names are as they are
        return None
