# SPDX-License-Identifier: Apache-2.0
"""Mixers with heads: projections in and out, and what a host does to heads, written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.folding import joined
from keymix.mixers.base import (
    Grid,
    Queries,
    Site,
    Stage,
    TokenMixer,
    check_stage,
    probability,
    query_rows,
)

Roles = dict[str, Tensor]
KeyPool = Callable[[Tensor], Tensor]


class HeadOptions(TypedDict, total=False):
    """The options of :class:`HeadMixer`, for subclasses.

    ``def __init__(self, site, *, mine=1, **shared: Unpack[HeadOptions])``: type checkers and the
    registry read them from here on, so that they are written once.
    """

    head_dim: int | None
    qkv_bias: bool
    proj_bias: bool
    proj_drop: float
    device: Any
    dtype: Any


class PostProjection(nn.ModuleDict):
    """What a host does to heads after their projection, by role: norms, rotations, gates.

    A role's module takes heads ``[*, h, N, d]`` and returns the like; that of ``"out"`` takes
    ``(y [*, N, h * d], x [*, N, C])``, what the heads return and the tokens, and returns the
    like of ``y``. Roles for which ``make`` makes none pass as they are.
    """

    def __init__(self, make: Callable[[str], nn.Module | None], roles: Sequence[str]) -> None:
        made = {role: make(role) for role in (*roles, "out")}
        super().__init__({role: module for role, module in made.items() if module is not None})

    def norms(self, role: str) -> bool:
        """Whether a role passes through something that does not say that it ``keeps_scale``."""
        return role in self and not getattr(self[role], "keeps_scale", False)

    def heads(self, parts: Roles, key_pool: KeyPool | None = None) -> Roles:
        """Pass on what came out of the projections, the keys perhaps of averaged tokens."""
        made = {role: self[role] for role in parts if role in self}
        pools = key_pool is not None and getattr(made.get("k"), "by_position", False)
        keys = {"k": made.pop("k")(parts["k"], key_pool)} if pools else {}
        return {**parts, **{role: module(parts[role]) for role, module in made.items()}, **keys}

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """Pass on what the heads return, before the output projection."""
        out: Tensor = self["out"](y, x) if "out" in self else y
        return out


class HeadMixer(TokenMixer):
    r"""A mixer that projects tokens to heads, computes in each, and projects what they return.

    A subclass names its ``roles`` and writes ``attend(inputs, grid)``, from heads of each role
    ``[*, h, N or M, d]`` to what they return, ``[*, h, N, d]``; where that is a map times V, also
    ``form_map(inputs, grid, rows)``. Where the map is an activation of logits,
    :class:`keymix.mixers.map_mixer.MapMixer` has more.

    Args:
        site: Where the mixer sits: width, heads, grids, prefix tokens.
        head_dim: Width d of a head; ``dim / num_heads`` if None.
        qkv_bias: Biases in the input projections.
        proj_bias: Bias in the output projection.
        proj_drop: Probability of dropping an output value.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Raises:
        UserError: If a value is out of range or the heads do not divide the width.
    """

    roles: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    joint: str | None = "qkv"  # name of the one projection of all roles, or None
    backend: str = "auto"  # "reference" computes by the equation, for counts

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(site)
        factory = {"device": device, "dtype": dtype}
        h, dim = site.num_heads, site.dim
        if head_dim is None:
            if dim % h:
                raise UserError(
                    f"dim={dim} does not divide into num_heads={h} heads; choose a divisor of "
                    f"{dim}, or give head_dim="
                )
            head_dim = dim // h
        if head_dim < 1:
            raise UserError(f"{head_dim=} must be at least 1")
        if "q" not in self.roles and site.has_own_key_grid:
            raise UserError(
                f"mixer {self.mixer_name!r} has no query apart from its keys, so both lie on one "
                f"grid, but here keys lie on {site.key_grid} and tokens on {site.grid}; give the "
                "projections stride 1"
            )
        if site.has_own_key_grid and site.project is None:
            raise UserError(
                f"keys lie on {site.key_grid} and tokens on {site.grid}, so this site needs "
                "project=, which takes the tokens to the keys' grid"
            )
        self.num_heads, self.head_dim = h, head_dim
        inner = h * head_dim
        self.project = (
            nn.ModuleDict({role: site.project(role) for role in self.roles})
            if site.project is not None
            else None
        )
        if self.joint is not None:
            joint = nn.Linear(dim, len(self.roles) * inner, bias=qkv_bias, **factory)
            self.add_module(self.joint, joint)
        else:
            for role in self.roles:
                self.add_module(role, nn.Linear(dim, inner, bias=qkv_bias, **factory))
        made = site.post_projection
        self.post_projection = None if made is None else PostProjection(made, self.roles)
        self.proj = nn.Linear(inner, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(probability("proj_drop", proj_drop))

    @classmethod
    def needs_all_keys(cls, options: Mapping[str, Any]) -> bool:
        """Whether every token needs a key, so that keys on a coarser grid would be refused."""
        return "q" not in cls.roles or bool(options.get("mask_diagonal"))

    @classmethod
    def forms_map(cls) -> bool:
        """Whether a subclass writes :meth:`form_map`."""
        return cls.form_map is not HeadMixer.form_map

    @property
    def factory(self) -> dict[str, Any]:
        """Device and dtype that the mixer was built with, for a subclass's own parameters."""
        return {"device": self.proj.weight.device, "dtype": self.proj.weight.dtype}

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The input projections and ``proj``."""
        names = (self.joint,) if self.joint is not None else self.roles
        linears = (self.get_submodule(name) for name in names)
        return (*(m for m in linears if isinstance(m, nn.Linear)), self.proj)

    def transfer_options(self) -> dict[str, Any]:
        """Return width of heads, biases and dropout."""
        return {
            "head_dim": self.head_dim,
            "qkv_bias": any(m.bias is not None for m in self.projections if m is not self.proj),
            "proj_bias": self.proj.bias is not None,
            "proj_drop": self.proj_drop.p,
        }

    def join_roles(self, joint: str) -> None:
        """Make one projection of those of the roles, for :meth:`fold`, under a new name."""
        apart = self.joint is None and self.project is None
        made = joined([self.get_submodule(role) for role in self.roles]) if apart else None
        if made is not None:
            for role in self.roles:
                delattr(self, role)
            self.add_module(joint, made)
            self.joint = joint

    def key_pool(self, grid: Grid | None) -> KeyPool | None:
        """Return what averages rows of the patch tokens onto the grid of computed keys.

        None, as here, where each key is of a token of its own.
        """
        return None

    def sources(self, x: Float[Tensor, "*batch N C"], grid: Grid | None) -> Roles:
        """Return what each role is projected from: the tokens, or what ``site.project`` makes."""
        if self.project is None:
            return dict.fromkeys(self.roles, x)
        return {role: self.project[role](x, grid) for role in self.roles}

    def inputs(self, x: Float[Tensor, "*batch N C"], grid: Grid | None) -> Roles:
        """Project the tokens: a role to its heads, ``[*, h, N or M, d]``."""
        count = self.num_heads
        if self.project is None and self.joint is not None:
            y = getattr(self, self.joint)(x)
            # the roles apart before the axes turn: backward joins their gradients in one copy
            y = y.reshape(*y.shape[:-1], len(self.roles), count, self.head_dim)
            parts = dict(zip(self.roles, y.unbind(-3), strict=True))
        else:
            parts = {
                role: t.reshape(*t.shape[:-1], count, t.shape[-1] // count)
                for role, t in self._project_apart(self.sources(x, grid)).items()
            }
        heads = {role: t.transpose(-3, -2) for role, t in parts.items()}
        if self.post_projection is None:
            return heads
        return self.post_projection.heads(heads, self.key_pool(grid))

    def output(self, y: Float[Tensor, "*batch h N d"], x: Float[Tensor, "*batch N C"]) -> Tensor:
        """Turn what the heads return for the tokens ``x`` into the mixer's output."""
        y = y.transpose(-3, -2).flatten(-2)
        y = y if self.post_projection is None else self.post_projection.output(y, x)
        out: Tensor = self.proj_drop(self.proj(y))
        return out

    def _project_apart(self, sources: Roles) -> Roles:
        if self.joint is None:
            return {role: getattr(self, role)(t) for role, t in sources.items()}
        linear = self.get_submodule(self.joint)
        assert isinstance(linear, nn.Linear)  # built as such in __init__
        count = len(self.roles)
        weights = linear.weight.chunk(count)
        biases = linear.bias.chunk(count) if linear.bias is not None else (None,) * count
        return {
            role: nn.functional.linear(sources[role], weight, bias)
            for role, weight, bias in zip(self.roles, weights, biases, strict=True)
        }

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Return what the heads do with what :meth:`inputs` returned."""
        raise TypeError(f"{type(self).__name__} must define attend(inputs, grid)")

    def form_map(
        self, inputs: Roles, grid: Grid | None, rows: Tensor | None = None
    ) -> Float[Tensor, "*batch h Q M"]:
        """Form the map whose product with V :meth:`attend` returns, of query rows or all.

        Raises:
            NoAttentionMap: If there is none, as here.
        """
        return super().attention_map(inputs[self.roles[0]], grid)

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Mix the tokens; see :class:`keymix.mixers.base.TokenMixer`."""
        grid = self.resolve_grid(x, grid)
        return self.output(self.attend(self.inputs(x, grid), grid), x)

    def attention_map(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        queries: Queries | None = None,
        stage: Stage = "softmax",
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch h Q M"]:
        """Return rows of the map that multiplies V, differentiable; both stages are one."""
        check_stage(stage)
        grid = self.resolve_grid(x, grid)
        return self.form_map(self.inputs(x, grid), grid, query_rows(queries, x))
