"""A mixer of your own in one file: a query looks at the keys near it."""

from __future__ import annotations

from torch import Tensor

from keymix import MapMixer, register_mixer


@register_mixer("distance")
class DistanceAttention(MapMixer):
    """softmax(-s |q - k|^2 / 2) V: keys count by their distance, not by their product.

    Expanding the square leaves s q k^T - s |k|^2 / 2, since |q|^2 is the same for all keys of a
    row and the softmax takes it out again.
    """

    def factors(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries and keys, [*, h, N, d] each; the base multiplies and scales them."""
        return inputs["q"], inputs["k"]

    def own_bias(
        self, inputs: dict[str, Tensor], grid: tuple[int, int] | None, rows: Tensor | None
    ) -> Tensor:
        """What is added to the scaled logits: one number per key, [*, h, 1, M]."""
        return -0.5 * self.gain() * inputs["k"].square().sum(-1).unsqueeze(-2)
