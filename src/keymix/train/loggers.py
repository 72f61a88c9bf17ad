# SPDX-License-Identifier: Apache-2.0
"""Loggers that follow a training: Lightning's, for TensorBoard, Weights & Biases and MLflow.

They get the recipe, the metrics of each epoch (counted from 1) and the test scores. What they have
been given stands in the run's folder, so that a resumed run continues its log.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keymix.errors import KeymixWarning, UserError, one_line, unknown
from keymix.records import from_json, to_json
from keymix.train import files
from keymix.train.record import RunRecord
from keymix.train.watching import Display, Outlook, Report, Reporting, Watcher, several

if TYPE_CHECKING:
    from lightning_fabric.loggers.logger import Logger

LoggerName = Literal["tensorboard", "wandb", "mlflow"]
PROJECT = "keymix"
"""Project or experiment that runs are logged under, unless the logger's own variables name one."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """What a logger has been given of a run: an entry of ``loggers.json``."""

    id: str = ""  # the run's identifier there; empty where the folder is all there is to know
    epochs: int = 0  # that were logged


def _tensorboard(outlook: Outlook, known: str) -> Logger:
    from lightning_fabric.loggers.tensorboard import TensorBoardLogger

    return TensorBoardLogger(outlook.folder, name="", version="tensorboard")


def _wandb(outlook: Outlook, known: str) -> Any:
    from pytorch_lightning.loggers import WandbLogger

    return WandbLogger(
        name=_name(outlook),
        save_dir=outlook.folder,
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=known or None,
        resume="allow",
    )


def _finish(logger: Any) -> None:
    """End the run of Weights & Biases: the next one of this process would continue it."""
    logger.experiment.finish()


def _mlflow(outlook: Outlook, known: str) -> Any:
    import mlflow
    from pytorch_lightning.loggers import MLFlowLogger

    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name=_name(outlook),
        tracking_uri=mlflow.get_tracking_uri(),
        run_id=known or None,
    )


def _name(outlook: Outlook) -> str:
    model = outlook.recipe.model
    mixer = [] if model.mixer is None else [str(model.mixer)]
    return ", ".join([outlook.recipe.name, *mixer, f"seed {outlook.recipe.seed}"])


@dataclass(frozen=True)
class _Kind:
    make: Callable[[Outlook, str], Logger]
    modules: tuple[str, ...]
    close: Callable[[Any], None] = lambda logger: None
    error: str = ""  # module:name of the package's own


_KINDS: dict[str, _Kind] = {
    "tensorboard": _Kind(_tensorboard, ("tensorboard",)),
    "wandb": _Kind(_wandb, ("wandb", "pytorch_lightning"), _finish, "wandb.errors:Error"),
    "mlflow": _Kind(
        _mlflow, ("mlflow", "pytorch_lightning"), error="mlflow.exceptions:MlflowException"
    ),
}


def check_logger(name: str) -> None:
    """Refuse a logger that there is not, or whose packages are not installed."""
    if name not in _KINDS:
        raise unknown("logger", name, _KINDS)
    missing = [module for module in _KINDS[name].modules if find_spec(module) is None]
    if missing:
        raise UserError(
            f"logger {name!r} needs {' and '.join(missing)}: install it with "
            f"`pip install 'keymix[{name}]'`."
        )


def _faults(name: str) -> tuple[type[Exception], ...]:
    """What a logger may raise: errors of its package, of a network and of the disk."""
    module, _, error = _KINDS[name].error.partition(":")
    own = (getattr(import_module(module), error),) if module else ()
    return (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, *own)


class Logging(Watcher):
    """Logs a training. A logger that fails is left out with a warning; training continues."""

    def __init__(self, name: str) -> None:
        check_logger(name)
        self._name = name
        self._logger: Logger | None = None
        self._logged = Logged()
        self._status = "failed"

    def begin(self, outlook: Outlook) -> None:
        """Open the logger and give it the recipe, and the epochs that it does not have yet."""
        self._folder, self._epochs = outlook.folder, outlook.epochs
        self._logged = self._read().get(self._name, Logged())
        with self._forgiving():
            self._logger = _KINDS[self._name].make(outlook, self._logged.id)
            if not self._logged.epochs:
                self._logger.log_hyperparams(outlook.recipe.to_dict())
            for line in outlook.lines:
                self._log_epoch(to_json(line))

    def epoch(self, line: Mapping[str, float | None]) -> None:
        """Log the metrics of an epoch."""
        with self._forgiving():
            self._log_epoch(line)

    def done(self, record: RunRecord) -> None:
        """Log the test scores of the last epoch's weights and of those that validated best."""
        with self._forgiving():
            self._log(
                {
                    f"test_{score}_{which}": value
                    for which, tested in (("last", record.last), ("best", record.best))
                    for score, value in tested.test.scores.items()
                },
                self._epochs,
            )
            self._status = "success"

    def end(self) -> None:
        """Close the logger; a run that is to be resumed ends as failed until then."""
        with self._forgiving():
            if self._logger is not None:
                self._logger.finalize(self._status)
                _KINDS[self._name].close(self._logger)
        self._logger = None

    def _log_epoch(self, line: Mapping[str, float | None]) -> None:
        number = int(line["epoch"] or 0) + 1
        if self._logger is None or number <= self._logged.epochs:
            return
        left_out = ("epoch", "epochs", "best_epoch")
        self._log({name: line[name] for name in line if name not in left_out}, number)
        version = self._logger.version if self._name != "tensorboard" else ""
        self._logged = replace(self._logged, id=str(version or ""), epochs=number)
        files.write_json(self._folder / files.LOGGERS, self._read() | {self._name: self._logged})

    def _log(self, values: Mapping[str, float | None], step: int) -> None:
        if self._logger is not None:
            known = {name: value for name, value in values.items() if value is not None}
            self._logger.log_metrics(known, step)

    def _read(self) -> dict[str, Logged]:
        """Read what loggers were given; a damaged file counts as none."""
        path: Path = self._folder / files.LOGGERS
        try:
            there = files.read_json(path) if path.exists() else {}
            return {name: from_json(Logged, there[name], where=str(path)) for name in there}
        except UserError:
            return {}

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Turn what a logger raises into one warning, and leave it out from then on."""
        quiet = logging.getLogger("pytorch_lightning")
        level = quiet.level
        quiet.setLevel(logging.ERROR)
        try:
            yield
        except _faults(self._name) as error:
            self._logger = None
            text = f"{self._name} failed ({one_line(str(error))}): training continues without it"
            warnings.warn(text, KeymixWarning, stacklevel=3)
        finally:
            quiet.setLevel(level)


@contextmanager
def watching(
    progress: Literal["bar"] | Report | Watcher | None, log: LoggerName | None
) -> Iterator[Watcher]:
    """Give the watcher that `train`'s arguments ask for, and clear it up after the block."""
    watcher = _watcher(progress)
    if log is not None:
        watcher = several(watcher, Logging(log))
    try:
        yield watcher
    finally:
        watcher.end()


def _watcher(progress: Literal["bar"] | Report | Watcher | None) -> Watcher:
    if isinstance(progress, Watcher):
        return progress
    if progress == "bar":
        return Display()
    return Watcher() if progress is None else Reporting(progress)
