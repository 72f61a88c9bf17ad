# SPDX-License-Identifier: Apache-2.0
"""A shell completes verbs, options and names with the script that ``keymix completion`` prints."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keymix.cli import VERBS, main

pytest.importorskip("shtab", reason="it writes the scripts")

COMPLETE = """\
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_keymix 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""

CASES = [
    (["comp"], {"compare", "completion"}),
    (["train", "digits"], {"digits_vit"}),
    (["train", "small_im"], {"small_images_vit"}),
    (["compare", "--recipe", "digits"], {"digits_vit"}),
    (["train", "digits_vit", "--optim.a"], {"--optim.accumulate"}),
    (["train", "digits_vit", "--image"], {"--image-size"}),
    (["train", "--model", "vit_nano_p2"], {"vit_nano_p2_12"}),
    (["compare", "--mixers", "cs"], {"cska"}),
    (["swap", "my-run", "--mixer", "cs"], {"cska"}),
    (["analyze", "mem"], {"memory"}),
    (["analyze", "memory", "--order", "l"], {"linear"}),
    (["analyze", "collapse", "my-run", "vit_nano_p2"], {"vit_nano_p2_12"}),
    (["data", "check", "cifar100"], {"cifar100"}),
    (["eval", "my"], {"my-run"}),
    (["eval", "my-run", "--split", ""], {"test", "val", "train"}),
    (["list", "m"], {"models", "mixers"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Print the script of each shell into a file; no torch is loaded for it."""
    code = (
        "import sys; from keymix.cli import main; code = main(['completion', sys.argv[1]])\n"
        "sys.exit(code or int('torch' in sys.modules))"
    )
    folder, made = tmp_path_factory.mktemp("completion"), {}
    for shell, name in (("bash", "keymix"), ("zsh", "_keymix"), ("fish", "keymix.fish")):
        command = [sys.executable, "-c", code, shell]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made[shell] = folder / name
        made[shell].write_text(done.stdout)
    return made


def in_bash(script: Path, words: list[str], cwd: Path) -> set[str]:
    command = ["bash", "-c", COMPLETE, "bash", str(script), "keymix", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("words", "found"), CASES)
def test_a_shell_completes(
    words: list[str], found: set[str], scripts: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "my-run").mkdir()
    assert in_bash(scripts["bash"], words, tmp_path) == found


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_verb(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text()
    assert all(verb in text for verb in VERBS)
    assert " mhsa " in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
