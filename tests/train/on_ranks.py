# SPDX-License-Identifier: Apache-2.0
"""Two processes of one training, which run a list of checks and leave what came out of them."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from commands import PATIENCE, forkserver
from keymix.errors import Reported
from keymix.tasks.classification.training import ClassificationTask
from keymix.tasks.detection.answers import ANSWERS, DetectionAnswers, scored
from keymix.tasks.detection.matching import Found, Instances
from keymix.tasks.segmentation.losses import boundary_loss, mean_loss, overlap_loss
from keymix.train import checkpoints, files, ranks
from keymix.train.engine import make_training, train
from keymix.train.model import build_model, load_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.validate import training_batches

Check = tuple[str, Callable[..., Any], tuple[Any, ...]]
NUMBER = 2


def of_ranks(checks: list[Check], folder: Path) -> list[dict[str, Any]]:
    """Run checks on two ranks, one after another, and return what each rank has, by name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [folder / f"rank{rank}" for rank in range(NUMBER)]
    processes = [
        forkserver().Process(target=_on_rank, args=(rank, port, checks, path))
        for rank, path in enumerate(said)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    return [pickle.loads(path.read_bytes()) for path in said]


def _on_rank(rank: int, port: int, checks: list[Check], out: Path) -> None:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUMBER)},
        LOCAL_WORLD_SIZE=str(NUMBER),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    try:
        with ranks.together():
            for name, check, arguments in checks:
                try:
                    found[name] = check(*arguments)
                except (ValueError, KeyboardInterrupt) as error:
                    found[name] = type(error).__name__, str(error)
                out.write_bytes(pickle.dumps(found))
                ranks.gathered(None)
    except Reported as error:
        out.write_bytes(pickle.dumps(found | {"left alone": str(error)}))


def trained_steps(
    recipe: Recipe, steps: int, strategy: ranks.Strategy = "ddp", frozen: tuple[str, ...] = ()
) -> tuple[dict[str, torch.Tensor], float, str]:
    """Train some steps in float64; return weights, the epoch's mean loss, and what was wrapped.

    The weights of a sharded model are put together on the first rank, averaged ones with them.
    """
    data = load_data(recipe.data)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = build_model(recipe, num_classes=10, in_chans=1, image_size=(12, 12))
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        training = make_training(recipe, data, model, None, steps=steps, strategy=strategy)
        batches = training_batches(recipe, data)
        with whole_numbers_of_bits():
            for batch in list(batches)[:steps]:
                training.step(batch._replace(images=batch.images.double()))
    finally:
        torch.set_default_dtype(before)
    loss = training.task.losses.means()["loss"]
    weights = ranks.full_state(model) if training.sharded else dict(model.state_dict())
    if training.task.ema is not None:
        averaged = ranks.full_state(training.task.evaluated)
        weights |= {f"ema.{name}": value for name, value in averaged.items()}
    return weights, loss, type(training._forward).__name__


@contextmanager
def whole_numbers_of_bits() -> Iterator[None]:
    """Keep the logits of a step in float64, which training makes float32 of."""
    before = torch.Tensor.float
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else before(self)  # type: ignore[method-assign, assignment, misc]
    try:
        yield
    finally:
        torch.Tensor.float = before  # type: ignore[method-assign]


def mask_losses(share: slice) -> list[Any]:
    """Losses of masks of which one image has nearly no pixel that counts, and their gradients."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 5, 5, generator=random, dtype=torch.float64)
    targets = torch.randint(0, 3, (4, 5, 5), generator=random)
    targets[1, 1:] = 255
    found = []
    classes = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    for loss in (
        mean_loss,
        partial(mean_loss, focal=2.0, weights=classes),
        partial(overlap_loss, classes=(1, 2), tversky=(0.3, 0.7)),
        partial(boundary_loss, classes=(1, 2)),
    ):
        weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        value = loss(weight * logits[share], targets[share], multilabel=False)
        value.backward()
        assert weight.grad is not None
        both = torch.stack([value.detach(), weight.grad])
        found.append(ranks.mean(both).tolist())
    return found


def own_mask_losses() -> list[Any]:
    return mask_losses(slice(ranks.rank(), None, ranks.size()))


def detections(places: list[int]) -> DetectionAnswers:
    """Answers to some of five images, of which the fourth has no instance."""

    def image(place: int) -> tuple[int, Instances, Found]:
        random = np.random.default_rng(place)
        number = 0 if place == 3 else 1 + place % 2
        corner = random.uniform(0, 20, (number, 2))
        boxes = np.concatenate([corner, corner + random.uniform(10, 30, (number, 2))], axis=1)
        labels = random.integers(1, 3, number)
        none = np.zeros(number, dtype=bool)
        truth = Instances(
            boxes=boxes, labels=labels, masks=None, area=np.full(number, 400.0), crowd=none
        )
        said = np.concatenate([boxes + random.uniform(-4, 4, boxes.shape), [[1.0, 2.0, 9.0, 9.0]]])
        scores = random.uniform(0, 1, number + 1).astype(np.float32)
        return (
            place,
            truth,
            Found(boxes=said, labels=np.append(labels, 1), scores=scores, masks=None),
        )

    return scored(map(image, places), ("a", "b"))


def joined_detections() -> Any:
    record = SimpleNamespace(record=lambda: SimpleNamespace(classes=("a", "b")))
    mine = [*range(ranks.rank(), 5, ranks.size())]
    answers = ANSWERS.joined(detections(mine), record)  # type: ignore[arg-type]
    return answers.scores(), {**answers.shared(), **answers.arrays("last")}


def whole_run(recipe: Recipe, out: Path, strategy: ranks.Strategy = "ddp") -> str:
    return str(train(recipe, out, strategy=strategy).folder)


def refused_batch(recipe: Recipe, out: Path) -> Any:
    try:
        train(replace_path(recipe, {"data.batch_size": 15}), out)
    finally:
        ranks.gathered(None)
        assert not out.exists()


def refused_folder(recipe: Recipe, out: Path) -> Any:
    with ranks.held(files.locked(out, "run")):
        train(recipe, out)


def stopped_run(recipe: Recipe, out: Path, strategy: ranks.Strategy = "ddp") -> Any:
    """A signal reaches the second rank alone, within a step of the second epoch."""

    def signalled(task: ClassificationTask, batch: Any) -> Any:
        if ranks.rank() == 1 and (task.current_epoch, len(batch.index)) == (1, 8):
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with each_batch(signalled):
        train(recipe, out, strategy=strategy)


def full_disk(recipe: Recipe, out: Path) -> Any:
    """The first rank alone writes, so the other meets no full disk."""

    def refused(path: Path, write: Any) -> None:
        raise files.write_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank() == 0:
            patch.setattr(checkpoints, "_write", refused)
        train(recipe, out)


def full_disk_of_one(recipe: Recipe, out: Path) -> Any:
    """The second rank cannot write its part of a sharded checkpoint."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank() == 1:
            patch.setattr(ranks.HuggingFaceStorageWriter, "write_data", refused)
        train(recipe, out, strategy="fsdp")


def refused_strategy(recipe: Recipe, out: Path) -> Any:
    train(recipe, out, strategy="fsdp")


def refused_model(kind: str) -> Any:
    """Parameters that cannot be sharded: one number, or one that stands in two places."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if kind == "scalar":
        model.scale = nn.Parameter(torch.tensor(1.0))
    else:
        model[1].weight = model[0].weight
    ranks.shard(model)


def broken_run(recipe: Recipe, out: Path, strategy: ranks.Strategy = "ddp") -> Any:
    """The second rank alone sees images that are not numbers."""

    def broken(task: ClassificationTask, batch: Any) -> Any:
        if ranks.rank() == 1 and task.current_epoch == 1:
            return batch._replace(images=batch.images * float("nan"))
        return batch

    with each_batch(broken):
        train(recipe, out, strategy=strategy)


def killed_run(recipe: Recipe, out: Path) -> Any:
    """The second rank dies in a step of the second epoch; nothing can follow."""

    def killed(task: ClassificationTask, batch: Any) -> Any:
        if ranks.rank() == 1 and task.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    with each_batch(killed):
        train(recipe, out)


@contextmanager
def each_batch(change: Callable[[ClassificationTask, Any], Any]) -> Iterator[None]:
    before = ClassificationTask.training_step

    def step(task: ClassificationTask, batch: Any, number: int) -> Any:
        return before(task, change(task, batch), number)

    ClassificationTask.training_step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        ClassificationTask.training_step = before  # type: ignore[method-assign]
