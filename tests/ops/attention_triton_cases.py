# SPDX-License-Identifier: Apache-2.0
"""Attention of many shapes, by kernels and by the plain formula; a program for the interpreter.

``TRITON_INTERPRET=1 python tests/ops/attention_triton_cases.py`` runs all cases on poisoned memory
and prints a line of JSON per case: its name, which kernels ran, and what was wrong.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tolerances import close

TILE = 16  # the least that a kernel takes, so that small maps have several tiles


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of ``attention``, or of ``conv_attention`` where the side is given."""

    grid: tuple[int, int]
    keys: int
    lead: tuple[int, ...] = (2,)
    heads: int = 2
    width: int = 3
    values: int = 3
    side: int | None = None
    own: int = 0  # leading axes that have keys of their own
    activation: str = "softmax"
    bias: tuple[int, ...] | None = None
    masked: bool = False  # minus infinity in the bias, but for the last keys
    diagonal: int | None = None
    scale: str = "number"  # or "learned"
    dtype: str = "float64"
    deterministic: bool = False
    prefix: int = 0  # rows before the queries, as of a view of all tokens

    @property
    def queries(self) -> int:
        return self.grid[0] * self.grid[1]

    def inputs(self) -> dict[str, Tensor]:
        """What gets a gradient, in float64."""
        d = torch.float64
        h, m, c = self.heads, self.keys, self.width
        own = self.lead[len(self.lead) - self.own :]
        groups = math.prod(own) * h
        tokens = torch.randn(*self.lead, self.prefix + self.queries, h, c, dtype=d)
        made = {
            "q": tokens.transpose(-3, -2)[..., self.prefix :, :],
            "v": torch.randn(*self.lead, m, h, self.values, dtype=d).transpose(-3, -2),
        }
        if self.side is None:
            made["k"] = torch.randn(*own, h, m, c, dtype=d)
        else:
            made["weight"] = torch.randn(groups * m, c, self.side, self.side, dtype=d) / self.side
            made["shift"] = torch.randn(groups * m, dtype=d)
        if self.bias is not None:
            made["bias"] = torch.randn(self.bias, dtype=d)
            if self.masked:
                made["bias"][..., : TILE + 1] = -math.inf  # the whole first tile
        if self.activation == "star_relu":
            made |= {name: torch.rand(1, dtype=d) for name in ("factor", "added")}
        if self.scale == "learned":
            made["scale"] = torch.tensor(0.7, dtype=d)
        return made

    def call(self, given: dict[str, Tensor], path: Any) -> Tensor:
        """Call a path's functions."""
        how: dict[str, Any] = {
            "scale": given.get("scale", 0.7),
            "bias": given.get("bias"),
            "diagonal": self.diagonal,
            "activation": self.activation,
            "learned": [given[name] for name in ("factor", "added") if name in given],
        }
        if self.side is None:
            out, _ = path.attention(given["q"], given["k"], given["v"], **how)
        else:
            filters = (given["weight"], given["shift"])
            out, _ = path.conv_attention(given["q"], *filters, given["v"], grid=self.grid, **how)
        return out

    def plain(self, given: dict[str, Tensor]) -> Tensor:
        """Compute the equation."""
        q, v = given["q"], given["v"]
        if self.side is None:
            logits = q @ given["k"].transpose(-2, -1)
        else:
            groups = len(given["weight"]) // self.keys
            image = q.transpose(-2, -1).reshape(-1, groups * self.width, *self.grid)
            logits = F.conv2d(
                image, given["weight"], given["shift"], padding=self.side // 2, groups=groups
            )
            logits = logits.reshape(*self.lead, self.heads, self.keys, -1).transpose(-2, -1)
        logits = logits * given.get("scale", 0.7)
        if "bias" in given:
            logits = logits + given["bias"]
        if self.diagonal is not None:
            n, m = (torch.arange(size) for size in logits.shape[-2:])
            lowest = torch.finfo(logits.dtype).min
            logits = logits.masked_fill(n[:, None] + self.diagonal == m, lowest)
        if self.activation == "star_relu":
            maps = given["factor"] * logits.relu().square() + given["added"]
        else:
            act: Callable[[Tensor], Tensor] = getattr(F, self.activation, F.softmax)
            maps = logits.softmax(-1) if self.activation == "softmax" else act(logits)
        return maps @ v

    def check(self, device: str = "cpu") -> None:
        """Hold output and every gradient of the kernels to the equation in float64."""
        from keymix.ops.attention.triton import attention

        dtype = getattr(torch, self.dtype)
        torch.use_deterministic_algorithms(self.deterministic)
        given = self.inputs()
        # what narrow inputs hold, so that their own rounding is no error
        exact = {name: t.to(dtype).double().requires_grad_() for name, t in given.items()}
        cast = {n: t.detach().to(device, dtype).requires_grad_() for n, t in exact.items()}
        wanted, found = self.plain(exact), self.call(cast, attention)
        weigh = torch.randn_like(wanted).to(dtype)
        (wanted * weigh).sum().backward()
        (found * weigh.to(device)).sum().backward()
        close(found.cpu(), wanted, dtype)
        assert found.dtype == dtype
        for name, leaf in cast.items():
            assert leaf.grad is not None, name
            assert exact[name].grad is not None
            try:
                close(leaf.grad.cpu(), exact[name].grad, dtype)
            except AssertionError as error:
                raise AssertionError(f"gradient of {name}: {error}") from error


def drawn(seed: int) -> Case:
    """Draw a case."""
    draw = random.Random(seed)
    lead = draw.choice([(), (1,), (2,), (2,), (1, 2)])
    h, keys = draw.choice([1, 1, 2, 3]), draw.choice([1, 5, 9, 17, 20])
    grid = draw.choice([(1, 7), (3, 5), (4, 5), (3, 7), (5, 2), (1, 1)])
    n = grid[0] * grid[1]
    bias = draw.choice([None, None, (n, keys), (h, 1, keys), (n, 1), (), (*lead, 1, n, keys)])
    side = draw.choice([None, None, 1, 3])
    own = draw.choice([0, len(lead), min(1, len(lead))]) if side is None else int(len(lead) > 1)
    activation = draw.choice(["softmax", "softmax", "softmax", "gelu", "relu", "star_relu"])
    return Case(
        grid=grid,
        keys=keys,
        lead=lead,
        heads=h,
        width=draw.choice([1, 3, 8, 17]),
        values=draw.choice([1, 4, 17]),
        side=side,
        own=own,
        activation=activation,
        bias=bias,
        diagonal=draw.choice([None, None, 0, 2]) if activation == "softmax" else None,
        scale=draw.choice(["number", "learned"]),
        prefix=draw.choice([0, 0, 2]),
    )


CASES: dict[str, Case] = {
    **{f"drawn {seed}": drawn(seed) for seed in range(26)},
    "static key of an image": Case(grid=(4, 5), keys=20),
    "fewer keys than queries": Case(grid=(4, 5), keys=3, side=3, heads=1),
    "more keys than queries": Case(grid=(2, 3), keys=35, side=3, heads=1, lead=(1,)),
    "5 x 5": Case(grid=(3, 4), keys=5, side=5, heads=1, lead=(1,)),
    "one tap at a time": Case(grid=(4, 5), keys=5, side=3, heads=1, deterministic=True),
    "windows": Case(grid=(2, 3), keys=6, side=3, lead=(1, 2), own=1, bias=(2, 1, 6, 6)),
    "masked by minus infinity": Case(grid=(3, 7), keys=20, bias=(21, 20), masked=True),
    "a single key under a diagonal": Case(grid=(1, 1), keys=1, diagonal=0),
    "heads are wider than a tile": Case(grid=(3, 3), keys=9, width=33, values=40),
    **{
        f"{dtype}, side {side}": Case(
            grid=(4, 5), keys=17, side=side, dtype=dtype, width=8, heads=1
        )
        for dtype in ("float32", "float16")  # products of bfloat16 are none in the interpreter
        for side in (None, 3)
    },
}

MIXERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softmax": ("softmax", {"temperature": True}, {"grid": (3, 6)}),
    "static_key": ("static_key", {"mask_diagonal": True}, {"grid": (3, 3), "num_prefix_tokens": 2}),
    "static_key, star_relu": ("static_key", {"activation": "star_relu"}, {"num_prefix_tokens": 1}),
    "static_key, windows": ("static_key", {}, {"grid": (2, 3), "windows": 2}),
    "static_key, pooled values": ("static_key", {"resize": "pool_values"}, {"call": (4, 5)}),
    "conv_static_key": (
        "conv_static_key",
        {"mask_diagonal": True, "temperature": True},
        {"grid": (2, 4), "num_prefix_tokens": 2},
    ),
    "conv_static_key, gelu": ("conv_static_key", {"activation": "gelu"}, {"num_prefix_tokens": 1}),
    "conv_static_key, pooled values": (
        "conv_static_key",
        {"resize": "pool_values"},
        {"call": (4, 5), "num_prefix_tokens": 1},
    ),
    "key_value": ("key_value", {"pos_dim": 5}, {"grid": (3, 6), "num_prefix_tokens": 1}),
    "re_attention": ("re_attention", {"mask_diagonal": True}, {"grid": (3, 6)}),
    "re_attention, eval": (
        "re_attention",
        {"temperature": True, "map_scale": True},
        {"grid": (3, 6), "training": False},
    ),
    "re_attention, layer": (
        "re_attention",
        {"norm": "layer", "temperature": True},
        {"num_heads": 3, "num_prefix_tokens": 1},
    ),
    "re_attention, one head": (
        "re_attention",
        {"norm": "layer", "theta_bias": False},
        {"num_heads": 1},
    ),
    "static_key_re_attention": ("static_key_re_attention", {}, {"num_prefix_tokens": 1}),
    "static_key_re_attention, windows": (
        "static_key_re_attention",
        {"norm": "layer"},
        {"grid": (2, 3), "windows": 2},
    ),
}


def check_mixer(name: str, options: dict[str, Any], site: dict[str, Any]) -> None:
    """Hold a mixer by kernels to itself by the plain equation."""
    from keymix.mixers.base import explain_backend
    from mixer_cases import make

    where = {"dim": 6, "num_heads": 2, **site}
    grid, training = where.pop("call", None), where.pop("training", True)
    mixers = [make(name, {**options, "backend": b}, **where) for b in ("triton", "reference")]
    assert explain_backend(mixers[0]).name == "triton"
    site_of = mixers[0].site
    tokens = site_of.num_tokens
    if grid is not None:
        tokens = site_of.num_prefix_tokens + grid[0] * grid[1]
    lead = (1, where["windows"]) if "windows" in where else (2,)
    x = torch.randn(*lead, tokens, site_of.dim, dtype=torch.float64)
    bias = torch.randn(tokens, 1, dtype=torch.float64)
    found = []
    for mixer in mixers:
        torch.manual_seed(1)
        mixer.train(training)
        given = x.clone().requires_grad_()
        y = mixer(given, grid=grid, bias=bias)
        (y * torch.randn_like(y)).sum().backward()
        grads = {key: p.grad for key, p in mixer.named_parameters()}
        found.append({"output": y, "x": given.grad, **grads})
    for key, wanted in found[1].items():
        got = found[0][key]
        assert got is not None, key
        assert wanted is not None
        nothing = key in mixers[1].zero_gradients  # here the reference has its rounding
        close(got, torch.zeros_like(got) if nothing else wanted)
    for mine, theirs in zip(mixers[0].buffers(), mixers[1].buffers(), strict=True):
        close(mine, theirs, torch.float64)  # running statistics, moved by every pass in training


def check_again(name: str, options: dict[str, Any], many: bool) -> None:
    """Hold gradients of gradients, or many gradients at once, to those of the plain equation."""
    from mixer_cases import make

    found = []
    for backend in ("triton", "reference"):
        mixer = make(name, {**options, "backend": backend}, dim=4, num_heads=2, grid=(2, 2))
        torch.manual_seed(1)
        x = torch.randn(1, mixer.site.num_tokens, 4, dtype=torch.float64, requires_grad=True)
        y = mixer(x)
        weigh = torch.randn(3 if many else 1, *y.shape, dtype=torch.float64)
        if many:
            found.append(
                torch.autograd.grad(y, (x, mixer.proj.weight), weigh, is_grads_batched=True)
            )
            continue
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        leaves = [p for p in (x, *mixer.parameters()) if p.requires_grad]
        found.append(torch.autograd.grad((first * weigh[0]).sum(), leaves, allow_unused=True))
    for got, wanted in zip(*found, strict=True):
        if wanted is None:
            assert got is None or not got.any()
        else:
            close(got, wanted)


AGAIN: dict[str, tuple[str, dict[str, Any], bool]] = {
    f"{name}, {what}": (name, options, what == "many gradients")
    for name, options in {
        "static_key": {"activation": "star_relu"},
        "conv_static_key": {},
        "re_attention": {},
    }.items()
    for what in ("gradients of gradients", "many gradients")
}


@dataclass
class Watch:
    """Which kernels ran."""

    ran: list[str] = field(default_factory=list)

    def over(self, launch: Callable[..., None]) -> Callable[..., None]:
        def launched(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
            self.ran.append(kernel.fn.__name__)
            launch(kernel, programs, *args, **options)

        return launched


def poison() -> None:
    """Let every fresh allocation of the kernels' callers be NaN."""
    full = torch.Tensor.new_full

    def new_empty(self: Tensor, *size: Any, **options: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return full(self, tuple(shape), math.nan, **options)

    torch.Tensor.new_empty = new_empty  # type: ignore[method-assign, assignment]


def main() -> int:
    """Run all cases."""
    from keymix.ops.attention.triton import attention, launch, mixing

    launch.LARGEST_TILE = TILE
    watch = Watch()
    attention.launch = mixing.launch = watch.over(launch.launch)
    poison()
    checks: dict[str, Callable[[], None]] = {name: case.check for name, case in CASES.items()}
    for name, given in MIXERS.items():
        checks[name] = partial(check_mixer, *given)
    for name, again in AGAIN.items():
        checks[name] = partial(check_again, *again)
    for name, check in checks.items():
        torch.manual_seed(0)
        watch.ran.clear()
        error = ""
        try:
            check()
        except Exception:  # whatever went wrong with one case, the others run
            error = traceback.format_exc()
        line = {"name": name, "ran": watch.ran, "error": error}
        sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    sys.exit(main())
