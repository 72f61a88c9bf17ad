# SPDX-License-Identifier: Apache-2.0
"""What a run was computed with: versions, machine, device, commit. No paths of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import torch

from keymix._version import __version__
from keymix.analysis.study_record import StudyRecord
from keymix.train import ranks
from keymix.train.record import Environment, Machine

NOT_RECORDED = "not recorded"


def cpu_model() -> str:
    """The processor's own name, or its architecture where the system does not report it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def source_commit() -> str | None:
    """Commit of the keymix checkout in use, with ``+`` if it is modified; None outside one."""
    git, room = shutil.which("git"), Path(__file__).resolve().parent
    source = next((p for p in room.parents if (p / ".git").exists()), None)
    if git is None or source is None or not (source / "src" / "keymix").is_dir():
        return None

    def ask(*words: str) -> str:
        command = [git, "-C", str(source), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = ask("rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+" if ask("status", "--porcelain", "-uno", "--", "src/keymix") else "")


def environment() -> Environment:
    """What this process computes with."""
    cuda = torch.cuda.is_available()
    packages = ("torch", "torchvision", "timm", "lightning-fabric", "numpy")
    return Environment(
        python=platform.python_version(),
        keymix=__version__,
        commit=source_commit(),
        packages={name: importlib.metadata.version(name) for name in packages},
        platform=platform.platform(),
        cpu=cpu_model(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(0) if cuda else "cpu",
        cuda=torch.version.cuda if cuda else None,
        ranks=ranks.size() if ranks.size() > 1 else None,
    )


def lines(found: Environment) -> dict[str, str]:
    """Write an environment as short lines; what it lacks is called not recorded."""
    written = _of_machine(found)
    changed = {
        key
        for part in found.earlier
        for key, line in _of_machine(part).items()
        if line != written.get(key)
    }
    if changed:
        named = ", ".join(sorted(changed))
        written["resumed"] = f"earlier parts of the run had other {named}"
    return written


def _of_machine(found: Machine) -> dict[str, str]:
    packages, commit = found.packages, found.commit or "not a checkout"
    written = {
        "keymix": _text(found.keymix),
        "commit": commit if found.known else NOT_RECORDED,
        "python": _text(found.python),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items())
        if packages is not None
        else NOT_RECORDED,
        "machine": f"{found.cpu}, {found.cores} cores" if found.cpu else NOT_RECORDED,
        "system": _text(found.platform),
        "threads": _text(found.threads),
    }
    if found.device not in (None, "cpu"):
        written["device"] = f"{found.device}, CUDA {found.cuda}"
    if found.ranks:
        written["devices"] = f"{found.ranks}, {found.strategy or 'ddp'}"
    return written


def _text(value: str | int | None) -> str:
    return NOT_RECORDED if value is None else str(value)


def frame(command: str = "") -> StudyRecord:
    """Say by which command, when and on what a record is made."""
    return StudyRecord(
        command=command,
        created=time.strftime("%Y-%m-%d %H:%M %Z"),
        environment=lines(environment()),
    )
