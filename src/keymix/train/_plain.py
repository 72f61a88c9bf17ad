# SPDX-License-Identifier: Apache-2.0
"""YAML and JSON from outside: read within bounds, and plain values alone."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from keymix.data.files import regular
from keymix.errors import UserError, one_line

MOST_BYTES = 2**18
"""Of a file; the longest recipe has 3 kB."""
_DEPTH, _VALUES, _ALIASES = 32, 10_000, 100


class _Loader(yaml.SafeLoader):
    """Reads YAML of few levels and few aliases, without a key that is given twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.level = self.aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, unless it lies too deep."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        self.aliases += isinstance(event, yaml.AliasEvent)
        if self.level >= _DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=mark)
        if self.aliases > _ALIASES:
            raise yaml.MarkedYAMLError(problem=f"more than {_ALIASES} aliases", problem_mark=mark)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping whose keys differ."""
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    told = _twice(key.value)
                    raise yaml.MarkedYAMLError(problem=told, problem_mark=key.start_mark)
                seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what ``<<`` names, unless it grows beyond measure."""
        super().flatten_mapping(node)
        if len(node.value) > _VALUES:
            mark = node.start_mark
            raise yaml.MarkedYAMLError(problem=f"more than {_VALUES} values", problem_mark=mark)


_TOO_DEEP = f"more than {_DEPTH} levels of lists and mappings"


def _twice(key: str) -> str:
    return f"the key {key!r} is given twice"


def read_yaml(text: str) -> Any:
    """Read YAML text.

    Raises:
        UserError: If it is none, lies deeper than any recipe, or a key is given twice.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise UserError(" ".join(str(error).split())) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, no such date
        raise UserError(str(error)) from None
    finally:
        loader.dispose()


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(_twice(key))
        found[key] = value
    return found


def read_file(path: Path) -> Any:
    """Read a YAML or, by its name, a JSON file.

    Raises:
        UserError: If it cannot be read, is no regular file, or too large; without the file's name.
    """
    try:
        if (size := regular(path).stat().st_size) > MOST_BYTES:
            raise UserError(f"it has {size:,} bytes, and a recipe has at most {MOST_BYTES:,}")
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".json":
            return read_yaml(text)
        return json.loads(text, object_pairs_hook=_pairs)
    except UserError:
        raise
    except OSError as error:
        raise UserError(error.strerror or str(error)) from None
    except RecursionError:
        raise UserError(_TOO_DEEP) from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise UserError(" ".join(str(error).split())) from None


def check_plain(values: Mapping[Any, Any]) -> None:
    """Refuse what no recipe holds, and what cannot be written again as JSON.

    Args:
        values: Nested mappings and lists, as YAML and JSON give them.

    Raises:
        UserError: On a key that is no text, a value of another type than JSON's, text that no file
            can hold, too many levels (a list may hold itself) or too many values.
    """
    left: list[tuple[str, Any, int]] = [("", values, 0)]
    count = 0
    while left:
        path, value, level = left.pop()
        count += 1
        if level > _DEPTH:
            raise UserError(f"{path[:80]}…: {_TOO_DEEP}.")
        if count > _VALUES:
            raise UserError(f"the recipe has more than {_VALUES:,} values.")
        if isinstance(value, Mapping):
            left += [(_below(path, key), each, level + 1) for key, each in value.items()]
        elif isinstance(value, list | tuple):
            left += [(path, each, level + 1) for each in value]
        elif isinstance(value, str):
            _check_text(path, value)
        elif value is not None and not isinstance(value, Real):
            kind = type(value).__name__
            raise UserError(f"{path} = {value!r} ({kind}) is no number, text, list or mapping.")


def _below(path: str, key: Hashable) -> str:
    if not isinstance(key, str):
        where = f" of {path}" if path else ""
        raise UserError(f"the key {key!r}{where} is no text: put quotes around it.")
    return f"{path}.{key}" if path else key


def _check_text(path: str, text: str) -> None:
    try:
        text.encode("utf-8", errors="surrogateescape")  # names of files may hold such bytes
        whole = "\0" not in text
    except UnicodeEncodeError:
        whole = False
    if not whole:
        raise UserError(f"{one_line(path)} = {text!r}: a character that no text file holds.")
