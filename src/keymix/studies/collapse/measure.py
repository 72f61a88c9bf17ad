# SPDX-License-Identifier: Apache-2.0
"""Attention collapse: how alike a model's attention maps are, and what its tokens become."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.analysis.capture import Call, Layers, Seat, find_seats, run_once, select_layers
from keymix.analysis.images import Images, Model, batches_of, named
from keymix.analysis.similarity import (
    PairTally,
    by_image,
    column_cosines,
    cosines_among,
    cut_of,
    some_images,
)
from keymix.arguments import checked, module_of, opened
from keymix.errors import NoAttentionMap, UserError, check_positive
from keymix.hosts.attention_inputs import Layout
from keymix.mixers.base import TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.studies.collapse.result import Collapse, LayerReading

_SUM = 1e-3
"""How far a row of weights may be from the sum 1."""


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
    r"""Measure attention collapse, batch after batch: only the maps of one are in memory.

    From the map that multiplies V, column by column, over images, heads and tokens (DeepViT,
    https://arxiv.org/abs/2103.11886): Eq. 2, the cosine of a column of two layers, and Eq. 7, the
    share of columns whose cosine exceeds tau, between every two layers that can be compared, and
    between every two heads of a layer (Fig. 3c); the cosine after each column's mean was taken off,
    which is not the paper's; the share of columns like those of the nearest k blocks (Fig. 3a); the
    similar blocks (appendix D) and the last "unique" block (Sec. 5.2).

    From the map after the softmax: the entropy of its rows, in nats and over ln M; the share of
    attention on the token that receives most, and whether that is a prefix token (attention sinks:
    Xiao et al. 2023, https://arxiv.org/abs/2309.17453; Darcet et al. 2023,
    https://arxiv.org/abs/2309.16588). From the tokens after each block: their cosine with those
    after the last (Fig. 4, 8b) and their effective rank (Roy and Vetterli 2007). And Theta, where
    a layer has one (Fig. 8c).

    In a hierarchical model, layers of a stage are compared, and tokens with those of the stage's
    last block. Layers whose windows are cut elsewhere, or whose maps have another shape, cannot be
    compared; neighbours are then the next ones that can, see `Collapse.groups`.

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
        >>> print(found.answer)

    Raises:
        UserError: If an argument is none of these or out of range, no layer matches, images differ
            in size, or there are none.
    """
    if not -1 <= threshold < 1:
        raise UserError(f"{threshold=} is a cosine: give a number from -1 to below 1")
    for name, share in (("similar", similar), ("unique", unique)):
        if not 0 <= share < 1:
            raise UserError(f"{name}={share} is a share: give a number from 0 to below 1")
    check_positive(nearest=nearest, batch_size=batch_size)
    trained = opened(model)
    network = module_of(trained)
    chosen, every = select_layers(network, layers), find_seats(network)
    last = {seat.stage: path for path, seat in every.items()}
    blocks = {path: block_of(network, path) for path in {*chosen, *last.values()}}
    read = {path: LayerTally(seat, threshold) for path, seat in chosen.items()}
    tallies: dict[tuple[Any, ...], PairTally] = {}
    seen = 0
    for batch in batches_of(images, trained, batch_size):
        maps, layouts, outputs = _run(network, batch, read, set(blocks.values()))
        for path, layer in read.items():
            mine, whole = outputs[blocks[path]], outputs[blocks[last[layer.seat.stage]]]
            layer.add_tokens(mine, whole, layouts.get(path))
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for path, found in maps.items():
            shape = tuple(found.shape[1:])
            groups[chosen[path].stage, cut_of(layouts[path]), shape].append(path)
        if not seen:
            tallies = {
                key: PairTally(paths, threshold=threshold, nearest=nearest)
                for key, paths in groups.items()
            }
        if {key: list(tally.paths) for key, tally in tallies.items()} != groups:
            raise UserError("the images differ in size from batch to batch; give them one size")
        for tally in tallies.values():
            tally.add([maps[path] for path in tally.paths])
        seen += len(batch)
        if progress is not None:
            progress(seen)
    if not seen:
        raise UserError("similarity across layers needs at least one image, got none")
    ratios = {path: share for tally in tallies.values() for path, share in tally.nearest().items()}
    group_of = {path: i for i, tally in enumerate(tallies.values()) for path in tally.paths}
    return Collapse(
        layers=tuple(
            read[path].reading(number, group_of.get(path), ratios.get(path, math.nan))
            for number, path in enumerate(every, start=1)
            if path in read
        ),
        pairs=tuple(pair for tally in tallies.values() for pair in tally.pairs()),
        groups=tuple(tally.paths for tally in tallies.values()),
        threshold=threshold,
        similar=similar,
        unique=unique,
        nearest=nearest,
        images=seen,
        of=named(model, network),
    )


def _run(
    model: nn.Module, batch: Tensor, layers: Mapping[str, LayerTally], blocks: set[str]
) -> tuple[dict[str, Tensor], dict[str, Layout | None], dict[str, Any]]:
    """Run a batch; return maps that multiply V and layouts by layer, and what blocks return."""
    maps: dict[str, Tensor] = {}
    layouts: dict[str, Layout | None] = {}
    outputs: dict[str, Any] = {}

    def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
        layouts[seat.path] = layout
        found = layers[seat.path].add_maps(call)
        if found is not None:
            maps[seat.path] = found

    with contextlib.ExitStack() as stack:
        for path in blocks:
            hook = model.get_submodule(path).register_forward_hook(partial(_keep, outputs, path))
            stack.callback(hook.remove)
        run_once(model, batch, {path: layer.seat for path, layer in layers.items()}, on_call)
    return maps, layouts, outputs


def _keep(outputs: dict[str, Any], path: str, module: nn.Module, args: object, out: Any) -> None:
    outputs[path] = out


class LayerTally:
    """Running sums of one layer and its block: nothing of a batch is kept."""

    def __init__(self, seat: Seat, threshold: float) -> None:
        self.seat, self.threshold = seat, threshold
        self.missing: str | None = None
        self.uneven: str | None = None
        self.heads: int | None = None
        self.keys: int | None = None
        self._full_rank: int | None = None
        self._sums: dict[str, Any] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def _add(self, name: str, values: Tensor) -> None:
        """Add values to a mean; those that are NaN do not count."""
        self._sums[name] += float(values.double().nan_to_num().sum())
        self._counts[name] += int((~values.isnan()).sum())

    def mean(self, name: str) -> Any:
        """Return the mean of what was added; None of nothing."""
        return self._sums[name] / self._counts[name] if self._counts[name] else None

    def add_maps(self, call: Call) -> Tensor | None:
        """Add the maps of a call; return that which multiplies V, None if there is none."""
        if self.missing is not None:
            return None
        try:
            weights, final = _both_maps(self.seat, call)
        except NoAttentionMap as error:
            self.missing = str(error.__cause__ or error)
            return None
        self.keys = weights.shape[-1]
        if self.uneven is None and not _is_distribution(weights):
            self.uneven = "its weights are no shares: they are negative, or do not sum to one"
        if self.uneven is None:
            self._add_weights(weights)
        self.add_heads(final)
        return final

    def _add_weights(self, weights: Float[Tensor, "*batch h N M"]) -> None:
        entropy = torch.special.entr(weights).sum(-1, dtype=torch.float64)
        by_head = entropy.movedim(-2, 0).flatten(1)
        self._sums["entropy_by_head"] += by_head.sum(1).cpu()
        self._counts["entropy_by_head"] += by_head.shape[1]
        most, where = weights.mean(-2, dtype=torch.float64).max(-1)
        self._add("sink", most)
        place = None if self.seat.layer is None else self.seat.layer.place
        if place is None or place.prefix_known:
            site: Any = self.seat.module.site if place is None else place.site
            self._add("sink_in_prefix", (where < site.num_prefix_tokens).double())

    def add_heads(self, maps: Float[Tensor, "B *windows h N M"]) -> None:
        """Add Eq. 2 between every two heads of a map that multiplies V (Fig. 3c)."""
        columns = by_image(maps)
        batch, self.heads, count, rows = columns.shape
        first, second = torch.triu_indices(self.heads, self.heads, offset=1, device=maps.device)
        for some in some_images(batch, self.heads * count * rows):
            cosines = cosines_among(columns[some].transpose(1, 2))[..., first, second]
            similar = (cosines > self.threshold).double().masked_fill(cosines.isnan(), math.nan)
            self._add("head_similarity", cosines)
            self._add("heads_similar", similar)

    def add_tokens(self, output: Any, last: Any, layout: Layout | None) -> None:
        """Add what the block made of a batch, next to what the last one of its stage made."""
        if self.seat.layer is None:
            return  # what surrounds it is unknown
        width = self.seat.layer.place.site.dim
        tokens, ends = (tokens_of(each, width, layout) for each in (output, last))
        self._full_rank = min(tokens.shape[1:])
        self._add("effective_rank", effective_rank(tokens))
        if ends.shape == tokens.shape:  # Fig. 4, 8b
            self._add("feature_similarity", column_cosines(tokens.mT, ends.mT))

    def reading(self, block: int, group: int | None, nearest: float) -> LayerReading:
        """Return what was read, with the numbers of block and group and its share of Fig. 3a."""
        even = self.uneven is None
        by_head = self.mean("entropy_by_head").tolist() if even and self.heads else None
        entropy = sum(by_head) / len(by_head) if by_head else None
        most = math.log(self.keys) if self.keys else 0.0
        seat, mixed, theta = self.seat, None, getattr(self.seat.module, "theta", None)
        if isinstance(theta, Tensor) and theta.ndim == 2:
            mixed = tuple(map(tuple, theta.detach().double().cpu().tolist()))
        return LayerReading(
            path=seat.path,
            block=block,
            stage=seat.stage,
            attention=getattr(seat.module, "mixer_name", "") or type(seat.module).__name__,
            remedy=seat.module.collapse_remedy if isinstance(seat.module, TokenMixer) else "",
            group=group,
            missing=self.missing,
            heads=self.heads,
            keys=self.keys,
            entropy=entropy,
            entropy_by_head=tuple(by_head) if by_head else None,
            entropy_normalised=entropy / most if entropy is not None and most else None,
            sink=self.mean("sink") if even else None,
            sink_in_prefix=self.mean("sink_in_prefix") if even else None,
            uneven=self.uneven,
            head_similarity=self.mean("head_similarity"),
            heads_similar=self.mean("heads_similar"),
            nearest=None if math.isnan(nearest) else nearest,
            feature_similarity=self.mean("feature_similarity"),
            effective_rank=self.mean("effective_rank"),
            full_rank=self._full_rank,
            theta=mixed,
        )


def _both_maps(seat: Seat, call: Call) -> tuple[Tensor, Tensor]:
    """Return the map after the softmax and that which multiplies V, formed once if they are one."""
    layer, mixer = seat.layer, seat.module
    if layer is not None and layer.mixer is None:
        read = layer.reading(*call)
        weights = read.map(stage="softmax")
        one = read.post is None
        return weights, weights if one else read.map(stage="final")
    weights = seat.map(call, None, "softmax")
    one = isinstance(mixer, MapMixer) and type(mixer).mix_after is MapMixer.mix_after
    if one and getattr(mixer, "talking_post", None) is None:
        return weights, weights
    return weights, seat.map(call, None, "final")


def _is_distribution(weights: Tensor) -> bool:
    sums = weights.sum(-1)
    return bool((weights.min() >= 0) & ((sums - 1).abs().max() <= _SUM))


def block_of(model: nn.Module, path: str) -> str:
    """Return the path of the block in which a layer of attention sits.

    The nearest module above it that is an item of a list or a sequence of modules; what holds
    the layer itself where there is none.
    """
    above = path.rpartition(".")[0]
    while above:
        holder = above.rpartition(".")[0]
        if isinstance(model.get_submodule(holder), (nn.ModuleList, nn.Sequential)):
            return above
        above = holder
    return path.rpartition(".")[0]


def tokens_of(output: Any, width: int, layout: Layout | None) -> Float[Tensor, "B N C"]:
    """Return a block's output, the first of several, as tokens of ``width`` channels.

    It is tokens already, or an image with channels first or last.
    """
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if isinstance(output, Tensor) and output.ndim == 3 and output.shape[-1] == width:
        return output
    if isinstance(output, Tensor) and output.ndim == 4:
        first = output.shape[1] == width
        if first and output.shape[-1] == width:  # both axes could be the channels'
            first = layout is None or tuple(output.shape[2:]) == layout.grid
        if first:
            return output.flatten(2).mT
        if output.shape[-1] == width:
            return output.flatten(1, 2)
    raise UserError(f"a block's output of {shape} is no tokens of width {width}")


def effective_rank(tokens: Float[Tensor, "B N C"]) -> Float[Tensor, " B"]:
    r"""Compute the effective rank of each image's tokens, between 1 and min(N, C).

    :math:`\exp(-\sum_i p_i \ln p_i)` with :math:`p_i = \sigma_i / \sum_j \sigma_j`, the normalised
    singular values of the N x C matrix as it is (no mean taken off): O. Roy and M. Vetterli, The
    effective rank: a measure of effective dimensionality, EUSIPCO 2007, Definition 1. In float64,
    from the eigenvalues of the smaller Gram matrix; NaN where all tokens are zero.
    """
    matrix = tokens.double()
    matrix = matrix / matrix.abs().amax((-2, -1), keepdim=True)  # so that squares do not overflow
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    finite = gram.isfinite().all(-1).all(-1)
    eigenvalues = torch.linalg.eigvalsh(gram.nan_to_num(0.0, 0.0, 0.0))
    rounding = eigenvalues[..., -1:] * gram.shape[-1] * torch.finfo(torch.float64).eps
    singular = torch.where(eigenvalues > rounding, eigenvalues, 0.0).sqrt()
    shares = singular / singular.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(shares).sum(-1).exp()
    return rank.masked_fill(~finite, math.nan)
