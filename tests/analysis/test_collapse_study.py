# SPDX-License-Identifier: Apache-2.0
"""`keymix.collapse` against plain loops in float64, and what it says when maps cannot be had."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from keymix.analysis.attention import attention_maps
from keymix.analysis.capture import find_seats
from keymix.analysis.similarity import PairTally, nearest_blocks
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout
from keymix.models import create_model
from keymix.studies.collapse.measure import (
    LayerTally,
    block_of,
    collapse,
    effective_rank,
    tokens_of,
)
from keymix.studies.collapse.result import Collapse

TAU, K = 0.7, 2


def vit(mixer: str = "softmax", **options: object) -> nn.Module:
    """Four blocks, three heads, a class token, a grid of 3x5 patches, in float64."""
    torch.manual_seed(1)
    size = {"img_size": (12, 20), "patch_size": 4, "embed_dim": 12, "depth": 4, "num_heads": 3}
    model = create_model("vit_12b", mixer=mixer, num_classes=3, **size, **options)
    for parameter in model.parameters():  # maps far from even, so that heads and blocks differ
        nn.init.normal_(parameter, std=0.4)
    return model.double()


@pytest.fixture
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, 12, 20, generator=generator, dtype=torch.float64)


@pytest.fixture
def found(images: Tensor) -> Collapse:
    return collapse(vit(), images, threshold=TAU, nearest=K, batch_size=2)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a @ b) / math.sqrt((a @ a) * (b @ b)))


def equation_2(maps: list[np.ndarray], p: int, q: int) -> np.ndarray:
    """Cosine of columns by loops: image, head, token."""
    images, heads, _, tokens = maps[p].shape
    out = np.empty((images, heads, tokens))
    for i, h, t in np.ndindex(images, heads, tokens):
        out[i, h, t] = cosine(maps[p][i, h, :, t], maps[q][i, h, :, t])
    return out


def maps_of(model: nn.Module, images: Tensor, stage: str = "final") -> list[np.ndarray]:
    return [m.numpy() for m in attention_maps(model, images, stage=stage).values()]


def after_blocks(model: nn.Module, images: Tensor) -> list[np.ndarray]:
    """Tokens after every block, by walking through the model as timm does."""
    with torch.no_grad():
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        out = []
        for block in model.blocks:
            x = block(x)
            out.append(x.numpy())
    return out


@pytest.mark.parametrize("mixer", ["softmax", "re_attention"])
def test_pairs_are_equations_2_and_7_between_all_layers(mixer: str, images: Tensor) -> None:
    model = vit(mixer).eval()
    found = collapse(model, images, threshold=TAU, batch_size=2)
    maps = maps_of(model, images)
    assert [(p.first, p.second) for p in found.pairs] == list(
        combinations([layer.path for layer in found.layers], 2)
    )
    for pair, (p, q) in zip(found.pairs, combinations(range(4), 2), strict=True):
        cosines = equation_2(maps, p, q)
        assert pair.mean == pytest.approx(cosines.mean(), rel=1e-10)
        np.testing.assert_allclose(pair.by_head, cosines.mean((0, 2)), rtol=1e-10)
        assert pair.similar_fraction == (cosines > TAU).mean()
        apart = [m - m.mean(2, keepdims=True) for m in maps]
        assert pair.centred == pytest.approx(equation_2(apart, p, q).mean(), rel=1e-9)
        assert (pair.columns, pair.left_out) == (5 * 3 * 16, 0)


def test_the_ratio_with_the_nearest_blocks_is_of_mean_cosines_above_tau(
    found: Collapse, images: Tensor
) -> None:
    maps = maps_of(vit().eval(), images)
    near = {0: [1, 2], 1: [0, 2], 2: [1, 3], 3: [2, 1]}
    for p, layer in enumerate(found.layers):
        average = sum(equation_2(maps, p, q) for q in near[p]) / K
        assert layer.nearest == (average > TAU).mean()
    assert nearest_blocks(5, 3).tolist() == [[1, 2, 3], [0, 2, 3], [1, 3, 0], [2, 4, 1], [3, 2, 1]]
    assert nearest_blocks(2, 3).tolist() == [[1], [0]]


def test_heads_of_a_block_are_compared_two_by_two(found: Collapse, images: Tensor) -> None:
    for layer, maps in zip(found.layers, maps_of(vit().eval(), images), strict=True):
        cosines = np.array(
            [
                cosine(maps[i, g, :, t], maps[i, h, :, t])
                for i, t in np.ndindex(5, 16)
                for g, h in combinations(range(3), 2)
            ]
        )
        assert layer.head_similarity == pytest.approx(cosines.mean(), rel=1e-10)
        assert layer.heads_similar == (cosines > TAU).mean()


@pytest.mark.parametrize("mixer", ["softmax", "re_attention"])
def test_entropy_and_sinks_are_of_the_map_after_the_softmax(mixer: str, images: Tensor) -> None:
    model = vit(mixer).eval()
    found = collapse(model, images, batch_size=3)
    for layer, maps in zip(found.layers, maps_of(model, images, "softmax"), strict=True):
        rows = [
            [-sum(a * math.log(a) for a in maps[i, h, n]) for i, n in np.ndindex(5, 16)]
            for h in range(3)
        ]
        assert layer.entropy_by_head == pytest.approx([np.mean(r) for r in rows], rel=1e-10)
        assert layer.entropy == pytest.approx(np.mean(rows), rel=1e-10)
        assert layer.entropy_normalised == pytest.approx(np.mean(rows) / math.log(16), rel=1e-10)
        mass = [[sum(maps[i, h, :, t]) / 16 for t in range(16)] for i, h in np.ndindex(5, 3)]
        assert layer.sink == pytest.approx(np.mean([max(m) for m in mass]), rel=1e-10)
        assert layer.sink_in_prefix == np.mean([m.index(max(m)) == 0 for m in mass])
        assert layer.keys == 16


def test_tokens_are_those_after_each_block(found: Collapse, images: Tensor) -> None:
    tokens = after_blocks(vit().eval(), images)
    for layer, x in zip(found.layers, tokens, strict=True):
        alike = [cosine(x[i, n], tokens[-1][i, n]) for i, n in np.ndindex(5, 16)]
        assert layer.feature_similarity == pytest.approx(np.mean(alike), rel=1e-10)
        ranks = []
        for image in x:
            s = np.linalg.svd(image, compute_uv=False)
            p = s / s.sum()
            ranks.append(math.exp(-sum(v * math.log(v) for v in p if v > 0)))
        assert layer.effective_rank == pytest.approx(np.mean(ranks), rel=1e-6)
        assert layer.full_rank == 12
    assert found.layers[-1].feature_similarity == pytest.approx(1)


def test_effective_rank_counts_orthogonal_directions() -> None:
    equal = torch.ones(1, 7, 5)
    four = torch.eye(5)[:4] * 3
    large = 1e200 * torch.eye(3, dtype=torch.float64)
    assert effective_rank(equal).item() == pytest.approx(1)
    assert effective_rank(four[None]).item() == pytest.approx(4)
    assert effective_rank(large[None]).item() == pytest.approx(3)
    assert effective_rank(torch.zeros(1, 3, 2)).isnan().all()


def same(a: object, b: object) -> None:
    """Hold two records equal up to the order of sums."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-9)
    else:
        assert a == b


def test_a_stream_of_batches_gives_what_one_batch_gives(images: Tensor) -> None:
    model = vit("re_attention")
    at_once = collapse(model, images, batch_size=5).to_dict()

    def stream() -> Iterator[Tensor]:
        yield from (images[:1], images[1:4], images[4:])

    lines: list[int] = []
    same(at_once, collapse(model, stream(), progress=lines.append).to_dict())
    assert lines == [1, 4, 5]


def test_images_cut_into_small_parts_give_the_same(monkeypatch, images: Tensor) -> None:
    model = vit()
    whole = collapse(model, images).to_dict()
    monkeypatch.setattr("keymix.analysis.similarity._BUDGET", 1)
    same(whole, collapse(model, images).to_dict())


def layer_tally(threshold: float) -> LayerTally:
    return LayerTally(next(iter(find_seats(vit()).values())), threshold)


def test_nothing_of_a_batch_is_kept(images: Tensor) -> None:
    tally, layer = PairTally(["a", "b"], threshold=TAU, nearest=1), layer_tally(TAU)

    def numbers_kept() -> int:
        kept = [*vars(tally).values(), *vars(layer).values(), *layer._sums.values()]
        return sum(each.numel() for each in kept if isinstance(each, Tensor))

    sizes = []
    for _ in range(3):
        maps = torch.rand(2, 4, 3, 9, 9)
        tally.add(list(maps))
        layer.add_heads(maps[0])
        sizes.append(numbers_kept())
    assert len(set(sizes)) == 1


def test_columns_of_zeros_are_left_out_and_counted() -> None:
    a, b, c = torch.rand(3, 1, 2, 4, 4, dtype=torch.float64)
    b[0, 1, :, 2] = 0
    tally = PairTally(["a", "b", "c"], threshold=TAU, nearest=1)
    tally.add([a, b, c])
    ab, ac, _ = tally.pairs()
    assert [(p.columns, p.left_out) for p in (ab, ac)] == [(7, 1), (8, 0)]
    maps = [m.numpy() for m in (a, b)]
    lines = [
        cosine(maps[0][0, h, :, t], maps[1][0, h, :, t])
        for h, t in np.ndindex(2, 4)
        if (h, t) != (1, 2)
    ]
    assert ab.mean == pytest.approx(np.mean(lines))
    assert tally.nearest()["a"] == np.mean(np.array(lines) > TAU)


def test_columns_of_just_the_threshold_are_not_similar() -> None:
    """Eq. 7 asks for more than tau: here each cosine is 1/2, without any rounding."""
    own = torch.eye(4, dtype=torch.float64).expand(2, 2, 4, 4)
    even = torch.full_like(own, 0.25)
    for tau, share in ((0.5, 0.0), (math.nextafter(0.5, 0.0), 1.0)):
        tally, layer = PairTally(["a", "b"], threshold=tau, nearest=1), layer_tally(tau)
        tally.add([own, even])
        layer.add_heads(torch.stack((own[:, 0], even[:, 0]), 1))
        (pair,) = tally.pairs()
        assert (pair.mean, pair.columns, layer.mean("head_similarity")) == (0.5, 16, 0.5)
        assert pair.similar_fraction == layer.mean("heads_similar") == share
        assert tally.nearest() == {"a": share, "b": share}


def test_even_columns_have_no_centred_cosine() -> None:
    even, other = torch.full((1, 1, 7, 7), 1 / 7), torch.rand(1, 1, 7, 7)
    tally = PairTally(["a", "b"], threshold=TAU, nearest=1)
    tally.add([even, other])
    (pair,) = tally.pairs()
    assert math.isnan(pair.centred)
    assert (pair.columns, pair.left_out) == (7, 0)


def test_the_model_is_left_as_it_was(images: Tensor) -> None:
    model = vit("re_attention").train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    collapse(model, images)
    assert model.training
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    hooks = [len(m._forward_hooks) for m in model.modules()]
    collapse(model, images)  # adapters keep listening for sizes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks


def test_timms_own_attention_is_read_and_compared() -> None:
    torch.manual_seed(0)
    size = {"img_size": 24, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **size).eval().double()
    images = torch.randn(3, 3, 24, 24, dtype=torch.float64)
    found = collapse(model, images, layers="1-2")
    assert [layer.path for layer in found.layers] == ["blocks.1.attn", "blocks.2.attn"]
    assert [layer.block for layer in found.layers] == [2, 3]
    tokens = model.patch_embed(images)
    tokens = model._pos_embed(tokens)
    maps = []
    for block in model.blocks:
        h = block.norm1(tokens)
        qkv = block.attn.qkv(h).reshape(3, 10, 3, 3, 8).permute(2, 0, 3, 1, 4)
        maps.append((qkv[0] @ qkv[1].mT / math.sqrt(8)).softmax(-1).detach().numpy())
        tokens = block(tokens)
    assert found.pairs[0].mean == pytest.approx(equation_2(maps, 1, 2).mean(), rel=1e-8)
    assert found.shared_from is None  # the first block was not read


def test_theta_is_read_where_there_is_one(images: Tensor) -> None:
    model = vit("re_attention")
    found = collapse(model, images[:1])
    for layer, block in zip(found.layers, model.blocks, strict=True):
        assert layer.theta == tuple(map(tuple, block.attn.mixer.theta.tolist()))
    assert collapse(vit(), images[:1]).layers[0].theta is None


def test_weights_that_are_no_shares_have_no_entropy(images: Tensor) -> None:
    found = collapse(vit("static_key", mixer_options={"activation": "relu"}), images)
    layer = found.layers[0]
    assert (layer.entropy, layer.sink, layer.sink_in_prefix) == (None, None, None)
    assert "do not sum to one" in str(layer.uneven)
    assert found.pairs


def test_layers_without_a_map_are_left_out_and_named(images: Tensor) -> None:
    model = vit(["softmax", "identity", "softmax", "softmax"])
    found = collapse(model, images)
    assert [layer.group for layer in found.layers] == [0, None, 0, 0]
    assert "identity" in str(found.layers[1].missing)
    assert found.layers[1].effective_rank is not None
    assert found.neighbours[0].second == "blocks.2.attn.mixer"  # the next that can be compared
    assert found.shared_from is None
    assert any("block 2 (" in line for line in found.sentences[found.of.label])
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["images"] == 5


def test_stages_and_shifted_windows_are_compared_among_themselves() -> None:
    sizes = {"depths": (4, 2), "num_heads": (1, 2), "merging": (2,)}
    model = create_model("swin_micro_p2_32", **sizes).eval()
    found = collapse(model, torch.randn(2, 3, 32, 32), batch_size=2)
    ends = [(found.blocks[p.first], found.blocks[p.second]) for p in found.pairs]
    assert ends == [(1, 3), (2, 4)]
    assert found.pairs[0].columns == 2 * 16 * 16  # images, windows of 4x4, keys of one head
    assert [layer.stage for layer in found.layers] == [0, 0, 0, 0, 1, 1]
    assert any("blocks 1, 3; blocks 2, 4" in line for line in found.sentences[found.of.label])
    # tokens of a stage are compared with those after its own last block
    assert found.layers[3].feature_similarity == pytest.approx(1)
    assert found.layers[5].feature_similarity == pytest.approx(1)
    assert found.layers[4].feature_similarity != pytest.approx(1)


@pytest.mark.parametrize(
    ("mixer", "remedy"),
    [("re_attention", "Re-attention"), ("static_key_re_attention", "Re-attention"), ("ska", "")],
)
def test_remedies_come_from_the_mixers(mixer: str, remedy: str, images: Tensor) -> None:
    assert {layer.remedy for layer in collapse(vit(mixer), images).layers} == {remedy}


def test_shared_from_is_the_first_block_that_takes_a_map(images: Tensor) -> None:
    model = vit(shared_from=2)
    kinds = [layer.attention for layer in collapse(model, images).layers]
    assert kinds == ["softmax"] * 2 + ["shared_map"] * 2


def test_a_model_without_maps_has_tokens_alone(images: Tensor) -> None:
    found = collapse(vit("pooling"), images)
    assert (found.collapsed, found.pairs, found.shared_from) == (None, (), None)
    assert any("pooling" in line for line in found.sentences[found.of.label])
    assert all(layer.effective_rank for layer in found.layers)


def test_maps_of_other_shapes_are_not_compared(images: Tensor) -> None:
    found = collapse(vit(["softmax", "random", "softmax", "random"]), images)
    assert [layer.group for layer in found.layers] == [0, 1, 0, 1]
    assert any("blocks 1, 3; blocks 2, 4" in line for line in found.sentences[found.of.label])


def test_blocks_are_the_items_of_a_list_and_outputs_become_tokens() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"a": nn.ModuleDict()})])})
    model["layers"][0]["a"]["attention"] = nn.Linear(1, 1)
    assert block_of(model, "layers.0.a.attention") == "layers.0"
    assert block_of(nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(1, 1)})}), "a.b") == "a"
    image = torch.arange(24.0).reshape(1, 4, 2, 3)
    rows = image.flatten(2).mT
    assert torch.equal(tokens_of(image, 4, None), rows)
    assert torch.equal(tokens_of((image.permute(0, 2, 3, 1), None), 4, None), rows)
    square = torch.arange(32.0).reshape(1, 4, 2, 4)
    last = Layout(grid=(4, 2), key_grid=(4, 2))
    assert torch.equal(tokens_of(square, 4, last), square.flatten(1, 2))
    first = Layout(grid=(2, 4), key_grid=(2, 4))
    assert torch.equal(tokens_of(square, 4, first), square.flatten(2).mT)
    with pytest.raises(UserError, match=r"\(2, 3\) is no tokens of width 5"):
        tokens_of(torch.zeros(2, 3), 5, None)


def test_no_images_and_images_of_two_sizes_are_refused(images: Tensor) -> None:
    with pytest.raises(UserError, match="at least one image"):
        collapse(vit(), [])
    model = vit(dynamic_img_size=True)
    with pytest.raises(UserError, match="one size"):
        collapse(model, [images, images[..., :16]])
