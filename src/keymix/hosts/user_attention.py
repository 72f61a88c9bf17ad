# SPDX-License-Identifier: Apache-2.0
"""Adapter to attention of anyone's making: names say what may be what, computing it proves it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import Place, patched, refuse_adapter
from keymix.hosts.blocks import BlockHost, Facts
from keymix.hosts.call_grid import CallGrid
from keymix.hosts.hosted import HostedMixer
from keymix.hosts.projections import facts_of, read_row, row_of, weights_of
from keymix.mixers.base import TokenMixer

HEADS = ("num_heads", "heads", "n_heads", "nheads", "n_head", "num_attention_heads")
FAILURES = AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
_PROVED: dict[tuple[Any, ...], str] = {}  # what modules of one class and make return


class HostedUserAttention(HostedMixer):
    """Stands where an attention stood, behind the norm that this had inside.

    ``pair`` says that the caller expects weights too; it gets None for them.
    """

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__(mixer, place, call, before)
        again = isinstance(before, HostedUserAttention)
        self.norm = before.norm if again else _norm(before)
        self.pair = before.pair if again else returns(before) == "a pair"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Mix the tokens ``[B, N, C]``; refuse a call for more."""
        _refuse_more(self.place.path, args, kwargs)
        x = self.norm(x)
        out = self.mixer(x, grid=self.grid_of(x))
        return (out, None) if self.pair else out


class UserAttention(BlockHost):
    """Self-attention of plain linear maps in any model, such as vit-pytorch's, or the user's own.

    A module whose projections have known names, with a number of heads, is taken for
    softmax(q k^T s) v behind an output projection, perhaps after a norm inside. Whether it is that,
    it must show: with random weights and tokens, in double precision, it returns the same.
    """

    name = "attention with named projections (qkv and proj, to_qkv and to_out, …)"
    generic = True
    hosted = HostedUserAttention

    def serves(self, model: nn.Module) -> bool:
        """Whether such attention is in it, and nobody replaced what one computes."""
        replaced = any(patched(module) and row_of(module) for module in model.modules())
        return not replaced and super().serves(model)

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of attention in the order in which the model holds it."""
        return [
            path
            for path, module in model.named_modules()
            if path and (isinstance(module, HostedUserAttention) or returns(module))
        ]

    def facts(self, model: nn.Module, path: str) -> Facts:
        """Describe what the names say."""
        own = model.get_submodule(path)
        drops = [m.p for m in own.modules() if isinstance(m, nn.Dropout)] or [0.0]
        options = {"attn_drop": drops[0], "proj_drop": drops[1] if len(drops) > 1 else 0.0}
        return facts_of(own, _row(path, own), _heads(own), options)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw weights as PyTorch does."""
        linear.reset_parameters()

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return queries, keys and values of a call, ``[B, h, N, d]``."""
        x, *more = [*args, *kwargs.values()]
        _refuse_more(type(attention).__name__, more, {})
        return _read(attention, _row("attention", attention), x)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections."""
        return weights_of(attention, _row("attention", attention))


def returns(attention: nn.Module) -> str:
    """Say what a module returns that is attention, ``"tokens"`` or ``"a pair"``; "" if it is none.

    It is computed with random numbers of its own; the module is left alone.
    """
    row = row_of(attention)
    known = isinstance(attention, TokenMixer) or patched(attention)
    if row is None or not _heads(attention) or known:
        return ""
    if any(type(attention.get_submodule(name)) is not nn.Linear for name in row):
        return ""
    plain = {k: v for k, v in vars(attention).items() if isinstance(v, int | float | str)}
    make = (type(attention), repr(attention), repr(plain | {"training": False}))
    if make not in _PROVED:
        _PROVED[make] = _proof(attention, row)
    return _PROVED[make]


@torch.no_grad()
def _proof(attention: nn.Module, row: tuple[str, ...]) -> str:
    """Compute calls of a copy with random weights twice, as the module does and as it is read.

    There are more tokens than windows have, in a number that none divides.
    """
    noise, pair = torch.Generator().manual_seed(0), False
    try:
        own: Any = copy.deepcopy(attention).to("cpu", torch.float64)
        for module in own.modules():
            module.training = False
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        for parameter in own.parameters():
            parameter.normal_(0.0, (parameter.shape or (1,))[-1] ** -0.5, generator=noise)
        proj = own.get_submodule(row[3])
        for shape in ((2, 101), (1, 1009)):
            x = torch.empty(*shape, own.get_submodule(row[0]).in_features, dtype=torch.float64)
            out = own(x.normal_(generator=noise))
            pair = isinstance(out, tuple) and len(out) == 2
            read = _read(own, row, x)
            wanted = proj((read.map() @ read.v).transpose(-3, -2).flatten(-2))
            if not torch.allclose(out[0] if pair else out, wanted, rtol=1e-9, atol=1e-9):
                return ""
    except FAILURES:
        return ""
    return "a pair" if pair else "tokens"


def _read(attention: Any, row: tuple[str, ...], x: Tensor) -> Reading:
    width = attention.get_submodule(row[3]).in_features // _heads(attention)
    scales = (getattr(attention, name, None) for name in ("scale", "scaling"))
    scale = next((s for s in scales if isinstance(s, float)), width**-0.5)
    return read_row(attention, row, _norm(attention)(x), width, scale)


def _norm(attention: nn.Module) -> nn.Module:
    """Return the norm that stands before the projections, one that does nothing without."""
    norm = getattr(attention, "norm", None)
    return norm if isinstance(norm, nn.LayerNorm) else nn.Identity()


def _heads(attention: nn.Module) -> int:
    found = next((getattr(attention, name) for name in HEADS if hasattr(attention, name)), 0)
    return found if isinstance(found, int) else 0


def _row(path: str, attention: nn.Module) -> tuple[str, ...]:
    refuse_adapter(path, attention)
    row = row_of(attention)
    if row is None or not returns(attention):
        raise UserError(f"{path} ({type(attention).__name__}) is no attention that keymix knows")
    return row


def _refuse_more(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what a call brings besides tokens."""
    more = [each for each in (*args, *kwargs.values()) if each is not None and each is not False]
    if more:
        raise UserError(
            f"{path} was called with {type(more[0]).__name__} besides tokens; a mixer takes none"
        )


HOSTS = (UserAttention(),)
