# SPDX-License-Identifier: Apache-2.0
"""keymix from a checkout, on a machine that lacks packages."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import keymix
from keymix.cli import VERBS, main

SRC = Path(keymix.__file__).parent


@pytest.mark.parametrize(
    ("words", "module", "install"),
    [
        (["train", "--help"], "yaml", "pip install 'PyYAML'"),
        (["train", "digits_vit", "--print-config"], "yaml", "pip install 'PyYAML'"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    words: list[str],
    module: str,
    install: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [n for n in sys.modules if n.startswith("keymix.cli.")]:
        monkeypatch.delitem(sys.modules, name)  # what they took from the package goes with them
    monkeypatch.setitem(sys.modules, module, None)
    assert main(words) == 2
    text = capsys.readouterr().err.splitlines()
    assert text == [f"keymix: error: package {module!r} is not installed: {install}"]


@pytest.mark.parametrize("code", ["import keymix.not_there", "import json.not_there", "import _no"])
def test_no_fault_of_our_own_is_called_a_missing_package(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verb(name: str) -> None:
        exec(code)

    monkeypatch.setitem(VERBS, "verb", "")
    monkeypatch.setattr("keymix.cli.importlib.import_module", verb)
    monkeypatch.setattr(sys, "stdlib_module_names", {"_no"})  # a Python built without a part
    with pytest.raises(ModuleNotFoundError):
        main(["verb"])


@pytest.mark.slow
def test_a_checkout_trains_and_compares_without_what_few_machines_have() -> None:
    """No place asks for SpikingJelly."""
    asked = {
        (alias.name.partition(".")[0], file.relative_to(SRC).as_posix())
        for file in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for alias in (
            node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")]
        )
    }
    rare = {"spikingjelly", "loguru"}
    assert not {each for each in asked if each[0] in rare}
