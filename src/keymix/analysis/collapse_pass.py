# SPDX-License-Identifier: Apache-2.0
"""One batch after another through a model, whose maps and tokens are read on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from keymix.analysis.capture import Call, Seat, find_seats, run_once, unwrapped
from keymix.analysis.collapse_layers import LayerTally
from keymix.analysis.collapse_tokens import block_of, tokens_of
from keymix.hosts.attention_inputs import Layout


class Pass:
    """Runs batches through a model: tallies every layer and block, and hands the maps on.

    Args:
        model: The model.
        seats: Path to layer, of those that are read.
        threshold: Cosine above which columns count as similar.

    Attributes:
        layers: Path to what was read of it so far.
        groups: Layers of the last batch whose columns can be compared, by what they share.
    """

    def __init__(self, model: nn.Module, seats: Mapping[str, Seat], threshold: float) -> None:
        self.model, self.seats = unwrapped(model), seats
        every = find_seats(model)
        numbers = {path: i for i, path in enumerate(every, start=1)}
        self.layers = {
            path: LayerTally(seat, numbers[path], threshold) for path, seat in seats.items()
        }
        self.groups: dict[tuple[Any, ...], tuple[str, ...]] = {}
        last = {_stage_of(seat): path for path, seat in every.items()}
        self._last = {path: last[_stage_of(seat)] for path, seat in seats.items()}
        watched = {*seats, *self._last.values()}
        self._blocks = {path: block_of(self.model, path) for path in watched}

    def run(self, batch: Tensor) -> dict[str, Tensor]:
        """Run a batch; return the maps that multiply V by path, and set the groups."""
        maps: dict[str, Tensor] = {}
        layouts: dict[str, Any] = {}
        outputs: dict[str, Any] = {}

        def heard(seat: Seat, call: Call) -> None:
            layouts[seat.path] = seat.layout(self.model)
            found = self.layers[seat.path].read(call)
            if found is not None:
                maps[seat.path] = found

        with _outputs(self.model, set(self._blocks.values()), outputs):
            run_once(self.model, batch, self.seats, heard)
        self._add_tokens(outputs, layouts)
        self.groups = {}
        for path, found in maps.items():
            key = (self.layers[path].stage, cut_of(layouts[path]), tuple(found.shape[1:]))
            self.groups[key] = (*self.groups.get(key, ()), path)
        return maps

    def _add_tokens(self, outputs: Mapping[str, Any], layouts: Mapping[str, Any]) -> None:
        for path, tally in self.layers.items():
            layer = tally.seat.layer
            if layer is None:
                continue  # nobody knows what surrounds it
            width, layout = layer.place.site.dim, layouts.get(path)
            mine = tokens_of(outputs[self._blocks[path]], width, layout)
            last = tokens_of(outputs[self._blocks[self._last[path]]], width, layout)
            tally.add_tokens(mine, last if last.shape == mine.shape else None)

    def apart(self) -> tuple[str, ...]:
        """Say which layers of a stage cannot be compared with which others, and why."""
        told = []
        for stage in sorted({key[0] for key in self.groups}):
            mine = [(key, paths) for key, paths in self.groups.items() if key[0] == stage]
            for i, (key, paths) in enumerate(mine):
                for other, others in mine[i + 1 :]:
                    why = (
                        f"their maps differ in shape ({_shape(key[2])} and {_shape(other[2])})"
                        if key[2] != other[2]
                        else "they cut the image into other windows, so that columns belong to "
                        "other tokens"
                    )
                    told.append(f"{', '.join(paths)} and {', '.join(others)}: {why}")
        return tuple(told)


def cut_of(layout: Layout | None) -> tuple[object, ...] | None:
    """Return what says how an image is cut into windows."""
    return None if layout is None else (layout.window, layout.windows, layout.shift)


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _stage_of(seat: Seat) -> int:
    return 0 if seat.layer is None else seat.layer.place.stage


@contextlib.contextmanager
def _outputs(model: nn.Module, paths: set[str], outputs: dict[str, Any]) -> Iterator[None]:
    """Keep what modules return in a forward pass."""

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: object, out: Any) -> None:
            outputs[path] = out

        return hook

    with contextlib.ExitStack() as stack:
        for path in paths:
            handle = model.get_submodule(path).register_forward_hook(keep(path))
            stack.callback(handle.remove)
        yield
