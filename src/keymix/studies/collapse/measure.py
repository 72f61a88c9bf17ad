# SPDX-License-Identifier: Apache-2.0
"""Attention collapse: how alike a model's attention maps are, and what its tokens become."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from keymix.analysis.capture import (
    Call,
    Layers,
    Seat,
    find_seats,
    run_once,
    select_layers,
)
from keymix.analysis.images import Images, Model, batches_of
from keymix.analysis.similarity import PairTally, cut_of
from keymix.arguments import checked, module_of, opened
from keymix.errors import UserError, check_positive
from keymix.hosts.attention_inputs import Layout
from keymix.mixers.base import TokenMixer
from keymix.models.deepvit import DeepVisionTransformer
from keymix.studies.collapse.layers import LayerTally, block_of, tokens_of
from keymix.studies.collapse.result import Collapse


@checked
def collapse(
    model: Model,
    images: Images,
    *,
    layers: Layers | None = None,
    threshold: float = 0.5,
    similar: float = 0.8,
    unique: float = 0.9,
    nearest: int = 2,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Collapse:
    r"""Measure attention collapse and what goes with it, batch after batch.

    From the map that multiplies V, column by column, over images, heads and tokens (DeepViT,
    https://arxiv.org/abs/2103.11886):

    - Eq. 2, the cosine of column t of two layers, averaged; Eq. 7 (appendix D), the share of
      columns whose cosine exceeds tau; between every two layers that can be compared.
    - The same cosine after each column's mean was taken off, which is not the paper's: columns of
      nearly even attention are alike by Eq. 2 whatever else they have.
    - Fig. 3a, the ratio with the nearest k blocks. The caption can be read in several ways; here a
      column of a block counts if its Eq. 2, averaged over the k nearest blocks, exceeds tau.
    - Fig. 3c, the same two between every two heads of a layer.
    - The number of similar blocks (appendix D) and the last "unique" block (Sec. 5.2).

    From the map after the softmax: the entropy of its rows, in nats and over ln M; the share of
    attention on the token that receives most, and whether that is a prefix token (attention sinks:
    Xiao et al. 2023, https://arxiv.org/abs/2309.17453; Darcet et al. 2023,
    https://arxiv.org/abs/2309.16588). From the tokens after each block: their cosine with those
    after the last (Fig. 4, 8b) and their effective rank (Roy and Vetterli 2007). And Theta, where
    a layer has one (Fig. 8c).

    In a hierarchical model, layers of a stage are compared, and tokens with those of the stage's
    last block. Layers whose windows are cut elsewhere, or whose maps have another shape, cannot be
    compared; neighbours are then the next ones that can, and `Collapse.apart` names the rest.

    Only one batch's maps are in memory; nothing grows with the number of images.

    Args:
        model: A model that an adapter knows, or that holds mixers; what `keymix.load` returns; or
            the folder of a run. It is left as it was, but for a hook or a few that record the size
            of its images from now on.
        images: Normalised images ``[B, C, H, W]``, or batches of them one after another, each
            alone or first in a tuple ``(images, labels)``; or pictures, as
            :func:`keymix.attention_maps` takes them.
        layers: Which, as in :func:`keymix.attention_maps`; all if None.
        threshold: Cosine tau above which columns count as similar; the paper takes 0.5.
        similar: Share of similar columns above which a block counts as similar to the one before.
        unique: Share of similar columns below which a block is "unique".
        nearest: How many nearest blocks k a block is compared with, on both sides; of two as near
            the earlier. The paper does not give its k.
        batch_size: Images at a time where ``images`` is one tensor.
        progress: Called with the number of images read, after every batch.

    Example:
        >>> model = keymix.create_model("deepvit_micro_p4_32")
        >>> found = keymix.collapse(model, torch.randn(4, 3, 32, 32))
        >>> print(found.verdict.headline)

    Raises:
        UserError: If an argument is none of these or out of range, no layer matches, images differ
            in size, or there are none.
    """
    _check(threshold, similar, unique, nearest, batch_size)
    trained = opened(model)
    network = module_of(trained)
    seats = select_layers(network, layers)
    read = Pass(network, seats, threshold)
    tallies: dict[tuple[Any, ...], PairTally] = {}
    seen = 0
    for batch in batches_of(images, trained, batch_size):
        maps = read.run(batch)
        compared = {key: tally.paths for key, tally in tallies.items()}
        if seen and compared != read.groups:
            raise UserError("the images differ in size from batch to batch; give them one size")
        for key, paths in read.groups.items():
            if key not in tallies:
                tallies[key] = PairTally(paths, threshold=threshold, nearest=nearest)
            tallies[key].add([maps[path] for path in paths])
        seen += len(batch)
        if progress is not None:
            progress(seen)
    if not seen:
        raise UserError("similarity across layers needs at least one image, got none")
    ratios = {path: r for tally in tallies.values() for path, r in tally.nearest().items()}
    group_of = {path: i for i, tally in enumerate(tallies.values()) for path in tally.paths}
    return Collapse(
        layers=tuple(
            tally.result(group_of.get(path), ratios.get(path, float("nan")))
            for path, tally in read.layers.items()
        ),
        pairs=tuple(pair for tally in tallies.values() for pair in tally.pairs()),
        groups=tuple(tally.paths for tally in tallies.values()),
        apart=read.apart(),
        threshold=threshold,
        similar=similar,
        unique=unique,
        nearest=nearest,
        images=seen,
        takes_shared_from=isinstance(network, DeepVisionTransformer),
        remedies={
            path: seat.module.collapse_remedy
            for path, seat in seats.items()
            if isinstance(seat.module, TokenMixer)
        },
    )


def _check(threshold: float, similar: float, unique: float, nearest: int, batch_size: int) -> None:
    if not -1 <= threshold < 1:
        raise UserError(f"{threshold=} is a cosine: give a number from -1 to below 1")
    for name, share in (("similar", similar), ("unique", unique)):
        if not 0 <= share < 1:
            raise UserError(f"{name}={share} is a share: give a number from 0 to below 1")
    check_positive(nearest=nearest, batch_size=batch_size)


class Pass:
    """Runs batches through a model: adds up every layer and block, and returns the maps.

    `groups` are the layers of the last batch whose columns can be compared, by what they share.
    """

    def __init__(self, model: nn.Module, seats: Mapping[str, Seat], threshold: float) -> None:
        self.model, self.seats = model, seats
        every = find_seats(model)
        numbers = {path: i for i, path in enumerate(every, start=1)}
        self.layers = {
            path: LayerTally(seat, numbers[path], threshold) for path, seat in seats.items()
        }
        self.groups: dict[tuple[Any, ...], tuple[str, ...]] = {}
        last = {seat.stage: path for path, seat in every.items()}
        self._last = {path: last[seat.stage] for path, seat in seats.items()}
        watched = {*seats, *self._last.values()}
        self._blocks = {path: block_of(self.model, path) for path in watched}

    def run(self, batch: Tensor) -> dict[str, Tensor]:
        """Run a batch; return the maps that multiply V by path, and set the groups."""
        maps: dict[str, Tensor] = {}
        layouts: dict[str, Any] = {}
        outputs: dict[str, Any] = {}

        def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
            layouts[seat.path] = layout
            found = self.layers[seat.path].read(call)
            if found is not None:
                maps[seat.path] = found

        with _outputs(self.model, set(self._blocks.values()), outputs):
            run_once(self.model, batch, self.seats, on_call)
        self._add_tokens(outputs, layouts)
        self.groups = {}
        for path, found in maps.items():
            key = (self.seats[path].stage, cut_of(layouts[path]), tuple(found.shape[1:]))
            self.groups[key] = (*self.groups.get(key, ()), path)
        return maps

    def _add_tokens(self, outputs: Mapping[str, Any], layouts: Mapping[str, Any]) -> None:
        for path, tally in self.layers.items():
            layer = tally.seat.layer
            if layer is None:
                continue  # what surrounds it is unknown
            width, layout = layer.place.site.dim, layouts.get(path)
            mine = tokens_of(outputs[self._blocks[path]], width, layout)
            last = tokens_of(outputs[self._blocks[self._last[path]]], width, layout)
            tally.add_tokens(mine, last if last.shape == mine.shape else None)

    def apart(self) -> tuple[str, ...]:
        """Say which layers of a stage cannot be compared with which others, and why."""
        reasons = []
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
                    reasons.append(f"{', '.join(paths)} and {', '.join(others)}: {why}")
        return tuple(reasons)


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


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
