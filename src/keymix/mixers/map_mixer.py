# SPDX-License-Identifier: Apache-2.0
"""Mixers that form an attention map: everything they share, written once."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.folding import watched
from keymix.mixers.base import (
    BackendChoice,
    Grid,
    Queries,
    Site,
    Stage,
    Traits,
    check_stage,
    heads_first,
    heads_last,
    probability,
    query_rows,
    take_rows,
)
from keymix.mixers.head_mixer import HeadMixer, HeadOptions, Roles
from keymix.ops.attention import blocked, sdpa
from keymix.ops.attention.small_maps import whole_is_faster
from keymix.ops.tracing import traced

TalkingHeads = bool | Literal["bias"]
Scale = Literal["head_dim", "dim", False]
Backend = Literal["auto", "reference", "sdpa", "blocked"]
BACKENDS = get_args(Backend)

FROM_ENTRIES = 2**21
"""Entries of the maps of a call from which on ``auto`` forms them a block of rows at a time."""


class LogitOptions(HeadOptions, total=False):
    """The options of :class:`keymix.mixers.map_mixer.MapMixer`, for subclasses, but one."""

    scale: Scale
    temperature: bool | float
    talking_heads: TalkingHeads
    attn_drop: float
    backend: Backend


class MapOptions(LogitOptions, total=False):
    """All of them: with the one that needs a key for each token."""

    mask_diagonal: bool


class MapMixer(HeadMixer):
    r"""A mixer whose output is :math:`\mathrm{concat}_h(A_h V_h) W_o` for some map :math:`A_h`.

    A subclass names its ``roles`` and writes either ``factors(inputs)``, queries and keys whose
    product is the logits, or ``logits(inputs, grid, rows)``. This class owns the rest, in this
    order: projections; scale or temperature; the mixer's own additive bias; the caller's bias;
    the diagonal mask; head mixing before the activation; the activation; head mixing after it;
    dropout; times V; output projection.

    Args:
        site: Where the mixer sits: width, heads, grids, prefix tokens.
        scale: Factor of the logits: ``"head_dim"`` is d^-0.5, ``"dim"`` is C^-0.5, False is 1.
        temperature: A number tau > 0 divides the scaled logits (DeepViT Eq. 4, fixed); True learns
            the whole factor instead: one number per mixer, its logarithm stored, that starts at
            ``scale`` (DeepViT's learnable tau; locality self-attention, SKA's baseline).
        mask_diagonal: Forbid a query its own position (the same baseline). Needs M = N.
        talking_heads: Mix the maps of the heads linearly before and after the activation (CaiT),
            both starting at the identity; ``"bias"`` adds a bias a head after the activation, as
            timm's CaiT does (its bias before the softmax shifts whole rows and so does nothing).
        attn_drop: Probability of dropping an entry of the final map.
        backend: ``"auto"``, or a path by name, which runs or raises with the reason:
            ``"reference"``, ``"sdpa"`` (PyTorch's fused attention) or ``"blocked"`` (a block of
            query rows at a time, so that no map stands in memory, forward or backward; slow on a
            GPU, where auto does not take it).
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Raises:
        UserError: If a value is out of range or the heads do not divide the width.
    """

    map_norm: ClassVar[str | None] = None  # submodule that norms maps over heads, if there is one
    temperature: nn.Parameter | None
    map_gain: float = 1.0  # factor of the maps behind that norm
    no_factors: str | None = None  # why folded projections give the logits themselves

    def __init__(
        self,
        site: Site,
        *,
        scale: Scale = "head_dim",
        temperature: bool | float = False,
        mask_diagonal: bool = False,
        talking_heads: TalkingHeads = False,
        attn_drop: float = 0.0,
        backend: Backend = "auto",
        **shared: Unpack[HeadOptions],
    ) -> None:
        if scale not in ("head_dim", "dim", False):
            raise UserError(f"{scale=} must be 'head_dim', 'dim' or False")
        if mask_diagonal and site.has_own_key_grid:
            raise UserError("mask_diagonal=True needs as many keys as tokens; this site has fewer")
        if mask_diagonal and talking_heads:
            raise UserError(
                "mask_diagonal=True cannot hold under talking_heads=True, which mixes the masked "
                "logits of all heads; choose one"
            )
        super().__init__(site, **shared)
        factory, h = self.factory, self.num_heads
        self.attn_drop_p = probability("attn_drop", attn_drop)
        self.mask_diagonal = mask_diagonal
        self.scale = {"head_dim": self.head_dim**-0.5, "dim": site.dim**-0.5, False: 1.0}[scale]
        if not isinstance(temperature, bool):
            if not 0 < temperature < math.inf:
                raise UserError(f"{temperature=} must be a number above 0, or true to learn it")
            self.scale /= temperature
        learned = nn.Parameter(torch.empty((), **factory)) if temperature is True else None
        self.register_parameter("temperature", learned)
        self.talking_pre: nn.Linear | None = None
        self.talking_post: nn.Linear | None = None
        if talking_heads:
            self.talking_pre = nn.Linear(h, h, bias=False, **factory)
            self.talking_post = nn.Linear(h, h, bias=talking_heads == "bias", **factory)
        self.attn_drop = nn.Dropout(self.attn_drop_p)
        self.backend = backend
        self._own_step, self._own_rows = (
            _own_step(type(self), answer) for answer in ("plain_softmax", "whole_maps")
        )
        MapMixer.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Set the parameters this class itself holds to their starting values."""
        if self.temperature is not None:
            with torch.no_grad():
                self.temperature.fill_(self.scale).log_()
        for mix in (self.talking_pre, self.talking_post):
            if mix is not None:
                nn.init.eye_(mix.weight)
                if mix.bias is not None:
                    nn.init.zeros_(mix.bias)

    @classmethod
    def forms_map(cls) -> bool:
        """Always."""
        return True

    # ---- for inference ----------------------------------------------------------------------

    def fold(self) -> None:
        """Make a number of the learned temperature."""
        super().fold()
        if self.temperature is not None:
            self.scale, self.temperature = float(self.temperature.double().exp()), None

    def scale_queries(self) -> None:
        """Multiply the queries' projection by the factor of the logits, which is 1 from then on.

        For :meth:`fold` of mixers whose logits are linear in the queries. Nothing changes where
        the queries pass a norm, or the projection is no plain linear map.
        """
        name = self.joint or "q"
        linear = self.get_submodule(name)
        normed = self.post_projection is not None and self.post_projection.norms("q")
        if normed or type(linear) is not nn.Linear or watched(linear):
            return
        rows = self.num_heads * self.head_dim
        start = self.roles.index("q") * rows if self.joint else 0
        scaled = copy.deepcopy(linear)
        for part in (scaled.weight, scaled.bias):
            if part is not None:
                part[start : start + rows] *= self.scale
        self.add_module(name, scaled)
        self.scale = 1.0

    # ---- what a subclass writes -------------------------------------------------------------

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor] | None:
        """Return queries ``[*, h, N, d]`` and keys ``[*keys, h, M, d]`` that make the logits.

        None, as here, if the logits are no such product.
        """
        return None

    def logits(
        self, inputs: Roles, grid: Grid | None, rows: Tensor | None = None
    ) -> Float[Tensor, "*batch h Q M"]:
        """Return the unscaled logits of the query rows ``rows``, all if None."""
        if self.no_factors is not None:
            return take_rows(inputs["q"], rows)
        both = self.factors(inputs)
        if both is None:
            raise TypeError(f"{type(self).__name__} must define factors(inputs) or logits(…)")
        q, k = both
        return take_rows(q, rows) @ k.transpose(-2, -1)

    def gain(self) -> float | Tensor:
        """Return the factor of the logits: the scale over a fixed tau, or the learned number."""
        return self.scale if self.temperature is None else self.temperature.exp()

    def own_bias(self, inputs: Roles, grid: Grid | None, rows: Tensor | None) -> Tensor | None:
        """Return the mixer's own additive bias on the scaled logits, or None."""
        return None

    def activate(self, logits: Tensor) -> Tensor:
        """Turn logits into weights: softmax over the keys, unless a mixer offers others."""
        return logits.softmax(-1)

    def mix_after(self, maps: Float[Tensor, "*batch h Q M"], track: bool) -> Tensor:
        """Mix the heads' maps after the activation; ``track`` lets running statistics move."""
        return maps if self.talking_post is None else _talk(maps, self.talking_post)

    @property
    def mixes_rows(self) -> bool:
        """Whether a row of the final map depends on the other rows in the present mode."""
        return False

    @property
    def plain_softmax(self) -> str | None:
        """None if the map is a plain softmax of logits, else what makes it another thing."""
        return self._head_mixing()

    @property
    def whole_maps(self) -> str | None:
        """None if maps can be formed a block of query rows at a time, else why they cannot."""
        return self._head_mixing()

    def _head_mixing(self) -> str | None:
        """Why heads that mix make the map another thing; None if they do not.

        A method, for subclasses: torch.compile of PyTorch 2.11 follows no property by ``super()``.
        """
        return "talking_heads mixes the maps" if self.talking_pre is not None else None

    # ---- what this class does with it -------------------------------------------------------

    def transfer_options(self) -> dict[str, Any]:
        """Return width of heads, biases, dropouts, head mixing and scale."""
        talks = self.talking_post is not None and (self.talking_post.bias is None or "bias")
        options = {
            **super().transfer_options(),
            "attn_drop": self.attn_drop_p,
            "mask_diagonal": self.mask_diagonal,
            "talking_heads": talks,
            **scale_options(self.scale, self.head_dim, self.site.dim),
        }
        return options if self.temperature is None else {**options, "temperature": True}

    @property
    def claims(self) -> Traits:
        """The traits, without ``maskable`` where head mixing would undo a mask."""
        maskable = self.traits.maskable and self.talking_pre is None
        return replace(self.traits, maskable=maskable)

    def _added(
        self, inputs: Roles, grid: Grid | None, bias: Tensor | None, rows: Tensor | None
    ) -> Tensor | None:
        own = self.own_bias(inputs, grid, rows)
        if bias is None:
            return own
        bias = take_rows(bias, rows)
        return bias if own is None else own + bias

    def added_bias(self, inputs: Roles, grid: Grid | None, bias: Tensor | None) -> Tensor | None:
        """Return all that is added to the scaled logits of a call, the diagonal mask included."""
        added = self._added(inputs, grid, bias, None)
        if not self.mask_diagonal:
            return added
        v = inputs["v"]
        mask = self._diagonal(None, v.shape[-2], v)
        lowest = torch.finfo(v.dtype).min
        if added is None:
            added = torch.zeros(mask.shape, device=v.device, dtype=v.dtype)
        return added.masked_fill(mask, lowest)

    def _diagonal(self, rows: Tensor | None, count: int, like: Tensor) -> Tensor:
        """Mark, for the query rows, the key at the query's own position: ``[Q, M]``, boolean."""
        keys = torch.arange(count, device=like.device)
        return (keys if rows is None else rows)[:, None] == keys

    def maps(
        self,
        inputs: Roles,
        grid: Grid | None,
        bias: Tensor | None = None,
        rows: Tensor | None = None,
        stage: Stage = "final",
        track: bool = False,
    ) -> Float[Tensor, "*batch h Q M"]:
        """Form the attention map of some query rows, up to a stage, without dropout.

        Args:
            inputs: What :meth:`inputs` returned.
            grid: Grid of the tokens.
            bias: The caller's additive bias.
            rows: Indices of query tokens, prefix first; all if None.
            stage: ``"softmax"`` stops after the activation, ``"final"`` is what multiplies V.
            track: Whether normalisation may update running statistics.
        """
        a = self.logits(inputs, grid, rows) * self.gain()
        added = self._added(inputs, grid, bias, rows)
        if added is not None:
            a = a + added
        if self.mask_diagonal:
            # the lowest finite number, so that a single token still attends to itself
            a = a.masked_fill(self._diagonal(rows, a.shape[-1], a), torch.finfo(a.dtype).min)
        if self.talking_pre is not None:
            a = _talk(a, self.talking_pre)
        a = self.activate(a)
        return a if stage == "softmax" else self.mix_after(a, track)

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Mix the tokens; see :class:`keymix.mixers.base.TokenMixer`."""
        grid = self.resolve_grid(x, grid)
        inputs = self.inputs(x, grid)
        path = self.choose_backend(x.device, x.shape, bias).name
        if path == "sdpa":
            y = self._fused(inputs, grid, bias)
        elif path == "blocked" and traced(x) is None:
            y = self._blocked(inputs, grid, bias)
        else:
            y = self.weights(inputs, grid, bias) @ inputs["v"]
        del inputs  # in evaluation the output projection takes their memory
        return self.output(y, x)

    def weights(
        self, inputs: Roles, grid: Grid | None, bias: Tensor | None
    ) -> Float[Tensor, "*batch h N M"]:
        """Form the whole map that multiplies V in a forward pass, with dropout."""
        dropped: Tensor = self.attn_drop(self.maps(inputs, grid, bias, track=self.training))
        return dropped

    def _fused(self, inputs: Roles, grid: Grid | None, bias: Tensor | None) -> Tensor:
        both = self.factors(inputs)
        if both is None:
            raise TypeError(f"{type(self).__name__} must define factors(inputs) or logits(…)")
        q, k = both
        added = self.added_bias(inputs, grid, bias)
        dropout = self.attn_drop_p if self.training else 0.0
        return sdpa.attention(q, k, inputs["v"], scale=self.gain(), bias=added, dropout=dropout)

    def _blocked(self, inputs: Roles, grid: Grid | None, bias: Tensor | None) -> Tensor:
        """Compute what the heads return, a block of query rows at a time."""
        return self._by_rows(inputs, grid, bias)[0]

    def _by_rows(
        self, inputs: Roles, grid: Grid | None, bias: Tensor | None, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hand queries, keys and values to :func:`keymix.ops.attention.blocked.attention`."""
        both = self.factors(inputs)
        if both is None:
            raise TypeError(f"{type(self).__name__} must define factors(inputs) or logits(…)")
        return blocked.attention(
            *both,
            inputs["v"],
            scale=self.gain(),
            bias=self._added(inputs, grid, bias, None),
            diagonal=0 if self.mask_diagonal else None,
            **how,
        )

    def attention_map(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        queries: Queries | None = None,
        stage: Stage = "softmax",
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch h Q M"]:
        """Return rows of the attention map, differentiable, without dropout.

        Args:
            x: Tokens as :meth:`forward` takes them.
            grid: Grid of these tokens, where it is not the site's.
            queries: Indices of the query tokens wanted (prefix tokens first); all if None. Only
                these rows are computed, unless a normalisation in training needs every row.
            stage: ``"softmax"``: after the activation; ``"final"``: after head mixing, the map
                that multiplies V.
            bias: The additive bias the forward pass had.

        Raises:
            UserError: If a query is no token or the stage is unknown.
        """
        check_stage(stage)
        grid = self.resolve_grid(x, grid)
        rows = query_rows(queries, x)
        inputs = self.inputs(x, grid)
        if rows is not None and stage == "final" and self.mixes_rows:
            return take_rows(self.maps(inputs, grid, bias), rows)
        return self.maps(inputs, grid, bias, rows, stage)

    @property
    def learns_bias(self) -> bool:
        """Whether the mixer's own additive bias is learned."""
        return False

    def choose_backend(
        self,
        device: torch.device | None = None,
        shape: Sequence[int] | None = None,
        bias: Tensor | None = None,
    ) -> BackendChoice:
        """Say which path a forward pass takes and why.

        Args:
            device: Where it runs; a CPU if None.
            shape: Of the tokens, ``[*, N, C]``; those of one image on the site's grid if None.
            bias: The caller's additive bias.

        Raises:
            UserError: If a backend was named at construction and cannot run; with the reason.
        """
        if self.backend not in BACKENDS:
            raise UserError(
                f"backend={self.backend!r} does not exist for mixer {self.mixer_name!r}; choose "
                f"one of {', '.join(map(repr, BACKENDS))}"
            )
        fused = self.no_factors or self.plain_softmax or self._own_step
        rows = self.no_factors or self.whole_maps or self._own_rows
        dropped = self.training and self.attn_drop_p > 0
        rows = rows or ("attention dropout draws for the whole map" if dropped else None)
        if self.backend != "auto":
            return self._named_backend(fused, rows)
        on_cpu = device is None or device.type == "cpu"
        if fused is None:
            if on_cpu and dropped:
                return BackendChoice("reference", "attention dropout has no fused kernel on CPU")
            learned = self.learns_bias or (bias is not None and bias.requires_grad)
            if not (learned and torch.is_grad_enabled()):
                whole = self._whole_is_faster(shape) if on_cpu and traced() is None else None
                return _FUSED if whole is None else BackendChoice("reference", whole)
        # where operations are followed, sizes may be no numbers; on a GPU blocks are slow
        entries = self._entries(shape) if on_cpu and rows is None and traced() is None else 0
        if entries < self._from_entries():
            return _FUSED if fused is None else BackendChoice("reference", fused)
        size = f"maps of {entries:,} entries are formed a block of rows at a time"
        if fused is None:
            size = f"fused attention forms the whole map where a bias is learned; {size}"
        return BackendChoice("blocked", size)

    def _named_backend(self, fused: str | None, rows: str | None) -> BackendChoice:
        """Choose the path that was asked for; what speaks against fused ones or blocks is given."""
        against = {"sdpa": fused, "blocked": rows}.get(self.backend)
        followed = traced() if self.backend == "blocked" else None
        if against is not None:
            raise UserError(f"backend={self.backend!r} cannot run here: {against}")
        if followed is not None:
            return BackendChoice("reference", followed)  # the function is the same
        return BackendChoice(self.backend, "asked for by name")

    def _from_entries(self) -> int:
        """From how many entries on maps are formed a block of rows at a time."""
        return FROM_ENTRIES

    def _whole_is_faster(self, shape: Sequence[int] | None) -> str | None:
        """Why whole maps are faster than fused attention on a CPU; None if they are not."""
        dtype = next((p.dtype for p in self.parameters()), torch.float32)
        return whole_is_faster(self._entries(shape), self._keys(shape), dtype)

    def _keys(self, shape: Sequence[int] | None) -> int:
        """Number of keys for tokens of a shape; 0 if not known."""
        site = self.site
        if shape is None and site.grid is None:
            return 0
        if site.has_own_key_grid or self.keeps_grid:
            return site.num_keys
        return site.num_tokens if shape is None else shape[-2]

    def _entries(self, shape: Sequence[int] | None) -> int:
        """Entries of the maps of which blocks are cut, for tokens of a shape; 0 if not known."""
        keys = self._keys(shape)
        if shape is None:
            shape = (self.site.windows, self.site.num_tokens, 0) if keys else (0, 0)
        return math.prod(shape[:-1]) * self.num_heads * keys


_FUSED = BackendChoice("sdpa", "the map is a plain softmax of a product")

LINEAR = ("inputs", "factors", "logits", "gain", "maps", "forward")
"""Steps on which it rests that logits are linear in queries and keys, for :meth:`MapMixer.fold`."""

_STEPS = ("logits", "activate", "mix_after", "maps")


def _own_step(cls: type, answer: str) -> str | None:
    """Why a subclass takes no faster path though it does not say so: a step it overrides.

    `answer` is the property that speaks of the path; its class answers for these steps.
    """
    for each in cls.__mro__:
        if answer in vars(each):
            break
        for step in _STEPS:
            if step in vars(each):
                return f"{each.__name__} has {step}() of its own"
    return None


def scale_options(scale: float, head_dim: int, dim: int) -> dict[str, Any]:
    """Return the options that make a factor of the logits; the default needs none."""
    names: dict[float, Any] = {1.0: False, dim**-0.5: "dim", head_dim**-0.5: "head_dim"}
    if scale in names:
        return {} if names[scale] == "head_dim" else {"scale": names[scale]}
    return {"scale": False, "temperature": 1.0 / scale}


def _talk(maps: Tensor, mix: nn.Linear) -> Tensor:
    """Mix heads linearly: ``out[g] = sum_h weight[g, h] maps[h]`` on ``[*, h, Q, M]``."""
    return heads_first(mix(heads_last(maps)))
