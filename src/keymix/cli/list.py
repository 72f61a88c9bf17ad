# SPDX-License-Identifier: Apache-2.0
"""``keymix list``: models, mixers, recipes, data sets and tasks, from an index, at once."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

from keymix.cli.console import VerbParser, line, out, say, table
from keymix.cli.index import read, registered
from keymix.errors import UserError, unknown

KINDS = ("models", "mixers", "recipes", "data", "tasks")
Row = dict[str, Any]


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix list",
        description="List models, mixers, recipes, data sets and tasks.",
        epilog="examples:\n  keymix list\n  keymix list mixers\n  keymix list models '*ska*'\n\n"
        "keymix count and keymix train also take timm's models by name, and put a mixer into its "
        "ViT, DeiT, CaiT, Swin and MetaFormer.",
    )
    made.add_argument(
        "kind",
        nargs="?",
        metavar="KIND",
        help="models, mixers, recipes, data or tasks (default: all)",
    )
    made.add_argument(
        "pattern", nargs="?", metavar="PATTERN", help="shell-style pattern of the name, '*ska*'"
    )
    made.add_json()
    made.add_imports()
    return made


def _matches(row: Row, pattern: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for name in _names(row))


def main(argv: list[str]) -> int:
    """Run ``keymix list``."""
    args = parser().parse_args(argv)
    kind, pattern = args.kind, args.pattern
    if kind is not None and kind not in KINDS:
        if pattern is None and any(mark in kind for mark in "*?["):
            kind, pattern = None, kind
        else:
            raise unknown("kind to list", kind, KINDS)
    index: dict[str, list[Row]] = read()
    if args.imports:
        VerbParser.run_imports(args)
        for each, rows in registered().items():
            index[each] += rows
    index["mixers"].sort(key=lambda row: (row["family"], row["name"]))
    chosen = {k: index[k] for k in KINDS if kind in (None, k)}
    if pattern is not None:
        found = {k: [r for r in rows if _matches(r, pattern)] for k, rows in chosen.items()}
        if not any(found.values()):
            names = [name for rows in chosen.values() for row in rows for name in _names(row)]
            if any(mark in pattern for mark in "*?["):
                raise UserError(f"nothing matches {pattern!r}; `keymix list` shows what there is")
            raise unknown(kind.rstrip("s") if kind else "name", pattern, names)
        chosen = {k: rows for k, rows in found.items() if rows}
    if args.json:
        say(json.dumps(chosen if kind is None else chosen[kind], indent=2, ensure_ascii=False))
        return 0
    for number, (each, rows) in enumerate(chosen.items()):
        if number and out.is_terminal:
            say()
        _print(each, rows, alone=kind is not None)
    return 0


def _names(row: Row) -> list[str]:
    return [row["name"], *row.get("aliases", ())]


def _cells(kind: str, row: Row) -> list[str]:
    if kind == "models":
        size = "x".join(str(s) for s in row["input_size"])
        params = f"{row['params']:,}" if out.is_terminal else str(row["params"])
        return [row["name"], ", ".join(row["mixers"]), size, params]
    if kind == "mixers":
        return [row["name"], ", ".join(row["aliases"]), row["family"], row["summary"]]
    if kind == "data":
        return [row["name"], "a download" if row["downloads"] else "this machine", row["summary"]]
    if kind == "tasks":
        return [row["name"], row["summary"], ", ".join(row["scores"]), row["unit"]]
    return [row["name"], row["summary"]]


HEADINGS = {
    "models": ["model", "mixer", "input", "params"],
    "mixers": ["mixer", "alias", "family", "what it is"],
    "recipes": ["recipe", "what it is"],
    "data": ["data", "comes from", "what it is"],
    "tasks": ["task", "what a model does", "scores", "unit of chance"],
}


def _print(kind: str, rows: list[Row], *, alone: bool) -> None:
    """Print one kind; in a pipe, lines of several kinds start with the kind."""
    headings, cells = HEADINGS[kind], [_cells(kind, row) for row in rows]
    left = {"models": 2, "mixers": 4, "tasks": 4}.get(kind, 3)
    if out.is_terminal or alone:
        table(headings, cells, title=None if alone else kind, left=left)
        return
    for row in cells:
        line((kind, *row))
