# SPDX-License-Identifier: Apache-2.0
"""Drift of the logits of a mixer that itself adds to them, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import answer, images, tiny
from torch import Tensor, nn

from keymix.swap import swap
from mixer_cases import stir

HEADS, WIDTH, CHANNELS = 3, 4, 6


def heads(linear: nn.Linear, tokens: np.ndarray, roles: int) -> list[np.ndarray]:
    """Project tokens by hand: ``[B, h, N, d]`` a role."""
    joint = tokens @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
    parts = np.split(joint, roles, -1)
    return [p.reshape(*p.shape[:2], HEADS, WIDTH).swapaxes(1, 2) for p in parts]


def plain(qkv: nn.Linear, tokens: np.ndarray) -> np.ndarray:
    q, k, _ = heads(qkv, tokens, 3)
    return q @ k.swapaxes(-1, -2) / np.sqrt(WIDTH)


def coded(mixer: Any, tokens: np.ndarray) -> np.ndarray:
    """Key-value logits: to each, six channels of the code of its index pair, then a linear map."""
    k, _ = heads(mixer.kv, tokens, 2)
    w, b = mixer.pos_proj.weight.detach().numpy()[0], mixer.pos_proj.bias.item()
    own = np.empty((tokens.shape[1],) * 2)
    for i, j in np.ndindex(*own.shape):
        of_i = [np.sin(i), np.sin(i / 100), np.cos(i), np.cos(i / 100)]
        own[i, j] = np.dot([*of_i, np.sin(j), np.sin(j / 100)], w) + b
    return k @ k.swapaxes(-1, -2) / np.sqrt(WIDTH) * w.sum() + own


def moved(old: np.ndarray, new: np.ndarray) -> float:
    """Distance of logits less the mean of their row, relative to the old ones."""
    old, new = (t - t.mean(-1, keepdims=True) for t in (old, new))
    return float(np.linalg.norm(new - old) / np.linalg.norm(old))


def test_drift_counts_what_the_new_mixer_and_the_old_one_add_to_their_logits() -> None:
    model: Any = tiny("timm_vit")
    x, seen = images((8, 12)), list[Tensor]()
    attention = model.blocks[0].attn
    hook = attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    answer(model, x)
    hook.remove()
    tokens = seen[0].numpy()

    before = plain(attention.qkv, tokens)
    code = {"pos_dim": CHANNELS}
    row = swap(model, "key_value", 0, mixer_options=code, calibration=x, batch_size=4).rows[0]
    mixer = model.blocks[0].attn.mixer
    assert row.drift is not None
    assert row.drift.logits == pytest.approx(moved(before, coded(mixer, tokens)), rel=1e-10)

    stir(mixer)
    before = coded(mixer, tokens)
    row = swap(model, "softmax", 0, calibration=x).rows[0]
    after = plain(model.blocks[0].attn.mixer.qkv, tokens)
    assert row.drift is not None
    assert row.drift.logits == pytest.approx(moved(before, after), rel=1e-10)
