# SPDX-License-Identifier: Apache-2.0
"""Analysis: what a model costs, what its attention and its spikes do, whether layers collapse."""

from keymix._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Cost": "keymix.analysis.measure",
        "Count": "keymix.analysis.counting",
        "ENERGIES": "keymix.analysis.energy",
        "Energy": "keymix.analysis.energy",
        "LayerCount": "keymix.analysis.counting",
        "Raster": "keymix.analysis.spikes_record",
        "attention_maps": "keymix.analysis.attention",
        "count": "keymix.analysis.counting",
        "dice": "keymix.analysis.overlap",
        "surface_scores": "keymix.analysis.overlap",
        "jaccard": "keymix.analysis.overlap",
        "map_similarity": "keymix.analysis.similarity",
        "mean_dice": "keymix.analysis.overlap",
        "mean_jaccard": "keymix.analysis.overlap",
        "measure_interleaved": "keymix.analysis.measure",
        "overlap_counts": "keymix.analysis.overlap",
        "peak_memory": "keymix.analysis.memory",
        "spike_rasters": "keymix.analysis.spikes",
        "weighted_jaccard": "keymix.analysis.overlap",
    },
)
