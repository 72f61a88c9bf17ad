# SPDX-License-Identifier: Apache-2.0
"""Attention maps of models: right rows, right layers, a reason where there are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import keymix
from keymix.analysis.attention import attention_maps
from keymix.analysis.capture import At, Call, Seat, run_once, select_layers
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts import find_mixers
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.layers import by_name
from keymix.mixers.map_mixer import MapMixer
from keymix.studies.attention.overlays import Cell, Drawn, Range, Row, shaded
from tolerances import close

MODEL = "vit_nano_p2_12"


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def make(mixer: str | list[str] = "softmax", **options: object) -> nn.Module:
    torch.manual_seed(0)
    return keymix.create_model(MODEL, mixer=mixer, in_chans=1, mixer_options=options or None)


def maps_by_hand(model: nn.Module, images: Tensor, stage: str) -> list[Tensor]:
    """Run every block by hand and form each whole map from what reached the mixer."""
    model = model.eval()
    given: list[tuple[MapMixer, Tensor]] = []
    mixers = [m for m in model.modules() if isinstance(m, MapMixer)]
    handles = [
        m.register_forward_hook(lambda m, args, out: given.append((m, args[0]))) for m in mixers
    ]
    with torch.no_grad():
        model(images)
        maps = [m.maps(m.inputs(x, m.site.grid), m.site.grid, stage=stage) for m, x in given]
    for handle in handles:
        handle.remove()
    return maps


@pytest.mark.parametrize("mixer", ["softmax", "static_key", "conv_static_key", "re_attention"])
@pytest.mark.parametrize("stage", ["softmax", "final"])
def test_maps_are_those_of_the_forward_pass(mixer: str, stage: str, images: Tensor) -> None:
    model = make(mixer)
    maps = attention_maps(model, images, stage=stage)
    assert list(maps) == [f"blocks.{i}.attn.mixer" for i in range(4)]
    for got, wanted in zip(maps.values(), maps_by_hand(model, images, stage), strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.shape == (2, 4, 36, 36)
        assert not got.requires_grad


def test_asked_rows_are_rows_of_the_whole_map(images: Tensor) -> None:
    model = make()
    whole = attention_maps(model, images, layers=-1)
    some = attention_maps(model, images, layers=-1, queries=[7, 0])
    for path, rows in some.items():
        torch.testing.assert_close(rows, whole[path][..., [7, 0], :])


def test_the_model_is_left_as_it_was(images: Tensor) -> None:
    model = make("re_attention").train()
    model.blocks[1].eval()  # type: ignore[index, union-attr]
    modes = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = torch.get_rng_state()
    attention_maps(model, images)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(m._forward_pre_hooks for m in find_mixers(model).values())


def test_everything_is_restored_after_an_error(images: Tensor) -> None:
    model = make(["softmax", "softmax", "identity", "softmax"]).train()
    with pytest.raises(NoAttentionMap):
        attention_maps(model, images)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in find_mixers(model).values())


def test_the_forward_pass_stays_fused(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make(), []
    fused = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: object, **kwargs: object) -> Tensor:
        calls.append(1)
        return fused(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    attention_maps(model, images, queries=[0])
    assert len(calls) == 4


def test_a_layer_without_a_map_says_which_and_why(images: Tensor) -> None:
    model = make(["softmax", "identity", "softmax", "softmax"])
    with pytest.raises(NoAttentionMap, match=r"blocks\.1\.attn\.mixer.*'identity'"):
        attention_maps(model, images)
    assert len(attention_maps(model, images, layers=["blocks.[023].*"])) == 3


def test_a_layer_that_does_not_run_is_an_error(images: Tensor) -> None:
    model = make()
    model.spare = keymix.create_mixer("softmax", dim=8)  # type: ignore[assignment]
    with pytest.raises(NoAttentionMap, match="spare did not run"):
        attention_maps(model, images)


def test_a_query_that_is_no_token_is_refused(images: Tensor) -> None:
    with pytest.raises(UserError, match="36 tokens"):
        attention_maps(make(), images, queries=[36])


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["softmax", "static_key", "conv_static_key", "re_attention"])
@pytest.mark.parametrize("stage", ["softmax", "final"])
def test_maps_on_cuda_are_those_on_the_cpu(mixer: str, stage: str, images: Tensor) -> None:
    model, images = make(mixer).double(), images.double()
    wanted = attention_maps(model, images, stage=stage)
    found = attention_maps(model.cuda(), images, stage=stage)
    for path, maps in found.items():
        close(maps.cpu(), wanted[path])


@pytest.fixture(scope="module")
def padding() -> nn.Module:
    """A model that pads images to whole multiples of 32 pixels; patches have 4."""
    return keymix.create_model(
        "mask_rcnn",
        backbone="vit_micro_p4_32",
        backbone_size=32,
        mixer="softmax",
        out_channels=8,
        proposals=8,
        num_classes=2,
    ).eval()


@pytest.mark.parametrize("pixel", [(0, 0), (22, 5), (44, 36), (13, 36)])
def test_a_cell_lies_where_its_pixels_are_on_an_image_that_the_model_pads(
    padding: nn.Module, pixel: tuple[int, int]
) -> None:
    size, (y, x) = (45, 37), pixel
    tokens: list[tuple[Tensor, Layout]] = []

    def keep(seat: Seat, call: Call, layout: Layout | None) -> None:
        assert layout is not None
        tokens.append((by_name(*call)["x"][0], layout))

    black = torch.zeros(1, 3, *size)
    image = black.clone()
    image[..., y, x] = 3
    for each in (black, image):
        run_once(padding, each, select_layers(padding, 0), keep)
    (before, layout), (after, _) = tokens
    assert layout.grid == (16, 16)
    assert layout.image == (45 / 64, 37 / 64)
    (changed,) = (after != before).any(-1).nonzero()[:, 0].tolist()
    assert At((y + 0.5) / size[0], (x + 0.5) / size[1]).token(layout) == changed

    values = torch.zeros(layout.prefix + 16 * 16).double()
    values[changed] = 16
    cell = Cell(values=values[layout.prefix :].reshape(16, 16).numpy(), image=layout.image)
    drawn = shaded(cell, np.zeros((3, *size), dtype=np.uint8), Range(0, 16)).sum(-1)
    assert drawn.shape == size
    brightest = drawn == drawn.max()
    rows, columns = np.nonzero(brightest)
    assert {row // 4 for row in rows} == {y // 4}
    assert {column // 4 for column in columns} == {x // 4}


def test_what_lies_on_padding_alone_is_not_shown() -> None:
    values = np.ones((16, 16))
    values[12:], values[:, 10:] = 50.0, 50.0
    values[11, 9] = 4.0  # a part of it has pixels
    cell = Cell(values=values, image=(45 / 64, 37 / 64))
    assert cell.shown.shape == (12, 10)
    assert cell.span == "1.00 to 4.00×"
    photo = np.zeros((3, 45, 37), dtype=np.uint8)
    row = Row(label="", cells=(cell,), photo=photo)
    drawn = Drawn(file="", title="", note="", columns=["block 1"], rows=[row])
    assert drawn.ranges[False].high < 5
    assert (Cell(values=values).shown == values).all()


def test_images_that_are_not_padded_are_all_that_the_grid_covers(images: Tensor) -> None:
    maps = attention_maps(make(), images, queries="mean")
    assert {layout.image for layout in maps.layouts.values()} == {(1.0, 1.0)}


@pytest.mark.parametrize(("pool", "query"), [("token", "cls"), ("avg", "mean")])
def test_the_default_query_is_what_the_model_reads_out(pool: str, query: str) -> None:
    model = keymix.create_model("vit_micro_p4_32", global_pool=pool)
    assert attention_maps(model, torch.randn(1, 3, 32, 32)).readout == query


def test_maps_print_their_layers_and_are_laid_on_their_image(images: Tensor) -> None:
    maps = keymix.attention_maps(make(), images)
    first = next(iter(maps))
    assert maps[0] is maps[first]
    assert maps[-1] is maps[[*maps][-1]]
    assert f"{first}  {tuple(maps[0].shape)}" in repr(maps)
    assert len(repr(maps).splitlines()) == 1 + len(maps)
    times = maps.overlay(image=1, layer=0, head=2)
    assert times.shape == images.shape[-2:]
    by_hand = 36 * maps[0][1, 2].mean(0).view(6, 6)  # 2 x 2 pixels a patch
    inner = times.view(6, 2, 6, 2).mean((1, 3))[1:-1, 1:-1]
    weights = torch.tensor([1.0, 6.0, 1.0]) / 8  # of bilinear growth, averaged over a patch
    smooth = torch.nn.functional.conv2d(
        by_hand[None, None], torch.outer(weights, weights)[None, None]
    )
    close(inner, smooth[0, 0])
    assert maps.plot(layer=first).get_title() == first
    for wrong, culprit in (
        ({"layer": 99}, "'99'"),
        ({"image": 2}, "image=2"),
        ({"head": 9}, "head=9"),
    ):
        with pytest.raises(UserError, match=culprit):
            maps.overlay(**wrong)
