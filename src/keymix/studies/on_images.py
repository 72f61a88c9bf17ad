# SPDX-License-Identifier: Apache-2.0
"""A study of several models, each on images of its own."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keymix.studies.inputs import (
    Images,
    Loaded,
    add_arguments,
    load_images,
    load_models,
    warn_of_random,
)
from keymix.studies.study import F, Session, Study


@contextmanager
def reading(session: Session, loaded: Loaded, images: Images) -> Iterator[Callable[[int], None]]:
    """Show how many of the images a model was shown."""
    with session.working() as working:
        text = f"reading {len(images)} {images.kind.nouns} with {loaded.label}"
        working(text, 0.0)
        yield lambda done: working(text, done / len(images))


class StudyOnImages(Study[F]):
    """A study of several models, each on images of its own."""

    together: Callable[[Sequence[Any]], F]  # makes a result of what was measured of each model

    def add_options(self, add: Callable[..., Any]) -> None:
        """Add those of models and images."""
        add_arguments(add)
        add("--batch-size", type=int, default=8, metavar="B", help="images at a time (default: 8)")

    @abstractmethod
    def prepare(self, loaded: Sequence[Loaded], given: argparse.Namespace) -> None:
        """Refuse models that it cannot be of, and set them as the options say."""

    @abstractmethod
    def measure(
        self, loaded: Loaded, images: Images, given: argparse.Namespace, session: Session
    ) -> Any:
        """Measure one model, which is on this machine's device."""

    def run(self, given: argparse.Namespace, session: Session) -> Iterator[F]:
        """Load all models and images, then measure one model after the other."""
        from keymix.train.model import device_of_this_machine

        loaded = load_models(given.models, pretrained=given.pretrained)
        self.prepare(loaded, given)
        steps = getattr(given, "time_steps", None)
        images = [
            load_images(one, given.images, limit=given.limit, time_steps=steps) for one in loaded
        ]
        warn_of_random(loaded, session.note)
        found = []
        for one, shown in zip(loaded, images, strict=True):
            one.model.to(device_of_this_machine())
            found.append(self.measure(one, shown, given, session))
            one.model.to("cpu")
        yield self.together(found)
