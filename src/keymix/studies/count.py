# SPDX-License-Identifier: Apache-2.0
"""What a model costs, as a result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from keymix.analysis import counting
from keymix.analysis.counting import Count
from keymix.arguments import Trained
from keymix.report import formats
from keymix.report.result import Result
from keymix.report.tables import Column, Table

_COLUMNS = (
    Column("layer", "path"),
    Column("class", "kind"),
    Column("parameters", "params", "count"),
    Column("multiply-adds", "macs", "count"),
    Column("activations, bytes", "activation_bytes", "count"),
)


class Counted(Result, Count):
    """The cost of a model on one image: `Count` as a result.

    The table is ``"layers"``, a row for each module that costs something.
    """

    name = "count"

    @property
    def answer(self) -> str:
        """Totals."""
        size = "x".join(map(str, self.input_size))
        steps = f" in {self.time_steps} time steps" if self.time_steps else ""
        missing = f"; without {', '.join(self.uncounted)}" if self.uncounted else ""
        return (
            f"{formats.count(self.params)} parameters, {formats.count(self.macs)} multiply-adds "
            f"and {formats.mib(self.activation_bytes / 2**20)} MiB of activations for one input "
            f"of {size}{steps}{missing}"
        )

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each module."""
        rows = [[getattr(layer, c.key) for c in _COLUMNS] for layer in self.layers]
        return {"layers": Table("layers", "Cost by layer", _COLUMNS, rows)}

    @property
    def data(self) -> object:
        """Everything that was counted."""
        return Count.to_dict(self)


def count(
    model: nn.Module | Trained | str | Path,
    input_size: Sequence[int] | None = None,
    *,
    task: str = "",
) -> Counted:
    """Count trainable parameters, multiply-adds and activation memory, by layer and in total.

    Multiply-adds (MACs) are those of matrix products, convolutions, linear layers and attention at
    inference, as the papers count them; softmax, norms, activations, biases, pooling
    and resampling are free. They are those of PyTorch's ``FlopCounterMode``: an operation with a
    cost that it does not count, such as a Fourier transform, is named in ``uncounted``, and joins
    with ``torch.utils.flop_counter.register_flop_formula``. A product of complex numbers counts as
    one. keymix's own mixers are counted by their equations, whichever kernel runs. Activation
    memory is what autograd saves in a training pass, in the model's own precision: each storage
    once, the input included where a layer saves it, parameters and buffers excluded. Of a model
    that is folded for inference it is that of a pass in evaluation.

    Args:
        model: Any PyTorch model that takes one tensor, or what its task's example is; what
            `keymix.load` returns; or the folder of a run. It is not run and not changed. A model on
            the ``meta`` device is counted as on the CPU.
        input_size: Shape without the batch: (channels, height, width) in pixels, or (tokens, dim)
            for a mixer alone. By default what a timm model was made for, or the run's. A batch of
            1 before channels, height and width is left out where the model does not take it.
        task: Name of the task that the model is for: its training part says what the model is run
            on and how a step runs it. Empty for one tensor and the forward pass.

    Returns:
        The count. Each cost is attributed to the innermost module that was running.

    Example:
        >>> import timm
        >>> count(timm.create_model("vit_tiny_patch16_224")).macs
        1253683200

    Raises:
        UserError: If an argument is none of these, the input size is unknown, the model does not
            take it, or tensors overflow.
    """
    return Counted(**vars(counting.count(model, input_size, task=task)))
