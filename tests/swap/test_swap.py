# SPDX-License-Identifier: Apache-2.0
"""Swapping: all or nothing, what is refused, what is chosen, what a swapped model can do."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models import metaformer as timms
from timm.models.vision_transformer import VisionTransformer
from tiny_models import MODELS, TIMM, answer, images, tiny
from torch import Tensor, nn

from each import each, together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.hosts.layers import find_layers
from keymix.mixers.head_mixer import HeadMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class, list_mixers
from keymix.swap import drift, swap
from keymix.swap.plans import choose
from tolerances import close, differs

SIZE = (8, 12)
WITHOUT_LOGITS = [
    name
    for name in list_mixers(domain="dense")
    if issubclass(get_mixer_class(name), HeadMixer)
    and not issubclass(get_mixer_class(name), MapMixer)
]


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """All that a refusal must leave alone."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [
        (path, id(m), type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
        for path, m in model.named_modules()
    ]
    owned = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    return state, modules, owned


def unchanged(model: nn.Module, before: tuple[Any, ...]) -> None:
    now = fingerprint(model)
    assert now[1:] == before[1:]
    assert now[0].keys() == before[0].keys()
    assert all(torch.equal(now[0][name], tensor) for name, tensor in before[0].items())


def nan(x: Tensor) -> Tensor:
    return x.index_fill(0, torch.tensor([1]), torch.nan)


X = images(SIZE)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "mixer": ({"mixer": "sofmax"}, "Did you mean 'softmax'"),
    "two_mixers": ({"mixer": ["softmax"] * 3}, "3 mixers were given; name one, or 2"),
    "option": ({"mixer_options": {"activtion": "relu"}}, "Did you mean 'activation'"),
    "init": ({"init": "transfr"}, "init='transfr' must be"),
    "estimate": ({"estimate": "median"}, "estimate='median' must be"),
    "pattern": ({"layers": "blocks.*.atn"}, "unknown layer 'blocks.*.atn'. Did you mean"),
    "range": ({"layers": "1-2"}, "this model has 2 layers with attention, 0 (blocks.0.attn)"),
    "backwards": ({"layers": "1-0"}, "write '0-1'"),
    "number": ({"layers": [0, 7]}, "layers='7': this model has 2 layers"),
    "none": ({"layers": []}, "names no layer"),
    "kind": ({"layers": 1.5}, "layers=1.5 must be"),
    "size": ({"calibration": images((8, 8))}, "are 3x8x8 (channels, height, width) and the"),
    "channels": ({"calibration": X[:, :1]}, "are 1x8x12 (channels, height, width) and the"),
    "bytes": ({"calibration": X.to(torch.uint8)}, "are torch.uint8; give floating point"),
    "flat": ({"calibration": X[0]}, "must be [n, C, H, W], got shape (3, 8, 12)"),
    "few": ({"calibration": X[:7]}, "7 calibration images were given and 8 are the least"),
    "nan": ({"calibration": nan(X)}, "hold NaN or infinity"),
    "empty": ({"calibration": []}, "0 calibration images were given and 8 are the least"),
    "names": ({"calibration": ["a.png"]}, "no image or folder 'a.png'"),
    "path": ({"calibration": 3}, "calibration=3 must be"),
    "batch": ({"calibration": X, "batch_size": 0}, "batch_size=0 must be"),
}


@together
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_nothing_changes(case: str) -> None:
    options, words = BAD[case]
    model = tiny("timm_vit").train()
    before = fingerprint(model)
    with pytest.raises(UserError) as error:
        swap(model, **{"mixer": "static_key", **options})
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    unchanged(model, before)


def test_a_mixer_that_cannot_sit_in_one_place_sits_in_none() -> None:
    model = tiny("timm_swin")
    before = fingerprint(model)
    with pytest.raises(UserError, match=r"'pooling' cannot sit at .*its windows are shifted"):
        swap(model, ["softmax", "pooling", "softmax", "softmax"])
    unchanged(model, before)


class Fails(VisionTransformer):
    """Forgets how to run once a mixer sits in it, so that a swap fails at its last step."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if find_mixers(self):
            raise RuntimeError("the second line\nof an error")
        out: Tensor = super().forward(x)
        return out


def test_a_failure_of_the_swapped_model_leaves_the_model_alone() -> None:
    model = Fails(**TIMM).double().eval()
    before = fingerprint(model)
    with pytest.raises(UserError, match=r"Fails cannot take calibration images .*second line$"):
        swap(model, "softmax", calibration=X)
    unchanged(model, before)


def test_a_model_that_no_adapter_knows_is_named_and_untouched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    before = fingerprint(model)
    with pytest.raises(UserError, match=r"no adapter knows .*Sequential"):
        swap(model, "softmax")
    unchanged(model, before)


def test_a_swapped_model_refuses_causal_attention() -> None:
    model = tiny("timm_vit")
    swap(model, "softmax")
    with pytest.raises(UserError, match="not causal"):
        model(X, is_causal=True)


@together
@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        (None, [0, 1, 2, 3]),
        (1, [1]),
        (-1, [3]),
        ("1-2", [1, 2]),
        ("0,2-3", [0, 2, 3]),
        ("layers.1.*", [2, 3]),
        ("layers.[01].blocks.0.attn", [0, 2]),
        (["3", "layers.0.blocks.1.attn", 0], [0, 1, 3]),
    ],
)
def test_layers_are_chosen_by_number_range_and_pattern(layers: Any, wanted: list[int]) -> None:
    found = find_layers(tiny("timm_swin"))
    assert choose(found, layers) == [found[i] for i in wanted]


def test_each_chosen_layer_may_get_a_mixer_of_its_own() -> None:
    model = tiny("keymix_vit")
    swap(model, ["ska", "kv"], "0,2", mixer_options=[{"activation": "relu"}, {}])
    mixers = find_mixers(model).values()
    assert [m.mixer_name for m in mixers] == ["static_key", "softmax", "key_value"]
    assert next(iter(mixers)).activation == "relu"


def test_a_fresh_swap_copies_nothing() -> None:
    model, copied = tiny("timm_vit"), tiny("timm_vit")
    report = swap(model, "softmax", init="fresh")
    swap(copied, "softmax")
    assert report.rows[0].copied == ()
    assert set(report.rows[0].fresh) == {"q", "k", "v", "proj"}
    assert differs(answer(model, X), answer(copied, X))


def test_another_head_split_starts_afresh_and_says_so() -> None:
    report = swap(tiny("timm_vit"), "softmax", mixer_options={"num_heads": 2})
    row = report.rows[0]
    assert set(row.fresh) == {"q", "k", "v", "proj"}
    assert "2 heads of 6 in place of 3 of 4" in row.notes[0]


def test_options_of_the_mixer_before_are_those_of_the_next() -> None:
    model = tiny("keymix_vit_tau")
    swap(model, "softmax", mixer_options={"num_heads": 2, "head_dim": 5, "qkv_bias": False})
    swap(model, "static_key")
    for mixer in find_mixers(model).values():
        assert isinstance(mixer, MapMixer)
        assert (mixer.num_heads, mixer.head_dim) == (2, 5)
        assert mixer.mask_diagonal
        assert mixer.temperature is not None
        assert mixer.q.bias is None


def test_a_static_key_run_takes_the_softmax_back() -> None:
    model, x = tiny("keymix_vit"), images((16, 16))
    own = answer(model, x)
    swap(model, "static_key", calibration=x)
    report = swap(model, "softmax", 1)
    row = report.rows[0]
    assert (row.copied, row.fresh, row.dropped) == (("proj", "q", "v"), ("k",), ("key",))
    assert differs(answer(model, x), own)


def test_keys_alone_become_queries_and_keys() -> None:
    model, x = tiny("keymix_vit"), images((16, 16))
    report = swap(model, "key_value")
    assert report.rows[0].dropped == ("q",)
    assert "the keys were kept" in report.rows[0].notes[0]
    before = answer(model, x)
    swap(model, "softmax")
    close(answer(model, x), before)


@pytest.mark.parametrize("mixer", ["softmax", "key_value", "static_key"])
def test_another_scale_is_folded_into_a_projection(mixer: str) -> None:
    plain, scaled = tiny("timm_vit"), tiny("timm_vit")
    swap(plain, mixer, calibration=X)
    report = swap(scaled, mixer, mixer_options={"scale": False}, calibration=X)
    close(answer(scaled, X), answer(plain, X))
    folded = "so that logits keep their size" in " ".join(report.rows[0].notes)
    assert folded == (mixer != "static_key"), "learned keys are estimated for the scale"


def test_a_scale_that_norms_forbid_to_fold_is_reported() -> None:
    model = tiny("timm_vit_registers_qk_norm")
    report = swap(model, "softmax", mixer_options={"scale": False})
    assert "logits are 2 times what they were" in report.rows[0].notes[0]


@pytest.mark.parametrize("mixer", ["softmax", "key_value"])
@pytest.mark.parametrize("name", ["timm_dinov3", "timm_eva02"])
def test_a_rotation_lets_another_scale_be_folded(name: str, mixer: str) -> None:
    plain, scaled, x = tiny(name), tiny(name), images(MODELS[name][1])
    swap(plain, mixer)
    report = swap(scaled, mixer, mixer_options={"scale": "dim"})
    assert "so that logits keep their size" in " ".join(report.rows[0].notes)
    close(answer(scaled, x), answer(plain, x))


def test_what_a_host_scales_otherwise_is_scaled_so() -> None:
    model = tiny("timm_vit_registers_qk_norm")  # norms forbid to fold it
    owner: Any = model
    for block in owner.blocks:
        block.attn.scale, block.attn.fused_attn = 0.3, False
    before = answer(model, X)
    swap(model, "softmax")
    close(answer(model, X), before)


def test_only_attention_is_replaced_unless_told() -> None:
    model = tiny("timm_metaformer")
    report = swap(model, "static_key")
    blocks = [row.path for row in report.rows]
    assert blocks == ["stages.2.blocks.0.token_mixer", "stages.2.blocks.1.token_mixer"]
    assert [type(stage.blocks[0].token_mixer).__name__ for stage in model.stages[:2]] == [
        "SepConv",
        "Pooling",
    ]
    assert [row.path for row in swap(model, "identity").rows] == blocks
    assert [row.path for row in swap(model, "softmax").rows] == blocks  # attention stood there
    assert len(swap(model, "identity", "*").rows) == 4
    pools = timms.MetaFormer(
        token_mixers=[timms.Pooling] * 2, depths=(1, 1), dims=(8, 16), num_classes=5
    )
    with pytest.raises(UserError, match="Pooling"):
        swap(pools, "identity")
    assert len(swap(pools, "identity", "*").rows) == 2


def test_a_mixer_is_written_as_everywhere() -> None:
    one, other = tiny("keymix_vit"), tiny("keymix_vit")
    swap(one, "static_key(activation=relu)/softmax", "0-1")
    swap(other, ["static_key", "softmax"], "0-1", mixer_options=[{"activation": "relu"}, {}])
    for mine, theirs in zip(*(find_mixers(m).values() for m in (one, other)), strict=True):
        assert type(mine) is type(theirs)
        assert mine.built_with == theirs.built_with
    with pytest.raises(UserError, match="mixer_options"):
        swap(one, "static_key(activation=relu)", mixer_options=[{}])


@pytest.mark.parametrize("name", ["timm_metaformer", "torchvision_vit", "timm_dinov3"])
def test_a_swapped_model_copies_pickles_and_trains(name: str) -> None:
    model, x = tiny(name), images(MODELS[name][1])
    swap(model, "static_key", calibration=x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(answer(copied, x), answer(model, x))
    model.train()
    model(x).square().sum().backward()
    for path, mixer in find_mixers(model).items():
        for key, p in mixer.named_parameters():
            assert p.grad is not None, f"{path}.{key}"
            assert p.grad.abs().sum() > 0, f"{path}.{key}"


def test_copied_weights_train_as_they_did_and_new_ones_train() -> None:
    model = tiny("timm_vit").requires_grad_(False)
    model.blocks[1].attn.requires_grad_(True)
    model.blocks[0].train()
    swap(model, "static_key", calibration=X)
    first, second = find_mixers(model).values()
    assert [n for n, p in first.named_parameters() if p.requires_grad] == ["key"]
    assert all(p.requires_grad for p in second.parameters())
    assert not model.head.weight.requires_grad
    assert (first.training, second.training, model.training) == (True, False, False)


def test_a_frozen_norm_of_the_host_stays_frozen_in_the_mixer() -> None:
    model = tiny("timm_vit_registers_qk_norm")
    model.blocks[0].attn.q_norm.requires_grad_(False)
    swap(model, "softmax", 0)
    frozen = [n for n, p in model.blocks[0].attn.named_parameters() if not p.requires_grad]
    assert frozen == ["mixer.post_projection.q.norm.weight", "mixer.post_projection.q.norm.bias"]


def test_the_modules_around_stay_the_same_objects() -> None:
    model = tiny("timm_vit")
    kept = {path: m for path, m in model.named_modules() if ".attn" not in path}
    swap(model, "static_key", calibration=X)
    assert all(model.get_submodule(path) is module for path, module in kept.items())


def test_type_and_device_are_the_models() -> None:
    model = tiny("timm_vit").to(torch.bfloat16)
    swap(model, "static_key", calibration=X.float())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def loader(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Batches as a data loader gives them, with labels."""
    return [(part, torch.zeros(len(part))) for part in x.split(4)]


@pytest.mark.parametrize("given", [lambda x: x, loader, lambda x: iter(x.split(2))])
def test_images_come_as_a_tensor_or_in_batches(given: Callable[[Tensor], Any]) -> None:
    model, wanted = tiny("timm_vit"), tiny("timm_vit")
    swap(model, "static_key", calibration=given(X), batch_size=2)
    swap(wanted, "static_key", calibration=X)
    close(answer(model, X), answer(wanted, X))


def test_the_report_reports_cost_and_drift() -> None:
    model, copied = tiny("timm_vit"), tiny("timm_vit")
    before = answer(copied, X)
    report = swap(model, "static_key", 1, calibration=X)
    after = answer(model, X)
    row, output = report.rows[0], report.output
    assert (row.path, row.before, row.after) == ("blocks.1.attn", "Attention", "static_key")
    assert row.params == (4 * 144 + 48, 3 * 144 + 36 + 25 * 12)
    assert row.macs == (25 * 12 * (4 * 12 + 2 * 25), 25 * 12 * (3 * 12 + 2 * 25))
    assert report.params[1] - report.params[0] == row.params[1] - row.params[0]
    assert report.macs is not None
    assert report.macs[1] - report.macs[0] == row.macs[1] - row.macs[0]
    assert [(u.path, u.what) for u in report.untouched] == [("blocks.0.attn", "Attention")]
    assert output is not None
    assert output.relative == pytest.approx(float((after - before).norm() / before.norm()))
    same = (after.argmax(-1) == before.argmax(-1)).double().mean()
    assert output.top1_agreement == pytest.approx(float(same))
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["copied"] == ["proj", "q", "v"]
    assert "1 of 2 layers swapped" in report.answer
    frame = report.frame("layers")
    assert frame.loc[0, ["block", "layer", "after"]].tolist() == [2, "blocks.1.attn", "static_key"]
    assert (frame.loc[0, "params_before"], frame.loc[0, "params_after"]) == row.params
    assert frame.loc[0, "drift_output"] == pytest.approx(row.drift.output)
    assert set(report.figures) == {"output", "map"}


def test_drift_of_a_layer_is_that_of_its_map_on_the_originals_tokens() -> None:
    model, copied = tiny("timm_vit"), tiny("timm_vit")
    calls: list[Any] = []
    layers = find_layers(copied)
    hook = layers[1].module.register_forward_hook(lambda *call: calls.append(call[1:]))
    answer(copied, X)
    hook.remove()
    moves = swap(model, "static_key", calibration=X, batch_size=4).rows[1].drift
    (tokens,), given = calls[0]
    mixer = list(find_mixers(model).values())[1]
    with torch.no_grad():
        old, new = layers[1].map((tokens,), {}), mixer.attention_map(tokens)
        moved = (mixer(tokens) - given).norm() / given.norm()
    assert moves is not None
    assert moves.map == pytest.approx(float((new - old).abs().sum(-1).mean() / 2))
    assert moves.output == pytest.approx(float(moved))
    logs = [t.log() - t.log().mean(-1, True) for t in (old, new)]  # logits less their row's mean
    assert moves.logits == pytest.approx(float((logs[1] - logs[0]).norm() / logs[0].norm()))


def test_maps_are_compared_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = swap(tiny("timm_vit"), ["re_attention", "conv_static_key"], calibration=X)
    monkeypatch.setattr(drift, "MOST_NUMBERS", 9 * 3 * 25 * 7)  # 7 rows of 25
    model = tiny("timm_vit")
    parts = swap(model, ["re_attention", "conv_static_key"], calibration=X)
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert one.drift is not None
        assert other.drift is not None
        assert vars(other.drift) == pytest.approx(vars(one.drift), abs=1e-12)


def test_controls_copy_nothing_and_say_so() -> None:
    report = swap(tiny("timm_vit_registers_qk_norm"), "identity", calibration=X)
    row = report.rows[0]
    assert row.copied == row.estimated == row.fresh == ()
    assert set(row.dropped) == {"q", "k", "v", "proj"}
    assert "q_norm and k_norm of the host are lost" in row.notes[0]
    assert row.drift is not None
    assert row.drift.map is None


@each("mixer", {name: (name,) for name in WITHOUT_LOGITS})
def test_attention_without_logits_is_put_in_and_out_again(mixer: str) -> None:
    """Maps are compared where there are two, logits never; the host's norms of heads stay."""
    model = tiny("timm_vit_registers_qk_norm")
    reports = [swap(model, name, calibration=X) for name in (mixer, "softmax", mixer)]
    for row in (row for report in reports for row in report.rows):
        assert row.drift is not None
        assert row.drift.logits is None
        assert (row.drift.map is not None) == get_mixer_class(mixer).forms_map()
        assert not any("are lost" in note for note in row.notes)
        assert "post_projection.q.norm" in row.copied


def test_a_familys_own_convolution_is_taken_over() -> None:
    model, x = tiny("timm_metaformer"), images((48, 32), 3)
    before = answer(model, x)
    report = swap(model, "sep_conv", 0)
    close(answer(model, x), before)
    assert report.rows[0].before == "SepConv"
    assert report.rows[0].fresh == ()


def test_without_images_what_is_fresh_is_reported() -> None:
    report = swap(tiny("timm_vit"), ["static_key", "re_attention"])
    assert report.output is None
    assert report.rows[0].fresh == ("key",)
    assert "calibration images would set them" in report.rows[0].notes[0]
    assert report.rows[1].fresh == ("norm",)
    assert "calibration images would settle it" in report.rows[1].notes[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["timm_vit", "timm_metaformer", "keymix_vit"])
@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key", "key_value", "re_attention"])
def test_a_model_on_cuda_is_swapped_where_it_is(name: str, mixer: str) -> None:
    size = MODELS[name][1]
    model = tiny(name).cuda()
    x = images(size)
    report = swap(model, mixer, calibration=x.cuda())
    assert report.rows
    assert all(t.is_cuda for t in model.state_dict().values())
    there = answer(model, x.cuda()).cpu()
    close(there, answer(model.cpu(), x))
