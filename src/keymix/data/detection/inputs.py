# SPDX-License-Identifier: Apache-2.0
"""Images with instances: how they are prepared when data are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from keymix.data.decode import Size
from keymix.data.detection.table import KINDS, InstanceSource, InstanceTable
from keymix.data.files import in_chunks
from keymix.data.loading import Preparation
from keymix.data.record import DataFacts
from keymix.data.sources.base import Fault, Table, refuse
from keymix.data.splits import Part
from keymix.errors import UserError


class InstancePreparation(Preparation):
    """What loading does for images with instances.

    All annotations and the headers of all images are checked here, before anything is trained.
    """

    source: InstanceSource

    def look(self, tables: Mapping[str, Table]) -> None:
        """Read the headers of all images."""
        self._seen = {name: _seen(_instances(table)) for name, table in tables.items()}

    def broken(self, name: str, table: Table) -> Mapping[int, str]:
        """Decode every image, and say what is wrong with images and annotations of a split."""
        damaged = dict(super().broken(name, table))
        for i, faults in enumerate(self._seen[name]):
            if faults:
                damaged[i] = "; ".join(fault.message for fault in faults)
        return dict(sorted(damaged.items()))

    def check(self, tables: Mapping[str, Table]) -> None:
        """Refuse the first fault, and training images without any instance."""
        loose = self.source.loose
        if self.options.skip_corrupt:
            counts = Counter(fault.kind for fault in loose)
            self._notes += [
                f"left out: {KINDS[kind][0]} ({number:,})" for kind, number in counts.items()
            ]
        else:
            refuse(loose)
            for found in self._seen.values():
                for faults in found:
                    refuse(faults)
        train = _instances(tables["train"])
        if train.annotations.crowd[train.instances.positions].all():
            raise UserError(
                f"data {self.spec}: none of the {len(train):,} training images has an instance "
                "that is no crowd, so nothing can be learned. Name other data."
            )

    def sizes(self, table: Table) -> list[Size]:
        """Return the sizes that are stated, since `check` compared them with the images."""
        instances = _instances(table)
        return [instances.size(i) for i in range(len(instances))]

    def facts(self, facts: DataFacts) -> DataFacts:
        """Keep the source's own numbers of the classes."""
        return replace(facts, class_ids=self.source.train.annotations.category_ids)

    def notes(self, parts: Mapping[str, Part]) -> list[str]:
        """Say which images have no instances, of all splits together."""
        counts = [_instances(part.table).instances.counts[part.rows] for part in parts.values()]
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
