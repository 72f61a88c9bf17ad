# SPDX-License-Identifier: Apache-2.0
"""What folding for inference leaves of single mixers, and where it leaves them alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import each
from keymix import MapMixer, Site, fold_for_inference
from keymix.analysis.counting import count
from keymix.mixers.base import explain_backend
from keymix.mixers.key_value import KeyValueAttention
from keymix.mixers.re_attention import ReAttention
from keymix.mixers.shared_map import SharedMapAttention
from keymix.mixers.softmax import SoftmaxAttention
from keymix.mixers.static_key import StaticKeyAttention
from mixer_cases import make, stir, tokens
from tolerances import close

FEW: dict[str, Any] = {"dim": 24, "num_heads": 2, "grid": (4, 6), "key_grid": (2, 3)}
"""Two heads of 12 channels, and 6 keys."""


def kinds(module: nn.Module) -> set[type[nn.Module]]:
    return {type(m) for m in module.modules()}


def few_keys(name: str = "static_key", **options: Any) -> Any:
    site = {k: options.pop(k) for k in ("windows", "num_prefix_tokens") if k in options}
    return make(name, {"resize": "pool_values", **options}, **FEW, **site).eval()


# ---- re-attention -----------------------------------------------------------------------------


@each(
    "name, options",
    {
        "alone": ("re_attention", {}),
        "without b": ("re_attention", {"theta_bias": False}),
        "scaled map": ("re_attention", {"map_scale": True}),
        "talking heads": ("re_attention", {"talking_heads": "bias"}),
        "over static keys": ("static_key_re_attention", {}),
    },
)
def test_no_norm_of_the_maps_is_left(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, grid=(3, 5))
    mixer.train()(tokens(mixer, 4))
    mixer.eval()
    folded: Any = fold_for_inference(mixer)
    assert nn.BatchNorm2d in kinds(mixer)
    assert nn.BatchNorm2d not in kinds(folded)
    assert folded.norm is None
    assert folded.map_gain == folded.gain() == 1.0
    assert not [key for key in folded.state_dict() if key.startswith("norm")]
    x = tokens(mixer)
    close(folded(x), mixer(x))


def test_layer_norm_over_heads_depends_on_the_tokens_and_stays() -> None:
    mixer = make("re_attention", {"norm": "layer"}).eval()
    folded, x = fold_for_inference(mixer), tokens(mixer)
    assert nn.LayerNorm in kinds(folded)
    close(folded(x), mixer(x))


@pytest.mark.parametrize("tokens_per_side", [(3, 5), (1, 7)])
def test_blocks_of_rows_of_folded_re_attention(tokens_per_side: tuple[int, int]) -> None:
    """Forward, and the gradient of the tokens: rows are formed again in the backward pass."""
    mixer = make("re_attention", {"backend": "blocked"}, grid=tokens_per_side).train()
    mixer(tokens(mixer, 4))
    folded = fold_for_inference(mixer.eval())
    assert explain_backend(folded).name == "blocked"
    grads = []
    for each_one in (mixer, folded):
        x = tokens(mixer).requires_grad_()
        y = each_one(x)
        (grad,) = torch.autograd.grad((y * torch.arange(y.numel()).view(y.shape).sin()).sum(), x)
        grads.append((y, grad))
    for ours, wanted in zip(*reversed(grads), strict=True):
        close(ours, wanted)


def test_a_shared_map_is_mixed_without_a_norm() -> None:
    torch.manual_seed(0)
    mixer = SharedMapAttention(Site(dim=12, num_heads=3, grid=(2, 3)), dtype=torch.float64)
    stir(mixer)
    x, source = torch.randn(2, 6, 12).double(), torch.randn(2, 3, 6, 6).double().softmax(-1)
    mixer.train()(x, source=source)
    mixer.eval()
    folded = fold_for_inference(mixer)
    assert nn.BatchNorm2d not in kinds(folded)
    close(folded(x, source=source), mixer(x, source=source))


@pytest.mark.parametrize("reason", ["hook", "no statistics"])
def test_a_norm_that_is_listened_to_or_not_constant_stays(reason: str) -> None:
    mixer: Any = make("re_attention").eval()
    if reason == "hook":
        mixer.norm.register_forward_hook(lambda *_: None)
    else:
        mixer.norm = nn.BatchNorm2d(3, track_running_stats=False).double()
    folded, x = fold_for_inference(mixer), tokens(mixer)
    assert nn.BatchNorm2d in kinds(folded)
    close(folded(x), mixer(x))


# ---- static keys --------------------------------------------------------------------------------


@each(
    "options",
    {
        "defaults": ({},),
        "scale": ({"scale": "dim"},),
        "no scale": ({"scale": False},),
        "fixed temperature": ({"temperature": 0.5},),
        "learned temperature": ({"temperature": True},),
        "no biases": ({"qkv_bias": False},),
        "star_relu": ({"activation": "star_relu"},),
        "gelu": ({"activation": "gelu"},),
        "talking heads": ({"talking_heads": "bias"},),
        "prefix": ({"num_prefix_tokens": 2},),
        "reference": ({"backend": "reference"},),
        "wide heads": ({"head_dim": 6},),
    },
)
@pytest.mark.parametrize("name", ["static_key", "static_key_re_attention"])
def test_few_keys_go_into_the_projection_of_the_query(name: str, options: dict[str, Any]) -> None:
    mixer = few_keys(name, **options)
    if name == "static_key_re_attention":
        mixer.train()(tokens(mixer, 4))
        mixer.eval()
    folded, x = fold_for_inference(mixer), tokens(mixer)
    keys = mixer.key.shape[-2]
    assert folded.key is None
    assert folded.q.out_features == 2 * keys
    bias = torch.randn(2, 1, keys).double()
    close(folded(x), mixer(x))
    close(folded(x, bias=bias), mixer(x, bias=bias))
    close(folded.attention_map(x, queries=[3]), mixer.attention_map(x, queries=[3]))
    shape = tuple(x.shape[1:])
    assert count(folded, shape).macs < count(mixer, shape).macs
    assert explain_backend(folded).name == "reference"
    assert mixer.backend == "reference" or "projection" in explain_backend(folded).why


def test_folded_keys_serve_other_grids_as_pooled_values_do() -> None:
    mixer = few_keys()
    folded = fold_for_inference(mixer)
    x = torch.randn(2, 8 * 6, 24).double()
    close(folded(x, grid=(8, 6)), mixer(x, grid=(8, 6)))
    for each_one in (mixer, folded):
        each_one.set_grid((8, 6))
    close(folded(x), mixer(x))


class Cosine(StaticKeyAttention):
    """Logits that are not linear in the queries."""

    def factors(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return nn.functional.normalize(inputs["q"], dim=-1), inputs["key"]


@each(
    "make_mixer",
    {
        "more keys than channels": (lambda: few_keys(head_dim=5),),
        "keys that calls resample": (
            lambda: make("static_key", {"resize": "interpolate", "head_dim": 9}).eval(),
        ),
        "keys of each window": (lambda: make("static_key", {"head_dim": 9}, windows=3).eval(),),
        "fused by name": (lambda: few_keys(backend="sdpa"),),
        "tokens as queries": (lambda: few_keys(query_proj=False),),
        "in blocks by name": (lambda: few_keys(backend="blocked"),),
        "not linear": (
            lambda: Cosine(Site(dim=12, num_heads=1, grid=(2, 3)), dtype=torch.float64).eval(),
        ),
    },
)
def test_other_keys_stay_where_they_are(make_mixer: Any) -> None:
    mixer = make_mixer()
    windows = (3,) if mixer.own_windows else ()
    folded, x = fold_for_inference(mixer), tokens(mixer, 2, *windows)
    assert folded.key.shape == mixer.key.shape
    assert folded.no_factors is None
    assert explain_backend(folded).name == explain_backend(mixer).name
    close(folded(x), mixer(x))


@each(
    "name, options, joined",
    {
        "static": ("static_key", {}, True),
        "convolutional": ("conv_static_key", {}, True),
        "with re-attention": ("static_key_re_attention", {}, True),
        "no biases": ("static_key", {"qkv_bias": False}, True),
        "pooled tokens": ("static_key", {"key_grid": (1, 3), "head_dim": 2}, False),
        "tokens as queries": ("conv_static_key", {"query_proj": False}, False),
    },
)
def test_queries_and_values_of_the_same_tokens_are_projected_at_once(
    name: str, options: dict[str, Any], joined: bool
) -> None:
    mixer = make(name, options).eval()
    folded, x = fold_for_inference(mixer), tokens(mixer)
    assert (folded.joint is not None) is joined
    assert len(folded.projections) == len(mixer.projections) - joined
    close(folded(x), mixer(x))
    assert count(folded, tuple(x.shape[1:])).macs == count(mixer, tuple(x.shape[1:])).macs
    listened = copy.deepcopy(mixer)
    listened.v.register_forward_hook(lambda *_: None)
    assert fold_for_inference(listened).joint is None


def test_a_query_that_is_normed_keeps_its_keys_and_its_scale() -> None:
    def norm(role: str) -> nn.Module | None:
        return nn.LayerNorm(12).double() if role == "q" else None

    x = torch.randn(2, 24, 24).double()
    for kind in (StaticKeyAttention, SoftmaxAttention):
        site = Site(dim=24, num_heads=2, grid=(4, 6), post_projection=norm)
        mixer = kind(site, dtype=torch.float64).eval()
        stir(mixer)
        folded = fold_for_inference(mixer)
        queries = [each.projections[0].weight[:24] for each in (folded, mixer)]
        assert torch.equal(*queries)
        close(folded(x), mixer(x))


# ---- the factor of the logits -------------------------------------------------------------------


@each(
    "name, options",
    {
        "softmax": ("softmax", {"temperature": True}),
        "softmax, talking": ("softmax", {"talking_heads": True, "scale": "dim"}),
        "re_attention": ("re_attention", {"temperature": True}),
        "static_key": ("static_key", {"temperature": True}),
        "conv_static_key": ("conv_static_key", {"temperature": True}),
    },
)
def test_the_factor_of_the_logits_goes_into_queries_or_keys(
    name: str, options: dict[str, Any]
) -> None:
    mixer = make(name, options, num_prefix_tokens=1).eval()
    folded, x = fold_for_inference(mixer), tokens(mixer)
    assert isinstance(folded, MapMixer)
    assert folded.gain() == 1.0
    assert folded.temperature is None
    close(folded(x), mixer(x))


class Halved(ReAttention):
    """Has a gain of its own, which the queries' projection does not know."""

    def gain(self) -> Any:
        return super().gain() * 0.5 + 0.1


def test_a_subclass_with_a_gain_of_its_own_keeps_it() -> None:
    mixer = Halved(Site(dim=12, num_heads=3, grid=(2, 3)), dtype=torch.float64).eval()
    stir(mixer)
    folded, x = fold_for_inference(mixer), tokens(mixer)
    assert folded.gain() == mixer.gain()
    close(folded(x), mixer(x))


# ---- positions of key-value attention -----------------------------------------------------------


@pytest.mark.parametrize("resize", ["interpolate", "pool_values", None])
def test_the_position_bias_is_a_table_of_its_grid(resize: str | None) -> None:
    mixer: Any = make("key_value", {"pos_dim": 6, "resize": resize}, num_prefix_tokens=1).eval()
    folded: Any = fold_for_inference(mixer)
    assert isinstance(folded, KeyValueAttention)
    assert folded.pos_proj is None
    assert folded.pos_bias.shape == (7, 7)
    assert folded.pos_code.shape == (7, 2)
    assert not [key for key in folded.state_dict() if key.startswith("pos_")]
    x = tokens(mixer)
    assert folded.own_bias({}, None, None) is folded.pos_bias
    close(folded(x), mixer(x))
    close(folded.attention_map(x, queries=[2]), mixer.attention_map(x, queries=[2]))
    assert explain_backend(folded).name == explain_backend(mixer).name


def test_without_positions_nothing_is_built() -> None:
    folded: Any = fold_for_inference(make("key_value"))
    assert folded.pos_bias is None


# ---- spikes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qk_token", "spiking_self"])
def test_spiking_mixers_keep_their_spikes_without_norms(name: str) -> None:
    mixer: Any = make(name).eval()
    folded: Any = fold_for_inference(mixer)
    assert nn.BatchNorm1d in kinds(mixer)
    assert nn.BatchNorm1d not in kinds(folded)
    x = tokens(mixer, 4)
    theirs = mixer.spikes(x)
    for published, spikes in folded.spikes(x).items():
        assert torch.equal(spikes, theirs[published])


@pytest.mark.parametrize("name", ["qk_token", "spiking_self"])
def test_gradients_of_spikes_go_through_a_folded_mixer(name: str) -> None:
    mixer = make(name).eval()
    grads = []
    for each_one in (mixer, fold_for_inference(mixer)):
        x = tokens(mixer, 4).requires_grad_()
        (grad,) = torch.autograd.grad(each_one(x).sum(), x)
        grads.append(grad)
    assert grads[0].any()
    close(grads[1], grads[0])
