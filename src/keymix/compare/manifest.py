# SPDX-License-Identifier: Apache-2.0
"""The manifest of a comparison's folder: whose it is, which runs it made, what was planned last.

With it a comparison is gathered again from its folder alone: by `keymix report`, on another
machine, and after a crash.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from keymix.compare.data_check import is_whole
from keymix.compare.plan import Entrant, Plan
from keymix.errors import UserError, one_line
from keymix.train.names import is_name

if TYPE_CHECKING:
    from keymix.train.recipe import Recipe

MANIFEST = "comparison.json"
_SHARED = ("baseline", "match", "pooling")
_KINDS = {
    "label": str,
    "slug": str,
    "control": bool,
    "mixes_prefix": bool,
    "params": int,
    "note": str,
    "twin_of": str,
    "options": dict,
}
"""What a mixer of a plan is described by."""
_OPTIONAL = {field.name for field in fields(Entrant) if field.default is not MISSING} | {"options"}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the folder says about itself.

    Args:
        identity: What all its runs have in common, see `identity`.
        runs: Folders of all runs that it ever planned, relative to it.
        planned: The plan of the last call, the command, processes and threads.
        checked: What the check of the data found before the first run; None if there was none.
    """

    identity: dict[str, Any]
    runs: list[str]
    planned: dict[str, Any]
    checked: dict[str, Any] | None = None

    @property
    def images(self) -> dict[str, Any]:
        """Fingerprint and index hashes of the images."""
        found: dict[str, Any] = self.identity["data"]
        return found


def identity(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for runs to stand in one comparison.

    Mixers, seeds and the baseline may change: an existing comparison grows by them.
    """
    return {
        "recipe": plan.recipe.to_dict(),
        "match": plan.match,
        "data": {"fingerprint": data["fingerprint"], "index_sha256": data["index_sha256"]},
    }


def write(
    plan: Plan,
    data: Mapping[str, Any],
    *,
    before: Iterable[str] = (),
    checked: Mapping[str, Any] | None = None,
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
    planned = {
        "mixers": [asdict(entrant) for entrant in plan.entrants],
        "seeds": list(plan.seeds),
        **{key: getattr(plan, key) for key in _SHARED},
        "unheard": list(plan.unheard),
        "cannot_sit": list(plan.cannot_sit),
        "imports": list(plan.imports),
        "command": command,
        "processes": processes,
        "threads": threads,
    }
    plan.out.mkdir(parents=True, exist_ok=True)
    write_json(
        plan.out / MANIFEST,
        {
            "identity": identity(plan, data),
            "runs": sorted({*before, *ours}),
            "planned": planned,
            **({} if checked is None else {"checked": dict(checked)}),
        },
    )


def read(out: Path) -> Manifest:
    """Read the manifest of a folder.

    Fields that recipes have got since it was written take their defaults.

    Raises:
        UserError: If it is damaged.
    """
    from keymix.train.files import read_json
    from keymix.train.recipe import from_record

    path = out / MANIFEST
    try:
        values = read_json(path)
        found = values.get("identity")
        data = found.get("data") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("recipe"), dict):
            raise UserError(f"{str(path)!r} is damaged: it has no recipe")
        if not isinstance(data, dict) or data.keys() != {"fingerprint", "index_sha256"}:
            raise UserError(f"{str(path)!r} is damaged: it lacks the images")
        recipe = from_record(found["recipe"]).to_dict()
    except UserError as error:
        wrong = str(error).rstrip(".")
        wrong = wrong if repr(str(path)) in wrong else f"{str(path)!r} is damaged: {wrong}"
        raise UserError(
            f"{wrong}. Run the same `keymix compare` command again, which writes "
            f"{str(path)!r} again; finished runs are kept."
        ) from None
    runs, planned, checked = (values.get(key) for key in ("runs", "planned", "checked"))
    return Manifest(
        identity=found | {"recipe": recipe, "match": found.get("match")},
        runs=[name for name in runs if _is_run(name)] if isinstance(runs, list) else [],
        planned=planned if isinstance(planned, dict) else {},
        checked=checked if is_whole(checked) else None,
    )


def recorded_in(out: Path) -> Recipe | None:
    """Return the recipe that the runs of a comparison's folder share; None where there is none.

    Args:
        out: The comparison's folder; where the manifest is damaged, a run says it.
    """
    from keymix.train.damage import recorded_recipe
    from keymix.train.recipe import from_record

    if not (out / MANIFEST).is_file():
        return None
    try:
        return from_record(read(out).identity["recipe"])
    except UserError:
        for name in runs_in(out):
            with suppress(UserError):
                return recorded_recipe(out / name)
    return None


def keep_checked(out: Path, checked: Mapping[str, Any]) -> None:
    """Add to the manifest what the check of the data found."""
    from keymix.train.files import read_json, write_json

    write_json(out / MANIFEST, {**read_json(out / MANIFEST), "checked": dict(checked)})


def recorded_imports(out: Path) -> list[str]:
    """Return the files of the user's mixers that a folder names, which are never run for it.

    Args:
        out: The comparison's folder; a damaged manifest names none.
    """
    try:
        named = read(out).planned.get("imports") if (out / MANIFEST).exists() else None
    except UserError:
        return []
    return [file for file in named if isinstance(file, str)] if isinstance(named, list) else []


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


def plan_of(out: Path, manifest: Manifest, record: Mapping[str, Any]) -> Plan:
    """Return the plan of the last call, from the manifest alone.

    The files of the user's mixers are left out: who reads a folder says which files run.

    Args:
        out: The comparison's folder.
        manifest: Its manifest.
        record: The content of ``results.json``, or nothing; it stands in for the plan that
            manifests of earlier versions lack.

    Raises:
        UserError: If neither tells the plan.
    """
    from keymix.train.recipe import from_record

    planned = manifest.planned or _from_record(record)
    wrong = next(_faults(planned), "")
    if wrong:
        raise UserError(
            f"{str(out / MANIFEST)!r} lacks what was compared: {wrong}. Run the same "
            "`keymix compare` command again; finished runs are kept."
        )
    known = {field.name for field in fields(Entrant)}
    return Plan(
        recipe=from_record(manifest.identity["recipe"]),
        entrants=tuple(
            Entrant(**{key: mixer[key] for key in mixer if key in known})
            for mixer in planned["mixers"]
        ),
        seeds=tuple(planned["seeds"]),
        unheard=tuple(planned["unheard"]),
        cannot_sit=tuple(planned.get("cannot_sit", ())),
        imports=(),
        out=out,
        **{key: planned[key] for key in _SHARED},
    )


def _faults(planned: Mapping[str, Any]) -> Iterator[str]:
    """Say what is wrong with a plan as it was recorded; names of folders must be names."""
    mixers, seeds = planned.get("mixers"), planned.get("seeds")
    if not isinstance(mixers, list) or not mixers:
        yield "it names no mixers"
        return
    for mixer in mixers:
        if not isinstance(mixer, dict) or not _KINDS.keys() <= {*mixer, *_OPTIONAL}:
            yield "a mixer lacks a part"
            return
        for key, kind in _KINDS.items():
            if type(mixer.get(key, kind())) is not kind:
                yield f"{key}={mixer[key]!r} of a mixer"
        if not is_name(mixer["slug"]):
            yield f"slug={mixer['slug']!r} of a mixer is no name of a folder"
        if not mixer["label"].isprintable():
            yield f"label={mixer['label']!r} of a mixer"
    labels = [mixer["label"] for mixer in mixers]
    if len({*labels}) < len(labels):
        yield "a mixer is given twice"
    if (
        not isinstance(seeds, list)
        or not all(type(s) is int and s >= 0 for s in seeds)
        or not seeds
        or len({*seeds}) < len(seeds)
    ):
        yield f"seeds={seeds!r}"
    if planned.get("baseline") not in labels:
        yield f"baseline={planned.get('baseline')!r}"
    if planned.get("match") not in (None, "params"):
        yield f"match={planned.get('match')!r}"
    if not isinstance(planned.get("pooling"), str):
        yield f"pooling={planned.get('pooling')!r}"
    for key in ("unheard", "cannot_sit"):
        told = planned.get(key, [] if key == "cannot_sit" else None)
        if not isinstance(told, list) or not all(isinstance(each, str) for each in told):
            yield f"{key}={told!r}"


def _from_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Take the plan from a result; one that is empty or damaged gives an empty plan."""
    if not {"mixers", "costs", "readout", "seeds", "baseline", "match"} <= record.keys():
        return {}
    costs, readout, told = record["costs"], record["readout"], record["mixers"]
    deaf = readout.get("because") if isinstance(readout, dict) else None
    if not (isinstance(costs, dict) and isinstance(told, list) and isinstance(deaf, list)):
        return {}
    mixers = [
        {
            **{key: mixer.get(key) for key in ("label", "slug", "control", "note")},
            "mixes_prefix": mixer.get("label") not in deaf,
            "params": row.get("params") if isinstance(row, dict) else None,
        }
        for mixer in told
        if isinstance(mixer, dict)
        for row in [costs.get(str(mixer.get("label")))]
    ]
    return {
        "mixers": mixers,
        "seeds": record["seeds"],
        "baseline": record["baseline"],
        "match": record["match"],
        "pooling": readout.get("pooling"),
        "unheard": deaf,
        **{key: record[key] for key in ("command", "processes", "threads") if key in record},
    }
