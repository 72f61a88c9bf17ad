# SPDX-License-Identifier: Apache-2.0
"""The spikes of a network, read: firing rates and operations, and rasters of one image."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keymix.analysis.capture import Call, Seat, chosen, inference_mode_of, refusing, run_once
from keymix.analysis.energy import ENERGIES, Energy
from keymix.analysis.passes import Varies
from keymix.analysis.spikes_operations import OperationCounter
from keymix.analysis.spikes_record import Firing, Place, Raster, SpikeReadings
from keymix.arguments import unwrapped
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.layers import by_name
from keymix.layers.neurons import SpikingNeuron
from keymix.mixers.base import TokenMixer
from keymix.mixers.qk_token import QKTokenAttention

SEGMENT = 100
"""Tokens that a raster shows by default; the paper's number."""

MLP = ("MLP layer 1", "MLP layer 2")


def read_spikes(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    cost: Energy = ENERGIES["fp32"],
    batch_norm: Literal["folded", "separate"] = "folded",
    progress: Callable[[int], None] | None = None,
) -> SpikeReadings:
    """Read spikes and operations of a network, batch after batch; see `keymix.spike_study`."""
    neurons = neurons_of(model)
    tallies = [FiringTally(*each) for each in places_of(model)]
    steps, seen = int(getattr(model, "time_steps", 0)), 0
    counter, outputs = OperationCounter(model, neurons, steps or None), Varies()
    parameter = next(model.parameters(), torch.empty(0))
    for batch in batches:
        for neuron in neurons.values():
            if callable(reset := getattr(neuron, "reset", None)):
                reset()
        images, x = len(batch), batch.to(device=parameter.device, dtype=parameter.dtype)
        with contextlib.ExitStack() as stack:
            for tally in tallies:
                stack.callback(tally.listen(counter, images, steps).remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(inference_mode_of(model))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(counter.listening(images))
            stack.enter_context(refusing(model, x))
            given = model(x)
        if isinstance(given, Tensor):
            outputs.see(given)
        seen, steps = seen + images, steps or max(tally.steps_seen for tally in tallies)
        for tally in tallies:
            tally.end_batch(images, steps)
        if progress is not None:
            progress(seen)
    if not seen:
        raise UserError("a study of spikes needs at least one image, got none")
    return SpikeReadings(
        firings=tuple(tally.result() for tally in tallies if tally.count),
        operations=counter.results(seen, steps, norms=batch_norm == "separate"),
        time_steps=steps,
        images=seen,
        batch_norm=batch_norm,
        cost=cost,
        repeated=counter.same_at_every_step(),
        varies=outputs.varied(),
    )


def neurons_of(model: nn.Module) -> dict[str, nn.Module]:
    """List the neuron layers, outermost ones where one holds another: path to module.

    A neuron layer is a :class:`keymix.layers.neurons.SpikingNeuron`, or a module with a
    ``v_threshold``, as SpikingJelly's neurons are. A model without any is refused.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and (isinstance(module, SpikingNeuron) or hasattr(module, "v_threshold")):
            found[path] = module
    if not found:
        raise UserError(
            f"{type(model).__name__} has no spiking neurons; choose a model that has, such as "
            "keymix's qkformer and spikformer models (not with neuron='relu', which has no "
            "spikes)"
        )
    return found


def places_of(model: nn.Module) -> list[tuple[Place, nn.Module]]:
    """List the places where spikes are read, in the model's order."""
    mixers = {p: m for p, m in model.named_modules() if isinstance(m, TokenMixer)}
    watched = {path: (module, False) for path, module in neurons_of(model).items()}
    for path, each in mixers.items():
        if "proj" in each.spiking_roles:
            watched[f"{path}.proj"] = (each.get_submodule("proj"), True)
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    numbers: dict[tuple[str, str], int] = {}
    mlps: dict[str, int] = {}
    places = []
    for path in sorted(watched, key=order.__getitem__):
        module, inward = watched[path]
        stage, within = _stage_and_block(path)
        block = None
        if within is not None:
            block = numbers.setdefault(within, len(numbers) + 1)
        parent, _, name = path.rpartition(".")
        mixer = mixers.get(parent)
        owner = None if mixer is None else mixer.mixer_name
        role = None if mixer is None else mixer.spiking_roles.get(name)
        if block is not None and owner is None and ".mlp." in path:
            before = path.partition(".mlp.")[0]
            number = mlps.get(before, 0)
            mlps[before] = number + 1
            role = MLP[number] if number < len(MLP) else None
        place = Place(path=path, inward=inward, role=role, mixer=owner, stage=stage, block=block)
        places.append((place, module))
    return places


def _stage_and_block(path: str) -> tuple[int | None, tuple[str, str] | None]:
    """Read stage (from 1) and block off a path."""
    stage = re.search(r"(?:^|\.)stages\.(\d+)\.", path)
    block = re.search(r"(?:^|\.)blocks\.(\d+)\.", path)
    number = int(stage[1]) + 1 if stage else None
    if block is None:
        return number, None
    return number or 1, (stage[1] if stage else "", block[1])


class FiringTally:
    """Adds up the spikes of one place over batches."""

    def __init__(self, place: Place, module: nn.Module) -> None:
        self.place, self.module = place, module
        self._totals: list[float] = []  # by step
        self.count = self._neurons = 0  # of every step, and of one image
        self._largest = 0.0
        self._fired: Tensor | None = None  # by neuron, while images lie on the second axis
        self._calls: list[Tensor] = []

    def listen(self, counter: OperationCounter, images: int, steps: int) -> RemovableHandle:
        """Read every call of its module; what is read off is no work that the counter counts."""
        inward, module = self.place.inward, self.module

        def hook(_: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
            counter.paused = True
            self.add(args[0] if inward else output, images, steps)
            counter.paused = False

        add = module.register_forward_pre_hook if inward else module.register_forward_hook
        return add(hook)

    def add(self, spikes: Tensor, images: int, steps: int) -> None:
        """Read what one call gave, steps first; keep it until the batch ends where it is one step.

        The number of `steps` is 0 where it is not known.
        """
        if len(spikes) == steps and not self._calls:
            self._add(spikes, images)
        else:
            self._calls.append(spikes.detach())

    @property
    def steps_seen(self) -> int:
        """Time steps that it saw in the batch that is under way."""
        return sum(len(call) for call in self._calls) if len(self._calls) == 1 else len(self._calls)

    def end_batch(self, images: int, steps: int) -> None:
        """Add up the calls of a batch that are kept: one with all steps, or one per step."""
        calls, self._calls = self._calls, []
        if calls:
            one_per_step = len(calls) == steps and steps > 1
            self._add(torch.stack(calls) if one_per_step else torch.cat(calls), images)

    def _add(self, spikes: Tensor, images: int) -> None:
        flat = spikes.flatten(1)
        totals = flat.sum(1, dtype=torch.float64).tolist()
        known = self._totals or [0.0] * len(totals)
        if len(totals) != len(known):
            raise UserError(
                f"batches of {len(known)} and of {len(totals)} time steps: read them one by one"
            )
        self._totals = [a + b for a, b in zip(known, totals, strict=True)]
        if spikes.ndim < 2 or spikes.shape[1] != images:
            self._fired = None
        elif self._fired is not None or not self.count:
            fired = (spikes != 0).flatten(0, 1).any(0)
            before = fired if self._fired is None else self._fired
            self._fired = before | fired if before.shape == fired.shape else None
        self._largest = max(self._largest, float(spikes.max()))
        self._neurons = flat.shape[1] // images
        self.count += flat.shape[1]

    def result(self) -> Firing:
        """Return what was read."""
        return Firing(
            **vars(self.place),
            rate=sum(self._totals) / (self.count * len(self._totals)),
            by_step=tuple(total / self.count for total in self._totals),
            neurons=self._neurons,
            silent=None if self._fired is None else 1 - float(self._fired.double().mean()),
            largest=self._largest,
        )


def spike_rasters(
    model: nn.Module,
    image: Tensor,
    *,
    layers: str | int | Sequence[str | int] | None = None,
    head: int = 0,
    step: int | None = None,
    tokens: tuple[int, int] | None = None,
) -> tuple[Raster, ...]:
    """Read the spikes of Q-K token attention on one image (QKFormer, Sec. 4.2 and Fig. 3).

    Args:
        model: A model with the mixer ``qk_token``; it is left as it was.
        image: One normalised image ``[C, H, W]``, or frames ``[T, C, H, W]``.
        layers: Which of these mixers, as in :func:`keymix.attention_maps`: numbers among them from
            0, patterns of paths; the first of every stage if None.
        head: The head, from 0.
        step: The time step, from 0; the last if None.
        tokens: First token and how many; 100 in the middle, or all if fewer, if None.

    Returns:
        One raster a mixer; none if the model has no such mixer and ``layers`` is None.

    Raises:
        UserError: If a layer, head, step or token is not there.
    """
    inner = unwrapped(model)
    places = {place.path.rpartition(".")[0]: place for place, _ in places_of(inner)}
    seats = {
        path: Seat(path=path, module=module, layer=None)
        for path, module in inner.named_modules()
        if isinstance(module, QKTokenAttention)
    }
    if layers is not None:
        if not seats:
            raise UserError("the model has no layer of Q-K token attention, of which rasters are")
        wanted = chosen(list(seats), layers, "layers of Q-K attention")
    else:  # the first of each stage
        firsts = {places[path].stage: path for path in reversed(seats)}
        wanted = [path for path in seats if path in firsts.values()]
    found = []

    def on_call(seat: Seat, call: Call, _: Layout | None) -> None:
        mixer, named = seat.module, by_name(*call)
        assert isinstance(mixer, QKTokenAttention)
        spikes = mixer.spikes(named["x"], named.get("grid"))
        attention = spikes["A_t"][:, 0, :, :, 0].cpu() != 0  # [T, h, N]
        steps, heads, number = attention.shape
        at = _index("step", steps - 1 if step is None else step, steps)
        one = _index("head", head, heads)
        start, count = _segment(tokens, number)
        grid = named.get("grid") or mixer.site.grid

        def shown(name: str) -> Tensor:
            every = spikes[name][at, 0].reshape(number, heads, -1)[:, one]  # [N, d]
            return every[start : start + count].mT.cpu() != 0

        found.append(
            Raster(
                path=seat.path,
                stage=places[seat.path].stage,
                block=places[seat.path].block,
                head=one,
                heads=heads,
                step=at,
                start=start,
                grid=grid if grid is not None and prod(grid) == number else (1, number),
                attention=attention[:, one],
                keys=shown("K"),
                masked=shown("X'"),
            )
        )

    if wanted:
        run_once(inner, image[None], {path: seats[path] for path in wanted}, on_call)
    return tuple(found)


def _index(what: str, given: int, count: int) -> int:
    if not 0 <= given < count:
        raise UserError(f"{what}={given}: there are {count}, numbered from 0")
    return given


def _segment(tokens: tuple[int, int] | None, number: int) -> tuple[int, int]:
    if tokens is None:
        count = min(SEGMENT, number)
        return (number - count) // 2, count
    start, count = tokens
    if start < 0 or count < 1 or start + count > number:
        raise UserError(f"{tokens=}: first token and how many must lie within the {number} tokens")
    return start, count
