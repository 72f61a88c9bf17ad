# SPDX-License-Identifier: Apache-2.0
"""What timm's attention does to heads besides projecting them, so that a mixer does it too."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from keymix.errors import UserError
from keymix.hosts.timm_heads import rotate
from keymix.mixers.base import TokenMixer
from keymix.mixers.head_mixer import PostProjection

PARTS = {
    f"{theirs}.{leaf}": f"post_projection.{ours}.{leaf}"
    for theirs, ours in (
        ("q_norm", "q.norm"),
        ("k_norm", "k.norm"),
        ("norm", "out.norm"),
        ("gate", "out.gate"),
    )
    for leaf in ("weight", "bias")
}
"""Names in timm's attention to those of the same in a mixer."""


class Turn:
    """Hands the rotary positions of a call past a mixer to the queries and keys that it turns.

    They come as an argument of the attention that a mixer replaces, and a mixer knows none. It
    holds nothing of a model: copies and pickles of it have seen no call.
    """

    def __init__(self) -> None:
        self.rope: Tensor | None = None
        self.called = False

    @contextmanager
    def to(self, rope: Tensor | None) -> Iterator[None]:
        """Turn by these positions within; after it they are known still, to read the call."""
        self.rope, self.called = rope, True
        try:
            yield
        finally:
            if torch.compiler.is_compiling():
                self.rope, self.called = None, False
            elif rope is not None:
                self.rope = rope.detach()

    def positions(self) -> Tensor | None:
        """Return the positions of the present or the last call, None if it had none."""
        if not self.called:
            raise UserError(
                "a mixer in rotary attention knows positions from a call of its model; call the "
                "model first"
            )
        return self.rope

    def __getstate__(self) -> dict[str, Any]:
        return {"rope": None, "called": False}


def turn_of(mixer: TokenMixer) -> Turn:
    """Return the one turn that all heads of a mixer share from now on, those that turn at all."""
    turn = Turn()
    for module in mixer.modules():
        if isinstance(module, HeadFinish) and module.turn is not None:
            module.turn = turn
    return turn


def cosine(t: Tensor, logit_scale: Tensor) -> Tensor:
    """Return directions of queries or keys so long that their scaled products are Swin V2's logits.

    These are cosines times exp(min(log-scale, log 100)) of each head; the mixer's or reading's own
    factor is d^-0.5.
    """
    half = (logit_scale.clamp(max=math.log(100.0)) / 2).exp() * t.shape[-1] ** 0.25
    found: Tensor = normalize(t, dim=-1) * half
    return found


class Cosine(nn.Module):
    """The same with a log-scale of its own, ``[h, 1, 1]``: queries and keys have half each."""

    def __init__(self, logit_scale: Tensor) -> None:
        super().__init__()
        own = logit_scale.detach().clone()
        self.logit_scale = nn.Parameter(own, requires_grad=logit_scale.requires_grad)

    def reset_parameters(self) -> None:
        """Start as Swin V2 does."""
        nn.init.constant_(self.logit_scale, math.log(10.0))

    def forward(self, t: Tensor) -> Tensor:
        """Norm heads ``[*, h, N, d]``."""
        return cosine(t, self.logit_scale)


class HeadFinish(nn.Module):
    """Norm and rotary positions of queries or keys ``[*, h, N, d]``; prefix tokens do not turn.

    With ``halves``, channel i turns with i + d / 2, not with its neighbour.
    """

    def __init__(
        self, norm: nn.Module | None, turn: Turn | None, *, prefix: int = 0, halves: bool = False
    ) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.turn, self.prefix, self.halves = turn, prefix, halves

    @property
    def keeps_scale(self) -> bool:
        """Whether twice as large comes out twice as large: by a rotation, not by a norm."""
        return isinstance(self.norm, nn.Identity)

    @property
    def by_position(self) -> bool:
        """Whether it does something else at each position."""
        return self.turn is not None

    def forward(self, t: Tensor, pool: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Normalise, then turn; keys of averaged tokens turn by their average code."""
        out: Tensor = self.norm(t)
        rope = None if self.turn is None else self.turn.positions()
        rope = rope if rope is None or pool is None else pool(rope)
        return out if rope is None else rotate(out, rope, self.prefix, self.halves)


class OutFinish(nn.Module):
    """Norm of what the heads return, times a gate of the tokens: norm(y) sigmoid(gate(x))."""

    norm: nn.Module
    gate: nn.Module | None

    def __init__(self, norm: nn.Module | None, gate: nn.Module | None) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.gate = gate

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """PostProjection ``y [*, N, h * d]`` of the tokens ``x [*, N, C]``."""
        y, gate = self.norm(y), self.gate
        return y if gate is None else y * gate(x).sigmoid()


class HeadNorms:
    """Makes what the heads of a mixer pass through where an attention stood, with its weights.

    ``parts`` are the modules that are copied, by role or ``"out"``; ``extras`` says what these do.
    """

    def __init__(self, parts: Mapping[str, nn.Module], extras: tuple[str, ...]) -> None:
        self.parts = dict(parts)
        self.extras = extras

    def __call__(self, role: str) -> nn.Module | None:
        """Copy what a role passes through; None if nothing."""
        part = self.parts.get(role)
        return None if part is None else copy.deepcopy(part)

    def after(self, mixer: TokenMixer, like: Tensor) -> HeadNorms:
        """Return the same with the weights that they have in a mixer, as far as it has them.

        ``like`` is a tensor of the model that the mixer sits in, for device and dtype.
        """
        module = getattr(mixer, "post_projection", None)
        kept = dict(module.items()) if isinstance(module, PostProjection) else {}
        own = {role: kept.get(role) or _like(part, like) for role, part in self.parts.items()}
        return HeadNorms(own, self.extras)


def _like(part: nn.Module, like: Tensor) -> nn.Module:
    """Return a part with its weights where a model's are now, fresh ones if it has none yet."""
    part = copy.deepcopy(part)
    if any(t.is_meta for t in part.parameters()) and not like.is_meta:
        part = part.to_empty(device=like.device)
        for module in part.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    return part.to(like.device, like.dtype)


def norms_kept(norms: Any, mixer: TokenMixer, like: Tensor) -> Any:
    """Return a site's ``post_projection`` with the weights that it has in the mixer there now."""
    return norms.after(mixer, like) if isinstance(norms, HeadNorms) else norms


def cosine_norms(attention: Any) -> HeadNorms | None:
    """Return the norms of an attention that compares directions as Swin V2's, None of others."""
    scale = getattr(attention, "logit_scale", None)
    if scale is None:
        return None
    parts = {role: HeadFinish(Cosine(scale), None) for role in "qk"}
    return HeadNorms(parts, ("cosine attention",))


def head_norms_of(attention: Any, *, rotary: str | None = None) -> HeadNorms | None:
    """Return what a timm attention does to heads and output, None if nothing.

    ``rotary`` is what its rotary positions are called, None where its calls bring none.
    """
    parts: dict[str, nn.Module] = {}
    extras: list[str] = []
    turning: dict[str, Any] = {"turn": None}
    if rotary is not None:
        halves = getattr(attention, "rotate_half", False)
        turning = {"turn": Turn(), "prefix": attention.num_prefix_tokens, "halves": halves}
        extras.append(rotary)
    for role in "qk":
        norm = _part(attention, f"{role}_norm")
        if norm is not None or rotary is not None:
            parts[role] = HeadFinish(norm, **turning)
        extras += [f"{role}_norm"] if norm is not None else []
    out = {name: _part(attention, name) for name in ("norm", "gate")}
    if any(part is not None for part in out.values()):
        parts["out"] = OutFinish(**out)
        extras += [name for name, part in out.items() if part is not None]
    return HeadNorms(parts, tuple(extras)) if parts else None


def _part(attention: Any, name: str) -> nn.Module | None:
    part = getattr(attention, name, None)
    return None if part is None or isinstance(part, nn.Identity) else part
