# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub: which files are chosen, and the cache without a network.

The cache is the Hub client's own layout, made by hand; only the two calls that reach the network
are replaced.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from huggingface_hub import errors

from each import together
from keymix.data import load
from keymix.data.sources import hf
from keymix.errors import UserError

SHA = "0b2714987fa478483af9968de7c934580d0bb9a2"
TWENTY = [0, 1] * 10
REPO = "uoft-cs/cifar10"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    return folder


def put(cache: Path, made: Path, revision: str = "main", repo: str = REPO) -> Path:
    """Write files as the Hub's client does: a ref, a snapshot."""
    folder = cache / ("datasets--" + repo.replace("/", "--"))
    ref = folder / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(SHA)
    return Path(shutil.copytree(made, folder / "snapshots" / SHA))


def online(monkeypatch: pytest.MonkeyPatch, shelf: Path, revisions: dict[str, list[str]]) -> list:
    """Let the Hub have files by revision; returns what is downloaded."""
    fetched: list[tuple[str, list[str]]] = []

    def dataset_info(self: object, repo_id: str, *, revision: str) -> SimpleNamespace:
        if revision not in revisions:
            response = SimpleNamespace(headers={}, request=None, status_code=404)
            raise errors.RevisionNotFoundError("no revision", response=response)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in revisions[revision]])

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **options: object) -> str:
        assert options["repo_type"] == "dataset"
        assert set(allow_patterns) <= set(revisions[str(options["revision"])])
        fetched.append((options["revision"], allow_patterns))
        folder = shelf.parent / SHA
        shutil.copytree(shelf, folder, dirs_exist_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(hf, "snapshot_download", snapshot_download)
    return fetched


def refusal(argument: str) -> str:
    with pytest.raises(UserError) as caught:
        load(f"hf:{argument}")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_cache_serves_without_a_network(make_parquet, cache: Path) -> None:
    make_parquet(TWENTY, file="plain_text/train-00000-of-00001.parquet", image_column="img")
    made = make_parquet(
        [1, 0], file="plain_text/test-00000-of-00001.parquet", first_seed=50, image_column="img"
    )
    snapshot = put(cache, made)
    data = load(f"hf:{REPO}")
    assert [len(split) for split in data.splits] == [18, 2, 2]
    assert data.classes == ("cat", "dog")
    wanted = f"https://huggingface.co/datasets/{REPO} at revision {SHA}, configuration plain_text"
    assert wanted in data.record().notes
    assert data.test.ids(0) == f"{snapshot}/plain_text/test-00000-of-00001.parquet row 0"


def test_the_hub_s_conversion_serves_where_the_cache_has_it(make_parquet, cache: Path) -> None:
    make_parquet(TWENTY, file="default/train/0000.parquet")
    put(cache, make_parquet([1, 0], file="default/test/0000.parquet"), "refs/convert/parquet")
    assert len(load(f"hf:{REPO}").test) == 2


def test_only_the_wanted_configuration_is_fetched(make_parquet, cache, monkeypatch) -> None:
    made = make_parquet(TWENTY, file="cropped_digits/train-00000-of-00001.parquet")
    names = [
        "README.md",
        "cropped_digits/train-00000-of-00001.parquet",
        "cropped_digits/extra-00000-of-00001.parquet",
        "full_numbers/train-00000-of-00001.parquet",
    ]
    fetched = online(monkeypatch, made, {"main": names})
    for argument in ("ufldl-stanford/svhn", "ufldl-stanford/svhn/full"):
        assert "cropped_digits, full_numbers" in refusal(argument)
    assert not fetched
    load("hf:ufldl-stanford/svhn/cropped_digits")
    assert fetched == [("main", ["cropped_digits/train-00000-of-00001.parquet"])]


def test_the_conversion_is_fetched_where_main_has_no_parquet(
    make_parquet, cache, monkeypatch
) -> None:
    made = make_parquet(TWENTY, file="default/partial-train/0000.parquet")
    revisions = {
        "main": ["data.zip"],
        "refs/convert/parquet": ["default/partial-train/0000.parquet"],
    }
    fetched = online(monkeypatch, made, revisions)
    notes = load("hf:some/photos").record().notes
    assert fetched[0][0] == "refs/convert/parquet"
    assert any("only a part of this set" in note for note in notes)
    del revisions["refs/convert/parquet"]
    assert "some/photos has no parquet files" in refusal("some/photos")


@together
@pytest.mark.parametrize(
    ("path", "config", "split"),
    [
        ("train.parquet", "", "train"),
        ("data/train-00000-of-00003.parquet", "", "train"),
        ("data/validation-00000-of-00001.parquet", "", "val"),
        ("plain_text/test-00000-of-00001.parquet", "plain_text", "test"),
        ("default/train/0000.parquet", "default", "train"),
        ("en/clean/dev.parquet", "en/clean", "val"),
        ("mnist/mnist-test.parquet", "mnist", "test"),
        ("full/extra-00000-of-00001.parquet", "full", ""),
        ("datasets/train.parquet", "datasets", "train"),
    ],
)
def test_configuration_and_split_are_read_from_the_path(path: str, config: str, split: str) -> None:
    assert hf.sorted_by_path([path, "README.md"]) == [(path, config, split)]


def test_files_of_no_split_are_train(make_parquet, cache: Path) -> None:
    put(cache, make_parquet(TWENTY, file="0000.parquet"))
    assert sum(len(split) for split in load(f"hf:{REPO}").splits) == 20


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, ("Name or service not known", "lacks it")),
        ("data/train-00000-of-00002.parquet", ("lacks data/train-00001-of-00002.parquet",)),
        ("data/test-00000-of-00001.parquet", ("train split, only of test",)),
    ],
    ids=["nothing", "half", "no train"],
)
def test_what_the_cache_lacks_is_named(make_parquet, cache: Path, made, words) -> None:
    if made is not None:
        snapshot = put(cache, make_parquet(TWENTY, file=made))
        (snapshot / "data" / "train-00001-of-00002.parquet").symlink_to(cache / "gone")
    line = refusal(REPO)
    assert all(word in line for word in (REPO, *words))
