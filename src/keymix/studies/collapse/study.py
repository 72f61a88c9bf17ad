# SPDX-License-Identifier: Apache-2.0
"""Do deep layers repeat their attention, several models overlaid: the options and the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keymix.studies.collapse.result import Collapse, Collapses
from keymix.studies.inputs import Images, Loaded, refuse_frames, spikes_instead
from keymix.studies.on_images import StudyOnImages, reading
from keymix.studies.study import Session, words

OPTIONS = (
    ("threshold", "TAU", 0.5, "cosine above which two columns are similar"),
    ("similar", "SHARE", 0.8, "share of similar columns above which a block is like the last"),
    ("unique", "SHARE", 0.9, "share of similar columns below which a block is unique"),
    ("nearest", "K", 2, "blocks that a block is compared with, the nearest on both sides"),
)
"""Arguments of `keymix.collapse`, each with its unit and what it is."""


class _Collapse(StudyOnImages[Collapses]):
    together = Collapses
    summary = "do deep layers repeat their attention: DeepViT's similarity, entropy, sinks, rank"
    description = """\
Measure attention collapse (DeepViT, Eq. 2 and 7): how alike the attention maps of every two
blocks are, of neighbours, of the heads of a block; how many blocks are similar, and which could
share one map. Next to it the entropy of attention, the most attended token, and effective rank and
similarity of the tokens along the blocks. Several models are overlaid."""
    examples = """\
examples:
  keymix analyze collapse my-run
  keymix analyze collapse vit-run deepvit-run --out collapse
  keymix analyze collapse vit_small_patch16_224 --pretrained --images photos --limit 64
  keymix analyze collapse vit_32b --images folder:photos --layers 16-31 --nearest 4
  keymix analyze collapse my-run --json > collapse.json

Blocks are numbered from 1; --layers counts from 0, as the model's paths do.
docs/collapse.md explains every measure with its equation."""

    def add_options(self, add: Callable[..., Any]) -> None:
        super().add_options(add)
        add(
            "--layers",
            type=words,
            metavar="LIST",
            help="with commas: numbers from 0, ranges such as 6-11, patterns of paths "
            "(default: all)",
        )
        for name, metavar, default, what in OPTIONS:
            said = f"{what} (default: {default})"
            add(f"--{name}", type=type(default), default=default, metavar=metavar, help=said)

    def prepare(self, loaded: Sequence[Loaded], given: argparse.Namespace) -> None:
        refuse_frames(loaded)

    def measure(
        self, loaded: Loaded, images: Images, given: argparse.Namespace, session: Session
    ) -> Collapse:
        from keymix.studies.collapse.measure import collapse

        with reading(session, loaded, images) as progress:
            found = collapse(
                loaded.model,
                images.batches(given.batch_size),
                layers=given.layers,
                **{name: getattr(given, name) for name, *_ in OPTIONS},
                batch_size=given.batch_size,
                progress=progress,
            )
        instead = spikes_instead(loaded)
        if instead:
            session.note(f"{loaded.label}: spikes form no attention map{instead}")
        return replace(found, of=loaded.studied_on(images))


STUDY = _Collapse()
