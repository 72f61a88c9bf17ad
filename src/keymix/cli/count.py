# SPDX-License-Identifier: Apache-2.0
"""``keymix count``: parameters, multiply-adds and activation memory of a model, layer by layer."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from keymix.cli.console import VerbParser, note, numbers_of, out, parse_size, say, table, warn
from keymix.errors import UserError

if TYPE_CHECKING:
    from timm.models import PretrainedCfg
    from torch import nn

    from keymix.analysis.counting import Count
    from keymix.mixers.spec import MixerSpec

DESCRIPTION = """\
Count a model's trainable parameters, multiply-adds (MACs) and activation memory for one image.
MACs are the products of matmuls, convolutions, linear layers and attention; FLOPs are 2 x MACs.
Activation memory is what autograd keeps for the backward pass, parameters excluded."""

EXAMPLES = """\
examples:
  keymix count vit_small_p4_32
  keymix count vit_small_p4_32 --mixers mhsa,ska,cska         totals, one line per mixer
  keymix count swin_micro_p2_32 --mixers mhsa,ska --match params    widened as compare does
  keymix count vit_small_patch16_224 --mixers static_key --depth 3
  keymix count caformer_s18 --image-size 384 --json
  keymix count qkformer_micro_32 --mixers qkta,ssa --time-steps 2
  keymix count mask_rcnn --model.options.backbone cskaformer_s18 --image-size 800x1333

Costs of a spiking model are those of all its T time steps, and its multiply-adds are dense: as if
no input were a spike. `keymix analyze spikes` counts what spikes cost."""


_UNFIT = (AssertionError, RuntimeError, TypeError, ValueError)
"""What models raise over an input that they cannot take; UserErrors are among them."""


_OF_THE_MODEL = "--model.options."
"""What options begin with that are arguments of a model."""


def _input_size(text: str) -> tuple[int, int, int]:
    wanted = "give channels,height,width in pixels, such as 3,224,224"
    size = numbers_of(f"--input-size {text}", text, (2, 3), wanted)
    return (3, *size) if len(size) == 2 else size


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix count",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    made.add_argument("model", help="a keymix model, or any model of timm's")
    made.add_mixers(
        "put this mixer in, as keymix compare takes it: ska(activation=relu); "
        "several with commas give one line of totals each"
    )
    made.add_argument(
        "--match",
        choices=("params",),
        help="widen each mixer to the parameters that the model has with its own",
    )
    made.add_image_size("what the model was made for")
    made.add_argument("--input-size", metavar="C,H,W", help="the same with channels")
    made.add_argument(
        "--depth",
        type=int,
        default=2,
        metavar="N",
        help="levels of module paths to show; 0 shows every layer (default: 2)",
    )
    made.add_argument(
        "--model.options.NAME",
        metavar="VALUE",
        help="an argument of the model, as keymix train takes it; once for each",
    )
    made.add_argument("--num-classes", type=int, metavar="N", help="classes of the head")
    made.add_time_steps("what the model was made for")
    made.add_imports()
    made.add_json()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix count`` with the words after the verb."""
    words, of_the_model = _split_model_options(argv)
    args = parser().parse_args(words)
    if None not in (args.image_size, args.input_size):
        raise UserError("--image-size and --input-size exclude each other: give one.")
    size = None if args.input_size is None else _input_size(args.input_size)
    if args.image_size is not None:
        size = (_channels(args.model), *parse_size(args.image_size))
    if args.depth < 0:
        raise UserError(f"--depth {args.depth} must be 0 or more")
    if args.num_classes is not None and args.num_classes < 0:
        raise UserError(f"--num-classes {args.num_classes} must be 0 or more")
    if args.match is not None and args.mixers is None:
        raise UserError(f"--match {args.match} widens other mixers than the model's: give --mixers")
    from keymix.mixers.spec import parse_mixers

    VerbParser.run_imports(args)
    specs: list[MixerSpec | None] = [None]
    if args.mixers is not None:
        specs = [*parse_mixers(args.mixers)]
    options = {} if size is None else _sized(args.model, size)
    for name in ("num_classes", "match"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    counts: dict[str, Count] = {}
    widths: dict[str, str] = {}
    for spec in specs:
        label = "" if spec is None else spec.label
        own = of_the_model | ({} if spec is None else spec.model_kwargs()) | options
        counts[label], width = _count(args.model, own, size, args.time_steps)
        if args.match is not None:
            widths[label] = width
    steps = next(iter(counts.values())).time_steps
    if args.json:
        records = [
            {
                "model": args.model,
                "mixer": label or None,
                **({"inner_width": widths[label]} if widths else {}),
                **({} if c.time_steps is None else {"note": _over(args.model, c.time_steps)}),
                **c.to_dict(),
            }
            for label, c in counts.items()
        ]
        say(json.dumps(records[0] if len(records) == 1 else records, indent=2))
    elif len(counts) > 1:
        _print_totals(args.model, counts, widths)
    else:
        label, counted = next(iter(counts.items()))
        inner = f"{label}, {widths[label]} inside" if widths else label
        _print_layers(args.model, inner, counted, args.depth)
    if steps is not None and not args.json:
        note(_over(args.model, steps))
    for name in sorted({name for c in counts.values() for name in c.uncounted}):
        warn(
            f"{name} computes and is not counted: give --import a file that registers its formula "
            "with torch.utils.flop_counter.register_flop_formula"
        )
    return 0


def _split_model_options(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Take a model's arguments, ``--model.options.depth 2``, out of words, and return both."""
    from keymix.train.recipe import parse_value

    rest, options = [], {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith(_OF_THE_MODEL):
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value.strip() or value.startswith("--"):
            raise UserError(f"option {name} needs a value.")
        options[name.removeprefix(_OF_THE_MODEL)] = parse_value(name[2:], value)
    return rest, options


def _over(model: str, steps: int) -> str:
    """Say what the multiply-adds of a model with time steps are."""
    from keymix.models.factory import domain_of

    if domain_of(model) != "spiking":
        return f"multiply-adds are over all T={steps} time steps"
    return (
        f"multiply-adds are dense, as if no input were a spike, and over all T={steps} time steps, "
        "of which the first layer sees a still image once; `keymix analyze spikes` counts spikes"
    )


def _count(
    name: str, options: dict[str, Any], size: tuple[int, int, int] | None, steps: int | None
) -> tuple[Count, str]:
    """Build a model without weights where it can be, and count it; return its mixers' width too."""
    import torch

    from keymix.analysis.counting import count
    from keymix.models import create_model
    from keymix.models.factory import task_of_model
    from keymix.models.image_size import take_time_steps
    from keymix.models.memory import ran_out
    from keymix.task import DEFAULT, list_tasks

    task = task_of_model(name)
    if task == DEFAULT or task not in list_tasks():
        task = ""  # its models take one tensor, or nothing is known of them

    def made() -> nn.Module:
        model: nn.Module = create_model(name, **options)
        if steps is not None:
            take_time_steps(model, steps)
        return model

    try:
        with torch.device("meta"):
            model = made()
            return count(model, size, task=task), _inner_width(model)
    except _UNFIT as error:
        of_the_user = isinstance(error, UserError) and error.__context__ is None
        if ran_out(error) or of_the_user:
            raise
        # some models look at the numbers they are built from, which meta tensors lack
    model = made()
    try:
        return count(model, size, task=task), _inner_width(model)
    except UserError as error:
        if error.__cause__ is None:
            raise
        other = "" if size else ". Give another with --input-size"
        raise UserError(f"model {name!r}: {error}{other}") from error


def _inner_width(model: nn.Module) -> str:
    """Heads times their width, where it changes along the model: ``2x33/4x33``."""
    from keymix.hosts import find_mixers
    from keymix.models.match import WITH_HEADS

    lines = [
        f"{mixer.num_heads}x{mixer.head_dim}" if isinstance(mixer, WITH_HEADS) else "none"
        for mixer in find_mixers(model).values()
    ]
    return "/".join(text for text, _ in groupby(lines))


def _config(name: str) -> PretrainedCfg | None:
    """What timm's registry knows of a model, keymix's own among them."""
    from timm.models import get_pretrained_cfg

    import keymix.models.factory  # registers keymix's own models

    keymix.models.factory.list_models()
    found: PretrainedCfg | None = get_pretrained_cfg(name)
    return found


def _channels(name: str) -> int:
    config = _config(name)
    return 3 if config is None else config.input_size[0]


def _sized(name: str, size: tuple[int, int, int]) -> dict[str, Any]:
    """Arguments that make a model for an input: its side only where it is fixed at building."""
    config = _config(name)
    fixed = config is not None and config.fixed_input_size
    return {"in_chans": size[0], **({"img_size": size[1:]} if fixed else {})}


def _number(value: int) -> str:
    return f"{value:,}" if out.is_terminal else str(value)


def _cells(params: int, macs: int, activation_bytes: int) -> list[str]:
    return [
        _number(params),
        _number(macs),
        _number(2 * macs),
        f"{activation_bytes / 2**20:.2f}",
    ]


def _headings(steps: int | None) -> list[str]:
    of = "" if steps is None else f", dense, T={steps}"
    return ["params", f"MACs{of}", f"FLOPs{of}", "activations MiB"]


def _print_layers(model: str, mixer: str, counted: Count, depth: int) -> None:
    layers = counted.layers if depth == 0 else counted.at_depth(depth)
    rows = [
        [r.path or "(itself)", r.kind, *_cells(r.params, r.macs, r.activation_bytes)]
        for r in layers
    ]
    total = _cells(counted.params, counted.macs, counted.activation_bytes)
    size = "x".join(str(s) for s in counted.input_size)
    title = f"{model}{f' with {mixer}' if mixer else ''}, one image of {size}"
    heads = ["layer", "module", *_headings(counted.time_steps)]
    table(heads, [*rows, ["total", "", *total]], title=title, left=2)


def _print_totals(model: str, counts: dict[str, Count], widths: dict[str, str]) -> None:
    rows = [
        [label, *([widths[label]] if widths else []), *_cells(c.params, c.macs, c.activation_bytes)]
        for label, c in counts.items()
    ]
    first = next(iter(counts.values()))
    size = "x".join(str(s) for s in first.input_size)
    inner = ["heads x width"] if widths else []
    heads = ["mixer", *inner, *_headings(first.time_steps)]
    table(heads, rows, title=f"{model}, one image of {size}", left=2 if widths else 1)
