# SPDX-License-Identifier: Apache-2.0
"""The job that measures mixers: what it finds wrong, what it calls fast, what it writes."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dry import context
from torch import Tensor

from gpu_queue.jobs import mixers as job
from gpu_queue.jobs.mixers import FULL, JOB, TINY
from gpu_queue.mixer_results import BARE, BASE, PATH_LIMIT, limit, wrong
from keymix.errors import UserError
from keymix.mixers.base import BackendChoice
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, list_mixers
from keymix.ops.attention import sdpa

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of the dry run, as a file holds them."""
    where = context(tmp_path_factory.mktemp("dry"))
    results = {step.name: step.measure(where) for step in JOB.steps(True)}
    return json.loads(json.dumps(results, allow_nan=False))


# ---- what is measured ---------------------------------------------------------------------------


def test_every_dense_mixer_has_a_step_and_the_queue_loads_no_torch() -> None:
    code = (
        "import sys; from gpu_queue.jobs.mixers import JOB; "
        "print(*(step.name for step in JOB.steps(False))); "
        "print(*sorted({'torch', 'keymix', 'numpy'} & sys.modules.keys()))"
    )
    folder = Path(job.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(folder)},
    )
    names, loaded = done.stdout.split("\n")[:2]
    assert loaded == ""
    assert names.split()[:2] == ["ceilings", "softmax"]
    assert sorted(names.split()[1:]) == sorted({*list_mixers(domain="dense")} - {"identity"})


def test_the_dry_run_measures_paths_errors_times_and_memory(dry: Results) -> None:
    softmax, mixing = dry["softmax"], dry["re_attention"]
    assert softmax["default"]["name"] == "sdpa"
    assert "triton" in softmax["refused"]
    assert "sdpa" in mixing["refused"]
    for result, paths in (
        (softmax, {"reference", "sdpa", "blocked"}),
        (mixing, {"reference", "blocked"}),
    ):
        errors, times = result["errors"], result["times"]
        assert {row["path"] for row in errors} == paths
        assert {row["grid"] for row in errors} == {"5x3+1", "4x4"}
        assert {row["path"] for row in times} == {BASE, BARE, *paths}
        assert not any(wrong(result, path) for path in paths)
        for row in errors:
            assert 0 < row["output"] < row["worst"]["limit"]
            assert row["gradient"] > 0
        for row in times:
            assert row["peak_mib"] > 0
            assert row["ms_q1"] <= row["ms"] <= row["ms_q3"]
    fused = [r for r in softmax["errors"] + softmax["times"] if r["path"] in ("sdpa", BASE, BARE)]
    assert all("flash_attention" in row["kernels"][0] for row in fused)
    assert not any(row["kernels"] for row in softmax["errors"] if row["path"] == "reference")
    # 4 N C^2 + 2 N^2 C multiply-adds of 2 images, three times over, in training
    row = next(r for r in softmax["times"] if (r["path"], r["mode"]) == (BASE, "train"))
    macs = 2 * (4 * 16 * 16**2 + 2 * 16**2 * 16)
    assert row["tflop_s"] == pytest.approx(2 * 3 * macs / (row["ms"] / 1e3) / 1e12)


@pytest.mark.parametrize("name", sorted({*list_mixers(domain="dense")} - {"identity"}))
def test_every_dense_mixer_is_right_along_every_path(name: str) -> None:
    paths, _, chosen = job.offered(name, TINY, CPU)
    assert chosen["name"] in paths
    odd_alone = dataclasses.replace(TINY, grids=())
    rows = list(job.measure_errors(name, odd_alone, CPU, paths))
    assert {(row["path"], row["dtype"]) for row in rows} == {
        (path, dtype) for path in paths for dtype in job.DTYPES
    }
    assert not any(wrong({"errors": rows, "times": []}, path) for path in paths)
    assert all(row["compared"] >= 4 for row in rows)  # output and tokens, in two modes at least


def test_a_batch_fills_the_chip_as_far_as_its_maps_fit() -> None:
    images = {n: FULL.timed(n) for n in (49, 196, 784, 1024, 4096)}
    assert images[49] == 2**17 // 49
    assert images[1024] == 128
    assert images[4096] == 10
    for n, batch in images.items():
        assert 4 * batch * FULL.heads * n * n * job.COPIES <= FULL.room


def test_a_path_that_is_added_to_a_mixer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MapMixer.choose_backend

    def choose(mixer: MapMixer, *call: Any) -> BackendChoice:
        return BackendChoice("triton", "new") if mixer.backend == "triton" else real(mixer, *call)

    monkeypatch.setattr(MapMixer, "choose_backend", choose)
    paths, refused, _ = job.offered("re_attention", TINY, CPU)
    assert list(paths) == ["reference", "blocked", "triton"]
    assert "sdpa" in refused
    rows = [*job.measure_errors("re_attention", TINY, CPU, paths)]
    rows += job.measure_times("re_attention", TINY, CPU, paths)
    assert {row["path"] for row in rows} == {"reference", "blocked", "triton", BASE, BARE}


# ---- what is wrong ------------------------------------------------------------------------------


class _HalfGradient(torch.autograd.Function):
    """The identity, whose gradient is a half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def _last_of_two_lost(y: Tensor) -> Tensor:
    if len(y) == TINY.timed(16) and not torch.is_grad_enabled():
        y = y.clone()
        y[-1] = 0
    return y


def _no_kernel(y: Tensor) -> Tensor:
    if len(y) == 4:  # not where it is timed
        raise RuntimeError("no valid engine\nfor this convolution")
    return y


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "all": (lambda y: y * 1.05, "bfloat16, 4x4 tokens, eval: "),
    "gradient alone": (_HalfGradient.apply, "gradient of "),
    "not a number": (
        lambda y: y * torch.where(y == y.max(), torch.nan, 1.0),
        "float32, 5x3+1 tokens, train: output (not finite",
    ),
    "half precision in float32": (lambda y: y + 1e-3 * y.abs().max(), "float32, "),
    "no kernel": (_no_kernel, "16 tokens: failed: RuntimeError: no valid engine"),
    "the last image": (_last_of_two_lost, "the last of 2 images"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_path_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_it, expected = FAULTS[fault]
    real = sdpa.attention
    monkeypatch.setattr(sdpa, "attention", lambda *a, **k: break_it(real(*a, **k)))
    result = json.loads(json.dumps(job.measure_mixer("static_key", context(tmp_path))))
    assert wrong(result, "reference") == []
    assert any(expected in place for place in wrong(result, "sdpa"))
    written = JOB.section({"static_key": result})
    assert "Of 3 paths of 1 mixer, 1 gave wrong results" in written
    assert expected in written
    assert "nothing to compare" in written


def test_a_path_may_be_off_by_some_times_the_equation_in_its_dtype() -> None:
    assert limit("reference", "bfloat16", 0.04) == 5e-2
    assert limit("sdpa", "bfloat16", 0.01) == pytest.approx(4e-2)
    for unknown in (0.0, None):
        assert limit("sdpa", "float32", unknown) == PATH_LIMIT["float32"] < 3e-4  # of TF32


def test_the_loss_is_scaled_where_gradients_overflow() -> None:
    site = TINY.site((16, 16))
    torch.manual_seed(0)
    state = create_mixer("softmax", **site).state_dict()
    x = 600 * torch.randn(4, 256, TINY.dim)
    exact, half = (
        job._results("softmax", site, state, x, {}, True, dtype) for dtype in ("float64", "float16")
    )
    assert max(float(g.abs().max()) for g in exact.values()) > torch.finfo(torch.float16).max
    assert half.scale < 1
    assert half.keys() == exact.keys()
    assert job.distance(half["proj.weight"], exact["proj.weight"]) < 0.01


def test_a_full_memory_and_a_refusal_are_results() -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def refuse() -> None:
        raise UserError("triton takes no float32")

    assert job.or_reason(full) == (None, "does not fit")
    assert job.or_reason(refuse) == (None, "triton takes no float32")
    assert job.or_reason(lambda: 3) == (3, None)
    _, reason = job.or_reason(lambda: 1 / 0)  # whatever a kernel raises
    assert reason.startswith(job.FAILED)


def test_a_distance_is_relative_and_never_hides_nan() -> None:
    wanted = torch.tensor([3.0, 4.0])
    assert job.distance(wanted * 1.5, wanted) == pytest.approx(0.5)
    assert job.distance(torch.tensor([3.0, math.nan]), wanted) is None
    assert job.distance(torch.tensor([3.0, math.inf]), wanted) is None
    assert job.distance(wanted, 0 * wanted) == 5


# ---- what is written ----------------------------------------------------------------------------


def made(ratios: dict[int, float | str], verdict: str = "different", **more: Any) -> dict[str, Any]:
    """A result of a mixer with the path ``sdpa``: its ratios by tokens, or why there is none."""
    row = {"path": "sdpa", "compared": 9, "excess": 0.5, "output": 1e-7, "gradient": 2e-7}
    row |= {"grid": "7x7", "kernels": ["flash_attention"], "poisoned": True}
    times = []
    for tokens, ratio in ratios.items():
        for mode in ("train", "forward"):
            where = {"tokens": tokens, "images": 8, "mode": mode}
            numbers = {"ms": 2.0, "tflop_s": 100.0, "peak_mib": 2048.0, "rounds": 12}
            times.append({**where, "path": BASE, "issued": 0.2, "kernels": [], **numbers})
            if isinstance(ratio, str):
                times.append({**where, "path": "sdpa", "reason": ratio})
                continue
            spread = {"ratio": ratio, "ratio_q1": ratio / 1.1, "ratio_q3": ratio * 1.05}
            text = f"{ratio:.2f}" if verdict == "different" else "n.d."
            times.append(
                {**where, "path": "sdpa", "issued": 0.95 if tokens == 49 else 0.3}
                | {**numbers, **spread, "ratio_text": text, "verdict": verdict, "kernels": []}
            )
    return {
        "dim": 384,
        "heads": 6,
        "timed_in": "bfloat16",
        "default": {"name": "sdpa", "why": ""},
        "errors": [{**row, "dtype": dtype} for dtype in job.DTYPES],
        "times": times,
        **more,
    }


def test_the_section_says_who_is_faster_and_where() -> None:
    written = JOB.section(
        {
            "softmax": made({49: 1.001, 4096: 0.999}, "not distinguishable"),
            "key_value": made({49: 0.9, 4096: 0.8}),
            "static_key": made({49: 0.8, 4096: 1.3}),
            "re_attention": made({49: 2.0, 4096: "does not fit"}),
        }
    )
    assert written.startswith("Of 4 paths of 4 mixers, none gives a wrong result.")
    message = (
        "Faster: `key_value` at every N (0.80 to 0.90); `static_key` at N = 49 (0.80). "
        "Slower: `re_attention` at N = 49 (2.00); `static_key` at N = 4,096 (1.30). "
        "No difference: `softmax` at every N. Not measured: `re_attention` at N = 4,096."
    )
    assert f"In training: {message} Forward alone: {message}" in written
    assert "| `static_key`, sdpa | 0.80† / 0.80† | 1.30 / 1.30 |" in written
    assert "does not fit / does not fit" in written
    assert "quartiles lie within 10 % of each ratio" in written
    assert "on memory filled with NaN" in written
    assert "| `key_value`, sdpa | 2,048 | 2,048 |" in written
    assert "2.00 ms at N = 49 and 2.00 ms at N = 4,096" in written
    assert "Not measured yet: ceilings, conv_static_key, static_key_re_attention" in written


def test_the_section_is_written_of_any_part(dry: Results) -> None:
    whole = JOB.section(dry)
    for name in dry:
        part = JOB.section({name: dry[name]})
        assert ("Ceilings: " in part) == (name == "ceilings")
        assert (f"`{name}`, reference" in part) == (name != "ceilings")
        assert "Not measured yet: " in part
    assert "Ceilings: " in whole
    assert "Of 5 paths of 2 mixers, none" in whole
    rows = [line for line in whole.splitlines() if line.startswith("|")]
    assert len(rows) == 2 * (2 + 5) + 2 * (2 + 2 + 5)
    assert all(row.count(" | ") in (1, 4) for row in rows)
    assert "Too few rounds" in whole or "No difference" in whole or "Not clear" in whole


def test_ceilings_are_rates() -> None:
    ceilings = {"bytes": 4 * 2**30, "side": 8192, "rounds": 72}
    for key, value in (("copy_tb_s", 4.3), ("matmul_tflop_s", 788.0)):
        ceilings |= {key: value, f"{key}_q1": 0.9 * value, f"{key}_q3": 1.1 * value}
    written = JOB.section({"ceilings": ceilings})
    assert "moves 4.30 TB/s" in written
    assert "(quartiles 3.87 to 4.73)" in written
    assert "side 8,192 runs at 788 TFLOP/s (709 to 867)" in written


def test_the_ceilings_of_the_dry_run_are_in_order(dry: Results) -> None:
    for key in ("copy_tb_s", "matmul_tflop_s"):
        found = dry["ceilings"]
        assert 0 < found[f"{key}_q1"] <= found[key] <= found[f"{key}_q3"]
