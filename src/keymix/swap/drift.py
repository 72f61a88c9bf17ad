# SPDX-License-Identifier: Apache-2.0
"""How far a swap moves logits, maps and outputs; and norms of maps settled at the identity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.passes import Varies
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.layers import Layer, by_name
from keymix.mixers.base import TokenMixer, take_rows
from keymix.mixers.head_mixer import HeadMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.swap.images import CalibrationImages, of_hook, run
from keymix.swap.report import LayerDrift, OutputDrift
from keymix.swap.transfer import Fate

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(kw_only=True)
class Pair:
    """One layer before and after, on one batch."""

    layer: Layer  # the original's
    mixer: TokenMixer  # the new one, in the copy
    before: Call  # arguments of the original's layer
    after: Call  # arguments of the new mixer
    old: Tensor  # what the layer gave
    new: Tensor  # what it gives now, in the same layout


def paired_forward(
    model: nn.Module,
    copy: nn.Module,
    layers: Sequence[Layer],
    mixers: Mapping[str, TokenMixer],
    images: Tensor,
    look: Callable[[Pair], None],
) -> Tensor:
    """Run a model and its swapped copy on a batch; return the original's output.

    The original runs first and its layers' outputs are kept. In the copy, ``look`` is called with
    each pair of layers, in the order of the forward pass, and the output of a swapped layer is
    replaced by the original's: so every layer sees the original's tokens, whatever those before it
    do, and through the calls of the host itself.
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
                old, new = tensor_of(outputs[path]), tensor_of(got)
                old = old.flatten(2).mT if old.ndim == 4 and new.ndim == 3 else old
                old = old.reshape(new.shape)
                look(
                    Pair(
                        layer=layer,
                        mixer=mixers[path],
                        before=calls.pop(path),
                        after=inner.pop(path),
                        old=old,
                        new=new,
                    )
                )
                return (old, *got[1:]) if isinstance(got, tuple) else old

            there = copy.get_submodule(path).register_forward_hook(of_hook(replace))
            hooks.callback(call.remove)
            hooks.callback(there.remove)
        run(copy, images)
    return out


def tensor_of(output: Any) -> Tensor:
    """Return what a layer gives, without what some return next to it."""
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


MOST_NUMBERS = 2**24
"""Rows of maps are compared in parts of at most this size, in numbers."""


class _Sums:
    """Sums of squares and distances of one layer over all images."""

    def __init__(self) -> None:
        self.of: dict[str, float] = defaultdict(float)

    def error(self, name: str, old: Tensor, new: Tensor) -> None:
        """Add the square of a difference and that of what it is measured by."""
        self.of[f"{name} error"] += float((new - old).double().square().sum())
        self.of[f"{name} size"] += float(old.double().square().sum())

    def relative(self, name: str) -> float | None:
        """Root of the mean square error over that of the original; None if that is 0 or unknown."""
        error, size = self.of.get(f"{name} error", 0.0), self.of.get(f"{name} size", 0.0)
        return float((error / size) ** 0.5) if size else None


def _parts(mixer: HeadMixer, x: Tensor) -> Iterator[Tensor | None]:
    """Yield rows of a mixer's maps of tokens to look at together, None for all."""
    queries = x.shape[-2]
    keys = queries if mixer.site.grid is None else mixer.site.num_keys
    a_row = x[..., 0, 0].numel() * mixer.num_heads * keys
    step = max(1, MOST_NUMBERS // max(1, a_row))
    if step >= queries:
        yield None
        return
    for start in range(0, queries, step):
        yield torch.arange(start, min(start + step, queries), device=x.device)


def _compare(pair: Pair, sums: _Sums) -> None:
    """Add what one batch says of one layer."""
    sums.error("output", pair.old, pair.new)
    mixer, layer = pair.mixer, pair.layer
    if not isinstance(mixer, HeadMixer) or not mixer.forms_map():
        return
    for rows in _parts(mixer, by_name(*pair.after)["x"]):
        try:
            before = layer.map(*pair.before, queries=rows)
        except NoAttentionMap:
            return
        after = mixer.attention_map(**by_name(*pair.after), queries=rows)
        if after.shape != before.shape:
            return
        distance = 0.5 * (after - before).abs().sum(-1)
        sums.of["map"] += float(distance.double().sum())
        sums.of["rows"] += distance.numel()
        old = _old_logits(layer, pair.before, rows)
        if old is not None and isinstance(mixer, MapMixer):
            new = _logits(mixer, pair.after, rows)
            sums.error("logits", old - old.mean(-1, True), new - new.mean(-1, True))


def _logits(mixer: MapMixer, call: Call, rows: Tensor | None) -> Tensor:
    """Scaled logits of a mixer, without what its host adds to those of any mixer."""
    named = by_name(*call)
    grid = mixer.resolve_grid(named["x"], named.get("grid"))
    inputs = mixer.inputs(named["x"], grid)
    logits = mixer.logits(inputs, grid, rows) * mixer.gain()
    own = mixer.own_bias(inputs, grid, rows)
    return logits if own is None else logits + own


def _old_logits(layer: Layer, call: Call, rows: Tensor | None) -> Tensor | None:
    if isinstance(layer.mixer, MapMixer):
        return _logits(layer.mixer, call, rows)
    if layer.mixer is not None:  # whose map is of no logits
        return None
    read = layer.reading(*call)
    return take_rows(read.q, rows) @ read.k.mT * read.scale


def measure(
    model: nn.Module,
    copy: nn.Module,
    layers: Sequence[Layer],
    mixers: Mapping[str, TokenMixer],
    images: CalibrationImages,
) -> tuple[dict[str, LayerDrift], OutputDrift]:
    """Compare a model with its swapped copy on calibration images.

    Returns the drift of each layer alone, on the original's tokens, by path, and of the output.
    """
    sums = {layer.place.path: _Sums() for layer in layers}
    whole, count, agreed, classes = _Sums(), 0, 0, 0
    size: tuple[int, ...] = ()
    varies, answers = Varies(), set[int]()

    def look(pair: Pair) -> None:
        _compare(pair, sums[pair.layer.place.path])

    with torch.no_grad():
        for batch in images.batches(model):
            before = paired_forward(model, copy, layers, mixers, batch, look)
            after = run(copy, batch)
            whole.error("output", before, after)
            varies.see(before)
            classes = before.shape[-1] if before.ndim == 2 else 0
            if classes > 1:
                answers |= set(before.argmax(-1).tolist())
                agreed += int((before.argmax(-1) == after.argmax(-1)).sum())
            count, size = count + len(batch), tuple(batch.shape[1:])
    rows = {
        path: LayerDrift(
            logits=each.relative("logits"),
            map=each.of["map"] / each.of["rows"] if "rows" in each.of else None,
            output=each.relative("output"),
        )
        for path, each in sums.items()
    }
    output = OutputDrift(
        images=count,
        image_size=size,
        top1_agreement=agreed / count if len(answers) > 1 else None,
        relative=whole.relative("output") if varies.varied() else None,
        varies=varies.varied(),
    )
    return rows, output


def settle_norms(
    model: nn.Module,
    copy: nn.Module,
    layers: Sequence[Layer],
    mixers: Mapping[str, TokenMixer],
    images: CalibrationImages | None,
    fates: Mapping[str, Fate],
) -> None:
    r"""Make new norms of maps (`MapMixer.map_norm`) the identity at inference.

    With mean m and variance v of each head's maps on the calibration images as BatchNorm's running
    statistics, weight :math:`\sqrt{v + \epsilon}` and bias m, a map leaves the norm as it came.
    Without images a norm starts as a new model's. Mixers have their keys by now.
    """
    norms: dict[str, tuple[MapMixer, nn.BatchNorm2d]] = {}
    for path, mixer in mixers.items():
        name = mixer.map_norm if isinstance(mixer, MapMixer) else None
        if name is None or f"{name}.weight" in fates[path].copied:
            continue
        norm = mixer.get_submodule(name)
        if not isinstance(mixer, MapMixer) or not isinstance(norm, nn.BatchNorm2d):
            kind = type(norm).__name__
            fates[path].notes.append(f"{kind} of maps has no identity and starts afresh")
        elif images is None:
            fates[path].notes.append(
                "the norm of maps starts afresh; calibration images would settle it at the identity"
            )
        else:
            norms[path] = (mixer, norm)
    if not norms or images is None:
        return
    totals = {
        path: torch.zeros(3, m.num_heads, dtype=torch.float64) for path, (m, _) in norms.items()
    }
    centres: dict[str, float] = {}

    def look(pair: Pair) -> None:
        path = pair.layer.place.path
        if path not in norms:
            return
        mixer, norm = norms[path]

        def add(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            maps = args[0]  # [*, h, Q, M]
            # centred at 1/M, the mean of rows that sum to one, lest digits are lost
            centres[path] = 1.0 / maps.shape[-1]
            flat = (maps.movedim(-3, 0).flatten(1).double() - centres[path]).cpu()
            number = torch.full((mixer.num_heads,), float(flat.shape[1]), dtype=torch.float64)
            totals[path] += torch.stack((number, flat.sum(1), flat.square().sum(1)))

        hook = norm.register_forward_pre_hook(of_hook(add))
        named = by_name(*pair.after)
        try:
            for rows in _parts(mixer, named["x"]):
                mixer.attention_map(**named, queries=rows, stage="final")
        finally:
            hook.remove()

    with torch.no_grad():
        for batch in images.batches(model):
            paired_forward(model, copy, layers, mixers, batch, look)
        for path, (mixer, norm) in norms.items():
            number, first, second = totals[path]
            shift = first / number
            _identity(norm, mixer.map_gain, shift + centres[path], second / number - shift.square())
            fates[path].estimated |= {
                f"{mixer.map_norm}.{name}"
                for name in ("weight", "bias", "running_mean", "running_var")
            }


def _identity(norm: nn.BatchNorm2d, gain: float, mean: Tensor, variance: Tensor) -> None:
    """Let a norm, and the factor behind it, leave what has these statistics as it is."""
    if norm.running_mean is None or norm.running_var is None:
        raise TypeError("a BatchNorm of maps needs running statistics")
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    # from the rounded statistics, so that both cancel to the last digit
    norm.weight.copy_((norm.running_var.double() + norm.eps).sqrt() / gain)
    norm.bias.copy_(norm.running_mean.double() / gain)
