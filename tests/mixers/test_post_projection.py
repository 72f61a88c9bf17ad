# SPDX-License-Identifier: Apache-2.0
"""What a host finishes heads with: every mixer with heads honours it, forward, map and gradient."""

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, get_mixer_class, list_mixers
from keymix.mixers.site import Site
from tolerances import close, differs

MAPPED = [
    name for name in list_mixers(domain="dense") if issubclass(get_mixer_class(name), MapMixer)
]


class Gate(nn.Module):
    """A gate of the tokens on what the heads gathered."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        gated: Tensor = y * self.linear(x).sigmoid()
        return gated


def projected(role: str) -> nn.Module | None:
    if role == "out":
        return Gate(12)
    return nn.LayerNorm(4) if role in "qk" else None


def built(name: str, made: object = projected, **options: bool) -> MapMixer:
    site = Site(dim=12, num_heads=3, grid=(2, 3), num_prefix_tokens=1, post_projection=made)
    mixer = create_mixer(name, site=site, dtype=torch.float64, **options)
    assert isinstance(mixer, MapMixer)
    return mixer.double().eval()


@together
@pytest.mark.parametrize("name", MAPPED)
def test_every_module_that_finishes_heads_acts_and_learns(name: str) -> None:
    mixer = built(name)
    assert mixer.post_projection is not None
    assert set(mixer.post_projection) == {*mixer.roles, "out"} - {"v"}
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    before = mixer(x)
    (before * torch.randn_like(before)).sum().backward()
    for role, module in mixer.post_projection.items():
        grads = [p.grad for p in module.parameters()]
        assert all(g is not None for g in grads), role
        assert any(float(g.abs().max()) > 0 for g in grads if g is not None), role
        kept = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p))
        assert differs(mixer(x), before), role
        with torch.no_grad():
            for p, old in zip(module.parameters(), kept, strict=True):
                p.copy_(old)


@together
@pytest.mark.parametrize("name", MAPPED)
def test_a_host_that_finishes_nothing_leaves_the_mixer_as_it_is(name: str) -> None:
    plain, finished = built(name, None), built(name, lambda role: None)
    finished.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    close(finished(x), plain(x))


def test_softmax_with_norms_and_a_gate_is_the_equation() -> None:
    mixer = built("softmax")
    assert mixer.post_projection is not None
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (
        t.reshape(2, 7, 3, 4).transpose(1, 2) for t in mixer.get_submodule("qkv")(x).chunk(3, -1)
    )
    q, k = mixer.post_projection["q"](q), mixer.post_projection["k"](k)
    maps = (q @ k.mT / 2).softmax(-1)
    y = (maps @ v).transpose(1, 2).reshape(2, 7, 12)
    close(mixer(x), mixer.proj(mixer.post_projection["out"](y, x)))
    close(mixer.attention_map(x), maps)


@pytest.mark.parametrize("query_proj", [True, False])
def test_a_static_key_is_not_finished_but_its_queries_are(query_proj: bool) -> None:
    mixer = built("static_key", query_proj=query_proj)
    assert mixer.post_projection is not None
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q = mixer.get_submodule("q")(x) if query_proj else x
    q = q.reshape(2, 7, 3, 4).transpose(1, 2)
    key = mixer.get_parameter("key")
    close(mixer.attention_map(x), (mixer.post_projection["q"](q) @ key.mT / 2).softmax(-1))
