# SPDX-License-Identifier: Apache-2.0
"""Each dense mixer on the GPU: right in three dtypes, and as fast as flash attention?

A step measures one mixer along every path that it offers there, so that a kernel which is added to
a mixer, or a new mixer, is measured without a line here.
"""

from __future__ import annotations

import functools
import gc
import math
import runpy
import statistics
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_queue.job import Context, Job, Result, Step
from gpu_queue.mixer_results import BARE, BASE, DTYPES, FAILED, HALF, MODES, limit, section

INDEX = Path(__file__).parents[3] / "src" / "keymix" / "cli" / "index.py"  # without torch
SCALES = (1.0, 2.0**-5, 2.0**-10)  # of the loss: the first with finite gradients
COPIES = 10  # of a map [B, h, N, N] in float32 that re-attention holds in training, by counting


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        dim: Width C.
        heads: Heads.
        grids: Token grids (H, W) without prefix tokens, for errors and times.
        odd: A grid that is not square, with one prefix token, for errors alone.
        tokens: Tokens of a timed batch.
        room: Bytes for the maps of a timed batch.
        rounds: Rounds of each timing, as many as a paired test of 20 comparisons takes.
        seconds: After which a timing stops with fewer rounds.
        poison: Bytes of the largest blocks that are filled with NaN before a pass, twice these.
        copied: Numbers that the copy of the ceilings moves.
        square: Side of the matrices of the ceilings.
    """

    dim: int
    heads: int
    grids: tuple[tuple[int, int], ...]
    odd: tuple[int, int]
    tokens: int
    room: int
    rounds: int
    seconds: float
    poison: int
    copied: int
    square: int

    def timed(self, tokens: int) -> int:
        """Images of a timed batch: as many as fill the chip, as far as their maps fit."""
        a_map = 4 * self.heads * tokens * tokens
        return max(1, min(self.tokens // tokens, self.room // (COPIES * a_map)))

    def site(self, grid: Sequence[int], prefix: int = 0) -> dict[str, Any]:
        """Say where a mixer sits, as `create_mixer` takes it."""
        where = {"grid": tuple(grid), "num_prefix_tokens": prefix}
        return {"dim": self.dim, "num_heads": self.heads, **where}


FULL = Sizes(
    dim=384,
    heads=6,
    grids=((7, 7), (14, 14), (28, 28), (32, 32), (64, 64)),
    odd=(13, 5),
    tokens=2**17,
    room=40 * 2**30,
    rounds=12,
    seconds=15.0,
    poison=2**32,
    copied=2**30,
    square=8192,
)
TINY = Sizes(
    dim=16,
    heads=2,
    grids=((4, 4),),
    odd=(5, 3),
    tokens=32,
    room=2**30,
    rounds=2,
    seconds=1.0,
    poison=2**14,
    copied=2**16,
    square=64,
)


def sizes_of(context: Context) -> Sizes:
    """Sizes of a dry run or of a measurement."""
    return TINY if context.tiny else FULL


def device_of(context: Context) -> Any:
    """Where it runs, with products of float32 in float32 (PyTorch's convolutions take TF32)."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device(context.device)


# ---- ceilings -----------------------------------------------------------------------------------


def measure_ceilings(context: Context) -> Result:
    """Measure how fast the device copies, and multiplies matrices in bfloat16."""
    import torch

    from keymix.analysis.measure import timed
    from keymix.analysis.timing import Turns, quartiles

    sizes, device = sizes_of(context), device_of(context)
    source = torch.randn(sizes.copied, device=device)
    target = torch.empty_like(source)
    a, b = (
        torch.randn(sizes.square, sizes.square, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    turns = Turns(
        {
            "copy": timed(lambda: target.copy_(source), device),
            "matmul": timed(lambda: a @ b, device),
        }
    )
    for _ in range(2 * sizes.rounds):
        turns.round()
    result: Result = {
        "bytes": source.nbytes,
        "side": sizes.square,
        "rounds": len(turns.samples["copy"].wall),
    }
    # bytes read and bytes written; additions and multiplications
    work = {"copy": ("tb_s", 2 * source.nbytes), "matmul": ("tflop_s", 2 * sizes.square**3)}
    for name, (unit, amount) in work.items():
        fast, middle, slow = quartiles(turns.samples[name].kept())
        for key, seconds in (("", middle), ("_q1", slow), ("_q3", fast)):
            result[f"{name}_{unit}{key}"] = amount / seconds / 1e12
    return result


# ---- paths --------------------------------------------------------------------------------------


def offered(name: str, sizes: Sizes, device: Any) -> tuple[dict[str, Result], Result, Result]:
    """Ask a mixer which paths it offers on a device.

    Returns:
        The paths, the plain equation first, each with the options that ask for it; why others
        cannot run; and the path that it takes of itself, with the reason.
    """
    from keymix.errors import UserError, one_line
    from keymix.mixers.registry import create_mixer, option_hints

    site = sizes.site(sizes.grids[0])
    chosen = asdict(create_mixer(name, **site).choose_backend(device))
    hint = option_hints(name).get("backend")
    if hint is None:
        return {chosen["name"]: {}}, {}, chosen
    paths: dict[str, Result] = {}
    refused: Result = {}
    for path in typing.get_args(hint):
        if path == "auto":
            continue
        try:
            create_mixer(name, **site, backend=path).choose_backend(device)
        except UserError as error:
            refused[path] = one_line(str(error))
        else:
            paths[path] = {"backend": path}
    return dict(sorted(paths.items(), key=lambda item: item[0] != "reference")), refused, chosen


def under(mixer: Any, device: Any, dtype: str) -> Any:
    """Have a mixer's forward run under autocast where the dtype has 16 bits; its backward not."""
    import torch

    if dtype != "float32":
        mixer.forward = torch.autocast(device.type, getattr(torch, dtype))(mixer.forward)
    return mixer


def on_flash(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let PyTorch's attention take its flash kernel or fail."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wrapped: Callable[..., Any] = sdpa_kernel(SDPBackend.FLASH_ATTENTION)(function)
    return wrapped


def kernels(call: Callable[[], object]) -> list[str]:
    """Name the fused attention that PyTorch runs within a call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.__name__.partition(".")[0]
            if name.startswith("_scaled_dot_product_"):
                seen.add(name.removeprefix("_scaled_dot_product_"))
            return func(*args, **(kwargs or {}))

    with Watch():
        call()
    return sorted(seen)


def or_reason(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what a call gives, or why there is nothing: refused, no memory, or a failure.

    One path that fails leaves the others their turn on a machine that is lent for half an hour;
    a failure counts as a wrong result.
    """
    import torch

    from keymix.errors import UserError, one_line

    try:
        return call(), None
    except UserError as error:
        reason = one_line(str(error))
    except torch.OutOfMemoryError:
        reason = "does not fit"
    except Exception as error:  # Triton's own (no registers left, no code) are no RuntimeError
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        reason = FAILED + one_line(f"{type(error).__name__}: {first}")
    if torch.cuda.is_initialized():
        gc.collect()  # the error kept what the pass had made so far
        torch.cuda.empty_cache()
    return None, reason


# ---- errors -------------------------------------------------------------------------------------


def poison(sizes: Sizes, device: Any) -> bool:
    """Fill free memory with NaN, so that a result which is not written shows.

    Returns:
        Whether memory taken now is NaN, as on CUDA, whose allocator hands freed blocks out again.
    """
    import torch

    torch.cuda.empty_cache()  # it holds results of other passes, right ones among them
    # large blocks first: the small ones then fill what is left between tensors in use
    blocks = [
        torch.full((2**power,), 255, dtype=torch.uint8, device=device)  # NaN in every dtype
        for power in range(sizes.poison.bit_length() - 1, 8, -1)
        for _ in range(2 if power > 19 else 32)
    ]
    del blocks
    taken = [torch.empty(size, device=device) for size in (8, 2**12, 2**20)]
    return all(bool(t.isnan().all()) for t in taken)


def distance(result: Any, wanted: Any) -> float | None:
    """Return |result - wanted| / |wanted|, undivided where that is 0; None if not finite."""
    result, wanted = result.detach().double(), wanted.detach().double()
    off, size = float((result - wanted).norm()), float(wanted.norm())
    if not math.isfinite(off):
        return None
    return off / size if size else off


def measure_errors(
    name: str, sizes: Sizes, device: Any, paths: Mapping[str, Result]
) -> Iterator[Result]:
    """Compare output and every gradient of each path with the plain equation in float64."""
    import torch

    from keymix.mixers.contract import example_tokens, stir
    from keymix.mixers.registry import create_mixer

    plain = next(iter(paths))
    for grid, prefix in ((sizes.odd, 1), *((grid, 0) for grid in sizes.grids)):
        site = sizes.site(grid, prefix)
        tokens = prefix + grid[0] * grid[1]
        torch.manual_seed(0)
        first = create_mixer(name, **site)
        stir(first, sizes.dim**-0.5)  # as large as the weights: logits keep a spread of about 1
        state = {key: value.to(device) for key, value in first.state_dict().items()}
        x = example_tokens(first, max(1, min(4, 4096 // tokens))).to(device)
        made = functools.partial(_results, name, site, state, x)
        rows = {
            (path, dtype): {
                "grid": "x".join(map(str, grid)) + f"+{prefix}" * bool(prefix),
                "tokens": tokens,
                "images": len(x),
                "path": path,
                "dtype": dtype,
                "kernels": [],
                "scale": 1.0,
                "poisoned": True,
                "compared": 0,
                "output": 0.0,
                "gradient": 0.0,
                "excess": 0.0,
            }
            for path in paths
            for dtype in DTYPES
        }
        for training in (True, False):
            exact = made(paths[plain], training, "float64")
            for dtype in DTYPES:
                equation: dict[str, float | None] = {}
                for path, options in paths.items():
                    row = rows[path, dtype]
                    row["poisoned"] &= poison(sizes, device)
                    found, reason = or_reason(functools.partial(made, options, training, dtype))
                    if reason is not None:
                        row["reason"] = reason
                        continue
                    errors = {key: distance(found[key], wanted) for key, wanted in exact.items()}
                    if path == plain:
                        equation = errors
                    row["kernels"] = sorted({*row["kernels"], *found.kernels})
                    row["scale"] = min(row["scale"], found.scale)
                    _enter(row, "train" if training else "eval", errors, equation)
        yield from rows.values()


class _Tensors(dict[str, Any]):
    """Output and gradients by name, which fused attention ran, and the scale of the loss."""

    kernels: Sequence[str] = ()
    scale: float = 1.0


def _results(
    name: str,
    site: Result,
    state: Mapping[str, Any],
    x: Any,
    options: Result,
    training: bool,
    dtype: str,
) -> _Tensors:
    """Run a mixer with given weights forward and backward."""
    import torch

    from keymix.mixers.contract import gradients
    from keymix.mixers.registry import create_mixer

    mixer = create_mixer(name, **site, **options, device=x.device).to(x.device)
    mixer.load_state_dict(state)
    mixer.train(training)
    results = _Tensors()
    if dtype == "float64":  # without cuDNN: another implementation, and one that is quick
        with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
            output, grads = gradients(mixer.double(), x.double())
    else:
        under(mixer, x.device, dtype)
        forward = mixer.forward
        with torch.no_grad():
            results.kernels = kernels(lambda: mixer(x))
            mixer.load_state_dict(state)  # a pass in training moves running statistics
            output = mixer(x)
        # sums of gradients over tokens exceed float16: the loss is scaled, as a GradScaler does
        for results.scale in SCALES:
            mixer.forward = lambda x: forward(x) * results.scale
            _, grads = gradients(mixer, x)
            if all(bool(g.isfinite().all()) for g in grads.values()):
                break
        grads = {key: g / results.scale for key, g in grads.items()}
    kept = {key: g for key, g in grads.items() if key not in mixer.zero_gradients}
    results.update(output=output, **kept)
    return results


def _enter(
    row: Result,
    mode: str,
    errors: Mapping[str, float | None],
    equation: Mapping[str, float | None],
) -> None:
    """Put the errors of a pass into the row of its path and dtype: the worst counts."""
    for key, error in errors.items():
        allowed = limit(row["path"], row["dtype"], equation.get(key))
        excess = None if error is None else error / allowed
        kind = "output" if key == "output" else "gradient"
        row["compared"] += 1
        if row[kind] is not None:
            row[kind] = None if error is None else max(row[kind], error)
        if row["excess"] is not None and (excess is None or excess >= row["excess"]):
            row["excess"] = excess
            row["worst"] = {
                "of": key if key == "output" else f"gradient of {key}",
                "mode": mode,
                "error": error,
                "limit": allowed,
                "equation": equation.get(key),
            }


# ---- times --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Timed:
    """What is timed: a forward pass, what its gradients are taken of, and its multiply-adds."""

    forward: Callable[[], Any]
    leaves: Sequence[Any]
    macs: int
    mixer: Any = None

    def passes(self, mode: str) -> Callable[[], object]:
        """Return a pass: forward without gradients, or forward and all gradients."""
        import torch

        if self.mixer is not None:
            self.mixer.train(mode == "train")

        def forward() -> object:
            with torch.no_grad():
                return self.forward()

        if mode == "forward":
            return forward
        upstream = torch.randn_like(forward())
        return lambda: torch.autograd.grad(self.forward(), self.leaves, upstream)


def _runs(
    name: str,
    sizes: Sizes,
    grid: tuple[int, int],
    x: Any,
    paths: Mapping[str, Result],
    wraps: Mapping[str, Callable[..., Any]],
) -> dict[str, _Timed]:
    """Make what is timed at one number of tokens: softmax and flash attention, then the paths."""
    import torch
    import torch.nn.functional as F

    from keymix.analysis.counting import count
    from keymix.mixers.contract import stir
    from keymix.mixers.registry import create_mixer

    site, device = sizes.site(grid), x.device

    def timed(name: str, options: Result, wrap: Callable[..., Any] | None = None) -> _Timed:
        torch.manual_seed(0)
        mixer = create_mixer(name, **site, **options, device=device).to(device)
        stir(mixer, sizes.dim**-0.5)
        macs = count(create_mixer(name, **site, device="meta"), x.shape[1:]).macs * len(x)
        under(mixer, device, HALF)
        if wrap is not None:
            mixer.forward = wrap(mixer.forward)
        leaves = [x, *mixer.parameters()]
        return _Timed(functools.partial(mixer, x), leaves, macs, mixer)

    images, tokens = x.shape[:2]
    shape = (3, images, sizes.heads, tokens, sizes.dim // sizes.heads)
    parts = [
        part.requires_grad_()
        for part in torch.randn(shape, device=device, dtype=getattr(torch, HALF))
    ]
    bare = functools.partial(on_flash(F.scaled_dot_product_attention), *parts)
    return {
        BASE: timed("softmax", {"backend": "sdpa"}, on_flash),
        BARE: _Timed(bare, parts, 2 * images * tokens**2 * sizes.dim),
        **{path: timed(name, options, wraps.get(path)) for path, options in paths.items()},
    }


def _issued(call: Callable[[], object], wait: Callable[[], object] | None) -> float | None:
    """Return the share of a pass in which the host issues it; None where nothing waits."""
    if wait is None:
        return None
    shares = []
    for _ in range(3):
        wait()
        start = time.perf_counter()
        call()
        issued = time.perf_counter()
        wait()
        shares.append((issued - start) / (time.perf_counter() - start))
    return statistics.median(shares)


def _last_image(run: _Timed, x: Any) -> float | None:
    """Error of the last image of the whole batch against the same image alone."""
    import torch

    run.mixer.eval()
    with torch.no_grad():
        return distance(run.forward()[-1:], run.mixer(x[-1:]))


def measure_times(
    name: str,
    sizes: Sizes,
    device: Any,
    paths: Mapping[str, Result],
    wraps: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Iterator[Result]:
    """Time each path in turns with softmax on flash attention, and measure its memory.

    ``wraps`` changes the forward of some paths, as a compiler does.
    """
    import torch

    for grid in sizes.grids:
        tokens = grid[0] * grid[1]
        images = sizes.timed(tokens)
        torch.manual_seed(1)
        x = torch.randn(images, tokens, sizes.dim, device=device, requires_grad=True)
        runs = _runs(name, sizes, grid, x, paths, wraps)
        for mode in MODES:
            for row in _timed_in_turns(runs, mode, sizes, x):
                yield {"tokens": tokens, "images": images, "mode": mode, **row}
        del runs, x
        torch.cuda.empty_cache()


def _prepared(
    path: str, run: _Timed, mode: str, x: Any
) -> tuple[Callable[[], object], dict[str, Any]]:
    """Run a pass for the first time: its memory, its kernels, the last image of its batch."""
    import torch

    from keymix.analysis.memory_growth import peak_bytes

    call = run.passes(mode)
    row: Result = {"path": path, "peak_mib": peak_bytes(call, x.device) / 2**20}
    with torch.no_grad():
        row["kernels"] = kernels(run.forward)
    if mode == "forward" and path not in (BASE, BARE):
        row["last_image"] = _last_image(run, x)
    return call, row


def _timed_in_turns(
    runs: Mapping[str, _Timed], mode: str, sizes: Sizes, x: Any
) -> Iterator[Result]:
    """Time all of one mode at one number of tokens."""
    from keymix.analysis.measure import timed
    from keymix.analysis.timing import Turns, compare, quartiles

    rows: dict[str, Result] = {}
    passes = {}
    for path, run in runs.items():
        made, reason = or_reason(functools.partial(_prepared, path, run, mode, x))
        if reason is not None:
            yield {"path": path, "reason": reason}
            continue
        call, rows[path] = made
        passes[path] = timed(call, x.device)
        rows[path]["issued"] = _issued(call, passes[path].wait)
    turns = Turns(passes)
    end = time.monotonic() + sizes.seconds
    for _ in range(sizes.rounds):
        turns.round()
        if time.monotonic() > end:
            break
    factor = 3 if mode == "train" else 1  # backward: two products for each of the forward pass
    for path, row in rows.items():
        samples = turns.samples[path]
        fast, middle, slow = quartiles(samples.kept())
        row |= {"ms": 1e3 * middle, "ms_q1": 1e3 * fast, "ms_q3": 1e3 * slow}
        row["tflop_s"] = 2 * factor * runs[path].macs / middle / 1e12
        row["rounds"] = len(samples.wall)
        if path != BASE and BASE not in rows:
            row["ratio_text"] = "-"
        elif path != BASE:
            paired = compare(turns.samples[BASE], samples, comparisons=len(rows) - 1)
            row |= {
                key: getattr(paired, key)
                for key in ("ratio", "ratio_q1", "ratio_q3", "p", "verdict")
            }
            row["ratio_text"] = paired.ratio_text()
        yield row


# ---- the job ------------------------------------------------------------------------------------


def measure_mixer(name: str, context: Context) -> Result:
    """Measure errors, times and memory of one mixer along all its paths."""
    import torch

    sizes, device = sizes_of(context), device_of(context)
    paths, refused, chosen = offered(name, sizes, device)
    errors = list(measure_errors(name, sizes, device, paths))
    torch.cuda.empty_cache()
    return {
        "dim": sizes.dim,
        "heads": sizes.heads,
        "timed_in": HALF,
        "default": chosen,
        "refused": refused,
        "errors": errors,
        "times": list(measure_times(name, sizes, device, paths)),
    }


def dense() -> list[str]:
    """Name the dense mixers: softmax, the mechanisms, the controls."""
    rows = runpy.run_path(str(INDEX))["_own_mixers"]()
    rows = [row for row in rows if row["domain"] == "dense"]
    rows.sort(key=lambda row: (row["control"], row["name"] != "softmax", row["name"]))
    return [row["name"] for row in rows]


# Seconds of a mixer: 10 for process, CUDA and its libraries; errors: 6 grids x 2 modes x (1 + 3
# dtypes x 2 paths) = 84 passes of 0.06 s (tokens and upstream gradients are drawn on the host) = 5;
# times: 10 timings of 4 passes x 15 rounds of at least 5 ms = 3, at 4,096 tokens with maps in
# memory 2 x 15 x 0.15 s = 5 more; memory, multiply-adds, first calls: 5.
SECONDS = 30.0
# Triton compiles its kernels once for each dtype and kind of size: some thirty, at 2 s, or at 6 s
# where a kernel holds nine taps or all heads.
KERNELS = {"softmax": 60.0, "static_key": 60.0, "key_value": 60.0, "conv_static_key": 180.0}
KERNELS |= {"re_attention": 180.0, "static_key_re_attention": 180.0}
# A convolution with 6 x 4,096 filters of 64 x 3 x 3 at 4,096 tokens: 58 GMACs per image, 10 images,
# 3 passes = 3.5 TFLOP a training pass, 0.1 s at a tenth of what the tensor cores could, and nobody
# knows which algorithm cuDNN takes: up to the 15 s at which a timing stops.
SLOW = {"conv_static_key": 75.0}


def steps(tiny: bool) -> list[Step]:
    """Ceilings, then a step a mixer; in a dry run one mixer with and one without fused path."""
    names = ["softmax", "re_attention"] if tiny else dense()
    return [
        Step(name="ceilings", seconds=15, gpu_gib=10, measure=measure_ceilings),
        *(
            Step(
                name=name,
                seconds=SLOW.get(name, SECONDS) + KERNELS.get(name, 0.0),
                gpu_gib=64,  # 40 for maps, what a convolution works in, weights and tokens
                measure=functools.partial(measure_mixer, name),
            )
            for name in names
        ),
    ]


JOB = Job(
    number=2,
    name="mixers",
    title="Mixers: accuracy, and speed against flash attention",
    purpose=(
        "Does each dense mixer give what its equation says, forward and backward, in float32, "
        "bfloat16 and fp16? And how fast is it compared with softmax attention on PyTorch's flash "
        "kernel, from 49 to 4,096 tokens?"
    ),
    form={
        "copy_tb_s, matmul_tflop_s": "ceilings, with quartiles: TB/s copied, TFLOP/s in bfloat16",
        "default": "path that the mixer takes of itself, and why",
        "refused": "paths that it does not offer here, and why",
        "errors": "by grid, path and dtype: worst error of output and gradients, which is worst, "
        "its limit, fused kernels that ran; excess above 1, or none, is wrong",
        "times": "by tokens, mode and path: ms and ratio to softmax on flash with quartiles, "
        "verdict of the paired test, TFLOP/s, peak MiB, share of the time to issue it",
    },
    steps=steps,
    section=lambda results: section(results, ["ceilings", *dense()]),
)
