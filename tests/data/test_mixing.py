# SPDX-License-Identifier: Apache-2.0
"""Mixup and cutmix: torchvision's distribution, a sample at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats
from torchvision.transforms import v2

from keymix.data.mixing import Mixing, _beta, _quantile

N, THEIRS = 20_000, 5000  # draws of ours, and of torchvision's, which come one by one
INDEX = torch.arange(N)


def noise(count: int, *shape: int) -> torch.Tensor:
    return torch.randn((count, *shape), generator=torch.Generator().manual_seed(0))


def alternating(count: int) -> torch.Tensor:
    """Make images of 0 and 1 in turn with targets to match: a mixture shows its own share."""
    return (torch.arange(count) % 2).float()


def own_shares(mix: Mixing, height: int, width: int, epoch: int = 0) -> torch.Tensor:
    """The share of each image in its own mixture, by its targets; ``[N]``."""
    targets = torch.arange(N) % 2
    _, soft = mix(torch.zeros(N, 1, height, width), targets, INDEX, epoch)
    return soft.gather(1, targets[:, None])[:, 0]


def torchvision_shares(kind: str, alpha: float, height: int, width: int) -> np.ndarray:
    make = v2.MixUp if kind == "mixup" else v2.CutMix
    transform = make(alpha=alpha, num_classes=2)
    image = torch.zeros(2, 1, height, width)
    key = "lam" if kind == "mixup" else "lam_adjusted"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return np.array([transform.make_params([image])[key] for _ in range(THEIRS)])


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 5.0])
def test_mixup_shares_are_distributed_as_torchvision_s(alpha: float) -> None:
    ours = own_shares(Mixing(alpha, 0.0, 2, 0), 2, 2).double().numpy()
    theirs = torchvision_shares("mixup", alpha, 2, 2)
    low = 1e-5  # nearer to 1, float32 has too few numbers for a distribution
    ends = np.concatenate([[0], np.geomspace(low, 0.05, 6), np.linspace(0.1, 0.9, 9)])
    ends = np.concatenate([ends, 1 - np.geomspace(0.05, low, 6), [1]])
    counts = np.array([np.histogram(shares, ends)[0] for shares in (ours, theirs)])
    expected = N * np.diff(stats.beta(alpha, alpha).cdf(ends))
    common = expected > 5
    rest = [[n[~common].sum()] for n in (*counts, expected)]
    first, second, wanted = (
        np.concatenate([n[common], r]) + 1e-9
        for n, r in zip((*counts, expected), rest, strict=True)
    )
    assert stats.chisquare(first, wanted * first.sum() / wanted.sum()).pvalue > 1e-3
    assert stats.chi2_contingency([first, second]).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.1, 0.8, 5.0])
def test_the_table_of_quantiles_is_read_between_its_knots(alpha: float) -> None:
    probability = torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = _quantile(_beta(alpha, torch.device("cpu")), probability)
    back = torch.from_numpy(special.betainc(alpha, alpha, share.numpy()))
    inner = (share > 1e-6) & (share < 1 - 1e-6)
    assert inner.float().mean() > 0.4
    assert (back - probability)[inner].abs().max() < 2.0**-16
    middle = (probability > 0.1) & (probability < 0.9) & inner
    exact = torch.from_numpy(special.betaincinv(alpha, alpha, probability.numpy()))
    torch.testing.assert_close(share[middle], exact[middle], atol=1e-8, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "height", "width"), [(1.0, 8, 8), (0.5, 6, 11), (3.0, 8, 8)])
def test_cutmix_boxes_are_distributed_as_torchvision_s(
    alpha: float, height: int, width: int
) -> None:
    ours = own_shares(Mixing(0.0, alpha, 2, 0), height, width).numpy()
    theirs = torchvision_shares("cutmix", alpha, height, width)
    pixels = height * width
    areas = [np.rint((1 - shares) * pixels).astype(int) for shares in (ours, theirs)]
    table = np.array([np.bincount(a, minlength=pixels + 1) for a in areas])
    common = table.sum(0) >= 20
    assert stats.chi2_contingency(table[:, common]).pvalue > 1e-3


def test_cutmix_covers_each_pixel_as_often_as_torchvision() -> None:
    count, drawn, side = 6000, 2000, 7
    images = alternating(count)[:, None, None, None].expand(-1, 1, side, side)
    mixed, _ = Mixing(0.0, 1.0, 2, 3)(
        images, torch.zeros(count, dtype=torch.long), INDEX[:count], 0
    )
    ours = (mixed != images)[:, 0].sum(0)
    cut = v2.CutMix(alpha=1.0, num_classes=2)
    theirs = torch.zeros(side, side)
    pair, labels = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 1, side, side), None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(drawn):
            labels = torch.tensor([0, 1])
            theirs += cut(pair, labels)[0][0, 0]
    for a, b in zip(ours.flatten().tolist(), theirs.flatten().tolist(), strict=True):
        table = [[a, count - a], [b, drawn - b]]
        assert stats.chi2_contingency(table).pvalue > 1e-4


def test_mixup_mixes_each_image_with_the_one_before() -> None:
    images, targets = noise(64, 3, 4, 4), torch.arange(64) % 5
    mixed, soft = Mixing(0.4, 0.0, 5, 1)(images, targets, INDEX[:64], 2)
    one_hot = torch.eye(5)[targets]
    share = own_shares(Mixing(0.4, 0.0, 2, 1), 4, 4, epoch=2)[:64]
    expected = torch.stack([s * images[i] + (1 - s) * images[i - 1] for i, s in enumerate(share)])
    labels = torch.stack([s * one_hot[i] + (1 - s) * one_hot[i - 1] for i, s in enumerate(share)])
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(soft, labels)
    torch.testing.assert_close(soft.sum(1), torch.ones(64))


def test_cutmix_pastes_a_rectangle_and_counts_it() -> None:
    images, targets = noise(200, 3, 9, 6), torch.arange(200)
    mixed, soft = Mixing(0.0, 1.0, 200, 1)(images, targets, INDEX[:200], 0)
    sizes = set()
    for i in range(200):
        own, pasted = (mixed[i] == images[i]).all(0), (mixed[i] == images[i - 1]).all(0)
        assert (own ^ pasted).all()
        rows, columns = pasted.any(1).sum(), pasted.any(0).sum()
        assert rows * columns == pasted.sum()  # a rectangle
        torch.testing.assert_close(soft[i, i], own.float().mean())
        torch.testing.assert_close(soft[i, i - 1], pasted.float().mean())
        sizes.add(int(pasted.sum()))
    assert len(sizes) > 10


def test_with_both_each_sample_throws_a_fair_coin() -> None:
    count = 4000
    images = alternating(count)[:, None, None, None].expand(-1, 1, 6, 6)
    targets = torch.arange(count) % 2
    mixed, soft = Mixing(0.5, 1.0, 2, 0)(images, targets, INDEX[:count], 0)
    by_mixup, _ = Mixing(0.5, 0.0, 2, 0)(images, targets, INDEX[:count], 0)
    by_cutmix, _ = Mixing(0.0, 1.0, 2, 0)(images, targets, INDEX[:count], 0)
    blended, boxed = ((mixed == one).flatten(1).all(1) for one in (by_mixup, by_cutmix))
    assert (blended | boxed).all()
    assert 0.46 < (~boxed).float().mean() < 0.54
    torch.testing.assert_close(soft.sum(1), torch.ones(count))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_a_share_of_the_images_is_mixed_and_that_as_all_would_be(
    mixup: float, cutmix: float
) -> None:
    targets = torch.arange(N) % 2
    images = noise(N, 1, 4, 4)
    some, soft = Mixing(mixup, cutmix, 2, 0, 0.3)(images, targets, INDEX, 0)
    left = (some == images).flatten(1).all(1)
    assert 0.68 < left.float().mean() < (0.85 if cutmix else 0.72)  # a box may cover nothing
    own = soft.gather(1, targets[:, None])[:, 0]
    assert (own[left] == 1).all()
    if mixup and cutmix:
        wanted = own_shares(Mixing(mixup, 0.0, 2, 0), 4, 4)
        blended = torch.isclose(own, wanted, atol=1e-6) & ~left
        assert 0.13 < blended.float().mean() < 0.17
    else:
        whole, _ = Mixing(mixup, cutmix, 2, 0)(images, targets, INDEX, 0)
        assert torch.equal(some[~left], whole[~left])


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_a_sample_s_share_depends_on_seed_epoch_and_index_alone(
    mixup: float, cutmix: float
) -> None:
    base = own_shares(Mixing(mixup, cutmix, 2, 0), 8, 8)
    torch.manual_seed(99)
    assert torch.equal(own_shares(Mixing(mixup, cutmix, 2, 0), 8, 8), base)
    for other in (
        own_shares(Mixing(mixup, cutmix, 2, 0), 8, 8, epoch=1),
        own_shares(Mixing(mixup, cutmix, 2, 1), 8, 8),
    ):
        assert abs(np.corrcoef(other, base)[0, 1]) < 0.04
    picked = torch.tensor([700, 3, 12_345, 8])
    targets = torch.arange(4)
    _, soft = Mixing(mixup, cutmix, 4, 0)(torch.zeros(4, 1, 8, 8), targets, picked, 0)
    torch.testing.assert_close(soft.diagonal(), base[picked])


def test_inputs_stay_as_they_are() -> None:
    images, targets = noise(8, 3, 4, 4), torch.arange(8)
    before = images.clone()
    Mixing(0.4, 1.0, 8, 0)(images, targets, INDEX[:8], 0)
    assert torch.equal(images, before)
    assert targets.tolist() == list(range(8))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.0, 0.0), (-0.1, 1.0)])
def test_bad_alphas_are_named(mixup: float, cutmix: float) -> None:
    with pytest.raises(ValueError, match=rf"{mixup=}"):
        Mixing(mixup, cutmix, 2, 0)
