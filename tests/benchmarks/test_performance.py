# SPDX-License-Identifier: Apache-2.0
"""The benchmark of op, module, model and step has the rows it should, and marks what it must."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import performance
from keymix.analysis.timing import Samples
from keymix.errors import UserError
from performance import BASELINE, TIMM, Ceiling, Found


def rows(words: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of all tables, heads among them."""
    quick = ["--quick", "--threads", "1", "--seconds", "0"]
    assert performance.main([*quick, *words.split()]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


@pytest.mark.slow
def test_op_has_every_path_of_every_mixer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "LARGEST_MAP", 4 * 784 * 4 * 16**2)
    mixers = "re_attention static_key(key_grid=1/4)"
    found = rows(f"--parts op --measures forward training --tokens 4 --mixers {mixers}", capsys)
    paths = [tuple(row[:2]) for row in found]
    table = [
        BASELINE,
        ("re_attention", "reference"),
        ("re_attention", "blocked"),
        *(("static_key(key_grid=1/4)", path) for path in performance.PATHS),
    ]
    for each in table:
        assert paths.count(each) == 4  # times and shares, forward and training
    assert all(cell.startswith("1 (") for cell in found[paths.index(BASELINE)][2:])
    assert found[paths.index(("re_attention", "reference"))][2].startswith("**")  # auto takes it


@pytest.mark.slow
def test_maps_that_are_too_large_are_not_formed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "LARGEST_MAP", 0)
    words = "--parts op --measures forward --tokens 4 --mixers re_attention"
    by_row = {tuple(row[:2]): row[2] for row in reversed(rows(words, capsys))}
    assert by_row["re_attention", "reference"] == ""
    assert by_row["re_attention", "blocked"]


@pytest.mark.slow
def test_a_case_stands_beside_its_reference_softmax_and_timm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--parts module --tokens --measures forward --cases conv_static_key:4:16:2:2"
    by_row = {tuple(row[:2]): row for row in rows(words, capsys)}
    heads = by_row["mixer", "path"]
    against = {name: heads.index(f"forward / {name}") for name in ("reference", "softmax")}
    assert by_row["conv_static_key", "reference"][against["reference"]].startswith("1 (")
    assert by_row[BASELINE][against["softmax"]].startswith("1 (")
    assert {TIMM, ("conv_static_key", "blocked")} <= by_row.keys()


@pytest.mark.slow
def test_models_stand_beside_the_libraries_that_are_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vit_pytorch" else find(name)
    )
    words = "--parts model --measures forward training --families vit_448 deepvit"
    found = [row[:2] for row in rows(words, capsys)]
    vit = ["softmax", "static_key", "static_key(key_grid=1/16)", "identity"]
    deepvit = ["re_attention(norm=layer)", "re_attention", "softmax"]
    head = ["library", "mixer"]
    ours = [["keymix", name] for name in (*vit, *deepvit)]
    assert found == [head, ["timm", ""], *ours[:4], head, *ours[4:]]


@pytest.mark.parametrize("path", performance.PATHS)
def test_the_op_is_attention_of_the_tokens_themselves(path: str) -> None:
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    op = performance.layer("key_value", path, 3, 8, 2, projected=False).double()
    heads = x.reshape(2, 9, 2, 4).transpose(1, 2)
    expected = (heads @ heads.mT / 2).softmax(-1) @ heads
    torch.testing.assert_close(op(x), expected.transpose(1, 2).flatten(2))


def test_a_share_is_of_the_highest_rates() -> None:
    half = Found(macs=10**11, bytes=10**9, samples={"forward": Samples([2.0] * 3, [2.0] * 3)})
    assert performance.share_cell(half, "forward", Ceiling(1e11, 1e10)) == "50% / 5.0%"


def test_bad_words_are_refused() -> None:
    with pytest.raises(UserError, match="squares"):
        performance.laid(50)
    with pytest.raises(UserError, match="mixer:side"):
        performance.read_case("re_attention:4")
    with pytest.raises(UserError, match="forms no attention map"):
        performance.layer("identity", "auto", 4, 16, 2, projected=True)
