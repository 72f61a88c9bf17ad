# SPDX-License-Identifier: Apache-2.0
"""What ``keymix list`` shows, without importing PyTorch.

Data sources and mixers are read off the text of their files, tasks off their facts. Models and
recipes are in ``index.json``, which ``python -m keymix.cli.index`` writes from the registries; a
test compares it.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keymix.data.specs import DataSpec

PATH = Path(__file__).with_name("index.json")
MIXERS = Path(__file__).parents[1] / "mixers"


def _first_line(docstring: str | None) -> str:
    return " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())


def _mixers(*, own: bool) -> list[dict[str, Any]]:
    """Describe the mixers: keymix's own, or those that a user registered."""
    from keymix.mixers.registry import aliases_of, get_mixer_class, list_mixers

    rows = []
    for name in list_mixers():
        cls = get_mixer_class(name)
        if cls.__module__.startswith("keymix.") != own:
            continue
        module = sys.modules[cls.__module__]
        rows.append(
            {
                "name": name,
                "aliases": list(aliases_of(name)),
                "family": cls.family,
                "domain": cls.traits.domain,
                "control": cls.traits.control,
                "summary": _first_line(module.__doc__),
            }
        )
    return rows


def _constants(call: ast.Call) -> dict[str, Any]:
    """Read the keyword arguments of a call, which are constants."""
    return {str(given.arg): ast.literal_eval(given.value) for given in call.keywords}


def _written(name: str, node: ast.ClassDef, by_name: Mapping[str, ast.ClassDef]) -> ast.expr | None:
    """Return what a class sets an attribute to itself, or the first of its bases that does."""
    for line in node.body:
        match line:
            case ast.Assign(targets=[ast.Name(id)], value=value) if id == name:
                return value
    bases = (by_name.get(ast.unparse(base)) for base in node.bases)
    inherited = (_written(name, base, by_name) for base in bases if base is not None)
    return next((value for value in inherited if value is not None), None)


def _own_mixers() -> list[dict[str, Any]]:
    """Describe keymix's own mixers from the text of their files, of which importing loads torch.

    A class is one by its decorator ``@register_mixer(name, aliases=…)``; its traits and its
    family are those of the nearest class, itself or one that it inherits from, that writes them.
    """
    files = [ast.parse(f.read_text("utf-8")) for f in sorted(MIXERS.glob("*.py"))]
    classes = [
        (node, file) for file in files for node in file.body if isinstance(node, ast.ClassDef)
    ]
    by_name = {node.name: node for node, _ in classes}
    rows = []
    for node, file in classes:
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_mixer":
                family, traits = (_written(n, node, by_name) for n in ("family", "traits"))
                found = _constants(traits) if isinstance(traits, ast.Call) else {}
                rows.append(
                    {
                        "name": ast.literal_eval(call.args[0]),
                        "aliases": list(_constants(call).get("aliases", ())),
                        "family": "other" if family is None else ast.literal_eval(family),
                        "domain": found.get("domain", "dense"),
                        "control": found.get("control", False),
                        "summary": _first_line(ast.get_docstring(file)),
                    }
                )
    return sorted(rows, key=lambda row: row["name"])


def _models() -> list[dict[str, Any]]:
    import torch

    from keymix.analysis.counting import default_input_size
    from keymix.hosts.base import find_mixers
    from keymix.models.factory import create_model, list_models

    rows = []
    for name in list_models():
        with torch.device("meta"):
            model = create_model(name)
        rows.append(
            {
                "name": name,
                "params": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "input_size": list(default_input_size(model)),
                "mixers": sorted({m.mixer_name for m in find_mixers(model).values()}),
            }
        )
    return rows


def _data(specs: Iterable[DataSpec]) -> list[dict[str, Any]]:
    return [
        {
            "name": s.usage,
            "aliases": [s.name] if s.name != s.usage else [],
            "downloads": s.downloads,
            "summary": s.summary,
        }
        for s in specs
    ]


def _tasks(*, own: bool) -> list[dict[str, Any]]:
    """Describe the tasks: keymix's own, or those that a user registered."""
    from keymix.task import built_in_tasks, get_task, list_tasks

    tasks = [get_task(name) for name in list_tasks() if (name in built_in_tasks()) == own]
    return [
        {
            "name": task.name,
            "summary": task.does,
            "scores": [score.name for score in task.scores],
            "unit": task.unit,
        }
        for task in tasks
    ]


def registered() -> dict[str, list[dict[str, Any]]]:
    """Collect what files of a user's registered in this process, as plain data."""
    from keymix.data.specs import built_in, list_specs

    data = _data(row for row in list_specs() if row.name not in built_in())
    return {"mixers": _mixers(own=False), "data": data, "tasks": _tasks(own=False)}


def text() -> str:
    """Return the index as the file holds it: an entry per line, so that changes read well."""
    from keymix import recipes

    listed = [{"name": name, "summary": recipes.summary(name)} for name in recipes.names()]
    kinds = [
        f'"{kind}": [\n' + ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n]"
        for kind, rows in (("models", _models()), ("recipes", listed))
    ]
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def read() -> dict[str, list[dict[str, Any]]]:
    """Read what of keymix's own there is: the file, and what the files of the others say."""
    from keymix.data.specs import built_in

    found: dict[str, list[dict[str, Any]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return {
        "models": found["models"],
        "mixers": _own_mixers(),
        "recipes": found["recipes"],
        "data": _data(built_in().values()),
        "tasks": _tasks(own=True),
    }


def main() -> int:
    """Write the index."""
    PATH.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
