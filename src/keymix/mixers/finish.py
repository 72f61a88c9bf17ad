# SPDX-License-Identifier: Apache-2.0
"""What a host does to heads after their projection: norms of queries and keys, rotation, gates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from keymix.mixers.site import Site


class Finish(nn.ModuleDict):
    """The modules that roles and the output pass through, by role.

    Each takes heads ``[*, h, N, d]`` and returns the like, that of ``"out"`` takes
    ``(y [*, N, h * d], x [*, N, C])``, what the heads gathered and the mixer's tokens, and
    returns the like of ``y``. Roles without one pass as they are.

    Args:
        site: Whose ``finish`` makes the modules.
        roles: The roles that the mixer projects.
    """

    def __init__(self, site: Site, roles: Sequence[str]) -> None:
        super().__init__()
        for role in (*roles, "out"):
            made = None if site.finish is None else site.finish(role)
            if made is not None:
                self[role] = made

    def norms(self, role: str) -> bool:
        """Whether a role passes through something that does not say that it ``keeps_scale``."""
        return role in self and not getattr(self[role], "keeps_scale", False)

    def heads(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Finish what came out of the projections."""
        return {role: self[role](t) if role in self else t for role, t in parts.items()}

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """Finish what the heads gathered, before the output projection."""
        out: Tensor = self["out"](y, x) if "out" in self else y
        return out
