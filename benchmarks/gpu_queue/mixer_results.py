# SPDX-License-Identifier: Apache-2.0
"""What measurements of mixers are called, when a result is wrong, and what is written of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpu_queue.job import Result, table

BASE, BARE = "softmax on flash attention", "flash attention alone"
DTYPES = ("float32", "bfloat16", "float16")
HALF = "bfloat16"  # in which times are taken
MODES = ("train", "forward")
FAILED = "failed: "  # before the reason why there is no result, where it is a fault
ISSUED = 0.9  # share of a pass in which the host issues it, above which the host sets the time

# The error of a tensor is |y - y64| / |y64|, Euclidean norms, y64 from the plain equation in
# float64. Rounding keeps the plain equation in other dtypes below:
EQUATION_LIMIT = {
    "float32": 1e-3,  # what is left where BatchNorm takes off a mean of some hundred times the rest
    "bfloat16": 5e-2,  # as in tests/tolerances.py: ten roundings by 2^-9 and what they add up to
    "float16": 1e-2,  # the same at 2^-12, with some room for small numbers that lose digits
}
# Any other path may be off by some times the error of the plain equation in its dtype, and by two
# spacings of the dtype (in float32 less than TF32 makes, 3e-4) where the equation was lucky.
MULTIPLE = 4.0
PATH_LIMIT = {"float32": 1e-4, "bfloat16": 2.0**-6, "float16": 2.0**-9}

Cell = Callable[[str, str, int], str]


def limit(path: str, dtype: str, equation: float | None) -> float:
    """Return the largest error that is rounding.

    Args:
        path: Which path has the error.
        dtype: Of the tokens, or of autocast.
        equation: Error of the plain equation on the same numbers; None if it is not finite.
    """
    if path == "reference":
        return EQUATION_LIMIT[dtype]
    return max(PATH_LIMIT[dtype], MULTIPLE * (equation or 0.0))


def wrong(result: Result, path: str) -> list[str]:
    """Say where a path of a mixer gives a wrong result; nothing where it does not.

    Args:
        result: Of the step of that mixer.
        path: One of its paths.
    """
    found = []
    for row in result["errors"]:
        if row["path"] == path and row["compared"] and not _at_most(row["excess"], 1.0):
            worst = row["worst"]
            found.append(
                f"{row['dtype']}, {row['grid']} tokens, {worst['mode']}: {worst['of']} "
                f"({_number(worst['error'])}, allowed {worst['limit']:.1e})"
            )
    found += [
        f"{row['tokens']} tokens: {row['reason']}"
        for row in (*result["errors"], *result["times"])
        if row["path"] == path and str(row.get("reason", "")).startswith(FAILED)
    ]
    for row in result["times"]:
        last = row.get("last_image", 0.0)
        if row["path"] == path and not _at_most(last, PATH_LIMIT[HALF]):
            found.append(
                f"{HALF}, {row['tokens']} tokens: the last of {row['images']} images "
                f"({_number(last)}, allowed {PATH_LIMIT[HALF]:.1e})"
            )
    return found


def section(results: Mapping[str, Result], names: Sequence[str]) -> str:
    """Write which mixers are right and which are fast, from the steps that are done.

    Args:
        results: Of the steps that are done.
        names: All steps in their order, the ceilings first.
    """
    mixers = {name: results[name] for name in names[1:] if name in results}
    parts = _about_mixers(mixers) if mixers else []
    if names[0] in results:
        parts.append(_about_ceilings(results[names[0]]))
    missing = [name for name in names if name not in results]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _about_ceilings(ceilings: Result) -> str:
    return (
        f"Ceilings: a copy of {ceilings['bytes'] / 1e9:.1f} GB moves {ceilings['copy_tb_s']:.2f} "
        f"TB/s, bytes read and written (quartiles {ceilings['copy_tb_s_q1']:.2f} to "
        f"{ceilings['copy_tb_s_q3']:.2f}); a product of bfloat16 matrices of side "
        f"{ceilings['side']:,} runs at {ceilings['matmul_tflop_s']:.0f} TFLOP/s "
        f"({ceilings['matmul_tflop_s_q1']:.0f} to {ceilings['matmul_tflop_s_q3']:.0f}); "
        f"{ceilings['rounds']} rounds in turns. "
        "[NVIDIA's page of the H200](https://www.nvidia.com/en-us/data-center/h200/) has 4.8 TB/s, "
        "and 1,979 TFLOP/s for sparse matrices, half of that for dense ones."
    )


def _about_mixers(mixers: Mapping[str, Result]) -> list[str]:
    """Answers, then the three tables, each with how it was measured."""
    timed = {
        (name, row["path"], row["tokens"], row["mode"]): row
        for name, result in mixers.items()
        for row in result["times"]
    }

    def by_tokens(cell: Cell, first: Sequence[tuple[str, str]] = ()) -> str:
        sizes = sorted({tokens for _, _, tokens, _ in timed})
        rows = [*first, *((name, path) for name, r in mixers.items() for path in _paths(r))]
        lines = [
            [_label(name, path), *(cell(name, path, tokens) for tokens in sizes)]
            for name, path in rows
        ]
        return table(("mixer, path", *(f"N = {tokens:,}" for tokens in sizes)), lines)

    def training(write: Callable[[Result], str]) -> Cell:
        def cell(name: str, path: str, tokens: int) -> str:
            row = timed.get((name, path, tokens, "train"))
            return "-" if row is None else str(row.get("reason") or write(row))

        return cell

    some = next(iter(mixers))  # every step times the two baselines: shown are those of one
    baselines = [(some, BASE), (some, BARE)]
    return [
        _judged(mixers),
        f"Time against {BASE}, each mixer on the path that it takes of itself. "
        f"In training: {_speed(mixers, 'train')} Forward alone: {_speed(mixers, 'forward')}",
        "Worst error |y - y64| / |y64| of output and every gradient:",
        _errors_table(mixers),
        _how_errors(mixers),
        f"Time as a multiple of {BASE}, training / forward alone:",
        by_tokens(
            lambda name, path, tokens: " / ".join(
                _ratio(timed.get((name, path, tokens, mode))) for mode in MODES
            )
        ),
        _how_times(mixers),
        "Peak memory of training beyond weights and tokens, MiB:",
        by_tokens(training(lambda row: f"{row['peak_mib']:,.0f}"), baselines),
        "Achieved in training, TFLOP/s of counted multiply-adds (backward: twice those forward):",
        by_tokens(training(lambda row: f"{row['tflop_s']:.0f}"), baselines),
        f"Time of {BASE} in training, beside `{some}`: "
        + _and(
            [
                f"{row['ms']:.2f} ms at N = {row['tokens']:,}"
                for (name, path, _, mode), row in timed.items()
                if (name, path, mode) == (some, BASE, "train") and "ms" in row
            ]
        )
        + ".",
    ]


def _judged(mixers: Mapping[str, Result]) -> str:
    """Say which paths gave wrong results, and where."""
    found = {
        _label(name, path): wrong(result, path)
        for name, result in mixers.items()
        for path in _paths(result)
    }
    places = [f"{label}: {'; '.join(at)}" for label, at in found.items() if at]
    counted = f"Of {_many(len(found), 'path')} of {_many(len(mixers), 'mixer')}, "
    if not places:
        return counted + "none gives a wrong result."
    return (
        f"{counted}{len(places)} gave wrong results and are left out of the comparison below. "
        f"{'. '.join(places)}."
    )


_KINDS = {
    "faster": "Faster",
    "slower": "Slower",
    "not distinguishable": "No difference",
    "too few rounds": "Too few rounds to tell",
    "busy": "Not clear, since other programs ran",
    "reason": "Not measured",
}


def _speed(mixers: Mapping[str, Result], mode: str) -> str:
    """Say which mixers are faster, and where, by the verdict of the paired test."""
    groups: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name, result in mixers.items():
        path = result["default"]["name"]
        if wrong(result, path):
            continue
        kinds: dict[str, list[Result]] = {}
        rows = [r for r in result["times"] if (r["path"], r["mode"]) == (path, mode)]
        for row in rows:
            kind = row.get("verdict", "reason")  # none without a time, or without a baseline's
            if kind == "different":
                kind = "faster" if row["ratio"] < 1 else "slower"
            kinds.setdefault(kind, []).append(row)
        for kind, alike in kinds.items():
            at = f"`{name}` at N = {_and([format(row['tokens'], ',') for row in alike])}"
            if len(alike) == len(rows) > 1:
                at = f"`{name}` at every N"
            if kind in ("faster", "slower"):
                low, high = (f"{f(row['ratio'] for row in alike):.2f}" for f in (min, max))
                at += f" ({low if low == high else f'{low} to {high}'})"
            groups[kind].append(at)
    lines = [f"{_KINDS[kind]}: {'; '.join(each)}." for kind, each in groups.items() if each]
    return " ".join(lines) or "nothing to compare."


_TENSORS = ("output", "gradient")


def _errors_table(mixers: Mapping[str, Result]) -> str:
    lines = []
    for name, result in mixers.items():
        for path in _paths(result):
            cells = []
            for dtype in DTYPES:
                rows = [r for r in result["errors"] if (r["path"], r["dtype"]) == (path, dtype)]
                worst = [r[kind] for r in rows if r["compared"] for kind in _TENSORS]
                reasons = [row["reason"] for row in rows if "reason" in row]
                if worst:
                    cells.append(_number(None if None in worst else max(worst)))
                else:
                    cells.append(reasons[0] if reasons else "-")
            lines.append([_label(name, path), *cells, "wrong" if wrong(result, path) else "right"])
    return table(("mixer, path", *DTYPES, "results"), lines)


def _how_errors(mixers: Mapping[str, Result]) -> str:
    rows = [row for result in mixers.values() for row in result["errors"]]
    poisoned = ", on memory filled with NaN" if all(row["poisoned"] for row in rows) else ""
    allowed = ", ".join(
        f"{EQUATION_LIMIT[dtype]:.1e} and {PATH_LIMIT[dtype]:.1e} in {dtype}" for dtype in DTYPES
    )
    grids = _and(list(dict.fromkeys(row["grid"] for row in rows)))
    return (
        f"{sum(row['compared'] for row in rows):,} tensors in training and evaluation, on grids of "
        f"{grids} tokens (+1: a prefix token){poisoned}, against the plain equation in float64 "
        "with the same weights; parameters are moved away from where they start, tokens drawn "
        f"from N(0, 1). The plain equation (`reference`) and other paths may be off by {allowed}; "
        f"other paths also by {MULTIPLE:.0f} times the error of the plain equation in that dtype. "
        "float32 is without TF32, the others by autocast; where gradients overflow, the loss is "
        "scaled down. The last image of each timed batch is compared with the same image alone. "
        + _kernels(mixers)
    )


def _how_times(mixers: Mapping[str, Result]) -> str:
    first = next(iter(mixers.values()))
    timed = [row for r in mixers.values() for row in r["times"] if "reason" not in row]
    ratios = [row for row in timed if "ratio" in row]
    spread = max(
        (max(r["ratio_q3"] / r["ratio"], r["ratio"] / r["ratio_q1"]) for r in ratios), default=1.0
    )
    rounds = sorted({row["rounds"] for row in timed}) or [0]
    images = dict(sorted((row["tokens"], row["images"]) for row in timed))
    return (
        f"Width {first['dim']}, {first['heads']} heads, {first['timed_in']} by autocast; "
        f"{_and([f'{images[n]:,} images at N = {n:,}' for n in images])}. Medians of "
        f"{rounds[0]} to {rounds[-1]} rounds in turns with the baseline, whose kernel was forced; "
        f"quartiles lie within {100 * (spread - 1):.0f} % of each ratio. Training is forward and "
        "backward, with gradients of tokens and parameters. n.d.: no difference by a paired test; "
        "few: too few rounds to tell; busy: other programs ran; †: the host took over "
        f"{100 * ISSUED:.0f} % of the time to issue the pass."
    )


def _kernels(mixers: Mapping[str, Result]) -> str:
    """Say which fused attention PyTorch chose where none was forced."""
    chosen: dict[str, set[str]] = {dtype: set() for dtype in DTYPES}
    for result in mixers.values():
        for row in result["errors"]:
            chosen[row["dtype"]].update(row["kernels"])
        for row in result["times"]:
            if row["path"] not in (BASE, BARE):
                chosen[HALF].update(row.get("kernels", ()))
    lines = [f"{_and(sorted(names))} in {dtype}" for dtype, names in chosen.items() if names]
    return f"Where none is forced, PyTorch takes the kernel {_and(lines)}." if lines else ""


def _ratio(row: Result | None) -> str:
    if row is None:
        return "-"
    if "reason" in row:
        return str(row["reason"])
    return row["ratio_text"] + "†" * (row["issued"] is not None and row["issued"] > ISSUED)


def _paths(result: Result) -> list[str]:
    """Paths that a step measured, in its order."""
    return list(dict.fromkeys(row["path"] for row in result["errors"]))


def _label(name: str, path: str) -> str:
    return path if path in (BASE, BARE) else f"`{name}`, {path}"


def _at_most(value: float | None, most: float) -> bool:
    return value is not None and value <= most


def _number(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
