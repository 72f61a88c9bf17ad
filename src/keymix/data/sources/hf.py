# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub, as the parquet files that it holds or converted itself.

Only the files of the wanted configuration are fetched; the Hub's own cache keeps them, and serves
them where there is no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from keymix.data.sources import parquet
from keymix.data.sources.base import Faults, Source, some
from keymix.data.sources.parquet import CELL_MIB
from keymix.data.specs import DataSpec
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="hf",
        argument="OWNER/NAME",
        summary="a data set of the Hugging Face Hub; OWNER/NAME/CONFIG where it has several parts",
        downloads=True,
        settings=("cell_mib",),
    ),
)

_CONVERTED = "refs/convert/parquet"  # the branch on which the Hub keeps its own conversion
_SPLIT = re.compile(r"(?:.*[-_.])?(train|test|validation|valid|val|dev)(?:[-_.].*)?")
_PARTIAL = "partial-"  # before the split's name, where the Hub converted the first gigabytes only
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.parquet")
# Errors of the HTTP library that the Hub's client is built on; which one differs by version.
_NETWORK = cast(
    "tuple[type[Exception], ...]", (OSError, EntryNotFoundError, *HfHubHTTPError.__bases__)
)


@dataclass(frozen=True)
class _Found:
    """A parquet file of a repository, sorted by its path."""

    path: str
    config: str
    split: str  # empty where the path names none


@dataclass(frozen=True)
class _Repo:
    id: str
    config: str  # empty for the only one

    @property
    def spec(self) -> str:
        return f"hf:{self.id}" + (f"/{self.config}" if self.config else "")

    @property
    def address(self) -> str:
        return f"{constants.ENDPOINT}/datasets/{self.id}"


def open_source(argument: str, faults: Faults, *, cell_mib: int = CELL_MIB) -> Source:
    """Open ``OWNER/NAME`` or ``OWNER/NAME/CONFIG``: from the Hub, else from its cache."""
    parts = argument.split("/")
    if len(parts) < 2 or not all(parts):
        raise UserError(
            f"data hf:{argument}: write hf:OWNER/NAME, such as hf:uoft-cs/cifar10, "
            "or hf:OWNER/NAME/CONFIG."
        )
    repo = _Repo("/".join(parts[:2]), "/".join(parts[2:]))
    folder, chosen = _from_hub(repo)
    files: dict[str, list[Path]] = {}
    for each in sorted(chosen, key=lambda found: found.path):
        files.setdefault(each.split, []).append(folder / each.path)
    if "train" not in files:
        raise UserError(
            f"data {repo.spec}: {repo.address} has no parquet files of a train split, only "
            f"{some(sorted(files))}. Download it and name the training files, for parquet:PATH."
        )
    notes = [f"{repo.address} at revision {folder.name}"]
    if chosen[0].config:
        notes[0] += f", configuration {chosen[0].config}"
    if any(_PARTIAL in each.path for each in chosen):
        notes.append("the Hub converted only a part of this set to parquet: the rest is missing")
    return parquet.open_files(files, notes, repo.spec, faults, cell_mib=cell_mib)


def _from_hub(repo: _Repo) -> tuple[Path, list[_Found]]:
    """Fetch what is missing; where there is no network, take what the cache has.

    Returns the snapshot's folder, named by its commit, and the files chosen from it.
    """
    api = HfApi()
    for revision in (constants.DEFAULT_REVISION, _CONVERTED):
        try:
            info = api.dataset_info(repo.id, revision=revision)
            found = _sorted_by_path(file.rfilename for file in info.siblings or ())
            if not found:
                continue
            chosen = _choose(repo, found)
            folder = snapshot_download(
                repo.id,
                repo_type="dataset",
                revision=revision,
                allow_patterns=[each.path for each in chosen],
            )
        except RevisionNotFoundError:
            continue
        except GatedRepoError as error:
            raise UserError(
                f"data {repo.spec}: {repo.address} asks for its terms to be accepted. Open that "
                "page, accept them, and log in with `hf auth login`."
            ) from error
        except RepositoryNotFoundError as error:
            raise UserError(
                f"data {repo.spec}: there is no {repo.address}, or it is private. Check owner and "
                "name; for a private one log in with `hf auth login`."
            ) from error
        except HFValidationError as error:
            raise UserError(
                f"data {repo.spec}: {repo.id!r} is no name of the Hub. Write hf:OWNER/NAME."
            ) from error
        except _NETWORK as error:
            return _from_cache(repo, error)
        return Path(folder), chosen
    raise UserError(
        f"data {repo.spec}: {repo.address} has no parquet files. Download its images, and use "
        "folder:PATH."
    )


def _from_cache(repo: _Repo, trouble: Exception) -> tuple[Path, list[_Found]]:
    """Find the newest snapshot that the Hub's cache has of the data set."""
    for revision in (constants.DEFAULT_REVISION, _CONVERTED):
        try:
            # no pattern: only the snapshot's folder is wanted, whatever files are missing there
            folder = Path(
                snapshot_download(
                    repo.id,
                    repo_type="dataset",
                    revision=revision,
                    allow_patterns=[],
                    local_files_only=True,
                )
            )
        except EntryNotFoundError:
            continue
        there = (file for file in folder.rglob("*.parquet") if file.exists())
        found = _sorted_by_path(file.relative_to(folder).as_posix() for file in there)
        if not found:
            continue
        chosen = _choose(repo, found)
        missing = _missing_shards(chosen)
        if missing:
            raise UserError(
                f"data {repo.spec}: {_unreachable(repo, trouble)} and the cache {folder} lacks "
                f"{some(missing)}. Run the command again where there is a network."
            )
        return folder, chosen
    raise UserError(
        f"data {repo.spec}: {_unreachable(repo, trouble)} and it is not in the cache "
        f"{constants.HF_HUB_CACHE}. Run the command where there is a network, or download the "
        "parquet files from there and use parquet:PATH."
    )


def _unreachable(repo: _Repo, trouble: Exception) -> str:
    lines = str(trouble).strip().splitlines()
    reason = lines[0].strip().rstrip(".") if lines else type(trouble).__name__
    return f"{repo.address} cannot be reached ({reason})"


def _sorted_by_path(paths: Iterable[str]) -> list[_Found]:
    """Return configuration and split of the parquet files among ``paths``.

    ``CONFIG/train-00000-of-00001.parquet`` as authors upload them, ``CONFIG/train/0000.parquet`` as
    the Hub converts; the folder ``data`` is no configuration.
    """
    found = []
    for path in paths:
        pure = PurePosixPath(path)
        if pure.suffix != ".parquet":
            continue
        folders = list(pure.parts[:-1])
        match = _SPLIT.fullmatch(pure.stem)
        if match is None and folders:
            match = _SPLIT.fullmatch(folders[-1])
            folders = folders[:-1] if match else folders
        config = "/".join(folders[1:] if folders[:1] == ["data"] else folders)
        split = match.group(1) if match else ""
        held_out = split.startswith("val") or split == "dev"
        found.append(_Found(path, config, "validation" if held_out else split))
    return found


def _choose(repo: _Repo, found: list[_Found]) -> list[_Found]:
    """Choose the files of the wanted configuration; files of no split are train if all are so."""
    configs = sorted({each.config for each in found})
    config = repo.config
    if not config:
        usual = [name for name in ("", "default") if name in configs]
        config = [*usual, *configs][0] if usual or len(configs) == 1 else ""
    if config not in configs:
        problem = f"no configuration {config!r}" if config else "several configurations"
        raise UserError(
            f"data {repo.spec}: {repo.address} has {problem}. "
            f"Write hf:{repo.id}/CONFIG with one of: {some(configs, 20)}."
        )
    chosen = [each for each in found if each.config == config]
    if not any(each.split for each in chosen):
        return [_Found(each.path, each.config, "train") for each in chosen]
    return [each for each in chosen if each.split]


def _missing_shards(chosen: list[_Found]) -> list[str]:
    """List the files that the names of the others (``-00000-of-00002``) promise."""
    there = {each.path for each in chosen}
    promised = set()
    for path in there:
        if shard := _SHARD.fullmatch(path):
            stem, _, total = shard.groups()
            promised |= {f"{stem}-{i:05d}-of-{total}.parquet" for i in range(int(total))}
    return sorted(promised - there)
