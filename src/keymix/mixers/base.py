# SPDX-License-Identifier: Apache-2.0
"""The seam: what a mixer is (`TokenMixer`) and what it claims (`Traits`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.arguments import checked
from keymix.errors import GridNeeded, NoAttentionMap, UserError
from keymix.layers.folding import Foldable
from keymix.mixers.site import Grid, KeyGrid, Site

__all__ = [
    "BackendChoice",
    "Grid",
    "ImageMixer",
    "Queries",
    "Site",
    "Stage",
    "TokenMixer",
    "Traits",
    "check_stage",
    "checked_device",
    "explain_backend",
    "heads_first",
    "heads_last",
    "probability",
    "query_rows",
    "redefines",
    "split_prefix",
    "take_rows",
    "to_image",
    "to_tokens",
]

Queries = Sequence[int] | Tensor
Stage = Literal["softmax", "final"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a mixer claims about itself; the contract tests hold it to every claim.

    Attributes:
        domain: ``"dense"`` for real-valued tokens, ``"spiking"`` for ``[T, B, N, C]`` spikes,
            ``"any"`` where either will do.
        mixes_prefix: Whether prefix tokens receive anything from patch tokens. Where False, a
            class token never sees the image, and models read out by the mean of patch tokens.
        maskable: Whether a bias of minus infinity at (n, m) keeps token m's value from query n.
        permutation: ``"equivariant"`` if permuting the tokens permutes the output and does no
            more, ``"positional"`` if the place on the grid matters.
        control: Whether it stands in comparisons as a control, not as a mechanism to choose.
        named_only: Whether comparisons leave it out unless it is named: it combines mechanisms
            that are registered alone, or is of none of the four papers.
    """

    domain: Literal["dense", "spiking", "any"] = "dense"
    mixes_prefix: bool = True
    maskable: bool = True
    permutation: Literal["equivariant", "positional"] = "equivariant"
    control: bool = False
    named_only: bool = False


@dataclass(frozen=True)
class BackendChoice:
    """Which path a mixer takes and why.

    Attributes:
        name: ``"reference"``, ``"sdpa"`` or ``"blocked"``.
        why: The reason in words.
    """

    name: str
    why: str


class TokenMixer(Foldable):
    """A map of tokens ``[*, N, C]`` to tokens ``[*, N, C]``: the one seam of keymix.

    A subclass takes a :class:`Site` and keyword-only options that it honours, and writes
    ``forward(x, grid=None, bias=None)``. ``*`` is any leading axes: ``B`` or ``B, windows`` or
    ``T, B``.

    Args:
        site: Where the mixer sits.
    """

    traits: ClassVar[Traits] = Traits()
    grid_parameters: ClassVar[
        tuple[str, ...]
    ] = ()  # names in a state with one row per position of a grid
    why_no_map: ClassVar[str] = "it has no queries and keys"  # said where it forms no map
    family: ClassVar[str] = "other"  # by which lists group it, such as "kernels"
    about: ClassVar[str] = ""  # what it does and its paper, in plain words, for reports
    collapse_remedy: ClassVar[str] = ""  # what it has against maps that are alike, in words
    # submodule to the paper's name of its spikes; of "proj" it names what comes in
    spiking_roles: ClassVar[Mapping[str, str]] = MappingProxyType({})
    token_mask: ClassVar[str] = ""  # which of its spikes let tokens through, [T, *, h, N, 1]
    mixer_name: ClassVar[str] = ""  # set by register_mixer
    built_with: Mapping[str, Any] = MappingProxyType({})  # its options, set by registry.build
    chosen_key_grid: KeyGrid | None = None  # of fewer keys than tokens, where an option says so

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    @classmethod
    def forms_map(cls) -> bool:
        """Whether it forms an attention map of tokens, or :attr:`why_no_map` says why not."""
        return cls.attention_map is not TokenMixer.attention_map

    @property
    def claims(self) -> Traits:
        """The traits of this instance: those of the class, as its options change them."""
        return self.traits

    @property
    def zero_gradients(self) -> frozenset[str]:
        """Names of parameters whose gradient is zero by construction in the present mode."""
        return frozenset()

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The linear maps in and out, which a host initialises like its own."""
        return ()

    @property
    def optional_state(self) -> frozenset[str]:
        """Names of buffers that a state may hold or lack, and that loading takes either way.

        A state lacks one where the grid that it comes from says all of it.
        """
        return frozenset()

    @property
    def keeps_grid(self) -> bool:
        """Whether what it holds a position stays where it lies when tokens take another grid."""
        return False

    def key_grid_for(self, grid: Grid, count: int | None = None) -> Grid | None:
        """Return where keys of tokens on a grid lie, None where the tokens do.

        Args:
            grid: Token grid.
            count: Number of keys, where known; it distinguishes strides that a small grid fits.
        """
        return self.site.key_grid_on(grid)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay would pull away from their neutral value."""
        return set()

    @property
    def tied_to_grid(self) -> bool:
        """Whether it holds weights or tables per position, so that no other grid will do.

        As far as can be seen from outside: places matter to it and it holds anything at all. A
        mixer that knows better says so.
        """
        state = (*self.parameters(), *self.buffers())
        return self.claims.permutation == "positional" and bool(state)

    def refuses_grid(
        self, grid: Grid, *, key_grid: Grid | None = None, window_grid: Grid | None = None
    ) -> str | None:
        """Say why it cannot take another geometry, with the remedy; None if it can.

        A host asks all mixers of a model before it changes any.

        Args:
            grid: Token grid (H, W).
            key_grid: Grid of the keys where they lie apart; follows from the site's stride if
                None.
            window_grid: How windows lie (rows, columns); as they do if None.
        """
        if self.tied_to_grid and tuple(grid) != self.site.grid:
            return (
                f"mixer {self.mixer_name!r} holds weights for every position of its grid "
                f"{self.site.grid}; build the model for the new image size"
            )
        return None

    def set_grid(
        self, grid: Grid, *, key_grid: Grid | None = None, window_grid: Grid | None = None
    ) -> None:
        """Take another geometry from now on, as a host's ``set_input_size`` does.

        Args:
            grid: Token grid (H, W).
            key_grid: As in :meth:`refuses_grid`.
            window_grid: As in :meth:`refuses_grid`.

        Raises:
            UserError: If :meth:`refuses_grid` has a reason; nothing has changed then.
        """
        reason = self.refuses_grid(grid, key_grid=key_grid, window_grid=window_grid)
        if reason is not None:
            raise UserError(reason)
        self.site = self.site.on(grid, key_grid=key_grid, window_grid=window_grid)

    def adapt_state(
        self,
        state: dict[str, Tensor],
        grid: Grid,
        *,
        key_grid: Grid | None = None,
        window_grid: Grid | None = None,
    ) -> dict[str, Tensor]:
        """Make the tensors of a checkpoint from another grid fit this mixer.

        What lies on the grid (:attr:`grid_parameters`) is resampled, also what the state leaves
        out because its grid says it (:attr:`optional_state`); the rest, and what no resampling can
        make fit, is returned as it is.

        Args:
            state: Tensors by their name in this mixer.
            grid: Token grid of the checkpoint.
            key_grid: Its key grid; follows from the site's stride if None.
            window_grid: How its windows were arranged; as they are here if None.
        """
        return dict(state)

    def fold(self) -> None:
        """Compute the same with less from now on, for inference: fold what no longer changes.

        ``keymix.fold_for_inference`` calls it once, on a copy in eval mode, without gradients. A
        mixer calls ``super().fold()`` and folds what it added: it replaces parameters and
        submodules and writes into none, since others may share them. Maps, grids and backends stay
        as they are; where another grid can no longer be served, :meth:`refuses_grid` says so. What
        a subclass computes in its own way is left alone (:func:`redefines`). Here nothing is
        folded.
        """

    # ---- what ``keymix.swap`` may copy and calibrate -----------------------------------------

    @classmethod
    def learned_keys(cls, site: Site, options: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Name the parameters that stand in place of computed keys, by the queries they meet.

        ``keymix.swap`` estimates them from calibration images. ``"queries"`` are all of them,
        ``"prefix queries"`` those of prefix tokens, ``"unfolded k"`` those of patches, each with
        its k x k neighbours, and a one. The parameters together hold a row of weights for each
        head and key: ``{"queries": ("key",)}`` says that ``key`` is ``[h, M, d]``.

        Args:
            site: Where the mixer sits.
            options: All of its options, defaults included.
        """
        return {}

    def transfer_options(self) -> dict[str, Any]:
        """Return the options that a mixer in its place shall have too, where it has them."""
        return {}

    def neutralize(self, copied: Collection[str]) -> set[str]:
        """Let what it adds to plain attention start where it changes nothing.

        Args:
            copied: Names of what was copied, which stays.

        Returns:
            The names of what was set.
        """
        return set()

    # ---- a call -----------------------------------------------------------------------------

    def choose_backend(
        self,
        device: torch.device | None = None,
        shape: Sequence[int] | None = None,
        bias: Tensor | None = None,
    ) -> BackendChoice:
        """Say which path a forward pass on ``device``, of tokens of a shape, takes and why."""
        return BackendChoice("reference", "this mixer has one path")

    def resolve_grid(self, x: Tensor, grid: Grid | None) -> Grid | None:
        """Return the grid of this call, after checking that ``x`` fits it.

        A mixer to which places are all one, and without projections that look at the grid, takes
        any number of tokens unless a grid is handed in.

        Raises:
            UserError: If width or number of tokens disagree with the site, or the mixer is tied
                to another grid.
        """
        if x.shape[-1] != self.site.dim:
            raise UserError(
                f"tokens are {x.shape[-1]} wide but this mixer was built for dim={self.site.dim}"
            )
        given = grid is not None
        grid = self.site.grid if grid is None else grid
        if grid is not None and tuple(grid) != self.site.grid and self.tied_to_grid:
            reason = self.refuses_grid(grid)
            if reason is not None:
                raise UserError(f"got {x.shape[-2]} tokens on a grid of {grid}: {reason}")
        placed = self.traits.permutation == "positional" or self.site.project is not None
        if grid is not None and (given or placed):
            wanted = self.site.num_prefix_tokens + grid[0] * grid[1]
            if x.shape[-2] != wanted:
                raise UserError(
                    f"got {x.shape[-2]} tokens, but {self.site.num_prefix_tokens} prefix tokens "
                    f"and a grid of {grid[0]}x{grid[1]} make {wanted}; pass grid=(H, W) of these "
                    "tokens, or build the mixer for their grid"
                )
        return grid

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Mix the tokens.

        Args:
            x: Tokens, the prefix first.
            grid: Grid (H, W) of these tokens, where it is not the site's.
            bias: Added to the logits, broadcastable to ``[*, h, N, M]``; mixers without logits
                ignore one they are never given, since hosts ask ``claims.maskable`` first.
        """
        raise TypeError(f"{type(self).__name__} must define forward(x, grid=None, bias=None)")

    def attention_map(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        queries: Queries | None = None,
        stage: Stage = "softmax",
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return rows of the attention map, ``[*, h, Q, M]``, with gradients.

        Raises:
            NoAttentionMap: Here always: a mixer without logits has no map.
        """
        name = self.mixer_name or type(self).__name__
        raise NoAttentionMap(f"mixer {name!r} forms no attention map: {self.why_no_map}")


class ImageMixer(TokenMixer):
    """A mixer of patch tokens as an image on their grid; prefix tokens pass through.

    A subclass writes ``mix(image)`` and says in :attr:`why_grid` what it does on the grid.
    """

    traits = Traits(mixes_prefix=False, maskable=False, permutation="positional", control=True)
    why_grid: ClassVar[str] = "mixes an image"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if site.grid is None:
            raise GridNeeded(f"mixer {self.mixer_name!r} {self.why_grid} and so needs grid=(H, W)")

    def mix(self, image: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Mix patch tokens arranged as images."""
        raise TypeError(f"{type(self).__name__} must define mix(image)")

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Mix the patch tokens on their grid."""
        grid = self.resolve_grid(x, grid)
        assert grid is not None  # the site has one
        prefix, patches = split_prefix(x, self.site.num_prefix_tokens)
        tokens = to_tokens(self.mix(to_image(patches, grid)), patches.shape[:-2])
        return torch.cat((prefix, tokens), -2) if self.site.num_prefix_tokens else tokens


def redefines(mixer: TokenMixer, known: type[TokenMixer], *steps: str) -> bool:
    """Whether a subclass of ``known`` has methods of its own among ``steps``."""
    kinds = type(mixer).__mro__
    return any(step in vars(kind) for kind in kinds[: kinds.index(known)] for step in steps)


def split_prefix(x: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Split tokens ``[*, P + HW, C]`` into prefix ``[*, P, C]`` and patches ``[*, HW, C]``."""
    return x[..., :prefix, :], x[..., prefix:, :]


def to_image(patches: Tensor, grid: Grid) -> Tensor:
    """Arrange patch tokens ``[*, H * W, C]`` as images ``[prod(*), C, H, W]``."""
    return patches.transpose(-2, -1).reshape(-1, patches.shape[-1], *grid)


def to_tokens(image: Tensor, lead: torch.Size) -> Tensor:
    """Undo :func:`to_image`: images ``[prod(lead), C, H, W]`` to tokens ``[*lead, H * W, C]``."""
    tokens = image.flatten(2).transpose(1, 2)
    return tokens.reshape(*lead, *tokens.shape[1:])


def take_rows(t: Tensor, rows: Tensor | None) -> Tensor:
    """Take rows (axis -2) of a tensor; all of them, or a broadcast axis, as they are."""
    if rows is None or t.ndim < 2 or t.shape[-2] == 1:
        return t
    return t.index_select(-2, rows)


def heads_last(maps: Tensor) -> Tensor:
    """Turn maps ``[*, h, Q, M]`` to ``[*, Q, M, h]``, in steps that every exporter knows."""
    return maps.transpose(-3, -2).transpose(-2, -1)


def heads_first(mixed: Tensor) -> Tensor:
    """Undo :func:`heads_last`."""
    return mixed.transpose(-2, -1).transpose(-3, -2)


def query_rows(queries: Queries | None, x: Tensor) -> Tensor | None:
    """Turn the query tokens asked for into indices on the device of ``x``; None stays None."""
    if queries is None:
        return None
    rows = torch.as_tensor(queries, dtype=torch.long, device=x.device).reshape(-1)
    count = x.shape[-2]
    if rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= count:
        raise UserError(f"queries must be indices of the {count} tokens, got {queries}")
    return rows


def check_stage(stage: str) -> None:
    """Refuse a stage of the map that does not exist."""
    if stage not in ("softmax", "final"):
        raise UserError(f"{stage=} must be 'softmax' or 'final'")


def probability(name: str, value: float) -> float:
    """Check a probability in [0, 1)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 <= value < 1.0:
        raise UserError(f"{name}={value!r} must be a probability, 0 <= {name} < 1")
    return float(value)


def checked_device(device: torch.device | str) -> torch.device:
    """Make a device of its name, or refuse it."""
    try:
        return torch.device(device)
    except RuntimeError as error:
        first = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(f"device {str(device)!r} cannot be used here: {first}") from error


@checked
def explain_backend(
    mixer: TokenMixer,
    device: torch.device | str | None = None,
    shape: Sequence[int] | None = None,
) -> BackendChoice:
    """Say which computation path a mixer takes on its next call, and why.

    Args:
        mixer: Any mixer.
        device: Where it would run; that of its parameters if None.
        shape: Of the tokens, ``[*, N, C]``; those of one image on the mixer's grid if None.

    Raises:
        UserError: If an argument is none of these.
    """
    if device is None:
        device = next((p.device for p in mixer.parameters()), torch.device("cpu"))
    return mixer.choose_backend(checked_device(device), shape)
