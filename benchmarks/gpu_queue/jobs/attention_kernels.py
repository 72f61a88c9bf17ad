# SPDX-License-Identifier: Apache-2.0
"""Attention by Triton kernels on the GPU: right, and faster than the plain equation?

The job of all mixers compares each path with flash attention. This one asks what `auto` should
take: the kernels stand next to the plain equation, eager and compiled, and next to flash attention,
at more numbers of tokens, with their share of the rate that a product of matrices reaches.

Work is counted as multiply-adds of the equation, backward twice those forward; what kernels compute
again is not counted, so that a share is of useful work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpu_queue.job import Context, Job, Result, Step, table
from gpu_queue.jobs.mixers import (
    device_of,
    measure_ceilings,
    measure_errors,
    measure_times,
    sizes_of,
)
from gpu_queue.mixer_results import BARE, BASE, DTYPES, HALF, MODES, wrong

MIXERS = ("conv_static_key", "static_key", "key_value", "re_attention")
SIDES = (14, 28, 32, 48, 64)  # 196 to 4,096 tokens
EAGER, COMPILED = "reference", "compiled"
PATHS = ("triton", EAGER, COMPILED, BASE)
# what is aimed at: times faster than the eager equation, forward and in training, and from how many
# tokens on
GOALS: Mapping[str, tuple[float, float, int]] = {
    "conv_static_key": (3.0, 2.0, 784),
    "re_attention": (4.0, 2.5, 577),
}


def kernel_path(context: Context) -> str:
    """Return the path that is measured; kernels are for CUDA, blocks of rows for a dry run."""
    return "blocked" if context.tiny else "triton"


def errors(name: str, context: Context) -> Result:
    """Compare output and every gradient of the kernels with the equation, in three dtypes."""
    path, sizes = kernel_path(context), sizes_of(context)
    paths = {each: {"backend": each} for each in (EAGER, path)}
    rows = list(measure_errors(name, sizes, device_of(context), paths))
    return {"path": path, "errors": rows, "times": []}


def times(name: str, side: int, context: Context) -> Result:
    """Time the kernels, the plain equation, that one compiled, and flash attention, in turns."""
    import torch

    path, sizes, device = kernel_path(context), sizes_of(context), device_of(context)
    ceilings = measure_ceilings(context)
    torch.cuda.empty_cache()
    paths = {
        path: {"backend": path},
        EAGER: {"backend": EAGER},
        COMPILED: {"backend": EAGER},
    }
    compiler = "aot_eager" if context.tiny else "inductor"
    wraps: dict[str, Callable[..., Any]] = {
        COMPILED: functools.partial(torch.compile, backend=compiler, dynamic=False)
    }
    at = replace(sizes, grids=((side, side),))
    rows = list(measure_times(name, at, device, paths, wraps))
    return {
        "path": path,
        "dim": sizes.dim,
        "heads": sizes.heads,
        "matmul_tflop_s": ceilings["matmul_tflop_s"],
        "errors": [],
        "times": rows,
    }


def steps(tiny: bool) -> list[Step]:
    """Errors of each mixer, then its times at each number of tokens."""
    mixers = ("static_key", "re_attention") if tiny else MIXERS
    sides = (4,) if tiny else SIDES
    # Errors: 15 s of starting, and some forty kernels that Triton compiles in 1 to 10 s each, those
    # in float32 slowest. Times: the compiler around the equation takes 20 s in each mode, timings
    # at most 15 s each.
    return [
        step
        for name in mixers
        for step in (
            Step(
                name=f"{name}/errors",
                seconds=240.0,
                gpu_gib=16,
                measure=functools.partial(errors, name),
            ),
            *(
                Step(
                    name=f"{name}/{side * side}",
                    seconds=110.0,
                    gpu_gib=64,
                    measure=functools.partial(times, name, side),
                )
                for side in sides
            ),
        )
    ]


# ---- what is written ----------------------------------------------------------------------------


def section(results: Mapping[str, Result]) -> str:
    """Say which kernels are right, then how fast they are."""
    parts = [_about_errors(results)]
    rows = [
        _Timed(name.split("/")[0], result) for name, result in results.items() if result["times"]
    ]
    rows.sort(key=lambda row: (row.mixer, row.tokens))
    if rows:
        first = rows[0].result
        parts += [
            f"Time of other paths as a multiple of the kernels' ({rows[0].path}): above 1 the "
            f"kernels are faster. Forward / training, {HALF} by autocast, width {first['dim']}, "
            f"{first['heads']} heads; medians of paths that were timed in turns.",
            table(
                ("mixer", "N", "images", "plain, eager", "plain, compiled", BASE, "goal"),
                [_ratios(row) for row in rows],
            ),
            "Rate of useful multiply-adds, as a share of a product of bfloat16 matrices in the "
            "same process; forward / training.",
            table(
                ("mixer", "N", "kernels", BARE, "peak memory to eager"),
                [_shares(row) for row in rows],
            ),
        ]
    wanted = [step.name for step in steps(False)]
    missing = [name for name in wanted if name not in results]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(part for part in parts if part)


def _about_errors(results: Mapping[str, Result]) -> str:
    """Say of each mixer whether its kernels are right, and how far off they are."""
    lines = []
    for name, result in results.items():
        if not (result["errors"] or result["times"]):
            continue
        places = wrong(result, result["path"])
        if places:
            lines.append(f"`{name}` is wrong: {'; '.join(places)}.")
        elif result["errors"]:
            worst = {
                dtype: max(
                    max(row["output"], row["gradient"])
                    for row in result["errors"]
                    if (row["path"], row["dtype"]) == (result["path"], dtype)
                )
                for dtype in DTYPES
            }
            far = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in worst.items())
            lines.append(f"`{name.split('/')[0]}` is right: at most {far} from float64.")
    return " ".join(lines)


class _Timed:
    """The times of one mixer at one number of tokens."""

    def __init__(self, mixer: str, result: Result) -> None:
        self.mixer, self.result, self.path = mixer, result, result["path"]
        self.tokens, self.images = (result["times"][0][key] for key in ("tokens", "images"))
        self._rows = {(row["path"], row["mode"]): row for row in result["times"]}

    def both(self, write: Callable[[str], str]) -> str:
        """Write forward / training."""
        return " / ".join(write(mode) for mode in reversed(MODES))

    def number(self, path: str, mode: str, key: str) -> float | None:
        """Return what a path reached, None where it did not run."""
        value = self._rows.get((path, mode), {}).get(key)
        return None if value is None else float(value)

    def over(self, path: str, mode: str, key: str) -> float | None:
        """Return a path's number as a multiple of the kernels'."""
        mine, other = self.number(self.path, mode, key), self.number(path, mode, key)
        return other / mine if mine and other is not None else None


def _written(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _ratios(row: _Timed) -> Sequence[str]:
    goal = GOALS.get(row.mixer)
    wanted = "-"
    if goal is not None and row.tokens >= goal[2]:
        wanted = f"{goal[0]:g} / {goal[1]:g}"
    return (
        f"`{row.mixer}`",
        f"{row.tokens:,}",
        f"{row.images:,}",
        *(
            row.both(lambda mode, path=path: _written(row.over(path, mode, "ms")))  # type: ignore[misc]
            for path in PATHS[1:]
        ),
        wanted,
    )


def _shares(row: _Timed) -> Sequence[str]:
    def share(path: str, mode: str) -> str:
        rate = row.number(path, mode, "tflop_s")
        return _written(None if rate is None else rate / row.result["matmul_tflop_s"], ".0%")

    memory = row.over(EAGER, "train", "peak_mib")
    return (
        f"`{row.mixer}`",
        f"{row.tokens:,}",
        row.both(lambda mode: share(row.path, mode)),
        row.both(lambda mode: share(BARE, mode)),
        "-" if memory is None else f"1/{memory:.1f}",
    )


def about() -> str:
    """Say what the kernels do, whether or not they are measured."""
    return (
        '`backend="triton"` of `softmax`, `static_key`, `conv_static_key`, `key_value`, '
        "`re_attention` and `static_key_re_attention` computes what the plain equation does, "
        "forward and backward, without a map in memory. The kernels agree with the equation in "
        "float64 in Triton's interpreter, and compile for a Hopper GPU; they are not yet measured "
        "on one, so that `auto` does not take them."
    )


JOB = Job(
    number=9,
    name="attention_kernels",
    title="Attention by Triton kernels",
    purpose=(
        "Do the Triton kernels of attention give what the equation says, and from how many tokens "
        "on are they faster than the plain equation, eager and compiled, and than flash attention?"
    ),
    form={
        "path": "the path whose kernels are measured",
        "errors": "as in the job of all mixers, of the plain equation and the kernels",
        "times": "as in the job of all mixers; `compiled` is the plain equation under "
        "torch.compile",
        "matmul_tflop_s": "TFLOP/s of a product of bfloat16 matrices in the same process",
    },
    steps=steps,
    section=section,
    always=about,
)
