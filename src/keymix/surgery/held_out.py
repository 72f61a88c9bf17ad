# SPDX-License-Identifier: Apache-2.0
"""Held-out images: what a swap costs in loss and accuracy, and what it saves, measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.analysis.capture import inference_mode_of
from keymix.analysis.counting import count
from keymix.analysis.measure import measure_paired
from keymix.analysis.passes import Varies
from keymix.analysis.statistics import bonett_price
from keymix.errors import UserError
from keymix.surgery.attention_cost import ROUNDS
from keymix.surgery.images import MIN_IMAGES, input_size, run
from keymix.surgery.report import SAYS_NOTHING
from keymix.surgery.search_record import Step


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Images that neither trained nor calibrated a model, with their classes.

    Attributes:
        images: ``[n, C, H, W]``, normalised as in the model's evaluation.
        labels: ``[n]``.
        batch_size: Images at once.
    """

    images: Tensor
    labels: Tensor
    batch_size: int = 32
    _seen: WeakKeyDictionary[nn.Module, Tensor] = field(default_factory=WeakKeyDictionary)
    _answers: WeakKeyDictionary[nn.Module, Tensor] = field(default_factory=WeakKeyDictionary)

    def check(self, model: nn.Module) -> None:
        """Refuse images that a model does not take, and labels that are not theirs.

        Raises:
            UserError: Saying what is wrong.
        """
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
        anchor = next(model.parameters())
        with inference_mode_of(model), torch.no_grad():
            logits = run(model, images[:1].to(anchor.device, anchor.dtype))
        low, high = int(labels.min()), int(labels.max())
        if logits.ndim != 2 or not 0 <= low <= high < logits.shape[1]:
            raise UserError(
                f"labels from {low} to {high} are no classes of a model whose output has shape "
                f"{tuple(logits.shape)}"
            )

    def says_nothing(self, model: nn.Module) -> str | None:
        """Say in what a model answers all images alike; None if it does not, or they are few."""
        if not self.varies(model):
            return SAYS_NOTHING
        if model not in self._answers:
            self.score(model)
        several = len(self.labels) >= MIN_IMAGES and len(set(self.labels.tolist())) > 1
        if several and len(set(self._answers[model].tolist())) == 1:
            return "the model gives every held-out image the same answer"
        return None

    def varies(self, model: nn.Module) -> bool:
        """Tell whether a model's outputs vary over the images, by a batch of them."""
        anchor, told = next(model.parameters()), Varies()
        images = self.images[: self.batch_size].to(anchor.device, anchor.dtype)
        with inference_mode_of(model), torch.no_grad():
            told.see(run(model, images))
        return told.told()

    def score(self, model: nn.Module) -> tuple[float, Tensor]:
        """Return the mean cross entropy and which answers are right, ``[n]`` booleans."""
        anchor, size = next(model.parameters()), self.batch_size
        loss, answers = 0.0, []
        with inference_mode_of(model), torch.no_grad():
            for start in range(0, len(self.images), size):
                images = self.images[start : start + size].to(anchor.device, anchor.dtype)
                logits = run(model, images).float()
                wanted = self.labels[start : start + size].to(logits.device)
                loss += float(F.cross_entropy(logits, wanted.long(), reduction="sum"))
                answers.append(logits.argmax(1).cpu())
        self._answers[model] = torch.cat(answers)
        return loss / len(self.labels), self._answers[model] == self.labels.cpu()

    def step(
        self,
        original: nn.Module,
        model: nn.Module | None = None,
        layers: tuple[int, ...] = (),
        share: float = 0.0,
        comparisons: int = 1,
    ) -> Step:
        """Measure a swapped model against the original: on the same images, and in turns.

        Args:
            original: The model before.
            model: With some layers swapped; the original itself if None.
            layers: Which.
            share: Of the attention's cost that they hold.
            comparisons: Of latencies with the original, which share the test's level.
        """
        shown = original if model is None else model
        size = tuple(self.images.shape[1:])
        loss, right = self.score(shown)
        if model is None:
            self._seen[original] = right
        elif original not in self._seen:
            self._seen[original] = self.score(original)[1]
        change = right.double() - self._seen[original].double()
        low, high, _ = bonett_price(change.numpy())
        counted = count(shown, size)
        pair = measure_paired(original, shown, size, repeats=ROUNDS, comparisons=comparisons)
        tested = model is not None  # with itself there is nothing to test
        return Step(
            layers=layers,
            share=share,
            loss=loss,
            top1=float(right.double().mean()),
            change_low=low if model is not None else 0.0,
            change_high=high if model is not None else 0.0,
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
