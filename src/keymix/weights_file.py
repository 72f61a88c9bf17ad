# SPDX-License-Identifier: Apache-2.0
"""A run's weights as one safetensors file: tensors, facts, and a checksum of every byte.

The metadata has one key, ``keymix``: JSON of the facts, with ``sha256`` as its first entry. That is
the SHA-256 of the file with 64 zeros in its own place. Equal weights and facts make equal files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from keymix.records import to_json

_KEY, _SUM = "keymix", "sha256"
_ZEROS = b"0" * 64


def packed(state: Mapping[str, Tensor], facts: object) -> bytes:
    """Return the content of a file; `facts` are a record, or a mapping.

    Tensors that share memory are written out apart.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    data = save(tensors, metadata={_KEY: json.dumps({_SUM: _ZEROS.decode(), **to_json(facts)})})
    return data.replace(_ZEROS, hashlib.sha256(data).hexdigest().encode(), 1)


def unpacked(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read tensors and the mapping of facts, which is None in a file that no run wrote.

    Raises safetensors' error, an OSError or a ValueError if the file is damaged.
    """
    with safe_open(path, framework="pt") as stored:
        text = (stored.metadata() or {}).get(_KEY)
        state = {name: stored.get_tensor(name) for name in list(stored.keys())}
    if text is None:
        return state, None
    facts = json.loads(text)
    known = str(facts.pop(_SUM, "")) if isinstance(facts, dict) else ""
    blank = path.read_bytes().replace(known.encode(), _ZEROS, 1)
    if hashlib.sha256(blank).hexdigest() != known:
        raise ValueError("its checksum is wrong")
    return state, facts
