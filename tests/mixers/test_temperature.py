# SPDX-License-Identifier: Apache-2.0
"""The temperature of the softmax: DeepViT's Eq. 4, fixed or learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from each import together
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class, list_mixers
from mixer_cases import DIM, HEADS, make, stir, tokens
from tolerances import close, differs

MAPPED = [name for name in list_mixers() if issubclass(get_mixer_class(name), MapMixer)]


@together
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("tau", [0.5, 1, 2.5])
def test_a_number_is_tau_of_equation_4(tau: float, backend: str, shapes_checked: bool) -> None:
    if shapes_checked:
        tau = float(tau)  # to the shape checks 1 is no float
    mixer = make("softmax", {"temperature": tau, "backend": backend})
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer)
    q, k, v = mixer.get_submodule("qkv")(x).chunk(3, -1)
    d = DIM // HEADS
    heads = []
    for i in range(HEADS):
        mine = slice(i * d, (i + 1) * d)
        logits = q[..., mine] @ k[..., mine].mT / (tau * d**0.5)
        heads.append(torch.softmax(logits, -1) @ v[..., mine])
        close(mixer.attention_map(x)[:, i], torch.softmax(logits, -1))
    close(mixer(x), mixer.proj(torch.cat(heads, -1)))
    assert mixer.temperature is None, "a fixed tau trains nothing"


@together
@pytest.mark.parametrize("name", MAPPED)
def test_a_learned_temperature_starts_at_tau_1_and_trains(name: str) -> None:
    plain = make(name, stirred=False)
    learned = make(name, {"temperature": True}, stirred=False)
    assert isinstance(learned.temperature, nn.Parameter)
    assert learned.temperature.shape == ()
    weights = dict(plain.state_dict()) | {"temperature": learned.temperature.detach()}
    learned.load_state_dict(weights)
    for mixer in (plain, learned):
        stir(mixer.get_submodule(mixer.joint or "q"))  # type: ignore[arg-type]
    x = tokens(plain)
    close(learned(x), plain(x))
    before = plain(x)
    with torch.no_grad():
        learned.temperature.add_(0.7)
    assert differs(learned(x), before)


@pytest.mark.parametrize("options", [{"scale": "dim"}, {"scale": False}], ids=str)
def test_tau_divides_whatever_scale_there_is(options: dict[str, Any]) -> None:
    plain, cold = make("softmax", options), make("softmax", {**options, "temperature": 0.25})
    assert isinstance(plain, MapMixer)
    assert isinstance(cold, MapMixer)
    assert cold.gain() == pytest.approx(4 * plain.gain())
