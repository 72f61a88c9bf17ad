# SPDX-License-Identifier: Apache-2.0
"""What Table 7 is read off: checked against what the mixers' numbers do when tokens move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from each import together
from keymix.analysis.mixer_alone import SIDES, WeightFacts, sized_mixers, trace, weight_facts
from keymix.mixers.base import TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, list_mixers

DIM, HEADS = 12, 3
ROWS, COLUMNS = SIDES


def facts(name: str) -> WeightFacts:
    return weight_facts(sized_mixers(name, dim=DIM, num_heads=HEADS)[0])


def made(name: str) -> TokenMixer:
    mixer = create_mixer(name, dim=DIM, num_heads=HEADS, grid=SIDES, dtype=torch.float64).eval()
    return mixer.double()


def noise(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, ROWS * COLUMNS, DIM, generator=generator, dtype=torch.float64)


def affine(f: Callable[[Tensor], Tensor]) -> bool:
    """Whether a second difference vanishes, as it does where no two factors are tokens'."""
    x, u, v = (noise(seed) for seed in (1, 2, 3))
    second = f(x + u + v) - f(x + u) - f(x + v) + f(x)
    return bool(second.abs().max() < 1e-9 * f(x).abs().max().clamp(min=1))


def logits(mixer: MapMixer) -> Callable[[Tensor], Tensor]:
    return lambda x: mixer.logits(mixer.inputs(x, SIDES), SIDES)


@together
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_dynamic_weights_are_where_the_numbers_are_not_affine(name: str) -> None:
    mixer, found = made(name), facts(name)
    if isinstance(mixer, MapMixer):
        # a key that is learned leaves the logits affine; the map times the values never is
        assert found.dynamic == 1 + (not affine(logits(mixer)))
    # a memory's softmax stands between learned matrices, as an activation does
    assert affine(mixer) == (found.dynamic == 0 and name != "external")


def reach(f: Callable[[Tensor], Tensor], moved: int) -> tuple[set[int], Tensor]:
    """Tokens whose rows change when one token moves, and by how much each changes."""
    x, step = noise(1), torch.zeros(1, ROWS * COLUMNS, DIM, dtype=torch.float64)
    step[0, moved] = noise(2)[0, 0]
    change = (f(x + step) - f(x)).transpose(-2, -1).flatten(0, -2).T  # [N, anything]
    return set(change.abs().amax(-1).gt(1e-9).nonzero().flatten().tolist()), change


def around(token: int) -> set[int]:
    row, column = divmod(token, COLUMNS)
    return {(row + i) * COLUMNS + column + j for i in (-1, 0, 1) for j in (-1, 0, 1)}


@pytest.mark.parametrize("name", ["sep_conv", "conv_static_key"])
def test_a_kernel_slides_alike_over_the_grid(name: str) -> None:
    assert facts(name).kernels == ("3x3",)
    mixer = made(name)
    f = logits(mixer) if isinstance(mixer, MapMixer) else mixer
    here, there = 2 * COLUMNS + 2, 3 * COLUMNS + 4
    (reached, change), (others, other) = reach(f, here), reach(f, there)
    assert reached == around(here)
    assert others == around(there)
    torch.testing.assert_close(change[sorted(reached)], other[sorted(others)])


def test_static_keys_have_no_kernel() -> None:
    assert facts("static_key").kernels == ()
    mixer = made("static_key")
    assert isinstance(mixer, MapMixer)
    token = 2 * COLUMNS + 2
    assert reach(logits(mixer), token)[0] == {token}  # a logit depends on its own query alone


Weights = dict[str, Tensor]


def written_in_place(x: Tensor, w: Weights) -> Tensor:
    copy = torch.zeros_like(w["square"]).expand(len(x), 4, 4).clone()
    copy.copy_(x)
    return copy @ x


PRODUCTS: dict[str, Callable[[Tensor, Weights], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("bnc,bmc->bnm", x, x) @ x,
    "fused": lambda x, w: F.scaled_dot_product_attention(x, x, x),
    "fused, learned key": lambda x, w: F.scaled_dot_product_attention(x, w["square"][None], x),
    "added": lambda x, w: torch.baddbmm(x, x, w["square"].expand(len(x), 4, 4)),
    "written in place": written_in_place,
    "elementwise": lambda x, w: x * x,
    "kernel of the tokens": lambda x, w: F.conv1d(x.transpose(0, 1), x.transpose(0, 1)),
    "1x1": lambda x, w: F.conv1d(x, w["square"][..., None]),
    "3x1": lambda x, w: F.conv2d(x[..., None], w["kernel"], groups=4).flatten(-2),
}


class Product(nn.Module):
    """A product in a form that a mixer of one's own may take."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.square = nn.Parameter(torch.ones(4, 4))
        self.kernel = nn.Parameter(torch.ones(4, 1, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return PRODUCTS[self.kind](x, {"square": self.square, "kernel": self.kernel})


@together
@pytest.mark.parametrize(
    ("kind", "dynamic", "kernels"),
    [
        ("einsum", 2, ()),
        ("fused", 2, ()),
        ("fused, learned key", 1, ()),
        ("added", 0, ()),
        ("written in place", 1, ()),
        ("elementwise", 0, ()),
        ("kernel of the tokens", 1, ()),
        ("1x1", 0, ()),
        ("3x1", 0, ("3x1",)),
    ],
)
def test_products_are_reported_by_their_factors(
    kind: str, dynamic: int, kernels: tuple[str, ...]
) -> None:
    x = torch.randn(1, 4, 4)
    assert trace(Product(kind), x) == WeightFacts(dynamic=dynamic, kernels=kernels)


def test_the_random_state_stays() -> None:
    state = torch.get_rng_state()
    facts("random")
    assert torch.equal(torch.get_rng_state(), state)
