# SPDX-License-Identifier: Apache-2.0
"""Counting: the closed forms of the papers, hand-computed layers, and nothing left uncounted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import timm
import torch
from timm.layers import set_fused_attn
from torch import Tensor, nn
from torch.utils import flop_counter

import keymix
from keymix.analysis.counting import _FORMULAS, Count, count, default_input_size
from keymix.errors import UserError

N = D = 256
PLAIN = {"qkv_bias": False, "proj_bias": False}


def test_linear_is_counted_by_hand() -> None:
    c = count(nn.Linear(8, 5), input_size=(7, 8))
    assert (c.params, c.macs, c.flops) == (8 * 5 + 5, 7 * 8 * 5, 2 * 7 * 8 * 5)
    assert c.activation_bytes == 7 * 8 * 4  # its input, float32


def test_convolution_is_counted_by_hand() -> None:
    conv = nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=3)
    c = count(conv, input_size=(6, 9, 11))
    assert c.macs == (12 * 5 * 6) * (2 * 9)  # outputs x (channels of a group x kernel)
    assert c.params == 12 * 2 * 9 + 12


def test_each_cost_falls_to_the_innermost_module() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    c = count(net, input_size=(3, 4))
    rows = {layer.path: layer for layer in c.layers}
    assert {p: (r.params, r.macs, r.activation_bytes) for p, r in rows.items()} == {
        "0": (30, 72, 48),
        "1": (0, 0, 72),  # GELU saves its input
        "2": (14, 36, 72),
    }
    assert c.macs == sum(r.macs for r in c.layers)
    assert rows["1"].kind == "GELU"


def test_depth_sums_children_into_their_parents() -> None:
    c = count(timm.create_model("vit_tiny_patch16_224", img_size=32))
    tops = {r.path: r for r in c.at_depth(1)}
    assert sum(r.macs for r in tops.values()) == c.macs
    assert sum(r.params for r in tops.values()) == c.params
    assert sum(r.activation_bytes for r in tops.values()) == c.activation_bytes
    assert tops["blocks"].kind == "Sequential"
    with pytest.raises(UserError, match="depth=0"):
        c.at_depth(0)


def test_vit_tiny_has_its_published_cost() -> None:
    c = count(timm.create_model("vit_tiny_patch16_224"))
    assert c.input_size == (3, 224, 224)
    assert c.params == 5_717_416
    assert c.flops / 1e9 == pytest.approx(2.507, abs=5e-4)


@pytest.mark.slow
def test_caformer_s18_has_its_published_cost() -> None:
    c = count(timm.create_model("caformer_s18"))
    assert c.params == 26_341_656
    assert c.flops / 1e9 == pytest.approx(8.214, abs=5e-4)


@pytest.mark.slow
def test_fused_and_unfused_attention_cost_the_same() -> None:
    counts: list[Count] = []
    for fused in (True, False):
        set_fused_attn(fused)
        try:
            counts.append(count(timm.create_model("vit_tiny_patch16_224", img_size=64)))
        finally:
            set_fused_attn(True)
    fused_count, plain = counts
    assert fused_count.macs == plain.macs
    assert any("scaled_dot_product" in name for name in fused_count.macs_by_operation)
    assert not any("scaled_dot_product" in name for name in plain.macs_by_operation)
    assert fused_count.activation_bytes < plain.activation_bytes  # no map is kept


@pytest.mark.slow
def test_cpu_attention_is_counted_where_pytorch_lacks_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    complete = count(model).macs
    monkeypatch.delitem(
        flop_counter.flop_registry,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        raising=False,  # torch 2.11 to 2.13 have none
    )
    assert count(model).macs == complete


def test_attention_formula_with_values_of_another_width() -> None:
    attention = _FORMULAS[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu]
    flops = attention((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4))
    assert flops == 2 * 2 * 3 * (5 * 7 * 8 + 5 * 7 * 4)


@pytest.mark.parametrize(
    ("name", "options", "params", "macs"),
    [
        ("softmax", PLAIN, 4 * D**2, N * (2 * N * D + 4 * D**2)),
        ("static_key", PLAIN, N * D + 3 * D**2, N * (2 * N * D + 3 * D**2)),
        (
            "conv_static_key",
            PLAIN,
            9 * N * D + 3 * D**2 + 8 * N,
            N * (10 * N * D + 3 * D**2),
        ),
        ("sep_conv", {}, 9 * D + 2 * D**2, N * (9 * D + 2 * D**2)),
    ],
)
def test_mixers_have_the_closed_forms_of_ska_table_6(
    name: str, options: dict[str, bool], params: int, macs: int
) -> None:
    mixer = keymix.create_mixer(name, dim=D, num_heads=8, grid=(16, 16), **options)
    c = count(mixer, input_size=(N, D))
    assert (c.params, c.macs) == (params, macs)


def test_ska_table_6_in_numbers() -> None:
    ska = keymix.create_mixer("ska", dim=D, num_heads=8, grid=(16, 16), **PLAIN)
    cska = keymix.create_mixer("cska", dim=D, num_heads=8, grid=(16, 16), **PLAIN)
    of_ska, of_cska = count(ska, input_size=(N, D)), count(cska, input_size=(N, D))
    assert (of_ska.params, of_ska.macs) == (262_144, 83_886_080)
    assert (of_cska.params, of_cska.macs) == (786_432 + 2_048, 218_103_808)


@pytest.mark.parametrize("name", ["softmax", "static_key", "key_value"])
def test_a_mixer_costs_the_same_on_every_backend(name: str) -> None:
    counts = {
        backend: count(
            keymix.create_mixer(name, dim=32, num_heads=4, grid=(6, 6), backend=backend),
            input_size=(36, 32),
        ).macs
        for backend in ("reference", "sdpa")
    }
    assert counts["reference"] == counts["sdpa"] > 0


class Stateful(nn.Module):
    """BatchNorm, dropout, a cache and random numbers: what a count could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.drop = nn.Dropout(0.5)
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.frozen(self.norm(self.conv(x))))
        self.calls.append(x)
        return x * (1 + random.random()) + float(np.random.rand()) + torch.rand(())


@pytest.mark.parametrize("training", [True, False])
def test_counting_changes_nothing(training: bool) -> None:
    net = Stateful().train(training)
    net.frozen.eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    modes = {path: m.training for path, m in net.named_modules()}
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    wanted = (torch.rand(2).tolist(), random.random(), np.random.rand())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    count(net, input_size=(3, 8, 8))
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == wanted
    assert {path: m.training for path, m in net.named_modules()} == modes
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert net.calls == []
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_frozen_parameters_are_not_counted_and_shared_ones_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    net[2].weight = net[1].weight
    assert count(net, input_size=(2, 4)).params == 16 + 4 + 4


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_counted() -> None:
    with torch.device("meta"):
        on_meta = timm.create_model("vit_tiny_patch16_224", img_size=64)
    real = timm.create_model("vit_tiny_patch16_224", img_size=64)
    assert count(on_meta).to_dict() == count(real).to_dict()


def test_a_model_that_looks_at_numbers_is_run_instead() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum().item() == 0 else x

    c = count(Looks(), input_size=(4, 8))
    assert (c.macs, c.activation_bytes) == (4 * 8 * 8, 4 * 8 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_saved_bytes_are_those_of_a_real_training_pass(name: str) -> None:
    options = {"img_size": 64} if name.startswith("vit") else {}
    model = timm.create_model(name, **options)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.train()(torch.randn(1, 3, 64, 64))
    assert count(model, (3, 64, 64)).activation_bytes == sum(s.nbytes() for s in kept.values())


def test_batch_norm_on_a_single_position_is_extrapolated_to_one_image() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    c = count(net, (3, 8, 8))
    # by hand: the image; the convolution's result; mean and deviation; BatchNorm's result
    assert c.activation_bytes == 4 * (3 * 8 * 8 + 4 + (4 + 4) + 4)


def test_multihead_attention_is_counted_in_spite_of_its_fast_path() -> None:
    net = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    c = count(net, input_size=(10, 16))
    assert c.macs == 10 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 10 * 10 * 16
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_input_size_comes_from_the_model_or_must_be_given() -> None:
    assert default_input_size(timm.create_model("resnet18")) == (3, 224, 224)
    small = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), in_chans=1)
    assert default_input_size(small) == (1, 32, 48)
    with pytest.raises(UserError, match=r"give input_size=\(3, H, W\)"):
        count(nn.Linear(3, 3))
    with pytest.raises(UserError, match="at least 1"):
        count(nn.Linear(3, 3), input_size=(0, 3))


def test_a_batch_of_one_before_an_image_is_left_out() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    assert count(model, (1, 3, 64, 64)).to_dict() == count(model, (3, 64, 64)).to_dict()
    volume = nn.Conv3d(1, 2, 3)
    assert count(volume, (1, 8, 8, 8)).input_size == (1, 8, 8, 8)


def test_the_record_is_plain_data() -> None:
    import json

    record = count(nn.Linear(8, 5), input_size=(7, 8)).to_dict()
    assert json.loads(json.dumps(record))["flops"] == 2 * 7 * 8 * 5
