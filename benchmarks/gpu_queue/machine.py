# SPDX-License-Identifier: Apache-2.0
"""What the machine has: GPU, free memory, versions, and which packages must be brought along."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Loaded before steps are forked, so that each starts at once. None of them may touch the GPU:
# what a process does with CUDA its forks cannot do again.
PRELOADED = ("numpy", "torch", "torchvision", "timm", "lightning_fabric")
_SHOWN = ("torch", "triton", "torchvision", "timm", "lightning_fabric", "numpy")
# What keymix imports.
NEEDED = (
    "torch",
    "torchvision",
    "timm",
    "lightning_fabric",
    "torchmetrics",
    "segmentation_models_pytorch",
    "safetensors",
    "rich",
    "jinja2",
    "matplotlib",
    "sklearn",
    "scipy",
    "pyarrow",
    "PIL",
    "numpy",
    "huggingface_hub",
    "filelock",
    "jaxtyping",
    "yaml",
)

# Where a module has another name.
_WHEELS = {
    "PIL": "pillow",
    "lightning_fabric": "lightning-fabric",
    "sklearn": "scikit-learn",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}


def preload() -> None:
    """Import what every step needs; a package that is missing is found by `missing`."""
    for name in PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def missing(packages: Iterable[str]) -> list[str]:
    """List the modules that cannot be found."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def how_to_bring(packages: Iterable[str]) -> str:
    """Say how to bring missing packages: wheels for this Python, fetched on another machine."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(sorted({_WHEELS.get(name, name) for name in packages}))
    return (
        "python -m pip download --no-deps --only-binary=:all: --implementation cp "
        f"--python-version {version} --platform manylinux_2_28_x86_64 --platform "
        f"manylinux2014_x86_64 --platform any -d WHEELS {names}\n"
        "and run the queue with --wheels WHEELS."
    )


def install(wheels: Path, site: Path) -> None:
    """Put wheels into a folder of their own and on the path, of child processes too.

    Raises:
        ValueError: If there is none, or pip refuses them.
    """
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    if not files:
        raise ValueError(f"--wheels {wheels}: there is no *.whl")
    named = "".join(f"{Path(file).name}\n" for file in files)
    noted = site / "wheels.txt"
    if not noted.is_file() or noted.read_text(encoding="utf-8") != named:
        part = site.with_name(f"{site.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        done = subprocess.run(
            [*pip, "--no-compile", "--upgrade", "--target", str(part), *files],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
            raise ValueError(f"--wheels {wheels}: {(lines or [done.stderr.strip()])[0]}")
        (part / noted.name).write_text(named, encoding="utf-8")
        shutil.rmtree(site, ignore_errors=True)
        part.rename(site)
    sys.path.insert(1, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [part for part in (os.environ.get("PYTHONPATH"), str(site)) if part]
    )
    importlib.invalidate_caches()


def look(device: str) -> dict[str, Any]:
    """Describe hardware and versions, and run a kernel; for a process that may touch the GPU.

    Returns:
        Plain values; ``free_gib`` and ``total_gib`` of the GPU are missing on a CPU.
    """
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": "cpu",
        **{name: _version(name) for name in _SHOWN},
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        if float((ones @ ones).float().mean()) != 256.0:  # exact in bfloat16
            raise RuntimeError("a matrix product on the GPU is wrong")
        found |= {
            "device": torch.cuda.get_device_name(0),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
            "cuda": torch.version.cuda,
            "driver": _driver(),
            "free_gib": round(free / 2**30, 1),
            "total_gib": round(total / 2**30, 1),
        }
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's own name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _driver() -> str | None:
    """Version of the GPU's driver, where nvidia-smi gives it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
