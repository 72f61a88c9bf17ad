# SPDX-License-Identifier: Apache-2.0
"""Images with instances: how they are prepared when data are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from keymix.data.decode import Size
from keymix.data.detection.table import InstanceSource, InstanceTable
from keymix.data.files import in_chunks
from keymix.data.loading import Preparation
from keymix.data.record import DataFacts
from keymix.data.sources.base import Fault, Source, Table, refuse
from keymix.data.specs import Options
from keymix.data.splits import Part
from keymix.errors import UserError
from keymix.task import Task


class InstancePreparation(Preparation):
    """What loading does for images with instances.

    All annotations and the headers of all images are checked here, before anything is trained.
    """

    source: InstanceSource

    def __init__(self, source: Source, spec: str, options: Options, task: Task) -> None:
        super().__init__(source, spec, options, task)
        self._left_out: dict[str, int] = {}

    def look(self, tables: Mapping[str, Table]) -> None:
        """Read the headers of all images."""
        self._seen = {name: _seen(_instances(table)) for name, table in tables.items()}

    def broken(self, name: str, table: Table) -> Mapping[int, str]:
        """Decode every image, and say what is wrong with those of a split."""
        damaged = dict(super().broken(name, table))
        for i, faults in enumerate(self._seen[name]):
            if faults:
                damaged[i] = "; ".join(fault.message for fault in faults)
        return dict(sorted(damaged.items()))

    def check(self, tables: Mapping[str, Table]) -> None:
        """Refuse the first fault, and training images without any instance."""
        loose = self.source.loose
        for name, table in tables.items():
            unfit = [_instances(table).unfit(i) for i in range(len(table))]
            if self.options.skip_corrupt:
                self._left_out[name] = sum(map(len, unfit))
                continue
            refuse(loose, "entries")
            for of_image, of_annotations in zip(self._seen[name], unfit, strict=True):
                refuse(of_image)
                refuse(of_annotations, "annotations")
        if loose:
            self._notes.append(f"entries that belong to no image left out: {len(loose):,}")
        train = _instances(tables["train"])
        if train.annotations.joined("crowd").all():
            raise UserError(
                f"data {self.spec}: none of the {len(train):,} training images has an instance "
                "that is no crowd, so nothing can be learned. Name other data."
            )

    def sizes(self, table: Table) -> list[Size]:
        """Return the sizes that are stated, since `check` compared them with the images."""
        return [image.size for image in _instances(table).annotations.images]

    def facts(self, facts: DataFacts) -> DataFacts:
        """Keep the source's own numbers of the classes, and whether instances have outlines."""
        annotations = self.source.train.annotations
        return replace(
            facts,
            class_ids=annotations.category_ids,
            outlines=annotations.outlined,
            annotations_left_out=sum(self._left_out.values()) or None,
        )

    def notes(self, parts: Mapping[str, Part]) -> list[str]:
        """Say which annotations were left out, and how many images have no instances."""
        if any(self._left_out.values()):
            of = ", ".join(f"{number:,} of {name}" for name, number in self._left_out.items())
            self._notes.append(
                f"unfit annotations left out: {of}; what they mark counts as background"
            )
        if not self.source.train.annotations.outlined:
            self._notes.append("no annotation of train has an outline: boxes alone are learned")
        counts = [_instances(part.table).annotations.counts[part.rows] for part in parts.values()]
        empty = sum(int((of == 0).sum()) for of in counts)
        noted = [f"{empty:,} images have no instances"] if empty else []
        return [*super().notes(parts), *noted]


def _seen(table: InstanceTable) -> list[Sequence[Fault]]:
    """Look at all images of a table."""

    def look(rows: range) -> list[Sequence[Fault]]:
        return [table.inspect(i) for i in rows]

    return [each for part in in_chunks(len(table), look) for each in part]


def _instances(table: Table) -> InstanceTable:
    assert isinstance(table, InstanceTable)
    return table
