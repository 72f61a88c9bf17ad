# SPDX-License-Identifier: Apache-2.0
"""Attention by Triton kernels, in Triton's interpreter, against the plain equation in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_triton_cases import AGAIN, CASES, MIXERS
from triton_interpreter import interpreted

from keymix.errors import UserError
from keymix.mixers.base import explain_backend
from mixer_cases import make, tokens


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    """What became of every case, by name."""
    lines = interpreted("attention_triton_cases.py", 600).splitlines()
    return {each["name"]: each for each in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *MIXERS])
def test_kernels_compute_the_equation_with_every_gradient(name: str, cases) -> None:
    case = cases[name]
    assert not case["error"], case["error"]
    assert {"forward_kernel", "query_kernel", "key_kernel"} <= {*case["ran"]}
    if name in CASES and CASES[name].bias is not None:
        assert "bias_kernel" in case["ran"]


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_what_kernels_do_not_differentiate_goes_through_the_plain_formula(name: str, cases) -> None:
    case = cases[name]
    assert not case["error"], case["error"]
    assert "forward_kernel" in case["ran"]
    if "many" in name:
        assert "query_kernel" not in case["ran"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_on_cuda_compute_the_equation(name: str, dtype: str) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        replace(CASES[name], dtype=dtype).check("cuda")
    finally:
        torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("static_key", {}, "for CUDA, not 'cpu'|not installed"),
        ("conv_static_key", {"attn_drop": 0.5}, "dropout"),
        ("softmax", {"talking_heads": True}, "talking_heads"),
        ("static_key_re_attention", {"activation": "relu"}, "sum to one"),
    ],
)
def test_kernels_by_name_say_why_they_cannot_run(name, options, why) -> None:
    mixer = make(name, {**options, "backend": "triton"}).train()
    with pytest.raises(UserError, match=f"backend='triton' cannot run here: .*({why})"):
        mixer(tokens(mixer))


@pytest.mark.parametrize(
    ("name", "site", "options", "why"),
    [
        ("static_key", {}, {"head_dim": 257}, "head_dim=257 is above 256"),
        ("re_attention", {}, {"head_dim": 65}, "head_dim=65 is above 64"),
        ("re_attention", {"dim": 17, "num_heads": 17}, {}, "num_heads=17 is above 16"),
    ],
)
def test_what_no_kernel_takes_is_refused(
    name, site, options, why, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as if they could run here
    pytest.importorskip("triton")
    mixer = make(name, {**options, "backend": "triton"}, **site)
    with pytest.raises(UserError, match=why):
        explain_backend(mixer)


def test_a_learned_bias_of_mixed_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    mixer = make("re_attention", {"backend": "triton"})
    with pytest.raises(UserError, match="no gradient"):
        mixer(tokens(mixer), bias=torch.zeros(6, 6, requires_grad=True))


@pytest.mark.parametrize("name", ["softmax", "static_key", "conv_static_key", "re_attention"])
def test_auto_keeps_its_choice_on_a_gpu_and_says_what_is_not_measured(name: str) -> None:
    choice = explain_backend(make(name), "cuda")
    assert choice.name in ("reference", "sdpa")
    assert "not yet measured on a GPU" in choice.why
    assert "triton" not in explain_backend(make(name), "cpu").why


def test_a_transform_or_a_compiler_around_it_takes_the_plain_formula(shapes_checked: bool) -> None:
    mixer = make("static_key", {"backend": "triton"})
    x = tokens(mixer)
    wanted = make("static_key", {"backend": "reference"})(x)
    found = torch.func.vmap(mixer)(x)  # also where no kernel could run
    assert torch.allclose(found, wanted)
    if not shapes_checked:  # compilers cannot see through the checks
        compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(x), wanted)
        torch.compiler.reset()
