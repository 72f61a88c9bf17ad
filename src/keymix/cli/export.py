# SPDX-License-Identifier: Apache-2.0
"""``keymix export``: a trained run as a file that runs without keymix, checked before it is there.

Its words and numbers are those of `keymix.export.result`.
"""

from __future__ import annotations

from pathlib import Path

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.errors import UserError

EXAMPLES = """\
examples:
  keymix export my-run --out model.onnx
  keymix export my-run --out model.onnx --dynamic size --resize interpolate
  keymix export my-run --out model.onnx --int8 --keep-float auto
  keymix export my-run --out model.pt2 --format torch --measure
  keymix predict model.onnx some-image.png

The file computes what the run's model does: it is folded for inference, exported, and checked on
batches of 1 and 3 images of the validation split, with --dynamic size at another size too. If
outputs differ, nothing is written. Inside are classes and preprocessing, and no path, name of a
file or image. ONNX needs `pip install 'keymix[onnx]'`, OpenVINO 'keymix[openvino]'."""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix export",
        description="Export a trained run as a file for ONNX Runtime, PyTorch or OpenVINO.",
        epilog=EXAMPLES,
    )
    made.add_run()
    made.add_argument(
        "--format",
        choices=("onnx", "torch", "openvino"),
        default="onnx",
        help="format of the file: onnx; torch for a .pt2 of torch.export; openvino for an .xml "
        "with its .bin (default: onnx)",
    )
    made.add_out("the file", metavar="FILE", required=True)
    made.add_argument(
        "--dynamic",
        choices=("batch", "size"),
        default="batch",
        help="batch: any number of images; size: images of other sizes too (default: batch)",
    )
    made.add_argument(
        "--resize",
        choices=("interpolate", "pool_values"),
        help="with --dynamic size, what mixers with learned positions do at another size "
        "(default: as trained)",
    )
    made.add_argument("--half", action="store_true", help="compute in 16 bits")
    made.add_argument(
        "--int8",
        action="store_true",
        help="compute linear maps and convolutions in 8 bits, calibrated on training images, and "
        "score the file on the test split",
    )
    made.add_argument(
        "--keep-float",
        nargs="+",
        metavar="BLOCK",
        default=[],
        help="with --int8, blocks that stay in float; auto: those that cost most, where 8 bits "
        "cost more than a point",
    )
    made.add_argument(
        "--measure",
        action="store_true",
        help="time the model in PyTorch and as a file, 1 image and 32",
    )
    made.add_argument(
        "--images",
        nargs="+",
        metavar="IMAGES",
        help="image files and folders to check it on (default: the run's validation split)",
    )
    made.add_json()
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix export``."""
    given = parser().parse_args(argv)
    path = console.checked_file(given)
    VerbParser.run_imports(given)
    if path is None:
        raise UserError("--out names no file.")

    from keymix.export.run import export
    from keymix.train.predict import load

    found = export(
        load(Path(given.run), which=given.weights),
        path,
        format=given.format,
        dynamic=given.dynamic,
        half=given.half,
        int8=given.int8,
        keep_float="auto" if given.keep_float == ["auto"] else given.keep_float,
        measure=given.measure,
        resize=given.resize,
        images=given.images,
        overwrite=given.overwrite,
    )
    if given.json:
        console.say_json(found.to_dict())
        return 0
    for table in found.tables.values():
        console.show(table)
    console.prose(found.answer)
    console.say(f"{path}: " + ", ".join(found.facts))
    return 0
