# SPDX-License-Identifier: Apache-2.0
"""Eight bits: ONNX Runtime's static quantisation, what it costs on the test split, and where.

Weights of convolutions and linear maps get 8 bits per channel, their inputs 8 bits per tensor, with
ranges that calibration images showed (the least and the largest value). Norms, softmax, products of
attention and the last layer with weights stay in float.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from keymix.data.dataset import ImageData
from keymix.errors import unknown
from keymix.export.program import IMAGES
from keymix.export.result import MOST_LOST, Int8
from keymix.train.evaluation import SplitName, score_split
from keymix.train.exported import KEY, quiet
from keymix.train.parts import Evaluated, answers_of
from keymix.train.predict import TrainedModel

KeepFloat = Literal["auto"] | Sequence[str]
CALIBRATION = 128
"""Training images that ranges are taken from."""
_OPERATORS = ("Conv", "Gemm", "MatMul")
_BLOCK = re.compile(r".*\bblocks\.\d+|[^./]+\.\d+|[^./]+")


@dataclass(frozen=True, kw_only=True)
class Quantiser:
    """Makes 8-bit files of a float one."""

    content: bytes  # the float ONNX file; its nodes begin with the paths of their layers
    metadata: str  # what the 8-bit file says of itself
    trained: TrainedModel  # the run
    data: ImageData
    opened: Callable[[bytes], nn.Module]  # opens a file's content as it will be used
    batch: bool  # whether files take more than one image

    def quantised(self, keep_float: KeepFloat) -> tuple[bytes, int, Int8]:
        """Return the 8-bit file, its number of nodes, and what it costs.

        Where it costs more than a point, each block is left in float in turn, and scored on the
        validation split. With ``auto`` those that gain most stay in float until that is a point.
        """
        import onnx

        blocks, kept = self._blocks(), () if keep_float == "auto" else tuple(keep_float)
        for name in kept:
            if name not in blocks:
                raise unknown("block", name, blocks)
        before = self._scored(self.content, "test")
        found, gains = self._file(kept), {}
        after, task = self._scored(found, "test"), self.data.task

        def lost(one: Evaluated, other: Evaluated) -> float:
            a, b = one.scores[task.score.key], other.scores[task.score.key]
            return 0.0 if a is None or b is None else task.score.rank(a) - task.score.rank(b)

        if lost(before, after) > MOST_LOST:
            floats, whole = self._scored(self.content, "val"), self._scored(found, "val")
            rest = [name for name in blocks if name not in kept]
            alone = {each: self._scored(self._file((*kept, each)), "val") for each in rest}
            gains = {name: lost(scored, whole) for name, scored in alone.items()}
            gains = dict(sorted(gains.items(), key=lambda each: -each[1]))
            if keep_float == "auto":
                for name in gains:
                    kept = (*kept, name)
                    found = self._file(kept)
                    if lost(floats, self._scored(found, "val")) <= MOST_LOST:
                        break
                after = self._scored(found, "test")
        interval = answers_of(task).interval(task, {0: after.answers}, {0: before.answers})
        low, high = (None, None) if interval is None else (interval.low, interval.high)
        nodes = len(onnx.load_from_string(found).graph.node)
        return (
            found,
            nodes,
            Int8(
                task=task.name,
                before=before.scores[task.score.key],
                after=after.scores[task.score.key],
                low=low,
                high=high,
                images=len(after.answers.index),
                kept=kept,
                gains=gains,
            ),
        )

    def _scored(self, content: bytes, split: SplitName) -> Evaluated:
        return score_split(self.trained.run.recipe, self.opened(content), self.data, split)

    def _layers(self) -> list[tuple[str, str]]:
        """Name the nodes that may have 8 bits, each with its block; not the last, the head."""
        import onnx

        graph = onnx.load_from_string(self.content).graph
        weights = {each.name for each in graph.initializer}
        found = [
            (node.name, found[0])
            for node in graph.node
            if node.op_type in _OPERATORS and weights & {*node.input[1:2]}
            if (found := _BLOCK.match(node.name))
        ]
        return found[:-1]

    def _blocks(self) -> list[str]:
        return [*dict.fromkeys(block for _, block in self._layers())]

    @cached_property
    def _images(self) -> Tensor:
        return torch.stack(self.data.some(self.data.train, CALIBRATION))

    def _file(self, kept: Sequence[str]) -> bytes:
        """Quantise all but some blocks."""
        import onnx
        from onnxruntime.quantization import CalibrationDataReader, quantize_static

        class Reader(CalibrationDataReader):
            def __init__(self, batches: Iterator[Tensor]) -> None:
                self.batches = batches

            def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
                batch = next(self.batches, None)
                return None if batch is None else {IMAGES: batch.cpu().numpy()}

        model = onnx.load_from_string(self.content)
        next(each for each in model.metadata_props if each.key == KEY).value = self.metadata
        chosen = [name for name, block in self._layers() if block not in kept]
        with quiet(), tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "int8.onnx"
            quantize_static(
                model,
                file,
                Reader(iter(torch.split(self._images, 16 if self.batch else 1))),
                op_types_to_quantize=[*_OPERATORS],
                nodes_to_quantize=chosen,
                per_channel=True,
            )
            return file.read_bytes()
