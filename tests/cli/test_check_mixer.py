# SPDX-License-Identifier: Apache-2.0
"""``keymix check-mixer``: what holds of a user's own mixer, one clear line if a rule does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broken_mixers import BROKEN, GOOD, HEAD, MEAN, written
from keymix.cli import main
from keymix.mixers.user_mixers import RULES

NAMES = [rule.name for rule in RULES]

SUITE_ONLY = {
    "gradients": HEAD
    + MEAN.replace(
        "(site.dim, site.dim)", "(site.dim, site.dim)\n        self.idle = nn.Linear(2, 2)"
    ),
    "options": HEAD + MEAN.replace("(self, site):", "(self, site, *, width: int = 3):"),
    "state": HEAD
    + MEAN.replace("(site.dim, site.dim)", "(site.dim, site.dim).requires_grad_()")
    .replace(
        "super().__init__(site)",
        "super().__init__(site)\n        self.table = torch.rand(site.dim)",
    )
    .replace("return self.proj(", "return self.table.to(x) * self.proj("),
    "meta": HEAD
    + MEAN.replace("nn.Linear(site.dim, site.dim)", "nn.Linear(site.dim, site.dim, device='cpu')"),
}


def checked(capsys: pytest.CaptureFixture[str], file: Path, *more: str) -> tuple[int, str, str]:
    code = main(["check-mixer", str(file), *more])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_all_rules_hold(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = checked(capsys, written(tmp_path, text))
    heads, *rows = [line.split("\t") for line in out.splitlines()]
    assert heads == ["mixer", "rule", "holds", "what"]
    assert [row[:3] for row in rows] == [["mine", name, "yes"] for name in NAMES]
    assert (code, err) == (0, "")


@pytest.mark.parametrize("rule", ["shape: averaged away", "signature", "maskable", *SUITE_ONLY])
def test_a_broken_rule_ends_with_2_and_one_line(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SUITE_ONLY.get(rule) or BROKEN[rule]
    code, out, err = checked(capsys, written(tmp_path, text), "--json")
    (record,) = json.loads(out)
    broken = {each["name"]: each["why"] for each in record["rules"] if not each["holds"]}
    name = rule.partition(": ")[0]
    tried = [each["name"] for each in record["rules"]]
    assert tried == NAMES[: len(tried)]
    assert list(broken) == [name]
    assert broken[name]
    assert not record["holds"]
    assert code == 2
    assert len(err.splitlines()) == 1
    for part in ("'mine'", name, "mine.py", "docs/own-mixer.md"):
        assert part in err


def test_a_mixer_that_a_module_of_the_file_registers_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_a_mixer_file.py").write_text(GOOD["a mean"], encoding="utf-8")
    file = written(tmp_path, "import helper_of_a_mixer_file\n")
    for _ in range(2):  # the second time, the file was imported before
        code, out, err = checked(capsys, file)
        assert (code, err) == (0, "")
        assert {line.split("\t")[0] for line in out.splitlines()[1:]} == {"mine"}


def test_a_file_that_takes_the_place_of_one_of_its_name_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        assert checked(capsys, written(tmp_path / folder, GOOD["a mean"]))[0] == 0


def test_an_option_without_a_default_is_given_by_mixer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = HEAD + MEAN.replace("(self, site):", "(self, site, *, gain: float):")
    file = written(tmp_path, text.replace("self.proj = ", "self.gain = gain\n        self.proj = "))
    file.write_text(file.read_text().replace("return self.proj(", "return self.gain * self.proj("))
    code, _, err = checked(capsys, file)
    assert code == 2
    assert "gain" in err
    code, out, _ = checked(capsys, file, "--mixer", "mine(gain=2)")
    assert code == 0
    assert "options\tyes" in out
