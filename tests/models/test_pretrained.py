# SPDX-License-Identifier: Apache-2.0
"""timm's weights without a network: one line, at once, from every place that wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import save_file

from keymix.errors import UserError
from keymix.models import create_model
from keymix.models import pretrained as fetch

NAME = "vit_tiny_patch16_224"
Given = Callable[..., Any]


def raising(error: BaseException) -> Given:
    def ask(*_: object, **__: object) -> None:
        raise error

    return ask


@pytest.mark.parametrize(
    "error",
    [
        OSError("no route to host\nand a second line"),
        fetch._NETWORK[-1]("nobody answers"),
        OfflineModeIsEnabled("offline mode is enabled"),
    ],
    ids=["system", "http", "offline"],
)
def test_the_hub_out_of_reach_is_one_line_and_asked_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def begun(*_: object, **__: object) -> None:
        pytest.fail("timm was sent to fetch")

    monkeypatch.setattr(fetch, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(fetch, "get_hf_file_metadata", raising(error))
    monkeypatch.setattr("timm.create_model", begun)
    with pytest.raises(UserError, match=f"^weights of '{NAME}' cannot be fetched") as caught:
        create_model(NAME, pretrained=True)
    assert "\n" not in str(caught.value)
    assert not caplog.records


def test_weights_in_the_cache_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "try_to_load_from_cache", lambda *_, **__: "model.safetensors")
    monkeypatch.setattr(fetch, "get_hf_file_metadata", raising(OSError("no network")))
    with fetch.fetching(NAME, {}):
        pass


def test_a_mistake_in_the_model_is_not_called_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "get_hf_file_metadata", lambda *_, **__: None)
    with pytest.raises(UserError, match="num_heads=0"):
        create_model(NAME, pretrained=True, num_heads=0)


SMALL: dict[str, Any] = {"embed_dim": 24, "depth": 1, "num_heads": 3}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(fetch, "get_hf_file_metadata", raising(OSError("no network")))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("source", ["file", "state_dict", "pretrained_cfg"])
def test_weights_that_are_here_need_no_network(source: str, tmp_path: Path) -> None:
    state = timm.create_model(NAME, **SMALL).state_dict()
    save_file(state, tmp_path / "w.safetensors")
    file: dict[str, Any] = {"file": str(tmp_path / "w.safetensors")}
    given: dict[str, Any] = {
        "file": {"pretrained_cfg_overlay": file},
        "state_dict": {"pretrained_cfg_overlay": {"state_dict": state}},
        "pretrained_cfg": {"pretrained_cfg": file | {"num_classes": 1000}},
    }[source]
    model = create_model(NAME, pretrained=True, **SMALL, **given)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_hub_is_asked_for_what_was_given_in_the_cache_that_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, Any]] = []

    def kept(repo: str, file: str, *, cache_dir: Any = None, **_: object) -> str:
        asked.append((repo, cache_dir))
        return file

    monkeypatch.setattr(fetch, "try_to_load_from_cache", kept)
    monkeypatch.setattr(fetch, "get_hf_file_metadata", raising(OSError("no network")))
    overlay = {"hf_hub_id": "somebody/vit@v2"}
    with fetch.fetching(NAME, {"pretrained_cfg_overlay": overlay, "cache_dir": tmp_path}):
        pass
    assert asked == [("somebody/vit", tmp_path)]
