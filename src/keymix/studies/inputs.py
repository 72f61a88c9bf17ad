# SPDX-License-Identifier: Apache-2.0
"""Models and images as the analyses take them, read one way by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.analysis.study_record import ModelOnImages, StudiedModel
from keymix.data.kinds import IMAGE, InputKind
from keymix.data.specs import kind_of_spec, list_specs, task_name
from keymix.errors import UserError, one_line
from keymix.report import formats
from keymix.task import DEFAULT
from keymix.train.recipe import DataConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from keymix.analysis.images import View
    from keymix.data.record import DataRecord
    from keymix.data.sample import Row
    from keymix.train.runs import Run

RANDOM = "random weights"
"""What `Loaded.weights` says of a model that nobody trained."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model, ready to be looked into."""

    label: str  # what charts call it; no two of a command are the same
    name: str
    model: nn.Module  # in eval mode, on the CPU
    weights: str  # where its weights come from, in words; `RANDOM` where from nowhere
    view: View  # how it is shown images
    run: Run | None  # the run, where it is one
    record: DataRecord | None = None  # the record of the run's data

    def studied(self) -> StudiedModel:
        """Return what a record says of it."""
        random = self.weights == RANDOM
        return StudiedModel(label=self.label, name=self.name, weights=self.weights, random=random)

    def studied_on(self, images: Images) -> ModelOnImages:
        """Return what a record says of it and of images that it was shown."""
        of = vars(self.studied())
        return ModelOnImages(**of, origin=images.origin, left_out=dict(images.left_out))


@dataclass(frozen=True, kw_only=True)
class Images:
    """Inputs of any kind for one model, read one by one."""

    origin: str  # where they come from, in words
    names: tuple[str, ...]  # of each: its file, or its file and row
    view: View  # how they are shown
    read: Callable[[int], Tensor]  # reads one by its number, at the size of the view
    # name and reason of each that could not be read, as `batches` meets them
    left_out: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def kind(self) -> InputKind:
        """What they are."""
        return self.view.kind

    def pixels(self, i: int) -> Tensor:
        """Read one: uint8 ``[C, H, W]`` of an image, counts ``[T, C, H, W]`` of a recording.

        A grey image fills the three channels of a model of colour.
        """
        pixels, wanted = self.read(i), self.view.in_chans
        channels = pixels.shape[-3]
        if channels == wanted:
            return pixels
        if channels == 1 and wanted == 3:
            return pixels.repeat_interleave(3, -3)
        raise UserError(f"{one_line(self.names[i])}: {channels} channels; the model takes {wanted}")

    def readable(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and `pixels` of each; what is damaged goes to `left_out`, unless all are."""
        some = False
        for i, name in enumerate(self.names):
            try:
                pixels = self.pixels(i)
            except UserError as error:
                self.left_out[name] = str(error)
                continue
            some = True
            yield name, pixels
        if not some:
            why = next(iter(self.left_out.values()), "there is none")
            raise UserError(f"no image of {self.origin} can be read: {why}")

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield normalised batches of those that are `readable`, a tensor each."""
        batch: list[Tensor] = []
        for _, pixels in self.readable():
            batch.append(self.view.normalised(pixels))
            if len(batch) == size:
                yield one_size(batch)
                batch = []
        if batch:
            yield one_size(batch)


def one_size(images: Sequence[Tensor], mean: Sequence[float] = ()) -> Tensor:
    """Stack images, or what they are shown as, ``[*, C, H, W]``.

    Those that keep sizes of their own are filled up at the bottom and the right with the mean of
    each channel, of values 0..1 in bytes: zeros once they are normalised, which they are if no mean
    is given.
    """
    import torch

    height, width = (max(image.shape[axis] for image in images) for axis in (-2, -1))
    filled = []
    for image in images:
        fill = torch.tensor([255 * each for each in mean] or [0.0]).round().to(image.dtype)
        whole = fill[:, None, None].expand(*image.shape[:-2], height, width).clone()
        whole[..., : image.shape[-2], : image.shape[-1]] = image
        filled.append(whole)
    return torch.stack(filled)


def add_arguments(add: Callable[..., Any], *, limit: int = 64) -> None:
    """Add MODEL, ``--pretrained``, ``--images`` and ``--limit`` to a parser."""
    add(
        "models",
        metavar="MODEL",
        nargs="+",
        help="folder of a run, or name of a model: keymix's or any of timm's",
    )
    add(
        "--pretrained",
        action="store_true",
        help="load timm's weights into models given by name; else they are random",
    )
    add(
        "--images",
        nargs="+",
        metavar="IMAGES",
        help="image files, folders, or one data spec such as cifar10 or folder:PATH, of which the "
        "test images are taken (default: test images of the run's own data)",
    )
    add(
        "--limit",
        type=int,
        default=limit,
        metavar="N",
        help=f"most images, evenly over those that there are (default: {limit})",
    )


def load_models(names: Sequence[str], *, pretrained: bool = False) -> list[Loaded]:
    """Load models by folder of a run or by name."""
    runs = [is_run(name) for name in names]
    if pretrained and all(runs):
        raise UserError("--pretrained is of models given by name; here all are runs")
    labels = _labels(names, runs)
    return [
        _run(name, label) if run else named_model(name, label, pretrained=pretrained)
        for name, label, run in zip(names, labels, runs, strict=True)
    ]


def warn_of_random(loaded: Sequence[Loaded], note: Callable[[str], None]) -> None:
    """Say of models that nobody trained that they are not trained."""
    for one in loaded:
        if one.weights == RANDOM:
            note(
                f"{one.name} has random weights: what is read off it says nothing of a trained "
                "model. Add --pretrained, or name the folder of a run."
            )


def load_images(
    loaded: Loaded,
    words: Sequence[str] | None,
    *,
    limit: int | None,
    time_steps: int | None = None,
    view: View | None = None,
) -> Images:
    """Find the inputs that a model is shown: files, or a data set's as a loader shows them.

    `words` are files, folders or one data spec, None for the run's own data; at most `limit` inputs
    are taken, evenly. Recordings have `time_steps` frames, None for the run's own.
    """
    view = view or loaded.view
    if words is not None and not (len(words) == 1 and is_spec(words[0])):
        return _of_files(loaded, words, view, limit, time_steps)
    config = _config(loaded, None if words is None else words[0])
    kind = kind_of_spec(config.spec)
    if kind.noun != loaded.view.kind.noun:
        raise UserError(
            f"data {config.spec!r} holds {kind.holds}, and {loaded.name!r} takes "
            f"{loaded.view.kind.holds}"
        )
    if time_steps is not None and "T" in kind.axes:
        config = replace(config, time_steps=time_steps)
    if _opens_alone(config.spec):
        return _of_rows(_test_rows(config, limit), f"test images of {config.spec}", view)
    return _of_test_split(config, view, limit)


def refuse_frames(loaded: Sequence[Loaded]) -> None:
    """Refuse runs on anything but images where an analysis looks at images."""
    for one in loaded:
        if one.view.kind.noun != IMAGE.noun:
            raise UserError(
                f"{one.name!r} is a run on {one.view.kind.holds}, and this works on images alone"
                f"{spikes_instead(one)}"
            )


def spikes_instead(loaded: Loaded) -> str:
    """Name the analysis of a spiking network's spikes; nothing for other models."""
    from keymix.hosts.stages import spiking_stages

    if not spiking_stages(loaded.model):
        return ""
    return f"; `keymix analyze spikes {loaded.name}` shows its spikes"


# ---- models ---------------------------------------------------------------------------------


def is_run(name: str) -> bool:
    """Whether a word means a run's folder, be it one or not."""
    import timm

    from keymix.models.factory import list_models
    from keymix.train.files import RECIPE

    path = Path(name)
    if "/" in name or (path / RECIPE).exists():
        return True
    return path.exists() and name not in list_models() and not timm.is_model(name)


def _labels(names: Sequence[str], runs: Sequence[bool]) -> list[str]:
    """Name each model by the shortest distinct label."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise UserError(f"model {twice!r} is given twice")
    paths = [
        Path(name).resolve().parts if run else (name,)
        for name, run in zip(names, runs, strict=True)
    ]
    labels = []
    for name, own in zip(names, paths, strict=True):
        tails = (own[-n:] for n in range(1, len(own) + 1))
        alone = (t for t in tails if sum(path[-len(t) :] == t for path in paths) == 1)
        labels.append(one_line("/".join(next(alone, (name,)))))
    return labels


def _run(name: str, label: str) -> Loaded:
    from keymix.analysis.images import View
    from keymix.train.runs import load_run

    run = load_run(name)
    weights = f"last epoch of {name}"
    model, data = run.model_and_data()
    view = View(
        size=data.image_size,
        in_chans=data.in_chans,
        mean=data.mean,
        std=data.std,
        crop_pct=data.crop_pct,
        kind=data.kind,
        white_level=data.white_level,
    )
    return Loaded(
        label=label, name=name, model=model, weights=weights, view=view, run=run, record=data
    )


def named_model(name: str, label: str, *, pretrained: bool = False, **options: Any) -> Loaded:
    """Build a model by its name; without weights of timm's, those that seed 0 gives."""
    import torch

    from keymix.analysis.images import View
    from keymix.models.factory import create_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_model(name, pretrained=pretrained or None, **options)
    weights = "pretrained" if pretrained else RANDOM
    view = View.of(model)
    return Loaded(label=label, name=name, model=model.eval(), weights=weights, view=view, run=None)


# ---- images ---------------------------------------------------------------------------------


def is_spec(word: str) -> bool:
    """Whether a word is a data spec, and no path."""
    return not Path(word).exists() and word.partition(":")[0] in {row.name for row in list_specs()}


def evenly(count: int, limit: int | None) -> list[int]:
    """Choose rows at equal distances, at most ``limit`` of them, which must be 1 or more."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: take at least one image")
    number = count if limit is None else min(limit, count)
    return [i * count // number for i in range(number)]


def _opens_alone(spec: str) -> bool:
    """Return whether images of data open one by one, without reading the whole set.

    So they do where each is a file or a cell: a few are shown at once, and broken ones left out.
    """
    return task_name(spec) == DEFAULT and kind_of_spec(spec) is IMAGE


def _config(loaded: Loaded, spec: str | None) -> DataConfig:
    """The run's settings of data; where other data are named, with what fits those."""
    from keymix.train.evaluation import of_other_data

    own = None if loaded.run is None else loaded.run.recipe.data
    if spec is None:
        if own is None:
            raise UserError(
                f"{loaded.name!r} is a model by name and brings no images: give --images"
            )
        return own
    if own is None or _opens_alone(spec) or task_name(spec) != task_name(own.spec):
        return DataConfig(spec=spec)
    return own if spec == own.spec else replace(of_other_data(own, spec), event_split=None)


def _test_rows(data: DataConfig, limit: int | None) -> Sequence[Row]:
    """Open some test images, as training would split them off."""
    import numpy as np

    from keymix.data.sample import Faults
    from keymix.data.specs import Options, parse
    from keymix.data.splits import Table, make_splits

    entry, argument = parse(data.spec)
    source = entry.open(argument, Faults())
    options = Options(limit=data.limit, val_fraction=data.val_fraction, split_seed=data.split_seed)
    table = Table.of(source.rows)
    parts, _ = make_splits(source, table, data.spec, options)
    test = parts["test"]
    chosen = np.asarray(evenly(len(test.rows), limit), dtype=np.int64)
    return test.keep(chosen).select(source.rows)


def _of_rows(rows: Sequence[Row], origin: str, view: View) -> Images:
    names = tuple(row.id for row in rows)

    def read(i: int) -> Tensor:
        from keymix.data.decode import fit, in_channels, reading

        with reading(one_line(names[i])):
            pixels = in_channels(rows[i].image(), view.in_chans, view.white_level)
        return fit(pixels, view.size, view.crop_pct)

    return Images(origin=origin, names=names, view=view, read=read)


def _of_test_split(config: DataConfig, view: View, limit: int | None) -> Images:
    """Load a set as training does and take its test split."""
    from keymix.train.model import load_data

    data = load_data(config, image_size=view.size)
    images = data.test
    rows = evenly(len(images), limit)
    return Images(
        origin=f"test {data.kind.nouns} of {config.spec}",
        names=tuple(images.ids(row) for row in rows),
        view=replace(view, kind=data.kind),
        read=lambda i: images.read(rows[i]),
    )


def _of_files(
    loaded: Loaded, words: Sequence[str], view: View, limit: int | None, time_steps: int | None
) -> Images:
    """Take files, read as the run's data reads its own; for a model by name, plain images."""
    from keymix.data.decode import read_image
    from keymix.data.shown import image_files, read_file

    for word in words:
        if not Path(word).exists():
            raise UserError(
                f"there is no {view.kind.noun} or folder {word!r}; a data spec stands alone, and "
                "`keymix list data` shows those"
            )
    found = image_files(words, events=view.kind.noun != IMAGE.noun)
    chosen = [found[i] for i in evenly(len(found), limit)]
    record = loaded.record
    if record is not None and time_steps is not None and "T" in view.kind.axes:
        record = replace(record, time_steps=time_steps)

    def read(i: int) -> Tensor:
        if record is not None:
            return read_file(chosen[i], record, view.size)
        return read_image(chosen[i], view.size, view.in_chans, crop_pct=view.crop_pct)

    return Images(
        origin=one_line(words[0]) if len(words) == 1 else f"{formats.count(len(found))} files",
        names=tuple(map(str, chosen)),
        view=view,
        read=read,
    )
