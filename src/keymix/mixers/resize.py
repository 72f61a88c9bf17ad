# SPDX-License-Identifier: Apache-2.0
"""What a mixer that holds something per position does with tokens of another grid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

from jaxtyping import Float
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import Grid, Site
from keymix.mixers.head_mixer import Roles
from keymix.mixers.map_mixer import MapMixer, MapOptions
from keymix.mixers.site import as_grid, strided
from keymix.ops import resample

Resize = Literal["interpolate", "pool_values"]
POLICIES = (None, "interpolate", "pool_values")


def counted(number: int, window_grid: Grid | None) -> str:
    """Say how many windows there are and how they lie: ``36 windows (6x6 of them)``."""
    lie = "" if window_grid is None else f" ({window_grid[0]}x{window_grid[1]} of them)"
    return f"{number} window{'s' * (number != 1)}{lie}"


class ResizeOptions(MapOptions, total=False):
    """The options of :class:`GridBound`, its own and those it hands on."""

    resize: Resize | None


class GridBound(MapMixer):
    r"""A map mixer with keys, or a code, that lie on a grid: the policy for tokens of another.

    ``None`` refuses other grids. ``"interpolate"`` resamples what it holds to the grid of the
    call, bicubically as position embeddings are, prefix rows untouched: M follows N, the cost is
    quadratic in tokens. ``"pool_values"`` keeps it and averages the values onto its grid: M stays,
    the cost is linear in tokens. On the site's own grid both are the identity, bit for bit.

    A grid handed in by a call is served on the fly; :meth:`set_grid` takes one for good.

    Args:
        site: Where the mixer sits. A key grid of its own without ``project`` needs
            ``"pool_values"``.
        resize: The policy.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.
    """

    holds: ClassVar[str] = "learned its keys"

    def __init__(
        self, site: Site, *, resize: Resize | None = None, **shared: Unpack[MapOptions]
    ) -> None:
        if resize not in POLICIES:
            raise UserError(f"{resize=} must be None, 'interpolate' or 'pool_values'")
        pooled = site.has_own_key_grid and site.project is None and "q" in self.roles
        if pooled and resize != "pool_values":
            raise UserError(
                f"keys lie on {site.key_grid} and tokens on {site.grid}, so this site needs "
                "project=, which takes the tokens to the keys' grid, or resize='pool_values', "
                "which averages the values there"
            )
        if pooled and shared.get("mask_diagonal"):
            raise UserError(
                "mask_diagonal=True needs as many keys as tokens; here keys lie on "
                f"{site.key_grid} and tokens on {site.grid}"
            )
        # apart from projections there is nothing for the base to know about such keys
        super().__init__(replace(site, key_grid=None) if pooled else site, **shared)
        self.site, self.resize = site, resize
        # where values lie that come from tokens on the site's grid
        self.values_grid = site.grid if site.project is None else site.key_grid or site.grid

    def take_policy(self, resize: Resize | None) -> None:
        """Take another policy from now on.

        Raises:
            UserError: If the mixer was built with what only its own policy serves.
        """
        self.resize = resize

    @property
    def bound(self) -> bool:
        """Whether it holds anything per position as it is built."""
        return True

    @property
    def keeps_grid(self) -> bool:
        """Whether the policy is ``"pool_values"``, and there is something to keep."""
        return self.bound and self.resize == "pool_values"

    @property
    def own_windows(self) -> bool:
        """Whether each window has something of its own."""
        return self.bound and self.site.own_windows

    @property
    def key_grid(self) -> Grid:
        """The grid that what it holds lies on."""
        grid = self.site.key_grid or self.site.grid
        assert grid is not None  # a bound mixer refuses a site without a grid
        return grid

    def source_grid(self, grid: Grid, count: int | None = None) -> Grid:
        """Return where keys and values lie that come from tokens on ``grid``.

        Args:
            grid: Token grid.
            count: Their number, where known; it distinguishes strides that a small grid fits.
        """
        site = self.site
        if self.project is None:
            return grid
        if grid == site.grid or site.grid is None or self.values_grid is None:
            return self.values_grid or grid
        return site.key_grid_on(grid) or strided(site.grid, self.values_grid, grid, count)

    def key_grid_for(self, grid: Grid, count: int | None = None) -> Grid:
        """Return where the keys of a call lie, see :meth:`source_grid`."""
        if not self.bound:
            return super().key_grid_for(grid, count) or grid
        return self.source_grid(grid, count) if self.resize == "interpolate" else self.key_grid

    def resize_parameters(self, key_grid: Grid, windows: Grid | None) -> None:
        """Resample for good what it holds, from :attr:`key_grid` to another grid.

        Args:
            key_grid: Where it shall lie.
            windows: How the windows shall lie, if each has something of its own.
        """
        raise TypeError(f"{type(self).__name__} must define resize_parameters(key_grid, windows)")

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any map mixer and the policy."""
        return {**super().transfer_options(), "resize": self.resize}

    # ---- geometry ---------------------------------------------------------------------------

    @property
    def tied_to_grid(self) -> bool:
        """Whether no other grid will do: no policy was chosen."""
        return self.bound and self.resize is None

    def _rearranges(self, window_grid: Grid | None) -> bool:
        """Whether windows with keys of their own would lie in another way."""
        here = self.site
        if not self.own_windows or window_grid is None or window_grid == here.window_grid:
            return False
        rows, columns = window_grid
        return here.window_grid is not None or rows * columns != here.windows

    def refuses_grid(
        self, grid: Grid, *, key_grid: Grid | None = None, window_grid: Grid | None = None
    ) -> str | None:
        """Say why it cannot take another geometry, with the remedy; None if it can."""
        if not self.bound:
            return super().refuses_grid(grid, key_grid=key_grid, window_grid=window_grid)
        grid, here, name = as_grid("grid", grid), self.site, self.mixer_name
        try:
            source = key_grid if key_grid is not None else self.source_grid(grid)
        except UserError as error:
            return f"mixer {name!r}: {error}"
        moves = self._rearranges(window_grid)
        if grid == here.grid and source == self.values_grid and not moves:
            return None
        text = f"mixer {name!r} {self.holds} on a grid of {self.key_grid}"
        each = f"{text} in each of {counted(here.windows, here.window_grid)}"
        others = counted(math.prod(window_grid or ()), window_grid)
        interpolates, pools = (self.resize == policy for policy in POLICIES[1:])
        reasons = [
            (
                self.resize is None and grid == here.grid and moves,
                f"{each}, and here are {others}; give it resize='interpolate' (a model: "
                "mixer_options={'resize': …}), or build for the new image size",
            ),
            (
                self.resize is None,
                f"{text}, and these tokens lie on {grid}; give it resize='interpolate' or "
                "'pool_values' (a model: mixer_options={'resize': …}), or build for the new image "
                "size",
            ),
            (
                interpolates and self.own_windows and here.window_grid is None,
                f"{each} and needs window_grid= of them",
            ),
            (
                pools and moves,
                f"{each}, and here are {others}; give it resize='interpolate', or build it to "
                "share keys among windows (a site with windows=1)",
            ),
            (
                pools and self.mask_diagonal and source != self.key_grid,
                f"{text} and keeps them there, so no key is a query's own on {grid}; give it "
                "resize='interpolate' or mask_diagonal=False",
            ),
        ]
        return next((reason for holds, reason in reasons if holds), None)

    def set_grid(
        self, grid: Grid, *, key_grid: Grid | None = None, window_grid: Grid | None = None
    ) -> None:
        """Take another geometry from now on.

        ``"interpolate"`` resamples the parameters themselves, ``"pool_values"`` leaves them and
        averages values at every call.
        """
        reason = self.refuses_grid(grid, key_grid=key_grid, window_grid=window_grid)
        if reason is not None:
            raise UserError(reason)
        grid, here = as_grid("grid", grid), self.site
        source = key_grid if key_grid is not None else self.source_grid(grid)
        there = here.on(grid, key_grid=source, window_grid=window_grid)
        if self.keeps_grid:
            there = replace(there, key_grid=self.key_grid)
        elif self.resize == "interpolate" and self.bound:
            self.resize_parameters(source, there.window_grid)
        if there.key_grid == grid and self.project is None:
            there = replace(there, key_grid=None)
        self.site, self.values_grid = there, source

    def resolve_grid(self, x: Tensor, grid: Grid | None) -> Grid | None:
        """Return the grid of this call, after checking that the policy serves it.

        Raises:
            UserError: If width, number of tokens, windows or grid disagree with the site.
        """
        site = self.site
        if not self.bound:
            return super().resolve_grid(x, grid)
        one = site.windows == 1  # which may go without its axis
        unfit = x.shape[-3] != site.windows if x.ndim > 2 + one else not one
        if self.own_windows and unfit:
            raise UserError(
                f"mixer {self.mixer_name!r} {self.holds} in each of {site.windows} windows and "
                f"got tokens {tuple(x.shape)}, whose last but two axis should count them; take "
                "another number of windows through set_grid(…, window_grid=(rows, columns))"
            )
        count, given = x.shape[-2], None if grid is None else tuple(grid)
        if count != site.num_tokens or given not in (None, site.grid):
            what = (
                f"{self.mixer_name!r} {self.holds} on a grid of {self.key_grid} with "
                f"{site.num_prefix_tokens} prefix tokens for {site.num_tokens} tokens, and got "
                f"{count} tokens{'' if given is None else f' on a grid of {given}'}"
            )
            reason = None if grid is None else self.refuses_grid(grid)
            if self.resize is None:
                raise UserError(
                    f"{what}; build it with resize='interpolate' or resize='pool_values', or "
                    "build the model for the new image size"
                )
            if grid is None:
                raise UserError(
                    f"{what}; pass grid=(H, W) of these tokens, or change the size with "
                    "keymix.models.set_image_size(model, (height, width))"
                )
            if reason is not None:
                raise UserError(reason)
        return super().resolve_grid(x, grid)

    # ---- a call -----------------------------------------------------------------------------

    @property
    def pools_tokens(self) -> bool:
        """Whether tokens are averaged before the projection of the values, not values after it.

        A linear map of an average is the average of linear maps, and there are fewer of them.
        """
        plain = self.project is None and self.joint is None
        return self.keeps_grid and plain and "v" not in (self.post_projection or {})

    def sources(self, x: Float[Tensor, "*batch N C"], grid: Grid | None) -> Roles:
        """Return what each role is projected from; values from averaged tokens where that does."""
        sources = super().sources(x, grid)
        if self.pools_tokens:
            sources["v"] = self.pooled(x, grid)
        return sources

    def inputs(self, x: Float[Tensor, "*batch N C"], grid: Grid | None) -> Roles:
        """Project the tokens; under ``"pool_values"`` values are averages on the keys' grid."""
        inputs = super().inputs(x, grid)
        if self.keeps_grid and not self.pools_tokens:
            inputs["v"] = self.pooled(inputs["v"], grid)
        return inputs

    def pooled(self, t: Tensor, grid: Grid | None) -> Tensor:
        """Average tokens, or what came from them, ``[*, N, D]``, onto :attr:`key_grid`."""
        grid = grid or self.site.grid or self.key_grid
        source = self.source_grid(grid, t.shape[-2] - self.site.num_prefix_tokens)
        return resample.pool(t, self.site.num_prefix_tokens, source, self.key_grid)

    def _added(
        self, inputs: Roles, grid: Grid | None, bias: Tensor | None, rows: Tensor | None
    ) -> Tensor | None:
        columns = 1 if bias is None or not bias.ndim else bias.shape[-1]
        if self.keeps_grid and columns not in (1, self.site.num_keys):
            raise UserError(
                f"mixer {self.mixer_name!r} keeps its {self.site.num_keys} keys on a grid of "
                f"{self.key_grid} (resize='pool_values') and got a bias for {columns} keys; give "
                "it resize='interpolate', and no key_grid=, so that keys lie where the tokens do"
            )
        return super()._added(inputs, grid, bias, rows)
