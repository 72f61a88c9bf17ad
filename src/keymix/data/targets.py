# SPDX-License-Identifier: Apache-2.0
"""What the inputs of a table or a split have for a model to learn, by position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.decode import Size
from keymix.data.kinds import CLASS, PLACE, VALUE, TargetKind
from keymix.data.random_parameters import flips
from keymix.data.streams import IntArray

Target: TypeAlias = Tensor | dict[str, Tensor]
"""What belongs to one input: a tensor, or several by name."""
Batched: TypeAlias = Target | list[Target]
"""Those of a batch: stacked where they are tensors of one shape, else a list."""


def each_tensor(change: Callable[[Tensor], Tensor], found: Batched) -> Batched:
    """Change every tensor of a target or of a batch of them."""
    if isinstance(found, list):
        return [_each_of_one(change, one) for one in found]
    return _each_of_one(change, found)


def _each_of_one(change: Callable[[Tensor], Tensor], found: Target) -> Target:
    if isinstance(found, Tensor):
        return change(found)
    return {name: change(each) for name, each in found.items()}


class Digest(Protocol):
    """What `hashlib` gives."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Enter bytes."""


class Targets(ABC):
    """The targets of inputs, by position.

    Attributes:
        kind: What they are.
        groups: The group of each, such as a patient, which no two splits may share; None where
            nothing binds inputs together, so that splits are stratified.
        moves: Whether a geometric transform of torchvision moves them with their image: `read`
            gives tv_tensors, or a mapping in which those move that are.
        multilabel: Of masks, whether a pixel may belong to several classes; None of others.
    """

    kind: TargetKind = VALUE
    groups: Sequence[str] | None = None
    moves: bool = False
    multilabel: bool | None = None
    described: ClassVar[str] = ""
    """Where a check counts their classes, ``module:function``; empty where they have none."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def read(self, i: int) -> Target:
        """Read what the loss wants of input ``i``.

        Raises:
            UserError: If it is damaged; it is named.
        """

    def read_at(self, i: int, size: Size) -> Target:
        """Read the target of input ``i`` for an image that is resized.

        Args:
            i: Position.
            size: Height and width of the image.
        """
        target = self.read(i)
        if self.moves:
            from torchvision.transforms.v2 import functional as F

            target = _moved(partial(F.resize, size=list(size)), target)
        return target

    @abstractmethod
    def update_digest(self, digest: Digest) -> None:
        """Enter the targets into the fingerprint of the data."""

    @abstractmethod
    def select(self, rows: IntArray) -> Targets:
        """Make the targets of ``rows`` (ascending)."""

    def batch(self, index: IntArray) -> Batched:
        """Read the targets at some positions: one tensor where shapes agree, else a list."""
        return self.collate([self.read(i) for i in index.tolist()])

    def collate(self, targets: Sequence[Target]) -> Batched:
        """Make a batch of targets that were read: one tensor where shapes agree, else a list."""
        plain = _plain(targets)
        tensors = [each for each in plain if isinstance(each, Tensor)]
        alike = len(tensors) == len(plain) and len({each.shape for each in tensors}) == 1
        return torch.stack(tensors) if alike else plain

    def content(self, i: int) -> bytes:
        """Return bytes that identify the target of input ``i``."""
        target = self.read(i)
        named = {"": target} if isinstance(target, Tensor) else target
        parts = ((f"{name}{tuple(each.shape)}", each) for name, each in named.items())
        return b"".join(head.encode() + each.numpy().tobytes() for head, each in parts)

    @property
    def values(self) -> Tensor | None:
        """All of them as one tensor ``[N, ...]`` that augmentation leaves alone; None if none."""
        return None

    @property
    def strata(self) -> IntArray:
        """The stratum of each, of which every split gets its share; all 0 where there are none."""
        return np.zeros(len(self), dtype=np.int64)

    def sealed(self, digest: str, targets: Sequence[Targets]) -> str:
        """Finish the fingerprint of a set, in hexadecimal digits.

        Args:
            digest: Hash of inputs and targets.
            targets: Those of each split.
        """
        del targets
        return digest

    def resized(self, before: Sequence[Size], after: Sequence[Size]) -> Targets:
        """Make the targets of images that are resized, proportions or not.

        Args:
            before: Height and width of each image.
            after: The same afterwards.
        """
        same = all(one == other for one, other in zip(before, after, strict=True))
        return self if same or not self.moves else _Resized(self, after)

    def augmented(
        self, image: Tensor, target: Target, i: int, augment: Augment, *, seed: int, epoch: int
    ) -> tuple[Tensor, Target]:
        """Augment an image and its target together.

        Args:
            image: uint8 ``[C, H, W]``.
            target: Its target.
            i: Position in the split.
            augment: Which operations may happen.
            seed: Seed.
            epoch: Epoch.
        """
        index = np.array([i], dtype=np.int64)
        if not augment.flip or not flips(index, seed=seed, epoch=epoch)[0]:
            return image, target
        if self.moves:
            from torchvision.transforms.v2 import functional as F

            target = _moved(F.horizontal_flip, target)
        return image.flip(-1), target


class ClassTargets(Targets):
    """Class numbers, one for each input.

    Args:
        labels: int64 ``[N]``.
        groups: See `Targets`.
    """

    kind = CLASS
    described = "keymix.data.check:describe_classes"

    def __init__(self, labels: IntArray, *, groups: Sequence[str] | None = None) -> None:
        self.labels, self.groups = labels, groups

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> Tensor:
        """Return the class number of input ``i``."""
        return torch.tensor(int(self.labels[i]))

    @property
    def values(self) -> Tensor:
        """All class numbers, int64 ``[N]``."""
        return torch.from_numpy(self.labels.astype(np.int64))

    @property
    def strata(self) -> IntArray:
        """The classes."""
        return self.labels

    def update_digest(self, digest: Digest) -> None:
        """Enter the class numbers."""
        digest.update(self.labels.astype("<i8").tobytes())

    def select(self, rows: IntArray) -> ClassTargets:
        """Keep the class numbers of ``rows``."""
        return ClassTargets(self.labels[rows], groups=_chosen(self.groups, rows))


class ArrayTargets(Targets):
    """Numbers of one shape, such as a measurement for each input.

    Args:
        array: Of numbers or truth values, ``[N, ...]``.
        placed: Whether they say where something is in the image; images are not moved then.
        groups: See `Targets`.
    """

    def __init__(
        self, array: NDArray[Any], *, placed: bool = False, groups: Sequence[str] | None = None
    ) -> None:
        self.array, self.groups = _numbers(array), groups
        self.kind = PLACE if placed else VALUE

    def __len__(self) -> int:
        return len(self.array)

    def read(self, i: int) -> Tensor:
        """Copy the numbers of input ``i``."""
        return torch.tensor(self.array[i])

    @property
    def values(self) -> Tensor | None:
        """All numbers, unless they have a place in the image."""
        return None if self.kind.placed else torch.tensor(self.array)

    def update_digest(self, digest: Digest) -> None:
        """Enter shape and numbers."""
        _enter(digest, self.array)

    def select(self, rows: IntArray) -> ArrayTargets:
        """Keep the numbers of ``rows``."""
        groups = _chosen(self.groups, rows)
        return ArrayTargets(self.array[rows], placed=self.kind.placed, groups=groups)


class RaggedTargets(Targets):
    """Numbers of any shape for each input, such as points or boxes; batches are lists.

    Args:
        arrays: One for each input: an array, a tensor, or a tv_tensor of torchvision
            (``BoundingBoxes``, ``KeyPoints``, ``Mask``), which moves with its image.
        placed: Whether they say where something is in the image.
        groups: See `Targets`.
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any] | Tensor],
        *,
        placed: bool = True,
        groups: Sequence[str] | None = None,
    ) -> None:
        self.arrays = [each if isinstance(each, Tensor) else _numbers(each) for each in arrays]
        self.groups = groups
        self.kind = PLACE if placed else VALUE
        self.moves = bool(arrays) and all(
            isinstance(each, Tensor) and type(each) is not Tensor for each in arrays
        )

    def __len__(self) -> int:
        return len(self.arrays)

    def read(self, i: int) -> Tensor:
        """Copy what belongs to input ``i``."""
        found = self.arrays[i]
        return found.clone() if isinstance(found, Tensor) else torch.tensor(found)

    def collate(self, targets: Sequence[Target]) -> list[Target]:
        """List targets that were read, also where shapes happen to agree."""
        return _plain(targets)

    def update_digest(self, digest: Digest) -> None:
        """Enter shape and numbers of each."""
        for each in self.arrays:
            _enter(digest, each.numpy() if isinstance(each, Tensor) else each)

    def select(self, rows: IntArray) -> RaggedTargets:
        """Keep those of ``rows``."""
        arrays = [self.arrays[i] for i in rows.tolist()]
        groups = _chosen(self.groups, rows)
        return RaggedTargets(arrays, placed=self.kind.placed, groups=groups)


class _Resized(Targets):
    """tv_tensors of images that are resized."""

    moves = True

    def __init__(self, targets: Targets, sizes: Sequence[Size]) -> None:
        self.targets, self.sizes = targets, sizes
        self.kind, self.groups = targets.kind, targets.groups

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, i: int) -> Target:
        """Read and resize the target of input ``i``."""
        return self.targets.read_at(i, self.sizes[i])

    def read_at(self, i: int, size: Size) -> Target:
        """Read and resize the target of input ``i`` to another size, at once."""
        return self.targets.read_at(i, size)

    def collate(self, targets: Sequence[Target]) -> Batched:
        """Make a batch as those before do."""
        return self.targets.collate(targets)

    @property
    def strata(self) -> IntArray:
        """The strata, which no size changes."""
        return self.targets.strata

    def update_digest(self, digest: Digest) -> None:
        """Enter the targets as they were."""
        self.targets.update_digest(digest)

    def select(self, rows: IntArray) -> _Resized:
        """Keep those of ``rows``."""
        return _Resized(self.targets.select(rows), [self.sizes[i] for i in rows.tolist()])


def _moved(change: Callable[[Tensor], Tensor], target: Target) -> Target:
    """Move a target with its image; of a mapping, the tv_tensors in it."""
    if isinstance(target, Tensor):
        return change(target)
    return {name: each if type(each) is Tensor else change(each) for name, each in target.items()}


def _plain(targets: Sequence[Target]) -> list[Target]:
    """Take tv_tensors as plain tensors."""
    return [_each_of_one(lambda each: each.as_subclass(Tensor), one) for one in targets]


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Take whole numbers as int64 and others as float32, which is what losses want."""
    array = np.asarray(array)
    whole = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
    return array.astype(np.int64 if whole else np.float32)


def _enter(digest: Digest, array: NDArray[Any]) -> None:
    digest.update(f"{array.shape} {array.dtype.str}\n".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def _chosen(groups: Sequence[str] | None, rows: IntArray) -> Sequence[str] | None:
    return None if groups is None else [groups[i] for i in rows.tolist()]
