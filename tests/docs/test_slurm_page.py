# SPDX-License-Identifier: Apache-2.0
"""The jobs of the page on SLURM do what it says, on tiny data and without SLURM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from documents import DOCS, blocks

from keymix.analysis.memory import Peak
from keymix.cli import main
from keymix.compare.budget import Trial

SMALLER = {
    "--data folder:photos --mixers mhsa,ska,kv --seeds 5": "--limit 60 --epochs 1 --seeds 1 "
    "--mixers mhsa,ska --no-controls --no-reference",
    "--array=0-24": "--array=0-1",
}
# notes its words, a line each; sbatch runs its script for every task
KEYMIX = '#!/bin/bash\necho "$*" >> calls\n'
SBATCH = """#!/bin/bash
tasks=none
while [[ $1 == --* ]]; do
  echo "$1" >> options
  [[ $1 == --array=0-* ]] && tasks=$(seq 0 "${1#--array=0-}")
  shift
done
for task in $tasks; do
  if [[ $task == none ]]; then bash "$@"; else SLURM_ARRAY_TASK_ID=$task bash "$@"; fi
done
echo "10$(wc -l < calls)"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_plan_array_and_last_job_train_each_run_once_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [block.text for block in blocks(DOCS / "slurm.md") if block.language == "bash"]
    for old, new in SMALLER.items():
        assert any(old in text for text in texts)
        texts = [text.replace(old, new) for text in texts]
    (script,) = (text for text in texts if text.startswith("#!"))
    (submit,) = (text for text in texts if "sbatch" in text and text != script)
    for name, text in {"compare.sh": script, "keymix": KEYMIX, "sbatch": SBATCH}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    known = dict.fromkeys(
        ("softmax", "static_key"), Peak(inference_mib=1.0, training_mib=2.0, note="")
    )
    monkeypatch.setattr("keymix.compare.costs.peak_memory", lambda *_, **__: known)
    monkeypatch.setattr("keymix.compare.costs.BUDGET_SECONDS", 0.1)
    monkeypatch.setattr("keymix.compare.budget.timed", lambda *_, **__: Trial(step=1, image=1))
    subprocess.run(["bash", "-euc", submit], check=True)
    options = (tmp_path / "options").read_text().split()
    assert [each for each in options if "depend" in each] == [
        "--dependency=afterok:101", "--dependency=afterany:103",
    ]  # fmt: skip

    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    ends = [call[call.index("photos-cmp") + 1 :] for call in calls]
    assert ends == [["--plan"], ["--run", "0"], ["--run", "1"], []]
    summaries = []
    for call in calls:
        assert main(call) == 0
        summaries.append(len([*tmp_path.glob("photos-cmp/runs/*/*/summary.json")]))
    assert summaries == [0, 1, 2, 2]
    assert capsys.readouterr().out.count("runs/softmax/seed0") == 1
    assert (tmp_path / "photos-cmp/report.html").exists()
