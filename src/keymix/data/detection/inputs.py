# SPDX-License-Identifier: Apache-2.0
"""Images with instances: how they are prepared when data are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

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
        assert isinstance(source, InstanceSource)
        super().__init__(source, spec, options, task)
        self._left_out: dict[str, list[Sequence[Fault]]] = {}
        if options.skip_corrupt:
            self.source = replace(
                source,
                train=source.train.without_unfit(),
                val=None if source.val is None else source.val.without_unfit(),
                test=None if source.test is None else source.test.without_unfit(),
            )

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
        if self.options.skip_corrupt:
            self._notes += [f"left out: {each}" for each in _counted(loose)]
            for name, table in tables.items():
                if found := _instances(table).left_out():
                    self._left_out[name] = found
        else:
            refuse(loose, "entries")
            for name, table in tables.items():
                for i, faults in enumerate(self._seen[name]):
                    unfit = [*chain(*_instances(table).unfit(i))]
                    refuse([fault for fault in faults if fault not in unfit])
                    refuse(unfit, "annotations")
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
        return replace(
            facts,
            class_ids=self.source.train.annotations.category_ids,
            annotations_left_out=sum(map(len, self._left_out.values())) or None,
        )

    def notes(self, parts: Mapping[str, Part]) -> list[str]:
        """Say which annotations were left out, and how many images have no instances."""
        if self._left_out:
            every = [faults for of_split in self._left_out.values() for faults in of_split]
            of = ", ".join(f"{len(found)} of {name}" for name, found in self._left_out.items())
            why = ", ".join(_counted([faults[0] for faults in every]))
            self._notes.append(
                f"unfit annotations left out: {of}; what they mark counts as background; {why}"
            )
        counts = [_instances(part.table).instances.counts[part.rows] for part in parts.values()]
        empty = sum(int((of == 0).sum()) for of in counts)
        noted = [f"{empty:,} images have no instances"] if empty else []
        return [*super().notes(parts), *noted]


def _counted(faults: Iterable[Fault]) -> list[str]:
    """Count faults by their kind."""
    counts = Counter(fault.kind for fault in faults)
    return [f"{kind} ({number:,})" for kind, number in counts.items()]


def _seen(table: InstanceTable) -> list[Sequence[Fault]]:
    """Look at all images of a table."""

    def look(rows: range) -> list[Sequence[Fault]]:
        return [table.inspect(i) for i in rows]

    return [each for part in in_chunks(len(table), look) for each in part]


def _instances(table: Table) -> InstanceTable:
    assert isinstance(table, InstanceTable)
    return table
