# SPDX-License-Identifier: Apache-2.0
"""Firing rates, synaptic operations and energy of a spiking network, as a result."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

from keymix.analysis.energy import Energy
from keymix.analysis.images import Images, Model
from keymix.analysis.spikes import SpikeReadings, read_spikes
from keymix.analysis.spikes_record import SpikesStudy
from keymix.analysis.study_record import UNNAMED, joined
from keymix.arguments import checked
from keymix.studies.spikes.result import SpikeStudies
from keymix.studies.study import OfModel


class Spikes(SpikeReadings, OfModel):
    """Firing rates, operations and energy of a network: `SpikeReadings` as a result.

    Tables are ``"total"``, ``"rates"``, ``"steps"``, ``"neurons"`` and ``"operations"``; figures
    are ``"energy"`` and rates along steps and blocks.
    """

    name = "spikes"

    @cached_property
    def alone(self) -> SpikeStudies:
        """This network as a study of its own."""
        more = {"raster_image": None, "photo": None, "rasters": (), "at_chance": False}
        return SpikeStudies([joined(SpikesStudy, self.reading(), UNNAMED, **more)])

    @property
    def data(self) -> object:
        """Everything with all that follows from it."""
        return self.reading()


@checked
def spike_study(
    model: Model,
    images: Images,
    *,
    energy: str | Energy = "fp32",
    batch_norm: Literal["folded", "separate"] = "folded",
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Spikes:
    r"""Measure the firing rates, operations and energy of a spiking network, batch after batch.

    **Firing rates** are spikes per neuron per step (QKFormer, https://arxiv.org/abs/2403.16552,
    App. A.3, Table 7): the mean of what neurons give, over images, steps and neurons. X', the
    masked K, is what goes into the output projection of Q-K attention.

    **Synaptic operations.** In a layer with weights each spike costs one addition for every weight
    it meets: :math:`SOP = \sum_i s_i \, f_i`, over inputs i with spikes :math:`s_i` and fan-out
    :math:`f_i`. That is "rate times dense multiply-adds", but exact at the border of a
    convolution, where padding meets no spike. What drives a layer is decided by the values that
    it was given over all images:

    - 0 and 1: additions, AC.
    - whole numbers, as shortcuts make that add spikes: a value of n counts as n additions; the
      lower bound is one addition an input that is not 0, the upper one multiply-add each.
    - anything else, such as the pixels of the first layer or the mean before the classifier:
      multiply-adds, MAC, all of them.

    The products of spiking self-attention have no weights. Two factors of 0 and 1 need an addition
    wherever a 1 meets a 1; a factor of 0 and 1 times one of whole numbers (the second product)
    adds a row of the other for each of its spikes. Q-K attention's sum over Q adds each spike once;
    its mask is addressing or an AND, "with negligible power consumption" in the paper's words, and
    costs nothing here. So do neurons' own dynamics, biases, pooling, means and shortcuts, as in
    the papers.

    **Energy** is MACs and ACs times what they cost: 4.6 and 0.9 pJ by default, 32-bit floating
    point in 45 nm (Horowitz 2014). Memory access is not counted. All time steps count; a layer that
    runs once for all of them, as keymix's models run the first on a still image, counts once. The
    ANN counterpart, the same network without spikes, makes every multiply-add at one step.

    The model is left as it was. Modules with ``reset()`` among its neurons are reset before each
    batch.

    Args:
        model: A model with neurons of keymix or of SpikingJelly that takes the images as they are;
            what `keymix.load` returns; or the folder of a run.
        images: Normalised images ``[B, C, H, W]`` or frames ``[B, T, C, H, W]``, or batches of them
            one after another, each alone or first in a tuple; or pictures, as
            :func:`keymix.attention_maps` takes them, and recordings of a run on events.
        energy: Name in :data:`keymix.analysis.energy.ENERGIES`, ``"MAC,AC"`` in pJ, or
            :class:`keymix.analysis.energy.Energy`.
        batch_norm: ``"folded"``: costs nothing, its factors being part of the weights before it;
            ``"separate"``: a multiply-add per element.
        batch_size: Images at a time where ``images`` is one tensor.
        progress: Called with the number of images read, after every batch.

    Example:
        >>> model = keymix.create_model("qkformer_micro_32")
        >>> study = keymix.spike_study(model, torch.randn(4, 3, 32, 32))
        >>> print(study.rate, study.sops, study.energy)

    Raises:
        UserError: If an argument is none of these, the model has no spiking neurons or cannot take
            the images, there are none, or an operation ran that computes and that nobody counts.
    """
    found = read_spikes(
        model,
        images,
        energy=energy,
        batch_norm=batch_norm,
        batch_size=batch_size,
        progress=progress,
    )
    return Spikes(**vars(found))
