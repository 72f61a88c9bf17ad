# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from dry import context

from gpu_queue import trace
from gpu_queue.jobs import epoch_profile
from gpu_queue.jobs.epoch_profile import JOB, TRAINING, is_resident, limit

Result = dict[str, Any]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The profile of the dry run as JSON keeps it, and the folder of what leaves the machine."""
    folder = tmp_path_factory.mktemp("profile")
    step = next(step for step in JOB.steps(True) if step.name == "profile/static_key")
    return json.loads(json.dumps(step.measure(context(folder)))), folder


def test_one_epoch_is_profiled_and_the_others_are_timed(profiled: tuple[Result, Path]) -> None:
    result, _ = profiled
    assert [epoch["profiled"] for epoch in result["epochs"]] == [False, False, True, False, False]
    for epoch in result["epochs"]:
        parts = epoch["parts"]
        assert {*TRAINING, "validation", "checkpoint", "metrics"} <= {*parts}
        assert {"checkpoint: fsync", "metrics: write"} <= {*parts}
        assert 0 < sum(parts.values()) <= epoch["seconds"]
        own = sum(value for name, value in parts.items() if name in TRAINING)
        assert own <= epoch["training_s"] < epoch["seconds"]
    assert result["profile"]["steps"] == result["steps"] == 4
    assert result["profile"]["wall_ms"] < 1e3 * result["epochs"][2]["seconds"]
    text = JOB.section({"profile/static_key": result})
    assert text.startswith("**static_key**: an epoch takes")
    assert "not asked without a GPU" in text
    assert "| training: forward |" in text


def test_trace_of_few_steps_is_kept_and_nothing_else(profiled: tuple[Result, Path]) -> None:
    _, folder = profiled
    (kept,) = folder.iterdir()
    with gzip.open(kept, "rt") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("keymix: forward") == 1  # the dry run has two steps behind the middle


def test_parts_are_not_wrapped_any_more(profiled: tuple[Result, Path]) -> None:
    import os

    from keymix.data.loaders import Loader
    from keymix.train.step import Training

    assert not hasattr(os.fsync, "__wrapped__")
    assert not hasattr(Loader.batches, "__wrapped__")
    assert not hasattr(Training.step, "__wrapped__")


def label(name: str, start: float, length: float) -> Result:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": trace.PREFIX + name,
        "ts": start,
        "dur": length,
    }


class Gpu:
    """Makes events as Kineto writes them: an operation, its call of the driver, what the GPU did.

    Such as https://github.com/pytorch/kineto's ``libkineto/src/output_json.cpp`` has them.
    """

    def __init__(self) -> None:
        self.events: list[Result] = []

    def work(
        self, name: str, at: float, start: float, length: float, op: str = "", size: int = 0
    ) -> None:
        number = len(self.events) + 1
        arguments = {"External id": number, "correlation": number}
        kinds = {"Memcpy": ("gpu_memcpy", "cudaMemcpyAsync"), "Memset": ("gpu_memset", "")}
        kind, call = kinds.get(name[:6], ("kernel", "cudaLaunchKernel"))
        of_device = arguments | ({"bytes": size, "stream": 7} if size else {"stream": 7})
        self._add("cpu_op", op, at - 1, 5, {"External id": number})
        self._add("cuda_runtime", call, at, 2, arguments)
        self._add(kind, name, start, length, of_device)

    def call(self, name: str, at: float, length: float) -> None:
        self._add("cuda_runtime", name, at, length, {"correlation": 10**6 + len(self.events)})

    def ask(self, at: float) -> None:
        self._add("cpu_op", "aten::item", at, 9, {"External id": 10**6})
        self._add("cpu_op", "aten::_local_scalar_dense", at, 8, {"External id": 10**6 + 1})

    def _add(self, cat: str, name: str, start: float, length: float, args: Result) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args}
        self.events.append(event)


GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_TNT"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>"


def made_trace() -> list[Result]:
    """Two steps of 1 ms in which each number is known, then a validation."""
    gpu = Gpu()
    gpu.events += [
        label("training loop", 0, 1000),
        label("first batch", 10, 190),
        label("draws of the epoch", 20, 100),
    ]
    gpu.events += [
        label("forward", 200, 300),
        label("record of losses", 450, 40),
        label("training loop", 1000, 1000),
    ]
    gpu.events += [
        label("augmentation", 1010, 90),
        label("forward", 1200, 300),
        label("wait at the end", 2000, 50),
    ]
    gpu.events += [label("optimizer", 1600, 100), label("validation", 2050, 500)]
    gpu.work("Memcpy HtoD (Pageable -> Device)", 30, 40, 20, "aten::copy_", size=4096)
    gpu.work("void at::native::vectorized_elementwise_kernel<4>", 150, 160, 40, "aten::mul")
    gpu.work(GEMM, 210, 300, 200, "aten::addmm")
    gpu.work(FLASH, 220, 500, 100, "aten::_flash_attention_forward")  # right behind
    gpu.work("Memcpy DtoH (Device -> Pageable)", 460, 700, 10, "aten::copy_", size=8)
    gpu.call("cudaStreamSynchronize", 465, 20)
    gpu.ask(455)
    gpu.work("triton_poi_fused_gelu_0", 1210, 1300, 200)
    gpu.work(
        "void at::native::bfloat16_copy_kernel_cuda", 1220, 1400, 200, "aten::copy_"
    )  # next to it
    gpu.work("void at::native::multi_tensor_apply_kernel<FusedAdam>", 1650, 1700, 100, "aten::x")
    gpu.work("something new", 1300, 1850, 50)
    gpu.call("cudaDeviceSynchronize", 2010, 30)
    gpu.work(GEMM, 2060, 2100, 400, "aten::addmm")  # of the validation
    return gpu.events


def summed(events: list[Result]) -> Result:
    return trace.summary(
        events, steps=2, parts=TRAINING, ends="validation", owners=epoch_profile._OWNERS
    )


def test_trace_is_summed_up_by_part_and_kind() -> None:
    found = summed(made_trace())
    assert found["wall_ms"] == pytest.approx(2.05)
    assert found["busy_ms"] == pytest.approx(0.020 + 0.040 + 0.3 + 0.010 + 0.3 + 0.1 + 0.05)
    assert sum(found["idle_ms"].values()) + found["busy_ms"] == pytest.approx(found["wall_ms"])
    assert found["idle_ms"] == pytest.approx(
        {
            "draws of the epoch": 0.040,
            "first batch": 0.100,
            "forward": 0.100 + 0.590 + 0.050,
            "record of losses": 0.100,
            "optimizer": 0.100,
            trace.NOWHERE: 0.150,
        }
    )
    assert {name: (round(e["ms"], 6), e["calls"]) for name, e in found["groups"].items()} == {
        "data augmentation": (0.06, 2),
        "matrix products": (0.2, 1),
        "attention": (0.1, 1),
        "losses and gradients looked at": (0.01, 1),
        "elementwise": (0.2, 1),
        "copies and casts": (0.2, 1),
        "optimizer": (0.1, 1),
        "other": (0.05, 1),
    }
    assert found["top"][0]["kernel"] == GEMM
    assert found["top"][0]["calls"] == 1
    assert found["launches_per_step"] == 3.5  # seven kernels
    assert found["copies"] == [
        {"part": "draws of the epoch", "way": "HtoD", "copies": 1, "bytes": 4096},
        {"part": "record of losses", "way": "DtoH", "copies": 1, "bytes": 8},
    ]
    assert [(each["part"], each["call"], each["calls"]) for each in found["waits"]] == [
        ("wait at the end", "cudaDeviceSynchronize", 1),
        ("record of losses", "cudaStreamSynchronize", 1),
    ]
    assert found["asked"] == {"record of losses": 1}


@pytest.mark.parametrize(
    ("kernel", "operation", "group"),
    [
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "aten::addmm", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "", "matrix products"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "", "attention"),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>",
            "aten::native_layer_norm",
            "normalisation and softmax",
        ),
        ("void softmax_warp_forward<float>", "aten::_softmax", "normalisation and softmax"),
        ("void at::native::reduce_kernel<512, 1, MeanOps>", "aten::mean", "reductions"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
            "aten::copy_",
            "copies and casts",
        ),
        ("void at::native::elementwise_kernel<128, 2, GeluCUDAKernelImpl>", "", "elementwise"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweep", "aten::sort", "other"),
    ],
)
def test_kernels_are_classified(kernel: str, operation: str, group: str) -> None:
    assert trace.group_of(trace.Work(0, 1, kernel, "forward", operation, 0), {}) == group
    owned = trace.Work(0, 1, kernel, "draws of the epoch", operation, 0)
    assert trace.group_of(owned, {"draws of the epoch": "data augmentation"}) == "data augmentation"


def made_result(training: float = 0.002, **parts: float) -> Result:
    """Make a result on CUDA from the made trace."""
    seconds = {"forward": 0.0005, "validation": 0.0004, "checkpoint": 0.0001, **parts}
    whole = training + sum(value for name, value in seconds.items() if name not in TRAINING)
    times = {"seconds": whole, "training_s": training, "parts": seconds}
    slow = {"profiled": True, "seconds": 9.0, "training_s": 8.0, "parts": {"validation": 5.0}}
    plain = {"profiled": False, **times}
    return {
        "device": "cuda",
        "recipe": "r",
        "precision": "bf16",
        "batch": 512,
        "images": 1024,
        "steps": 2,
        "peak_gib": 3.0,
        "mib": {"checkpoint": 110.0, "weights": 37.0},
        "epochs": [slow | {"profiled": False}, plain, slow, plain],
        "profile": summed(made_trace()),
    }


def test_limit_follows_from_the_times() -> None:
    assert limit(made_result()).startswith("the host (4 launches a step; most of the gaps before")
    assert limit(made_result()).endswith("kernels of: forward)")
    assert limit(made_result(training=0.001)) == (
        "GPU kernels, most of all matrix products (22% of them)"
    )
    assert limit(made_result(checkpoint=0.003)).startswith("saving (0.00 s against")
    assert limit(made_result(validation=0.003)).startswith("validation")


def test_upload_for_a_later_batch_means_that_the_data_path_is_not_resident() -> None:
    result = made_result()
    assert is_resident(result)
    gpu = Gpu()
    gpu.events = made_trace()
    gpu.work("Memcpy HtoD (Pageable -> Device)", 1020, 1100, 20, "aten::copy_", size=64)
    result["profile"] = summed(gpu.events)
    assert not is_resident(result)
    assert "Data path resident on the GPU: no." in JOB.section({"profile/softmax": result})


def test_section_reports_the_times_and_the_kernels() -> None:
    text = JOB.section({"profile/softmax": made_result()})
    assert "training 0.00 s (512,000 images/s, 512,000 to 512,000)" in text
    assert "Data path resident on the GPU: yes." in text
    assert "The GPU is busy for 41% of the training (40% under the profiler)" in text
    assert "| matrix products | 22% | 0.100 | 0.5 |" in text
    assert f"| `{GEMM}` | matrix products | 0.100 | 0.5 |" in text
    assert "1 HtoD in draws of the epoch (0.00 MiB), 1 DtoH in record of" in text


@pytest.mark.slow
def test_compiled_epochs_stand_between_others(tmp_path: Path) -> None:
    step = next(step for step in JOB.steps(True) if step.name == "compile/static_key")
    result = json.loads(json.dumps(step.measure(context(tmp_path))))
    assert {name: len(epochs) for name, epochs in result["turns"].items()} == {
        "before": 2,
        "compiled": 2,
        "after": 2,
    }
    assert "not tested against it as it is, too few epochs" in JOB.section({step.name: result})


def turns(plain: list[float], compiled: list[float]) -> Result:
    def epochs(values: list[float]) -> list[Result]:
        times = [30.0, *values]
        return [{"training_s": s, "seconds": s + 1, "profiled": False, "parts": {}} for s in times]

    half = len(plain) // 2
    seen = {"before": plain[:half], "compiled": compiled, "after": plain[half:]}
    return made_result() | {"turns": {name: epochs(values) for name, values in seen.items()}}


@pytest.mark.parametrize(
    ("plain", "compiled", "words"),
    [
        ([4.0] * 5 + [4.2], [2.0, 2.0, 2.1, 2.0], "faster than as it is: 512 against 256 images/s"),
        ([2.0] * 5 + [2.1], [4.0, 4.1, 4.0, 4.0], "slower than as it is: 256 against 512 images/s"),
        ([2.0, 3.0] * 3, [2.0, 1.9, 2.0, 2.0], "not distinguishable from it as it is: 512"),
        ([4.0] * 4, [2.0, 2.0, 2.0], "not tested against it as it is, too few epochs: 512"),
    ],
)
def test_compiled_is_faster_only_if_all_its_epochs_are(
    plain: list[float], compiled: list[float], words: str
) -> None:
    text = JOB.section({"compile/softmax": turns(plain, compiled)})
    assert f"**softmax, compiled**: {words}" in text
    assert f"took {30 - sorted(compiled)[1]:.1f} s longer" in text
