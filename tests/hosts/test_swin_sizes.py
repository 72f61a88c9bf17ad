# SPDX-License-Identifier: Apache-2.0
"""What a user of Swin reads when he asks for another image size."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers, windows
from keymix.models import create_model, set_image_size

SMALL: dict[str, Any] = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "merging": (2,)}


def micro(**options: Any) -> Any:
    return create_model("swin_micro_p2_32", **{**SMALL, **options}).eval()


def test_only_what_a_user_cannot_mend_is_kept_from_him(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = (
        "torch.searchsorted(): input value tensor is non-contiguous, this will lower the "
        "performance due to extra data copy",
        "Using a non-tuple sequence for multidimensional indexing is deprecated and will change",
    )
    resize = windows.resize_rel_pos_bias_table

    def loud(*args: Any, **kwargs: Any) -> Any:
        for text in (*inner, "the table is odd"):
            warnings.warn(text, UserWarning, stacklevel=2)
        return resize(*args, **kwargs)

    monkeypatch.setattr(windows, "resize_rel_pos_bias_table", loud)
    block = micro().layers[0].blocks[0].attn
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        block.set_window_size((6, 6))
        warnings.warn(inner[1], UserWarning, stacklevel=2)
    assert [str(w.message) for w in seen] == ["the table is odd", inner[1]]


@pytest.mark.slow
@together
@pytest.mark.parametrize("resize", ["pool_values", None])
@pytest.mark.parametrize(
    "options", [{"mixer": "ska"}, {"mixer": "cska"}, {"mixer": "ska", "shared_keys": True}], ids=str
)
def test_a_refusal_names_the_one_policy_that_works(
    options: dict[str, Any], resize: str | None
) -> None:
    model = micro(**options)
    with pytest.raises(UserError, match=r"of 4x4 tokens.* of 6x6 tokens") as refused:
        set_image_size(model, (48, 48), resize=resize)
    assert str(refused.value).endswith("--resize interpolate")
    assert "pool_values" not in str(refused.value)
    set_image_size(model, (48, 48), resize="interpolate")
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 10)


@pytest.mark.parametrize("resize", ["pool_values", None])
def test_keys_a_window_count_the_windows_and_say_how_to_share(resize: str | None) -> None:
    model = micro(mixer="ska", mixer_options={"resize": resize})
    says = (
        r"16 windows \(4x4 of them\) of 4x4 tokens, and this size has 36 windows \(6x6 of them\) "
        r"of 4x4 tokens, .*shared_keys=True, .*--model\.options\.shared_keys true"
    )
    with pytest.raises(UserError, match=says):
        model.set_input_size(48, window_size=4)


@together
@pytest.mark.parametrize("resize", ["pool_values", None])
@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "ska", "shared_keys": True},
        {"mixer": "cska", "shared_keys": True},
        {"mixer": "kv", "pos_dim": 4},
    ],
    ids=str,
)
def test_windows_kept_as_the_message_says_serve(
    options: dict[str, Any], resize: str | None
) -> None:
    kept = {k: v for k, v in options.items() if k == "pos_dim"}
    rest = {k: v for k, v in options.items() if k != "pos_dim"}
    model = micro(mixer_options={"resize": resize, **kept}, **rest)
    with pytest.raises(UserError, match=r"or let windows keep their size: .*") as refused:
        model.set_input_size(48)
    advice = "set_input_size(…, window_size=(4, 4))"
    assert str(refused.value).endswith(advice)
    model.set_input_size(48, window_size=(4, 4))
    assert {m.site.grid for m in find_mixers(model).values()} == {(4, 4)}
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 10)


def test_where_no_policy_helps_none_is_named() -> None:
    model = micro(mixer="random", shifted=False)
    with pytest.raises(UserError, match="random") as refused:
        set_image_size(model, (48, 48))
    assert "--resize" not in str(refused.value)
