# SPDX-License-Identifier: Apache-2.0
"""From a recipe to its data and its model, the same way in training and afterwards."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from keymix.errors import KeymixWarning, UserError, one_line
from keymix.models.arguments import without_weights
from keymix.models.memory import memory_of_this_machine, ran_out
from keymix.train import files
from keymix.train.folder import run_folder
from keymix.train.recipe import DataConfig, ModelConfig, Recipe

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.data.record import DataRecord


_FLOAT = 4  # bytes
_LONE = "Expected more than 1 value per channel"  # PyTorch's words


@contextmanager
def enough_memory(
    image_size: int | tuple[int, int] | None, batch_size: int | None = None
) -> Iterator[None]:
    """Say in one line that memory ran out within, or cannot hold the pixels of a single image.

    A process of the data loader that was killed is said in a line too.
    """
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size or (0, 0)
    height, width = sides
    pixels = "" if image_size is None else f" for images of {height}x{width} pixels"
    message = f"out of memory{pixels}: name a smaller image size"
    if batch_size is not None:
        message = f"{message}, data.batch_size ({batch_size}) or data.eval_batch_size"
    if _FLOAT * height * width > memory_of_this_machine():
        raise UserError(f"{message}.")
    try:
        yield
    except (MemoryError, RuntimeError, UserError, ValueError) as error:
        if _LONE in str(error):
            raise UserError(
                "a batch norm of the model sees one value of each channel, so there is nothing to "
                "normalise over: make data.batch_size larger, or data.image_size"
            ) from error
        if ran_out(error):
            raise UserError(f"{message}.") from error
        why = one_line(str(error).strip())
        if why.startswith("DataLoader worker"):  # PyTorch has no class for it
            raise UserError(
                f"a process that reads data ended, perhaps for lack of memory ({why}): run the "
                "same command again, with fewer --data.workers if it ends again"
            ) from None
        raise


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of all that a model stores, whatever file it came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_data(
    config: DataConfig,
    *,
    image_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
) -> ImageData:
    """Load the images of a recipe, perhaps at another size, in pixels.

    `crop_pct` is the share of an image that evaluation shows; None for what suits the data.
    """
    from keymix import data

    size = config.image_size if image_size is None else image_size
    of_task: dict[str, Any] = dict(config.task_options)
    with enough_memory(size):
        return data.load(
            config.spec,
            image_size=size,
            crop_pct=crop_pct,
            channels=config.channels,
            limit=config.limit,
            val_fraction=config.val_fraction,
            split_seed=config.split_seed,
            skip_corrupt=config.skip_corrupt,
            time_steps=config.time_steps,
            frames_by=config.frames_by,
            event_split=config.event_split,
            stack=config.stack,
            split_by=config.split_by,
            test_fraction=config.test_fraction,
            white_level=config.white_level,
            **of_task,
        )


def warn_of_data(data: ImageData) -> ImageData:
    """Warn of what was left out, and of empty frames, before hours are spent on the rest."""
    count, shown = data.facts.left_out_count, data.facts.left_out[:3]
    if count:
        few = "; ".join(f"{item.id}: {item.reason}" for item in shown)
        more = f"; and {count - len(shown)} more" if count > len(shown) else ""
        kind = data.kind
        broken = f"1 broken {kind.noun} is" if count == 1 else f"{count} broken {kind.nouns} are"
        text = f"{broken} left out of data {data.spec} ({few}{more})"
        warnings.warn(text, KeymixWarning, stacklevel=2)
    if unfit := data.facts.annotations_left_out:
        some = "1 unfit annotation is" if unfit == 1 else f"{unfit:,} unfit annotations are"
        text = f"{some} left out of data {data.spec}: what is left out counts as background; "
        text += "`keymix data check` names them"
        warnings.warn(text, KeymixWarning, stacklevel=2)
    return warn_of_sparse(data)


def warn_of_unlisted(data: ImageData) -> ImageData:
    """Warn of slices whose table of masks has no row for an organ that it has for others."""
    _, found = data.found.get("rows", ("", ()))
    if found:
        shown = "; ".join(item["reason"] for item in found[:3])
        more = len(found) - 3
        text = f"data {data.spec}: slices without a row for an organ count as slices without it"
        text += f" ({shown}{f'; and {more} more' if more > 0 else ''}): restore the rows"
        warnings.warn(text, KeymixWarning, stacklevel=2)
    return data


def warn_of_sparse(data: ImageData) -> ImageData:
    """Warn of recordings that have fewer events than frames are made of them."""
    if data.time_steps is None:
        return data
    from keymix.data.events.cache import few_events

    if text := few_events(data):
        warnings.warn(text, KeymixWarning, stacklevel=3)
    return data


def mixer_label(config: ModelConfig) -> str | None:
    """The canonical name of the recipe's mixer with its options; None for the model's own."""
    if config.mixer is None:
        return None
    from keymix.mixers.spec import parse_mixer

    return parse_mixer(config.mixer).label


def build_model(
    recipe: Recipe,
    *,
    num_classes: int,
    in_chans: int,
    image_size: Sequence[int],
    time_steps: int | None = None,
    arguments: Mapping[str, bool] | None = None,
) -> nn.Module:
    """Build a recipe's model, with weights drawn from the recipe's seed.

    `arguments` are further ones that the data decide.
    """
    from keymix.mixers.spec import parse_mixer
    from keymix.models.factory import create_model
    from keymix.train.losses import MapSimilarity

    config = recipe.model
    options: dict[str, Any] = dict(config.options)
    remedies = {"img_size": "set data.image_size"}
    if time_steps is not None:
        remedies["time_steps"] = "set data.time_steps"
    for name in ("img_size", "in_chans", "num_classes", *remedies, *(arguments or ())):
        if name in options:
            remedy = remedies.get(name, "leave it out")
            raise UserError(f"model.options.{name} is what the data says; {remedy}.")
    options |= arguments or {}
    if config.mixer is not None:
        options |= parse_mixer(config.mixer).model_kwargs()
    if config.global_pool is not None:
        options["global_pool"] = config.global_pool
    if config.drop_path:
        options["drop_path_rate"] = config.drop_path
    if config.drop_rate:
        options["drop_rate"] = config.drop_rate

    if time_steps is not None:
        options["time_steps"] = time_steps

    def made(**more: Any) -> nn.Module:
        torch.manual_seed(recipe.seed)
        size = (image_size[0], image_size[1])
        return create_model(
            config.name,
            num_classes=num_classes,
            in_chans=in_chans,
            img_size=size,
            **more,
            **options,
        )

    try:
        if "drop_path_rate" in options:
            model = made()
        else:
            try:
                model = made(drop_path_rate=0.0)  # some of timm's have another default
            except UserError as error:
                if "drop_path_rate" not in str(error):
                    raise
                model = made()  # it knows no stochastic depth
    except UserError as error:
        if time_steps is None or "'time_steps'" not in str(error):
            raise
        raise takes_no_frames(recipe) from error
    if recipe.loss.similarity:
        MapSimilarity(model, recipe.loss.similarity_blocks)  # refuses a model that cannot have it
    return model


def model_for(recipe: Recipe, data: DataRecord, *, pretrained: bool = False) -> nn.Module:
    """Build a recipe's model for data: its head as the data's task wants it; see `build_model`.

    Weights that its options name are looked for with `pretrained` alone, where a run starts:
    elsewhere it gets others, or is only counted and measured.
    """
    if not pretrained:
        options = without_weights(recipe.model.options)
        recipe = replace(recipe, model=replace(recipe.model, options=options))
    part = data.task_kind.load("training")
    return build_model(
        recipe,
        num_classes=part.outputs(data),
        arguments=part.arguments(data),
        in_chans=data.in_chans,
        image_size=data.image_size,
        time_steps=data.time_steps,
    )


def takes_no_frames(recipe: Recipe) -> UserError:
    """Make the error for a model of images where the data are recordings of events."""
    return UserError(
        f"model {recipe.model.name!r} takes images, and data {recipe.data.spec!r} has frames of "
        "events [B, T, C, H, W]: choose a spiking model, such as qkformer_micro_32 for frames of "
        "32x32 pixels or qkformer_hst_2_256 for 128x128, or data of images."
    )


def find_weights(config: ModelConfig) -> Path | None:
    """Return the file of weights that a recipe starts from; None where it starts afresh."""
    if config.weights is None:
        return None
    path = Path(config.weights).expanduser()
    if path.is_dir():
        path = run_folder(path) / files.weights_file("last")
    if not path.is_file():
        raise UserError(
            f"model.weights = {config.weights!r}: there is no file {str(path)!r}. Name a finished "
            "run's folder, or a .safetensors or .pth file, with --model.weights."
        )
    return path


def start_from(model: nn.Module, path: Path) -> None:
    """Load what fits of a file's weights, and warn of what does not.

    A run's weights record the size of their images, by which what is learned per position is
    resampled. A file without a classifier, of which all fits, is meant so.
    """
    from keymix.models.weights import classifier_of, load_weights

    loaded = load_weights(model, path)
    notes = []
    if not loaded.unused and all(name.startswith(classifier_of(model)) for name in loaded.missing):
        return
    if loaded.missing:
        count = len(loaded.missing)
        some = "1 parameter is" if count == 1 else f"{count} parameters are"
        starts = "starts" if count == 1 else "start"
        notes.append(f"{some} not in {str(path)!r} and {starts} afresh: {_first(loaded.missing)}")
    if loaded.unused:
        notes.append(f"{len(loaded.unused)} of its tensors go unused: {_first(loaded.unused)}")
        notes[0] = notes[0] if len(notes) > 1 else f"of {str(path)!r}, {notes[0]}"
    if notes:
        warnings.warn("; ".join(notes), KeymixWarning, stacklevel=2)


def _first(names: Sequence[str]) -> str:
    """Name the first three, and say how many follow."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(one_line(name) for name in names[:3]) + more


def device_of_this_machine() -> torch.device:
    """The CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
