# SPDX-License-Identifier: Apache-2.0
"""The plain convolutional network: its layers, sizes, frames, cost, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from keymix.analysis.counting import count
from keymix.analysis.spikes import read_spikes
from keymix.hosts import find_mixers
from keymix.models import create_model, load_weights, set_image_size
from keymix.models.factory import domain_of, own_mixers, takes_images_alone, task_of_model
from mixer_cases import refused, stir
from tolerances import close, differs


def net(**options: Any) -> Any:
    model = create_model("plain_convnet", **{"width": 6, "img_size": 16, **options}).double()
    stir(model)
    return model.eval()


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def blocks(model: nn.Module) -> list[tuple[int, nn.Module]]:
    found = []
    for stage in range(4):
        rows = model.get_submodule(f"layer{stage + 1}").children()
        found += [(2 if stage and not i else 1, block) for i, block in enumerate(rows)]
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_its_blocks_are_torchvisions(depth: int) -> None:
    model = net(depth=depth, stem_stride=1)
    x = images(2, 3, 17, 22)
    y = torch.relu(model.bn1(nn.functional.conv2d(x, model.conv1[0].weight, padding=1)))
    chans = 6
    for stride, block in blocks(model):
        out = chans * stride
        shortcut = None
        if stride > 1:
            shortcut = nn.Sequential(
                nn.Conv2d(chans, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        theirs = BasicBlock(chans, out, stride, shortcut).double().eval()
        theirs.load_state_dict(block.state_dict(), strict=True)
        y, chans = theirs(y), out
    assert chans == 8 * 6
    close(model.forward_features(x), y)
    close(model(x), model.fc(y.mean((2, 3))))


@pytest.mark.parametrize(
    ("size", "stem", "first", "last"),
    [
        (1, 1, (1, 1), (1, 1)),
        (8, 1, (8, 8), (1, 1)),
        ((31, 40), 1, (31, 40), (4, 5)),
        (41, 2, (21, 21), (3, 3)),
        ((20, 80), 2, (10, 40), (2, 5)),
        (81, 4, (21, 21), (3, 3)),
        ((2, 200), 4, (1, 50), (1, 7)),
    ],
)
def test_the_stem_follows_the_image_and_nothing_is_below_one_pixel(
    size: Any, stem: int, first: Any, last: Any
) -> None:
    model = net(img_size=size)
    assert len(model.conv1) == (4 if stem == 4 else 1)
    assert [info["reduction"] for info in model.feature_info] == [
        stem * factor for factor in (1, 1, 2, 4, 8)
    ]
    x = images(2, 3, *model.img_size)
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert [tuple(m.shape[1:]) for m in (maps[1], maps[4])] == [(6, *first), (48, *last)]
    assert model(x).shape == (2, 10)


def test_the_stem_can_be_set_and_stays_at_another_size() -> None:
    wide = net(stem_stride=4)
    assert wide(images(1, 3, 16, 16)).shape == (1, 10)
    assert wide.feature_info[-1]["reduction"] == 32
    model = net()
    set_image_size(model, (90, 50))
    assert model.img_size == (90, 50)
    assert model.feature_info[0]["reduction"] == 1
    assert model(images(1, 3, 90, 50)).shape == (1, 10)
    other = net(img_size=64)
    other.load_state_dict(model.state_dict())
    assert load_weights(net(img_size=(90, 50), stem_stride=1), model.state_dict()).missing == ()


@pytest.mark.parametrize(("stem", "depth", "width"), [(1, 1, 16), (2, 2, 10), (4, 3, 8)])
def test_it_costs_what_its_docstring_says(stem: int, depth: int, width: int) -> None:
    options = {"img_size": 64, "in_chans": 2, "num_classes": 7}
    model = create_model("plain_convnet", width=width, depth=depth, stem_stride=stem, **options)
    blocks_macs = (72 * depth - 12) * width**2 / stem**2
    first = 9 * 2 * width / stem**2 if stem < 4 else 9 * 2 * width / 4 + 9 * width**2 / 16
    found = count(model)
    assert found.macs == 64 * 64 * (blocks_macs + first) + 8 * width * 7
    assert found.input_size == (2, 64, 64)
    assert found.time_steps is None


def test_logits_of_frames_are_the_mean_over_them() -> None:
    model = net(in_chans=2, time_steps=3)
    frames = images(4, 3, 2, 16, 16)
    alone = torch.stack([model(frame) for frame in frames.unbind(1)])
    assert differs(alone[0], alone[1])
    close(model(frames), alone.mean(0))
    features, maps = model.forward_intermediates(frames, indices=2)
    close(features, model.forward_features(frames))
    each = [model.forward_intermediates(f, indices=2)[1][0] for f in frames.unbind(1)]
    close(maps[0], torch.stack(each).mean(0))
    model.set_time_steps(2)
    close(model(frames[:, :2]), alone[:2].mean(0))
    close(model(frames[:, 0]), alone[0])  # an image is the same at all steps
    with refused("3 time steps on axis 1, the model has time_steps=2, see set_time_steps"):
        model(frames)
    with refused("has 3 channels on axis 1, the model takes 2"):
        model(images(1, 3, 16, 16))


def test_an_image_model_takes_no_frames_until_it_has_steps() -> None:
    model = net()
    with refused("the model has time_steps=None, see set_time_steps"):
        model(images(2, 4, 3, 16, 16))
    model.set_time_steps(4)
    assert model(images(2, 4, 3, 16, 16)).shape == (2, 10)


def test_multiply_adds_are_those_of_all_frames() -> None:
    model = create_model("plain_convnet", img_size=16)
    one = count(model).macs
    model.set_time_steps(5)
    head = model.num_features * 10
    assert count(model).macs - head == 5 * (one - head)


def test_it_is_dense_and_has_no_spikes_but_takes_recordings() -> None:
    assert domain_of("plain_convnet") == "dense"
    assert task_of_model("plain_convnet") == "classification"
    assert not takes_images_alone("plain_convnet")
    assert own_mixers("plain_convnet", net()) is None
    assert find_mixers(net()) == {}
    with refused("PlainConvNet has no spiking neurons"):
        read_spikes(net(time_steps=2), [images(1, 2, 3, 16, 16)])


@pytest.mark.parametrize("name", ["plain_convnet", "plain_unet"])
def test_a_seed_a_state_and_an_image_alone_give_the_same(name: str) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return create_model(name, width=8, img_size=(20, 33), in_chans=1).double().eval()

    x = images(3, 1, 20, 33)
    model = made(5)
    assert torch.equal(made(5)(x), model(x))
    other = made(6)
    assert differs(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    stir(model)
    for i in range(3):
        close(model(x[i : i + 1]), model(x)[i : i + 1])
    with torch.device("meta"):
        empty = create_model(name, width=8, img_size=(20, 33), in_chans=1)
    assert {k: t.shape for k, t in empty.state_dict().items()} == {
        k: t.shape for k, t in model.state_dict().items()
    }
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
