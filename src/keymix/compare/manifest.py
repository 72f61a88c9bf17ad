# SPDX-License-Identifier: Apache-2.0
"""The manifest of a comparison's folder: whose it is, which runs it made, what was planned last.

With it a comparison is gathered again from its folder alone: by `keymix report`, on another
machine, and after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.compare.plan import Entrant, Plan
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.train.recipe import Recipe

MANIFEST = "comparison.json"
_SHARED = ("baseline", "match", "pooling")


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
    values = read_json(path)
    found = values.get("identity")
    if not isinstance(found, dict) or not {"recipe", "match", "data"} <= found.keys():
        raise UserError(f"{str(path)!r} is damaged. Delete it, or name another folder with --out.")
    return Manifest(
        identity=found | {"recipe": from_record(found["recipe"]).to_dict()},
        runs=list(values.get("runs", [])),
        planned=dict(values.get("planned", {})),
        checked=values.get("checked"),
    )


def recorded_in(out: Path) -> Recipe | None:
    """Return the recipe that the runs of a comparison's folder share; None where there is none.

    Raises:
        UserError: If its manifest is damaged.
    """
    from keymix.train.recipe import from_record

    return from_record(read(out).identity["recipe"]) if (out / MANIFEST).is_file() else None


def keep_checked(out: Path, checked: Mapping[str, Any]) -> None:
    """Add to the manifest what the check of the data found."""
    from keymix.train.files import read_json, write_json

    write_json(out / MANIFEST, {**read_json(out / MANIFEST), "checked": dict(checked)})


def plan_of(out: Path, manifest: Manifest, record: Mapping[str, Any]) -> Plan:
    """Return the plan of the last call, from the manifest alone.

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
    known = {field.name for field in fields(Entrant)}
    try:
        return Plan(
            recipe=from_record(manifest.identity["recipe"]),
            entrants=tuple(
                Entrant(**{key: mixer[key] for key in mixer if key in known})
                for mixer in planned["mixers"]
            ),
            seeds=tuple(planned["seeds"]),
            unheard=tuple(planned["unheard"]),
            cannot_sit=tuple(planned.get("cannot_sit", ())),
            imports=tuple(planned["imports"]),
            out=out,
            **{key: planned[key] for key in _SHARED},
        )
    except (KeyError, TypeError):
        raise UserError(
            f"{str(out / MANIFEST)!r} does not tell what was compared. Run the same `keymix "
            "compare` command again; finished runs are kept."
        ) from None


def _from_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Take the plan from a result; an empty one gives an empty plan."""
    if not {"mixers", "costs", "readout", "seeds", "baseline", "match"} <= record.keys():
        return {}
    mixers = [
        {
            **{key: mixer.get(key) for key in ("label", "slug", "control", "note")},
            "mixes_prefix": mixer.get("label") not in record["readout"]["because"],
            "params": record["costs"].get(mixer.get("label"), {}).get("params"),
        }
        for mixer in record["mixers"]
    ]
    return {
        "mixers": mixers,
        "seeds": record["seeds"],
        "baseline": record["baseline"],
        "match": record["match"],
        "pooling": record["readout"]["pooling"],
        "unheard": record["readout"]["because"],
        "imports": [],
        **{key: record[key] for key in ("command", "processes", "threads") if key in record},
    }
