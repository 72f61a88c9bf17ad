# SPDX-License-Identifier: Apache-2.0
"""A shell completes verbs, options and names with the script that ``keymix completion`` prints."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
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


ZSH = """\
PS1= fpath=($HOME $fpath)
autoload -Uz compinit; compinit -u -d $HOME/dump
_listed () {
  compadd () {
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
    local -a hits
    builtin compadd -A hits "$@"; builtin compadd "$@"
    print -rl -- $IPREFIX${^hits} >> $HOME/found
  }
  _main_complete
  unfunction compadd
  touch $HOME/done
}
zle -C listed complete-word _listed; bindkey '^I' listed
touch $HOME/ready
"""
"""Makes Tab write what it offers to a file."""

CASES = [
    (["comp"], {"compare", "completion"}),
    (["train", "digits"], {"digits_vit"}),
    (["train", "small_im"], {"small_images_vit"}),
    (["compare", "--recipe", "digits"], {"digits_vit"}),
    (["train", "digits_vit", "--optim.a"], {"--optim.accumulate"}),
    (["train", "digits_vit", "--image"], {"--image-size"}),
    (["train", "--model", "vit_nano_p2"], {"vit_nano_p2_12"}),
    (["compare", "--mixers", "mhsa,cs"], {"mhsa,cska"}),
    (["swap", "my-run", "--mixer", "cs"], {"cska"}),
    (["swap", "my-run", "--mixer", "ska/mh"], {"ska/mhsa"}),
    (["analyze", "mem"], {"memory"}),
    (["analyze", "memory", "--order", "l"], {"linear"}),
    (["analyze", "collapse", "my-run", "vit_nano_p2"], {"vit_nano_p2_12"}),
    (["data", "check", "cifar100"], {"cifar100"}),
    (["eval", "my-run", "--split", ""], {"test", "val", "train"}),
    (["list", "m"], {"models", "mixers"}),
]  # fmt: skip


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell}")


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


def in_fish(script: Path, words: list[str], cwd: Path) -> set[str]:
    line = " ".join(["keymix", *words])
    command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    return {each.partition("\t")[0].rstrip("/") for each in done.stdout.splitlines()}


def in_zsh(script: Path, words: list[str], cwd: Path) -> set[str]:
    """Press Tab in an interactive zsh that finds the script in its ``fpath``."""
    home = cwd / "home"
    home.mkdir()
    (home / "_keymix").write_text(script.read_text())
    (home / "set_up").write_text(ZSH)
    (home / "found").touch()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "HOME": str(home), "TERM": "xterm"})
    try:
        os.write(terminal, f"source {home}/set_up\n".encode())
        _wait_for(home / "ready", terminal)
        os.write(terminal, " ".join(["keymix", *words]).encode() + b"\t")
        _wait_for(home / "done", terminal)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return {line for line in (home / "found").read_text().splitlines() if line}


def _wait_for(path: Path, terminal: int) -> None:
    """Wait for a file of the shell's, and read what it prints meanwhile."""
    printed = b""
    for _ in range(600):
        if path.exists():
            return
        if select.select([terminal], [], [], 0.05)[0]:
            printed += os.read(terminal, 65536)
    pytest.fail(f"zsh does not answer: {printed[-500:]!r}")


SHELLS = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}
EACH = [pytest.param(shell, marks=needs(shell)) for shell in SHELLS]


@pytest.mark.parametrize("shell", EACH)
@pytest.mark.parametrize(("words", "found"), CASES)
def test_a_shell_completes(
    shell: str, words: list[str], found: set[str], scripts: dict[str, Path], tmp_path: Path
) -> None:
    assert SHELLS[shell](scripts[shell], words, tmp_path) == found


@pytest.mark.parametrize("shell", EACH)
def test_a_shell_completes_folders_of_runs(
    shell: str, scripts: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "digits-run").mkdir()
    found = SHELLS[shell](scripts[shell], ["train", "digits"], tmp_path)
    assert found == {"digits_vit", "digits-run"}


@pytest.mark.parametrize("shell", [pytest.param(s, marks=needs(s)) for s in ("zsh", "fish")])
def test_a_value_may_follow_an_equals_sign(
    shell: str, scripts: dict[str, Path], tmp_path: Path
) -> None:
    (found,) = SHELLS[shell](scripts[shell], ["compare", "--mixers=mhsa,cs"], tmp_path)
    assert found == "--mixers=mhsa,cska"


@needs("fish")
def test_a_second_word_is_listed_with_what_it_does(scripts: dict[str, Path]) -> None:
    command = ["fish", "--no-config", "-c", f"source {scripts['fish']}; complete -C 'keymix data '"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    name, about = done.stdout.strip().split("\t")
    assert name == "check"
    assert " " in about


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_verb(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text()
    assert all(verb in text for verb in VERBS)
    assert "_keymix_mixers" in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
