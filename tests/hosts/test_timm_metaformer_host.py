# SPDX-License-Identifier: Apache-2.0
"""Putting mixers into timm's MetaFormer: any block, any layout, again and again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from timm.layers import GroupNorm1
from timm.models import metaformer as timms
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.timm_metaformer import GridBlock
from keymix.mixers.registry import build, list_mixers
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close

SIZES: dict[str, Any] = {"depths": (1, 2, 2), "dims": (8, 16, 32), "num_classes": 5}
PATHS = [f"stages.{s}.blocks.{i}.token_mixer" for s, i in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1))]


def caformer(**options: Any) -> timms.MetaFormer:
    """timm's class: convolutions, convolutions, attention with heads of 8."""
    model = timms.MetaFormer(
        token_mixers=[timms.SepConv, timms.SepConv, timms.Attention],
        norm_layers=[timms.LayerNorm2dNoBias] * 2 + [timms.LayerNormNoBias],
        res_scale_init_values=(None, 1.0, 1.0),
        head_dim=8,
        **{**SIZES, **options},
    )
    model.pretrained_cfg = {"input_size": (3, 48, 32)}
    stir(model)
    return model.eval()


def poolformer() -> timms.MetaFormer:
    """timm's class with norms that have no form for tokens."""
    model = timms.MetaFormer(norm_layers=GroupNorm1, layer_scale_init_values=1e-5, **SIZES)
    model.pretrained_cfg = {"input_size": (3, 48, 32)}
    stir(model)
    return model.eval()


def images(height: int = 48, width: int = 32) -> Tensor:
    noise = torch.Generator().manual_seed(4)
    return torch.randn(2, 3, height, width, generator=noise)


def test_places_say_what_the_host_knows() -> None:
    model = caformer(proj_drop_rate=0.25)
    places = find_host(model).places(model)
    assert [p.path for p in places] == PATHS
    assert [p.stage for p in places] == [0, 1, 1, 2, 2]
    assert [p.site.grid for p in places] == [(12, 8), (6, 4), (6, 4), (3, 2), (3, 2)]
    assert [(p.site.dim, p.site.num_heads) for p in places[2:4]] == [(16, 1), (32, 4)]
    assert put_mixers(model, "mhsa") == [f"{path}.mixer" for path in PATHS]
    for made in find_mixers(model).values():
        assert (made.qkv.bias, made.proj.bias, made.proj_drop.p) == (None, None, 0.25)
    assert find_mixers(model)[f"{PATHS[4]}.mixer"].head_dim == 8
    assert find_mixers(model)[f"{PATHS[1]}.mixer"].head_dim == 32, "CAFormer's, where none is"


def test_sep_conv_here_is_the_familys_and_another_where_asked() -> None:
    model = caformer()
    put_mixers(model, ["sep_conv", "sep_conv", "cska"], [{}, {"kernel_size": 3}, {}])
    found = list(find_mixers(model).values())
    assert (found[0].dwconv.kernel_size, found[0].pwconv1.out_channels) == ((7, 7), 16)
    assert found[0].pwconv1.bias is None
    assert found[1].dwconv.kernel_size == (3, 3)
    assert found[3].key_conv.kernel_size == (3, 3), "another mixer's option of that name"


@pytest.mark.slow
@together
@pytest.mark.parametrize("make", [caformer, poolformer])
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_every_mixer_trains_in_every_block(make: Any, name: str) -> None:
    model = make().train()
    put_mixers(model, "ska", {"num_heads": 3, "head_dim": 4})
    put_mixers(model, name)
    model(images()).square().sum().backward()
    unseen = [
        f"{path}.{key}"
        for path, made in find_mixers(model).items()
        for key, p in made.named_parameters()
        if p.grad is None or (key not in made.zero_gradients and not p.grad.any())
    ]
    assert unseen == []
    put_mixers(model, "softmax")
    mixers = [*find_mixers(model).values()]
    heads = [1, 1, 1, 4, 4] if make is caformer else [1] * 5
    assert [m.num_heads for m in mixers] == heads, "the host's heads, not the last mixer's"


@pytest.mark.parametrize("make", [caformer, poolformer])
def test_blocks_left_alone_compute_the_same(make: Any) -> None:
    """Of a stage one block gets a mixer; every other block computes what it did."""
    model = make().double()
    x = images().double()
    between: dict[str, Tensor] = {}
    last = model.stages[2].blocks[1]
    last.register_forward_hook(lambda _, args, out: between.update(x=args[0], y=out))
    model(x)
    host = find_host(model)
    place = host.places(model)[3]
    host.put(model, place, build("sep_conv", place.site).double())
    images_already = make is poolformer
    kept = timms.MetaFormerBlock if images_already else GridBlock
    assert [type(block) for block in model.stages[2].blocks] == [GridBlock, kept]
    given, wanted = between["x"], between["y"]
    if given.ndim == 3:
        given, wanted = (t.mT.reshape(2, 32, 3, 2) for t in (given, wanted))
    close(model.stages[2].blocks[1](given), wanted)
    assert model(x).shape == (2, 5)


def test_another_layout_has_the_same_numbers() -> None:
    model = caformer(layer_scale_init_values=0.5).double()
    put_mixers(model, "identity")  # on images everywhere
    block, x = model.stages[1].blocks[0], torch.randn(2, 16, 6, 4, dtype=torch.float64)
    y = block(x)
    assert block.use_nchw
    block.set_layout(use_nchw=False)
    assert isinstance(block.mlp.fc1, nn.Linear)
    assert isinstance(block.norm1, timms.LayerNormNoBias)
    close(block(x), y)
    block.set_layout(use_nchw=True)
    assert isinstance(block.mlp.fc2, nn.Conv2d)
    close(block(x), y)


def test_the_layout_follows_the_mixer_block_by_block() -> None:
    model = caformer()
    put_mixers(model, ["ska", "sep_conv", "linear", "pooling", "kv"])
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert [block.use_nchw for block in blocks] == [False, True, False, True, False]
    y = model(images())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(images()), y)


def test_softmax_in_the_place_of_timms_attention_computes_the_same() -> None:
    theirs = caformer().double()
    mine = copy.deepcopy(theirs)
    put_mixers(mine, ["sep_conv", "sep_conv", "softmax"])
    renamed = {
        k.replace(".token_mixer.", ".token_mixer.mixer."): v for k, v in theirs.state_dict().items()
    }
    mine.load_state_dict(renamed, strict=True)
    for x in (images().double(), images(64, 80).double()):
        close(mine(x), theirs(x))


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = caformer()
    before, kinds = model(images()), [type(m) for m in model.modules()]
    with pytest.raises(UserError, match="pool_size"):
        put_mixers(model, ["softmax", "ska", "pooling"], {"pooling": {"pool_size": 2}})
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(model(images()), before)


@pytest.mark.parametrize("training", [True, False])
def test_mode_dtype_and_frozen_weights_stay(training: bool) -> None:
    model = caformer().to(torch.float64).train(training)
    model.stages[0].blocks[0].mlp.fc1.weight.requires_grad_(requires_grad=False)
    put_mixers(model, "re_attention")
    assert all(m.training == training for m in model.modules())
    assert all(p.dtype == torch.float64 for p in model.parameters())
    frozen = [k for k, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["stages.0.blocks.0.mlp.fc1.weight"]


def test_mixers_start_as_timms_do() -> None:
    model = caformer(dims=(64, 64, 128))
    put_mixers(model, ["sep_conv", "cska", "softmax"])
    found = find_mixers(model)
    linears = [found[f"{PATHS[0]}.mixer"].pwconv1, found[f"{PATHS[0]}.mixer"].dwconv]
    linears += [*found[f"{PATHS[1]}.mixer"].projections, *found[f"{PATHS[3]}.mixer"].projections]
    for linear in linears:
        assert float(linear.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_timms_models_by_name() -> None:
    for name in ("caformer_s18", "convformer_s18", "poolformer_s12", "poolformerv2_s12"):
        with torch.device("meta"):
            model = create_model(name, mixer=["sep_conv", "cska", "softmax", "softmax"])
        assert len(find_mixers(model)) == sum(len(stage.blocks) for stage in model.stages)
        assert all(t.is_meta for t in model.state_dict().values())
        assert find_mixers(model)["stages.1.blocks.0.token_mixer.mixer"].site.grid == (28, 28)


def test_timms_models_take_another_image_size() -> None:
    with torch.device("meta"):
        model = create_model("caformer_s18", mixer="ska", img_size=(160, 96), in_chans=1)
        plain = create_model("resnet18", img_size=64)
    assert find_mixers(model)["stages.0.blocks.0.token_mixer.mixer"].site.grid == (40, 24)
    assert model.pretrained_cfg["input_size"] == (1, 160, 96)
    assert plain.pretrained_cfg["input_size"] == (3, 64, 64)
    with pytest.raises(UserError, match="no_such_argument"):
        create_model("caformer_s18", img_size=64, no_such_argument=1)


def test_an_image_too_small_is_refused() -> None:
    model = caformer()
    model.pretrained_cfg = {"input_size": (3, 2, 2)}
    with pytest.raises(UserError, match="2x2 pixels are smaller than a patch"):
        put_mixers(model, "softmax")
