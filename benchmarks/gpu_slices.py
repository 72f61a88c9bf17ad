# SPDX-License-Identifier: Apache-2.0
"""What `gpu.py` measures: five slices, each a function that names its units.

a: the tests marked gpu; every path of every mixer against float64. b: attention by each path, next
to flash attention. c: images per second of ViTs. d: QKFormer and neurons next to SpikingJelly.
e: two epochs of CIFAR-10, and where the time goes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import io
import itertools
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keymix.analysis.timing import Pass, Turns, quartiles
from keymix.errors import UserError
from keymix.layers.neurons import LIF, SpikingNeuron
from keymix.mixers.contract import example_tokens, gradients, spiking, stir
from keymix.mixers.registry import create_mixer, list_mixers, option_hints
from keymix.ops.neuron import multi_step

ROOT = Path(__file__).resolve().parents[1]
FULL = "does not fit"
KERNEL, COMPILED, FLASH, THEIRS = "triton", "compiled", "flash attention", "SpikingJelly"
DTYPES = ("float32", "bfloat16")
# Errors are |y - y64| / |y64|; of the output of a spiking mixer, the share of spikes that differ.
# The plain equation is held to LIMIT, ten roundings and what they add up to (one spike in 20 in
# bfloat16). Another path may be off by MULTIPLE times the equation's error in that dtype, or by
# PATH_LIMIT where the equation was lucky: two spacings; in float32 less than TF32 makes.
LIMIT = {"float32": 1e-3, "bfloat16": 5e-2}
PATH_LIMIT = {"float32": 1e-4, "bfloat16": 2.0**-6}
MULTIPLE = 4.0

Row = dict[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a slice is measured, and until when (seconds of `time.time`)."""

    device: str = "cuda"
    tiny: bool = False
    data: Path | None = None
    until: float = math.inf

    def left(self) -> float:
        """Seconds that are left."""
        return self.until - time.time()


Units = dict[str, Callable[[Setting], Row]]


class BrokenError(RuntimeError):
    """The GPU does not answer any more."""


# ---- timing -------------------------------------------------------------------------------------


def why(error: Exception) -> str:
    """Return an error's first line, with its memory free and the GPU known to answer."""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    if isinstance(error, BrokenError):
        raise error
    error.__traceback__ = None  # it keeps the tensors of the pass
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        try:
            torch.cuda.synchronize()
        except RuntimeError as broken:
            raise BrokenError(f"the GPU does not answer any more after {said}") from broken
    return FULL if isinstance(error, torch.OutOfMemoryError) else said


def first(call: Call, setting: Setting) -> Row:
    """Call twice; on a GPU the second call's peak memory, and the share that the host issues."""
    call()
    if setting.device != "cuda":
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    call()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"peak_mib": peak, "issued": issued / (time.perf_counter() - start)}


def timings(calls: Mapping[str, Call], setting: Setting, seconds: float = 4.0) -> dict[str, Row]:
    """Time calls in turns after a warm-up: ms with quartiles; a call that fails has its error."""
    rows: dict[str, Row] = {}
    for name, call in calls.items():
        try:
            rows[name] = first(call, setting)
        except Exception as error:
            rows[name] = {"error": why(error)}
    wait = torch.cuda.synchronize if setting.device == "cuda" else None
    good = {name: Pass(calls[name], wait) for name, row in rows.items() if "error" not in row}
    if not good:
        return rows
    turns, end = Turns(good), time.time() + min(seconds, setting.left())
    for _ in range(2 if setting.tiny else 15):
        turns.round()
        if time.time() > end:
            break
    for name in good:
        samples = turns.samples[name].kept()
        low, middle, high = (1e3 * each for each in quartiles(samples))
        rows[name] |= {"ms": middle, "ms_q1": low, "ms_q3": high, "rounds": len(samples)}
    return rows


def compiler(setting: Setting) -> Row:
    """Options of the compiler; the dry run stops at the graph, for C++ takes half a minute."""
    return {"backend": "aot_eager" if setting.tiny else "inductor", "dynamic": False}


def both_passes(
    runs: Mapping[str, Call], inputs: Sequence[Tensor], setting: Setting, modules: Row
) -> dict[str, dict[str, Row]]:
    """Time all runs forward in evaluation, then all forward and backward in training.

    Gradients are those of the inputs that have one, and of the parameters of a run's module.
    """
    found: dict[str, dict[str, Row]] = {}
    noise: dict[torch.dtype, Tensor] = {}  # gradients of the output

    def forward(run: Call) -> Any:
        with torch.no_grad():
            return run(*inputs)

    def training(run: Call, leaves: Sequence[Tensor]) -> Any:
        y = run(*inputs)
        if y.dtype not in noise:
            noise[y.dtype] = torch.randn_like(y)
        return torch.autograd.grad(y, leaves, noise[y.dtype])

    for mode in ("forward", "training"):
        calls = {}
        for name, run in runs.items():
            leaves = list(inputs)
            if name in modules:
                leaves += modules[name].train(mode == "training").parameters()
            calls[name] = functools.partial(forward, run)
            if mode == "training":
                calls[name] = functools.partial(training, run, leaves)
        found[mode] = timings(calls, setting)
    return found


# ---- a: correctness -----------------------------------------------------------------------------


def gpu_tests(setting: Setting) -> Row:
    """Run the tests marked gpu in a process that is stopped after 90 seconds."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [file for file in found if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]
    files.sort(key=lambda file: "ops" in file.parts)  # last, where kernels are compiled
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=line", "-o", "addopts="]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    whole = {"PYTHONUNBUFFERED": "1", "COLUMNS": "400"}  # a reason is cut to the width of a line
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        with subprocess.Popen(
            [*command, *map(str, files[-1:] if setting.tiny else files)],
            cwd=ROOT,
            env={**os.environ, **whole, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(90.0, setting.left() - 10))
            code = process.poll()
            process.send_signal(signal.SIGINT)  # pytest then says why tests failed
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
        output.seek(0)
        said = output.read()
    if code not in (None, 0, 1, 2):  # 1: tests failed, 2: files could not be read
        raise RuntimeError(f"pytest ended with {code}: {said[-300:]!r}")
    outcomes = re.findall(r"^(tests/\S+.*?) (PASSED|FAILED|SKIPPED|ERROR)\b", said, re.MULTILINE)
    summary = re.findall(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - (.+))?$", said, re.MULTILINE)
    reasons = {name: "" for name, how in outcomes if how in ("FAILED", "ERROR")} | dict(summary)
    return {
        "tests": Counter(how.lower() for _, how in outcomes),
        "wrong": [f"{name}: {reason}".removesuffix(": ") for name, reason in reasons.items()],
        "cut": code is None,
    }


def paths_of(name: str, site: Row, device: torch.device) -> list[str]:
    """List the paths that a mixer offers on a device, the plain equation first."""
    hint = option_hints(name).get("backend")
    mixer = create_mixer(name, **site)
    if hint is None and not spiking(mixer):
        return ["reference"]
    paths = []
    for path in multi_step.BACKENDS if hint is None else get_args(hint):
        with contextlib.suppress(UserError):
            if hint is None:
                multi_step.choose(path, device=device)
            else:
                create_mixer(name, **site, backend=path).choose_backend(device)
            paths.append(path)
    return sorted({*paths} - {"auto"}, key=lambda path: (path != "reference", path))


def mixer_of(name: str, site: Row, path: str, device: torch.device) -> Any:
    """Build a mixer that takes a path; of a spiking one, the neurons take it."""
    options = {"backend": path} if "backend" in option_hints(name) else {}
    mixer = create_mixer(name, **site, **options, device=device).to(device)
    for module in mixer.modules():
        if isinstance(module, SpikingNeuron):
            module.backend = path
    return mixer


def results_of(mixer: Any, x: Tensor, dtype: str) -> dict[str, Tensor]:
    """Return a mixer's output and its gradients by name."""
    if dtype == "float64":
        mixer, x = mixer.double(), x.double()
    elif dtype == "bfloat16":
        mixer.forward = torch.autocast(x.device.type, torch.bfloat16)(mixer.forward)
    output, grads = gradients(mixer, x)
    zero = getattr(mixer, "zero_gradients", ())
    return {"output": output, **{key: g for key, g in grads.items() if key not in zero}}


def distance(result: Tensor, wanted: Tensor, *, spikes: bool = False) -> float:
    """Return |result - wanted| / |wanted|, or the share of spikes that differ; infinite if NaN."""
    result, wanted = result.detach().double(), wanted.detach().double()
    if spikes:
        return float((result != wanted).double().mean())
    off, size = float((result - wanted).norm()), float(wanted.norm())
    return off / (size or 1.0) if math.isfinite(off) else math.inf


def leave_nan(device: torch.device) -> None:
    """Leave NaN in memory that is free, so that a result which no kernel wrote shows."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        blocks = [torch.full((2**n,), math.nan, device=device) for n in range(7, 27)]
        del blocks


def errors_of(name: str, setting: Setting) -> Row:
    """Compare output and every gradient of each path with the plain equation in float64."""
    torch.backends.cudnn.allow_tf32 = False
    device, dim = torch.device(setting.device), 24 if setting.tiny else 384
    site: Row = {"dim": dim, "num_heads": dim // 8 if setting.tiny else 6}
    site |= {"grid": (13, 5), "num_prefix_tokens": 1}
    torch.manual_seed(0)
    start = create_mixer(name, **site)
    fires = spiking(start)
    stir(start, dim**-0.5)  # so that logits and currents keep a spread of about 1
    if fires:  # sums of spikes far above a threshold have gradients that float32 cannot hold
        with torch.no_grad():
            start.q_bn.bias -= 1.5
    x, paths = example_tokens(start, 4).to(device), paths_of(name, site, device)

    def run(path: str, dtype: str, training: bool) -> dict[str, Tensor]:
        mixer = mixer_of(name, site, path, device)
        mixer.load_state_dict(start.state_dict())
        return results_of(mixer.train(training), x, dtype)

    found: Row = {p: {d: {"output": 0.0, "gradient": 0.0} for d in DTYPES} for p in paths}
    wrong = []
    for training in (True, False):
        exact = run("reference", "float64", training)
        for dtype in DTYPES:
            plain: dict[str, float] = {}
            for path in paths:
                leave_nan(device)
                try:
                    results = run(path, dtype, training)
                except Exception as error:
                    wrong.append(f"{path}, {dtype}: {why(error)}")
                    continue
                for key, wanted in exact.items():
                    kind = "output" if key == "output" else "gradient"
                    error = distance(results[key], wanted, spikes=fires and key == "output")
                    limit = max(PATH_LIMIT[dtype], MULTIPLE * plain.get(key, 0.0))
                    if path == "reference":  # where a spike moves, gradients are other ones
                        limit = math.inf if fires and kind == "gradient" else LIMIT[dtype]
                        plain[key] = error
                    row = found[path][dtype]
                    row[kind] = max(row[kind], error)
                    if not error <= limit:
                        mode = "training" if training else "evaluation"
                        wrong.append(f"{path}, {dtype}, {mode}: {key} {error:.1e} > {limit:.1e}")
    return {"paths": found, "wrong": wrong}


def correctness(setting: Setting) -> Units:
    """The tests, then each mixer; those with several paths, which take longest, last."""
    names = sorted(list_mixers(), key=lambda name: "backend" in option_hints(name))
    return {"tests": gpu_tests, **{name: functools.partial(errors_of, name) for name in names}}


# ---- b: attention -------------------------------------------------------------------------------


def attention_of(name: str, side: int, setting: Setting) -> Row:
    """Time a mixer along each path, and flash attention alone, at one number of tokens."""
    device, tokens = torch.device(setting.device), side * side
    dim, heads = (24, 3) if setting.tiny else (384, 6)
    images = 2 if setting.tiny else 2**16 // tokens
    site: Row = {"dim": dim, "num_heads": heads, "grid": (side, side)}
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(images, tokens, dim, device=device, requires_grad=True)
    plain = mixer_of(name, site, "reference", device)
    stir(plain, dim**-0.5)
    mixers, runs = {}, {}
    for path in (*paths_of(name, site, device), COMPILED):
        mixers[path] = mixer_of(name, site, "reference" if path == COMPILED else path, device)
        mixers[path].load_state_dict(plain.state_dict())
        runs[path] = torch.autocast(device.type, torch.bfloat16)(mixers[path])
    compiled = torch.compile(mixers[COMPILED], **compiler(setting))
    runs[COMPILED] = torch.autocast(device.type, torch.bfloat16)(compiled)
    modes = both_passes(runs, [x], setting, mixers)
    shape = (3, images, heads, tokens, dim // heads)
    parts = torch.randn(shape, device=device, dtype=torch.bfloat16)
    bare: Call = F.scaled_dot_product_attention
    if setting.device == "cuda":
        bare = sdpa_kernel(SDPBackend.FLASH_ATTENTION)(bare)
    flash = both_passes({FLASH: bare}, [p.requires_grad_() for p in parts], setting, {})
    with torch.no_grad():
        wanted = plain.eval()(x[-1:])
        for path, mixer in mixers.items():  # the end of the batch, next to the equation in float32
            if "ms" in modes["forward"][path]:
                mixer.load_state_dict(plain.state_dict())  # training moves running statistics
                mixer.eval()
                modes["forward"][path]["off"] = distance(runs[path](x)[-1:], wanted)
    return {"images": images, "modes": {mode: modes[mode] | flash[mode] for mode in modes}}


def attention(setting: Setting) -> Units:
    """Each mixer with several paths, at each number of tokens; all mixers at one number first."""
    names = [name for name in list_mixers() if "backend" in option_hints(name)]
    return {
        f"{name}, {side * side} tokens": functools.partial(attention_of, name, side)
        for side in ((4,) if setting.tiny else (28, 56, 14))
        for name in (["re_attention"] if setting.tiny else names)
    }


# ---- c: images per second -----------------------------------------------------------------------

MIXERS: Mapping[str, Row] = {
    "softmax": {"mixer": "softmax"},
    "static_key": {"mixer": "static_key"},
    "static_key(key_grid=1/16)": {"mixer": "static_key", "mixer_options": {"key_grid": "1/16"}},
    "conv_static_key": {"mixer": "conv_static_key"},
    "re_attention": {"mixer": "re_attention"},
    "key_value": {"mixer": "key_value"},
}
MODELS = {  # name, pixels, images of a batch
    "ViT-S/4 at 32": ("vit_small_p4_32", 32, 512),
    "ViT-S/16 at 224": ("vit_small_patch16_224", 224, 256),
    "ViT-S/16 at 448": ("vit_small_patch16_224", 448, 32),
}
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def images_of(model: str, mixer: str, setting: Setting) -> Row:
    """Time training steps and inference, compiled and not, in turns with softmax."""
    import keymix
    from measured import training_step

    name, side, batch = MODELS[model]
    batch = 2 if setting.tiny else batch
    images = torch.randn(batch, 3, side, side, device=setting.device)
    labels = torch.randint(0, 10, (batch,), device=setting.device)
    torch._dynamo.reset()
    models = {}
    for how, of in (("eager", mixer), (COMPILED, mixer), ("softmax, eager", "softmax")):
        options = {**MIXERS[of], **({} if side == 32 else {"img_size": side})}
        made = keymix.create_model(
            name, num_classes=10, **options, **(SMALL if setting.tiny else {})
        )
        models[how] = made.to(setting.device)
    for block in models[COMPILED].blocks:  # they are alike: one is compiled, not a whole model
        block.compile(**compiler(setting))
    calls: dict[str, dict[str, Call]] = defaultdict(dict)
    for how, net in models.items():
        infer = torch.autocast(setting.device, torch.bfloat16)(torch.inference_mode()(net))
        calls["inference"][how] = functools.partial(infer, images)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        calls["training"][how] = training_step(net, optimizer, images, labels, bfloat16=True)
    modes = {}
    for mode, each in calls.items():
        for net in models.values():
            net.train(mode == "training")
        modes[mode] = timings(each, setting)
    return {"images": batch, "modes": modes}


def throughput(setting: Setting) -> Units:
    """Each mixer in each model, the smallest model first."""
    few = ("ViT-S/4 at 32, static_key(key_grid=1/16)", "ViT-S/4 at 32, re_attention")
    units = {
        f"{model}, {mixer}": functools.partial(images_of, model, mixer)
        for model in MODELS
        for mixer in MIXERS
    }
    return {unit: units[unit] for unit in (few if setting.tiny else units)}


# ---- d: spiking networks ------------------------------------------------------------------------


def spiking_runs(setting: Setting) -> dict[str, Call]:
    """Return neurons (threshold 1, tau 2, detached reset) by path."""
    paths = ["reference", "blocked"]
    with contextlib.suppress(UserError):
        paths += [multi_step.choose(KERNEL, device=torch.device(setting.device)).name]
    runs: dict[str, Call] = {path: LIF(backend=path) for path in paths}
    runs[COMPILED] = torch.compile(runs["reference"], **compiler(setting))
    with contextlib.suppress(ModuleNotFoundError):
        from spikingjelly.activation_based import neuron, surrogate

        how = {"step_mode": "m", "detach_reset": True, "surrogate_function": surrogate.Sigmoid(4.0)}
        theirs = neuron.LIFNode(**how)

        def from_rest(x: Tensor) -> Any:
            theirs.reset()
            return theirs(x)

        runs[THEIRS] = from_rest
    return runs


def spikes_of(shape: tuple[int, ...], dtype: str, setting: Setting) -> Row:
    """Time neurons."""
    shape, kind = (2, 2, 9, 3, 5) if setting.tiny else shape, getattr(torch, dtype)
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(shape, device=setting.device, dtype=kind, requires_grad=True)
    runs = spiking_runs(setting)
    modes = both_passes(runs, [x], setting, {})
    with torch.no_grad():
        wanted = runs["reference"](x)
        for path, row in modes["forward"].items():
            if "ms" in row:
                row["off"] = distance(runs[path](x), wanted, spikes=True)
    return {"modes": modes}


def qkformer_step(dtype: str, setting: Setting) -> Row:
    """Time training steps of QKFormer-10-384, T = 4, next to SpikingJelly's own."""
    import qkformer_step as steps

    sizes: Row = {"batch": 1, "side": 32, "dim": 48, "depths": (1, 1, 1)}
    if not setting.tiny:
        sizes = {"batch": 32, "side": 224, "depths": (1, 2, 7)}
    how = {**sizes, "device": setting.device, "bfloat16": dtype != "float32"}
    calls = {name: steps.trainer(name, **how) for name in (THEIRS, steps.OURS)}
    return {"images": sizes["batch"], "modes": {"training": timings(calls, setting, 12.0)}}


def spiking_networks(setting: Setting) -> Units:
    """Training steps, then neurons at sizes of CIFAR-10 and of ImageNet."""
    shapes = {  # [T, B, ...]
        "neurons, tokens of CIFAR-10": (4, 64, 64, 384),
        "neurons, stem of ImageNet": (4, 64, 96, 56, 56),
    }
    units: Units = {}
    dtypes = DTYPES[:1] if setting.tiny else DTYPES
    for dtype in dtypes:
        units[f"QKFormer, {dtype}"] = functools.partial(qkformer_step, dtype)
    for name, shape in list(shapes.items())[: 1 if setting.tiny else None]:
        for dtype in dtypes:
            units[f"{name}, {dtype}"] = functools.partial(spikes_of, shape, dtype)
    return units


# ---- e: training --------------------------------------------------------------------------------


def made_images(folder: Path, count: int) -> None:
    """Write parquet files like CIFAR-10's, of 100 images of noise again and again."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    images, noise = [], np.random.default_rng(0)
    for _ in range(100):
        file = io.BytesIO()
        Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    for split, size in (("train", count), ("test", count // 5)):
        rows = {
            "img": [images[i % 100] for i in range(size)],
            "label": [i % 10 for i in range(size)],
        }
        pq.write_table(pa.table(rows), folder / f"{split}-00000-of-00001.parquet")


def two_epochs(setting: Setting) -> Row:
    """Train ViT-S/4 as `keymix train` does; then time the parts of an epoch of a bare loop."""
    from keymix import recipes
    from keymix.train.engine import train
    from keymix.train.model import load_data
    from keymix.train.recipe import replace_path

    changes: Row = {"schedule.epochs": 2}
    if setting.tiny:
        changes |= {"data.limit": 120, "data.batch_size": 32}
        changes |= {f"model.options.{key}": value for key, value in SMALL.items()}
    lines: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if setting.data is None:
            made_images(Path(folder), 200 if setting.tiny else 50_000)
        changes["data.spec"] = f"parquet:{setting.data or folder}"
        recipe = replace_path(recipes.get("vit_cifar10_kentaro"), changes)
        data = load_data(recipe.data)
        out = Path(folder) / "run"
        train(recipe, out, progress=lambda line: lines.append(dict(line)), data=data)
    return {
        "count": len(data.train),
        "of": "made images" if setting.data is None else "CIFAR-10",
        "batch": recipe.data.batch_size,
        "epochs": [{key: line[key] for key in ("seconds", "images_per_s")} for line in lines],
        "parts": parts_of_an_epoch(recipe, data, setting),
    }


def parts_of_an_epoch(recipe: Any, data: Any, setting: Setting) -> dict[str, float]:
    """Return the seconds of each part of a bare loop's second epoch, by events on the GPU."""
    from keymix.data.loaders import Loader
    from keymix.train.model import model_for
    from keymix.train.step import make_optimizer

    cuda = setting.device == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()

    model = model_for(recipe, data.record()).to(setting.device).train()
    optimizer = make_optimizer(recipe.optim, model)
    how = {"batch_size": recipe.data.batch_size, "train": True, "augment": recipe.augment}
    loader = Loader(data.train, data, **how, device=setting.device)
    for epoch in range(2):
        marks.clear()
        mark()
        loader.set_epoch(epoch)
        for images, labels, _ in loader:
            mark()
            with torch.autocast(setting.device, torch.bfloat16):
                loss = F.cross_entropy(model(images).float(), labels)
            mark()
            optimizer.zero_grad()
            loss.backward()
            mark()
            optimizer.step()
            mark()
    if cuda:
        torch.cuda.synchronize()
    spent = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in itertools.pairwise(marks)]
    parts = ("data", "forward", "backward", "optimiser")
    return {part: sum(spent[i::4]) for i, part in enumerate(parts)}


# ---- slices -------------------------------------------------------------------------------------

SLICES: Mapping[str, tuple[str, Callable[[Setting], Units]]] = {
    "a": ("Correctness", correctness),
    "b": ("Attention", attention),
    "c": ("Images per second", throughput),
    "d": ("Spiking networks", spiking_networks),
    "e": ("Two epochs", lambda setting: {"ViT-S/4": two_epochs}),
}


def machine(device: str) -> Row:
    """Name the card and the versions."""
    found: Row = {"card": platform.machine(), "Python": platform.python_version()}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {"card": f"{card.name}, {card.total_memory / 2**30:.0f} GiB"}
        found |= {"CUDA": torch.version.cuda}
    for name in ("torch", "triton", "timm", "lightning-fabric", "spikingjelly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def failed(error: Exception) -> Row:
    """Return the row of a unit that failed."""
    if isinstance(error, ModuleNotFoundError):
        return {"skipped": f"the package {error.name} is missing"}
    traceback.print_exception(error)
    try:
        return {"error": why(error)}
    except BrokenError as broken:
        return {"error": str(broken), "broken": True}
