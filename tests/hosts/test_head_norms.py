# SPDX-License-Identifier: Apache-2.0
"""Norms of queries and keys, of the output, and gates go over to mixers with their weights."""

from __future__ import annotations

import copy
import pickle
from functools import partialmethod
from typing import Any

import pytest
import torch
from timm.layers import Attention, RmsNorm
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.head_norms import HeadNorms
from keymix.hosts.layers import find_layers
from keymix.mixers.registry import list_mixers
from keymix.models import load_weights
from mixer_cases import stir
from tolerances import close

GATED = type(
    "Gated", (Attention,), {"__init__": partialmethod(Attention.__init__, gated=True)}
)  # an argument that timm's block does not hand on
KINDS: dict[str, dict[str, Any]] = {
    "heads": {"qk_norm": True},
    "output": {"scale_attn_norm": True},
    "gate": {"attn_layer": GATED},
    "all": {"qk_norm": True, "scale_attn_norm": True, "attn_layer": GATED, "norm_layer": RmsNorm},
}
EXTRAS = {
    "heads": ("q_norm", "k_norm"),
    "output": ("norm",),
    "gate": ("gate",),
    "all": ("q_norm", "k_norm", "norm", "gate"),
}
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def vit(kind: str) -> Any:
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2}
    model = VisionTransformer(**sizes, num_heads=3, num_classes=5, **KINDS[kind])
    stir(model)
    return model.double().eval()


@pytest.mark.parametrize("kind", KINDS)
def test_softmax_with_the_hosts_weights_is_the_host(kind: str) -> None:
    theirs = vit(kind)
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    for a, b in zip(theirs.blocks, mine.blocks, strict=True):
        own = {k: v for k, v in a.attn.state_dict().items() if k.startswith(("qkv", "proj"))}
        missing = b.attn.mixer.load_state_dict(own, strict=False).missing_keys
        assert all(name.startswith("post_projection.") for name in missing)
    close(mine(X), theirs(X))
    loaded = load_weights(mine, {k: v.flip(0) for k, v in theirs.state_dict().items()})
    assert loaded.missing == loaded.unused == ()


@pytest.mark.slow
@together
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_every_mixer_sits_copies_and_says_what_it_loses(kind: str, name: str) -> None:
    model = vit(kind)
    put_mixers(model, name)
    assert [place.extras for place in find_host(model).places(model)] == [EXTRAS[kind]] * 2
    y = model.double()(X)
    y.sum().backward()
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), y)
    for mixer in find_mixers(model).values():
        projected: Any = getattr(mixer, "post_projection", None)
        roles = {*getattr(mixer, "roles", ()), "out"} & {
            "heads": {"q", "k"},
            "output": {"out"},
            "gate": {"out"},
            "all": {"q", "k", "out"},
        }[kind]
        assert set(projected or ()) == (roles if hasattr(mixer, "roles") else set())


def test_weights_of_norms_stay_through_one_mixer_after_another() -> None:
    model = vit("all")
    model.blocks[0].attn.k_norm.weight.data.fill_(7.0)
    model.blocks[0].attn.q_norm.weight.data.fill_(3.0)
    put_mixers(model, "static_key")
    mixer: Any = model.blocks[0].attn.mixer
    assert mixer.post_projection.q.norm.weight[0].item() == 3.0
    mixer.post_projection.q.norm.weight.data.fill_(4.0)
    put_mixers(model.float(), "softmax")
    after: Any = model.blocks[0].attn.mixer
    assert after.post_projection.q.norm.weight[0].item() == 4.0, (
        "as it was trained in the mixer before"
    )
    assert after.post_projection.k.norm.weight[0].item() == 7.0, "as the host had it"
    assert after.post_projection.k.norm.weight.dtype == torch.float32
    mixer.post_projection.q.norm.weight.data.fill_(9.0)
    assert after.post_projection.q.norm.weight[0].item() == 4.0, "a copy"


def test_norms_built_without_memory_start_fresh_later() -> None:
    with torch.device("meta"):
        model = VisionTransformer(
            img_size=8, patch_size=2, embed_dim=12, depth=1, num_heads=3, qk_norm=True
        )
        put_mixers(model, "identity")
    model = model.to_empty(device="cpu")
    put_mixers(model, "softmax")
    assert isinstance(site := find_host(model).places(model)[0].site.post_projection, HeadNorms)
    assert site("v") is None
    mixer: Any = model.blocks[0].attn.mixer
    assert torch.equal(mixer.post_projection.q.norm.weight, torch.ones(4))


@pytest.mark.parametrize("options", [{"head_dim": 8}, {"num_heads": 2}])
def test_heads_of_another_size_have_no_norm_and_are_refused(options: dict[str, int]) -> None:
    model = vit("heads")
    with pytest.raises(UserError, match=r"blocks\.0\.attn has q_norm and k_norm for 3 heads of 4"):
        put_mixers(model, "static_key", options)
    assert not find_mixers(model)
    put_mixers(model, "static_key", {"num_heads": 3, "head_dim": 4})


def test_readings_come_after_norms() -> None:
    model = vit("all")
    put_mixers(model, "softmax")
    model.double()
    layer = find_layers(model)[0]
    x = torch.randn(2, 17, 12, dtype=torch.float64)
    read = layer.reading((x,), {})
    close(read.map(), layer.map((x,), {}))
    mixer: Any = layer.mixer
    close(mixer.output(read.map() @ read.v, x), mixer(x))
    assert not torch.allclose(read.q.pow(2).mean(-1), torch.tensor(1.0).double(), atol=1e-3)


def test_attention_with_a_forward_of_its_own_is_not_taken_for_timms() -> None:
    class Own(Attention):
        def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
            return 2 * super().forward(x, attn_mask, is_causal)

    model = VisionTransformer(
        img_size=8, patch_size=2, embed_dim=12, depth=2, num_heads=3, attn_layer=Own
    )
    with pytest.raises(UserError, match=r"Own\(x, attn_mask, is_causal\) at blocks.0.attn and 1 m"):
        put_mixers(model, "softmax")
    assert not find_mixers(model)
    assert isinstance(model.blocks[0].attn, nn.Module)
