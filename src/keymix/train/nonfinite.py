# SPDX-License-Identifier: Apache-2.0
"""The losses of an epoch; one that is not finite ends the run and says where it came from.

On a CPU each loss is looked at as it comes. Looking at a GPU's waits for it, so there the facts of
a few steps stay on the device and are looked at together.

A gradient that is not finite ends the run too: neurons whose current is NaN do not fire, so a
spiking network can lose all its weights and still answer with a finite loss.

The losses of ranks are averaged where they are looked at, so all ranks stop at the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.train import files, ranks

_LOOK_EVERY = 50  # steps on a GPU, and updates between looks at unclipped gradients
_NAMED = 8  # images in the message at most; the file has all
_ROOM = 160  # characters for their names
_REMEDY = "Lower --optim.lr, lengthen --schedule.warmup_epochs or set --optim.clip_grad 1."


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is known of a training step should its loss turn out not to be finite.

    The loss and its terms, by name and without weights, are 0-dimensional. `each` makes the loss of
    each input ``[B]``, None where they have none; `index` has their positions in the split ``[B]``.
    """

    epoch: int
    step: int
    rate: float
    loss: Tensor
    each: Callable[[], Tensor] | None
    index: Tensor
    terms: Mapping[str, Tensor] = field(default_factory=dict)


class Losses:
    """Sum up the training losses of an epoch and look for one that is not finite.

    `name` names an input by its position in the training split. ``nonfinite.json`` goes into the
    folder; a trial has none, and ignores any loss. `late` looks at several losses together, for a
    device that each look would hold up. With a loss scaler (`scaled`), which skips such updates,
    gradients may be not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        name: Callable[[int], str],
        folder: Path | None,
        *,
        late: bool,
        scaled: bool = False,
        items: str = "images",
    ) -> None:
        self._model, self._name, self._folder, self._late = model, name, folder, late
        self._scaled, self._items = scaled, items
        self._sum, self._steps, self._updates = 0.0, 0, 0
        self._last: Step | None = None
        self._terms: dict[str, float] = {}
        self._seen: list[tuple[Step, Tensor | None]] = []
        self._norms: list[Tensor] = []  # of gradients that were not looked at yet

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; every loss before it was finite."""
        self.look()
        return {"sum": self._sum, "terms": dict(self._terms), "steps": self._steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self._sum, self._steps = float(state["sum"]), int(state["steps"])
        self._terms = dict(state.get("terms", {}))

    def before_update(self, norm: Tensor | None) -> None:
        """Note the norm of the gradients: where they are clipped, or now and then."""
        self._updates += 1
        if norm is not None:
            self._norms.append(norm)
        elif self._updates % _LOOK_EVERY == 0:
            self.before_clearing()

    def before_clearing(self) -> None:
        """Note the norm of the gradients that are about to be cleared for the validation."""
        self._norms.append(ranks.norm(self._model.parameters()))

    def take(self, step: Step) -> None:
        """Take in the loss of a step."""
        late = self._late and step.each is not None
        self._seen.append((step, step.each() if late and step.each else None))
        if not self._late or len(self._seen) >= _LOOK_EVERY:
            self.look()

    def mean_so_far(self) -> float:
        """The mean loss of the epoch's steps that were looked at; NaN before the first."""
        return self._sum / self._steps if self._steps else math.nan

    def means(self) -> dict[str, float]:
        """The mean loss since the last call, which ends an epoch, and the mean of each term."""
        self.look()
        steps = max(1, self._steps)
        means = {"loss": self._sum / steps}
        means |= {name: value / steps for name, value in self._terms.items()}
        self._sum, self._terms, self._steps = 0.0, {}, 0
        return means

    def look(self) -> None:
        """Look at the losses and gradients that were not looked at yet."""
        seen, self._seen = self._seen, []
        if seen:
            self._look_at(seen)
            self._last = seen[-1][0]
        norms, self._norms = self._norms, []
        ignored = self._last is None or self._scaled or self._folder is None
        if norms and not ignored and not bool(torch.stack(norms).isfinite().all()):
            assert self._last is not None
            error = UserError(
                f"a gradient became NaN or infinite by {_place(self._last)}, while the loss "
                f"stayed finite. {_REMEDY}"
            )
            raise ranks.raised(error)  # gradients are the same on all

    def _look_at(self, seen: Sequence[tuple[Step, Tensor | None]]) -> None:
        names = [*seen[0][0].terms]
        every = [torch.stack([step.loss, *step.terms.values()]) for step, _ in seen]
        own = torch.stack(every).double().cpu()
        losses = ranks.mean(own).tolist()
        for number, (step, each) in enumerate(seen):
            loss, *terms = losses[number]
            if not math.isfinite(sum(terms, loss)) and self._folder is not None:
                mine = float(own[number].sum())
                if ranks.gathered(not math.isfinite(mine)).index(True) != ranks.rank():
                    raise ranks.raised(None)
                now = step.each if not self._late else None  # nothing has changed since
                raise ranks.raised(self._error(step, mine, now() if now else each, self._folder))
            self._sum += loss  # one by one: the sum does not depend on when it is looked at
            for name, term in zip(names, terms, strict=True):
                self._terms[name] = self._terms.get(name, 0.0) + term
        self._steps += len(losses)

    def _error(self, step: Step, loss: float, each: Tensor | None, folder: Path) -> UserError:
        images = [self._name(i) for i in step.index.tolist()]
        own = [None] * len(images) if each is None else each.double().tolist()
        path, pairs = folder / files.NONFINITE, [*zip(images, own, strict=True)]
        record = {  # numbers as Python writes them: JSON has no NaN
            "epoch": step.epoch,
            "step": step.step,
            "loss": repr(loss),
            "learning_rate": step.rate,
            "images": [
                {"image": image} | ({} if value is None else {"loss": repr(value)})
                for image, value in pairs
            ],
        }
        files.write_json(path, record)
        wrong = [i for i, value in pairs if value is not None and not math.isfinite(value)]
        return UserError(
            f"the training loss became {loss} in {_place(step)}; "
            f"{_from(wrong, images, self._items)} ({str(path)!r} has all). {_REMEDY}"
        )


def _place(step: Step) -> str:
    return f"step {step.step + 1} of epoch {step.epoch + 1}, at learning rate {step.rate:.3g}"


def _from(wrong: list[str], images: list[str], items: str) -> str:
    chosen = wrong or images
    named = chosen[:_NAMED]
    while len(named) > 1 and len(", ".join(named)) > _ROOM:
        named.pop()
    more = f" and {len(chosen) - len(named)} more" if len(chosen) > len(named) else ""
    share = f"it came from {len(wrong)} of the batch's {len(images)} {items}"
    which = share if wrong else f"the batch's {items}"
    return f"{which}: {', '.join(named)}{more}"
