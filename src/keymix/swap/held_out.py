# SPDX-License-Identifier: Apache-2.0
"""Images that neither trained nor calibrated a model, and what a swap costs on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.analysis.answers import FloatArray
from keymix.analysis.capture import inference_mode_of
from keymix.analysis.counting import count
from keymix.analysis.measure import measure_paired
from keymix.analysis.passes import Varies
from keymix.analysis.statistics import bonett_price
from keymix.errors import UserError
from keymix.swap.images import MIN_IMAGES, input_size, run
from keymix.swap.record import Nothing, Step
from keymix.tasks.classification.answers import balanced_values

ROUNDS = 20
"""Of timing, behind each median."""


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Run a model in inference mode, without gradients, on its own device and in its own type."""
    anchor = next(model.parameters())
    with inference_mode_of(model), torch.no_grad():
        return run(model, images.to(anchor.device, anchor.dtype))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Images that neither trained nor calibrated a model, with their classes."""

    images: Tensor  # [n, C, H, W], normalised as in the model's evaluation
    labels: Tensor  # [n]
    timed: int = 1  # images at once whose latency is measured
    batch_size: int = 32
    balanced: bool = False  # scored by balanced accuracy
    _answers: WeakKeyDictionary[nn.Module, Tensor] = field(default_factory=WeakKeyDictionary)

    def check(self, model: nn.Module) -> None:
        """Refuse images that a model does not take, and labels that are not theirs."""
        images, labels = self.images, self.labels
        if images.ndim != 4 or not images.is_floating_point() or not len(images):
            raise UserError(
                "held-out images must be floating point numbers [n, C, H, W], got "
                f"{images.dtype} of shape {tuple(images.shape)}"
            )
        wanted = input_size(model)
        if wanted is not None and tuple(images.shape[1:]) != wanted:
            raise UserError(
                "held-out images are {}x{}x{} (channels, height, width) and the model takes "
                "{}x{}x{}".format(*images.shape[1:], *wanted)
            )
        if labels.shape != images.shape[:1] or labels.is_floating_point():
            raise UserError(
                f"labels must be whole numbers, one for each of the {len(images)} held-out "
                f"images, got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        logits = logits_of(model, images[:1])
        low, high = int(labels.min()), int(labels.max())
        if logits.ndim != 2 or not 0 <= low <= high < logits.shape[1]:
            raise UserError(
                f"labels from {low} to {high} are no classes of a model whose output has shape "
                f"{tuple(logits.shape)}"
            )

    def says_nothing(self, model: nn.Module) -> Nothing:
        """Say in what a model answers all images alike; empty if it does not, or they are few."""
        if not self.varies(model):
            return "unvarying"
        several = len(self.labels) >= MIN_IMAGES and len(set(self.labels.tolist())) > 1
        if several and len(set(self._answers_of(model).tolist())) == 1:
            return "one answer"
        return ""

    def varies(self, model: nn.Module) -> bool:
        """Return whether a model's outputs vary over the images, by a batch of them."""
        outputs = Varies()
        outputs.see(logits_of(model, self.images[: self.batch_size]))
        return outputs.varied()

    def score(self, model: nn.Module) -> tuple[float, float]:
        """Return the mean cross entropy and the accuracy, a fraction."""
        loss, answers = 0.0, []
        for start in range(0, len(self.images), self.batch_size):
            rows = slice(start, start + self.batch_size)
            logits = logits_of(model, self.images[rows]).float()
            wanted = self.labels[rows].to(logits.device)
            loss += float(F.cross_entropy(logits, wanted.long(), reduction="sum"))
            answers.append(logits.argmax(1).cpu())
        self._answers[model] = torch.cat(answers)
        return loss / len(self.labels), float(self._shares(self._right(model)).mean())

    def _right(self, model: nn.Module) -> FloatArray:
        """Which answers are right, 1 or 0, ``[n]``."""
        found: FloatArray = (self._answers_of(model) == self.labels.cpu()).double().numpy()
        return found

    def _shares(self, right: FloatArray) -> FloatArray:
        """What each image adds to the score, whose mean is the score."""
        return balanced_values(right, self.labels.cpu().numpy()) if self.balanced else right

    def _answers_of(self, model: nn.Module) -> Tensor:
        """Return the classes that a model answers, scored once."""
        if model not in self._answers:
            self.score(model)
        return self._answers[model]

    def step(
        self,
        original: nn.Module,
        model: nn.Module | None = None,
        chosen: Mapping[int, str] | None = None,
        comparisons: int = 1,
    ) -> Step:
        """Measure a swapped model, or the original, against the original on the same images.

        ``chosen`` has the mixer of each layer that was swapped. Latency, of a batch, is measured in
        turns; all ``comparisons`` with the original share the test's level.
        """
        shown = original if model is None else model
        size = tuple(self.images.shape[1:])
        loss, score = self.score(shown)
        change = self._shares(self._right(shown) - self._right(original))
        low, high, _ = bonett_price(change)
        counted = count(shown, size)
        pair = measure_paired(
            original,
            shown,
            size,
            batch_size=self.timed,
            repeats=ROUNDS,
            comparisons=comparisons,
        )
        tested = model is not None  # with itself there is nothing to test
        return Step(
            layers=tuple(chosen or ()),
            mixers=tuple((chosen or {}).values()),
            loss=loss,
            score=score,
            change_low=low if tested else 0.0,
            change_high=high if tested else 0.0,
            params=counted.params,
            macs=counted.macs,
            latency_ms=pair.other_ms,
            original_ms=pair.base_ms,
            latency_ratio=pair.ratio,
            latency_ratio_q1=pair.ratio_q1,
            latency_ratio_q3=pair.ratio_q3,
            latency_p=pair.p if tested else None,
            latency_verdict=pair.verdict if tested or pair.verdict == "busy" else None,
        )
