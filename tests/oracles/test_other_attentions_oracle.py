# SPDX-License-Identifier: Apache-2.0
"""Attentions of other papers against their equations in NumPy, a head and a query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers.attention import Attention
from timm.models.xcit import XCA
from torch import Tensor, nn
from torch.func import functional_call

from each import each
from keymix.analysis.counting import run_counting
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.nystrom import inverse
from keymix.mixers.registry import create_mixer
from mixer_cases import in_64_bits, make, numbers

pytestmark = in_64_bits

Array = np.ndarray[Any, Any]
GRID, KEYS = (3, 5), (3, 2)


def near(result: Tensor, wanted: Any, limit: float = 1e-12) -> None:
    """Hold ``result`` to ``wanted``, relative to the largest wanted number (at least 1)."""
    wanted = np.asarray(wanted)
    assert tuple(result.shape) == wanted.shape
    error = np.abs(result.detach().numpy() - wanted).max() / max(1.0, np.abs(wanted).max())
    assert error <= limit, f"off by {error:.3g}"


# ---- the equations, of one head of one image ----------------------------------------------------


class Head:
    """A head of an image: its queries, keys and values, and what the mixer learned."""

    def __init__(self, mixer: TokenMixer, index: int, x: Array, parts: dict[str, Array]) -> None:
        self.mixer, self.index, self.x = mixer, index, x
        self.parts = parts
        self.prefix = mixer.site.num_prefix_tokens
        self.weights = {name: t.numpy() for name, t in mixer.state_dict().items()}

    def __getattr__(self, name: str) -> Any:
        return self.parts[name] if name in "qkv" else self.weights[name]


def softmax(logits: Any) -> Array:
    e = np.exp(np.array(logits) - max(logits))
    made: Array = e / e.sum()
    return made


def one_map(q: Array, k: Array, scale: float | None = None) -> Array:
    """Softmax attention's map, a query at a time."""
    scale = q.shape[1] ** -0.5 if scale is None else scale
    return np.stack([softmax(scale * (k @ a)) for a in q])


def runs(old: int, new: int) -> list[list[int]]:
    """Places of each of ``new`` runs that cover ``old`` places in a row."""
    return [
        [i for i in range(old) if i < (j + 1) * old / new and i + 1 > j * old / new]
        for j in range(new)
    ]


def cells(rows: Array, grid: Grid, few: Grid) -> list[Array]:
    """Means of the rows in each cell of a coarser grid."""
    return [
        np.mean([rows[i * grid[1] + j] for i in down for j in across], axis=0)
        for down in runs(grid[0], few[0])
        for across in runs(grid[1], few[1])
    ]


def external(head: Head) -> Array:
    memory_k, memory_v = head.weights["memory_k.weight"], head.weights["memory_v.weight"]
    a = np.stack([softmax(head.q @ slot) for slot in memory_k], axis=1)  # over the tokens
    return np.stack(
        [sum(w / row.sum() * v for w, v in zip(row, memory_v.T, strict=True)) for row in a]
    )


def by_kernel(features: Callable[[Head], tuple[Array, Array]]) -> Callable[[Head], Array]:
    """Weights are products of features over their sum."""

    def equation(head: Head) -> Array:
        queries, keys = features(head)
        out = []
        for a in queries:
            weights = [float(a @ b) for b in keys]
            out.append(sum(w * v for w, v in zip(weights, head.v, strict=True)) / sum(weights))
        return np.stack(out)

    return equation


def elu_plus_1(head: Head) -> tuple[Array, Array]:
    q, k = (np.where(t > 0, t + 1, np.exp(np.minimum(t, 0))) for t in (head.q, head.k))
    return q, k


def two_softmaxes(head: Head) -> tuple[Array, Array]:
    q = np.stack([softmax(row) for row in head.q])
    return q, np.stack([softmax(channel) for channel in head.k.T], axis=1)


def random_features(head: Head) -> tuple[Array, Array]:
    def phi(x: Array) -> Array:
        x = x / x.size**0.25
        exponents = [w @ x - x @ x / 2 for w in head.directions]
        made: Array = np.exp(exponents) / math.sqrt(len(exponents))
        return made

    return np.stack([phi(x) for x in head.q]), np.stack([phi(x) for x in head.k])


def xca(head: Head) -> Array:
    q, k = ([column / np.sqrt(column @ column) for column in t.T] for t in (head.q, head.k))
    heat = float(head.temperature[head.index, 0, 0])
    out = [softmax([heat * (a @ b) for b in k]) @ head.v.T for a in q]
    return np.stack(out, axis=1)


def linformer(head: Head) -> Array:
    e = head.e
    f = head.weights.get("f", e)
    e, f = (m[head.index] if m.ndim == 3 else m for m in (e, f))
    few_k = np.stack([sum(w * t for w, t in zip(row, head.k, strict=True)) for row in e])
    few_v = np.stack([sum(w * t for w, t in zip(row, head.v, strict=True)) for row in f])
    return one_map(head.q, few_k) @ few_v


def nystrom(head: Head) -> Array:
    mixer: Any = head.mixer
    p, few, site = head.prefix, mixer.landmarks, mixer.site

    def means(rows: Array, grid: Grid) -> Array:
        if isinstance(few, int):
            return np.stack([rows[run].mean(0) for run in runs(len(rows), few)])
        return np.stack([*rows[:p], *cells(rows[p:], grid, few)])

    lq, lk = means(head.q, site.grid), means(head.k, site.key_grid or site.grid)
    a, one = one_map(lq, lk), np.eye(len(lq))
    z = a.T / (np.abs(a).sum(0).max() * np.abs(a).sum(1).max())
    for _ in range(mixer.iterations):
        az = a @ z
        z = z @ (13 * one - 15 * az + 7 * az @ az - az @ az @ az) / 4
    y = one_map(head.q, lk) @ z @ one_map(lq, head.k) @ head.v
    if "conv.weight" in head.weights:
        kernel = head.weights["conv.weight"][head.index, 0, :, 0]
        for n in range(len(y)):
            for i, w in enumerate(kernel, start=n - len(kernel) // 2):
                y[n] += w * head.v[i] if 0 <= i < len(y) else 0.0
    return y


def agent(head: Head) -> Array:
    mixer: Any = head.mixer
    p, (height, width) = head.prefix, mixer.site.grid
    agents = np.stack(cells(head.q[p:], (height, width), mixer.agents))
    y = one_map(head.q, agents) @ one_map(agents, head.k) @ head.v
    if mixer.dwc is not None:
        d = head.v.shape[1]
        own = slice(head.index * d, (head.index + 1) * d)
        kernel, shift = head.weights["dwc.weight"][own, 0], head.weights["dwc.bias"][own]
        for r, c in np.ndindex(height, width):
            here = p + r * width + c
            y[here] += shift
            for i, j in np.ndindex(3, 3):
                row, column = r + i - 1, c + j - 1
                if 0 <= row < height and 0 <= column < width:
                    y[here] += kernel[:, i, j] * head.v[p + row * width + column]
    return y


def differential(head: Head) -> Array:
    q1, k1, q2, k2 = head.lambdas
    first: float = head.mixer.lambda_init  # type: ignore[assignment]
    share, half = math.exp(q1 @ k1) - math.exp(q2 @ k2) + first, head.q.shape[1] // 2
    a1, a2 = (one_map(head.q[:, s], head.k[:, s]) for s in (slice(half), slice(half, None)))
    y = (a1 - share * a2) @ head.v
    rms = np.stack([row / np.sqrt(np.mean(row**2) + 1e-5) for row in y])
    made: Array = (1 - first) * rms * head.weights["norm.weight"]
    return made


def gated(head: Head) -> Array:
    d, gate = head.v.shape[1], head.weights["gate.weight"]
    width = len(gate) // head.mixer.site.num_heads  # d, or 1
    logits = head.x @ gate[head.index * width : (head.index + 1) * width].T
    return (
        one_map(head.q, head.k)
        @ head.v
        * np.broadcast_to(1 / (1 + np.exp(-logits)), (len(head.x), d))
    )


def expected(mixer: Any, x: Tensor, sources: Mapping[str, Callable[[Array], Array]]) -> Array:
    """What the equation of a mixer with heads makes of a batch of images."""
    equation, h, d = EQUATIONS[mixer.mixer_name], mixer.num_heads, mixer.head_dim
    state = {name: t.numpy() for name, t in mixer.state_dict().items()}
    images = []
    for tokens in x.numpy():
        projected = {}
        for i, role in enumerate(mixer.roles):
            own = slice(i * h * d, (i + 1) * h * d)
            from_, rows = (role, slice(None)) if mixer.joint is None else (mixer.joint, own)
            y = sources.get(role, np.asarray)(tokens) @ state[f"{from_}.weight"][rows].T
            projected[role] = y + state.get(f"{from_}.bias", np.zeros(9999))[rows][: h * d]
        heads = []
        for g in range(h):
            own = slice(g * d, (g + 1) * d)
            heads.append(
                equation(Head(mixer, g, tokens, {r: y[:, own] for r, y in projected.items()}))
            )
        y = np.concatenate(heads, 1) @ state["proj.weight"].T
        images.append(y + state.get("proj.bias", 0.0))
    return np.stack(images)


EQUATIONS: dict[str, Callable[[Head], Array]] = {
    "external": external,
    "linear": by_kernel(elu_plus_1),
    "efficient": by_kernel(two_softmaxes),
    "performer": by_kernel(random_features),
    "xca": xca,
    "linformer": linformer,
    "nystrom": nystrom,
    "agent": agent,
    "differential": differential,
    "gated": gated,
}
WIDE: dict[str, Any] = {"head_dim": 6, "proj_bias": False}
PLAIN = {**WIDE, "qkv_bias": False}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "external": [{"memory": 5}, {"memory": 64, **WIDE}],
    "linear": [{}, PLAIN],
    "efficient": [{}, PLAIN],
    "performer": [{}, {"num_features": 3}, {"num_features": 17, **PLAIN}],
    "xca": [{}, PLAIN],
    "linformer": [{"rows": 4, "share": share} for share in ("none", "headwise", "key_value")]
    + [{"rows": 40, **PLAIN}],
    "nystrom": [{"landmarks": few} for few in (1, 4, 7, (2, 2), (1, 5), (3, 4))]
    + [{"landmarks": (2, 3), "conv_size": 3, "iterations": 1, **PLAIN}]
    + [{"landmarks": 4, "conv_size": 33}],
    "agent": [{"agents": (2, 3)}, {"agents": (1, 1), "dwc": False}, {"agents": (3, 5), **PLAIN}],
    "differential": [{}, {"lambda_init": 0.2, **PLAIN}],
    "gated": [{}, {"gate": "headwise"}, PLAIN, {"gate": "headwise", **WIDE}],
}
CASES = {
    f"{name} {options} {prefix}": (name, options, prefix)
    for name, chosen in OPTIONS.items()
    for options in chosen
    for prefix in (0, 1, 2)
}


@each("name, options, prefix", CASES, shaped=30)
def test_it_is_its_papers_equation(name: str, options: dict[str, Any], prefix: int) -> None:
    mixer = make(name, options, grid=GRID, num_prefix_tokens=prefix)
    x = numbers(2, prefix + 15, 12)
    near(mixer(x), expected(mixer, x, {}))


class EveryOther(nn.Module):
    """Keys of the prefix and of every other column."""

    def __init__(self, role: str, prefix: int) -> None:
        super().__init__()
        self.role, self.prefix = role, prefix

    def forward(self, x: Tensor, grid: Grid | None) -> Tensor:
        return (
            x
            if self.role == "q"
            else torch.cat((x[..., : self.prefix, :], x[..., self.kept, :]), -2)
        )

    @property
    def kept(self) -> list[int]:
        return [self.prefix + i * GRID[1] + j for i in range(GRID[0]) for j in (1, 3)]


FEWER_KEYS: dict[str, dict[str, Any]] = {
    "linear": {},
    "efficient": {},
    "performer": {},
    "linformer": {"rows": 4},
    "nystrom": {"landmarks": (2, 2)},
    "agent": {"agents": (2, 3), "dwc": False},
    "differential": {},
    "gated": {},
}


@each("name, options", {name: (name, options) for name, options in FEWER_KEYS.items()}, shaped=8)
@pytest.mark.parametrize("prefix", [0, 1])
def test_it_is_its_equation_with_fewer_keys(
    name: str, options: dict[str, Any], prefix: int
) -> None:
    site = {"project": lambda role: EveryOther(role, prefix), "key_grid": KEYS}
    mixer = make(name, options, grid=GRID, num_prefix_tokens=prefix, **site)
    x, kept = numbers(2, prefix + 15, 12), [*range(prefix), *EveryOther("k", prefix).kept]
    near(mixer(x), expected(mixer, x, dict.fromkeys("kv", lambda tokens: tokens[kept])))


# ---- what else is known of them -----------------------------------------------------------------


@each("name, theirs", {"xca": ("xca", XCA), "gated": ("gated", partial(Attention, gated=True))})
def test_it_is_timms(name: str, theirs: Any) -> None:
    """Whose gate has a bias exactly where the input projections do."""
    mixer = make(name, {"qkv_bias": False}, grid=GRID)
    theirs = theirs(12, num_heads=3, qkv_bias=False).double()
    theirs.load_state_dict(mixer.state_dict(), strict=True)
    x = numbers(2, 15, 12)
    near(mixer(x), theirs(x).detach())


def convolved(mixer: TokenMixer, image: Array) -> Array:
    """A circular convolution; its kernel is the filter's inverse transform, written as a sum."""
    height, width, _ = image.shape
    real, imaginary = np.moveaxis(mixer.state_dict()["filter"].numpy(), -1, 0)
    kernel = np.zeros_like(image)
    for r, c in np.ndindex(height, width):
        for u, v in np.ndindex(height, width // 2 + 1):
            turn = 2 * math.pi * (u * r / height + v * c / width)
            twice = 1 if v in (0, width / 2) else 2  # v and width - v
            part = real[u, v] * math.cos(turn) - imaginary[u, v] * math.sin(turn)
            kernel[r, c] += twice * part / (height * width)
    out = np.zeros_like(image)
    for r, c in np.ndindex(height, width):
        for i, j in np.ndindex(height, width):
            out[r, c] += kernel[i, j] * image[(r - i) % height, (c - j) % width]
    return out


@each(
    "grid, prefix", {f"{g} {p}": (g, p) for g in ((3, 5), (4, 6), (1, 3), (2, 1)) for p in (0, 2)}
)
def test_a_global_filter_is_a_circular_convolution(grid: Grid, prefix: int) -> None:
    mixer = make("gfnet", grid=grid, num_prefix_tokens=prefix)
    x = numbers(2, prefix + math.prod(grid), 12)
    y = mixer(x)
    assert torch.equal(y[:, :prefix], x[:, :prefix])
    for tokens, mixed in zip(x.numpy(), y[:, prefix:], strict=True):
        image = tokens[prefix:].reshape(*grid, 12)
        near(mixed.unflatten(0, grid), convolved(mixer, image))


FORMED: dict[str, dict[str, Any]] = {
    "linear": {},
    "efficient": {},
    "performer": {"num_features": 5},
    "nystrom": {"landmarks": (2, 2)},
    "nystrom runs": {"landmarks": 4},
    "agent": {"agents": (2, 2), "dwc": False},
    "differential": {},
}


@each("name, options", {n: (n.split()[0], options) for n, options in FORMED.items()}, shaped=7)
@pytest.mark.parametrize("keys", [{}, {"key_grid": KEYS, "project": lambda r: EveryOther(r, 1)}])
def test_its_map_times_v_is_what_its_heads_return(
    name: str, options: dict[str, Any], keys: dict[str, Any]
) -> None:
    mixer: Any = make(name, options, grid=GRID, num_prefix_tokens=1, **keys)
    x = numbers(2, 16, 12)
    a, inputs = mixer.attention_map(x), mixer.inputs(x, GRID)
    assert a.shape == (2, 3, 16, mixer.site.num_keys)
    y = a @ inputs["v"]
    if name == "differential":
        y = mixer.norm(y) * (1 - mixer.lambda_init)
    near(mixer.attend(inputs, GRID), y.detach())
    near(mixer.attention_map(x, queries=[9, 0, 9]), a[..., [9, 0, 9], :].detach())
    if name != "nystrom":  # whose rows sum to one as far as the iteration came
        total = 1 - float(mixer.share()) if name == "differential" else 1.0
        near(a.sum(-1), np.full(a.shape[:-1], total))


SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "external": ("external", {"memory": 3}),
    "linear": ("linear", {}),
    "efficient": ("efficient", {}),
    "xca": ("xca", {}),
    "linformer": ("linformer", {"rows": 2, "share": "none"}),
    "performer": ("performer", {"num_features": 3}),
    "nystrom": ("nystrom", {"landmarks": (1, 2), "conv_size": 3}),
    "nystrom runs": ("nystrom", {"landmarks": 2, "iterations": 2}),
    "agent": ("agent", {"agents": (1, 2)}),
    "differential": ("differential", {}),
    "gated": ("gated", {}),
    "gated headwise": ("gated", {"gate": "headwise"}),
    "gfnet": ("gfnet", {}),
}


@each("name, options", SMALL, shaped=13)
def test_gradients_are_those_of_finite_differences(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, dim=4, num_heads=2, grid=(2, 3), num_prefix_tokens=1)
    names, values = zip(*mixer.named_parameters(), strict=True)

    def f(x: Tensor, *given: Tensor) -> Tensor:
        y: Tensor = functional_call(mixer, dict(zip(names, given, strict=True)), (x,))
        return y

    inputs = (numbers(1, 7, 4), *(p.detach().clone() for p in values))
    assert torch.autograd.gradcheck(f, tuple(t.requires_grad_() for t in inputs), fast_mode=True)


def softmax_with_weights_of(mixer: TokenMixer) -> TokenMixer:
    soft = create_mixer("softmax", mixer.site, dtype=torch.float64)
    soft.load_state_dict({k: v for k, v in mixer.state_dict().items() if k in soft.state_dict()})
    return soft


def test_the_mean_over_directions_is_softmax_attention() -> None:
    """Blocks of d directions are independent draws, so many of them are the mean over draws."""
    mixer: Any = make("performer", {"num_features": 4096}, grid=GRID, num_prefix_tokens=1)
    x, w = 0.3 * numbers(2, 16, 12), mixer.directions.unflatten(0, (-1, 4))
    across = w @ w.mT - torch.diag_embed(w.square().sum(-1))
    near(across, torch.zeros_like(across), 1e-5)  # orthogonal in a block
    assert abs(w.square().sum(-1).mean() - 4) < 0.2  # as long as Gaussian vectors of 4 numbers
    parts = {role: t[0, 0].detach().numpy() for role, t in mixer.inputs(x, GRID).items()}
    q, k = random_features(Head(mixer, 0, x.numpy()[0], parts))
    wanted = np.exp(parts["q"] @ parts["k"].T / 2)
    assert (np.abs(q @ k.T / wanted - 1) < 0.1).mean() > 0.95
    soft = softmax_with_weights_of(mixer)
    near(mixer.attention_map(x), soft.attention_map(x).detach(), 0.02)
    near(mixer(x), soft(x).detach(), 0.1)


@pytest.mark.parametrize("prefix", [0, 1])
@each("landmarks", {str(few): (few,) for few in (99, "1/1", (3, 5), "3x5")})
def test_as_many_landmarks_as_tokens_are_softmax_attention(landmarks: Any, prefix: int) -> None:
    mixer = make("nystrom", {"landmarks": landmarks}, grid=GRID, num_prefix_tokens=prefix)
    x, soft = numbers(2, prefix + 15, 12), softmax_with_weights_of(mixer)
    near(mixer(x), soft(x).detach())
    near(mixer.attention_map(x), soft.attention_map(x).detach())


def test_the_iteration_converges_to_the_pseudo_inverse() -> None:
    a = (numbers(2, 3, 7, 7) + 3 * torch.eye(7, dtype=torch.float64)).softmax(-1)
    off = [float((inverse(a, n) - torch.linalg.pinv(a)).abs().max()) for n in (1, 6, 25)]
    assert off[0] > off[1] > off[2]
    near(inverse(a, 25), np.linalg.pinv(a.numpy()), 1e-10)
    alike = (a / 2).repeat_interleave(2, -1).repeat_interleave(2, -2)  # of rank 7 in 14
    near(inverse(alike, 25), np.linalg.pinv(alike.numpy(), rtol=1e-10), 1e-10)


def test_tokens_that_no_slot_prefers_are_not_divided_by_zero() -> None:
    mixer = make("external", {"memory": 4}, dtype=torch.float32, grid=GRID)
    x = numbers(1, 15, 12).float()
    x[:, 3] *= 1e4  # beside whose scores those of others may round to nothing
    x[:, 4] *= -1e4
    assert mixer(x).isfinite().all()


# ---- cost ---------------------------------------------------------------------------------------

C, H, D, P, N, M = 12, 3, 4, 1, 16, 16
ATTEND = 4 * N * C**2
COSTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "external": ("external", {"memory": 5}, 2 * N * C**2 + 2 * N * 5 * C),
    "linear": ("linear", {}, ATTEND + 2 * N * C**2 / H + N * C),
    "efficient": ("efficient", {}, ATTEND + 2 * N * C**2 / H),
    "xca": ("xca", {}, ATTEND + 2 * N * C**2 / H),
    "linformer": ("linformer", {"rows": 5}, ATTEND + 2 * M * 5 * C + 2 * N * 5 * C),
    "performer": ("performer", {"num_features": 5}, ATTEND + 4 * N * 5 * C + N * 5 * H),
    "nystrom": (
        "nystrom",
        {"landmarks": 5, "iterations": 3, "conv_size": 3},
        ATTEND + 2 * (N + M) * 5 * C + 5**2 * C * (2 + 4 * 5 * 3 / D) + 3 * N * C,
    ),
    "agent": ("agent", {"agents": (1, 5)}, ATTEND + 2 * (N + M) * 5 * C + 9 * (N - P) * C),
    "differential": ("differential", {}, ATTEND + 2 * N * M * C + D),
    "gated": ("gated", {}, ATTEND + N * C**2 + 2 * N * M * C),
    "headwise": ("gated", {"gate": "headwise"}, ATTEND + N * C * H + 2 * N * M * C),
    "gfnet": ("gfnet", {}, 2 * (N - P) * C * math.log2(N - P)),
}


@each("name, options, wanted", COSTS, shaped=12)
def test_its_cost_is_the_formula_of_its_docstring(
    name: str, options: dict[str, Any], wanted: float
) -> None:
    mixer = make(name, options, grid=GRID, num_prefix_tokens=P)
    counted = run_counting(mixer, numbers(1, N, C))
    assert abs(sum(counted.by_path.values()) - wanted) < 1  # the logarithm is rounded
    assert not counted.uncounted


@each("name", {name: (name,) for name in ("nystrom", "agent")})
def test_its_default_is_linear_in_tokens(name: str) -> None:
    """Of 256 and 1,024 tokens, both more than 64 landmarks and 49 agents."""
    few, many = (
        sum(run_counting(make(name, grid=(s, s)), numbers(1, s * s, C)).by_path.values())
        for s in (16, 32)
    )
    assert many <= 4 * few
