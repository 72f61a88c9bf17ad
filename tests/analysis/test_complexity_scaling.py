# SPDX-License-Identifier: Apache-2.0
"""Latency and memory against tokens: every mixer has a row, with numbers or with the reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from extra_mixers import registered

from keymix.analysis import memory
from keymix.analysis.memory import Build, Peak
from keymix.analysis.mixer_alone import counted, near_square, sized_mixers
from keymix.errors import UserError
from keymix.studies.complexity import measure as studying
from keymix.studies.complexity.measure import complexity, complexity_parts
from keymix.studies.complexity.result import Setting

SMALL = {"dim": 12, "num_heads": 3, "at": 4, "repeats": 1}


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count few sizes: these tests are of measurements."""
    monkeypatch.setattr(studying, "SWEEP", (4, 9))
    monkeypatch.setattr(studying, "HEAD_DIMS", ())


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Peaks without a fresh process: 1 MiB a mixer so far, and who was asked for."""
    asked: list[list[str]] = []

    def peaks(builds, size, *, batch_size):
        asked.append(list(builds))
        assert all(build.make() is not None for build in builds.values())
        numbers = range(1, len(builds) + 1)
        return {
            name: Peak(inference_mib=0.5, training_mib=float(number), note=f"batch {batch_size}")
            for name, number in zip(builds, numbers, strict=True)
        }

    monkeypatch.setattr(studying, "peak_memory", peaks)
    return asked


@pytest.mark.slow
def test_mixers_of_all_kinds_are_measured(no_process) -> None:
    """With maps and without, and over time; that all are counted is in test_complexity.py."""
    lines: list[tuple[str, float]] = []
    names = ["softmax", "conv_static_key", "pooling", "spike_driven"]
    study = complexity(
        ",".join(names), **SMALL, tokens=(6,), progress=lambda *step: lines.append(step)
    )
    assert [(row.tokens, row.mixer) for row in study.scaling] == [(6, name) for name in names]
    for row in study.scaling:
        assert row.reason is None, row
        assert row.grid == (2, 3)
        assert 0 < row.latency_q1_ms <= row.latency_ms <= row.latency_q3_ms
        base = next(r for r in study.scaling if (r.mixer, r.tokens) == ("softmax", row.tokens))
        verdicts = ("not distinguishable", "busy", "too few rounds")
        assert row.latency_verdict in ((None,) if row is base else verdicts)
        assert (row.latency_ratio is None) == (row.latency_verdict == "busy")
        assert base.latency_ratio == 1
        assert row.peak_ratio == row.peak_training_mib / base.peak_training_mib
        options = sized_mixers(row.mixer, dim=12, num_heads=3)[0].arguments(row.grid)
        found = counted(options)
        assert (row.params, row.macs) == (found.params, found.macs)
    assert no_process == [names]
    shares = [share for _, share in lines]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    assert any("round 1 of 1" in text for text, _ in lines)


def test_what_is_known_grows_part_by_part(no_process) -> None:
    setting = Setting(**SMALL, tokens=(4, 6, 4), batch_size=1, device="cpu", time_steps=4)
    parts = list(complexity_parts("identity,ska", setting))
    assert [{row.tokens for row in part.scaling} for part in parts] == [set(), {4}, {4, 6}]
    assert [part.complete for part in parts] == [False, False, True]
    assert [entry.label for entry in parts[0].mixers] == ["identity", "static_key"]
    assert parts[0].mixers == parts[-1].mixers


def test_without_softmax_there_is_no_ratio(no_process) -> None:
    (row,) = complexity("ska", **SMALL, tokens=(4,)).scaling
    assert row.latency_ms > 0
    assert (row.latency_ratio, row.latency_verdict, row.peak_ratio) == (None, None, None)


def test_one_that_fails_has_the_reason_and_harms_no_other(no_process) -> None:
    mixer = registered("fails")
    study = complexity(f"{mixer},identity", **SMALL, tokens=(6, 4))
    bad, good, later, _ = study.scaling
    assert bad.reason == "RuntimeError: no six tokens and more lines"
    assert bad.latency_ms is None
    assert good.reason is None
    assert later.reason is None  # at four tokens it runs
    assert no_process == [["identity"], [mixer, "identity"]]


def test_one_that_cannot_be_built_has_the_reason(no_process) -> None:
    mixer = registered("square_only")
    six, four = complexity(mixer, **SMALL, tokens=(6, 4)).scaling
    assert six.reason == "only squares here, not (2, 3)"
    assert six.params is None
    assert (four.reason, four.params) == (None, 144)


def test_spiking_mixers_run_over_time(no_process) -> None:
    mixer = registered("spiking_linear")
    (row,) = complexity(mixer, **SMALL, tokens=(4,), time_steps=2).scaling
    assert row.reason is None
    assert row.macs == 2 * 4 * 12 * 12


def test_what_would_not_fit_is_left_alone(no_process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studying, "available_bytes", lambda device: 2.0**20)
    study = complexity("identity,re_attention,random", **SMALL, tokens=(1024,))
    rows = {row.mixer: row for row in study.scaling}
    assert rows["identity"].reason is None
    for name in ("re_attention", "random"):
        assert "GiB to train a batch of 1, and 0.0 GiB are free" in rows[name].reason
        assert rows[name].macs is not None  # counted all the same
    assert no_process == [["identity"]]


def test_a_huge_map_is_counted_and_never_made(no_process) -> None:
    study = complexity("cska(attn_drop=0.1),random", **SMALL, tokens=(2**20,))
    assert all("GiB are free" in row.reason for row in study.scaling)


def needed(mixer: str, tokens: int, device: str = "cpu") -> int:
    (sized,) = sized_mixers(mixer, dim=16, num_heads=4)
    grid = near_square(tokens)
    cost = counted(sized.arguments(grid))
    return studying.needed_bytes(sized, cost, grid, 1, torch.device(device))


@pytest.mark.parametrize("name", ["conv_static_key", "re_attention"])
def test_maps_that_are_formed_in_blocks_need_no_room_as_a_whole(name: str) -> None:
    a_map = 4 * 4 * 16_384**2
    assert needed(name, 16_384) < a_map / 2
    assert needed(name, 16_384, "cuda") > a_map  # whole there
    assert needed(f"{name}(attn_drop=0.1)", 16_384) > a_map  # drawn for the whole map
    assert needed(name, 400) > 4 * 4 * 400**2  # small ones are whole


@pytest.mark.slow
@pytest.mark.skipif(memory.cpu_peak_unknown() is not None, reason="needs Linux's /proc")
def test_what_was_thought_needed_is_enough() -> None:
    """The guard's estimate is no less than the peak that is measured, whole maps or blocks."""
    (row,) = complexity("re_attention", dim=16, num_heads=4, repeats=1, tokens=[900]).scaling
    assert row.peak_training_mib is not None
    assert row.peak_training_mib < needed(row.mixer, 900) / 2**20
    assert "fresh process" in row.peak_note


def test_a_mixer_of_ones_own_file_goes_into_the_fresh_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Build] = {}

    def peaks(builds, size, *, batch_size):
        seen.update(builds)
        return {n: Peak(inference_mib=None, training_mib=None, note="") for n in builds}

    monkeypatch.setattr(studying, "peak_memory", peaks)
    file = tmp_path / "thrice.py"
    file.write_text(
        "from keymix import TokenMixer, Traits, register_mixer\n"
        "@register_mixer('thrice_for_complexity')\n"
        "class Thrice(TokenMixer):\n"
        "    traits = Traits(mixes_prefix=False)\n"
        "    def forward(self, x, grid=None, bias=None):\n"
        "        return 3 * x\n"
    )
    (row,) = complexity("thrice_for_complexity", **SMALL, tokens=(4,), imports=[str(file)]).scaling
    assert row.reason is None
    assert seen["thrice_for_complexity"].imports == (str(file),)


def test_free_memory_is_the_least_that_anybody_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    group.mkdir()
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr("keymix.models.memory._CGROUP", group)
    cpu = torch.device("cpu")
    assert memory.available_bytes(cpu) == math.inf
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   40 kB\n")
    assert memory.available_bytes(cpu) == 40 * 1024
    (group / "memory.max").write_text("20000\n")
    (group / "memory.current").write_text("5000\n")
    assert memory.available_bytes(cpu) == 15_000
    (group / "memory.max").write_text("max\n")
    assert memory.available_bytes(cpu) == 40 * 1024


@pytest.mark.gpu
def test_on_cuda_time_and_memory_are_the_devices() -> None:
    study = complexity("softmax,re_attention", dim=64, num_heads=4, tokens=(256,), device="cuda")
    for row in study.scaling:
        assert row.reason is None
        assert "CUDA memory" in row.peak_note
        assert row.peak_training_mib > 0


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="device 'cuda' cannot be used here"):
        complexity("identity", **SMALL, tokens=(4,), device="cuda")
