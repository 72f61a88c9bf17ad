# SPDX-License-Identifier: Apache-2.0
"""The benchmark of SETR without the query holds each model to its own encoder's."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from costs import cost_of
from keymix.analysis.measure import Cost
from keymix.analysis.memory import Build
from keymix.analysis.timing import Paired, Verdict

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "setr_kv.py"
LATENCY = {"setr_qkv": 8.0, "setr_kv": 6.0, "setr_qkv_cvt": 5.0, "setr_kv_cvt": 4.0}


def paired(ratio: float, name: str) -> Paired:
    """What a comparison says: CvT's latencies cannot be distinguished."""
    numbers = {"base_ms": 1.0, "other_ms": ratio, "ratio": ratio, "ratio_q1": 0.0, "ratio_q3": 9.0}
    verdict: Verdict = "not distinguishable" if "cvt" in name else "different"
    return Paired(**numbers, rounds=15, quiet_share=1.0, p=0.0, verdict=verdict)


def measured(builds: Mapping[str, Build], shape: Sequence[int], **how: Any) -> dict[str, Cost]:
    """What would have been measured: a latency, twice the memory in training."""
    assert list(shape) == [3, 32, 32]
    base = next(iter(builds))
    assert how == {"batch_size": 4, "repeats": 15, "threads": 1, "baseline": base}
    return {
        name: Cost(
            latency_ms=LATENCY[name],
            latency_q1_ms=LATENCY[name] - 1,
            latency_q3_ms=LATENCY[name] + 1,
            images_per_s=1000 / LATENCY[name],
            images_per_s_q1=0.0,
            images_per_s_q3=0.0,
            batch_size=4,
            input_size=(3, 32, 32),
            repeats=15,
            threads=1,
            device="cpu",
            dtype="float32",
            peak_inference_mib=LATENCY[name] if "cvt" not in name else None,
            peak_training_mib=2 * LATENCY[name] ** 2,
            peak_note="as measured",
            against=None if name == base else paired(LATENCY[name] / LATENCY[base], name),
        )
        for name in builds
    }


@pytest.mark.slow
def test_the_benchmark_prints_ratios_to_the_same_encoder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    main.__globals__.update(measure_models=measured, count=cost_of)
    assert main(["--models", *LATENCY, "--size", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("keymix ")
    assert lines.count("  memory: as measured") == 2
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("setr_")}
    assert rows["setr_kv"][3:] == [
        f"{19.68 / 21.07:.3f}",
        *("6.0", "[5.0,", "7.0]", "0.750", "1.333", "6.0", "0.750", "72.0", "0.562"),
    ]
    assert rows["setr_kv_cvt"][1] == f"{21_329_540 / 22_933_380:.3f}"
    assert float(rows["setr_kv_cvt"][2]) < 1
    assert rows["setr_kv_cvt"][7] == "n.d."
    assert rows["setr_kv_cvt"][-4:] == ["-", "-", "32.0", "0.640"]
    assert rows["setr_qkv_cvt"][1:4] == ["1.000"] * 3


def test_a_model_without_what_it_is_compared_with_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    with pytest.raises(SystemExit):
        main(["--models", "setr_kv_pos"])
    assert "--models setr_kv_pos: give setr_qkv too" in capsys.readouterr().err
