# SPDX-License-Identifier: Apache-2.0
"""Static key attention: the key is learned, not computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import GridNeeded, UserError, unknown
from keymix.layers.folding import replaced, watched
from keymix.mixers.base import Grid, Site, Traits, redefines
from keymix.mixers.head_mixer import Roles
from keymix.mixers.map_mixer import LINEAR
from keymix.mixers.registry import register_mixer
from keymix.mixers.resize import GridBound, Resize, ResizeOptions
from keymix.mixers.site import KeyGrid, coarser
from keymix.ops import resample

Activation = Literal["softmax", "gelu", "relu", "star_relu"]
ACTIVATIONS = ("softmax", "gelu", "relu", "star_relu")


class StarReLU(nn.Module):
    """``scale * relu(x)^2 + bias`` with both numbers learned (MetaFormer Baselines for Vision)."""

    def __init__(self, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Start at the square of ReLU."""
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return star_relu(x, self.scale, self.bias)


def star_relu(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Compute the function of :class:`StarReLU`."""
    return scale * F.relu(x).square() + bias


def _refuse_to_move(key_grid: KeyGrid, resize: Resize | None) -> None:
    """Refuse a policy under which keys follow the tokens where they were put on a coarser grid."""
    if resize == "interpolate":
        raise UserError(
            f"{key_grid=} keeps the keys where they are whatever grid the tokens take, and "
            "resize='interpolate' moves them there; choose one"
        )


class KeyOptions(ResizeOptions, total=False):
    """The options of :class:`LearnedKeys`, its own and those it hands on."""

    activation: Activation
    key_init_std: float
    key_grid: KeyGrid | None
    query_proj: bool


class LearnedKeys(GridBound):
    """What static and convolutional static keys share: activations (SKA Table 4), key grid, keys.

    The keys start from a normal distribution of standard deviation ``key_init_std``.

    Without ``query_proj`` the tokens are the queries, cut into heads.

    With ``key_grid`` there are fewer keys than tokens: they lie on a coarser grid and stay there
    whatever grid the tokens take, as under ``resize="pool_values"``, and each meets the average of
    the values that lie around it.
    """

    roles = ("q", "v")
    joint = None
    q: nn.Module
    key: nn.Parameter | None
    grid_parameters: ClassVar[tuple[str, ...]] = ("key",)  # what holds one row per key

    def __init__(
        self,
        site: Site,
        *,
        activation: Activation = "softmax",
        key_init_std: float = 1.0,
        key_grid: KeyGrid | None = None,
        query_proj: bool = True,
        **shared: Unpack[ResizeOptions],
    ) -> None:
        if site.grid is None:
            raise GridNeeded(
                f"mixer {self.mixer_name!r} learns one key per position and so needs grid=(H, W)"
            )
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        if shared.get("mask_diagonal") and activation != "softmax":
            raise UserError(f"mask_diagonal=True needs the softmax, not {activation=}")
        if not key_init_std > 0:
            raise UserError(f"{key_init_std=} must be above 0")
        values_grid = site.grid if site.project is None else site.key_grid or site.grid
        if key_grid is not None:
            _refuse_to_move(key_grid, shared.get("resize"))
            shared["resize"] = "pool_values"
            keys = coarser("key_grid", key_grid, site.grid)
            site = replace(site, key_grid=None if keys == site.grid == values_grid else keys)
        super().__init__(site, **shared)
        self.query_proj = query_proj
        if not query_proj:
            self._take_tokens_as_queries()
        self.chosen_key_grid, self.values_grid = key_grid, values_grid
        self.activation, self.key_init_std = activation, key_init_std
        self.act = StarReLU(**self.factory) if activation == "star_relu" else None

    def _take_tokens_as_queries(self) -> None:
        """Drop the projection of the queries; refuse heads that tokens do not divide into."""
        dim, num_heads, head_dim = self.site.dim, self.num_heads, self.head_dim
        if num_heads * head_dim != dim:
            raise UserError(
                f"query_proj=False cuts a token into the queries of its heads, but {num_heads=} "
                f"times {head_dim=} is not {dim=}; leave head_dim= out, or query_proj="
            )
        self.q = nn.Identity()

    def take_policy(self, resize: Resize | None) -> None:
        """Take another policy from now on; keys of ``key_grid`` stay on it."""
        if self.chosen_key_grid is not None:
            _refuse_to_move(self.chosen_key_grid, resize)
            return
        super().take_policy(resize)

    @property
    def claims(self) -> Traits:
        """The traits; only the softmax and ReLU give a masked key no weight.

        A mask of tokens says nothing of keys that each stand for several.
        """
        claims = super().claims
        maskable = claims.maskable and self.activation in ("softmax", "relu")
        maskable = maskable and self.chosen_key_grid is None
        return replace(claims, maskable=maskable)

    def join_queries_and_values(self) -> None:
        """Project both at once, for :meth:`fold`; values of pooled tokens stay apart."""
        if not self.keeps_grid:
            self.join_roles("qv")

    @property
    def plain_softmax(self) -> str | None:
        """None if the map is a plain softmax of logits, else what makes it another thing."""
        if self.activation != "softmax":
            return f"activation={self.activation!r} is not the softmax"
        return self._head_mixing()

    def activate(self, logits: Tensor) -> Tensor:
        """Turn logits into weights by the chosen activation."""
        if self.act is not None:
            out: Tensor = self.act(logits)
            return out
        if self.activation == "gelu":
            return F.gelu(logits)
        if self.activation == "relu":
            return F.relu(logits)
        return logits.softmax(-1)

    @property
    def whole_maps(self) -> str | None:
        """None: all activations but the softmax act on single entries."""
        return self._head_mixing()

    def _blocked(self, inputs: Roles, grid: Grid | None, bias: Tensor | None) -> Tensor:
        """Compute what the heads return, a block of query rows at a time."""
        if self.activation == "softmax":
            return self._by_rows(inputs, grid, bias)[0]

        def weigh(logits: Tensor, *numbers: Tensor) -> tuple[Tensor, None]:
            return star_relu(logits, *numbers) if numbers else self.activate(logits), None

        learned = () if self.act is None else (self.act.scale, self.act.bias)
        how: dict[str, Any] = {"softmax": False, "mix": weigh, "learned": learned}
        return self._by_rows(inputs, grid, bias, **how)[0]

    def key_shape(self) -> tuple[int, ...]:
        """Shape of the static key: ``[h, M, d]``, or ``[nW, h, M, d]`` with keys per window."""
        windows = (self.site.windows,) if self.site.windows > 1 else ()
        return (*windows, self.num_heads, self.site.num_keys, self.head_dim)

    def scale_keys(self) -> None:
        """Multiply the keys by the factor of the logits, for :meth:`fold`; it is 1 from then on."""
        for name in self.grid_parameters:
            path, _, leaf = name.rpartition(".")
            module, keys = self.get_submodule(path), attrgetter(name)(self)
            if keys is not None:
                setattr(module, leaf, replaced(keys, keys * self.scale))
        self.scale = 1.0

    # ---- in a swap --------------------------------------------------------------------------

    @classmethod
    def learned_keys(cls, site: Site, options: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """The key, which all queries meet; none to estimate where these are plain tokens."""
        return {"queries": ("key",)} if options["query_proj"] else {}

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer bound to a grid, and of learned keys."""
        return {
            **super().transfer_options(),
            "activation": self.activation,
            "key_grid": self.chosen_key_grid,
            "query_proj": self.query_proj,
        }

    # ---- on another grid --------------------------------------------------------------------

    def _resampled(
        self, name: str, t: Tensor, old: Grid, new: Grid, windows: tuple[Grid | None, Grid | None]
    ) -> Tensor:
        """Resample a tensor with one row per key from one key grid, and windows, to another.

        `windows` are their grids before and after; None where the keys are not those of a window.
        """
        prefix = self.site.num_prefix_tokens
        rows = prefix + old[0] * old[1]
        before, after = windows
        if before is None or after is None:
            kept = t.reshape(self.num_heads, rows, -1)
            out = resample.interpolate(kept, prefix, old, new)
        else:
            kept = t.reshape(before[0] * before[1], self.num_heads, rows, -1)
            out = resample.interpolate_windows(kept, prefix, old, new, before, after)
        if name != "key":
            return out.reshape(-1, *t.shape[1:])
        return out[0] if after == (1, 1) else out  # one window's keys need no axis of windows

    def resized(self, name: str, keys: Grid) -> Tensor:
        """Return the parameter ``name`` as a call needs it whose keys lie on ``keys``.

        That is the parameter itself on the grid it lies on.
        """
        learned: Tensor = attrgetter(name)(self)
        if keys == self.key_grid:
            return learned
        windows = self.site.window_grid if self.own_windows else None
        return self._resampled(name, learned, self.key_grid, keys, (windows, windows))

    def resize_parameters(self, key_grid: Grid, windows: Grid | None) -> None:
        """Resample the keys themselves, for good."""
        pair = (self.site.window_grid, windows) if self.own_windows else (None, None)
        for name in self.grid_parameters:
            path, _, leaf = name.rpartition(".")
            module, learned = self.get_submodule(path), attrgetter(name)(self)
            if learned is None or (key_grid == self.key_grid and pair[0] == pair[1]):
                continue
            with torch.no_grad():
                moved = self._resampled(name, learned, self.key_grid, key_grid, pair).contiguous()
            setattr(module, leaf, nn.Parameter(moved, requires_grad=learned.requires_grad))

    def adapt_state(
        self,
        state: dict[str, Tensor],
        grid: Grid,
        *,
        key_grid: Grid | None = None,
        window_grid: Grid | None = None,
    ) -> dict[str, Tensor]:
        """Resample the keys of a checkpoint from another grid to this mixer's."""
        old = key_grid if key_grid is not None else self.source_grid(grid)
        here = self.site.window_grid
        pair = (window_grid or here, here) if self.own_windows else (None, None)
        if self.own_windows and here is None and old != self.key_grid:
            raise UserError(f"mixer {self.mixer_name!r} needs its site's window_grid= to resample")
        adapted = dict(state)
        for name in self.grid_parameters:
            if name not in state:
                continue
            try:
                adapted[name] = self._resampled(name, state[name], old, self.key_grid, pair)
            except RuntimeError as error:
                raise UserError(
                    f"{name} {tuple(state[name].shape)} of mixer {self.mixer_name!r} does not "
                    f"hold keys of a grid of {old}; give the checkpoint's grid"
                ) from error
        return adapted

    def inputs(self, x: Float[Tensor, "*batch N C"], grid: Grid | None) -> Roles:
        """Project the tokens, and resample a static key to the grid of the call."""
        inputs = super().inputs(x, grid)
        inputs["q"] = inputs["q"].to(inputs["v"].dtype)  # autocast narrows what is projected
        if self.key is not None:
            key = self.resized("key", self._keys_of(inputs, grid))
            inputs["key"] = key.to(inputs["q"].dtype)
        return inputs

    def _keys_of(self, inputs: Roles, grid: Grid | None) -> Grid:
        """Where the keys of this call lie."""
        if self.resize != "interpolate":
            return self.key_grid
        count = inputs["v"].shape[-2] - self.site.num_prefix_tokens
        return self.key_grid_for(grid or self.site.grid or self.key_grid, count)


@register_mixer("static_key", aliases=("ska",))
class StaticKeyAttention(LearnedKeys):
    r"""Static key attention: :math:`\mathrm{softmax}(s\, Q_h W_{K,h}^\top)\, V_h`, key learned.

    Paper: Static Key Attention in Vision, https://arxiv.org/abs/2412.07049, Sec. 4.1 and
    Algorithm 1. Letters: their :math:`W_{K,h}`, N x d_h, is our ``key[h]``. Parameters: ``q``
    (none without ``query_proj``), ``key [h, M, d]`` (one row per key, prefix rows first;
    ``[nW, h, M, d]`` under windows), ``v``, ``proj``.
    Differs: Sec. 4.1 and Algorithm 1 leave the logits unscaled, Sec. 4.3 and 6.1 speak of scaling;
    we scale by default and ``scale=False`` follows Algorithm 1.

    Args:
        site: Where the mixer sits; its grid fixes the number of keys.
        activation: ``"softmax"``, or ``"gelu"``, ``"relu"``, ``"star_relu"`` (SKA Table 4).
        key_init_std: Standard deviation of the keys at the start; 1 as in Algorithm 1.
        key_grid: Fewer keys than tokens: (height, width) of their grid, ``"7x7"``, or a share of
            the tokens, ``"1/4"``. Tokens are averaged onto it before they become values.
        query_proj: Project tokens to queries; if false, a token cut into heads is the query, as in
            the authors' MetaFormer.
        resize: What to do with tokens of another grid: None refuses, ``"interpolate"`` resamples
            the keys, ``"pool_values"`` keeps them and averages the values; see
            :class:`keymix.mixers.resize.GridBound`. With ``key_grid`` always the last.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]`` with the site's N, or any grid under ``resize``.
    Cost: (2 N + M) C^2 + 2 N M C multiply-adds, 3 C^2 + M C weights (SKA Table 6); M = N under
    ``"interpolate"``, that of the keys' grid under ``"pool_values"``: linear in N. Without
    ``query_proj`` N C^2 multiply-adds and C^2 weights less.

    Raises:
        UserError: If the site has no grid, or a value is bad.
    """

    family = "learned keys"
    about = (
        "The key is a learned table instead of a projection of the input, so that a token's "
        "scores depend on its query alone. Static Key Attention in Vision, arXiv 2412.07049, "
        "Sec. 4.1."
    )

    traits = Traits(permutation="positional")

    def __init__(self, site: Site, **shared: Unpack[KeyOptions]) -> None:
        super().__init__(site, **shared)
        self.key = nn.Parameter(torch.empty(self.key_shape(), **self.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the keys from N(0, key_init_std^2)."""
        super().reset_parameters()
        if self.key is not None:  # not folded
            nn.init.normal_(self.key, std=self.key_init_std)

    def fold(self) -> None:
        """Bring the factor of the logits into the keys, and few keys into the queries' projection.

        Its outputs are the logits then: M instead of d + M d / C products per token, head and input
        channel, which is less where M <= d. Keys that windows own, calls resample, queries meet
        behind a norm or rotation, or a named backend needs stay where they are. Queries and values
        of the same tokens are one projection from then on.
        """
        super().fold()
        if redefines(self, StaticKeyAttention, *LINEAR):
            return
        self.scale_keys()
        self._fold_few_keys()
        self.join_queries_and_values()

    def _fold_few_keys(self) -> None:
        """Multiply keys into the projection of the queries, where that is less to compute."""
        keys, q = self.key, self.get_submodule(self.joint or "q")
        shared = not (self.own_windows or self.resize == "interpolate")
        direct = self.joint is None and "q" not in (self.post_projection or {})
        if (
            keys is None
            or keys.shape[-2] > self.head_dim
            or not (shared and direct and self.backend in ("auto", "reference"))
            or type(q) is not nn.Linear
            or watched(q)
        ):
            return
        heads = (self.num_heads, self.head_dim, -1)
        made = nn.Linear(q.in_features, keys[..., 0].numel(), q.bias is not None, **self.factory)
        made.weight = replaced(q.weight, (keys @ q.weight.reshape(heads)).flatten(0, 1))
        if q.bias is not None:
            made.bias = replaced(q.bias, (keys @ q.bias.reshape(heads)).flatten())
        self.q, self.key = made, None
        self.no_factors = "the keys are folded into the projection, which gives the logits"

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor] | None:
        """Queries computed, keys learned."""
        return None if self.key is None else (inputs["q"], inputs["key"])
