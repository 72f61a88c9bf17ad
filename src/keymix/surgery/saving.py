# SPDX-License-Identifier: Apache-2.0
"""What other libraries would save of a swapped model: refused where the swap would be lost."""

from __future__ import annotations

import weakref
from typing import Any

from timm.models._input import update_model_args
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import find_host, find_mixers
from keymix.mixers.map_mixer import MapMixer
from keymix.models.family import MixerModel
from keymix.surgery.plans import plans_in

# Hugging Face's methods that write weights and a configuration which knows of no mixer
LOSING = ("save_pretrained", "push_to_hub")


class Refusing:
    """Stands in for a model's method that would lose a swap, for as long as the swap is there.

    An attribute of the model itself: it is copied and pickled with the model, and goes where the
    model's attributes are put back. The model is held weakly, so that nothing keeps its memory.

    Args:
        model: The model or the part of one whose method it is.
        method: Name of the method.
    """

    def __init__(self, model: nn.Module, method: str) -> None:
        self.model, self.method = weakref.ref(model), method

    def __reduce__(self) -> tuple[type[Refusing], tuple[nn.Module | None, str]]:
        return Refusing, (self.model(), self.method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the model's class if nothing is swapped in the model any more.

        Raises:
            UserError: If mixers are there that the method would not save.
        """
        model = self.model()
        if model is None:
            raise UserError(f"the model of this {self.method} is gone")
        plans = plans_in(model)
        if plans:
            raise UserError(
                f"{type(model).__name__}.{self.method} would lose the mixer "
                f"{plans[0].mixer!r} at {plans[0].path}: from_pretrained builds the model without "
                "it. Save with keymix.surgery.save_swapped(model, file), load with load_swapped"
            )
        return getattr(type(model), self.method)(model, *args, **kwargs)


def keep_from_loss(model: nn.Module) -> None:
    """See to it that no library saves a swapped model as if nothing had been swapped.

    Hugging Face's methods refuse from now on. timm's functions that save one of keymix's models
    record its mixers; those that save a model of timm's own write a file that timm refuses to
    load.

    Args:
        model: A model with swapped mixers.
    """
    for module in model.modules():
        for method in LOSING:
            if callable(getattr(type(module), method, None)) and plans_in(module):
                setattr(module, method, Refusing(module, method))
    if isinstance(model, MixerModel):
        _record(model)


def _record(model: MixerModel) -> None:
    """Let timm know the mixers of a model, if there is one at each of its places."""
    mixers, places = find_mixers(model), find_host(model).places(model)
    there = [m for place in places if (m := mixers.get(f"{place.path}.mixer")) is not None]
    if len(there) == len(places):
        heads = [{"num_heads": m.num_heads} if isinstance(m, MapMixer) else {} for m in there]
        options = [{**m.built_with, **own} for m, own in zip(there, heads, strict=True)]
        update_model_args(model, mixer=[m.mixer_name for m in there], mixer_options=options)
