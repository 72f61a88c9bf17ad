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


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    code = (
        "import sys; from keymix.cli import main; code = main(['completion', 'bash'])\n"
        "sys.exit(code or int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("completion") / "keymix"
    path.write_text(done.stdout)
    return str(path)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["comp"], {"compare", "completion"}),
        (["train", "digits"], {"digits_vit"}),
        (["train", "small_im"], {"small_images_vit"}),
        (["compare", "--recipe", "digits"], {"digits_vit"}),
        (["train", "digits_vit", "--optim.a"], {"--optim.accumulate"}),
        (["train", "digits_vit", "--image"], {"--image-size"}),
        (["train", "--model", "vit_nano_p2"], {"vit_nano_p2_12"}),
        (["compare", "--mixers", "mhsa,cs"], {"mhsa,cska"}),
        (["swap", "my-run", "--mixer", "cs"], {"cska"}),
        (["analyze", "mem"], {"memory"}),
        (["analyze", "memory", "--order", "l"], {"linear"}),
        (["data", "check", "cifar100"], {"cifar100"}),
        (["eval", "my-run", "--split", ""], {"test", "val", "train"}),
    ],
)  # fmt: skip
def test_bash_completes(words: list[str], found: set[str], script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", script, "keymix", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert set(done.stdout.split()) == found


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_folders_of_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "digits-run").mkdir()
    command = ["bash", "-c", COMPLETE, "bash", script, "keymix", "train", "digits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert set(done.stdout.split()) == {"digits_vit", "digits-run"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)
    assert "_keymix_mixers" in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
