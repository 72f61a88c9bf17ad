# SPDX-License-Identifier: Apache-2.0
"""What each mixer costs next to PyTorch's fused softmax attention: op, module, model and step.

    python benchmarks/performance.py --quick
    python benchmarks/performance.py --parts op --measures forward --mixers key_value re_attention
    python benchmarks/performance.py --parts module --cases conv_static_key:56:128:4:2
    python benchmarks/performance.py --parts model step --families vit_tiny deepvit

Parts: ``op`` is attention between the projections (with it, the averaging of ``key_grid``),
``module`` the same with projections, next to timm's ``Attention``; ``model`` and ``step`` are whole
models and their training steps (SGD), next to those of timm, vit-pytorch and SpikingJelly 2, where
these are installed.

What stands in one table is timed in turns in one run. A cell is the median [quartiles] of the
ratio to the baseline in the same round; below 1 is faster. Of a mixer's paths the one that
``backend="auto"`` takes is bold. ``~`` marks what was not measured but extrapolated from the next
smaller number of tokens by multiply-adds (time) or entries of the map (memory): whole maps above
``--largest-map``, passes above ``--longest``. Peak memory is the growth of a fresh process beyond
weights and input. Shares are of this machine's own rate of a float32 matrix product, and for op and
module of a copy that reads the input and the weights and writes the output once; a training step
counts three forward passes. A case is mixer:side:dim:heads:batch.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.counting import count
from keymix.analysis.memory import Build, Phase, peak_memory, run_pass
from keymix.analysis.passes import ONE_TENSOR, example_for
from keymix.analysis.timing import Pass, Samples, Turns, compare, quartiles
from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, get_mixer_class
from keymix.mixers.spec import parse_mixer
from machine import BUSY, Ceiling, Watch, ceiling, machine
from peers import Family, families
from qkformer_step import training_step

PARTS = ("op", "module", "model", "step")
MEASURES = ("forward", "training", "memory")
PHASES: Mapping[str, Phase] = {"forward": "inference", "training": "training"}
MIXERS = (
    "static_key",
    "static_key(key_grid=1/16)",
    "key_value",
    "conv_static_key",
    "re_attention",
)
TOKENS = (49, 196, 784, 3136, 16384)
CASES = (
    "conv_static_key:56:128:4:2",
    "conv_static_key:28:128:4:8",
    "conv_static_key:14:192:6:16",
    "conv_static_key:8:128:4:32",
    "re_attention:32:384:12:4",
    "re_attention:14:384:12:16",
    "re_attention:8:128:4:32",
    "static_key(key_grid=1/16):28:384:6:8",
)
PATHS = ("reference", "sdpa", "blocked")
BASELINE = ("softmax", "sdpa")
TIMM = ("timm Attention", "sdpa")
FEWEST, MOST = 3, 15  # rounds

Row = tuple[str, str]  # mixer and path, or library and mixer


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

    def __str__(self) -> str:
        """Write it as the head of a column."""
        return f"{self.tokens} tokens, batch {self.batch}"


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


@dataclass
class Found:
    """What is known of one row at one shape or of one model."""

    macs: int = 0  # of a forward pass of the batch
    bytes: int = 0  # least traffic of a forward pass of the batch
    entries: int = 0  # of the whole maps of the batch
    samples: dict[str, Samples] = field(default_factory=dict)  # by measure
    seconds: dict[str, float] = field(default_factory=dict)  # medians by measure
    mib: dict[str, float] = field(default_factory=dict)  # peak by measure
    busy: bool = False  # whether the machine was while it was timed
    auto: dict[str, bool] = field(default_factory=dict)  # whether auto takes this path, by measure
    extrapolated: set[tuple[str, str]] = field(default_factory=set)  # ("time" or "memory", measure)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is measured.

    Attributes:
        measures: What of.
        seconds: Seconds of rounds a table's column may take; three rounds at least.
        threads: CPU threads.
        largest_map: MiB of the whole maps of a batch above which they are extrapolated.
        longest: Seconds of a pass above which it is extrapolated.
    """

    measures: tuple[str, ...] = MEASURES
    seconds: float = 20
    threads: int = 1
    largest_map: float = 1024
    longest: float = 60


def described(row: Row, shape: Shape, projected: bool) -> tuple[nn.Module, Found]:
    """Make a layer and count what it does."""
    module = build(row, shape, projected).make()
    tokens, dim = shape.tokens, shape.dim
    mixer = module.get_submodule("mixer")
    keys = mixer.site.num_keys if isinstance(mixer, MapMixer) else tokens
    weights = sum(each.numel() for each in module.parameters())
    return module, Found(
        macs=shape.batch * count(module, (tokens, dim)).macs,
        bytes=4 * (2 * shape.batch * tokens * dim + weights),
        entries=shape.batch * shape.heads * tokens * keys,
        auto={name: takes(module, shape, training=name == "training") == row[1] for name in PHASES},
    )


def layers(
    rows: Sequence[Row],
    shape: Shape,
    setting: Setting,
    *,
    projected: bool,
    smaller: Mapping[Row, Found],
) -> dict[Row, Found]:
    """Measure mixers at one shape; what is too large or too slow is extrapolated from a smaller."""
    modules, found = {}, {}
    for row in rows:
        modules[row], found[row] = described(row, shape, projected)
    measured = set(rows)
    for measure in PHASES:
        left_out = {row for row in rows if _too_much(row, found[row], smaller, measure, setting)}
        for row in left_out:
            _extrapolate(found[row], smaller[row], measure)
        kept = [row for row in rows if row not in left_out]
        measured.intersection_update(kept)
        if measure in setting.measures:
            calls = {row: _passing(modules[row], shape, PHASES[measure]) for row in kept}
            _time(found, calls, measure, setting)
    if "memory" in setting.measures:
        builds = {row: build(row, shape, projected) for row in rows if row in measured}
        _peaks(found, builds, (shape.tokens, shape.dim), shape.batch, PHASES, setting)
    return found


def _too_much(
    row: Row, here: Found, smaller: Mapping[Row, Found], measure: str, setting: Setting
) -> bool:
    if row not in smaller:
        return False
    whole = row[1] == "reference" and 4 * here.entries / 2**20 > setting.largest_map
    before = smaller[row]
    expected = before.seconds.get(measure, 0.0) * here.macs / max(before.macs, 1)
    return whole or expected > setting.longest


def _extrapolate(here: Found, before: Found, measure: str) -> None:
    if measure in before.seconds:
        here.seconds[measure] = before.seconds[measure] * here.macs / max(before.macs, 1)
        here.extrapolated.add(("time", measure))
    if measure in before.mib:
        here.mib[measure] = before.mib[measure] * here.entries / before.entries
        here.extrapolated.add(("memory", measure))


def _passing(model: nn.Module, shape: Shape, phase: Phase) -> Callable[[], object]:
    x = example_for(model, ONE_TENSOR, (shape.tokens, shape.dim), shape.batch)

    def call() -> None:
        run_pass(model, x, phase)
        model.zero_grad(set_to_none=True)

    return call


def _time(
    found: Mapping[Row, Found],
    calls: Mapping[Row, Callable[[], object]],
    measure: str,
    setting: Setting,
) -> None:
    """Time calls in turns, and keep their samples."""
    names = {" ".join(row): row for row in calls}
    turns = Turns({" ".join(row): Pass(call) for row, call in calls.items()})
    watch, start, rounds = Watch(), time.perf_counter(), 0
    while rounds < FEWEST or (rounds < MOST and time.perf_counter() - start < setting.seconds):
        turns.round()
        rounds += 1
    disturbed = watch.busy(turns.samples.values())
    for name, samples in turns.samples.items():
        row = found[names[name]]
        row.busy = row.busy or disturbed
        row.samples[measure], row.seconds[measure] = samples, quartiles(samples.kept())[1]


def _peaks(
    found: Mapping[Row, Found],
    builds: Mapping[Row, Build],
    size: tuple[int, ...],
    batch: int,
    measures: Iterable[str],
    setting: Setting,
) -> None:
    """Measure peak memory in a fresh process."""
    measures = list(measures)
    peaks = peak_memory(
        {" ".join(row): made for row, made in builds.items()},
        size,
        batch_size=batch,
        threads=setting.threads,
        phases=[PHASES[measure] for measure in measures],
    )
    for row in builds:
        for measure in measures:
            mib = getattr(peaks[" ".join(row)], f"{PHASES[measure]}_mib")
            if mib is not None:
                found[row].mib[measure] = mib


# ---- models -------------------------------------------------------------------------------------


def models(family: Family, setting: Setting, *, measure: str) -> dict[Row, Found]:
    """Measure models of a family: a forward pass, or a training step."""
    size = (3, family.side, family.side)
    builds = family.builds()
    found, calls = {}, {}
    for row, made in builds.items():
        model = made.make()
        found[row] = Found(macs=family.batch * count(model, size).macs)
        images = example_for(model, ONE_TENSOR, size, family.batch)
        assert isinstance(images, Tensor)
        calls[row] = _model_call(model, images, measure)
    if measure in setting.measures:
        _time(found, calls, measure, setting)
    if "memory" in setting.measures:
        _peaks(found, builds, size, family.batch, (measure,), setting)
    return found


def _model_call(model: nn.Module, images: Tensor, measure: str) -> Callable[[], object]:
    if measure == "forward":
        return functools.partial(run_pass, model.eval(), images, "inference")
    labels = torch.randint(0, 1000, (len(images),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return training_step(model.train(), optimizer, images, labels)


# ---- tables -------------------------------------------------------------------------------------


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    rows = [list(heads), *map(list, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    rows.insert(
        1, ["-" * width if i < 2 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    )
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


def ratio(here: Found, base: Found, measure: str) -> str:
    """Write a time as a ratio of another, with quartiles where it was measured."""
    if measure not in here.seconds or measure not in base.seconds:
        return ""
    if here is base:
        ms = 1e3 * here.seconds[measure]
        return f"1 ({ms:,.0f} ms)" if ms >= 100 else f"1 ({ms:.3g} ms)"
    if measure in here.samples and measure in base.samples:
        paired = compare(base.samples[measure], here.samples[measure])
        text = f"{paired.ratio:.2f} [{paired.ratio_q1:.2f}, {paired.ratio_q3:.2f}]"
    else:
        text = f"~{here.seconds[measure] / base.seconds[measure]:.2f}"
    return f"**{text}**" if here.auto.get(measure) else text


def peak(here: Found, base: Found, measure: str) -> str:
    """Write a peak as MiB and as a ratio of another."""
    if measure not in here.mib:
        return ""
    mark = "~" if ("memory", measure) in here.extrapolated else ""
    text = f"{mark}{here.mib[measure]:.1f}"
    known = base.mib.get(measure)
    if known:
        part = here.mib[measure] / known
        text += f" ({mark}{part:.2f})" if part >= 0.1 else f" ({mark}{part:.3f})"
    return f"**{text}**" if here.auto.get(measure) else text


def share(here: Found, measure: str, most: Ceiling) -> str:
    """Write how much of the machine's rates a pass reaches."""
    if measure not in here.samples:
        return ""
    passes, traffic = (3, 2) if measure == "training" else (1, 1)
    text = f"{here.macs * passes / here.seconds[measure] / most.macs:.0%}"
    if here.bytes:
        text += f" / {here.bytes * traffic / here.seconds[measure] / most.bytes:.1%}"
    return f"**{text}**" if here.auto.get(measure) else text


def say_busy(found: Iterable[Found]) -> None:
    """Say first that times mean nothing, where they do not."""
    if any(each.busy for each in found):
        print(BUSY + "\n")


def by_tokens(
    part: str, found: Mapping[Shape, Mapping[Row, Found]], setting: Setting, most: Ceiling
) -> None:
    """Print a part's tables, a column for each number of tokens."""
    say_busy(each for by_row in found.values() for each in by_row.values())
    rows = list(next(iter(found.values())))
    columns = ["mixer", "path"]
    for shape, by_row in found.items():
        columns.append(f"{shape}{', BUSY' if by_row[BASELINE].busy else ''}")

    def lines(write: Callable[[Mapping[Row, Found], Row], str]) -> Iterator[list[str]]:
        for row in rows:
            yield [*row, *(write(by_row, row) for by_row in found.values())]

    for measure in PHASES:
        if measure in setting.measures:
            print(f"{part}, {measure}: time over that of fused softmax attention\n")
            table(columns, lines(lambda at, row: ratio(at[row], at[BASELINE], measure)))  # noqa: B023
            print(f"{part}, {measure}: share of the product's rate / of the copy's\n")
            table(columns, lines(lambda at, row: share(at[row], measure, most)))  # noqa: B023
        if "memory" in setting.measures:
            print(f"{part}, {measure}: peak memory, MiB (over that of fused softmax attention)\n")
            table(columns, lines(lambda at, row: peak(at[row], at[BASELINE], measure)))  # noqa: B023


def one_case(mixer: str, shape: Shape, found: Mapping[Row, Found], most: Ceiling) -> None:
    """Print the tables of one case: over its reference and over fused softmax attention."""
    say_busy(found.values())
    whole, base = found[mixer, "reference"], found[BASELINE]
    sizes = f"{shape.tokens} tokens, width {shape.dim}, {shape.heads} heads, batch {shape.batch}"
    timed = [measure for measure in PHASES if any(measure in f.samples for f in found.values())]
    if timed:
        print(f"module, {mixer}, {sizes}: time over that of another path, and share of the rates\n")
        heads = [f"{measure} / {one}" for measure in timed for one in ("reference", "softmax")]
        heads += [f"{measure}, share" for measure in timed]
        lines = []
        for row, here in found.items():
            cells = [ratio(here, other, m) for m in timed for other in (whole, base)]
            lines.append([*row, *cells, *(share(here, measure, most) for measure in timed)])
        table(["mixer", "path", *heads], lines)
    if any(each.mib for each in found.values()):
        print(f"module, {mixer}, {sizes}: peak memory, MiB (over that of the reference)\n")
        lines = [
            [*row, *(peak(here, whole, measure) for measure in PHASES)]
            for row, here in found.items()
        ]
        table(["mixer", "path", *PHASES], lines)


def of_family(
    family: Family, part: str, found: Mapping[Row, Found], measure: str, most: Ceiling
) -> None:
    """Print the table of a family."""
    say_busy(found.values())
    what = "forward pass" if part == "model" else "training step"
    base, *_ = found
    missing = family.missing()
    if missing:
        print(missing)
    print(f"{family.title}, {what} of {family.batch} images\n")
    heads = ("library", "mixer", f"time / {' '.join(base).strip()}", "GMACs per image")
    lines = [
        [
            *row,
            ratio(here, found[base], measure),
            f"{here.macs / family.batch / 1e9:.3g}",
            share(here, measure, most),
            peak(here, found[base], measure),
        ]
        for row, here in found.items()
    ]
    table([*heads, "share of the product's rate", "peak MiB (ratio)"], lines)


# ---- the command --------------------------------------------------------------------------------


def rows_of(mixers: Iterable[str], shape: Shape, *, projected: bool) -> list[Row]:
    """List what is compared: fused softmax first, timm's where there are projections."""
    rows = [BASELINE, *([TIMM] if projected else [])]
    return [*rows, *((m, p) for m in mixers for p in PATHS if runs((m, p), shape))]


def read_case(case: str) -> tuple[str, Shape]:
    """Read mixer:side:dim:heads:batch."""
    try:
        mixer, *numbers = case.rsplit(":", 4)
        side, dim, heads, batch = map(int, numbers)
    except ValueError:
        raise UserError(f"--cases {case!r} is not mixer:side:dim:heads:batch") from None
    return parse_mixer(mixer).label, Shape(side, dim, heads, batch)


def shapes(tokens: Iterable[int], dim: int, heads: int) -> list[Shape]:
    """Lay tokens on square grids, in batches of about 3,136 tokens."""
    sides = {number: round(number**0.5) for number in sorted(tokens)}
    for number, side in sides.items():
        if side * side != number:
            raise UserError(f"--tokens {number}: give squares, since tokens lie on a square grid")
    return [Shape(side, dim, heads, max(1, 3136 // number)) for number, side in sides.items()]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; ``--quick`` is tiny sizes, one round of each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--mixers", nargs="+", help="name, or name(option=value)")
    parser.add_argument("--tokens", type=int, nargs="*", help="of op and module, squares")
    parser.add_argument("--dim", type=int, help="width of op and module (default 128)")
    parser.add_argument("--heads", type=int, help="heads of op and module (default 4)")
    parser.add_argument("--cases", nargs="*", help="of module; mixer:side:dim:heads:batch")
    parser.add_argument("--families", nargs="+", help="of model and step")
    parser.add_argument("--seconds", type=float, help="of rounds per column (default 20)")
    parser.add_argument("--largest-map", type=float, default=1024, metavar="MIB")
    parser.add_argument("--longest", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    usual: dict[str, Any] = {"tokens": TOKENS, "dim": 128, "heads": 4, "seconds": 20.0}
    tiny: dict[str, Any] = {"tokens": (4, 16), "dim": 16, "heads": 2, "seconds": 0.0}
    for name, value in (tiny if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.cases is None:  # a selection of tokens or mixers is one of the first tables alone
        args.cases = ["re_attention:4:16:2:2"] if args.quick else [*CASES]
    args.mixers = [parse_mixer(text).label for text in args.mixers or MIXERS]
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    known = families(args.mixers, quick=args.quick)
    chosen = args.families or list(known)
    for name in chosen:
        if name not in known:
            raise UserError(f"--families {name!r}: choose from {', '.join(known)}")
    setting = Setting(
        measures=tuple(args.measures),
        seconds=args.seconds,
        threads=args.threads,
        largest_map=args.largest_map,
        longest=args.longest,
    )
    most = ceiling(side=64, copied=2**12, rounds=1) if args.quick else ceiling()
    if most.busy:
        print(BUSY + "\n")
    print(machine(args.threads))
    print(f"{most}\n")
    for part in args.parts:
        if part in ("op", "module"):
            _layers_part(part, args, setting, most)
            continue
        measure = "forward" if part == "model" else "training"
        for name in chosen:
            found = models(known[name], setting, measure=measure)
            of_family(known[name], part, found, measure, most)
    return 0


def _layers_part(part: str, args: argparse.Namespace, setting: Setting, most: Ceiling) -> None:
    projected = part == "module"
    found: dict[Shape, dict[Row, Found]] = {}
    smaller: dict[Row, Found] = {}
    for shape in shapes(args.tokens, args.dim, args.heads):
        rows = rows_of(args.mixers, shape, projected=projected)
        smaller = layers(rows, shape, setting, projected=projected, smaller=smaller)
        found[shape] = smaller
    if found:
        print(f"width {args.dim}, {args.heads} heads\n")
        by_tokens(part, found, setting, most)
    for mixer, shape in map(read_case, args.cases if projected else ()):
        rows = rows_of([mixer], shape, projected=True)
        one_case(mixer, shape, layers(rows, shape, setting, projected=True, smaller={}), most)


if __name__ == "__main__":
    raise SystemExit(main())
