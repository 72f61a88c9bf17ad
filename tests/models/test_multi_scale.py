# SPDX-License-Identifier: Apache-2.0
"""U-Net, FPN, UPerNet, DeepLabV3+ and Segformer: against the library's, over any backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from safetensors.torch import save_file
from timm.layers import DropPath
from torch import Tensor, nn

import keymix
from keymix.decoders.segmentation.multi_scale import KINDS
from keymix.hosts import find_mixers
from keymix.models import create_model
from keymix.models.factory import domain_of, own_mixers, task_of_model
from mixer_cases import refused, stir
from tolerances import close, differs

SWIN: dict[str, Any] = {"embed_dim": 24, "depths": (1, 1, 1, 2), "num_heads": (1, 2, 3, 4)}
CLASSES = {
    "unet": smp.Unet,
    "fpn": smp.FPN,
    "upernet": smp.UPerNet,
    "deeplabv3plus": smp.DeepLabV3Plus,
    "segformer": smp.Segformer,
}
THEIRS: dict[str, dict[str, Any]] = {
    "unet": {"decoder_channels": (64, 32, 16, 8, 4)},
    "fpn": {
        "decoder_pyramid_channels": 64,
        "decoder_segmentation_channels": 32,
        "decoder_dropout": 0.0,
    },
    "upernet": {"decoder_channels": 64},
    "deeplabv3plus": {
        "decoder_channels": 64,
        "decoder_atrous_rates": (6, 12, 18),
        "decoder_aspp_dropout": 0.0,
    },
    "segformer": {"decoder_segmentation_channels": 64},
}
each_decoder = pytest.mark.parametrize("name", KINDS)


def on_swin(name: str, **options: Any) -> Any:
    given = {"backbone": "swin_tiny_patch4_window7_224", "backbone_options": SWIN}
    return create_model(name, **{**given, "img_size": (50, 70), "decoder_width": 64, **options})


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def copied(ours: Any, theirs: Any) -> None:
    """Copy the weights; the library's U-Net classifies by 3x3, of which the centre is ours."""
    stir(ours)
    names = theirs.encoder.model.state_dict()  # with underscores where ours have dots
    own = ours.body.state_dict().values()
    theirs.encoder.model.load_state_dict(dict(zip(names, own, strict=True)))
    theirs.decoder.load_state_dict(ours.decoder.join.state_dict())
    head, linear = theirs.segmentation_head[0], ours.decoder.head
    middle = head.kernel_size[0] // 2
    with torch.no_grad():
        head.weight.zero_()[..., middle, middle] = linear.weight[..., 0, 0]
        head.bias.copy_(linear.bias)


@each_decoder
def test_it_is_the_librarys(name: str) -> None:
    options = {"output_stride": 16} if name == "deeplabv3plus" else {}
    ours = create_model(
        name,
        decoder_width=64,
        backbone="test_resnet",
        backbone_options=options,
        img_size=64,
        num_classes=5,
    )
    theirs = CLASSES[name]("tu-test_resnet", encoder_weights=None, classes=5, **THEIRS[name])
    ours.double(), theirs.double()
    copied(ours, theirs)
    x = numbers(2, 3, 64, 96)
    for training in (True, False):  # with norms of the batch, then of those that it left
        ours.train(training), theirs.train(training)
        mine, other = ours(x), theirs(x)
        off = (mine - other).detach().abs().max()
        assert off < 1e-12 * max(1.0, float(other.detach().abs().max()))
        assert differs(mine[0], mine[1])
    mine.square().sum().backward(), other.square().sum().backward()
    grads = dict(theirs.encoder.model.named_parameters())
    for key, parameter in ours.body.named_parameters():
        close(parameter.grad, grads[key].grad)


@pytest.mark.parametrize("name", ["unet", "segformer"])
def test_maps_of_a_transformer_meet_as_in_the_library(name: str) -> None:
    ours = create_model(name, backbone="test_convnext", img_size=64, decoder_width=64).double()
    theirs = CLASSES[name](
        "tu-test_convnext", encoder_weights=None, classes=4, **THEIRS[name]
    ).double()
    copied(ours, theirs)
    x = numbers(2, 3, 64, 32)
    close(ours.eval()(x), theirs.eval()(x))


def test_deeplab_dilates_as_asked() -> None:
    def model(stride: int | None) -> Any:
        options = {} if stride is None else {"output_stride": stride}
        return create_model("deeplabv3plus", backbone="test_resnet", backbone_options=options)

    for stride, rates, stages in ((None, 6, 4), (16, 6, 5), (8, 12, 5)):
        made = model(stride)
        assert made.multiple == (stride or 16)
        assert made.decoder.join.aspp[0].convs[1][0][0].dilation == (rates, rates)
        assert len(made.body.feature_info) == 5
        assert (len(made.body.layer4) == 0) == (stages == 4)
        assert made.eval()(torch.randn(1, 3, 40, 56)).shape == (1, 4, 40, 56)


@each_decoder
@pytest.mark.parametrize("mixer", ["static_key", "pooling"])
def test_a_hierarchical_transformer_with_a_mixer_trains(name: str, mixer: str) -> None:
    backbone: dict[str, Any] = {}
    if mixer == "pooling":  # which shifted windows refuse
        options = {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 40), "head_dim": 8}
        backbone = {"backbone": "caformer_micro_32", "backbone_options": options}
    model = on_swin(name, mixer=mixer, **backbone)
    assert {m.mixer_name for m in find_mixers(model.body).values()} >= {mixer}
    x, target = torch.randn(2, 3, 50, 70), torch.randint(0, 4, (2, 50, 70))
    model.train()
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    without = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=0.02)
        assert nn.functional.cross_entropy(model(x), target) < loss


def test_features_and_branches_are_dropped() -> None:
    model = on_swin("fpn", drop_rate=0.5, drop_path_rate=0.25)
    assert max(m.drop_prob for m in model.body.modules() if isinstance(m, DropPath)) == 0.25
    features = torch.ones(1, model.num_features, 2, 2)
    kept = model.train().forward_head(features, pre_logits=True)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(model.eval().forward_head(features, pre_logits=True), features)


@each_decoder
def test_the_rest_is_the_same_at_a_seed_whatever_the_mixer(name: str) -> None:
    states = []
    for mixer in (None, "key_value", "static_key"):
        torch.manual_seed(5)
        state = on_swin(name, mixer=mixer).state_dict()
        states.append({k: v for k, v in state.items() if ".attn." not in k})
    torch.manual_seed(5)
    other = on_swin(name, backbone_options={**SWIN, "depths": (1, 1, 2, 1)}).state_dict()
    states.append({k: v for k, v in other.items() if k.startswith("decoder")})
    for state in states[1:]:
        assert len(state) > 9
        assert all(torch.equal(v, states[0][k]) for k, v in state.items())


@each_decoder
def test_images_of_any_size_are_padded(name: str) -> None:
    options: dict[str, Any] = {"backbone": "test_resnet", "decoder_width": 64}
    model: Any = create_model(name, **options, img_size=(37, 50), num_classes=3, in_chans=2)
    model.double().eval()
    stir(model)
    for size in ((37, 50), (64, 32), (1, 7)):
        x = numbers(2, 2, *size)
        height, width = model.padded_size(size)
        padded = nn.functional.pad(x, (0, width - size[1], 0, height - size[0]))
        assert model(x).shape == (2, 3, *size)
        close(model(x), model(padded)[..., : size[0], : size[1]])
        model.set_input_size(size)
        close(model.forward_head(model.forward_features(x)), model(x))
        final, maps = model.forward_intermediates(x)
        close(final, model.forward_features(x))
        assert maps[-1].shape[2:] == (height // model.multiple, width // model.multiple)


def test_a_backbone_of_one_size_is_built_for_the_padded_one() -> None:
    model = on_swin("upernet", mixer="static_key", mixer_options={"resize": "interpolate"}).eval()
    assert model.img_size == (50, 70)
    assert model.body.patch_embed.img_size == (64, 96)
    assert model(torch.randn(1, 3, 50, 70)).shape == (1, 4, 50, 70)
    with pytest.raises(AssertionError, match="Input height"):  # timm's
        model(torch.randn(1, 3, 30, 70))
    model.set_input_size((30, 70))
    assert model.body.patch_embed.img_size == (32, 96)
    assert model(torch.randn(1, 3, 30, 70)).shape == (1, 4, 30, 70)


def test_a_network_whose_stem_follows_the_image_size_is_joined_where_its_maps_lie() -> None:
    for side, deepest in ((32, 8), (33, 16), (48, 16), (65, 32), (97, 32)):
        model = create_model("unet", backbone="plain_convnet", img_size=side)
        assert model.feature_info[-1]["reduction"] == model.multiple == deepest
        assert model.decoder.deepest == deepest


@each_decoder
def test_what_cannot_be_decoded_is_one_line(name: str) -> None:
    with torch.device("meta"):
        with refused(rf"maps of one size, 1/16 of the image, and {name} joins.*for it is setr"):
            create_model(name, backbone="vit_tiny_patch16_224")
        with refused(rf"reduced by 16, 32, 64: {name} joins"):
            create_model(name, backbone="levit_128")
        with refused("'setr_micro' has a decoder itself"):
            create_model(name, backbone="setr_micro")
        with refused("decoder_width"):
            create_model(name, backbone="test_resnet", decoder_width=0)
        with refused("'img_size', which the model says"):
            create_model(name, backbone="test_resnet", backbone_options={"img_size": 32})
    if name in ("unet", "fpn"):
        with refused(f"decoder_width=40 of {name} must be a multiple of (16|64)"):
            create_model(name, backbone="test_resnet", decoder_width=40)


def test_fpn_needs_four_maps() -> None:
    with torch.device("meta"), refused("reduced by 2, 4, 8: fpn joins 4 or more of 2, 4, 8, 16"):
        create_model("fpn", backbone="cvt_micro_32")


@pytest.mark.parametrize("name", ["unet", "fpn"])
def test_it_is_known_and_counted(name: str) -> None:
    assert task_of_model(name) == "segmentation"
    assert domain_of(name) == "dense"
    model = create_model(name, backbone="test_resnet", img_size=(50, 70), decoder_width=64)
    assert own_mixers(name, model) is None
    found = keymix.count(model)
    assert found.params == sum(p.numel() for p in model.parameters())
    assert found.input_size == (3, 50, 70)
    height, width = model.padded_size((50, 70))
    pixels = height * width if name == "unet" else height * width // 16
    heads = [layer for layer in found.layers if layer.path == "decoder.head"]
    assert [layer.macs for layer in heads] == [4 * model.num_features * pixels]


def test_pretrained_is_the_backbones(tmp_path: Path) -> None:
    theirs = timm.create_model("test_resnet")
    file = tmp_path / "weights.safetensors"
    save_file(theirs.state_dict(), file)
    stored = {"pretrained_cfg_overlay": {"file": str(file), "hf_hub_id": None}}
    for name in ("fpn", "setr", "mask_rcnn"):
        model = create_model(name, backbone="test_resnet", pretrained=True, backbone_options=stored)
        assert torch.equal(model.body.layer1[0].conv1.weight, theirs.layer1[0].conv1.weight), name
    with refused(f"{tmp_path.name}/none.*no such file"):
        stored["pretrained_cfg_overlay"]["file"] = str(tmp_path / "none")
        create_model("unet", backbone="test_resnet", pretrained=True, backbone_options=stored)
    with refused("vit_micro_p4_32 has no weights of its own"):
        create_model("vit_micro_p4_32", pretrained=True)
