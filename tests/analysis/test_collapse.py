# SPDX-License-Identifier: Apache-2.0
"""Attention collapse: DeepViT's Eq. 2 against NumPy, in a stream of batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import keymix
from keymix.analysis.attention import attention_maps
from keymix.analysis.similarity import column_cosines, map_similarity
from keymix.errors import NoAttentionMap, UserError


def make(mixer: str | list[str] = "softmax") -> nn.Module:
    torch.manual_seed(0)
    return keymix.create_model("vit_nano_p2_12", mixer=mixer, in_chans=1)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def oracle(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Eq. 2 by loops: images, heads, tokens; a column is what one token gives to all outputs."""
    out = np.empty((a.shape[0], a.shape[1], a.shape[3]))
    for i, h, t in np.ndindex(*out.shape):
        p, q = a[i, h, :, t], b[i, h, :, t]
        out[i, h, t] = (p @ q) / (np.sqrt(p @ p) * np.sqrt(q @ q))
    return out


def test_column_cosines_are_equation_2() -> None:
    a, b = torch.rand(2, 3, 5, 4), torch.rand(2, 3, 5, 4)
    np.testing.assert_allclose(
        column_cosines(a, b).numpy(), oracle(a.double().numpy(), b.double().numpy()), rtol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["softmax", "re_attention"])
def test_similarity_is_the_mean_of_equation_2(mixer: str, images: Tensor) -> None:
    model = make(mixer)
    result = map_similarity(model, images, batch_size=2)
    maps = {p: m.double().numpy() for p, m in attention_maps(model, images, stage="final").items()}
    paths = list(maps)
    assert result.layers == tuple(paths)
    assert (len(result.pairs), len(result.adjacent)) == (6, 3)
    for pair in result.pairs:
        cosines = oracle(maps[pair.first], maps[pair.second])
        assert pair.mean == pytest.approx(cosines.mean(), rel=1e-5)
        np.testing.assert_allclose(pair.by_head, cosines.mean((0, 2)), rtol=1e-5)
        assert pair.similar_fraction == pytest.approx((cosines > 0.5).mean())
        assert (pair.columns, pair.left_out) == (cosines.size, 0)
    assert result.images == 5


def test_batches_are_streamed(images: Tensor) -> None:
    model = make()
    at_once = map_similarity(model, images)
    stream = map_similarity(model, iter([images[:1], images[1:4], images[4:]]))
    assert stream.images == at_once.images
    for a, b in zip(stream.pairs, at_once.pairs, strict=True):
        assert a.mean == pytest.approx(b.mean, rel=1e-6)


def test_equal_maps_have_similarity_one_and_count_as_collapsed(images: Tensor) -> None:
    model = make("random")
    matrix = model.blocks[0].attn.mixer.random_matrix  # type: ignore[index, union-attr]
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.mixer.random_matrix.copy_(matrix)
    result = map_similarity(model, images)
    assert all(p.mean == pytest.approx(1) for p in result.pairs)
    assert result.similar_blocks == 1


def test_columns_of_zeros_are_left_out_and_counted() -> None:
    a, b = torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 4)
    a[0, 0, :, 1] = 0
    cosines = column_cosines(a, b)
    assert math.isnan(cosines[0, 0, 1])
    assert int(cosines.isnan().sum()) == 1


def test_what_cannot_be_compared_is_refused(images: Tensor) -> None:
    with pytest.raises(UserError, match="needs two layers"):
        map_similarity(make(), images, layers=0)
    with pytest.raises(UserError, match="differ in shape"):
        map_similarity(make(["softmax", "random", "softmax", "softmax"]), images)
    with pytest.raises(NoAttentionMap, match="identity"):
        map_similarity(make(["softmax", "identity", "softmax", "softmax"]), images)
    with pytest.raises(UserError, match="at least one image"):
        map_similarity(make(), [])


@pytest.mark.gpu
def test_similarity_on_cuda_is_that_on_the_cpu(images: Tensor) -> None:
    model = make("re_attention").double()
    wanted = map_similarity(model, images.double(), batch_size=2)
    found = map_similarity(model.cuda(), images.double(), batch_size=2)
    for one, other in zip(found.pairs, wanted.pairs, strict=True):
        assert one.mean == pytest.approx(other.mean, rel=1e-6)
        assert one.by_head == pytest.approx(other.by_head, rel=1e-6)
