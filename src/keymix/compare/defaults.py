# SPDX-License-Identifier: Apache-2.0
"""The recipe of a comparison for which nobody named one: by the data, the model and the mixers.

A task has recipes by data set and by kind of input. Mixers of spiking tokens want a spiking model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keymix.data.kinds import IMAGE, RECORDING, InputKind
from keymix.data.specs import kind_of_spec, task_name
from keymix.errors import UserError
from keymix.task import DEFAULT, Task, get_task
from keymix.train.recipe import Recipe

DATA = "digits"
"""The data set where neither data nor a recipe is named."""
SPIKING_MODEL = "qkformer_micro_32"
_SIDE = 32  # pixels a side of the images and frames that the spiking model is made for


@dataclass(frozen=True, kw_only=True)
class Default:
    """What was chosen, before a person's options.

    Args:
        recipe: The recipe.
        why: What made it other than that of images, in words; else empty.
    """

    recipe: Recipe
    why: str = ""

    def gathered(self, chosen: Recipe) -> Recipe:
        """Return the recipe with frames of the model's 32 pixels a side where the sensor has more.

        Args:
            chosen: This recipe with a person's options; a model or a size among them stays.

        Raises:
            UserError: If the data cannot be opened.
        """
        own = chosen.model.name == SPIKING_MODEL and kind_of_spec(chosen.data.spec) is RECORDING
        if not own or chosen.data.image_size is not None:
            return chosen
        from keymix.data.events.inputs import sensor_of

        sensor = sensor_of(chosen.data.spec)
        if min(sensor) < _SIDE or max(sensor) == _SIDE:
            return chosen
        return replace(chosen, data=replace(chosen.data, image_size=_SIDE))

    def told(self, chosen: Recipe) -> str:
        """Say in one line what was chosen and why; nothing where that is no news.

        Args:
            chosen: This recipe with a person's options.
        """
        if not self.why:
            return ""
        size = f" at {_SIDE}x{_SIDE} pixels" if chosen.data.image_size == _SIDE else ""
        return (
            f"{self.why}: recipe {chosen.name} with model {chosen.model.name}{size} is taken; "
            "--recipe and --model name others"
        )


def default_for(
    *, data: str | None, model: str | None, mixers: str | Sequence[str] | None
) -> Default:
    """Choose a recipe.

    Args:
        data: Data spec, if one was named.
        model: Model name, if one was named.
        mixers: The mixers, if some were named.

    Raises:
        UserError: If a mixer is unknown, or the data's task has no recipe of its own.
    """
    from keymix import recipes

    task, kind = get_task(task_name(data)), kind_of_spec(data)
    if task.name != DEFAULT or kind is not IMAGE:
        holds = kind.holds if task.name == DEFAULT else task.holds
        return Default(recipe=recipes.resolve(_name(task, data, kind)), why=f"{data} holds {holds}")
    spiking = model is None and [*_by_tokens(mixers)] == ["spiking"]
    why = "these mixers take spiking tokens" if spiking else ""
    if spiking and data is None:
        return Default(recipe=recipes.resolve(_name(task, None, RECORDING)), why=why)
    recipe = recipes.resolve(_name(task, data or DATA, kind))
    if spiking:
        recipe = replace(
            recipe,
            data=replace(recipe.data, image_size=_SIDE),
            model=replace(recipe.model, name=SPIKING_MODEL),
        )
    return Default(recipe=recipe, why=why)


def _name(task: Task, data: str | None, kind: InputKind) -> str:
    """Name a task's recipe: of the data set, else of its kind of input, else of any data."""
    spec = kind.name if data is None else data.partition(":")[0]
    found = (task.recipes[key] for key in (spec, kind.name, "") if key in task.recipes)
    name = next(found, None)
    if name is None:
        given = "no data" if data is None else f"data {data!r}"
        raise UserError(
            f"task {task.name!r} has no recipe of its own for {given}: name one with --recipe"
        )
    return name


def refuse_two_kinds(mixers: str | Sequence[str] | None) -> None:
    """Refuse mixers of spiking tokens beside mixers of dense ones: no model has both.

    Args:
        mixers: The mixers, if some were named.

    Raises:
        UserError: Naming which are which; or if a mixer is unknown.
    """
    named = _by_tokens(mixers)
    if {"dense", "spiking"} <= named.keys():
        spiking, dense = (", ".join(named[kind]) for kind in ("spiking", "dense"))
        raise UserError(
            f"spiking mixers ({spiking}) and dense ones ({dense}) take different tokens and cannot "
            "be compared in one model: name mixers of one kind. --twin sets a spiking mixer's "
            "model beside the same without spikes."
        )


def _by_tokens(mixers: str | Sequence[str] | None) -> dict[str, list[str]]:
    """List the mixers that were named by the tokens they want, those that take any left out."""
    named: dict[str, list[str]] = {}
    if mixers is None:
        return named
    from keymix.mixers.registry import get_mixer_class
    from keymix.mixers.spec import parse_mixers

    specs = parse_mixers(mixers if isinstance(mixers, str) else ",".join(mixers))
    for name in dict.fromkeys(name for spec in specs for name in spec.names):
        domain = get_mixer_class(name).traits.domain
        if domain != "any":
            named.setdefault(domain, []).append(name)
    return named
