# SPDX-License-Identifier: Apache-2.0
"""The benchmark of op, module, model and step has the rows it should, and marks what it must."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

import machine
import performance
from keymix.analysis.timing import Samples
from keymix.errors import UserError
from machine import BUSY, Ceiling
from performance import BASELINE, TIMM, Found, Shape

CALM = Ceiling(macs=1e11, bytes=1e10, busy=False)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert performance.main([*words, "--quick", "--threads", "1"]) == 0
    return capsys.readouterr().out


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, heads among them."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


@pytest.mark.slow
def test_op_has_every_path_of_every_mixer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parts", "op", "--measures", "forward", "training", "--mixers"]
    found = rows(printed([*words, "re_attention", "static_key(key_grid=1/4)"], capsys))
    paths = [tuple(row[:2]) for row in found]
    table = [
        BASELINE,
        ("re_attention", "reference"),
        ("re_attention", "blocked"),
        *(("static_key(key_grid=1/4)", path) for path in performance.PATHS),
    ]
    for each in table:
        assert paths.count(each) == 4  # times and shares, forward and training
    first = found[paths.index(BASELINE)]
    assert all(cell.startswith("1 (") for cell in first[2:])
    taken = found[paths.index(("re_attention", "reference"))]
    assert all(cell.startswith("**") for cell in taken[2:])  # auto takes whole maps of few tokens


@pytest.mark.slow
def test_a_case_stands_beside_its_reference_softmax_and_timm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--parts", "module", "--tokens", "--measures", "forward", "--cases"]
    found = rows(printed([*words, "conv_static_key:4:16:2:2"], capsys))
    by_row = {tuple(row[:2]): row for row in found}
    heads = by_row["mixer", "path"]
    against = {name: heads.index(f"forward / {name}") for name in ("reference", "softmax")}
    assert by_row["conv_static_key", "reference"][against["reference"]].startswith("1 (")
    assert by_row[BASELINE][against["softmax"]].startswith("1 (")
    assert {TIMM, ("conv_static_key", "blocked")} <= by_row.keys()


@pytest.mark.slow
def test_a_map_too_large_is_extrapolated_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parts", "op", "--measures", "forward", "--mixers", "re_attention"]
    found = rows(printed([*words, "--largest-map", "0.0001"], capsys))
    by_row = {tuple(row[:2]): row for row in reversed(found)}
    small, large = by_row["re_attention", "reference"][2:]
    assert "~" not in small
    assert large.strip("*").startswith("~")
    assert "~" not in " ".join(by_row["re_attention", "blocked"])


def test_time_grows_by_multiply_adds_and_memory_by_entries() -> None:
    before = Found(macs=10, entries=4, seconds={"forward": 2.0}, mib={"forward": 3.0})
    here = Found(macs=40, entries=64)
    performance._extrapolate(here, before, "forward")
    assert here.seconds == {"forward": 8.0}
    assert here.mib == {"forward": 48.0}
    assert performance.peak(here, Found(mib={"forward": 24.0}), "forward") == "~48.0 (~2.00)"


@pytest.mark.slow
def test_peaks_are_of_a_fresh_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parts", "op", "--measures", "memory", "--mixers", "re_attention", "--tokens", "64"]
    found = {tuple(row[:2]): row for row in rows(printed(words, capsys))}
    assert found[BASELINE][2].endswith("(1.00)**")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "step"])
def test_models_stand_beside_timms(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parts", part, "--measures", "forward", "training", "--families", "vit_tiny"]
    found = rows(printed(words, capsys))
    ours = [("keymix", name) for name in ("softmax", *performance.MIXERS, "identity")]
    assert [tuple(row[:2]) for row in found[2:]] == [("timm", ""), *ours]
    assert found[2][2].startswith("1 (")


@pytest.mark.slow
def test_qkformer_stands_beside_spikingjellys(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
    words = ["--parts", "step", "--measures", "training", "--families", "qkformer"]
    found = rows(printed(words, capsys))
    assert [row[0] for row in found[2:]] == ["SpikingJelly", "keymix"]


@pytest.mark.slow
def test_a_missing_peer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vit_pytorch" else find(name)
    )
    words = ["--parts", "model", "--measures", "forward", "--families", "deepvit"]
    text = printed(words, capsys)
    assert "vit-pytorch is left out: it is not installed (pip install vit-pytorch)" in text
    assert {row[0] for row in rows(text)[2:]} == {"keymix"}


def test_a_busy_machine_is_named_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "ceiling", lambda **how: replace(CALM, busy=True))
    words = ["--parts", "op", "--measures", "forward", "--mixers", "key_value", "--tokens"]
    assert printed(words, capsys).startswith(BUSY)
    performance.say_busy([Found(), Found(busy=True)])
    assert capsys.readouterr().out.startswith(BUSY)
    performance.say_busy([Found()])
    assert not capsys.readouterr().out


def test_other_programs_are_seen_by_the_machines_books(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, stopped = Samples(wall=[1.0], cpu=[1.0]), Samples(wall=[1.0, 1.0], cpu=[0.1, 0.2])
    taken = [0.0]
    monkeypatch.setattr(machine, "_others", lambda: taken[0])
    watch = machine.Watch()
    assert not watch.busy([calm])
    assert watch.busy([stopped])
    taken[0] = 1e6
    assert watch.busy([calm])


@pytest.mark.parametrize("path", performance.PATHS)
def test_the_op_is_attention_of_the_tokens_themselves(path: str) -> None:
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    op = performance.layer("key_value", path, 3, 8, 2, projected=False).double()
    heads = x.reshape(2, 9, 2, 4).transpose(1, 2)
    expected = (heads @ heads.mT / 2).softmax(-1) @ heads
    found = op(x)
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2))


def test_a_share_is_of_the_highest_rates() -> None:
    half = Found(macs=10**11, bytes=10**9, seconds={"forward": 2.0}, samples={"forward": Samples()})
    assert performance.share(half, "forward", CALM) == "50% / 5.0%"


def test_bad_words_are_refused() -> None:
    with pytest.raises(UserError, match="resnet"):
        performance.main(["--quick", "--parts", "model", "--families", "resnet"])
    with pytest.raises(UserError, match="squares"):
        performance.main(["--quick", "--parts", "op", "--tokens", "50"])
    with pytest.raises(UserError, match="mixer:side"):
        performance.read_case("re_attention:4")
    with pytest.raises(UserError, match="forms no attention map"):
        performance.rows_of(["identity"], Shape(4, 16, 2, 2), projected=True)
