# SPDX-License-Identifier: Apache-2.0
"""Images of data with masks as an analysis takes them on the command line: read as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keymix.cli.models_and_images import Images, SplitName, evenly, is_spec
from keymix.data.specs import task_name
from keymix.data.tasks import SEGMENTATION
from keymix.errors import UserError, one_line
from keymix.report import formats

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.cli.models_and_images import Loaded
    from keymix.train.recipe import DataConfig


@dataclass(frozen=True, kw_only=True)
class Scans(Images):
    """Images for one model that are stretched to its size, not cropped; ``open`` reads them.

    Attributes:
        stacked: Whether their channels are slices of a stack.
    """

    stacked: bool

    def pixels(self, i: int) -> Tensor:
        """Read an image, stretched to the size, uint8 ``[C, H, W]``.

        Raises:
            UserError: If it is damaged, or has other channels than the model takes.
        """
        image: Tensor = self.open(i)
        wanted = self.view.in_chans
        if len(image) == 1 and wanted == 3:
            return image.repeat(3, 1, 1)
        if len(image) != wanted:
            raise UserError(
                f"{one_line(self.names[i])}: {len(image)} channels; the model takes {wanted}"
            )
        return image

    def picture(self, pixels: Tensor) -> Tensor:
        """Make of what `pixels` gives what a person looks at: of a stack the middle slice."""
        return pixels[len(pixels) // 2][None] if self.stacked else pixels


def takes_scans(loaded: Loaded, words: Sequence[str] | None) -> bool:
    """Tell whether a model is shown images of data with masks.

    Args:
        loaded: The model.
        words: What ``--images`` was given.
    """
    if words is not None and len(words) == 1 and is_spec(words[0]):
        return task_name(words[0]) == SEGMENTATION.name
    return loaded.run is not None and task_name(loaded.run.recipe.data.spec) == SEGMENTATION.name


def load_scans(
    loaded: Loaded, words: Sequence[str] | None, *, limit: int | None, split: SplitName
) -> Scans:
    """Find the images that a model is shown.

    Args:
        loaded: The model; by name, or a run on masks.
        words: What ``--images`` was given: files, folders, or one data spec; None for the run's own
            data.
        limit: Most images, evenly over those that there are; None for all.
        split: Which images of a data spec or of the run's data.

    Raises:
        UserError: If there are none, or they do not fit the model.
    """
    from keymix.train.model import load_data

    if words is not None and not (len(words) == 1 and is_spec(words[0])):
        return _of_files(loaded, words, limit)
    config = _config(loaded, None if words is None else words[0])
    images = getattr(load_data(config, image_size=loaded.view.size), split)
    rows = evenly(len(images), limit)
    return Scans(
        origin=f"{split} images of {config.spec}",
        names=tuple(images.ids(row) for row in rows),
        view=loaded.view,
        open=lambda i: images.read(rows[i]),
        stacked=images.scans is not None and images.scans.stacked,
    )


def _config(loaded: Loaded, spec: str | None) -> DataConfig:
    """The run's settings of data, for other data if a spec is given."""
    from keymix.train.recipe import DataConfig
    from keymix.train.run_data import of_other_data

    if loaded.run is not None and task_name(loaded.run.recipe.data.spec) == SEGMENTATION.name:
        config = loaded.run.recipe.data
        return config if spec in (None, config.spec) else of_other_data(config, spec)
    if spec is None:
        raise UserError(f"{loaded.name!r} is a model by name and brings no images: give --images")
    return DataConfig(spec=spec)


def _of_files(loaded: Loaded, words: Sequence[str], limit: int | None) -> Scans:
    from keymix.data.segmentation.files import ScanFile
    from keymix.data.segmentation.table import resized_image
    from keymix.train.runs import image_files

    assert loaded.run is not None
    slices = loaded.run.recipe.data.spec.startswith("uwgi:")
    found = image_files(words)
    chosen = [found[i] for i in evenly(len(found), limit)]
    view = loaded.view
    files = [ScanFile(path=path, slices=slices, channels=view.in_chans) for path in chosen]
    origin = one_line(words[0]) if len(words) == 1 else f"{formats.count(len(found))} files"
    return Scans(
        origin=origin,
        names=tuple(map(str, chosen)),
        view=view,
        open=lambda i: resized_image(files[i].pixels(), view.size),
        stacked=slices and view.in_chans > 1,
    )
