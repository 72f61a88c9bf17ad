# SPDX-License-Identifier: Apache-2.0
"""The tables of a study of spikes, once for terminal, page and CSV. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from keymix.analysis.spikes_record import SpikesStudy, StageRates
from keymix.report import formats
from keymix.report.tables import Column, Table
from keymix.studies.study import file_words, listed, untrained

KINDS = {"binary": "0 and 1", "counts": "above 1", "real": "real numbers"}
WHATS = {
    "conv": "convolution",
    "linear": "linear",
    "product": "product of spikes",
    "sum": "sum of spikes",
    "norm": "batch norm",
    "other": "other",
}
ONES = 4
"""Values that the table of inputs has a column of their own for; larger ones share the next."""


def headline(study: SpikesStudy) -> str:
    """Summarise a study in a sentence or two."""
    energy, counterpart = study.energy, study.ann
    bounds = ""
    if energy.high > energy.low:
        low, high = formats.energy(energy.low), formats.energy(energy.high)
        bounds = f" (between {low} and {high})"
    text = (
        f"{study.rate:.4f} spikes per neuron and step over {study.time_steps} steps. An "
        f"image takes {formats.count(study.sops)} synaptic operations and "
        f"{formats.count(study.macs)} multiply-adds, {formats.energy(energy.middle)}{bounds}."
    )
    if counterpart.ratio is None:
        return text  # next to a network that hardly fires any other looks wasteful
    times = f"{counterpart.ratio:.{1 if counterpart.ratio >= 1 else 2}f}"
    return (
        f"{text} The same network without spikes makes {formats.count(counterpart.macs)} "
        f"multiply-adds, {formats.energy(counterpart.energy)}: {times} times as much."
    )


def answer(studies: Sequence[SpikesStudy]) -> str:
    """Say what an image costs next to the same network without spikes, or why it says nothing."""
    trained = [study for study in studies if not study.random]
    if not trained:
        return untrained("spikes and energy", [study.label for study in studies])
    useless = {study.label: _useless(study) for study in trained}
    known = [study for study in trained if not useless[study.label]]
    if not known:
        names = listed(list(useless))
        who = names if len(useless) == 1 else f"Each of {names}"
        why = " or ".join(dict.fromkeys(useless.values()))
        return f"{who} {why}: the energy says nothing of a network that works"
    few = _on_few(known)
    if len(known) == 1:
        study = known[0]
        middle, without = study.energy.middle, study.ann.energy
        text = f"{study.label} takes {formats.energy(middle)} per image, "
        if study.energy.low <= without <= study.energy.high:
            return (
                f"{text}as much as the same network without spikes ({formats.energy(without)}) "
                f"within what is certain{few}"
            )
        times = without / middle if middle < without else middle / without
        word = "less" if middle < without else "more"
        return f"{text}{_times(times)} {word} than the same network without spikes{few}"
    known.sort(key=lambda study: study.energy.middle)
    least, most = known[0], known[-1]
    if least.energy.high >= most.energy.low:
        return (
            f"{listed([study.label for study in known])} take about the same energy per image: "
            f"{formats.energy(least.energy.middle)} to {formats.energy(most.energy.middle)}{few}"
        )
    return (
        f"{least.label} takes the least energy per image, {formats.energy(least.energy.middle)}, "
        f"and {most.label} the most, {formats.energy(most.energy.middle)}{few}"
    )


def _useless(study: SpikesStudy) -> str:
    """Say why the energy of a network means nothing, if so."""
    if study.ann.ratio is None:
        return "hardly fires"
    if not study.varies:
        return "answers all images alike"
    return "is no better than chance" if study.at_chance else ""


def _times(value: float) -> str:
    return f"{value:.{0 if value >= 10 else 1}f} times"


def _on_few(studies: Sequence[SpikesStudy]) -> str:
    fewest = min(study.images for study in studies)
    return ", on one image" if fewest == 1 else ""


def tables(studies: Sequence[SpikesStudy]) -> dict[str, Table]:
    """Make all tables of some models, by name."""
    words = file_words(study.label for study in studies)
    of_stages = {
        f"rates_by_stage-{words[study.label]}": rates_of(study, several=len(studies) > 1)
        for study in studies
        if study.table
    }
    every = [totals(studies), _rates(studies), _steps(studies)]
    every += [neurons(studies), operations(studies)]
    return {"total": every[0], **of_stages, **{table.key: table for table in every}}


def totals(studies: Sequence[SpikesStudy]) -> Table:
    """One row per model: rate, operations, energy, and the ANN counterpart."""
    columns = (
        Column("model", "model", "name"),
        Column("images", "images", "whole", "csv"),
        Column("T", "time_steps", "whole"),
        Column("rate", "rate", "rate"),
        Column("silent, %", "silent", "percent"),
        Column("SOPs", "sops", "count"),
        Column("MACs", "macs", "count"),
        Column("energy", "energy_pj", "energy"),
        Column("at least", "energy_low_pj", "energy"),
        Column("at most", "energy_high_pj", "energy"),
        Column("ANN", "ann_macs", "count", "csv"),
        Column("ANN", "ann_energy_pj", "energy"),
        Column("ratio", "ann_ratio", "ratio"),
    )
    rows = [
        [
            study.label,
            *(getattr(study, column.key) for column in columns[1:7]),
            *(study.energy.middle, study.energy.low, study.energy.high),
            *(study.ann.macs, study.ann.energy, study.ann.ratio),
        ]
        for study in studies
    ]
    title = "Spikes per neuron and step, operations and energy per image, the ANN counterpart"
    return Table("total", title, columns, rows)


def rates_of(study: SpikesStudy, *, several: bool) -> Table:
    """Rates by stage as the paper's Table 7, its figures next to ours."""
    entries = study.table
    roles = list(dict.fromkeys(role for entry in entries for role in entry.rates))
    roles.sort(key=lambda role: role.startswith("MLP"))
    columns = [Column("spikes", "role")]
    keys: list[tuple[StageRates, int | None]] = []
    for i, entry in enumerate(entries):
        mixer = f", {entry.mixer}" if entry.mixer else ""
        columns.append(Column(f"stage {entry.stage}{mixer}", f"stage_{i}", "rate"))
        keys.append((entry, None))
        if _in_paper(entry):
            columns.append(Column(f"paper, stage {entry.stage}", f"paper_{i}", "rate"))
            keys.append((entry, entry.stage - 1))
    rows = [
        [
            role,
            *(
                entry.rates.get(role) if at is None else study.paper.get(role, (None,) * 2)[at]
                for entry, at in keys
            ),
        ]
        for role in roles
    ]
    title = "Firing rates, spikes per neuron and step, mean over the blocks of a stage"
    return Table(
        "rates_by_stage",
        f"{study.label}: {title[0].lower()}{title[1:]}" if several else title,
        columns,
        rows,
        saved=False,
    )


def _in_paper(entry: StageRates) -> bool:
    return entry.mixer == "qk_token" and entry.stage in (1, 2)


def _rates(studies: Sequence[SpikesStudy]) -> Table:
    columns = (
        Column("model", "model"),
        Column("mixer", "mixer"),
        Column("stage", "stage", "whole"),
        Column("spikes", "spikes"),
        Column("rate", "rate", "rate"),
        Column("paper", "paper", "rate"),
    )
    rows = [
        [
            study.label,
            entry.mixer,
            entry.stage,
            role,
            rate,
            study.paper[role][entry.stage - 1]
            if _in_paper(entry) and role in study.paper
            else None,
        ]
        for study in studies
        for entry in study.table
        for role, rate in entry.rates.items()
    ]
    return Table("rates", "Firing rates by stage", columns, rows, shown=False)


def _steps(studies: Sequence[SpikesStudy]) -> Table:
    columns = (
        Column("model", "model"),
        Column("layer", "path"),
        Column("step", "step", "whole"),
        Column("rate", "rate", "rate"),
    )
    rows = [
        [study.label, firing.path, step, rate]
        for study in studies
        for firing in study.firings
        for step, rate in enumerate(firing.by_step)
    ]
    return Table("steps", "Firing rates by time step", columns, rows, shown=False)


def neurons(studies: Sequence[SpikesStudy]) -> Table:
    """One row per layer of neurons."""
    columns = (
        Column("model", "model", where="csv"),
        Column("layer", "path"),
        Column("spikes", "role"),
        Column("stage", "stage", "whole"),
        Column("block", "block", "whole"),
        Column("neurons", "neurons", "whole"),
        Column("rate", "rate", "rate"),
        Column("silent, %", "silent", "percent"),
        Column("largest value", "largest", "ratio", where="csv"),
    )
    keys = ("path", "role", "stage", "block", "neurons", "rate", "silent", "largest")
    rows = [
        [study.label, *(getattr(firing, key) for key in keys)]
        for study in studies
        for firing in study.firings
    ]
    return Table("neurons", "Layers of neurons", columns, rows, shown=False)


def operations(studies: Sequence[SpikesStudy]) -> Table:
    """One row an operation: the values that drive it, and what it costs."""
    columns = (
        Column("model", "model", where="csv"),
        Column("layer", "path"),
        Column("operation", "operation"),
        Column("input", "input"),
        *(Column(f"{v}, %", f"share_{v}", "percent") for v in range(ONES)),
        Column(f"{ONES} or more, %", f"share_{ONES}_or_more", "percent"),
        Column("mean input", "mean_input", "rate"),
        Column("dense MACs", "dense_macs", "count"),
        Column("MACs", "macs", "count"),
        Column("SOPs", "sops", "count"),
        Column("SOPs at least", "sops_low", "count", where="csv"),
        Column("energy", "energy_pj", "energy"),
        Column("at least", "energy_low_pj", "energy", where="csv"),
        Column("at most", "energy_high_pj", "energy"),
    )
    rows = [
        [
            study.label,
            op.path,
            WHATS[op.what],
            KINDS[op.input],
            *_shares(None if op.values is None else op.values.shares),
            None if op.values is None else op.values.mean,
            *(op.dense, op.macs, op.acs, op.acs_low),
            *(op.energy.middle, op.energy.low, op.energy.high),
        ]
        for study in studies
        for op in study.operations
    ]
    return Table(
        "operations", "What goes into every layer, and what it costs", columns, rows, False
    )


def _shares(shares: Sequence[float] | None) -> list[float | None]:
    if shares is None:
        return [None] * (ONES + 1)
    padded = [*shares, *[0.0] * ONES]
    return [*padded[:ONES], sum(shares[ONES:], 0.0)]
