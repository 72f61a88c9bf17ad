# SPDX-License-Identifier: Apache-2.0
"""SETR: encoders against timm's, sizes, mixers, what reads its maps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models._registry import _model_entrypoints
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import keymix
from each import together
from keymix.analysis.attention import attention_maps
from keymix.analysis.rollout import attention_rollout
from keymix.analysis.similarity import map_similarity
from keymix.decoders.segmentation.multi_scale import KINDS
from keymix.errors import UserError
from keymix.hosts import class_token_reads_image, find_host, find_mixers, put_mixers
from keymix.layers.patches import ResNetPatchEmbed
from keymix.mixers.registry import list_mixers
from keymix.models import create_model, list_models, load_weights, set_image_size
from keymix.models.factory import domain_of, own_mixers, task_of_model
from mixer_cases import refused, stir
from shrunk import images, shrunk
from tolerances import close, differs

DENSE = list_models("setr*")
MICRO: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "depth": 2, "decoder_widths": (8, 4)}


def micro(**options: Any) -> nn.Module:
    return create_model("setr_micro", **{**MICRO, "img_size": (16, 24), **options})


def step(model: nn.Module, x: Tensor) -> None:
    """One update by the cross entropy of pixels; every gradient must be finite."""
    target = torch.randint(0, 4, (len(x), *x.shape[2:]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    nn.functional.cross_entropy(model.train()(x), target).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@together
@pytest.mark.parametrize("name", DENSE)
def test_every_variant_takes_a_step(name: str) -> None:
    model = shrunk(name, num_classes=4)
    step(model, images(name, count=2))
    assert task_of_model(name) == "segmentation"
    assert (model.task, model.global_pool) == ("segmentation", None)


def test_other_models_classify() -> None:
    dense = {name for name in list_models() if task_of_model(name) == "segmentation"}
    assert dense == {*DENSE, *KINDS, "plain_unet", "trans_unet_micro"}
    assert task_of_model("resnet18") == task_of_model("no model") == "classification"
    assert domain_of("setr") == "dense"
    assert own_mixers("setr", shrunk("setr")) is None


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_every_dense_mixer_sits_in_it(mixer: str) -> None:
    model = micro(mixer=mixer)
    assert [m.mixer_name for m in find_mixers(model).values()] == [mixer] * 2
    step(model, torch.randn(2, 3, 16, 24))


def test_the_rest_is_the_same_at_a_seed_whatever_the_mixer() -> None:
    for name in ("setr_micro", "setr_qkv_cvt", "setr"):
        states = []
        for mixer in ("softmax", "key_value", "static_key"):
            torch.manual_seed(5)
            state = shrunk(name, mixer=mixer).state_dict()
            states.append({k: v for k, v in state.items() if ".attn." not in k})
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            assert all(torch.equal(v, states[0][k]) for k, v in state.items()), name


def test_the_encoder_is_timms_vit() -> None:
    model = micro().double().eval()
    stir(model)
    theirs = VisionTransformer(
        img_size=(16, 24),  # type: ignore[arg-type]  # timm takes two sides
        patch_size=8,
        num_classes=0,
        embed_dim=12,
        depth=2,
        num_heads=3,
        mlp_ratio=2.0,
    )
    theirs = theirs.double().eval()
    weights = {k.replace(".mixer.", "."): v for k, v in model.encoder.state_dict().items()}
    theirs.load_state_dict(weights, strict=True)
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    tokens = theirs.forward_features(x)[:, 1:]  # without the class token
    close(model.forward_features(x), tokens.transpose(1, 2).reshape(2, 12, 2, 3))


@pytest.mark.parametrize("name", ["setr_micro", "setr_qkv_ce", "setr_kv_cvt"])
def test_features_lie_as_the_encoder_lays_them(name: str) -> None:
    model = shrunk(name, img_size=(48, 80)).eval()
    x = torch.randn(2, 3, 48, 80)
    (wanted,) = model.encoder.forward_intermediates(
        x, indices=1, norm=True, intermediates_only=True
    )
    assert wanted.shape[2] < wanted.shape[3]
    close(model.forward_features(x), wanted)


@pytest.mark.slow
def test_the_stem_is_timms_resnet_50_cut() -> None:
    embed = ResNetPatchEmbed(img_size=32, embed_dim=8, depths=(3, 4, 6)).double().eval()
    theirs = timm.create_model("resnet50", features_only=True, out_indices=(3,)).double().eval()
    stir(theirs)
    embed.backbone.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert theirs(x)[0].shape == (1, 1024, 2, 2)
    close(embed(x), embed.proj(theirs(x)[0]).flatten(2).mT)
    with torch.device("meta"):
        papers = ResNetPatchEmbed()
    assert sum(p.numel() for p in papers.backbone.parameters()) == 11_894_848


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("setr_micro", (8, 40)),
        ("setr_qkv_ce", (48, 16)),
        ("setr_kv_cvt", (37, 51)),
        ("setr_kv_pos", (16, 64)),
    ],
)
def test_logits_have_the_images_size(name: str, size: tuple[int, int]) -> None:
    model = shrunk(name, img_size=size, num_classes=3, in_chans=5).eval()
    assert model(torch.randn(2, 5, *size)).shape == (2, 3, *size)
    assert model.img_size == size


@pytest.mark.parametrize("name", ["setr_micro", "setr_kv_cvt", "setr_qkv_ce", "setr"])
def test_another_size_is_taken(name: str) -> None:
    model = shrunk(name, img_size=32).eval()
    model.set_input_size((48, 32))
    assert model(torch.randn(1, 3, 48, 32)).shape == (1, 4, 48, 32)
    set_image_size(model, (32, 64))
    x = torch.randn(1, 3, 32, 64)
    y = model(x)
    assert y.shape == (1, 4, 32, 64)
    close(model.forward_head(model.forward_features(x)), y)  # the size that was set
    model.set_input_size()
    assert model.img_size == (32, 64)


def test_what_a_mixer_refuses_changes_nothing() -> None:
    model = micro(mixer=["softmax", "static_key"]).eval()
    x = torch.randn(1, 3, 16, 24)
    before = model(x)
    with refused(r"blocks\.1\.attn\.mixer: mixer 'static_key'.*for the new image size"):
        model.set_input_size((32, 24))
    assert torch.equal(model(x), before)
    set_image_size(model, (32, 24), resize="interpolate")
    assert model(torch.randn(1, 3, 32, 24)).shape == (1, 4, 32, 24)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["resnet18", "convnext_atto", "mobilenetv3_small_050"])
def test_a_backbone_of_timms_learns(backbone: str) -> None:
    torch.manual_seed(0)
    model = create_model(
        "setr", backbone=backbone, img_size=(32, 48), in_chans=1, decoder_widths=(16, 16, 8, 8)
    )
    assert model.feature_info[-1]["reduction"] == 16
    target = torch.zeros(4, 32, 48, dtype=torch.long)
    target[:2, :, 24:], target[2:, 16:] = 1, 2
    x = target[:, None].float() - 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]


def test_a_backbone_brings_its_maps() -> None:
    body = timm.create_model("resnet18", features_only=True, out_indices=(2,)).eval()
    model = create_model("setr", backbone="resnet18", img_size=33, out_index=2).eval()
    model.encoder.model.load_state_dict(body.state_dict(), strict=False)
    x = torch.randn(1, 3, 33, 33)
    close(model.forward_features(x), body(x)[0])
    assert len(model.decoder.blocks) == 3  # as many doublings as undo the map's reduction
    assert model(x).shape == (1, 4, 33, 33)


def test_a_backbone_hosts_mixers_where_its_family_does() -> None:
    options: dict[str, Any] = {"depth": 2, "embed_dim": 12, "num_heads": 3}
    model = create_model(
        "setr",
        backbone="vit_tiny_patch16_224",
        backbone_options=options,
        img_size=(32, 48),
        mixer=["kv", "ska"],
        mixer_options={"kv": {"pos_dim": 4}},
    )
    assert list(find_mixers(model)) == [f"encoder.model.blocks.{i}.attn.mixer" for i in (0, 1)]
    step(model, torch.randn(2, 3, 32, 48))
    model.set_grad_checkpointing()
    step(model, torch.randn(2, 3, 32, 48))


@pytest.mark.parametrize("name", ["setr_micro", "setr_kv_ce", "setr_kv_cvt", "setr"])
def test_its_maps_lie_on_the_image(name: str) -> None:
    model = shrunk(name, mixer="key_value").eval()
    host = find_host(model)
    mixers = find_mixers(model)
    assert [f"{place.path}.mixer" for place in host.places(model)] == list(mixers)
    x = images(name)
    maps = keymix.attention_maps(model, x)
    last = list(mixers)[-1]
    reduction = model.feature_info[-1]["reduction"]
    layout = maps.layouts[last]
    assert layout.grid == (x.shape[2] // reduction, x.shape[3] // reduction)
    assert maps[last].shape[-1] == layout.prefix + layout.grid[0] * layout.grid[1]
    alike = map_similarity(model, x, layers=[-2, -1])
    assert 0 < float(alike.pairs[0].mean) <= 1


def test_strided_keys_lie_on_their_own_grid() -> None:
    model = shrunk("setr_qkv_cvt", kv_stride=2, img_size=(96, 64)).eval()
    layouts = keymix.attention_maps(model, torch.randn(1, 3, 96, 64)).layouts
    grids = [(layout.grid, layout.key_grid) for layout in layouts.values()]
    assert grids[0] == ((24, 16), (12, 8))
    assert grids[-1] == ((6, 4), (3, 2))


def test_no_class_token_is_read_out() -> None:
    model = micro(mixer="identity")
    assert class_token_reads_image(model)
    model, x = micro().eval(), torch.randn(1, 3, 16, 24)
    assert attention_rollout(model, x).query == "mean"
    assert attention_maps(model, x).readout == "mean"


def test_put_mixers_reaches_the_encoder() -> None:
    model = micro().eval()
    x = torch.randn(1, 3, 16, 24)
    before = model(x)
    assert put_mixers(model, ["pooling", "key_value"]) == list(find_mixers(model))
    assert [m.mixer_name for m in find_mixers(model).values()] == ["pooling", "key_value"]
    assert differs(model(x), before)
    wide = micro(mixer="key_value", match="params")
    assert min(m.num_heads * m.head_dim for m in find_mixers(wide).values()) > 12


def test_a_classifiers_weights_start_the_encoder() -> None:
    model = create_model("setr_qkv", img_size=(32, 48), embed_dim=12, depth=2, num_heads=3)
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=12, depth=2, num_heads=3
    )
    loaded = load_weights(model, theirs.state_dict())
    assert loaded.resized == ("encoder.pos_embed",)
    assert loaded.unused == ("head.weight", "head.bias")
    assert {name.split(".")[0] for name in loaded.missing} == {"decoder"}
    norm = theirs.state_dict()["blocks.1.attn.qkv.weight"]
    assert torch.equal(model.state_dict()["encoder.blocks.1.attn.mixer.qkv.weight"], norm)


def test_weights_of_its_own_kind_go_to_another_size_and_other_classes() -> None:
    options: dict[str, Any] = {"mixer": "key_value", "mixer_options": {"pos_dim": 4}}
    small = micro(img_size=16, **options)
    resized = {"pos_dim": 4, "resize": "interpolate"}
    large = micro(img_size=(24, 16), num_classes=3, mixer="key_value", mixer_options=resized)
    loaded = load_weights(large, small.state_dict())
    assert set(loaded.missing) == {"decoder.head.weight", "decoder.head.bias"}
    assert "encoder.pos_embed" in loaded.resized
    codes = {f"encoder.blocks.{i}.attn.mixer.pos_code" for i in (0, 1)}
    assert codes <= set(loaded.resized)


def test_images_of_another_size_than_the_patches_are_cut_for_are_refused() -> None:
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(AssertionError, match=r"height \(32\) doesn't match model \(16\)"):
        micro()(x)  # timm's, as of every ViT
    with pytest.raises(UserError, match=r"\(32, 32\), the model was built for \(32, 48\)"):
        shrunk("setr_kv_ce", img_size=(32, 48))(x)


VIT = {"depth": 2, "embed_dim": 12, "num_heads": 3}


def behind_a_vit(**options: Any) -> nn.Module:
    backbone = {"backbone": "vit_tiny_patch16_224", "backbone_options": VIT}
    return create_model("setr", **backbone, img_size=32, **options)


def test_grad_checkpointing_reaches_the_encoder() -> None:
    own, backbone = micro(), behind_a_vit()
    for model, encoder in ((own, own.encoder), (backbone, backbone.encoder.model)):
        assert not encoder.grad_checkpointing
        model.set_grad_checkpointing()
        assert encoder.grad_checkpointing
        model.set_grad_checkpointing(enable=False)
        assert not encoder.grad_checkpointing


@pytest.mark.parametrize("name", ["setr_micro", "setr"])
def test_pruned_it_has_no_decoder(name: str) -> None:
    kept, pruned = shrunk(name), shrunk(name)
    pruned.prune_intermediate_layers(1)
    assert isinstance(pruned.decoder, nn.Identity)
    assert pruned.num_classes == 0
    decoder = kept.decoder
    kept.prune_intermediate_layers(1, prune_head=False)
    assert kept.decoder is decoder
    assert kept.num_classes > 0


def test_a_backbone_drops_paths() -> None:
    def rates(**options: Any) -> list[float]:
        modules = behind_a_vit(**options).encoder.modules()
        return [m.drop_prob for m in modules if isinstance(m, DropPath)]

    assert rates() == []
    assert max(rates(drop_path_rate=0.25)) == 0.25


def test_a_model_of_ones_own_says_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def counter_net(pretrained: bool = False, **given: Any) -> nn.Module:
        raise NotImplementedError

    counter_net.task = "counting"  # type: ignore[attr-defined]
    monkeypatch.setitem(_model_entrypoints, "counter_net", counter_net)
    assert task_of_model("counter_net") == "counting"
