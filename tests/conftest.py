# SPDX-License-Identifier: Apache-2.0
"""What all tests share: seeds, one thread a worker, real data if any, poisoned memory."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

import run_options

# SpikingJelly brings torchaudio along, whose newest wheels do not load with newer PyTorch, and
# transformers imports it wherever it is installed: for the tests there is none.
sys.modules.setdefault("torchaudio", None)  # type: ignore[arg-type]


CASES = 4  # of one test, where shapes are checked
CONTRACT = Path(__file__).parent / "contract"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the options of the contract tests, which all mixers keep wherever they are computed."""
    group = parser.getgroup("contract", "contract tests")
    group.addoption("--device", choices=run_options.DEVICES, default="cpu", help="cpu or cuda")
    group.addoption(
        "--precision",
        choices=run_options.PRECISIONS,
        default="64",
        help="64 or 32 bits, or autocast of float32 to bfloat16 (bf16) or float16 (16)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hand the options on before a test module is imported; refuse a device that is not there."""
    run_options.device = config.getoption("--device")
    run_options.precision = config.getoption("--precision")
    _as_in_the_foreground()
    _children_run_this_code()
    os.getloadavg = lambda: (0.0, 0.0, 0.0)  # nothing says that other tests keep the cores busy
    if os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported
    if run_options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: PyTorch finds no CUDA device here")


def _as_in_the_foreground() -> None:
    """Let Ctrl-C interrupt tests and what they start; a shell's ``&`` has SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _children_run_this_code() -> None:
    """Let processes that tests start import the keymix under test from any working directory.

    That need not be the installed one, and ``PYTHONPATH`` may be relative or empty.
    """
    spec = importlib.util.find_spec("keymix")
    assert spec is not None
    assert spec.origin is not None
    room = str(Path(spec.origin).parents[1])
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if places[0] != room:
        os.environ["PYTHONPATH"] = os.pathsep.join([room, *filter(None, places)])


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is no such device; torch is asked only then."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _refuse_options_elsewhere(items: list[pytest.Item]) -> None:
    """Refuse another device or precision for tests that know of none."""
    if (run_options.device, run_options.precision) == ("cpu", "64"):
        return
    for item in items:
        if not item.path.is_relative_to(CONTRACT):
            raise pytest.UsageError(
                f"--device and --precision are for tests/contract, not for {item.nodeid}"
            )


def _checks_shapes(config: pytest.Config) -> bool:
    return bool(config.getoption("--jaxtyping-packages", default=None))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where shapes are checked, take about ``CASES`` of the parameters of each test.

    Checks make calls several times as long, and what they say hangs on the way through the code,
    of which a test's many parameters take few. Tests take different ones; one marked
    ``every_path`` takes all.
    """
    _refuse_options_elsewhere(items)
    _skip_without_cuda(items)
    if not _checks_shapes(config):
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for name, cases in tests.items():
        every = -(-len(cases) // CASES)
        if cases[0].get_closest_marker("every_path") is None:
            first = zlib.crc32(name.encode()) % every
            left_out |= set(cases) - set(cases[first::every])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Build models on ``meta`` quickly, where any test builds models.

    What the imports made stays to the end: the garbage collector need not look at it again and
    again, as it would whenever a compiler makes many objects.
    """
    if "timm" in sys.modules:
        from meta_builds import skip_initialisers

        skip_initialisers()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let what was set aside be freed in order at the end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random numbers.

    Tests that never import torch do not pay for it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "manual_seed"):
        return
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_mixers_only() -> Iterator[None]:
    """Forget the mixers that a test registered, by the decorator or by ``--import``.

    The registry is the process's: left there, they would enter every later list of all mixers.
    """
    registry = sys.modules.get("keymix.mixers.registry")
    before = {**registry._MIXERS, **registry._ALIASES} if registry else {}
    yield
    registry = sys.modules.get("keymix.mixers.registry")
    for names in (registry._ALIASES, registry._MIXERS) if registry else ():
        for name in names.keys() - before:
            module = registry.get_mixer_class(name).__module__
            if not module.startswith("keymix."):
                del names[name]
            if module.startswith("keymix_user_"):
                sys.modules.pop(module, None)  # so that a later --import runs the file again


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real data sets, named by the environment variable KEYMIX_DATA."""
    named = os.environ.get("KEYMIX_DATA")
    if not named:
        pytest.skip("KEYMIX_DATA names no folder with real data")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"KEYMIX_DATA={named} is no folder")
    return folder


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that a read before the write shows."""
    import torch

    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(8).isnan().all(), "torch.empty is not poisoned"
    yield
    torch.use_deterministic_algorithms(was, warn_only=warned)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture
def shapes_checked(request: pytest.FixtureRequest) -> bool:
    """Whether this run checks shapes in signatures (``--jaxtyping-packages``)."""
    return _checks_shapes(request.config)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder once a session, in whichever worker asks first; who changes it copies it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def make(name: str, write: Callable[[Path], object]) -> Path:
        folder, done = shared / "shared" / name, shared / "shared" / f"{name}.done"
        folder.parent.mkdir(exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what a maker that failed left
                write(folder)
                done.touch()
        return folder

    return make
