# SPDX-License-Identifier: Apache-2.0
"""A model as a graph: what follows the size of its images, the trace, and the bytes of a file."""

from __future__ import annotations

import ast
import copy
import io
import math
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from timm.layers import Format, PatchEmbed
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from keymix.data.sample import Size
from keymix.errors import Attempt, UserError, one_line
from keymix.hosts.base import find_mixers
from keymix.layers.folding import fold_for_inference, is_folded
from keymix.mixers.resize import GridBound
from keymix.models.detectors import Detector
from keymix.models.family import MixerModel
from keymix.models.image_size import set_image_size, without_memory
from keymix.train.exported import KEY, PARTS, quiet

OPSET = 20
STRIDE = 32  # of the coarsest map of models in stages
IMAGES, OUTPUTS = "images", "outputs"
_SCOPES = "pkg.torch.onnx.name_scopes"
FIXED = "export it with --dynamic batch, one file for each size"


class _Halves(nn.Module):
    """Computes in half precision behind inputs and outputs of 32 bits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, images: Tensor) -> Any:
        """Run the model."""
        return tree_map(Tensor.float, self.model(images.half()))


class Pyramid(MixerModel):
    """A detector's backbone and feature pyramid, without the heads that follow what they find."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.encoder, self.pyramid = detector.encoder, detector.decoder.pyramid
        finest = self.pyramid.reductions[0].bit_length() - 1
        count = len(detector.decoder.rpn.anchor_generator.sizes)
        self.levels = tuple(f"p{finest + i}" for i in range(count))

    def set_input_size(self, img_size: Size) -> None:
        """Take any size, as the detector does."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the maps by level, the finest first."""
        maps = self.pyramid(self.encoder(images))
        return dict(zip(self.levels, maps.values(), strict=True))


# ---- sizes ----------------------------------------------------------------------------------


def at(model: nn.Module, size: Size, resize: str | None) -> nn.Module:
    """Return a copy of a model for another image size: what a file at that size must compute."""
    made = copy.deepcopy(model)
    set_image_size(made, size, resize=resize)
    return made


def step_of(model: nn.Module, size: Size, resize: str | None) -> int:
    """Return the least number of pixels by which height and width may grow.

    It divides both, so that sizes are its multiples. Convolutional stems take any size, but round
    what their strides do not divide in ways that a graph does not follow.
    """
    common = math.gcd(*size)
    for step in (n for n in range(1, common) if common % n == 0):
        with Attempt() as attempt:
            set_image_size(without_memory(model), larger(size, step), resize=resize)
        if attempt.error is None:
            return step if step > 1 else math.gcd(common, STRIDE)
    set_image_size(without_memory(model), larger(size, common), resize=resize)  # says why not
    return common


def larger(size: Size, step: int) -> Size:
    """Return the next size of other proportions."""
    return size[0] + step, size[1] + 2 * step


def follow_size(model: nn.Module, resize: str | None) -> None:
    """Let a model read the grid of its tokens off every batch, where it can.

    timm's ViTs resample their position embeddings then; mixers do as their policy says.
    """
    for path, mixer in find_mixers(model).items():
        if mixer.chosen_key_grid is not None:  # which takes no other
            raise UserError(
                f"{path} has its keys on a grid ({mixer.chosen_key_grid}), which a file for images "
                f"of any size does not have: {FIXED}"
            )
        if isinstance(mixer, GridBound):
            if resize is not None:
                mixer.take_policy(resize)  # type: ignore[arg-type] # one of its policies
            if mixer.tied_to_grid or mixer.keeps_grid:
                raise UserError(
                    f"{path} {mixer.holds} on a grid of {mixer.key_grid}, which a file for images "
                    "of any size does not have: give it resize='interpolate' (--resize "
                    f"interpolate), or {FIXED}"
                )
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            module.strict_img_size = False
        embed = getattr(module, "patch_embed", None)
        if getattr(module, "dynamic_img_size", True) is False and isinstance(embed, PatchEmbed):
            made: Any = module
            made.dynamic_img_size = True
            embed.flatten, embed.output_fmt = False, Format.NHWC


# ---- graphs ---------------------------------------------------------------------------------


def for_inference(model: nn.Module, *, half: bool) -> nn.Module:
    """Return a copy that computes the same with less, perhaps in half precision."""
    made = copy.deepcopy(model) if is_folded(model) else fold_for_inference(model)
    return _Halves(made) if half else made


def traced(model: nn.Module, images: Tensor, *, batch: bool, sides: bool) -> ExportedProgram:
    """Follow a model's operations on some images; batch and sides may be free."""
    last = images.ndim - 1
    free = ((0,) if batch else ()) + ((last - 1, last) if sides else ())
    shapes = (dict.fromkeys(free, Dim.DYNAMIC),)
    program = None
    with quiet(), torch.no_grad(), Attempt() as attempt:
        program = torch.export.export(model, (images,), strict=False, dynamic_shapes=shapes)
    if program is None:
        raise _refused(attempt.error, _layer_of(model, attempt.error))
    return program


def onnx_file(program: ExportedProgram, metadata: str) -> tuple[bytes, int]:
    """Return an ONNX file, whose nodes are named by their layers, and its number of nodes."""
    made, outputs = None, program.call_spec.out_spec
    names = outputs.context if outputs.type is dict else [OUTPUTS]
    with quiet(), Attempt() as attempt:
        made = torch.onnx.export(
            program,
            dynamo=True,
            external_data=False,
            opset_version=OPSET,
            input_names=[IMAGES],
            output_names=names,
            verbose=False,
        )
    if made is None:
        raise _refused(attempt.error, _node_of(program, attempt.error))
    nodes = [*made.model.graph.all_nodes()]
    nodes += [node for each in made.model.functions.values() for node in each.all_nodes()]
    for number, node in enumerate(nodes):
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "['', '']"))
        layer = scopes[-2] if len(scopes) > 1 else ""
        node.name = f"{layer.removeprefix('model.')}/{node.op_type}_{number}"
        node.metadata_props.clear()  # where its line of code stands on this machine
    made.model.metadata_props[KEY] = metadata
    return made.model_proto.SerializeToString(), len(nodes)


def torch_file(program: ExportedProgram, metadata: str) -> tuple[bytes, int]:
    """Return a file of PyTorch's and its number of operations."""
    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    nodes = [node for graph in graphs for node in graph.nodes]
    for node in nodes:
        node.meta.pop("stack_trace", None)
    program._example_inputs = None  # an image of the user's
    stream = io.BytesIO()
    with quiet():
        torch.export.save(program, stream, extra_files={KEY: metadata})
    return stream.getvalue(), sum(node.op == "call_function" for node in nodes)


def openvino_files(content: bytes) -> dict[str, bytes]:
    """Return OpenVINO's two files of an ONNX file, its metadata included."""
    import openvino

    with quiet(), tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.xml"
        read = openvino.Core().read_model(content)
        openvino.save_model(read, graph, compress_to_fp16=False)
        return {ending: graph.with_suffix(ending).read_bytes() for ending in PARTS["openvino"]}


# ---- why not --------------------------------------------------------------------------------


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _layer_of(model: nn.Module, error: BaseException | None) -> str:
    """Name the deepest layer that an error passed through, by its path."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls = [
        paths[id(own)]
        for each in _causes(error)
        for frame, _ in traceback.walk_tb(each.__traceback__)
        if id(own := frame.f_locals.get("self")) in paths
    ]
    return calls[-1].removeprefix("model.") if calls else ""


def _node_of(program: ExportedProgram, error: BaseException | None) -> str:
    """Name layer and operator of the node that ONNX could not take."""
    said = " ".join(" ".join(str(each).split()) for each in _causes(error))
    found = re.search(r"translating node %(\w+) .*?target=([\w.]+)", said)
    if found is None:
        return ""
    node = next((each for each in program.graph.nodes if each.name == found[1]), None)
    stack: Mapping[str, Any] = {} if node is None else node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed([*stack.values()])), "")
    return ", ".join(filter(None, (path.removeprefix("model."), found[2])))


def _refused(error: BaseException | None, where: str) -> UserError:
    """Make the one line for what cannot be exported."""
    root = [*_causes(error)][-1] if error is not None else RuntimeError("no reason was given")
    first = str(root).strip().partition("\n\n")[0]  # advice to developers of PyTorch follows
    why = first if isinstance(root, UserError) else f"{type(root).__name__}: {first}"
    line = one_line(" ".join(why.split()))[:300]
    return UserError(f"{where or 'the model'} cannot be exported: {line}")
