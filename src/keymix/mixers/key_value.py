# SPDX-License-Identifier: Apache-2.0
"""Key-value attention: there is no query, the keys meet themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import GridNeeded, UserError
from keymix.mixers.base import Grid, Site, Traits, redefines, take_rows
from keymix.mixers.head_mixer import Roles
from keymix.mixers.registry import register_mixer
from keymix.mixers.resize import GridBound, ResizeOptions
from keymix.ops import resample


def sinusoidal_code(count: int, channels: int) -> Tensor:
    """Return one axis' part of the sinusoidal code of an index pair, ``[count, c]`` in float64.

    With m channels in all, an axis has c = 2 * ceil(m / 4): sines, then cosines, of the index
    times the frequencies 10000^(-2 k / c). Indices are 0 … count - 1, m is ``channels``.
    """
    half = math.ceil(channels / 4)
    k = torch.arange(half, dtype=torch.float64)
    frequency = 10000.0 ** (-2.0 * k / (2 * half))
    angle = torch.arange(count, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), -1)


@register_mixer("key_value", aliases=("kv",))
class KeyValueAttention(GridBound):
    r"""Key-value attention: :math:`\mathrm{softmax}(K K^\top / \sqrt d)\, V`, symmetric logits.

    Paper: Key-Value Transformer, https://arxiv.org/abs/2305.19129, and its use in SETR for medical
    segmentation, Eq. 2. With ``pos_dim = m > 0``, Fig. 1b: to each scaled logit an m-channel
    sinusoidal code of its index pair (i, j) is added, then a linear map m -> 1:
    :math:`(\sum_c w_c)\, S_{ij} + \mathrm{PE}_{ij} \cdot w + b`. So the sum of w scales the
    logits, PE . w is an additive bias that is a function of i plus a function of j, and the
    N x N x m tensor is never built. w starts at 1/m, which is plain key-value attention but for
    the bias. Parameters: ``kv`` in the order k, v; ``pos_proj`` where m > 0; ``proj``.
    Differs: the original experiments divide by sqrt(C); ``scale="dim"`` follows them.

    Args:
        site: Where the mixer sits. A position code needs its grid.
        pos_dim: Channels m of the code of the index pair, 0 for none, else at least 3: the first
            two code i alone, which the softmax over j undoes.
        resize: What a position code does with tokens of another grid (without one, any number is
            served): None refuses, ``"interpolate"`` resamples each token's code as position
            embeddings are, ``"pool_values"`` averages keys and values onto the construction grid
            and resamples the code of the queries alone. The paper has one grid; this is our
            reading.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N = M; where ``pos_dim > 0``, the site's N or any
    grid under ``resize``.
    Cost: 3 N C^2 + 2 N^2 C multiply-adds.

    Raises:
        UserError: If the keys lie on another grid than the tokens (there is no query to differ
            from them), or a value is bad.
    """

    family = "softmax"
    about = (
        "There is no query: tokens are compared by their keys alone, so scores are symmetric. "
        "Key-Value Transformer, arXiv 2305.19129."
    )

    pos_code: Tensor
    pos_bias: Tensor | None
    roles = ("k", "v")
    joint = "kv"
    holds = "built its position code"
    grid_parameters: ClassVar[tuple[str, ...]] = ("pos_code",)

    def __init__(
        self,
        site: Site,
        *,
        pos_dim: int = 0,
        **shared: Unpack[ResizeOptions],
    ) -> None:
        if not isinstance(pos_dim, int) or pos_dim < 0:
            raise UserError(f"{pos_dim=} must be a whole number of channels, 0 for none")
        if pos_dim and site.grid is None:
            raise GridNeeded(f"{pos_dim=} codes positions and so needs grid=(H, W)")
        super().__init__(site, **shared)
        self.pos_dim = pos_dim
        self.pos_proj: nn.Linear | None = None
        self.register_buffer("pos_bias", None, persistent=False)  # once folded, [N, M]
        if pos_dim:
            self.pos_proj = nn.Linear(pos_dim, 1, **self.factory)
            code = torch.empty(site.num_tokens, 2 * math.ceil(pos_dim / 4), **self.factory)
            self._keep_code(code)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set w to 1/m and b to 0, and fill the fixed code."""
        super().reset_parameters()
        if self.pos_proj is not None:
            nn.init.constant_(self.pos_proj.weight, 1.0 / self.pos_dim)
            nn.init.zeros_(self.pos_proj.bias)
            self._keep_code(self.pos_code)
            self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Compute the code where no state has it, as timm asks of modules built on ``meta``."""
        if self.pos_proj is not None and not self._code_moved:
            with torch.no_grad():
                self.pos_code.copy_(sinusoidal_code(len(self.pos_code), self.pos_dim))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move as any module; where ``to_empty`` gave it memory, fill the code."""
        bare = self.bound and self.pos_code.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bare and not self.pos_code.is_meta:
            self.init_non_persistent_buffers()
        return self

    def _keep_code(self, code: Tensor, *, moved: bool = False) -> None:
        """Set the position code, a row per position of :attr:`key_grid`.

        It belongs to the state where a mixer built here would have another, as it does if `moved`.
        """
        away = self.values_grid not in (None, self.key_grid)  # "pool_values" left it behind
        self.register_buffer("pos_code", code, persistent=moved or away)
        self._code_moved = moved

    @property
    def bound(self) -> bool:
        """Whether there is a position code."""
        return self.pos_dim > 0

    @property
    def own_windows(self) -> bool:
        """Never: the code is of indices inside a window, alike in all."""
        return False

    def resize_parameters(self, key_grid: Grid, windows: Grid | None) -> None:
        """Resample the code, for good; from then on it is saved with the weights."""
        prefix = self.site.num_prefix_tokens
        if key_grid != self.key_grid:
            moved = resample.interpolate(self.pos_code, prefix, self.key_grid, key_grid)
            self._keep_code(moved.contiguous(), moved=True)

    def set_grid(
        self, grid: Grid, *, key_grid: Grid | None = None, window_grid: Grid | None = None
    ) -> None:
        """Take another geometry; a code that stays where it lies is saved from then on."""
        super().set_grid(grid, key_grid=key_grid, window_grid=window_grid)
        if self.bound:
            self._keep_code(self.pos_code, moved=self._code_moved)
        if self.pos_bias is not None:
            self.pos_bias = self._position_bias(self.site.grid or self.key_grid)

    def fold(self) -> None:
        """Make the projected code a bias for every pair of tokens of its grid.

        The projection goes; of the code are left two numbers per position, for other grids.
        """
        super().fold()
        own = redefines(self, KeyValueAttention, "own_bias", "gain", "resize_parameters")
        if self.pos_proj is None or own:
            return
        self.scale *= float(self.pos_proj.weight.double().sum())
        self._keep_code(self._projected_code(), moved=self._code_moved)
        self.pos_proj = None
        self.pos_bias = self._position_bias(self.site.grid or self.key_grid)

    @property
    def optional_state(self) -> frozenset[str]:
        """The position code: a state has one that the grid of its tokens does not say."""
        return frozenset(self.grid_parameters if self.pos_dim else ())

    def adapt_state(
        self,
        state: dict[str, Tensor],
        grid: Grid,
        *,
        key_grid: Grid | None = None,
        window_grid: Grid | None = None,
    ) -> dict[str, Tensor]:
        """Resample the position code of a checkpoint to where this mixer's lies.

        A state that leaves it out has the sinusoid of the indices of its grid.

        Raises:
            UserError: If it does not have one row per token of that grid.
        """
        adapted, old = dict(state), key_grid or grid
        if self.bound and ("pos_code" in state or old != self.key_grid):
            prefix = self.site.num_prefix_tokens
            count = prefix + old[0] * old[1]
            code = state.get("pos_code")
            if code is None:
                code = sinusoidal_code(count, self.pos_dim).to(self.pos_code)
            if code.ndim != 2 or len(code) != count:
                raise UserError(
                    f"pos_code {tuple(code.shape)} of mixer {self.mixer_name!r} does not hold the "
                    f"code of a grid of {old}; give the checkpoint's grid"
                )
            adapted["pos_code"] = resample.interpolate(code, prefix, old, self.key_grid)
        return adapted

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load; a state says its code where it is not the sinusoid of the indices."""
        fixed, coded = f"{prefix}pos_code" in state, f"{prefix}pos_proj.weight" in state
        if self.bound and coded:
            moved, self._code_moved = self._code_moved, fixed
            if moved and not fixed:
                self.init_non_persistent_buffers()
            self.register_buffer("pos_code", self.pos_code, persistent=fixed)  # wanted if there
        super()._load_from_state_dict(state, prefix, *rest)
        if self.bound and coded:
            self._keep_code(self.pos_code, moved=fixed)

    @property
    def claims(self) -> Traits:
        """The traits; a position code makes places matter."""
        claims = super().claims
        if self.pos_dim:
            claims = replace(claims, permutation="positional")
        return claims

    @property
    def zero_gradients(self) -> frozenset[str]:
        """``pos_proj.bias``: it shifts all logits of a row alike, and the softmax undoes that."""
        return frozenset({"pos_proj.bias"} if self.pos_proj is not None else ())

    def no_weight_decay(self) -> set[str]:
        """The position projection, whose neutral weight is 1/m, not 0."""
        return {"pos_proj.weight", "pos_proj.bias"} if self.pos_proj is not None else set()

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer bound to a grid and the channels of the code."""
        return {**super().transfer_options(), "pos_dim": self.pos_dim}

    def inputs(self, x: Float[Tensor, "*batch N C"], grid: Grid | None) -> Roles:
        """Project the tokens; under ``"pool_values"`` keys are averaged as values are."""
        inputs = super().inputs(x, grid)
        if self.keeps_grid:
            inputs["key"] = self.pooled(inputs["k"], grid)
        return inputs

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """The keys, twice; the second time averaged where values are."""
        return inputs["k"], inputs.get("key", inputs["k"])

    @property
    def learns_bias(self) -> bool:
        """Whether there is a position code, whose projection is learned."""
        return self.pos_proj is not None

    def gain(self) -> float | Tensor:
        """The scale, times the sum of w where there is a position code."""
        gain = super().gain()
        return gain if self.pos_proj is None else gain * self.pos_proj.weight.sum()

    def own_bias(self, inputs: Roles, grid: Grid | None, rows: Tensor | None) -> Tensor | None:
        """PE . w + b as a function of i plus a function of j, ``[Q, M]``."""
        if not self.bound:
            return None
        there = grid or self.site.grid or self.key_grid
        if self.pos_bias is not None and there == self.site.grid:
            return take_rows(self.pos_bias, rows)
        return self._position_bias(there, rows)

    def _position_bias(self, grid: Grid, rows: Tensor | None = None) -> Tensor:
        """Resample what the code adds to the logits of tokens on ``grid``."""
        # resampling is linear, so that it may come after the product with w
        code, prefix = self._projected_code(), self.site.num_prefix_tokens
        of_query, of_key = (
            resample.interpolate(code[:, i : i + 1], prefix, self.key_grid, to)[:, 0]
            for i, to in enumerate((grid, self.key_grid_for(grid)))
        )
        return (of_query if rows is None else of_query[rows])[:, None] + of_key

    def _projected_code(self) -> Tensor:
        """PE . w + b at each position of the code: that of i with b, that of j, ``[K, 2]``."""
        if self.pos_proj is None:  # folded
            return self.pos_code
        c = self.pos_code.shape[-1]
        w = nn.functional.pad(self.pos_proj.weight[0], (0, 2 * c - self.pos_dim))
        parts = self.pos_code.to(w.dtype) @ w.view(2, c).T
        return parts + nn.functional.pad(self.pos_proj.bias, (0, 1))
