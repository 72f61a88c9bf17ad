# SPDX-License-Identifier: Apache-2.0
"""What a user of Swin reads when he asks for another image size."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from keymix.hosts import windows
from keymix.models import create_model

SMALL: dict[str, Any] = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "merging": (2,)}


def micro(**options: Any) -> Any:
    return create_model("swin_micro_p2_32", **{**SMALL, **options}).eval()


def test_another_size_warns_of_nothing() -> None:
    model = micro()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_input_size(48)
        model(torch.randn(1, 3, 48, 48))


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
