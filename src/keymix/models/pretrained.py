# SPDX-License-Identifier: Apache-2.0
"""timm's trained weights: fetched, or refused at once in one line where they cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from timm.models import get_pretrained_cfg

from keymix.errors import UserError, one_line

_FILES = ("model.safetensors", "pytorch_model.bin")
_PATIENCE = 10.0  # seconds until the Hub is taken to be out of reach
# What the HTTP library raises that the Hub's client is built on differs by version.
_NETWORK = cast("tuple[type[Exception], ...]", (OSError, *HfHubHTTPError.__bases__))


@contextmanager
def fetching(name: str) -> Iterator[None]:
    """Let a model's weights be fetched within, and say in one line if they cannot be.

    The Hub's client tries an address five times over half a minute, with a warning each time; it
    is asked once here, unless its cache has the weights.

    Args:
        name: The model, by timm's name.

    Raises:
        UserError: If the weights cannot be fetched; it names the remedy.
    """
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # each retry is a warning
    try:
        _reach(name)
        yield
    except _NETWORK as error:
        lines = str(error).strip().splitlines()
        why = one_line(lines[0].strip().rstrip(".")) if lines else type(error).__name__
        raise UserError(
            f"weights of {name!r} cannot be fetched ({why}). Run this where there is a network; or "
            "bring the Hub's cache here and set HF_HUB_OFFLINE=1; or give a file of weights: "
            "--model.weights of keymix train, --weights of keymix swap, "
            "keymix.models.load_weights in Python"
        ) from error
    finally:
        log.setLevel(level)


def _reach(name: str) -> None:
    """Ask the Hub once for a model's weights, unless its cache has them."""
    config = get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        return  # one file by its address, which is asked for once
    repo, _, revision = config.hf_hub_id.partition("@")
    files = (config.hf_hub_filename,) if config.hf_hub_filename else _FILES
    kept = (try_to_load_from_cache(repo, file, revision=revision or None) for file in files)
    if any(isinstance(path, str) for path in kept):
        return
    with suppress(EntryNotFoundError):  # the Hub answers; the weights have another name
        get_hf_file_metadata(
            hf_hub_url(repo, files[0], revision=revision or None), timeout=_PATIENCE
        )
