# SPDX-License-Identifier: Apache-2.0
"""Every faster path of attention against the reference, on 500 drawn shapes and options."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from keymix.mixers.base import explain_backend
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, list_mixers, mixer_options
from keymix.ops.attention import blocked
from mixer_cases import gradients, stir
from tolerances import close

CASES = 500
PARTS = 20
NAMES = [name for name in list_mixers() if "backend" in mixer_options(name)]


@dataclass(frozen=True)
class Case:
    """One draw: a mixer on a faster path, and the tokens that it gets."""

    name: str
    backend: str
    site: dict[str, Any]
    options: dict[str, Any]
    lead: tuple[int, ...]
    grid: tuple[int, int]  # of the tokens, the site's or another
    bias: tuple[int, ...] | None  # leading axes of an additive bias
    learned_bias: bool
    strided: bool  # tokens that are no contiguous block of memory
    training: bool
    dtype: torch.dtype
    block: int  # entries of a block of rows


def draw(seed: int) -> Case:
    """Draw a case that its path can serve."""
    random = Random(seed)
    name = random.choice(NAMES)
    known = mixer_options(name)
    # what a norm of one head's map hands back is rounding: it undoes any factor of the map
    heads = random.choice([2, 3, 5] if "norm" in known else [1, 2, 3, 5])
    width = random.choice([1, 3, 4, 7])
    side = random.choice([1, 2, 3, 4, 6]), random.choice([1, 2, 3, 5, 7])
    windows = random.choice([1, 1, 1, 2, 3])
    site = {
        "dim": heads * width if random.random() < 0.7 else random.choice([5, 9]),
        "num_heads": heads,
        "grid": side,
        "num_prefix_tokens": random.choice([0, 0, 1, 3]),
        "windows": windows,
    }
    options: dict[str, Any] = {"head_dim": width, "qkv_bias": random.random() < 0.7}
    options["scale"] = random.choice(["head_dim", "dim", False])
    # logits that are not scaled down round more the larger they are made
    taus = [False, False, True, *([0.5] if options["scale"] else [])]
    options["temperature"] = random.choice(taus)
    if "activation" in known:
        options["activation"] = random.choice(["softmax", "softmax", "relu", "gelu", "star_relu"])
    if "norm" in known:
        options["norm"] = random.choice(["batch", "layer"])
    if "kernel_size" in known:
        options["kernel_size"] = random.choice([1, 3, 5])
    if "pos_dim" in known and windows == 1:
        options["pos_dim"] = random.choice([0, 3])
    if "resize" in known and windows == 1:
        options["resize"] = random.choice([None, "interpolate", "pool_values"])
    if "key_grid" in known and random.random() < 0.4:
        options["key_grid"] = random.choice(["1/4", "1/2", (2, 3)])
        options |= {"resize": None} if "resize" in known else {}
    elsewhere = bool(options.get("resize") or options.get("key_grid")) and windows == 1
    grid = (random.randint(1, 5), random.randint(1, 5)) if elsewhere else side
    bias = random.choice([None, None, (), (1,), (heads,), (2, 1)])
    narrow = "norm" not in known and bool(options["scale"]) and random.random() < 0.4
    return Case(
        name=name,
        backend=random.choice(["blocked", "sdpa"]),
        site=site,
        options=options,
        lead=(2, windows) if windows > 1 else random.choice([(1,), (2,), (3,), (2, 2)]),
        grid=grid,
        bias=bias,
        learned_bias=random.random() < 0.3,
        strided=random.random() < 0.3,
        training=random.random() < 0.7,
        # a norm over heads multiplies rounding by up to 316: that of float32, and that of the sums
        # of its statistics, of which there are as many as blocks; so do logits without a scale
        dtype=torch.float32 if narrow else torch.float64,
        block=random.choice([40 if "norm" in known else 1, 40, 300, 2**21]),
    )


def made(case: Case, backend: str) -> MapMixer:
    torch.manual_seed(0)
    wide = {} if backend == "reference" else {"dtype": case.dtype}
    mixer = create_mixer(case.name, **case.site, **{**case.options, "backend": backend})
    assert isinstance(mixer, MapMixer)
    stir(mixer)
    return mixer.to(**{"dtype": torch.float64, **wide}).train(case.training)


def serves(case: Case, mixer: MapMixer) -> bool:
    """Whether a path is this mixer's at all; what does not is drawn again."""
    if case.backend == "sdpa":
        return mixer.plain_softmax is None
    return mixer.whole_maps is None


@cache
def cases() -> list[Case]:
    found: list[Case] = []
    seed = 0
    while len(found) < CASES:
        seed += 1
        case = draw(seed)
        if serves(case, made(case, "reference")):
            found.append(case)
    return found


def tokens_of(case: Case, mixer: MapMixer) -> Tensor:
    noise = torch.Generator().manual_seed(1)
    count = mixer.site.num_prefix_tokens + case.grid[0] * case.grid[1]
    shape = (*case.lead, count, mixer.site.dim)
    if not case.strided:
        return torch.randn(shape, generator=noise, dtype=torch.float64)
    wide = torch.randn((*shape[:-1], 2 * shape[-1]), generator=noise, dtype=torch.float64)
    return wide[..., ::2]


def biased(case: Case, mixer: MapMixer, x: Tensor) -> Tensor | None:
    if case.bias is None or not mixer.claims.maskable:
        return None
    noise = torch.Generator().manual_seed(2)
    keys = mixer.inputs(x, case.grid)["v"].shape[-2]
    lead = case.bias if len(case.bias) < 2 else (*case.lead[-1:], 1)
    shape = (*lead, x.shape[-2], keys)
    return torch.randn(shape, generator=noise, dtype=torch.float64)


def hold(case: Case) -> None:
    """Compare output and gradients of a case with the reference in float64."""
    fast, plain = made(case, case.backend), made(case, "reference")
    x = tokens_of(case, plain)
    bias = biased(case, plain, x)
    assert explain_backend(fast, shape=x.shape).name == case.backend
    results = []
    for mixer in (fast, plain):
        dtype = mixer.proj.weight.dtype
        own = None if bias is None else bias.to(dtype).requires_grad_(case.learned_bias)
        y, grads = gradients(mixer, x.to(dtype), grid=case.grid, bias=own)
        results.append((y, grads))
    (y, grads), (wanted, expected) = results
    close(y, wanted, case.dtype)
    assert grads.keys() == expected.keys()
    for key, grad in grads.items():
        nothing = key in plain.zero_gradients or not expected[key].isfinite().all()
        if not nothing:
            close(grad, expected[key], case.dtype)


SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in range(2, PARTS)]


@pytest.mark.parametrize("part", [0, 1, *SLOW])
def test_a_faster_path_is_the_reference(
    part: int, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in cases()[part::PARTS]:
        monkeypatch.setattr(blocked, "BLOCK", case.block)
        try:
            hold(case)
        except Exception as error:
            error.add_note(repr(case))
            raise


def test_the_draws_reach_every_mixer_path_and_geometry() -> None:
    drawn = cases()
    assert len(drawn) == CASES
    paths = Counter((case.name, case.backend) for case in drawn)
    for name in NAMES:
        assert paths[name, "blocked"] >= 10
    assert sum(count for (_, path), count in paths.items() if path == "sdpa") >= 50
    for few in ("key_grid", "activation", "resize", "temperature"):
        assert sum(bool(case.options.get(few)) for case in drawn) >= 50
    assert sum(case.site["num_prefix_tokens"] > 0 for case in drawn) >= 50
    assert sum(case.strided for case in drawn) >= 50
    assert sum(case.dtype == torch.float32 for case in drawn) >= 50
