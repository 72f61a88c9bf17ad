# SPDX-License-Identifier: Apache-2.0
"""Spikes of Q-K token attention to look at: A_t, K and X' of one head, as QKFormer's Fig. 3."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from keymix.analysis.capture import chosen, refusing
from keymix.analysis.spikes import checked_neurons, points_of, undisturbed
from keymix.analysis.spikes_record import RasterPlace, RasterReading
from keymix.analysis.study_record import joined
from keymix.arguments import unwrapped
from keymix.errors import UserError
from keymix.hosts.layers import by_name
from keymix.mixers.base import Grid
from keymix.mixers.qk_token import QKTokenAttention
from keymix.records import to_json

SEGMENT = 100
"""Tokens that a raster shows by default; the paper's number."""


@dataclass(frozen=True, kw_only=True)
class Raster(RasterPlace):
    """The spikes of one head of Q-K token attention, on one image.

    Attributes:
        path: The mixer.
        stage: Its stage from 1; None where paths do not show it.
        block: Its block from 1, over all stages.
        head: The head, from 0.
        heads: How many there are.
        step: Time step of keys and masked keys, from 0.
        start: First token of the segment.
        grid: Rows and columns that the tokens lie on.
        attention: A_t of all tokens at every step ``[T, N]``.
        keys: K ``[d, n]`` of the segment's n tokens.
        masked: X' likewise.
    """

    attention: Tensor
    keys: Tensor
    masked: Tensor

    def reading(self) -> RasterReading:
        """Return it as a record has it: spikes are texts of 0 and 1, one per row."""
        return joined(
            RasterReading,
            self,
            attention=_rows(self.attention),
            keys=_rows(self.keys),
            masked=_rows(self.masked),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it; spikes are texts of 0 and 1, one per row."""
        return dict(to_json(self.reading()))


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
    checked_neurons(inner)
    places = {
        point.path.rpartition(".")[0]: (point.stage, point.block) for point in points_of(inner)
    }
    mixers = {p: m for p, m in inner.named_modules() if isinstance(m, QKTokenAttention)}
    wanted = _wanted({path: places[path][0] for path in mixers}, layers)
    found = []
    for path, (spikes, grid) in _spikes(inner, image, {p: mixers[p] for p in wanted}).items():
        attention = spikes["A_t"][:, 0, :, :, 0]  # [T, h, N]
        steps, heads, number = attention.shape
        at = _index("step", steps - 1 if step is None else step, steps)
        one = _index("head", head, heads)
        start, count = _segment(tokens, number)
        parts = []
        for name in ("K", "X'"):
            every = spikes[name][at, 0].reshape(number, heads, -1)[:, one]  # [N, d]
            parts.append(every[start : start + count].mT.cpu() != 0)
        stage, block = places[path]
        found.append(
            Raster(
                path=path,
                stage=stage,
                block=block,
                head=one,
                heads=heads,
                step=at,
                start=start,
                grid=grid,
                attention=attention[:, one].cpu() != 0,
                keys=parts[0],
                masked=parts[1],
            )
        )
    return tuple(found)


def _wanted(
    stages: dict[str, int | None], layers: str | int | Sequence[str | int] | None
) -> list[str]:
    if layers is not None:
        paths = list(stages)
        if not paths:
            raise UserError("the model has no layer of Q-K token attention, of which rasters are")
        return chosen(paths, layers, "layers of Q-K attention")
    firsts: dict[int | None, str] = {}
    for path, stage in stages.items():
        firsts.setdefault(stage, path)
    return list(firsts.values())


def _spikes(
    model: nn.Module, image: Tensor, mixers: dict[str, QKTokenAttention]
) -> dict[str, tuple[dict[str, Tensor], Grid]]:
    """Run the image and return what the mixers formed."""
    found: dict[str, tuple[dict[str, Tensor], Grid]] = {}
    calls: dict[str, dict[str, Any]] = {}
    if not mixers:
        return found

    def record_call(path: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[path] = by_name(args, kwargs)

        return hook

    parameter = next(model.parameters())
    batch = image[None].to(device=parameter.device, dtype=parameter.dtype)
    with contextlib.ExitStack() as stack:
        for path, mixer in mixers.items():
            handle = mixer.register_forward_pre_hook(record_call(path), with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(refusing(model, batch))
        stack.enter_context(undisturbed(model))
        model(batch)
        for path, mixer in mixers.items():
            x, grid = calls[path]["x"], calls[path].get("grid")
            found[path] = mixer.spikes(x, grid), _grid(mixer, grid, x.shape[-2])
    return found


def _grid(mixer: QKTokenAttention, called: Grid | None, tokens: int) -> Grid:
    """Say where the tokens lie; in one row where that is unknown."""
    grid = called or mixer.site.grid
    return grid if grid is not None and grid[0] * grid[1] == tokens else (1, tokens)


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


def _rows(spikes: Tensor) -> tuple[str, ...]:
    return tuple("".join("1" if s else "0" for s in row) for row in spikes.tolist())
