# SPDX-License-Identifier: Apache-2.0
"""The SETR-PUP decoder against NumPy, and its sizes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from keymix.decoders.segmentation.pup import WIDTHS, PUPDecoder, UpBlock
from mixer_cases import stir
from tolerances import close

Array = npt.NDArray[np.float64]


def linear(count: int, size: int) -> Array:
    """The matrix that takes ``count`` samples to ``size`` others, pixels' centres on centres."""
    weights = np.zeros((size, count))
    for i in range(size):
        place = max((i + 0.5) * count / size - 0.5, 0.0)
        low = min(int(place), count - 1)
        high = min(low + 1, count - 1)
        weights[i, low] += 1 - (place - low)
        weights[i, high] += place - low
    return weights


def resized(x: Array, height: int, width: int) -> Array:
    rows, columns = linear(x.shape[2], height), linear(x.shape[3], width)
    return np.einsum("ih,bchw,jw->bcij", rows, x, columns)


def numpy_of(tensor: torch.Tensor | None) -> Array:
    assert tensor is not None
    return tensor.detach().numpy()


def block_of(block: UpBlock, x: Array) -> Array:
    """3x3 convolution, the running statistics' norm, ReLU, twice the size."""
    weight, bias = numpy_of(block.conv.weight), numpy_of(block.conv.bias)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    y = np.einsum("bchwij,ocij->bohw", windows, weight) + bias[:, None, None]
    bn = block.bn
    scale = numpy_of(bn.weight) / np.sqrt(numpy_of(bn.running_var) + bn.eps)
    y = (y - numpy_of(bn.running_mean)[:, None, None]) * scale[:, None, None]
    y = np.maximum(y + numpy_of(bn.bias)[:, None, None], 0)
    return resized(y, 2 * y.shape[2], 2 * y.shape[3])


def stirred(*args: int, **options: object) -> PUPDecoder:
    decoder = PUPDecoder(*args, **options).double().eval()  # type: ignore[arg-type]
    stir(decoder)
    for norm in decoder.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return decoder


@pytest.mark.parametrize("size", [(12, 20), (11, 23), (5, 40)])
def test_it_is_what_the_figure_draws(size: tuple[int, int]) -> None:
    decoder = stirred(6, 3, widths=(5, 4))
    x = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    y: Array = x.numpy()
    for block in decoder.blocks:
        assert isinstance(block, UpBlock)
        y = block_of(block, y)
    close(decoder(x, size, pre_logits=True), torch.from_numpy(y))
    head = decoder.head
    assert isinstance(head, nn.Conv2d)
    y = np.einsum("bchw,kc->bkhw", y, numpy_of(head.weight)[:, :, 0, 0])
    y = y + numpy_of(head.bias)[:, None, None]
    close(decoder(x, size), torch.from_numpy(resized(y, *size)))


def test_it_has_the_papers_parameters() -> None:
    with torch.device("meta"):
        count = {k: sum(p.numel() for p in PUPDecoder(768, k).parameters()) for k in (3, 4)}
    assert count == {3: 5_090_112 + 3 * 65, 4: 5_090_112 + 4 * 65}
    assert WIDTHS == (512, 256, 128, 64)


def test_channels_are_dropped_before_the_classifier_in_training_alone() -> None:
    decoder = stirred(4, 2, widths=(16,), drop_rate=0.5)
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    close(decoder(x, (6, 6), pre_logits=True), decoder.blocks[0](x))
    torch.manual_seed(0)
    dropped = decoder.train()(x, (6, 6), pre_logits=True)
    silent = (dropped == 0).flatten(2).all(-1)
    kept = (decoder.blocks[0](x) == 0).flatten(2).all(-1)
    assert 0 < int((silent & ~kept).sum()) < 16
