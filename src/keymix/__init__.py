# SPDX-License-Identifier: Apache-2.0
"""keymix: which attention should my vision model use, what does it buy, how do I put it in?

Every public name loads on first use, so that ``import keymix`` is instantaneous.
"""

from keymix._lazy import attach
from keymix._version import __version__

__getattr__, __dir__, _public = attach(
    __name__,
    {
        "NoAttentionMap": "keymix.errors",
        "UserError": "keymix.errors",
        "MapMixer": "keymix.mixers.map_mixer",
        "Site": "keymix.mixers.base",
        "TokenMixer": "keymix.mixers.base",
        "Traits": "keymix.mixers.base",
        "create_mixer": "keymix.mixers.registry",
        "explain_backend": "keymix.mixers.map_mixer",
        "list_mixers": "keymix.mixers.registry",
        "register_mixer": "keymix.mixers.registry",
        "create_model": "keymix.models.factory",
        "list_models": "keymix.models.factory",
        "attention_maps": "keymix.analysis.attention",
        "count": "keymix.analysis.counting",
        "evaluate": "keymix.train.engine",
        "load_run": "keymix.train.engine",
        "predict": "keymix.train.engine",
        "train": "keymix.train.engine",
        "compare": "keymix.compare.run",
    },
)
__all__ = [*_public, "__version__"]
