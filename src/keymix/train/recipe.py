# SPDX-License-Identifier: Apache-2.0
"""A training run as data: frozen dataclasses, complete, in reading order. Importing this is quick.

A recipe goes to a dictionary and back without loss, so that a run's ``recipe.json`` runs again.
Unknown keys and values of the wrong type are refused with the nearest names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from keymix.data.augment import Augment
from keymix.data.bounds import check_numbers
from keymix.data.specs import FRAMES_BY, SPLIT_BY, Setting, built_in, task_name
from keymix.errors import UserError, require, unknown
from keymix.task import DEFAULT, Task, get_task
from keymix.train.config import (
    DERIVED,
    build,
    check_plain,
    leaves,
    parse,
    read_file,
)

T = TypeVar("T")

_MOST = 200  # bytes of a name; file systems take 255, and endings are added
_NAME = "give letters, digits, -, _ and inner spaces or dots: it becomes a folder's name"
PRECISIONS = ("auto", "32", "bf16", "16")
SCHEDULES = ("cosine", "constant", "multistep", "poly", "step", "tanh", "wsd", "none")
RECORD = "recipe.json"  # of a run's folder
FREE = ("model.options.", "task.options.")
"""Keys below are those of the model and of the task."""
_TEMPERATURE = 2.0  # of distillation


def is_name(text: object) -> bool:
    """Whether a text names a file or folder on any system, and shows as it is."""
    return (
        isinstance(text, str)
        and is_part(text)
        and text.isprintable()
        and text == text.strip()
        and not text.startswith(".")
        and not any(mark in text for mark in "/\\")
        and len(text.encode("utf-8", errors="replace")) <= _MOST
    )


def as_name(text: str) -> str:
    """Make a name of a text that is none: ``runs/softmax`` becomes ``runs_softmax``."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._")[:100] or "run"


def is_part(text: object) -> bool:
    """Whether a text is one part of a path on this system, which stays in the folder above it."""
    marks = [mark for mark in (os.sep, os.altsep, "\0") if mark]
    return (
        isinstance(text, str)
        and text not in ("", os.curdir, os.pardir)
        and not any(mark in text for mark in marks)
    )


def _sides(size: int | tuple[int, int]) -> int | tuple[int, int]:
    """Check an image size; equal sides become one, so that equal settings are equal records."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    ok = len(pair) == 2 and all(type(side) is int and side > 0 for side in pair)
    require(ok, "data.image_size", size, "give a side in pixels, such as 48, or height,width")
    height, width = pair
    return height if height == width else (height, width)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images and how they are served.

    Args:
        spec: Data spec, e.g. ``digits``, ``folder:PATH``; `keymix list data` shows all.
        image_size: Side of the images the model sees, pixels; or their height and width
            (``32,48``). None keeps the data's own. Events are counted in these pixels.
        channels: 1 to read images as grey, 3 as colour; None for the data's own: 3 of files.
        limit: At most N training and N test images; None for all.
        val_fraction: Share of the training images split off for validation, in (0, 1).
        split_seed: Seed of that split, apart from the training seed.
        batch_size: Training images per step; a run uses one device.
        eval_batch_size: Images per step in validation and test.
        workers: Loader processes; 0 loads in the training process.
        skip_corrupt: Leave broken images out; they are counted and named in the record. Of images
            with instances, unfit annotations are left out alone. Otherwise the first is an error.
        time_steps: Frames made of each recording of events; None for 10. Like the next two, for
            data of events alone.
        frames_by: ``number`` for equally many events a frame, ``time`` for equally long frames;
            None for ``number``.
        event_split: A published split by its name (``first90`` or ``tebn`` of CIFAR10-DVS); None
            for the first.
        stack: Neighbouring slices of a scan that become the channels of an image (2.5-D), an odd
            number; None for the image alone. Like the next two, for data with masks alone.
        split_by: ``case`` keeps all images of a case in one split, ``slice`` does not, and leaks;
            None for ``case``.
        test_fraction: Share of a set without a test split of its own that becomes test, in (0, 1);
            None for 0.04.
        white_level: The 16-bit grey value that becomes white, such as 1023 of a 10-bit camera;
            ``auto`` for the largest of the training images, None for 65,535. For image files with
            a class each.
        task_options: Those of ``task.options`` that loading takes; a recipe sets them.
    """

    spec: str
    image_size: int | tuple[int, int] | None = None
    channels: int | None = None
    limit: int | None = None
    val_fraction: float = 0.1
    split_seed: int = 0
    batch_size: int = 128
    eval_batch_size: int = 512
    workers: int = 0
    skip_corrupt: bool = False
    time_steps: int | None = None
    frames_by: str | None = None
    event_split: str | None = None
    stack: int | None = None
    split_by: str | None = None
    test_fraction: float | None = None
    white_level: int | str | None = None
    task_options: Mapping[str, Setting] = field(default_factory=dict, metadata=DERIVED)

    def __post_init__(self) -> None:
        require(bool(self.spec), "data.spec", self.spec, "name the data, e.g. 'digits'")
        if self.image_size is not None:
            object.__setattr__(self, "image_size", _sides(self.image_size))
        check_numbers(self, "data.")
        if self.frames_by is not None and self.frames_by not in FRAMES_BY:
            raise unknown("data.frames_by", self.frames_by, FRAMES_BY)
        colour = self.channels in (None, 1, 3)
        require(colour, "data.channels", self.channels, "give 1 for grey or 3 for colour")
        if self.stack is not None:
            odd = self.stack % 2 == 1
            require(odd, "data.stack", self.stack, "must be an odd number of slices, such as 3")
        if self.split_by is not None and self.split_by not in SPLIT_BY:
            raise unknown("data.split_by", self.split_by, SPLIT_BY)

    def omitted(self) -> tuple[str, ...]:
        """The fields that are not written: those that follow from the rest of a recipe."""
        return ("task_options",)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and the mixer in it.

    Args:
        name: A model of keymix's or timm's; of timm's ViT, DeiT, CaiT, Swin or MetaFormer.
        mixer: Token mixer, e.g. ``ska(activation=relu)``; None for the
            model's own.
        options: Arguments of the model, e.g. ``{"depth": 6}``.
        drop_path: Stochastic depth of the last block; a probability, less in earlier blocks.
        drop_rate: Dropout before the classifier, probability.
        global_pool: ``avg`` (mean of patch tokens) or ``token`` (class token); None for the model's
            own.
        weights: Weights to start from; a run's folder (its last epoch), a ``.safetensors`` or
            ``.pth`` file; None starts afresh. Position embeddings and learned keys of another
            image size are resampled, a classifier of other classes is left out. Recipes that
            fine-tune say ``RUN``, for you to replace.
    """

    name: str
    mixer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    drop_path: float = 0.0
    drop_rate: float = 0.0
    global_pool: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name", self.name, "name a model; `keymix list models`")
        for name in ("mixer", "weights"):
            text = getattr(self, name)
            named = text is None or bool(text.strip())
            require(named, f"model.{name}", text, "give one, or leave it out")
        check_numbers(self, "model.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser, one of timm's. Biases, norms and what the model names are not decayed.

    Args:
        name: timm's name, e.g. ``adamw``, ``adam``, ``lamb``, ``sgd``.
        lr: Peak learning rate.
        weight_decay: Decay of the weights.
        betas: The two decay rates of Adam-like optimisers; None for the optimiser's own.
        clip_grad: Largest norm of the gradient; 0 for no clipping.
        accumulate: Steps whose gradients are summed to one update.
        layer_decay: Factor of the learning rate from each layer to the one before it, of trained
            models that are trained on: the head has the whole rate; 1 for all alike.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] | None = None
    clip_grad: float = 0.0
    accumulate: int = 1
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "optim.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time, one of timm's schedules, moved at every update.

    Args:
        name: ``cosine``, ``constant``, ``multistep``, ``poly``, ``step``, ``tanh``, ``wsd`` or
            ``none``.
        epochs: Passes over the training images; warm-up included.
        warmup_epochs: Epochs of linear warm-up at the start; a fraction is allowed.
        cooldown_epochs: Epochs at ``min_lr`` at the end, of the ``epochs``; the schedule ends
            before them.
        warmup_lr: Learning rate of the first step of the warm-up.
        min_lr: Learning rate at the end.
        power: Exponent of ``poly``, above 0: lr (1 - t/T)^power at update t of T.
        milestones: Of ``multistep``, the two epochs after which the rate is a tenth, and a tenth of
            that: 8, 11 in detection's schedule of 12 epochs.
    """

    name: str = "cosine"
    epochs: int = 10
    warmup_epochs: float = 0.0
    cooldown_epochs: int = 0
    warmup_lr: float = 1e-6
    min_lr: float = 0.0
    power: float = 0.9
    milestones: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise unknown("schedule.name", self.name, SCHEDULES)
        check_numbers(self, "schedule.")
        most = f"schedule.epochs = {self.epochs}; set both"
        ok = self.warmup_epochs <= self.epochs
        remedy = f"must be at most {most}"
        require(ok, "schedule.warmup_epochs", self.warmup_epochs, remedy)
        ok = self.cooldown_epochs == 0 or self.cooldown_epochs < self.epochs
        require(ok, "schedule.cooldown_epochs", self.cooldown_epochs, f"must be fewer than {most}")
        steps, given = self.milestones, self.name == "multistep"
        remedy = "two epochs, the earlier first, are for the schedule multistep, and it needs them"
        ok = steps is None or 0 < steps[0] < steps[1]
        require((steps is not None) == given and ok, "schedule.milestones", steps, remedy)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Cross entropy, what softens its targets, and what is added to it.

    Args:
        label_smoothing: Share of a target spread over all classes; a probability.
        mixup: Alpha of mixup's Beta distribution; 0 for none.
        cutmix: Alpha of cutmix's Beta distribution; 0 for none. With both, each image tosses
            a coin.
        mixup_prob: Share of the images that are mixed at all, above 0; 1 for all.
        mixup_off_epoch: Epochs after which neither mixup nor cutmix is done any more; None for
            never.
        similarity: Weight lambda of the likeness of neighbouring layers' attention maps, the sum
            of DeepViT's Eq. 6 (mean cosine of their columns, over images, heads and tokens, a
            pair); 0 for none. ``train_loss`` stays the cross entropy; the mean of the pairs is
            recorded next to it as ``train_similarity``.
        similarity_blocks: B of that sum, l = 0 ... B, which compares the first B + 2 layers (the
            paper: 4, 8, 12 in models of 16, 24, 32 blocks); None for all layers.
        distill: Weight alpha, 0 to 1, of a teacher's answers (Hinton et al. 2015,
            https://arxiv.org/abs/1503.02531, Sec. 2): the loss is (1 - alpha) times the cross
            entropy plus alpha T^2 KL(softmax(teacher / T) || softmax(student / T)); 0 for none.
            ``train_loss`` stays the cross entropy; T^2 KL is recorded as ``train_distill``.
        distill_teacher: Folder of the run whose model (its last epoch's weights) teaches, or one
            that ``keymix swap`` wrote. It sees the images of the same step, augmented and mixed.
        distill_temperature: T, above 0, of both softmaxes (the paper's Sec. 4.1 tries 1, 2, 5
            and 10).
    """

    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_off_epoch: int | None = None
    similarity: float = 0.0
    similarity_blocks: int | None = None
    distill: float = 0.0
    distill_teacher: str | None = None
    distill_temperature: float = _TEMPERATURE

    def __post_init__(self) -> None:
        check_numbers(self, "loss.")
        self._check_mixing()
        if self.similarity_blocks is not None:
            remedy = "does nothing without loss.similarity; set that weight too"
            require(self.similarity > 0, "loss.similarity_blocks", self.similarity_blocks, remedy)
        self._check_distillation()

    def _check_mixing(self) -> None:
        chance, off = self.mixup_prob, self.mixup_off_epoch
        if not self.mixup and not self.cutmix:
            remedy = "does nothing without loss.mixup or loss.cutmix; set one of them too"
            require(chance == 1, "loss.mixup_prob", chance, remedy)
            require(off is None, "loss.mixup_off_epoch", off, remedy)

    def _check_distillation(self) -> None:
        teacher, temperature = self.distill_teacher, self.distill_temperature
        if self.distill:
            remedy = "needs a teacher: name a run's folder with loss.distill_teacher"
            require(bool(teacher and teacher.strip()), "loss.distill", self.distill, remedy)
            return
        remedy = "does nothing without loss.distill; set that weight too"
        require(teacher is None, "loss.distill_teacher", teacher, remedy)
        own = temperature == _TEMPERATURE
        require(own, "loss.distill_temperature", temperature, remedy)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is asked of the task that the data set.

    Args:
        options: Options of the task that differ from its defaults, e.g. ``{"dice": 0.5}`` of
            segmentation, `keymix.tasks.segmentation.facts.MaskOptions`.
    """

    options: dict[str, Any] = field(default_factory=dict)

    def read(self, cls: type[T]) -> T:
        """Return the options as the task's dataclass."""
        return cls(**self.options)

    def checked(self, task: Task) -> TaskConfig:
        """Return what differs from the defaults, so that equal options are equal records.

        Raises:
            UserError: Naming the option, if the task has none such or its value does not fit.
        """
        given = {name: value for name, value in self.options.items() if value is not None}
        if not given:
            return TaskConfig()
        if task.options is None:
            name, value = next(iter(given.items()))
            what = f"the task {task.name} of the data has no options; leave it out"
            raise UserError(f"task.options.{name} = {value!r}: {what}.")
        made: object = build(task.options, given, "task.options.")
        pairs = [(item, getattr(made, item.name)) for item in fields(task.options)]
        return TaskConfig(options={i.name: value for i, value in pairs if value != i.default})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One complete training run.

    Args:
        name: Name of the recipe, for the record, and of the run's folder below ``runs``.
        data: The images and how they are served.
        augment: What is done to training images.
        model: The model and the mixer in it.
        optim: The optimiser.
        schedule: The learning rate over time.
        loss: Cross entropy, what softens its targets, and what is added to it.
        task: Options of the task that the data set.
        ema: Decay of the moving average of the weights that is evaluated and kept, reached after
            a warm-up of (1 + updates)^(-2/3); 0 for none.
        precision: ``auto``, ``32``, ``bf16`` or ``16``; ``auto`` is bfloat16 autocast on CUDA, else
            32 bits.
        seed: Seed of all that is random; weights, the order of images, augmentation, dropout.
        deterministic: Refuse operations that have no deterministic form (slower).
        compile: Train the model through ``torch.compile``: quicker steps, after some ten seconds
            to minutes at the start of each run, and a C++ compiler on a CPU. Results are those of
            rounding, and of other random numbers for dropout. Evaluation is as without.
    """

    name: str
    data: DataConfig
    augment: Augment = field(default_factory=Augment)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    ema: float = 0.0
    precision: str = "auto"
    seed: int = 0
    deterministic: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        require(is_name(self.name), "name", self.name, _NAME)
        check_numbers(self)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        remedy = "does not go with loss.similarity, which reads each layer's map; leave one out"
        require(not (self.compile and self.loss.similarity), "compile", self.compile, remedy)
        task = _task_of(self.data.spec)
        if task is not None:
            own = self.task.checked(task)
            loading = {k: own.options[k] for k in task.data_options if k in own.options}
            object.__setattr__(self, "task", own)
            object.__setattr__(self, "data", replace(self.data, task_options=loading))

    def to_dict(self) -> dict[str, Any]:
        """The recipe as nested dictionaries of plain values; `from_dict` is the inverse."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del plain["data"]["task_options"]
        return plain


def _task_of(spec: str) -> Task | None:
    """The task that data set; None where the name of the data is unknown: refused later."""
    name, task = spec.partition(":")[0], task_name(spec)
    unknown_data = task == DEFAULT and name not in built_in()
    return None if unknown_data else get_task(task)


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """Build a recipe from nested dictionaries, as YAML and JSON give them.

    Args:
        values: Fields by name; absent ones take their defaults.

    Raises:
        UserError: On an unknown or missing key, or a value of the wrong type or range.
    """
    check_plain(values)
    return build(Recipe, values)


def paths() -> list[str]:
    """Every dotted key of a recipe, e.g. ``optim.lr``, in reading order."""
    return [path for path, _ in leaves(Recipe)]


def parse_value(path: str, text: str) -> Any:
    """Read a recipe field from the text that an option gives it.

    Args:
        path: Dotted key, one of `paths` or below ``model.options`` or ``task.options``.
        text: As typed: ``1e-3``, ``32,48``, ``true``.

    Raises:
        UserError: Naming the option, if the text does not fit the field.
    """
    return parse(Recipe, path, text)


def replace_path(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A copy of the recipe with some fields replaced, named by dotted keys.

    A warm-up or a cool-down that would not fit into fewer epochs keeps its share of them.

    Args:
        recipe: Where the other fields come from.
        overrides: Values by dotted key, e.g. ``{"optim.lr": 1e-3, "model.options.depth": 2}``.

    Raises:
        UserError: On an unknown key, with the nearest ones, or an unfit value.
    """
    values = recipe.to_dict()
    known = paths()
    was, epochs = recipe.schedule, overrides.get("schedule.epochs")
    if isinstance(epochs, int) and 1 <= epochs < was.epochs:
        if was.warmup_epochs >= epochs:
            values["schedule"]["warmup_epochs"] = was.warmup_epochs * epochs / was.epochs
        if was.cooldown_epochs >= epochs:
            values["schedule"]["cooldown_epochs"] = was.cooldown_epochs * epochs // was.epochs
    for path, value in overrides.items():
        if not (path in known or path in values or path.startswith(FREE)):
            raise unknown("recipe key", path, known)
        *groups, last = path.split(".")
        place = values
        for group in groups:
            place = place.setdefault(group, {})  # an argument of the model may be a dict
            if not isinstance(place, dict):
                raise UserError(f"{path}: {group} is {place!r}, which has nothing below it")
        place[last] = value
    return from_dict(values)


def merge(recipe: Recipe, nested: Mapping[str, Any]) -> Recipe:
    """A copy of the recipe with the fields of a partial nested dictionary, e.g. a YAML file's."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and is_dataclass(getattr(recipe, key, None)):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return replace_path(recipe, flat)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds a recipe or a part of one.

    Raises:
        UserError: If it cannot be read, or is no mapping.
    """
    return read_file(Path(path))


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a ``.yaml`` or ``.json`` file, or from a run's folder."""
    file = Path(path)
    return from_dict(read_mapping(file / RECORD if file.is_dir() else file))
