# SPDX-License-Identifier: Apache-2.0
"""The manifest of a comparison's folder: whose it is, which runs it made, what was planned last.

With it a comparison is gathered again from its folder alone: by `keymix report`, on another
machine, and after a crash.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from keymix.compare.plan import Entrant, Plan
from keymix.data.record import DataRecord, SameImages
from keymix.errors import UserError, one_line
from keymix.records import from_json
from keymix.report.record import Checked, ComparisonRecord
from keymix.train.recipe import Recipe, from_record, is_name

MANIFEST = "comparison.json"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What must be equal for runs to stand in one comparison.

    Mixers, seeds and the baseline may change: an existing comparison grows by them.

    Args:
        recipe: What all runs share.
        match: ``params`` if widths were matched.
        data: The images.
    """

    recipe: Recipe
    match: str | None
    data: SameImages

    @classmethod
    def of(cls, plan: Plan, data: DataRecord) -> Identity:
        """Take it from a plan and the record of its images."""
        return cls(recipe=plan.recipe, match=plan.match, data=SameImages.of(data))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan of the last call, see `keymix.compare.plan.Plan`.

    Args:
        mixers: The mixers, in the order of every table.
        seeds: The training seeds.
        baseline: Label of the mixer that the others are compared with.
        match: ``params`` if widths were matched.
        pooling: How every model reads out.
        unheard: Labels of the mixers that decided it.
        cannot_sit: Why mixers that nobody named are not in it.
        imports: Files that register mixers.
        command: What repeats the call; empty where nobody knows, as are the next two 0.
        processes: Training processes side by side.
        threads: Threads of each.

    Raises:
        UserError: If a name is none, or the parts do not go together.
    """

    mixers: tuple[Entrant, ...]
    seeds: tuple[int, ...]
    baseline: str
    match: str | None = None
    pooling: str
    unheard: tuple[str, ...]
    cannot_sit: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    command: str = ""
    processes: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        wrong = next(_faults(self), "")
        if wrong:
            raise UserError(wrong)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the folder says about itself.

    Args:
        identity: What all its runs have in common.
        runs: Folders of all runs that it ever planned, relative to it.
        planned: The plan of the last call; None in manifests of earlier versions, and where it is
            damaged.
        damage: What is wrong with the plan; empty if nothing.
        checked: What the check of the data found before the first run; None if there was none.
    """

    identity: Identity
    runs: tuple[str, ...]
    planned: Planned | None = None
    damage: str = ""
    checked: Checked | None = None


def write(
    plan: Plan,
    data: DataRecord,
    *,
    before: Iterable[str] = (),
    checked: Checked | None = None,
    command: str,
    processes: int,
    threads: int,
) -> None:
    """Write the manifest of a plan.

    Args:
        plan: What is wanted now.
        data: The record of its images.
        before: Run folders that the manifest named before.
        checked: What the check of the data found; None if it was not made yet.
        command: The command that repeats it.
        processes: Training processes side by side.
        threads: Threads of each.
    """
    from keymix.train.files import write_json

    ours = [plan.folder(e, s).relative_to(plan.out).as_posix() for e, s in plan.pairs]
    planned = Planned(
        mixers=plan.entrants,
        seeds=plan.seeds,
        baseline=plan.baseline,
        match=plan.match,
        pooling=plan.pooling,
        unheard=plan.unheard,
        cannot_sit=plan.cannot_sit,
        imports=plan.imports,
        command=command,
        processes=processes,
        threads=threads,
    )
    plan.out.mkdir(parents=True, exist_ok=True)
    write_json(
        plan.out / MANIFEST,
        {
            "identity": Identity.of(plan, data),
            "runs": sorted({*before, *ours}),
            "planned": planned,
            **({} if checked is None else {"checked": checked}),
        },
    )


def read(out: Path) -> Manifest:
    """Read the manifest of a folder.

    Fields that recipes have got since it was written take their defaults.

    Raises:
        UserError: If it is damaged.
    """
    from keymix.train.files import read_json

    path = out / MANIFEST
    try:
        values = read_json(path)
        identity = _identity(values.get("identity"), repr(str(path)))
    except UserError as error:
        wrong = str(error).rstrip(".")
        wrong = wrong if repr(str(path)) in wrong else f"{str(path)!r} is damaged: {wrong}"
        raise UserError(
            f"{wrong}. Run the same `keymix compare` command again, which writes "
            f"{str(path)!r} again; finished runs are kept."
        ) from None
    planned: Planned | None = None
    checked: Checked | None = None
    runs, damage = values.get("runs"), ""
    try:
        if isinstance(values.get("planned"), dict):
            planned = from_json(Planned, values["planned"], where="its plan")
    except UserError as error:
        damage = str(error).rstrip(".")
    with suppress(UserError):
        checked = from_json(Checked, values.get("checked"), where="what was checked")
    return Manifest(
        identity=identity,
        runs=tuple(name for name in runs if _is_run(name)) if isinstance(runs, list) else (),
        planned=planned,
        damage=damage,
        checked=checked,
    )


def _identity(found: object, where: str) -> Identity:
    if not isinstance(found, dict) or not isinstance(found.get("recipe"), dict):
        raise UserError(f"{where} is damaged: it has no recipe")
    match = found.get("match")
    if match is not None and not isinstance(match, str):
        raise UserError(f"{where} is damaged: match = {match!r}: expected text or null")
    return Identity(
        recipe=from_record(found["recipe"]),
        match=match,
        data=from_json(SameImages, found.get("data"), where=f"the record of the images in {where}"),
    )


def recorded_in(out: Path) -> Recipe | None:
    """Return the recipe that the runs of a comparison's folder share; None where there is none.

    Args:
        out: The comparison's folder; where the manifest is damaged, a run says it.
    """
    from keymix.train.folder import recorded_recipe

    if not (out / MANIFEST).is_file():
        return None
    try:
        return read(out).identity.recipe
    except UserError:
        for name in runs_in(out):
            with suppress(UserError):
                return recorded_recipe(out / name)
    return None


def keep_checked(out: Path, checked: Checked) -> None:
    """Add to the manifest what the check of the data found."""
    from keymix.train.files import read_json, write_json

    write_json(out / MANIFEST, {**read_json(out / MANIFEST), "checked": checked})


def recorded_imports(out: Path) -> list[str]:
    """Return the files of the user's mixers that a folder names, which are never run for it.

    Args:
        out: The comparison's folder; a damaged manifest names none.
    """
    try:
        planned = read(out).planned if (out / MANIFEST).exists() else None
    except UserError:
        return []
    return [] if planned is None else list(planned.imports)


def imports_note(recorded: Sequence[str], given: Iterable[str | Path]) -> str:
    """Say which files of the user's mixers a comparison was made with and that they were not run.

    Args:
        recorded: The files that its manifest names.
        given: Those that were given now.

    Returns:
        One line; empty where all were given.
    """
    names = {Path(file).name for file in given}
    left = [file for file in recorded if PurePath(file).name not in names]
    if not left:
        return ""
    options = " ".join(f"--import {shlex.quote(file)}" for file in left)
    return one_line(
        f"the comparison was made with mixers from {', '.join(map(repr, left))}; a file that a "
        f"folder names is not run. If you trust it, add {options}"
    )


def _is_run(name: object) -> bool:
    """Whether a text is the folder of a run in a comparison's: ``runs/<slug>/seed<N>``."""
    parts = name.split("/") if isinstance(name, str) else []
    return (
        len(parts) == 3
        and parts[0] == "runs"
        and is_name(parts[1])
        and re.fullmatch(r"seed\d{1,20}", parts[2]) is not None
    )


def runs_in(out: Path) -> list[str]:
    """Return the folders of runs that lie in a comparison's, for a manifest that was lost.

    Args:
        out: The comparison's folder.
    """
    found = (place.relative_to(out).as_posix() for place in out.glob("runs/*/seed*"))
    return sorted(name for name in found if _is_run(name))


def plan_of(out: Path, manifest: Manifest, record: ComparisonRecord | None) -> Plan:
    """Return the plan of the last call, from the manifest alone.

    The files of the user's mixers are left out: who reads a folder says which files run.

    Args:
        out: The comparison's folder.
        manifest: Its manifest.
        record: An earlier record; it stands in for the plan that manifests of earlier versions
            lack.

    Raises:
        UserError: If neither has the plan.
    """
    planned, wrong = manifest.planned, manifest.damage or "it has no plan"
    if planned is None and not manifest.damage and record is not None:
        try:
            planned = _from_record(record)
        except UserError as error:
            wrong = str(error)
    if planned is None:
        raise UserError(
            f"{str(out / MANIFEST)!r} lacks what was compared: {wrong}. Run the same "
            "`keymix compare` command again; finished runs are kept."
        )
    return Plan(
        recipe=manifest.identity.recipe,
        entrants=planned.mixers,
        seeds=planned.seeds,
        baseline=planned.baseline,
        match=planned.match,
        pooling=planned.pooling,
        unheard=planned.unheard,
        cannot_sit=planned.cannot_sit,
        imports=(),
        out=out,
    )


def _faults(planned: Planned) -> Iterator[str]:
    """Say what is wrong with a plan as it was recorded; names of folders must be names."""
    if not planned.mixers:
        yield "it names no mixers"
    for mixer in planned.mixers:
        if not is_name(mixer.slug):
            yield f"slug={mixer.slug!r} of a mixer is no name of a folder"
        if not mixer.label.isprintable():
            yield f"label={mixer.label!r} of a mixer"
    labels = [mixer.label for mixer in planned.mixers]
    if len({*labels}) < len(labels):
        yield "a mixer is given twice"
    seeds = planned.seeds
    if not seeds or min(seeds) < 0 or len({*seeds}) < len(seeds):
        yield f"seeds={list(seeds)!r}"
    if planned.baseline not in labels:
        yield f"baseline={planned.baseline!r}"
    if planned.match not in (None, "params"):
        yield f"match={planned.match!r}"


def _from_record(record: ComparisonRecord) -> Planned:
    """Take the plan from an earlier record.

    Raises:
        UserError: If it is no plan.
    """
    deaf = record.readout.because
    lacking = [mixer.label for mixer in record.mixers if mixer.label not in record.costs]
    if lacking:
        raise UserError(f"costs of {lacking[0]!r} are not known")
    return Planned(
        mixers=tuple(
            Entrant(
                label=mixer.label,
                slug=mixer.slug,
                control=mixer.control,
                note=mixer.note,
                mixes_prefix=mixer.label not in deaf,
                params=record.costs[mixer.label].params,
            )
            for mixer in record.mixers
        ),
        seeds=record.seeds,
        baseline=record.baseline,
        match=record.match,
        pooling=record.readout.pooling,
        unheard=deaf,
        command=record.command,
        processes=record.processes,
        threads=record.threads,
    )
