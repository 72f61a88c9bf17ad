# SPDX-License-Identifier: Apache-2.0
"""Small archives in the layouts of CIFAR, SVHN and Fashion-MNIST, and a server that hands them out.

torchvision's own addresses and checksums are replaced by those of the small files, so downloading,
checking and unpacking run as they do on the real ones.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import pickle
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from torchvision import datasets

TRAIN, TEST = 60, 20


def pixels(name: str, split: str) -> np.ndarray:
    """Random images [N, C, H, W] of a set's shape."""
    rng = np.random.default_rng(sum(map(ord, name + split)))
    shape = (1, 28, 28) if name == "fashion_mnist" else (3, 32, 32)
    count = TRAIN if split == "train" else TEST
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(split: str) -> np.ndarray:
    return np.arange(TRAIN if split == "train" else TEST) % 10


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def write(name: str, folder: Path, address: str, patch: pytest.MonkeyPatch) -> list[Path]:
    """Write the set's files into ``folder`` and point torchvision to ``address``."""
    makers = {"svhn": _svhn, "fashion_mnist": _fashion}
    if name in makers:
        return makers[name](folder, address, patch)
    return _cifar(name, folder, address, patch)


def _cifar(name: str, folder: Path, address: str, patch: pytest.MonkeyPatch) -> list[Path]:
    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    key = {"cifar10": "labels", "cifar100": "fine_labels"}[name]
    members: dict[str, bytes] = {}

    def batches(names: list[str], split: str) -> list[list[str]]:
        images, numbers = pixels(name, split), labels(split)
        listed = []
        for part, member in enumerate(names):
            rows = slice(part * len(images) // len(names), (part + 1) * len(images) // len(names))
            entry = {"data": images[rows].reshape(-1, 3072), key: numbers[rows].tolist()}
            members[member] = pickle.dumps(entry)
            listed.append([member, md5(members[member])])
        return listed

    train = batches([member for member, _ in kind.train_list], "train")
    test = batches([member for member, _ in kind.test_list], "test")
    meta = kind.meta["filename"]
    members[meta] = pickle.dumps({kind.meta["key"]: [f"class {i}" for i in range(10)]})
    archive = folder / kind.filename
    with tarfile.open(archive, "w:gz") as tar:
        for member, content in members.items():
            info = tarfile.TarInfo(f"{kind.base_folder}/{member}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    patch.setattr(kind, "url", f"{address}/{kind.filename}")
    patch.setattr(kind, "tgz_md5", md5(archive.read_bytes()))
    patch.setattr(kind, "train_list", train)
    patch.setattr(kind, "test_list", test)
    patch.setattr(kind, "meta", {**kind.meta, "md5": md5(members[meta])})
    return [archive]


def _svhn(folder: Path, address: str, patch: pytest.MonkeyPatch) -> list[Path]:
    listed, files = {}, []
    for split in ("train", "test"):
        file = folder / f"{split}_32x32.mat"
        numbers = labels(split)
        images = pixels("svhn", split).transpose(2, 3, 1, 0)
        scipy.io.savemat(file, {"X": images, "y": np.where(numbers == 0, 10, numbers)[:, None]})
        listed[split] = [f"{address}/{file.name}", file.name, md5(file.read_bytes())]
        files.append(file)
    patch.setattr(datasets.SVHN, "split_list", listed)
    return files


def _fashion(folder: Path, address: str, patch: pytest.MonkeyPatch) -> list[Path]:
    files = []
    for split, stem in (("train", "train"), ("test", "t10k")):
        images = pixels("fashion_mnist", split)
        head = b"".join(n.to_bytes(4, "big") for n in (2051, len(images), 28, 28))
        numbers = (2049).to_bytes(4, "big") + len(images).to_bytes(4, "big")
        for kind, content in (
            ("images-idx3", head + images.tobytes()),
            ("labels-idx1", numbers + labels(split).astype(np.uint8).tobytes()),
        ):
            file = folder / f"{stem}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(content))
            files.append(file)
    patch.setattr(datasets.FashionMNIST, "mirrors", [f"{address}/"])
    resources = [(file.name, md5(file.read_bytes())) for file in files]
    patch.setattr(datasets.FashionMNIST, "resources", resources)
    return files


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *expected: object) -> None:
        self.server.asked.append(f"{self.command} {self.path}")  # type: ignore[attr-defined]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder on this machine; yields the address and what was asked for."""
    handler = functools.partial(_Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked = []  # type: ignore[attr-defined]
        # how often it asks whether to end
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
        finally:
            server.shutdown()
