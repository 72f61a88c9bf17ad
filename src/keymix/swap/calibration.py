# SPDX-License-Identifier: Apache-2.0
"""What calibration images say of a model's keys, logits and outputs, and what follows for keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.analysis.images import Images
from keymix.arguments import Trained, checked, module_of
from keymix.errors import NoAttentionMap, UserError, check_positive
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import MixerOptions, Plan, shadow
from keymix.hosts.layers import Layer, by_name, find_layers
from keymix.mixers.base import Grid, TokenMixer, to_image
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class
from keymix.ops import resample
from keymix.swap.drift import Call, Pair, paired_forward, tensor_of, twice
from keymix.swap.images import CalibrationImages, of_hook, read_pictures, run
from keymix.swap.plans import (
    PREFIX,
    Layers,
    choose,
    learned_keys_of,
    plans_for,
    refuse_shared,
)
from keymix.swap.transfer import Fate, names_of

Estimate = Literal["least_squares", "mean", "reconstruct"]
NEAR = 5e-3
"""Marks of the same weights differ by less, in half precision too."""
PLAIN = "queries"


def unfolded(name: str) -> int | None:
    """Return the side of the window of queries that a set of features is made of, if any."""
    return int(name.removeprefix("unfolded ")) if name.startswith("unfolded ") else None


def features(name: str, q: Tensor, prefix: int, grid: Grid | None) -> Tensor:
    """Return what a learned key meets: the unknowns of its least squares, ``[*, n, F]``.

    All queries as they are, those of prefix tokens alone, or those of patches with their k x k
    neighbours and a one for the bias, as a convolution of the query image sees them (zeros beyond
    its edge): ``name`` is ``"queries"``, ``"prefix queries"`` or ``"unfolded k"``, and ``q``
    queries ``[*, N, d]`` after the host's norms and rotations.
    """
    side = unfolded(name)
    if side is None:
        return q if name == PLAIN else q[..., :prefix, :]
    if grid is None:
        raise UserError("a convolution of queries needs to know how tokens lie on the image")
    patches = q[..., prefix:, :]
    if patches.shape[-2] != grid[0] * grid[1]:
        raise UserError(
            f"calibration images make {patches.shape[-2]} patches and the model is built for "
            f"{grid[0]}x{grid[1]}; give images of its size"
        )
    image = to_image(patches, grid)
    near = F.unfold(image, side, padding=side // 2).mT
    near = near.reshape(*patches.shape[:-1], near.shape[-1])
    return torch.cat((near, near.new_ones(*near.shape[:-1], 1)), -1)


@dataclass(eq=False)
class Moments:
    r"""Sums over images of one layer's keys and of products of its queries, in float64.

    With logits :math:`L = s\, q k^\top` (and what the layer itself adds), :math:`\phi` the
    features a learned key meets: ``gram`` is :math:`\sum \phi^\top \phi`, ``cross``
    :math:`\sum \phi^\top L`. Leading axes are those of windows.
    """

    images: int = 0  # how many images are in the sums
    # sum of keys after `Site.post_projection` ``[*, h, M, d]``; None where logits are no product
    keys: Tensor | None = None
    gram: dict[str, Tensor] = field(default_factory=dict)  # ``[*, h, F, F]`` by set of features
    cross: dict[str, Tensor] = field(default_factory=dict)  # ``[*, h, F, M]`` likewise
    # queries in the sums likewise, of one window
    rows: dict[str, int] = field(default_factory=dict)
    scale: float | Tensor = 1.0  # the layer's factor of logits
    key_grid: Grid = (1, 1)  # where its keys lie
    prefix: int = 0  # its prefix tokens
    why_not: str | None = None  # why there is nothing to be had, where there is not

    def add(
        self,
        read: Reading,
        added: Tensor | None,
        wanted: Sequence[str],
        grid: Grid | None,
        met: Tensor | None = None,
    ) -> None:
        """Add a batch to the sums of the features ``wanted``.

        The layer itself adds ``added``, ``[*, N, M]``, to its logits. Learned keys meet the queries
        ``met``, those of the layer if None.
        """
        q = read.q.double()
        new = q if met is None or met.shape != q.shape else met.double()
        k = read.k.double().expand(*q.shape[:-2], *read.k.shape[-2:])
        self.scale = read.scale.double() if isinstance(read.scale, Tensor) else read.scale
        self.images += len(q)
        self.keys = _plus(self.keys, k.sum(0))
        for name in wanted:
            phi = features(name, new, self.prefix, grid)
            rows = features(PLAIN if name != PREFIX else PREFIX, q, self.prefix, grid)
            rows = rows[..., self.prefix :, :] if unfolded(name) else rows
            # sum over images and queries of phi^T (s q k^T), without the logits themselves
            cross = ((phi.mT @ rows) @ k.mT * self.scale).sum(0)
            if added is not None:
                own = added.double().expand(*q.shape[:-1], k.shape[-2])
                own = own[..., : self.prefix, :] if name == PREFIX else own
                own = own[..., self.prefix :, :] if unfolded(name) else own
                cross = cross + (phi.mT @ own).sum(0)
            self.gram[name] = _plus(self.gram.get(name), (phi.mT @ phi).sum(0))
            self.cross[name] = _plus(self.cross.get(name), cross)
            self.rows[name] = self.rows.get(name, 0) + len(q) * phi.shape[-2]


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    if total is not None and total.shape != more.shape:
        raise UserError("calibration images have several sizes; give them in the model's one")
    return more if total is None else total + more


class Mark(NamedTuple):
    """What identifies a layer's weights: the module there, its shapes, a projection."""

    kind: type
    shapes: tuple[tuple[int, ...], ...]
    number: float

    @classmethod
    def of(cls, layer: Layer) -> Mark:
        """Project all weights of a layer, of norm 1 together, onto a wave."""
        dot = size = 0.0
        shapes = []
        for phase, weight in enumerate(layer.module.parameters()):
            flat = weight.detach().double().flatten()
            wave = torch.arange(len(flat), dtype=flat.dtype, device=flat.device).add_(phase).cos_()
            dot, size = dot + float(flat @ wave), size + float(flat @ flat)
            shapes.append(tuple(weight.shape))
        return cls(type(layer.module), tuple(shapes), dot / (size or 1.0) ** 0.5)

    def fits(self, other: Mark) -> bool:
        """Whether weights are the same but for their type; what was swapped since says nothing."""
        if self.kind is not other.kind:
            return True
        return self.shapes == other.shapes and abs(self.number - other.number) < NEAR


@dataclass(frozen=True, eq=False)
class Statistics:
    """What :func:`gather` returns; :func:`keymix.swap.swap` takes it as ``calibration=``.

    Every layer's numbers are those of the model as it was then, with none of its layers swapped:
    they serve any subset of the layers, one swap after another.

    Attributes:
        images: The calibration images, read again where drift is measured.
        layers: Sums by path of the place.
        marks: What identifies the weights that they were collected with, likewise.
    """

    images: CalibrationImages
    layers: Mapping[str, Moments]
    marks: Mapping[str, Mark] = field(default_factory=dict)

    def check(self, layers: Sequence[Layer]) -> None:
        """Refuse layers of another model.

        Raises:
            UserError: If the weights of a layer are not those that were gathered with.
        """
        for layer in layers:
            path = layer.place.path
            if path in self.marks and not self.marks[path].fits(Mark.of(layer)):
                raise UserError(
                    f"the statistics are of another model, or of other weights of {path}; gather "
                    "them from the model that is swapped"
                )


@checked
def gather(
    model: nn.Module | Trained,
    images: Images,
    mixer: str | Sequence[str] = "static_key",
    layers: Layers = None,
    *,
    mixer_options: MixerOptions = None,
    estimate: Estimate = "least_squares",
    batch_size: int = 32,
    number: int | None = None,
) -> Statistics:
    """Run a model on calibration images once and sum up what its attention does.

    Memory does not grow with the number of images: a layer keeps h M d numbers for its mean keys
    and, for least squares, h F (F + M), where F is the head's width d, or k^2 d + 1 under a
    convolution of k x k.

    Args:
        model: Any model that an adapter knows. It runs in evaluation mode and is not changed.
        images: A tensor ``[n, C, H, W]`` or an iterable of batches, normalised as in the model's
            evaluation; at least 8 images. It is kept, since drift is measured on it too; an
            iterator that runs once is kept whole.
        mixer: What is to be swapped in, one name or one per layer: it says what is summed.
        layers: Which layers; see :func:`keymix.swap.swap`.
        mixer_options: Options of the mixers.
        estimate: ``"mean"`` saves the sums that only least squares need.
        batch_size: Most images at once.
        number: How many images are taken; fewer are refused. All if None.

    Raises:
        UserError: If no adapter knows the model, a name is unknown, no layer is meant, or the
            images are not what the model takes.
    """
    check_positive(batch_size=batch_size, number=1 if number is None else number)
    given, model = model, shadow(module_of(model))
    found = find_layers(model)
    chosen = choose(found, layers)
    refuse_shared(found, chosen)
    plans = plans_for(chosen, mixer, mixer_options)
    source = CalibrationImages(read_pictures(images, given), batch_size, number)
    return summed(model, chosen, plans, source, estimate)


def summed(
    model: nn.Module,
    layers: Sequence[Layer],
    plans: Sequence[Plan],
    images: CalibrationImages,
    estimate: Estimate,
) -> Statistics:
    """Do what :func:`gather` says, for plans that are made."""
    sums: dict[str, Moments] = {}
    marks = {}
    hooks = []
    for layer, plan in zip(layers, plans, strict=True):
        site = layer.place.site
        wanted = tuple(learned_keys_of(get_mixer_class(plan.mixer), site, plan.options))
        if not wanted:
            continue
        moments = sums[plan.path] = Moments(prefix=site.num_prefix_tokens, key_grid=_home(layer))
        take = partial(_take, layer, moments, () if estimate == "mean" else wanted)
        hooks.append(layer.module.register_forward_pre_hook(of_hook(take), with_kwargs=True))
        marks[plan.path] = Mark.of(layer)
    shown = 0
    try:
        with torch.no_grad():
            for batch in images.batches(model):
                run(model, batch)
                shown += len(batch)
                for path, moments in sums.items():
                    if moments.images > shown:
                        raise twice(path)
    finally:
        for hook in hooks:
            hook.remove()
    return Statistics(images=images, layers=sums, marks=marks)


def _home(layer: Layer) -> Grid:
    """Where the keys lie that a layer has now."""
    site = layer.place.site if layer.mixer is None else layer.mixer.site
    pooled = (
        None if layer.mixer is None or site.grid is None else layer.mixer.key_grid_for(site.grid)
    )
    return pooled or site.key_grid or site.grid or (1, 1)


def _take(
    layer: Layer,
    moments: Moments,
    wanted: Sequence[str],
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    met: Tensor | None = None,
) -> None:
    if moments.why_not is not None:
        return
    try:
        read = layer.reading(args, kwargs)
    except NoAttentionMap as error:
        moments.why_not = str(error)
        return
    added = own_bias(layer, args, kwargs)
    moments.add(read, added, wanted, layer.place.site.grid, met)


Seen = list[tuple[Call, Tensor]]
"""Calls of a layer in a swapped copy, by batch, each with what the original's layer gave."""


def look_beside(
    model: nn.Module,
    copy: nn.Module,
    layer: Layer,
    mixer: TokenMixer,
    images: CalibrationImages,
    *,
    wanted: Sequence[str],
    keep: bool,
) -> tuple[Moments, Seen]:
    """Show images to a model and to its copy, in which the layers before this one are swapped.

    The sums are of the queries that the layer gets in the copy and of the logits that it has in the
    original, so that its keys make up for what the layers before it changed.
    """
    moments = Moments(prefix=layer.place.site.num_prefix_tokens, key_grid=_home(layer))
    path, seen, calls = layer.place.path, Seen(), list[Call]()

    def look(pair: Pair) -> None:
        call = calls.pop()
        if keep:
            seen.append((call, pair.old))
        if isinstance(mixer, MapMixer) and wanted:
            named = by_name(*pair.after)
            grid = mixer.resolve_grid(named["x"], named.get("grid"))
            met = mixer.inputs(named["x"], grid)["q"]
            _take(layer, moments, wanted, layer.module, *pair.before, met=met)

    hook = copy.get_submodule(path).register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        with torch.no_grad():
            for batch in images.batches(model):
                paired_forward(model, copy, [layer], {path: mixer}, batch, look)
    finally:
        hook.remove()
    return moments, seen


STEPS, RATE = 40, 0.05
"""Steps of Adam, and the size of the first relative to a parameter's root mean square."""


def reconstruct(host: nn.Module, mixer: TokenMixer, seen: Seen, fate: Fate) -> None:
    """Move what is new in a mixer towards the outputs that the layer gave before."""
    named = {name: names_of(mixer, name) for name, _ in mixer.named_parameters()}
    new = {name for name, parts in named.items() if parts and parts.isdisjoint(fate.copied)}
    fitted = [mixer.get_parameter(name) for name in sorted(new)]
    if not fitted:
        return
    sizes = [max(float(p.detach().square().mean()) ** 0.5, 1e-2) for p in fitted]
    optimizer = torch.optim.Adam(
        [{"params": [p], "lr": RATE * size} for p, size in zip(fitted, sizes, strict=True)]
    )
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1 / STEPS, STEPS)
    before, error = [p.detach().clone() for p in fitted], _error(host, seen)
    with torch.enable_grad():
        for step in range(STEPS):
            (args, kwargs), wanted = seen[step % len(seen)]
            loss = F.mse_loss(tensor_of(host(*args, **kwargs)), wanted)
            found = torch.autograd.grad(loss, fitted, allow_unused=True)
            for parameter, gradient in zip(fitted, found, strict=True):
                parameter.grad = gradient
            optimizer.step()
            decay.step()
    optimizer.zero_grad()
    if not _error(host, seen) < error:  # a start that was exact, or steps that lead nowhere
        with torch.no_grad():
            for parameter, start in zip(fitted, before, strict=True):
                parameter.copy_(start)
        return
    fate.estimated |= set().union(*(named[name] for name in new))


@torch.no_grad()
def _error(host: nn.Module, seen: Seen) -> float:
    """Sum the mean square errors of a layer's outputs over batches."""
    return sum(float(F.mse_loss(tensor_of(host(*a, **k)), wanted)) for (a, k), wanted in seen)


def own_bias(layer: Layer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a layer's mixer itself adds to its logits; a host adds its own to any mixer."""
    mixer = layer.mixer
    if not isinstance(mixer, MapMixer):
        return None
    x: Tensor = args[0] if args else kwargs["x"]
    grid = mixer.resolve_grid(x, args[1] if len(args) > 1 else kwargs.get("grid"))
    return mixer.own_bias(mixer.inputs(x, grid), grid, None)


RIDGE = 1e-4
"""The ridge, relative to the mean square of a feature summed over all queries."""


def estimate_keys(
    mixer: MapMixer,
    keys: Mapping[str, tuple[str, ...]],
    moments: Moments,
    estimate: Estimate,
    fate: Fate,
) -> None:
    """Set what a mixer learns in place of keys, where it was not copied, and note it in ``fate``.

    Sums that another mixer asked for are refused.
    """
    if fate.copied.issuperset(chain.from_iterable(keys.values())):
        return
    if moments.why_not is not None or moments.keys is None:
        fate.notes.append(f"keys start afresh: {moments.why_not}")
        return
    if moments.keys.shape[-3] != mixer.num_heads or moments.keys.shape[-1] != mixer.head_dim:
        return  # reported already: other heads
    with torch.no_grad():
        for queries, names in keys.items():
            if fate.copied.isdisjoint(names):
                rows = _solve(mixer, moments, queries, estimate).flatten(0, -2)  # one per key
                targets = [mixer.get_parameter(name) for name in names]
                widths = [target.numel() // len(rows) for target in targets]
                for target, part in zip(targets, torch.split(rows, widths, -1), strict=True):
                    target.copy_(part.reshape(target.shape))
                fate.estimated |= set(names)
    if estimate != "mean":
        fate.notes += _thin(mixer, moments)


def _thin(mixer: MapMixer, moments: Moments) -> list[str]:
    """Say where there are fewer queries than unknowns, so that a fit says little of others."""
    lines = []
    for name, gram in moments.gram.items():
        windows = gram.shape[0] if gram.ndim > 3 and mixer.site.windows == 1 else 1
        rows, unknowns = moments.rows[name] * windows, gram.shape[-1]
        if rows < unknowns:
            lines.append(
                f"{rows} {'queries' if name != PREFIX else PREFIX} of {moments.images} images set "
                f"{unknowns} unknowns a key, so the drift on these images says little of others: "
                f"give {math.ceil(moments.images * unknowns / rows)} or more"
            )
    return lines


def _solve(mixer: MapMixer, moments: Moments, name: str, estimate: Estimate) -> Tensor:
    """Return the weights of a set of features for every key, ``[*, h, M, F]``."""
    gain = mixer.gain()
    gain = gain.double() if isinstance(gain, Tensor) else gain
    mean = _on_grid(mixer, moments, _mean(mixer, moments)) * (moments.scale / gain)
    start = _embedded(mean, name)
    if estimate == "mean":
        return start
    if name not in moments.gram:
        raise UserError(
            f"the statistics hold no least squares of {name} for mixer {mixer.mixer_name!r}; "
            "gather them with mixer= and estimate= as in the swap"
        )
    gram, cross = (_shared(mixer, t[name]) for t in (moments.gram, moments.cross))
    cross = _on_grid(mixer, moments, cross.mT).mT / gain
    size = gram.shape[-1]
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = torch.where(ridge > 0, ridge, torch.ones_like(ridge))[..., None, None]
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    change: Tensor = torch.linalg.solve(gram + ridge * eye, cross - gram @ start.mT)
    return start + change.mT


def _embedded(mean: Tensor, name: str) -> Tensor:
    """Write mean keys as weights of a set of features: the centre of a window, and no bias."""
    side = unfolded(name)
    if side is None:
        return mean
    filters = mean.new_zeros(*mean.shape, side * side)
    filters[..., side * side // 2] = mean
    flat = filters.flatten(-2)
    return torch.cat((flat, flat.new_zeros(*flat.shape[:-1], 1)), -1)


def _mean(mixer: MapMixer, moments: Moments) -> Tensor:
    """Mean key by position, ``[(nW,) h, M, d]``, as the mixer's windows are."""
    keys = moments.keys
    assert keys is not None  # asked by estimate_keys
    windows = keys.shape[0] if keys.ndim > 3 and mixer.site.windows == 1 else 1
    return _shared(mixer, keys) / (moments.images * windows)


def _shared(mixer: MapMixer, sums: Tensor) -> Tensor:
    """Sum over windows where the mixer's windows share their keys."""
    return sums.sum(0) if sums.ndim > 3 and mixer.site.windows == 1 else sums


def _on_grid(mixer: MapMixer, moments: Moments, rows: Tensor) -> Tensor:
    """Average rows, one per key, onto the grid of the mixer's keys, where it is another.

    Logits are linear in the keys, so those of an averaged key are the averaged logits.
    """
    old, new = moments.key_grid, mixer.site.key_grid or mixer.site.grid or (1, 1)
    windows = rows.shape[0] if rows.ndim > 3 else 1
    made, there = (windows, rows.shape[-2]), (mixer.site.windows, moments.prefix + old[0] * old[1])
    if made != there:
        raise UserError(
            "calibration images make {} windows of {} keys and the model is built for {} of {}; "
            "give images of its size, or say it where the model does not know it "
            "(model.image_size = height, width)".format(*made, *there)
        )
    return resample.pool(rows, moments.prefix, old, new)
