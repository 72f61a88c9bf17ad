# SPDX-License-Identifier: Apache-2.0
"""Reading the documents: their fenced blocks, commands, links and tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
    if path.is_file()
]

_FENCE = re.compile(r"^(\s*)(`{3,})(\S*)")
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
_SHELL = ("bash", "sh", "console", "shell")
_BREAKS = frozenset(["&&", "||", ";", "|", ">", ">>", "<", "&"])


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, where it starts, and why it is not run, if so."""

    path: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """Read a document's fenced blocks in order."""
    found: list[Block] = []
    inside: list[str] | None = None
    before, indent, fence, language, start = "", "", "", "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark = _FENCE.match(line)
        if inside is None and mark:
            indent, fence, language, start, inside = *mark.groups(), number, []
        elif inside is not None and mark and mark[2] == fence and not mark[3]:
            why = _NOT_RUN.match(before)
            text = "\n".join(each.removeprefix(indent) for each in inside) + "\n"
            found.append(Block(path, start, language, text, why[1] if why else None))
            inside, before = None, ""
        elif inside is not None:
            inside.append(line)
        elif line.strip():
            before = line.strip()
    assert inside is None, f"{path}:{start}: this block is never closed"
    return found


def prose(path: Path) -> str:
    """A document's text without its fenced blocks."""
    lines: list[str] = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Read a document's keymix commands, with where they stand: the words after ``keymix``."""
    for block in blocks(path):
        if block.language in _SHELL:
            for line in block.text.replace("\\\n", " ").splitlines():
                yield from _commands(str(block), line.removeprefix("$ "))
    for span in re.findall(r"(?<!`)`(keymix [^`]+)`", prose(path)):
        yield from _commands(str(path.relative_to(ROOT)), span)


def _commands(where: str, line: str) -> Iterator[tuple[str, list[str]]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = list(lexer)
    while words:
        count = next((i for i, word in enumerate(words) if word in _BREAKS), len(words))
        command, words = words[:count], words[count + 1 :]
        if command[:1] == ["keymix"]:
            yield where, command[1:]
        elif command[:3] == ["python", "-m", "keymix"]:
            yield where, command[3:]


def table(text: str, marker: str) -> list[list[str]]:
    """Read the rows of the table that follows an HTML comment starting with ``marker``."""
    after = text.partition(f"<!-- {marker}")[2]
    assert after, f"there is no <!-- {marker} … -->"
    rows: list[list[str]] = []
    for line in after.splitlines()[1:]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]  # without headings and rule
