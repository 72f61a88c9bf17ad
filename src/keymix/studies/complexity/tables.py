# SPDX-License-Identifier: Apache-2.0
"""The tables of a study of cost. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from keymix.analysis.complexity_record import BASELINE, MixerCosts, RatioPoint, ScalingRow
from keymix.analysis.timing import LEVEL, SHORT
from keymix.report import formats
from keymix.report.tables import Column, Table
from keymix.studies.study import listed

_LONG = {
    SHORT["not distinguishable"]: (
        f"not distinguishable from softmax (test at {100 * LEVEL:g} % over all mixers at one "
        "number of tokens)"
    ),
    SHORT["busy"]: "the machine was too busy to compare",
    SHORT["too few rounds"]: "too few rounds to compare",
}


def answer(record: MixerCosts) -> str:
    """Say what the mixers need next to softmax attention, controls aside."""
    domains = [each.domain for each in record.mixers if not each.control]
    domain = "dense" if "dense" in domains else "spiking"
    shown = [each.label for each in record.mixers if not each.control and each.domain == domain]
    at, macs = _macs(record, shown)
    if not macs:
        return "No mixer could be counted"
    where = f"at {at:,} tokens"
    base = macs.get(BASELINE)
    others = {label: found for label, found in macs.items() if label != BASELINE}
    if base is None or not others:
        first, last = min(macs, key=macs.__getitem__), max(macs, key=macs.__getitem__)
        if len(macs) == 1 or macs[first] == macs[last]:
            whole = listed(list(macs))
            need = "needs" if len(macs) == 1 else "each need"
            return f"{whole} {need} {formats.count(macs[first])} multiply-adds {where}"
        return (
            f"Of {len(macs)} mixers {first} needs the fewest multiply-adds {where}, "
            f"{formats.count(macs[first])}, and {last} the most, {formats.count(macs[last])}"
        )
    least = [label for label, found in others.items() if found == min(others.values())]
    change = min(others.values()) / base - 1
    percent = round(100 * abs(change))
    needs = f"{listed(least)} need{'s' if len(least) == 1 else ''}"
    time = _time(record, least[0], at) if len(least) == 1 else ""
    if len(others) == 1:
        word = "fewer" if change < 0 else "more"
        much = f"{percent} % {word} multiply-adds than" if percent else "as many multiply-adds as"
        return f"{needs} {much} {BASELINE} {where}{time}"
    if change >= 0 or not percent:
        more = f"; {needs} {percent} % more" if percent else ""
        return f"No mixer needs fewer multiply-adds than {BASELINE} {where}{more}"
    return (
        f"Of {len(macs)} mixers {needs} the fewest multiply-adds {where}: {percent} % fewer than "
        f"{BASELINE}{time}"
    )


def _macs(record: MixerCosts, shown: Sequence[str]) -> tuple[int, dict[str, int]]:
    """Return the most tokens where mixers were counted, and their multiply-adds there."""
    rows: Sequence[ScalingRow | RatioPoint] = record.scaling
    if not any(row.macs for row in rows):
        rows = [point for point in record.by_tokens if point.tokens == record.setting.at]
        rows = rows or record.by_tokens
    rows = [row for row in rows if row.macs and row.mixer in shown]
    at = max((row.tokens for row in rows), default=0)
    return at, {row.mixer: row.macs for row in rows if row.tokens == at and row.macs}


def _time(record: MixerCosts, mixer: str, at: int) -> str:
    """Say what it takes longer or shorter, where that was measured."""
    rows = [row for row in record.scaling if (row.mixer, row.tokens) == (mixer, at)]
    if not rows or rows[0].latency_verdict is None:
        return ""
    if rows[0].latency_verdict == "different" and rows[0].latency_ratio is not None:
        change = rows[0].latency_ratio - 1
        return f", and takes {100 * abs(change):.0f} % {'less' if change < 0 else 'more'} time"
    return {
        "busy": "; the machine was too busy to compare their times",
        "too few rounds": "; too few rounds were timed to compare their times",
    }.get(rows[0].latency_verdict, "; no difference in time can be measured")


def tables(record: MixerCosts) -> list[Table]:
    """Make all tables of a study."""
    setting = record.setting
    made = [_multiples(record), _scaling(record)] if record.scaling else []
    made += [
        _pivot(record, "tokens", f"D = {setting.dim}"),
        _pivot(record, "dim", f"N = {setting.at}"),
        _ratios(record),
        _weights(record),
    ]
    missing = _missing(record)
    return [*made, *(table for table in (missing,) if table.rows)]


def _csv_only(*keys: str) -> list[Column]:
    return [Column("", key, where="csv") for key in keys]


def _pivot(record: MixerCosts, axis: str, fixed: str) -> Table:
    points = record.by_tokens if axis == "tokens" else record.by_dim
    sizes = list(dict.fromkeys(getattr(p, axis) for p in points))
    letter = "N" if axis == "tokens" else "D"
    columns = [Column("mixer", "mixer", "name")]
    columns += [Column(f"{letter} = {size}", f"{axis}_{size}", "ratio") for size in sizes]
    found = {(p.mixer, getattr(p, axis)): p.ratio for p in points}
    names = dict.fromkeys(p.mixer for p in points)
    rows = [
        (name, *(found[name, size] for size in sizes))
        for name in names
        if any(found[name, size] is not None for size in sizes)
    ]
    title = f"SKA Fig. 4: multiply-adds per parameter against {letter}, at {fixed}{_over(record)}"
    return Table(f"ratio_by_{axis}", title, columns, rows, saved=False)


def _spiking(record: MixerCosts) -> frozenset[str]:
    """Name the spiking mixers, which run all time steps."""
    return frozenset(each.label for each in record.mixers if each.domain == "spiking")


def _over(record: MixerCosts) -> str:
    """Say over how many steps spiking mixers are counted and timed, where there are any."""
    steps = record.setting.time_steps
    return f"; spiking mixers over T = {steps} steps" if _spiking(record) else ""


def _steps_of(record: MixerCosts, mixer: str) -> int:
    return record.setting.time_steps if mixer in _spiking(record) else 1


def _ratios(record: MixerCosts) -> Table:
    keys = ("mixer", "tokens", "dim", "params", "macs", "ratio", "reason")
    columns = [Column("", key) for key in ("axis", *keys, "time_steps")]
    rows = [
        (axis, *(getattr(point, key) for key in keys), _steps_of(record, point.mixer))
        for axis, points in (("tokens", record.by_tokens), ("dim", record.by_dim))
        for point in points
    ]
    return Table("ratios", "", columns, rows, shown=False)


def _weights(record: MixerCosts) -> Table:
    columns = (
        Column("mixer", "mixer", "name"),
        Column("weights shared over the image", "sharing"),
        Column("learned kernels", "kernels"),
        Column("dynamic weights", "dynamic", "whole"),
        Column("parameters per token more", "params_a_token", "whole"),
        *_csv_only("reason"),
    )
    rows = [
        [
            ", ".join(row.kernels) if column.key == "kernels" else getattr(row, column.key)
            for column in columns
        ]
        for row in record.weights
    ]
    return Table("weights", "SKA Table 7, read off the operations", columns, rows)


def _scaling(record: MixerCosts) -> Table:
    batch = record.setting.batch_size
    columns = (
        Column("mixer", "mixer", "name"),
        Column("tokens", "tokens", "whole"),
        Column("grid", "grid"),
        Column("multiply-adds", "macs", "whole"),
        Column("latency, ms", "latency_ms", "ms"),
        Column("quartiles", "quartiles", where="people"),
        Column("× softmax", "times_softmax", "ratio", where="people"),
        Column(f"peak of inference, MiB, batch {batch}", "peak_inference_mib", "mib"),
        Column("of training", "peak_training_mib", "mib"),
        Column("× softmax", "peak_ratio", "ratio"),
        *_csv_only("latency_ratio", "latency_p", "latency_verdict"),
        *_csv_only("latency_q1_ms", "latency_q3_ms", "images_per_s"),
        *_csv_only("params", "activation_bytes", "peak_note", "reason", "time_steps"),
    )
    rows = []
    for row in record.scaling:
        made = {
            "grid": "x".join(map(str, row.grid)),
            "quartiles": None
            if row.latency_q1_ms is None
            else "–".join(map(formats.three_digits, (row.latency_q1_ms, row.latency_q3_ms))),
            "time_steps": _steps_of(record, row.mixer),
            "times_softmax": _times_softmax(row),
        }
        rows.append([made[c.key] if c.key in made else getattr(row, c.key) for c in columns])
    title = f"Latency of one image and peak memory{_over(record)}{_abbreviated(record)}"
    return Table("scaling", title, columns, rows)


def _times_softmax(row: ScalingRow) -> float | str | None:
    """Return a latency as a multiple of softmax attention's, or why none is given."""
    return SHORT.get(row.latency_verdict, row.latency_ratio)


def _abbreviated(record: MixerCosts) -> str:
    """Explain the short words in place of missing multiples, where there are any."""
    shown = {_times_softmax(row) for row in record.scaling}
    return "".join(f"; {short}: {_LONG[short]}" for short in _LONG if short in shown)


def _multiples(record: MixerCosts) -> Table:
    """Make latency and memory a column a number of tokens, as multiples of softmax attention's."""
    rows = record.scaling
    sizes = list(dict.fromkeys(row.tokens for row in rows))
    measures = (("latency", _times_softmax), ("memory", lambda row: row.peak_ratio))
    columns = [Column("mixer", "mixer", "name")]
    columns += [
        Column(f"{name}, N = {size}", f"{name}_{size}", "ratio")
        for name, _ in measures
        for size in sizes
    ]
    found = {(row.mixer, row.tokens): row for row in rows}
    names = dict.fromkeys(row.mixer for row in rows)
    cells = [
        (name, *(value(found[name, size]) for _, value in measures for size in sizes))
        for name in names
    ]
    kept = [row for row in cells if any(value is not None for value in row[1:])]
    base = [found["softmax", size] for size in sizes] if ("softmax", sizes[0]) in found else []
    ms = ", ".join(formats.three_digits(row.latency_ms) for row in base)
    mib = ", ".join(formats.mib(row.peak_training_mib) for row in base)
    title = f"Latency and memory of training as multiples of softmax's ({ms} ms; {mib} MiB)"
    title += _over(record) + _abbreviated(record)
    return Table("multiples", title, columns, kept, shown=bool(kept), saved=False)


def _missing(record: MixerCosts) -> Table:
    """List who is not counted or not measured, where, and why."""
    found = [(e.label, "counts", e.reason) for e in record.mixers if e.reason]
    found += [(r.mixer, "weights", r.reason) for r in record.weights if r.reason]
    found += [
        (row.mixer, f"{row.tokens:,} tokens", row.reason) for row in record.scaling if row.reason
    ]
    columns = (
        Column("mixer", "mixer", "name"),
        Column("where", "where"),
        Column("why not", "reason"),
    )
    return Table("missing", "Could not be built, counted or run", columns, found)
