# SPDX-License-Identifier: Apache-2.0
"""timm's trained weights: fetched, or refused at once in one line where they cannot be had."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from timm.models import PretrainedCfg, resolve_pretrained_cfg, split_model_name_tag

from keymix.errors import UserError, one_line

_FILES = ("model.safetensors", "pytorch_model.bin")
_PATIENCE = 10.0  # seconds until the Hub is taken to be out of reach
# What the HTTP library raises that the Hub's client is built on differs by version.
_NETWORK = cast("tuple[type[Exception], ...]", (OSError, *HfHubHTTPError.__bases__))
_FAILED: tuple[type[Exception], ...] = (*_NETWORK, HFValidationError)  # or a name that none can be


def weights_of(name: str, given: Mapping[str, Any]) -> PretrainedCfg:
    """Return by what timm finds a model's weights.

    ``pretrained_cfg`` and ``pretrained_cfg_overlay``, as given to timm's builder, go before what
    the registry has.
    """
    variant, tag = split_model_name_tag(name)
    config = given.get("pretrained_cfg") or tag or None
    return resolve_pretrained_cfg(variant, config, given.get("pretrained_cfg_overlay"))


def names_weights(config: PretrainedCfg) -> bool:
    """Whether there are weights of a model anywhere."""
    return bool(config.has_weights or config.state_dict or config.source)


@contextmanager
def fetching(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Let a model's weights be fetched or read within, and say in one line if they cannot be.

    The Hub's client tries an address five times over half a minute, with a warning each time; it
    is asked once here, unless its cache has the weights. For weights in a file or in memory
    nobody is asked.
    """
    config = weights_of(name, given)
    if config.source != "hf-hub" and (config.state_dict or config.file):
        with _reading(config.file):
            yield
        return
    remedy = (
        "Run this where there is a network; or bring the Hub's cache here and set "
        "HF_HUB_OFFLINE=1; or give a file of weights: --model.weights of keymix train, --weights "
        "of keymix swap, keymix.models.load_weights in Python"
    )
    with of_hub(f"weights of {name!r} cannot be fetched", remedy):
        _reach(config, given.get("cache_dir"))
        yield


@contextmanager
def of_hub(failed: str, remedy: str) -> Iterator[None]:
    """Say in one line what failed at the Hub within, why, and what to do."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # each retry is a warning
    try:
        yield
    except _FAILED as error:
        lines = str(error).strip().splitlines()
        why = one_line(lines[0].strip().rstrip(".")) if lines else type(error).__name__
        raise UserError(f"{failed} ({why}). {remedy}") from error
    finally:
        log.setLevel(level)


def from_hub(name: str, files: list[str]) -> Path:
    """Fetch files of a model from the Hub; what its cache has serves where there is no network."""
    with of_hub(
        f"there is no run {name!r} here, and no such model can be fetched from the Hub",
        "Name a run's folder, or run this where there is a network or the Hub's cache",
    ):
        try:
            get_hf_file_metadata(hf_hub_url(name, files[0]), timeout=_PATIENCE)
        except _NETWORK as error:
            with suppress(*_NETWORK):
                return Path(snapshot_download(name, allow_patterns=files, local_files_only=True))
            raise error
        return Path(snapshot_download(name, allow_patterns=files))


@contextmanager
def _reading(file: object) -> Iterator[None]:
    """Say in one line that a file of weights cannot be read."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"weights {str(file)!r}: no such file") from error
    except (EOFError, OSError, SafetensorError, pickle.UnpicklingError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"weights {str(file)!r} cannot be read: {one_line(lines[0])}") from error


def _reach(config: PretrainedCfg, cache_dir: str | Path | None) -> None:
    """Ask the Hub once for a model's weights, unless its cache has them."""
    if not config.hf_hub_id:
        return  # one file by its address, which is asked for once
    repo, _, revision = config.hf_hub_id.partition("@")
    files = (config.hf_hub_filename,) if config.hf_hub_filename else _FILES
    kept = (
        try_to_load_from_cache(repo, file, cache_dir=cache_dir, revision=revision or None)
        for file in files
    )
    if any(isinstance(path, str) for path in kept):
        return
    with suppress(EntryNotFoundError):  # the Hub answers; the weights have another name
        get_hf_file_metadata(
            hf_hub_url(repo, files[0], revision=revision or None), timeout=_PATIENCE
        )
