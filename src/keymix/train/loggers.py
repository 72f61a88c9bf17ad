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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keymix.errors import Attempt, KeymixWarning, UserError, one_line, unknown
from keymix.records import from_json, to_json
from keymix.train import files
from keymix.train.callbacks import Callback, Display, Report, ReportEpochs, TrainingPlan
from keymix.train.record import RunRecord

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


def _tensorboard(plan: TrainingPlan, known: str) -> Logger:
    from lightning_fabric.loggers.tensorboard import TensorBoardLogger

    return TensorBoardLogger(plan.folder, name="", version="tensorboard")


def _wandb(plan: TrainingPlan, known: str) -> Any:
    from pytorch_lightning.loggers import WandbLogger

    return WandbLogger(
        name=_name(plan),
        save_dir=plan.folder,
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=known or None,
        resume="allow",
    )


def _finish(logger: Any) -> None:
    """End the run of Weights & Biases: the next one of this process would continue it."""
    logger.experiment.finish()


def _mlflow(plan: TrainingPlan, known: str) -> Any:
    import mlflow
    from pytorch_lightning.loggers import MLFlowLogger

    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name=_name(plan),
        tracking_uri=mlflow.get_tracking_uri(),
        run_id=known or None,
    )


def _name(plan: TrainingPlan) -> str:
    model = plan.recipe.model
    mixer = [] if model.mixer is None else [str(model.mixer)]
    return ", ".join([plan.recipe.name, *mixer, f"seed {plan.recipe.seed}"])


@dataclass(frozen=True)
class _Kind:
    make: Callable[[TrainingPlan, str], Logger]
    modules: tuple[str, ...]
    close: Callable[[Any], None] = lambda logger: None


_KINDS: dict[str, _Kind] = {
    "tensorboard": _Kind(_tensorboard, ("tensorboard",)),
    "wandb": _Kind(_wandb, ("wandb", "pytorch_lightning"), _finish),
    "mlflow": _Kind(_mlflow, ("mlflow", "pytorch_lightning")),
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


class Logging(Callback):
    """Logs a training, next to another callback.

    A logger that fails is left out with a warning; training continues.
    """

    def __init__(self, name: str, other: Callback) -> None:
        check_logger(name)
        self._name, self._other = name, other
        self._logger: Logger | None = None
        self._logged = Logged()
        self._status = "failed"

    def on_train_start(self, plan: TrainingPlan) -> None:
        """Open the logger and give it the recipe, and the epochs that it does not have yet."""
        self._other.on_train_start(plan)
        self._folder, self._epochs = plan.folder, plan.epochs
        self._logged = self._read().get(self._name, Logged())
        with self._forgiving():
            self._logger = _KINDS[self._name].make(plan, self._logged.id)
            if not self._logged.epochs:
                self._logger.log_hyperparams(plan.recipe.to_dict())
            for line in plan.lines:
                self._log_epoch(to_json(line))

    def on_step_end(self, done: int, loss: float) -> None:
        """Pass it on."""
        self._other.on_step_end(done, loss)

    def on_validation_start(self) -> None:
        """Pass it on."""
        self._other.on_validation_start()

    def on_epoch_end(self, line: Mapping[str, float | None]) -> None:
        """Log the metrics of an epoch."""
        self._other.on_epoch_end(line)
        with self._forgiving():
            self._log_epoch(line)

    def on_test_end(self, record: RunRecord) -> None:
        """Log the test scores of the last epoch's weights and of those that validated best."""
        self._other.on_test_end(record)
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

    def close(self) -> None:
        """Close the logger; a run that is to be resumed ends as failed until then."""
        self._other.close()
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
            with Attempt() as attempt:
                yield
        finally:
            quiet.setLevel(level)
        if attempt.error is not None:
            self._logger = None
            why = one_line(str(attempt.error))
            text = f"{self._name} failed ({why}): training continues without it"
            warnings.warn(text, KeymixWarning, stacklevel=3)


def callback_of(
    progress: Literal["bar"] | Report | Callback | None, log: LoggerName | None
) -> Callback:
    """Return the callback that `train`'s arguments ask for; refuse a missing logger."""
    if isinstance(progress, Callback):
        callback = progress
    elif progress == "bar":
        callback = Display()
    else:
        callback = Callback() if progress is None else ReportEpochs(progress)
    return callback if log is None else Logging(log, callback)
