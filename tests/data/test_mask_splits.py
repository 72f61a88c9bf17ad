# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scan_sets import mask_set, scan_path, scan_set

from keymix.data import load, loading
from keymix.data.dataset import ImageData
from keymix.data.kinds import MASK
from keymix.data.sample import Row, Source
from keymix.data.specs import Options
from keymix.data.splits import Part, Table, choose_groups, make_splits
from keymix.data.streams import Stream
from keymix.errors import UserError

COUNTS = st.lists(st.integers(1, 12), min_size=3, max_size=12)


def source_of(counts: list[int]) -> Source:
    """Cases of so many images, which are not there."""
    rows = [
        Row(id="", image=torch.empty, target=0, name=f"{case}_{k}", group=f"case{case}")
        for case, count in enumerate(counts)
        for k in range(count)
    ]
    return Source(rows=rows, test_fraction=0.04)


def divided(
    source: Source, *, seed: int = 0, val_fraction: float = 1 / 6, **asked: Any
) -> dict[str, Part]:
    options = Options(val_fraction=val_fraction, split_seed=seed, **asked)
    table = Table.of(source.rows, MASK)
    return make_splits(source, table, "x", options)[0]


@given(COUNTS, st.integers(0, 2**31), st.floats(0.01, 0.6), st.floats(0.01, 0.6))
def test_no_case_is_in_two_splits(counts: list[int], seed: int, test: float, val: float) -> None:
    source = source_of(counts)
    parts = divided(source, seed=seed, test_fraction=test, val_fraction=val)
    groups = {name: {source.rows[i].group for i in part.rows} for name, part in parts.items()}
    assert all(groups.values())
    assert sum(map(len, groups.values())) == len(counts)  # each in one
    rows = np.concatenate([part.rows for part in parts.values()])
    assert sorted(rows.tolist()) == list(range(sum(counts)))
    again = divided(source, seed=seed, test_fraction=test, val_fraction=val)
    assert all((again[name].rows == parts[name].rows).all() for name in parts)
    other = divided(source, seed=seed + 1, test_fraction=test, val_fraction=val)
    assert (other["test"].rows == parts["test"].rows).all()  # whatever the split seed


@given(COUNTS, st.integers(0, 2**31), st.floats(0.01, 0.9))
def test_no_further_case_would_bring_the_share_nearer(
    counts: list[int], seed: int, share: float
) -> None:
    groups = [f"case{case}" for case, count in enumerate(counts) for _ in range(count)]
    chosen = choose_groups(groups, share, seed=seed, stream=Stream.VALIDATION)
    taken = Counter(groups[i] for i in chosen)
    sizes = Counter(groups)
    assert all(taken[name] == sizes[name] for name in taken)  # whole cases
    off = abs(len(chosen) - share * len(groups))
    left = [name for name in sizes if name not in taken]
    assert left
    if len(left) > 1:
        assert all(abs(len(chosen) + sizes[name] - share * len(groups)) >= off for name in left)


def test_the_split_seed_changes_validation() -> None:
    source = source_of([3] * 10)
    chosen = {tuple(divided(source, seed=seed, val_fraction=0.2)["val"].rows) for seed in range(8)}
    assert len(chosen) > 4


def test_a_large_set_is_split_eighty_sixteen_four() -> None:
    sizes = np.random.default_rng(0).integers(40, 140, 85).tolist()  # cases as in the competition
    parts = divided(source_of(sizes))  # the shares that recipes ask for
    whole = sum(sizes)
    shares = [len(parts[name].rows) / whole for name in ("train", "val", "test")]
    assert shares == pytest.approx([0.8, 0.16, 0.04], abs=0.005)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5], "data x: 1 case to make train, val and test of; 3 are needed. Add some, or take d"),
        ([5, 5], "data x: 2 cases to make train, val and test of; 3 are needed."),
    ],
)
def test_too_few_cases_are_reported(counts: list[int], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        divided(source_of(counts))
    assert str(caught.value).startswith(expected)
    parts = divided(source_of(counts), split_by="slice")
    assert sum(len(part.rows) for part in parts.values()) == sum(counts)


def test_slices_of_a_case_may_part() -> None:
    source = source_of([10, 10, 10])
    parts = divided(source, split_by="slice", test_fraction=0.2, val_fraction=0.25)
    assert [len(parts[name].rows) for name in ("train", "val", "test")] == [18, 6, 6]
    shared = [{source.rows[i].group for i in part.rows} for part in parts.values()]
    assert set.intersection(*shared)


def test_a_limit_takes_images_and_moves_no_case() -> None:
    source = source_of([6] * 10)
    whole = divided(source, val_fraction=0.2, test_fraction=0.3)
    some = divided(source, val_fraction=0.2, test_fraction=0.3, limit=21)
    assert len(some["train"].rows) + len(some["val"].rows) == 21
    assert len(some["val"].rows) == 3  # 6 of 42 are
    assert len(some["test"].rows) == 18
    for name, part in some.items():
        assert set(part.rows) <= set(whole[name].rows)


@pytest.mark.parametrize("limit", [2, 10])
def test_a_limit_leaves_something_to_learn_from_where_val_is_larger(
    tmp_path: Path, limit: int
) -> None:
    root = mask_set(tmp_path / "set", {"train": 3, "val": 30, "test": 4})
    data = load(f"masks:{root}", limit=limit)
    assert [len(split) for split in data.splits] == [1, limit - 1, min(4, limit)]


def test_a_limit_takes_the_same_test_images_whatever_the_split_seed() -> None:
    source = source_of([6] * 10)
    some = [
        divided(source, seed=seed, val_fraction=0.2, test_fraction=0.3, limit=8)
        for seed in range(4)
    ]
    assert len({tuple(parts["test"].rows) for parts in some}) == 1
    assert len(some[0]["test"].rows) == 8  # of 18
    assert len({tuple(parts["train"].rows) for parts in some}) == 4


def test_images_in_memory_and_read_one_by_one_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = scan_set(tmp_path, {1: 3, 2: 3, 3: 3, 4: 3})
    options = {"image_size": (4, 5), "val_fraction": 0.3, "stack": 3}
    in_memory = load(f"uwgi:{root}", **options)  # type: ignore[arg-type]
    monkeypatch.setattr(loading, "CACHE_MASKS", 0)
    read = load(f"uwgi:{root}", **options)  # type: ignore[arg-type]
    assert in_memory.record().cached
    assert not read.record().cached
    assert (in_memory.mean, in_memory.std) == (read.mean, read.std)
    for ours, theirs in zip(in_memory.splits, read.splits, strict=True):
        for i in range(len(ours)):
            assert torch.equal(ours.read(i), theirs.read(i))
            assert torch.equal(ours.mask(i), theirs.mask(i))
    image = in_memory.train.read(0)
    assert image.shape == (3, 4, 5)
    kept = image.clone()
    image.zero_()  # a copy
    assert torch.equal(in_memory.train.read(0), kept)
    assert in_memory.train.own(0).shape == (3, 6, 9)


@pytest.mark.parametrize("kind", ["images", "masks"])
def test_faults_of_a_set_read_one_by_one_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(loading, "CACHE_MASKS", 0)
    root = mask_set(tmp_path / "set", {"train": 4, "val": 2, "test": 2})
    file = root / "test" / kind / "p1.png"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])  # the header is whole
    with pytest.raises(UserError, match=rf"cannot read {kind[:-1]} .*test/{kind}/p1\.png"):
        load(f"masks:{root}")


def sha(data: ImageData) -> str:
    return str(data.record().fingerprint)


@pytest.mark.parametrize("in_memory", [True, False])
def test_mean_and_deviation_are_those_of_the_training_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    if not in_memory:
        monkeypatch.setattr(loading, "CACHE_MASKS", 0)
    scans = scan_set(tmp_path / "scans", {1: 2, 2: 2, 3: 2, 4: 2})
    files = mask_set(tmp_path / "files", {"train": 5, "val": 3, "test": 3})
    for spec, stack in ((f"uwgi:{scans}", 3), (f"masks:{files}", None)):
        data = load(spec, val_fraction=0.3, stack=stack)
        found = {}
        for split in data.splits:
            pixels = np.stack([split.own(i).numpy() for i in range(len(split))]) / 255.0
            found[split.name] = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3))
        mean, std = found["train"]
        np.testing.assert_allclose(data.mean, mean, rtol=1e-12)
        np.testing.assert_allclose(data.std, std, rtol=1e-12)
        assert all((abs(found[other][0] - mean) > 1e-4).all() for other in ("val", "test"))


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
def test_the_fingerprint_is_of_images_and_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    if not in_memory:
        monkeypatch.setattr(loading, "CACHE_MASKS", 0)
    scans = scan_set(tmp_path / "scans", {1: 2, 2: 2, 3: 2})
    files = mask_set(tmp_path / "files", {"": 6})
    first = [sha(load(f"uwgi:{scans}")), sha(load(f"masks:{files}"))]
    assert first == [sha(load(f"uwgi:{scans}")), sha(load(f"masks:{files}"))]
    text = (scans / "train.csv").read_text()
    (scans / "train.csv").write_text(text.replace("11 2", "11 3", 1))
    mask = np.array(Image.open(files / "masks" / "p0.png"))
    mask[0, 0] = 1 - (mask[0, 0] == 1)
    Image.fromarray(mask).save(files / "masks" / "p0.png")
    second = [sha(load(f"uwgi:{scans}")), sha(load(f"masks:{files}"))]
    (scans / "train.csv").write_text(text)
    path = scan_path(scans, 1, 0, 1, (6, 9))
    pixels = np.array(Image.open(path))
    pixels[3, 3] = 0
    Image.fromarray(pixels).save(path)
    assert len({*first, *second, sha(load(f"uwgi:{scans}"))}) == 5


def test_images_of_several_sizes_become_224(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "set", {"": 6})
    for kind in ("images", "masks"):
        path = root / kind / "p0.png"
        Image.open(path).resize((5, 5), Image.Resampling.NEAREST).save(path)
    assert load(f"masks:{root}").image_size == (224, 224)


def test_the_real_cases_are_split_whole(real_data: Path) -> None:
    spec = f"uwgi:{real_data}/uw-madison-gi"
    for seed in range(3):
        data = load(spec, split_seed=seed, image_size=32, val_fraction=1 / 6, test_fraction=0.2)
        groups = [set(split.groups) for split in data.splits]
        assert not groups[0] & groups[1]
        assert not groups[0] & groups[2]
        assert not groups[1] & groups[2]
        assert (
            sum(map(len, groups)) == len(set().union(*groups)) == sum(data.record().cases.values())
        )
