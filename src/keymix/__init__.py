# SPDX-License-Identifier: Apache-2.0
"""keymix: which attention should my vision model use, what does it buy, how do I put it in?

Every public name loads on first use, so that ``import keymix`` is instantaneous.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keymix._lazy import attach
from keymix._version import __version__

if TYPE_CHECKING:
    from keymix.compare.run import compare as compare
    from keymix.export.run import export as export
    from keymix.swap.run import swap as swap
    from keymix.train.engine import train as train

_ROOMS_TO_CALL = (
    "compare",
    "export",
    "swap",
    "train",
)  # rooms that are also functions of the public API

_getattr, __dir__, _public = attach(
    __name__,
    {
        "NoAttentionMap": "keymix.errors",
        "UserError": "keymix.errors",
        "MapMixer": "keymix.mixers.map_mixer",
        "MapOptions": "keymix.mixers.map_mixer",
        "Site": "keymix.mixers.site",
        "TokenMixer": "keymix.mixers.base",
        "Traits": "keymix.mixers.base",
        "create_mixer": "keymix.mixers.registry",
        "fold_for_inference": "keymix.layers.folding",
        "explain_backend": "keymix.mixers.base",
        "list_mixers": "keymix.mixers.registry",
        "register_mixer": "keymix.mixers.registry",
        "source": "keymix.data.specs",
        "register_study": "keymix.studies.study",
        "register_task": "keymix.task",
        "create_model": "keymix.models.factory",
        "list_models": "keymix.models.factory",
        "attention_maps": "keymix.analysis.attention",
        "attention_rollout": "keymix.analysis.rollout",
        "collapse": "keymix.studies.collapse.measure",
        "complexity": "keymix.studies.complexity.measure",
        "count": "keymix.studies.count",
        "spike_study": "keymix.studies.spikes.measure",
        "evaluate": "keymix.train.runs",
        "load": "keymix.train.predict",
        "load_results": "keymix.report.comparison",
        "load_run": "keymix.train.runs",
        "load_swapped": "keymix.models.swapped",
        "predict": "keymix.train.predict",
        "push": "keymix.export.push",
        "predict_instances": "keymix.tasks.detection.predictions",
        "predict_masks": "keymix.tasks.segmentation.predict_masks",
        "save_swapped": "keymix.models.swapped",
    },
)
__all__ = [*_public, *_ROOMS_TO_CALL, "__version__"]  # noqa: PLE0604 (a list of strings)


def __getattr__(name: str) -> Any:
    if name in _ROOMS_TO_CALL:
        return importlib.import_module(f"keymix.{name}")
    return _getattr(name)
