# SPDX-License-Identifier: Apache-2.0
"""Rasters of Q-K token attention against what the mixer itself forms."""

from __future__ import annotations

import pytest
import torch
from spiking_nets import images, small_net
from torch import nn

from keymix.analysis.attention import masks_tokens, token_masks
from keymix.analysis.spikes import spike_rasters
from keymix.errors import NoAttentionMap, UserError

MIXER = "stages.0.blocks.0.attn.mixer"


def _formed(image: torch.Tensor) -> dict[str, torch.Tensor]:
    model = small_net().eval()
    mixer = model.get_submodule(MIXER)
    seen: list[torch.Tensor] = []
    mixer.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        model(image[None])
        return mixer.spikes(seen[0])


def test_a_raster_is_one_head_of_what_the_mixer_forms() -> None:
    image = images()[2]
    model = small_net()
    (found,) = spike_rasters(model, image, head=1, step=1, tokens=(3, 5))
    spikes = _formed(image)
    assert found.keys.any()
    assert int(found.keys.sum()) > int(found.masked.sum()) > 0
    assert torch.equal(found.keys, spikes["K"][1, 0, 3:8, 4:].mT != 0)
    assert torch.equal(found.masked, spikes["X'"][1, 0, 3:8, 4:].mT != 0)
    assert torch.equal(found.attention, spikes["A_t"][:, 0, 1, :, 0] != 0)
    kept = found.attention[1, 3:8]
    assert torch.equal(found.masked, found.keys & kept)
    assert (found.path, found.stage, found.block, found.grid) == (MIXER, 1, 1, (3, 4))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_rows_of_the_record_are_texts_of_0_and_1() -> None:
    (found,) = spike_rasters(small_net(), images()[0])
    assert (found.step, found.start, found.heads) == (2, 0, 2)  # the last of 3; all 12 tokens
    record = found.to_dict()
    assert [len(row) for row in record["attention"]] == [12] * 3
    assert [[int(bit) for bit in row] for row in record["keys"]] == found.keys.int().tolist()


def test_the_segment_is_in_the_middle_unless_given() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    model = Long()
    (found,) = spike_rasters(model, torch.randn(3, 30, 20))
    assert (found.start, found.keys.shape) == (25, (4, 100))  # of 15 x 10 tokens
    assert found.attention.shape == (3, 150)


def test_models_without_token_attention_have_none() -> None:
    assert spike_rasters(small_net("qk_channel"), images()[0]) == ()


def test_layers_that_are_not_there_are_said_so() -> None:
    with pytest.raises(UserError, match="no layer of Q-K token attention"):
        spike_rasters(small_net("spiking_self"), images()[0], layers=0)


def test_masks_of_tokens_are_the_share_of_steps_in_which_a_head_lets_them_pass() -> None:
    model = small_net()
    assert masks_tokens(model)
    found = token_masks(model, images()[2:3])
    assert list(found) == [MIXER]
    passing = _formed(images()[2])["A_t"][:, 0, :, :, 0].mean(0)  # [h, N]
    assert found[MIXER].shape == (1, 2, 3, 4)
    assert torch.equal(found[MIXER][0].flatten(1), passing)
    assert 0 < passing.mean() < 1


def test_a_mixer_of_channels_has_no_mask_of_tokens() -> None:
    model = small_net("qk_channel")
    assert not masks_tokens(model)
    with pytest.raises(NoAttentionMap, match=MIXER):
        token_masks(model, images()[:1])
