# SPDX-License-Identifier: Apache-2.0
"""The command line of ``keymix compare``: one-line refusals, quick help, clean output."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keymix.analysis.statistics import Interval, Summary
from keymix.cli import main
from keymix.cli.comparison import print_result
from keymix.compare.budget import Trial
from keymix.compare.run import Comparison
from keymix.report.record import CostRow, Outcome, OutcomeRow, opened

SMALL = ["--mixers", "mhsa", "--seeds", "1", "--limit", "100", "--epochs", "1", "--processes", "1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--mixers mhsa,sku", "ska"),
        ("--mixers mhsa,ska(activation=rellu)", "activation"),
        ("--mixers mhsa(num_heads=5),ska", "num_heads=5"),
        ("--mixers identity --no-controls", "at least two"),
        ("--mixer mhsa", "--mixers"),
        ("--model vit_nano_p4_13", "vit_nano_p4_12"),
        ("--optim.lrr 1", "--optim.lr"),
        ("--optim.lr soon", "optim.lr"),
        ("--optim.lr", "needs a value"),
        ("--seed 3", "--seeds"),
        ("--seeds three", "--seeds"),
        ("--seeds 0", "at least 1"),
        ("--baseline cska --mixers mhsa,ska", "baseline"),
        ("--match macs", "params"),
        ("--recipe digit_vit", "digits_vit"),
        ("--data digit", "digits"),
        ("--data folder:/no/such/place", "/no/such/place"),
        ("--epochs 0", "epochs"),
        ("--processes 0", "processes = 0"),
        ("--processes 100000", "processes = 100000"),
        ("--mixers mhsa --ann", "--ann: vit_nano_p4_12 has no spikes"),
        ("--processes many", "--processes"),
        ("--images --no-images", "--images and --no-images"),
        ("--import missing.py", "missing.py"),
        ("--run many", "--run"),
        ("--run 0 --plan", "--plan and --run"),
        ("--run 0 --overwrite", "--run and --overwrite"),
        ("--plan --overwrite", "--plan and --overwrite"),
        ("photos", "--data"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words, expected, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", *words.split(), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("keymix: error: ")
    assert expected in lines[0]
    assert captured.out == ""
    assert not out.exists()


def test_a_foreign_folder_and_a_file_are_refused(tmp_path, capsys):
    (tmp_path / "note.txt").write_text("mine", encoding="utf-8")
    for place in (tmp_path, tmp_path / "note.txt"):
        assert main(["compare", "--out", str(place)]) == 2
        assert str(place) in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_help_needs_no_torch():
    code = (
        "import sys; from keymix.cli import main; code = main(['compare', '--help-all'])\n"
        "sys.exit(code or int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("--mixers", "--seeds", "--match", "--optim.lr", "--no-controls", "examples"):
        assert word in done.stdout


@pytest.fixture
def _no_fresh_process(monkeypatch):
    from keymix.analysis.memory import Peak

    def known(builds, *args, **more):
        del args, more
        return dict.fromkeys(builds, Peak(inference_mib=1.0, training_mib=2.0, note=""))

    monkeypatch.setattr("keymix.compare.costs.peak_memory", known)
    monkeypatch.setattr("keymix.compare.costs.BUDGET_SECONDS", 0.1)
    steady = Trial(step=0.01, image=1e-4)
    monkeypatch.setattr("keymix.compare.budget.timed", lambda *_, **__: steady)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_fresh_process")
def test_piped_it_reports_a_table_the_verdicts_and_where_the_report_is(tmp_path, capsys):
    out = tmp_path / "out"
    words = [*SMALL, "--match", "params", "--out", str(out)]
    assert main(["compare", *words]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if "\t" in line) :]
    assert lines[0].split("\t")[:2] == ["mixer", "accuracy, %"]
    assert {line.split("\t")[0] for line in lines[1:]} >= {"softmax", "identity"}
    assert str(out / "report.html") in captured.out
    assert "3/3 done" in captured.err
    assert "\nidentity: not matched: a control keeps its size" in "\n" + captured.err
    record = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert record["command"].startswith("keymix compare --mixers mhsa --seeds 1")
    unlearned = any(found["kind"] == "nothing_learned" for found in record["findings"])
    assert ("- identity: " in captured.out) != unlearned

    assert main(["compare", *words, "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert [row["mixer"] for row in stored["mixers"]] == ["softmax", "identity", "plain network"]
    assert stored["mixers"][0]["costs"]["params"] > 0
    assert stored["failed"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("_no_fresh_process")
def test_a_mixer_of_ones_own_is_compared_by_import(tmp_path, capsys):
    own = Path(tmp_path) / "my_mixer.py"
    own.write_text(
        '''
from keymix.mixers.base import Site, TokenMixer, Traits
from keymix.mixers.registry import register_mixer


@register_mixer("global_mean")
class GlobalMean(TokenMixer):
    """Every token becomes the mean of all."""

    traits = Traits(maskable=False)

    def forward(self, x, grid=None, bias=None):
        return x.mean(-2, keepdim=True).expand_as(x)
''',
        encoding="utf-8",
    )
    words = [*SMALL[2:], "--mixers", "mhsa,global_mean", "--import", str(own), "--no-controls"]
    assert main(["compare", *words, "--out", str(tmp_path / "out")]) == 0
    assert "global_mean" in capsys.readouterr().out


def test_the_table_says_why_there_is_no_interval_over_seeds(tmp_path, capsys):
    note = "the difference is the same at every seed, so its spread cannot be estimated"
    seeds = Interval(n=2, difference=0.01, low=None, high=None, p=None, note=note)
    one = replace(seeds, n=1, note="one seed has no spread")
    summary = Summary(n=2, mean=0.5, sd=0.0)
    rows = tuple(
        OutcomeRow(
            mixer=name,
            scores={"top1": summary, "top5": Summary(n=0, mean=None, sd=None)},
            seeds=expected,
            images=None,
            interval=expected,
            degree="unclear" if expected else None,
        )
        for name, expected in (("softmax", None), ("static_key", seeds), ("key_value", one))
    )
    stored = Path(__file__).parents[2] / "docs/results/cifar10-20-epochs/results.json"
    record = replace(
        opened(json.loads(stored.read_text("utf-8")), where="it"),
        baseline="softmax",
        costs={row.mixer: CostRow(params=0) for row in rows},
        outcome=Outcome(last=rows, best=rows),
    )
    print_result(Comparison(out=tmp_path, record=record))
    out = capsys.readouterr().out
    assert "\nstatic_key\t50.0 ± 0.0\t+1.0\t2 seeds: no interval\t" in out
    assert out.count(f"no interval over seeds: {note}.") == 1
    assert "one seed has no spread" not in out
