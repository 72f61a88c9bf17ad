# SPDX-License-Identifier: Apache-2.0
"""Firing rates, synaptic operations and energy of a spiking network, as a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from keymix.analysis.energy import Energy, energy_of
from keymix.analysis.images import Images, Model, batches_of, named
from keymix.analysis.spikes import read_spikes
from keymix.arguments import checked, module_of, opened
from keymix.errors import check_positive
from keymix.studies.spikes.result import Spikes


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

    **Synaptic operations.** A spike costs one addition for every weight it meets:
    :math:`SOP = \sum_i s_i \, f_i`, over inputs i with spikes :math:`s_i` and fan-out :math:`f_i`,
    exact at the border of a convolution. Inputs above 1 have bounds, and layers with real-valued
    input make all their multiply-adds; :mod:`keymix.analysis.spikes_operations` has the rule.

    **Energy** is MACs and ACs times what they cost: 4.6 and 0.9 pJ by default, 32-bit floating
    point in 45 nm (Horowitz 2014). All time steps count; memory access does not. The ANN
    counterpart, the same network without spikes, makes every multiply-add at one step.

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
    check_positive(batch_size=batch_size)
    cost, trained = energy_of(energy), opened(model)
    batches = batches_of(images, trained, batch_size, frames=True)
    network = module_of(trained)
    read = read_spikes(network, batches, cost=cost, batch_norm=batch_norm, progress=progress)
    found = Spikes(**vars(read))
    found.of = named(model, network)
    return found
