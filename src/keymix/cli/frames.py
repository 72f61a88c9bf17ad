# SPDX-License-Identifier: Apache-2.0
"""Frames of events as an analysis takes them on the command line, for runs on recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from keymix.cli.models_and_images import Images, View, evenly, is_spec
from keymix.errors import UserError, one_line
from keymix.report import formats

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.cli.models_and_images import Loaded
    from keymix.train.runs import Run


@dataclass(frozen=True, kw_only=True)
class FramesView(View):
    """How a model is shown frames: the counts that they are."""

    def normalised(self, pixels: Tensor) -> Tensor:
        """Turn counts ``[*, T, C, H, W]`` into float32."""
        return pixels.float()


@dataclass(frozen=True, kw_only=True)
class Frames(Images):
    """Recordings of events for one model, opened one by one as frames ``[T, C, H, W]``."""

    kind: ClassVar[str] = "recordings"

    def pixels(self, i: int) -> Tensor:
        """Read the frames of a recording, counts ``[T, C, H, W]``.

        Raises:
            UserError: If it is damaged; it is named.
        """
        frames: Tensor = self.open(i)
        return frames

    def picture(self, pixels: Tensor) -> Tensor:
        """Make of frames what a person looks at, uint8 ``[3, H, W]``."""
        from keymix.data.pixels import picture_of

        return picture_of(pixels)


def refuse_frames(loaded: Sequence[Loaded]) -> None:
    """Refuse runs on recordings where an analysis looks at images.

    Raises:
        UserError: If there is one; it names the analysis that takes it.
    """
    for one in loaded:
        if takes_frames(one):
            raise UserError(
                f"{one.name!r} is a run on recordings of events, and this works on images alone"
                f"{spikes_instead(one)}"
            )


def spikes_instead(loaded: Loaded) -> str:
    """Name the analysis of a spiking network's spikes; nothing for other models."""
    from keymix.hosts.spiking import spiking_stages

    if not spiking_stages(loaded.model):
        return ""
    return f"; `keymix analyze spikes {loaded.name}` shows its spikes"


def takes_frames(loaded: Loaded) -> bool:
    """Tell whether a model is a run on recordings of events."""
    return loaded.run is not None and loaded.run.weights()[1].data.events


def load_frames(
    loaded: Loaded, words: Sequence[str] | None, *, limit: int | None, time_steps: int | None
) -> Frames:
    """Find the recordings that a run on events is shown: those of its test split, by default.

    Args:
        loaded: The run.
        words: What ``--images`` was given: recordings, folders, or one data spec; None for the
            run's own data.
        limit: Most recordings, evenly over those that there are; None for all.
        time_steps: Frames a recording; None for the run's own.

    Raises:
        UserError: If there are none, or they do not fit the run.
    """
    run = loaded.run
    if run is None:
        raise UserError(f"{loaded.name!r} is a model by name and takes images")
    view = FramesView(**vars(loaded.view))
    if words is None or (len(words) == 1 and is_spec(words[0])):
        return _of_data(run, None if words is None else words[0], view, limit, time_steps)
    return _of_files(run, words, view, limit, time_steps)


def _of_data(
    run: Run, spec: str | None, view: View, limit: int | None, time_steps: int | None
) -> Frames:
    from keymix.train.model import load_data

    config = run.recipe.data
    if spec is not None:
        config = replace(config, spec=spec, limit=None, event_split=None)
    if time_steps is not None:
        config = replace(config, time_steps=time_steps)
    split = load_data(config, image_size=view.size).test
    rows = evenly(len(split), limit)
    return Frames(
        origin=f"test recordings of {config.spec}",
        names=tuple(split.ids(row) for row in rows),
        view=view,
        open=lambda i: split.read(rows[i]),
    )


def _of_files(
    run: Run, words: Sequence[str], view: View, limit: int | None, time_steps: int | None
) -> Frames:
    from keymix.data.events.files import read_frames
    from keymix.train.runs import image_files

    record = run.weights()[1].data
    if time_steps is not None:
        record = replace(record, time_steps=time_steps)
    found = image_files(words, events=True)
    chosen = [found[i] for i in evenly(len(found), limit)]
    origin = one_line(words[0]) if len(words) == 1 else f"{formats.count(len(found))} files"
    return Frames(
        origin=origin,
        names=tuple(map(str, chosen)),
        view=view,
        open=lambda i: read_frames(chosen[i], record, view.size),
    )
