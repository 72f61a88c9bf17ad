# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub, as the parquet files that it holds or converted itself.

Only the files of the wanted configuration are fetched; the Hub's own cache keeps them, and serves
them where there is no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, cast

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from keymix.data.files import split_named
from keymix.data.sample import Faults, Source, some
from keymix.data.sources import parquet
from keymix.data.specs import source
from keymix.errors import UserError

_REVISIONS = (constants.DEFAULT_REVISION, "refs/convert/parquet")
"""The data set's own files, and the branch on which the Hub keeps its own conversion."""
_PARTIAL = "partial-"  # before the split's name, where the Hub converted the first gigabytes only
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.parquet")
# Errors of the HTTP library that the Hub's client is built on; which one differs by version.
_NETWORK = cast(
    "tuple[type[Exception], ...]", (OSError, EntryNotFoundError, *HfHubHTTPError.__bases__)
)


class Found(NamedTuple):
    """A parquet file of a repository, sorted by its path."""

    path: str
    config: str
    split: str  # empty where the path names none


@source(
    "hf",
    argument="OWNER/NAME",
    summary="a data set of the Hugging Face Hub; OWNER/NAME/CONFIG where it has several parts",
    downloads=True,
    settings=("white_level",),
)
def open_hf(argument: str, faults: Faults) -> Source:
    """Open ``OWNER/NAME`` or ``OWNER/NAME/CONFIG``: from the Hub, else from its cache."""
    spec = f"hf:{argument}"
    owner, name, config = (*argument.split("/", 2), "", "")[:3]
    if not owner or not name or argument.endswith("/"):
        raise UserError(f"data {spec}: write hf:OWNER/NAME or hf:OWNER/NAME/CONFIG.")
    address = f"{constants.ENDPOINT}/datasets/{owner}/{name}"
    repo = f"{owner}/{name}"
    try:
        folder, found = _snapshot(repo, config, spec)
    except RepositoryNotFoundError as error:  # or one that asks for its terms to be accepted
        raise UserError(
            f"data {spec}: {address} does not exist, is private, or asks for its terms to be "
            "accepted. Open that page, and log in with `hf auth login`."
        ) from error
    except HFValidationError as error:
        raise UserError(f"data {spec}: {repo!r} is no name of the Hub.") from error
    except _NETWORK as error:
        folder, found = _snapshot(repo, config, spec, offline=True)
        lacks = some(_missing_shards(found)) if found else "it"
        if lacks:
            why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UserError(
                f"data {spec}: the Hub cannot be reached ({why}), and its cache "
                f"{constants.HF_HUB_CACHE} lacks {lacks}. Run the command where there is a "
                "network, or use parquet:PATH."
            ) from error
    files: dict[str, list[Path]] = {}
    for each in sorted(found):
        files.setdefault(each.split, []).append(folder / each.path)
    if "train" not in files:
        raise UserError(
            f"data {spec}: {address} has no parquet files of a train split, only of "
            f"{some(sorted(files)) or 'none'}. Download its files, for parquet:PATH or folder:PATH."
        )
    notes = [f"{address} at revision {folder.name}"]
    if found[0].config:
        notes[0] += f", configuration {found[0].config}"
    if any(_PARTIAL in each.path for each in found):
        notes.append("the Hub converted only a part of this set to parquet: the rest is missing")
    return parquet.open_files(files, notes, spec, faults)


def _snapshot(
    repo: str, config: str, spec: str, *, offline: bool = False
) -> tuple[Path, list[Found]]:
    """Fetch what is missing, or take what the Hub's cache has.

    Returns the snapshot's folder, named by its commit, and its files.
    """
    fetch = partial(snapshot_download, repo, repo_type="dataset", local_files_only=offline)
    absent = EntryNotFoundError if offline else RevisionNotFoundError
    for revision in _REVISIONS:
        try:
            if offline:  # no pattern: only the folder is wanted, whatever files are missing there
                folder = fetch(revision=revision, allow_patterns=[])
                there = [file for file in Path(folder).rglob("*.parquet") if file.exists()]
                paths = [file.relative_to(folder).as_posix() for file in there]
            else:
                info = HfApi().dataset_info(repo, revision=revision)
                paths = [file.rfilename for file in info.siblings or ()]
        except absent:
            continue
        if found := sorted_by_path(paths):
            found = chosen(found, config, spec)
            if not offline:
                wanted = [each.path for each in found]
                folder = fetch(revision=revision, allow_patterns=wanted)
            return Path(folder), found
    return Path(), []


def sorted_by_path(paths: Iterable[str]) -> list[Found]:
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
        split = _split_in(pure.stem)
        if not split and folders:
            split = _split_in(folders[-1])
            folders = folders[:-1] if split else folders
        found.append(Found(path, "/".join(folders[folders[:1] == ["data"] :]), split))
    return found


def _split_in(name: str) -> str:
    return next(filter(None, map(split_named, re.split("[-_.]", name))), "")


def chosen(found: list[Found], config: str, spec: str) -> list[Found]:
    """Choose the files of the wanted configuration; files of no split are train if all are so."""
    configs = sorted({each.config for each in found})
    alone = configs if len(configs) == 1 else []
    usual = [config] if config else ["", "default", *alone]
    config = next((name for name in usual if name in configs), "?")
    if config == "?":
        raise UserError(
            f"data {spec}: its configurations are {some(configs, 20)}. Write hf:OWNER/NAME/CONFIG "
            "with one of them."
        )
    of = [each for each in found if each.config == config]
    named = [each for each in of if each.split]
    return named or [each._replace(split="train") for each in of]


def _missing_shards(found: list[Found]) -> list[str]:
    """List the files that the names of the others (``-00000-of-00002``) promise."""
    there = {each.path for each in found}
    shards = [shard.groups() for path in there if (shard := _SHARD.fullmatch(path))]
    promised = {
        f"{stem}-{i:05d}-of-{total}.parquet" for stem, _, total in shards for i in range(int(total))
    }
    return sorted(promised - there)
