# SPDX-License-Identifier: Apache-2.0
"""Where a mixer sits: width, heads, grids of tokens and keys, prefix tokens, windows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from keymix.errors import UserError

Grid = tuple[int, int]
KeyGrid = Sequence[int] | str
"""The grid of keys as an option: two sides, ``"7x7"``, or a share of the tokens, ``"1/4"``."""


def as_grid(name: str, value: object) -> Grid:
    """Check two sides in tokens; a refusal names the argument."""
    sides = tuple(value) if isinstance(value, Sequence) else ()
    if len(sides) != 2 or any(not isinstance(s, int | torch.SymInt) or s < 1 for s in sides):
        raise UserError(f"{name}={value!r} must be (height, width) in tokens, each >= 1")
    return sides[0], sides[1]


def coarser(name: str, value: object, grid: Grid) -> Grid:
    """Read the grid of keys for tokens on ``grid``: two sides, ``"7x7"``, or a share, ``"1/4"``.

    A share is that of the tokens' number: both sides shrink by its root, rounded, and to no less
    than 1; what one side cannot give, the other does. Sides are at most those of the tokens.
    """
    text = value.replace(" ", "") if isinstance(value, str) else ""
    share, sides = re.fullmatch(r"(\d+)/(\d+)", text), re.fullmatch(r"(\d+)x(\d+)", text)
    if share is not None and 0 < int(share[1]) <= int(share[2]):
        part = int(share[1]) / int(share[2])
        fit = [max(1, math.floor(side * part**0.5 + 0.5)) for side in grid]
        for axis, side in enumerate(grid):
            if side * part**0.5 < 1:
                fit[1 - axis] = max(1, math.floor(part * grid[0] * grid[1] + 0.5))
        wanted = fit[0], fit[1]
    elif isinstance(value, str) and sides is None:
        raise UserError(
            f"{name}={value!r} must be (height, width) in tokens, such as '7x7', or a share of the "
            "tokens above 0 and at most 1, such as '1/4'"
        )
    else:
        wanted = as_grid(name, value if sides is None else (int(sides[1]), int(sides[2])))
    return min(wanted[0], grid[0]), min(wanted[1], grid[1])


def strided(grid: Grid, keys: Grid, onto: Grid, count: int | None = None) -> Grid:
    """Say what the stride that took ``grid`` to ``keys`` makes of the grid ``onto``.

    A stride s leaves ceil(side / s). Small grids fit several strides; the smallest that is one
    for both axes comes first. ``count`` is the number of tokens that came out of ``onto``, where
    known. A UserError says that no stride fits.
    """
    top = max(*grid, *onto)
    fits = [[s for s in range(1, top + 1) if -(-grid[axis] // s) == keys[axis]] for axis in (0, 1)]
    both = [(s, s) for s in fits[0] if s in fits[1]]
    for down, across in [*both, *((s, t) for s in fits[0] for t in fits[1])]:
        out = (-(-onto[0] // down), -(-onto[1] // across))
        if count is None or out[0] * out[1] == count:
            return out
    raise UserError(
        f"keys lie on {keys} for tokens on {grid}, and no stride makes "
        f"{'a grid' if count is None else f'{count} keys'} of {onto}; give key_grid="
    )


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a mixer sits. A mixer reads what it needs from here; everything else is its option.

    Attributes:
        dim: Width C of the tokens.
        num_heads: Heads h.
        grid: Patch tokens (H, W), row by row; None where only permutation-equivariant
            mixers may sit.
        num_prefix_tokens: Prefix tokens P (class, registers), which stand first: N = P + H * W.
        key_grid: Grid of the keys, M = P + its area; the token grid if None. Where ``project``
            strides, it is the grid that its keys and values come out on; without ``project``,
            learned keys may lie on a coarser grid under ``resize="pool_values"``.
        windows: Windows nW that the axis before N counts, each with learned keys of its own; 1
            where all share one set.
        window_grid: How windows with keys of their own lie over the image (rows, columns); needed
            to resample these as one map over all of them. ``(1, 1)`` says that the one window
            there is has its own, so that more windows would have theirs.
        project: Makes, for a role of "q", "k", "v", the module that turns ``(x, grid)`` into that
            role's source tokens (CvT's convolutions); None for the tokens themselves. Its
            attribute ``stride``, if it has one, gives the step of keys and values in tokens.
        post_projection: Makes, for a role, the module that its heads ``[*, h, N, d]`` pass
            through after their projection (a norm of queries and keys, a rotation), and for
            ``"out"`` the one that takes ``(y [*, N, h * d], x [*, N, C])``, what the heads return
            and the tokens, before the output projection (a norm, a gate); it makes None for a role
            without one.
            A learned key takes no part in it: it lives where queries do after theirs.
        neuron: Makes the neurons of spiking mixers, called with ``v_threshold=``, ``device=`` and
            ``dtype=``; None for LIF with the papers' settings.
    """

    dim: int
    num_heads: int = 1
    grid: Grid | None = None
    num_prefix_tokens: int = 0
    key_grid: Grid | None = None
    windows: int = 1
    window_grid: Grid | None = None
    project: Callable[[str], nn.Module] | None = None
    post_projection: Callable[[str], nn.Module | None] | None = None
    neuron: Callable[..., nn.Module] | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "num_heads", "windows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name}={value!r} must be a whole number of at least 1")
        prefix = self.num_prefix_tokens
        if not isinstance(prefix, int) or isinstance(prefix, bool) or prefix < 0:
            raise UserError(f"num_prefix_tokens={prefix!r} must be a whole number, 0 or more")
        for name in ("grid", "key_grid", "window_grid"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_grid(name, value))
        if self.windows > 1 and self.window_grid is not None:
            rows, columns = self.window_grid
            if rows * columns != self.windows:
                raise UserError(
                    f"window_grid={self.window_grid} makes {rows * columns} windows, but "
                    f"windows={self.windows}"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens N = P + H * W.

        Raises:
            UserError: If the site has no grid.
        """
        if self.grid is None:
            raise UserError("this site has no grid, so its number of tokens is unknown")
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def num_keys(self) -> int:
        """Keys M = P + area of the key grid, which is the token grid unless given apart."""
        if self.key_grid is None:
            return self.num_tokens
        return self.num_prefix_tokens + self.key_grid[0] * self.key_grid[1]

    @property
    def has_own_key_grid(self) -> bool:
        """Whether keys lie elsewhere than the tokens, so that N and M may differ."""
        return self.key_grid is not None and self.key_grid != self.grid

    @property
    def own_windows(self) -> bool:
        """Whether each window has keys of its own, be it only one window here."""
        return self.windows > 1 or self.window_grid == (1, 1)

    def key_grid_on(self, grid: Grid) -> Grid | None:
        """Return where keys lie that come from tokens on ``grid``: ceil(side / stride).

        None where they lie where the tokens do, or the stride is not known.

        Args:
            grid: Token grid.
        """
        stride = getattr(self.project, "stride", None)
        if stride is None or stride == 1:
            return None
        return -(-grid[0] // stride), -(-grid[1] // stride)

    def on(
        self, grid: Grid, *, key_grid: Grid | None = None, window_grid: Grid | None = None
    ) -> Site:
        """Return the same site in a model of another image size.

        Args:
            grid: Its token grid.
            key_grid: Its key grid; where this site has one and none is given, ``project``'s
                stride makes it of ``grid``, or else the one that fits the grids here.
            window_grid: How its windows lie; as here if None.
        """
        grid = as_grid("grid", grid)
        if key_grid is None and self.key_grid is not None and self.grid is not None:
            key_grid = self.key_grid_on(grid) or strided(self.grid, self.key_grid, grid)
        windows = self.windows
        if window_grid is not None and self.own_windows:
            windows = window_grid[0] * window_grid[1]
        return replace(
            self,
            grid=grid,
            key_grid=key_grid,
            windows=windows,
            window_grid=self.window_grid if window_grid is None else window_grid,
        )
