# SPDX-License-Identifier: Apache-2.0
"""What each mixer costs next to PyTorch's fused softmax attention: op, module, model and step.

    python benchmarks/performance.py --parts op --measures forward --mixers key_value re_attention
    python benchmarks/performance.py --parts module --tokens --cases conv_static_key:56:128:4:2
    python benchmarks/performance.py --parts model step --families deepvit

Parts: ``op`` is attention between the projections (with it, the averaging of ``key_grid``),
``module`` the same with projections, next to timm's ``Attention``; ``model`` and ``step`` are whole
models and their training steps (SGD), next to those of timm, vit-pytorch and SpikingJelly 2, where
these are installed.

What stands in one table is timed in turns in one run. A cell is the median [quartiles] of the
ratio to the baseline in the same round; below 1 is faster. Of a mixer's paths the one that
``backend="auto"`` takes is bold. Whole maps above 1 GiB are not formed. Peak memory is the growth
of a fresh process beyond weights and input. Shares are of this machine's own rate of a float32
matrix product, and for op and module of a copy that reads the input and the weights and writes the
output once; a training step counts three forward passes. A case is mixer:side:dim:heads:batch.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.analysis.counting import count
from keymix.analysis.memory import Build, Phase, peak_memory, run_pass
from keymix.analysis.passes import ONE_TENSOR, example_for
from keymix.analysis.timing import Samples, quartiles
from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, get_mixer_class
from keymix.mixers.spec import parse_mixer
from measured import begin, in_turns, options, ratio, table, training_step

PARTS = ("op", "module", "model", "step")
MEASURES = ("forward", "training", "memory")
PHASES: Mapping[str, Phase] = {"forward": "inference", "training": "training"}
FEW_KEYS = "static_key(key_grid=1/16)"
MIXERS = ("static_key", FEW_KEYS, "key_value", "conv_static_key", "re_attention")
TOKENS = (49, 196, 784, 3136, 16384)
DIM, HEADS = 128, 4
PATHS = ("reference", "sdpa", "blocked")
BASELINE = ("softmax", "sdpa")
TIMM = ("timm Attention", "sdpa")
LARGEST_MAP = 2**30  # bytes of the whole maps of a batch
ROUNDS = 3

Row = tuple[str, str]  # mixer and path, or library and mixer


@dataclass
class Found:
    """What is known of one row at one shape or of one model."""

    macs: int = 0  # of a forward pass of the batch
    bytes: int = 0  # least traffic of a forward pass of the batch; of models unknown
    auto: frozenset[str] = frozenset()  # measures of which auto takes this path
    samples: dict[str, Samples] = field(default_factory=dict)  # by measure
    mib: dict[str, float] = field(default_factory=dict)  # peak by measure


# ---- op and module ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Tokens that attention is run on."""

    side: int
    dim: int
    heads: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.side**2


class Layer(nn.Module):
    """A mixer whose input needs gradients in training, as inside a model."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        out: Tensor = self.mixer(x.detach().requires_grad_(torch.is_grad_enabled()))
        return out


class Laid(nn.Module):
    """Hands tokens on as a projection lays them out in memory, and changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Copy them only where they lie otherwise, as averages do."""
        return x.contiguous()


def without_projections(mixer: MapMixer) -> MapMixer:
    """Leave attention alone: the tokens themselves are queries, keys and values."""
    if mixer.joint is not None:
        delattr(mixer, mixer.joint)
        mixer.joint = None
    for role in mixer.roles:
        setattr(mixer, role, Laid())
    mixer.proj = nn.Identity()
    return mixer


def layer(mixer: str, path: str, side: int, dim: int, heads: int, projected: bool) -> Layer:
    """Make a mixer that takes a path, with its projections or without."""
    if mixer == TIMM[0]:
        from timm.layers.attention import Attention

        return Layer(Attention(dim, num_heads=heads, qkv_bias=True))
    spec = parse_mixer(mixer)
    site: dict[str, Any] = {"dim": dim, "num_heads": heads, "grid": (side, side)}
    if not issubclass(get_mixer_class(spec.names[0]), MapMixer):
        raise UserError(f"mixer {mixer!r} forms no attention map")
    made = create_mixer(spec.names[0], **site, backend=path, **dict(spec.options[0]))
    assert isinstance(made, MapMixer)
    made.choose_backend()  # refuses a path that cannot run
    return Layer(made if projected else without_projections(made))


def build(row: Row, shape: Shape, projected: bool) -> Build:
    """Say how another process makes a layer."""
    kwargs = {"mixer": row[0], "path": row[1], "projected": projected}
    kwargs |= {"side": shape.side, "dim": shape.dim, "heads": shape.heads}
    return Build(factory="performance:layer", kwargs=kwargs)


def runs(row: Row, shape: Shape) -> bool:
    """Whether a mixer can take a path."""
    try:
        build(row, replace(shape, side=4), projected=True).make()
    except UserError as error:
        if "cannot run here" in str(error):
            return False
        raise
    return True


def takes(module: nn.Module, shape: Shape, *, training: bool) -> str:
    """Name the path that ``auto`` takes."""
    mixer = module.get_submodule("mixer")
    if not isinstance(mixer, MapMixer):
        return ""
    asked, mixer.backend = mixer.backend, "auto"
    try:
        mixer.train(training)
        with torch.set_grad_enabled(training):
            return mixer.choose_backend(shape=(shape.batch, shape.tokens, shape.dim)).name
    finally:
        mixer.backend = asked


def entries(module: nn.Module, shape: Shape) -> int:
    """Count the entries of the whole maps of a batch."""
    mixer = module.get_submodule("mixer")
    keys = mixer.site.num_keys if isinstance(mixer, MapMixer) else shape.tokens
    return shape.batch * shape.heads * shape.tokens * keys


def passing(model: nn.Module, shape: Shape, phase: Phase) -> Callable[[], object]:
    """Return what runs a pass."""
    x = example_for(model, ONE_TENSOR, (shape.tokens, shape.dim), shape.batch)
    model.train(phase == "training")

    def call() -> None:
        run_pass(model, x, phase)
        model.zero_grad(set_to_none=True)

    return call


def layers(
    mixers: Iterable[str], shape: Shape, measures: Sequence[str], seconds: float, projected: bool
) -> dict[Row, Found]:
    """Measure mixers at one shape: fused softmax first, timm's where there are projections."""
    rows = [BASELINE, *([TIMM] if projected else [])]
    rows += [(mixer, path) for mixer in mixers for path in PATHS if runs((mixer, path), shape)]
    builds = {row: build(row, shape, projected) for row in rows}
    modules = {row: made.make() for row, made in builds.items()}
    found = {}
    for row, module in modules.items():
        weights = sum(each.numel() for each in module.parameters())
        found[row] = Found(
            macs=shape.batch * count(module, (shape.tokens, shape.dim)).macs,
            bytes=4 * (2 * shape.batch * shape.tokens * shape.dim + weights),
            auto=frozenset(
                m for m in PHASES if takes(module, shape, training=m == "training") == row[1]
            ),
        )
        if row[1] == "reference" and 4 * entries(module, shape) > LARGEST_MAP:
            del builds[row]
    for measure in (measure for measure in PHASES if measure in measures):
        calls = {row: passing(modules[row], shape, PHASES[measure]) for row in builds}
        timed(found, calls, measure, seconds, f"{shape.tokens} tokens")
    if "memory" in measures:
        peaks(found, builds, (shape.tokens, shape.dim), shape.batch, tuple(PHASES))
    return found


def timed(
    found: Mapping[Row, Found],
    calls: Mapping[Row, Callable[[], object]],
    measure: str,
    seconds: float,
    what: str,
) -> None:
    """Time calls in turns, and keep their samples."""
    samples = in_turns(calls, rounds=ROUNDS, seconds=seconds, what=f"{what}, {measure}")
    for row, each in samples.items():
        found[row].samples[measure] = each


def peaks(
    found: Mapping[Row, Found],
    builds: Mapping[Row, Build],
    size: tuple[int, ...],
    batch: int,
    measures: Sequence[str],
) -> None:
    """Measure peak memory in a fresh process."""
    named = {" ".join(row): made for row, made in builds.items()}
    phases = [PHASES[measure] for measure in measures]
    grown = peak_memory(named, size, batch_size=batch, phases=phases)
    for row in builds:
        for measure in measures:
            mib = getattr(grown[" ".join(row)], f"{PHASES[measure]}_mib")
            if mib is not None:
                found[row].mib[measure] = mib


# ---- models -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Models that do the same work: the peer's, of a package that may be missing, and ours."""

    title: str
    batch: int
    side: int
    package: str
    peer: tuple[Row, Build]
    ours: Mapping[str, Build]

    def builds(self) -> dict[Row, Build]:
        """All models that can be made here, the baseline first."""
        ours = {("keymix", name): made for name, made in self.ours.items()}
        if importlib.util.find_spec(self.package) is not None:
            return {self.peer[0]: self.peer[1], **ours}
        print(f"{self.peer[0][0]} is left out: it is not installed (pip install {self.package})")
        return ours


def families(*, quick: bool) -> dict[str, Family]:
    """Name the families; quick ones are tiny."""
    side, depth = (32, 1) if quick else (224, 12)
    vit = {"img_size": 2 * side, "depth": depth}
    deep = {"dim": 384, "depth": depth, "heads": 12, "mlp_dim": 1152, "dim_head": 32}
    deep |= {"image_size": side, "patch_size": 16, "num_classes": 1000}

    def ours(name: str, mixers: Iterable[str], **how: Any) -> dict[str, Build]:
        chosen = {mixer: parse_mixer(mixer).model_kwargs() for mixer in mixers}
        return {m: Build(kwargs={"name": name, **these, **how}) for m, these in chosen.items()}

    name = "vit_small_patch16_224"
    timms = Build(factory="timm:create_model", kwargs={"model_name": name, **vit})
    theirs = Build(factory="vit_pytorch.deepvit:DeepViT", kwargs=deep)
    few, theta = ("softmax", *MIXERS[:2], "identity"), ("re_attention(norm=layer)", "re_attention")
    deepvits = ours("deepvit_12b", (*theta, "softmax"), img_size=side, depth=depth)
    return {
        "vit_448": Family(
            f"ViT-S/16, {2 * side} pixels",
            *(2, 2 * side, "timm", (("timm", ""), timms), ours(name, few, **vit)),
        ),
        "deepvit": Family(
            f"DeepViT, {depth} blocks, width 384, {side} pixels",
            *(8, side, "vit_pytorch", (("vit-pytorch", ""), theirs), deepvits),
        ),
    }


def models(
    family: Family, measure: str, measures: Sequence[str], seconds: float
) -> dict[Row, Found]:
    """Measure models of a family: a forward pass, or a training step."""
    size = (3, family.side, family.side)
    builds = family.builds()
    found, calls = {}, {}
    for row, made in builds.items():
        model = made.make()
        found[row] = Found(macs=family.batch * count(model, size).macs)
        images = example_for(model, ONE_TENSOR, size, family.batch)
        assert isinstance(images, Tensor)
        calls[row] = functools.partial(run_pass, model.eval(), images, "inference")
        if measure == "training":
            labels = torch.randint(0, 1000, (family.batch,))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            calls[row] = training_step(model.train(), optimizer, images, labels)
    if measure in measures:
        timed(found, calls, measure, seconds, family.title)
    if "memory" in measures:
        peaks(found, builds, size, family.batch, (measure,))
    return found


# ---- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceiling:
    """The highest rates that this machine was measured at, with the threads that are set."""

    macs: float  # multiply-adds a second of a matrix product, by the faster of two libraries
    bytes: float  # bytes a second that a copy reads and writes


def ceiling(side: int, copied: int) -> Ceiling:
    """Measure and print them, in float32, for matrices of a side and a copy of so many numbers."""
    left, right = torch.randn(2, side, side)
    image, kernel = left.T.reshape(1, side, side, 1), right.reshape(side, side, 1, 1)
    source, target = torch.randn(copied), torch.empty(copied)
    calls: dict[str, Callable[[], object]] = {
        "BLAS": lambda: left @ right,
        "oneDNN": lambda: F.conv2d(image, kernel),  # a 1x1 convolution is a product
        "copy": lambda: target.copy_(source),
    }
    samples = in_turns(calls, rounds=5, what="the machine's rates")
    blas, one_dnn, copy = (quartiles(each.kept())[0] for each in samples.values())
    most = Ceiling(side**3 / min(blas, one_dnn), 2 * 4 * copied / copy)
    print(
        f"ceilings: matrix product {most.macs / 1e9:.0f} GMAC/s, copy {most.bytes / 1e9:.1f} GB/s "
        "read and written"
    )
    return most


def bold(text: str, here: Found, measure: str) -> str:
    """Mark what auto takes."""
    return f"**{text}**" if measure in here.auto else text


def time_cell(here: Found, base: Found, measure: str) -> str:
    """Write a time as a ratio of another, with quartiles."""
    if measure not in here.samples or measure not in base.samples:
        return ""
    if here is base:
        ms = 1e3 * quartiles(here.samples[measure].kept())[1]
        return f"1 ({ms:,.0f} ms)" if ms >= 100 else f"1 ({ms:.3g} ms)"
    return bold(ratio(base.samples[measure], here.samples[measure]), here, measure)


def peak_cell(here: Found, base: Found, measure: str) -> str:
    """Write a peak as MiB and as a ratio of another."""
    if measure not in here.mib:
        return ""
    text, known = f"{here.mib[measure]:.1f}", base.mib.get(measure)
    if known:
        part = here.mib[measure] / known
        text += f" ({part:.2f})" if part >= 0.1 else f" ({part:.3f})"
    return bold(text, here, measure)


def share_cell(here: Found, measure: str, most: Ceiling) -> str:
    """Write how much of the machine's rates a pass reaches."""
    if measure not in here.samples:
        return ""
    seconds = quartiles(here.samples[measure].kept())[1]
    passes, traffic = (3, 2) if measure == "training" else (1, 1)
    text = f"{here.macs * passes / seconds / most.macs:.0%}"
    if here.bytes:
        text += f" / {here.bytes * traffic / seconds / most.bytes:.1%}"
    return bold(text, here, measure)


def by_tokens(
    part: str, columns: Mapping[str, Mapping[Row, Found]], measures: Sequence[str], most: Ceiling
) -> None:
    """Print a part's tables, a column for each number of tokens."""
    rows = list(next(iter(columns.values()), ()))
    for measure in PHASES:
        written: dict[str, Callable[[Found, Found], str]] = {}
        if measure in measures:
            written["time over that of fused softmax attention"] = functools.partial(
                time_cell, measure=measure
            )
            written["share of the product's rate / of the copy's"] = (
                lambda here, base, measure=measure: share_cell(here, measure, most)  # type: ignore[misc]
            )
        if "memory" in measures:
            written["peak memory, MiB (over that of fused softmax attention)"] = functools.partial(
                peak_cell, measure=measure
            )
        for title, write in written.items():
            print(f"{part}, {measure}: {title}")
            lines = [
                [*row, *(write(at[row], at[BASELINE]) for at in columns.values())] for row in rows
            ]
            table(("mixer", "path", *columns), lines, names=2)


def one_case(case: str, measures: Sequence[str], seconds: float, most: Ceiling) -> None:
    """Measure a case, over its reference and over fused softmax attention, and print its tables."""
    mixer, shape = read_case(case)
    found = layers([mixer], shape, measures, seconds, projected=True)
    whole, base = found[mixer, "reference"], found[BASELINE]
    timed_ones = [measure for measure in PHASES if measure in measures]
    heads = [f"{m} / {one}" for m in timed_ones for one in ("reference", "softmax")]
    heads += [f"{m}, share" for m in timed_ones]
    if "memory" in measures:
        heads += [f"{m}, MiB (/ reference)" for m in PHASES]
    lines = []
    for row, here in found.items():
        cells = [time_cell(here, other, m) for m in timed_ones for other in (whole, base)]
        cells += [share_cell(here, m, most) for m in timed_ones]
        cells += [peak_cell(here, whole, m) for m in PHASES if "memory" in measures]
        lines.append([*row, *cells])
    print(f"module, {case}")
    table(("mixer", "path", *heads), lines, names=2)


def of_family(
    family: Family, part: str, measures: Sequence[str], seconds: float, most: Ceiling
) -> None:
    """Measure a family and print its table."""
    measure, what = {
        "model": ("forward", "forward pass"),
        "step": ("training", "training step"),
    }[part]
    found = models(family, measure, measures, seconds)
    base, *_ = found
    print(f"{family.title}, {what} of {family.batch} images")
    heads = ("library", "mixer", f"time / {' '.join(base).strip()}", "GMACs per image")
    lines = [
        [
            *row,
            time_cell(here, found[base], measure),
            f"{here.macs / family.batch / 1e9:.3g}",
            share_cell(here, measure, most),
            peak_cell(here, found[base], measure),
        ]
        for row, here in found.items()
    ]
    table([*heads, "share of the product's rate", "peak MiB (ratio)"], lines, names=2)


# ---- the command --------------------------------------------------------------------------------


def read_case(case: str) -> tuple[str, Shape]:
    """Read mixer:side:dim:heads:batch."""
    try:
        mixer, *numbers = case.rsplit(":", 4)
        side, dim, heads, batch = map(int, numbers)
    except ValueError:
        raise UserError(f"--cases {case!r} is not mixer:side:dim:heads:batch") from None
    return parse_mixer(mixer).label, Shape(side, dim, heads, batch)


def laid(tokens: int) -> Shape:
    """Lay tokens on a square grid, in batches of about 3,136 tokens."""
    side = round(tokens**0.5)
    if side * side != tokens:
        raise UserError(f"--tokens {tokens}: give squares, since tokens lie on a square grid")
    return Shape(side, DIM, HEADS, max(1, 3136 // tokens))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models: does it run at all?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--mixers", nargs="+", default=MIXERS, help="name, or name(option=value)")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="squares")
    parser.add_argument("--cases", nargs="*", default=(), help="of module")
    known = ("vit_448", "deepvit")
    parser.add_argument("--families", nargs="+", choices=known, default=known)
    parser.add_argument("--seconds", type=float, default=20, help="of rounds per column")
    given = begin(parser, argv)
    most = ceiling(64, 2**12) if given.quick else ceiling(2048, 2**26)
    how = given.measures, given.seconds
    for part in given.parts:
        if part in ("model", "step"):
            for name in given.families:
                of_family(families(quick=given.quick)[name], part, *how, most)
            continue
        columns = {}
        for shape in map(laid, given.tokens):
            column = f"{shape.tokens} tokens, batch {shape.batch}"
            columns[column] = layers(given.mixers, shape, *how, projected=part == "module")
        by_tokens(part, columns, given.measures, most)
        for case in given.cases if part == "module" else ():
            one_case(case, *how, most)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
