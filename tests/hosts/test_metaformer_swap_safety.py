# SPDX-License-Identifier: Apache-2.0
"""A swap in timm's MetaFormer loses nothing that somebody put into its blocks, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models import metaformer as timms
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from each import together
from keymix import swap
from keymix.errors import UserError
from keymix.hosts import put_mixers
from keymix.hosts.timm_metaformer import GridBlock
from mixer_cases import stir
from tolerances import close

IMAGES, TOKENS = 0, 1  # the stages: one hands images to its blocks, one hands tokens


def metaformer() -> Any:
    """Two blocks that take images, then two of attention that take tokens."""
    torch.manual_seed(0)
    model = timms.MetaFormer(
        token_mixers=[timms.SepConv, timms.Attention],
        norm_layers=[timms.LayerNorm2dNoBias, timms.LayerNormNoBias],
        layer_scale_init_values=(None, 0.5),
        head_dim=8,
        depths=(2, 2),
        dims=(8, 16),
        num_classes=5,
    )
    model.pretrained_cfg = {"input_size": (3, 48, 32)}
    stir(model)
    return model.double().eval()


def images(number: int = 2) -> Tensor:
    noise = torch.Generator().manual_seed(4)
    return torch.randn(number, 3, 48, 32, generator=noise, dtype=torch.float64)


def block_at(model: Any, stage: int, index: int) -> Any:
    return model.stages[stage].blocks[index]


def refused(model: Any, words: str, mixer: str, layers: Any) -> None:
    """The refusal is one line, and the model is the same modules, giving the same answer."""
    before, parts = model(images()), [*model.modules()]
    kinds = [type(part) for part in parts]
    with pytest.raises(UserError, match=words) as error:
        swap(model, mixer, layers) if layers is not None else put_mixers(model, mixer)
    assert "\n" not in str(error.value)
    assert [*model.modules()] == parts
    assert [type(part) for part in parts] == kinds
    assert torch.equal(model(images()), before)


class Doubling(timms.MetaFormerBlock):
    """A block of somebody's own."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * super().forward(x)
        return out


class Adapted(nn.Linear):
    """A linear map with an addition of low rank."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False, dtype=torch.float64)
        self.weight = inner.weight
        self.down = nn.Linear(inner.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, inner.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.up(self.down(x))
        return out


class AdaptedConv(nn.Conv2d):
    """A 1x1 convolution that does more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def replaced(model: Any, stage: int, index: int) -> None:
    """Replace the forward of one block."""
    block = block_at(model, stage, index)
    own = block.forward
    block.forward = lambda x: own(x) * 2


def subclassed(model: Any, stage: int, index: int) -> None:
    block_at(model, stage, index).__class__ = Doubling


CHANGES: dict[str, tuple[Callable[..., None], str]] = {
    "forward": (replaced, r"the forward of {} \(MetaFormerBlock\) was replaced: .* put"),
    "class": (subclassed, r"{} is .*Doubling, .* leave .* out \(layers=\)"),
}


@together
@pytest.mark.parametrize("mixer", ["softmax", "pooling"])
@pytest.mark.parametrize("stage", [IMAGES, TOKENS])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_takes_no_mixer(change: str, stage: int, mixer: str) -> None:
    make, words = CHANGES[change]
    model = metaformer()
    make(model, stage, 1)
    refused(model, words.format(rf"stages\.{stage}\.blocks\.1"), mixer, 2 * stage + 1)
    refused(model, words.format(rf"stages\.{stage}\.blocks\.1"), mixer, None)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_neighbour_is_left_alone_or_named(change: str) -> None:
    """Where the stage hands on images a neighbour stays as it is; one of tokens cannot."""
    make, words = CHANGES[change]
    model = metaformer()
    make(model, IMAGES, 0)
    neighbour = block_at(model, IMAGES, 0)
    kind, x = type(neighbour), torch.randn(2, 8, 12, 8, dtype=torch.float64)
    before = neighbour(x)
    swap(model, "softmax", 1)
    assert block_at(model, IMAGES, 0) is neighbour
    assert type(neighbour) is kind
    assert torch.equal(neighbour(x), before)
    make(model, TOKENS, 1)
    refused(model, words.format(r"stages\.1\.blocks\.1"), "softmax", 2)


def test_a_changed_stage_of_tokens_is_named() -> None:
    class Stage(timms.MetaFormerStage):
        pass

    model = metaformer()
    model.stages[TOKENS].__class__ = Stage
    refused(model, r"stages\.1 is .*Stage, .* leave .* out \(layers=\)", "softmax", 2)


def test_a_block_of_ours_whose_forward_was_replaced_is_named() -> None:
    model = metaformer()
    swap(model, "softmax", 1)
    replaced(model, IMAGES, 1)
    refused(model, r"the forward of stages\.0\.blocks\.1 \(GridBlock\) was replaced", "softmax", 1)


def adapted(mlp: Any, name: str) -> None:
    part = getattr(mlp, name)
    if isinstance(part, nn.Linear):
        setattr(mlp, name, Adapted(part))
    else:
        part.__class__ = AdaptedConv


def normed(mlp: Any, name: str) -> None:
    weight_norm(getattr(mlp, name))


def pruned(mlp: Any, name: str) -> None:
    """A hook makes the weight of a mask and another."""
    cut: Any = prune.l1_unstructured
    with torch.no_grad():
        cut(getattr(mlp, name), "weight", 0.5)


def wide(mlp: Any, name: str) -> None:
    """A convolution of 3x3, or a norm between the two maps."""
    part = getattr(mlp, name)
    if isinstance(part, nn.Linear):
        mlp.norm = nn.LayerNorm(mlp.fc1.out_features, dtype=torch.float64)
    else:
        sizes = (part.in_channels, part.out_channels, 3)
        setattr(mlp, name, nn.Conv2d(*sizes, padding=1, bias=False, dtype=torch.float64))


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", ["fc1", "fc2"])
@pytest.mark.parametrize(("stage", "mixer"), [(IMAGES, "softmax"), (TOKENS, "pooling")])
@pytest.mark.parametrize("change", [adapted, normed, pruned, wide])
def test_what_has_no_other_layout_keeps_its_own(
    change: Callable[[Any, str], None], stage: int, mixer: str, name: str
) -> None:
    """The block works in the layout that it has, and nothing of its parts is lost."""
    model = metaformer()
    block = block_at(model, stage, 0)
    change(block.mlp, name)
    dim = len(block.norm2.weight)
    shape = (2, dim, 3, 4) if stage == IMAGES else (2, 12, dim)
    x = torch.randn(shape, dtype=torch.float64)
    weights = dict(block.mlp.named_parameters())
    with torch.no_grad():  # what a hook computes is kept
        before = block.mlp(block.norm2(x))
    swap(model, mixer, 2 * stage)
    block = block_at(model, stage, 0)
    close(block.mlp(block.norm2(x)), before)
    after = dict(block.mlp.named_parameters())
    assert after.keys() == weights.keys()
    assert all(after[key] is weights[key] for key in after)
    assert model(images()).isfinite().all()


@pytest.mark.parametrize(("layers", "mixer"), [("0-1", "softmax"), ("2-3", "pooling")])
def test_a_mixer_in_a_block_that_keeps_its_layout_computes_the_same(
    layers: str, mixer: str
) -> None:
    """A weight in two parts is the same weight, and the block that holds it does not turn."""
    answers = []
    for apart in (False, True):
        model = metaformer()
        if apart:
            for block in (*model.stages[IMAGES].blocks, *model.stages[TOKENS].blocks):
                weight_norm(block.mlp.fc1)
        torch.manual_seed(0)  # mixers draw their weights
        swap(model, mixer, layers)
        answers.append(model(images()))
    close(*answers)


@pytest.mark.parametrize(("stage", "mixer"), [(IMAGES, "softmax"), (TOKENS, "pooling")])
@pytest.mark.parametrize("layout", ["turns", "stays"])
def test_hooks_go_on_and_their_handles_remove_them(stage: int, mixer: str, layout: str) -> None:
    """They are called once a pass, also those of parts that turn, backward ones too."""
    if layout == "stays":
        mixer = {"softmax": "pooling", "pooling": "softmax"}[mixer]
    model, seen = metaformer(), []
    names = ["", ".0", ".1", ".1.norm1", ".1.norm2", ".1.mlp", ".1.mlp.fc1", ".1.mlp.fc2"]
    paths, handles = [f"stages.{stage}.blocks{name}" for name in names], []
    for path in paths:
        part = model.get_submodule(path)
        handles += [
            part.register_forward_pre_hook(lambda *_, p=path, **__: seen.append(p)),
            part.register_forward_hook(
                lambda *_, p=path, **__: seen.append(p), with_kwargs=True, always_call=True
            ),
            part.register_full_backward_hook(lambda *_, p=path: seen.append(p)),
        ]
    swap(model, mixer, 2 * stage + 1)
    seen.clear()
    model(images()).sum().backward()
    assert sorted(seen) == sorted(3 * paths)
    for handle in handles:
        handle.remove()
    seen.clear()
    model(images()).sum().backward()
    assert seen == []


def test_a_part_whose_forward_was_replaced_is_named_where_its_layout_turns() -> None:
    model = metaformer()
    part = block_at(model, IMAGES, 1).mlp.fc1
    own = part.forward
    part.forward = lambda x: own(x) * 2
    refused(model, r"the forward of stages\.0\.blocks\.1\.mlp\.fc1 \(Conv2d\)", "softmax", 1)
    before = model(images())
    swap(model, "sep_conv", 1)
    close(model(images()), before)


def test_an_optimizer_goes_on_training_what_keeps_its_layout() -> None:
    model = metaformer()
    before = {k: p for k, p in model.named_parameters() if ".token_mixer." not in k}
    swap(model, "pooling", "0-1")
    swap(model, "softmax", "2-3")
    after = {k: p for k, p in model.named_parameters() if ".token_mixer." not in k}
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def test_blocks_that_take_images_are_not_rebuilt() -> None:
    model = metaformer()
    around, (first, _) = model.stages[IMAGES].blocks, model.stages[IMAGES].blocks
    swap(model, "softmax", 1)
    assert model.stages[IMAGES].blocks is around
    assert around[0] is first
    assert [type(block) for block in around] == [timms.MetaFormerBlock, GridBlock]
