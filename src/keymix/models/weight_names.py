# SPDX-License-Identifier: Apache-2.0
"""Names of a checkpoint's tensors in a model whose attention is a mixer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

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
    hosted = {path.removesuffix("mixer") for path in find_mixers(model) if path.endswith(".mixer")}
    parts = _parts(model)
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


def _parts(model: nn.Module) -> dict[str, str | None]:
    try:
        host: Host = find_host(model)
    except UserError:  # no family that hosts mixers: all names are as they are
        return {}
    return dict(host.parts)
