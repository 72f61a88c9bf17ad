# SPDX-License-Identifier: Apache-2.0
"""Terms of the loss: a teacher's answers, and the likeness of neighbouring attention maps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import find_mixers
from keymix.hosts.layers import by_name
from keymix.layers.checkpoint import still_statistics

_OFF = "or set loss.similarity = 0"
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Teacher:
    r"""A trained model whose answers a student learns, in eval mode and without gradients.

    :math:`T^2 \, \mathrm{KL}(\mathrm{softmax}(v / T) \,\|\, \mathrm{softmax}(z / T))` of the
    teacher's logits v and the student's z, the mean over images: the soft targets of Hinton et al.
    2015 (https://arxiv.org/abs/1503.02531, Eq. 1) with the factor of their Sec. 2 that keeps the
    size of the gradients. Their cross entropy with soft targets differs from KL by the entropy of
    the targets, which the student cannot change.

    `order` has the teacher's class of each of the student's ``[classes]``, `rescale` the factor and
    offset ``[C, 1, 1]`` from the student's normalisation to the teacher's; None where they are
    alike. `digest` is the SHA-256 of the weights' file, which a resumed run compares.

    It is no module, so that a task that holds one neither trains, saves nor moves it.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        *,
        order: Tensor | None = None,
        rescale: tuple[Tensor, Tensor] | None = None,
        digest: str = "",
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self.temperature, self.digest = temperature, digest
        self._order, self._rescale = order, rescale

    @torch.no_grad()
    def answers(self, images: Tensor) -> Tensor:
        """Return logits ``[B, classes]`` of the student's images, in the order of its classes."""
        if self._rescale is not None:
            factor, offset = self._rescale
            images = images * factor + offset
        logits: Tensor = self._model(images)
        return logits if self._order is None else logits[:, self._order]

    def term(self, images: Tensor, logits: Tensor) -> Tensor:
        """Return the term for the student's logits ``[B, classes]`` on images ``[B, C, H, W]``."""
        soft = (self.answers(images).to(logits.dtype) / self.temperature).log_softmax(1)
        own = (logits / self.temperature).log_softmax(1)
        divergence = F.kl_div(own, soft, reduction="batchmean", log_target=True)
        return self.temperature**2 * divergence


class MapSimilarity:
    r"""Read a model's attention maps in a training step and compare those of neighbours.

    :math:`\sum_{l=0}^{B} \mathrm{Similarity}(A^l, A^{l+1})`, DeepViT Eq. 6: B + 1 pairs among the
    first B + 2 layers. Similarity of two maps is the mean over images, heads and tokens of Eq. 2,
    the cosine of column t of one with column t of the other, in float32; a column of zeros counts
    as 0. The map is the one that multiplies V, without dropout, with gradients to both layers;
    running statistics do not move. Each map is formed once more than the forward pass does, and
    all of them are kept for the backward pass: B + 2 times ``[batch, h, N, M]``.

    `blocks` is B, None for all pairs. A model with fewer layers, or one without a map, is refused.
    """

    def __init__(self, model: nn.Module, blocks: int | None) -> None:
        mixers = find_mixers(model)
        count = len(mixers) if blocks is None else blocks + 2
        if len(mixers) < 2:
            raise UserError(
                "loss.similarity compares the attention maps of neighbouring layers, and this "
                f"model has fewer than two: take a deeper one, {_OFF}."
            )
        if count > len(mixers):
            raise UserError(
                f"loss.similarity_blocks = {blocks} compares the first {count} layers, and this "
                f"model has {len(mixers)}: choose at most {len(mixers) - 2}, {_OFF}."
            )
        self._mixers = dict(list(mixers.items())[:count])
        for path, mixer in self._mixers.items():
            if not mixer.forms_map():
                raise UserError(
                    f"loss.similarity needs attention maps, and {path} ({mixer.mixer_name}) forms "
                    f"none: choose another mixer or fewer loss.similarity_blocks, {_OFF}."
                )
        holders = [model.get_submodule(path.rpartition(".")[0]) for path in self._mixers]
        shifts = [getattr(holder, "shift", None) for holder in holders]
        for path, before, after in zip([*self._mixers][1:], shifts[:-1], shifts[1:], strict=True):
            if before != after:
                raise UserError(
                    f"loss.similarity compares maps of the same tokens, and {path} cuts the image "
                    f"into other windows than the layer before: choose another model, {_OFF}."
                )
        self.pairs = count - 1

    @contextmanager
    def listening(self) -> Iterator[dict[str, Call]]:
        """Note what each layer is called with while the model runs, for :meth:`mean`."""
        calls: dict[str, Call] = {}

        def listener(path: str) -> Any:
            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                calls[path] = (args, kwargs)

            return note

        with ExitStack() as stack:
            for path, mixer in self._mixers.items():
                handle = mixer.register_forward_pre_hook(listener(path), with_kwargs=True)
                stack.callback(handle.remove)
            yield calls

    def mean(self, calls: dict[str, Call]) -> Tensor:
        """Return the mean similarity of the pairs, in [-1, 1]: Eq. 6's sum over B + 1."""
        similar: list[Tensor] = []
        last: tuple[str, Tensor] | None = None
        for path, mixer in self._mixers.items():
            args, kwargs = calls[path]
            with still_statistics(mixer):  # the forward pass moved them by this batch already
                maps = mixer.attention_map(**by_name(args, kwargs), stage="final").float()
            if last is not None:
                if last[1].shape != maps.shape:
                    raise UserError(
                        f"loss.similarity compares maps of one shape, and those of {last[0]} "
                        f"{tuple(last[1].shape[1:])} and {path} {tuple(maps.shape[1:])} differ: "
                        f"choose loss.similarity_blocks within a stage, {_OFF}."
                    )
                similar.append(F.cosine_similarity(last[1], maps, dim=-2).mean())
            last = (path, maps)
        return torch.stack(similar).mean()
