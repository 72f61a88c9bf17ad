# SPDX-License-Identifier: Apache-2.0
"""Attention in a user's own model: PyTorch's, and modules whose projections have known names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT
from torchvision.models.feature_extraction import create_feature_extractor

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.hosts.layers import find_layers
from keymix.mixers.contract import stir
from keymix.swap import swap
from tolerances import close


class Joint(nn.Module):
    """As in vit-pytorch: a norm inside, one projection without biases, an output in a sequence."""

    def __init__(self, dim: int = 16, heads: int = 2, width: int = 4) -> None:
        super().__init__()
        self.heads, self.scale = heads, width**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.to_qkv = nn.Linear(dim, heads * width * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * width, dim), nn.Dropout(0.2))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.scale

    def forward(self, x: Tensor) -> Tensor:
        parts = self.to_qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        maps = self.dropout(self.attend(self.logits(q, k)))
        return self.to_out((maps @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Apart(nn.Module):
    """As in many repositories: three projections, and the map is returned, too."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (
            part(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        logits = q @ k.mT / 2
        maps = (logits if mask is None else logits + mask).softmax(-1)
        return self.out_proj((maps @ v).transpose(1, 2).flatten(2)), maps


class Cosine(Joint):
    """Looks like the first and is not it."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(nn.functional.normalize(q, dim=-1), k)


class Near(Joint):
    """The same, but each token sees those at most 16 away alone."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[-2])
        far = (place[:, None] - place).abs() > 16
        return super().logits(q, k).masked_fill(far, -torch.inf)


class Windows(Joint):
    """The same in windows of 256 tokens, as many as there are whole ones."""

    def forward(self, x: Tensor) -> Tensor:
        count = max(1, x.shape[1] // 256)
        windows = x.chunk(count, 1)
        return torch.cat([super(Windows, self).forward(w) for w in windows], 1)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.thrice = attention, isinstance(attention, nn.MultiheadAttention)
        self.first = getattr(attention, "batch_first", True)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.first else x.transpose(0, 1)
        out = self.attention(y, y, y) if self.thrice else self.attention(y)
        out = out[0] if isinstance(out, tuple) else out
        return x + (out if self.first else out.transpose(0, 1))  # type: ignore[no-any-return]


def torchs(**options: Any) -> nn.Module:
    return Block(nn.MultiheadAttention(16, 4, dropout=0.1, **{"batch_first": True, **options}))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


OWN: dict[str, Callable[[], nn.Module]] = {
    "like vit-pytorch's": lambda: Block(Joint()),
    "three projections": lambda: Block(Apart()),
    "PyTorch's": torchs,
    "PyTorch's, batch second, no biases": lambda: torchs(batch_first=False, bias=False),
    "PyTorch's encoder": encoder,
    "PyTorch's encoder, norm first": lambda: encoder(norm_first=True),
}


class Own(nn.Module):
    """A model that says where its tokens lie: 3x3, without prefix."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.cut, self.block, self.head = nn.Conv2d(3, 16, 4, 4), block, nn.Linear(16, 5)
        self.token_grid = (3, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(self.cut(images).flatten(2).mT).mean(1))  # type: ignore[no-any-return]


def own(block: nn.Module) -> Any:
    model = Own(block).double().eval()
    stir(model)
    return model


X = torch.randn(9, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@together
@pytest.mark.parametrize("name", OWN)
@torch.no_grad()  # PyTorch's encoder has a path of its own for inference
def test_softmax_in_its_place_changes_nothing(name: str) -> None:
    model = own(OWN[name]())
    before, maps = model(X), []
    for each in (model, copy.deepcopy(model)):
        if each is not model:
            report = swap(each, "softmax", calibration=X)
            assert [row.copied for row in report.rows] != [()]
            assert report.rows[0].drift is not None
            assert report.rows[0].drift.map < 1e-12
            assert each.block.state_dict().keys() != model.block.state_dict().keys()
        for layer in find_layers(each):
            layer.module.register_forward_hook(
                lambda _, args, kwargs, out, layer=layer: maps.append(layer.map(args, kwargs)),
                with_kwargs=True,
            )
        close(each(X), before)
    close(maps[-1], maps[0])
    swap(model, "static_key", calibration=X)
    assert next(iter(find_mixers(model).values())).key.shape[1] == 9  # type: ignore[union-attr]
    assert model(X).isfinite().all()
    swap(model, "static_key(key_grid=1/4)")
    swap(model, "random")
    assert (model(X) - before).abs().max() > 1e-3


@torch.no_grad()
def test_the_encoders_own_path_for_inference_does_not_pass_a_mixer_by() -> None:
    model = own(encoder())
    swap(model, "softmax")
    before = model(X)
    for mixer in find_mixers(model).values():
        mixer.proj.weight.mul_(2)  # type: ignore[union-attr,operator]
    assert (model(X) - before).abs().max() > 1e-3


@torch.no_grad()
def test_masks_of_pytorchs_attention_are_one_bias() -> None:
    theirs = own(encoder()).block
    mine = Own(copy.deepcopy(theirs)).double().eval()
    swap(mine, "softmax")
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    padding = torch.arange(6) > torch.tensor([[5], [3]])
    causal = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
    masks = {"src_key_padding_mask": padding, "mask": causal}
    wanted = theirs(x, **masks)
    assert (wanted - theirs(x)).abs().max() > 1e-4
    close(mine.block(x, **masks), wanted)
    by_head = causal.expand(8, 6, 6)
    close(mine.block(x, mask=by_head), theirs(x, mask=by_head))
    swap(mine, "re_attention")
    with pytest.raises(UserError, match=r"re_attention.*attention mask"):
        mine.block(x, **masks)


def test_weights_that_a_call_asks_for_are_the_map() -> None:
    theirs = torchs().double().eval().get_submodule("attention")
    mine: Any = own(Block(copy.deepcopy(theirs)))
    mine.block.attention.load_state_dict(theirs.state_dict())
    swap(mine, "softmax")
    x, hosted = torch.randn(2, 6, 16, dtype=torch.float64), mine.block.attention
    for average in (True, False):
        wanted = theirs(x, x, x, average_attn_weights=average)[1]
        close(hosted(x, x, x, average_attn_weights=average)[1], wanted)
    swap(mine, "pooling")
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    assert mine.block.attention(x, x, x)[1] is None


@together
@pytest.mark.parametrize("kind", [Cosine, Near, Windows])
def test_what_computes_something_else_is_not_taken_for_attention(kind: Any) -> None:
    model = Own(Block(kind()))
    with pytest.raises(UserError, match=r"no adapter knows .*\.Own"):
        swap(model, "softmax")
    both = nn.Sequential(Block(kind()), Block(Joint()))
    assert [layer.path for layer in find_layers(both)] == ["1.attention"]


def test_looking_at_a_model_leaves_random_numbers_hooks_and_modes_alone() -> None:
    model = Own(Block(Apart())).train()
    called: list[int] = []
    model.block.attention.register_forward_hook(lambda *_: called.append(1))  # type: ignore[union-attr]
    before, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    find_layers(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert not called
    assert model.block.attention.training  # type: ignore[union-attr]
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_a_call_for_more_than_tokens_is_refused() -> None:
    model = own(Block(Apart()))
    swap(model, "softmax")
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    assert model.block.attention(x, None)[1] is None
    with pytest.raises(UserError, match=r"block\.attention was called with Tensor besides tokens"):
        model.block.attention(x, x)


def test_attention_to_other_tokens_is_left_out_or_refused() -> None:
    decoder = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
    assert [layer.path for layer in find_layers(nn.Sequential(decoder))] == ["0.self_attn"]
    model = own(torchs())
    swap(model, "softmax")
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    with pytest.raises(UserError, match=r"other tokens; leave out .*layers="):
        model.block.attention(x, x + 1, x)


def test_without_a_grid_keys_by_position_are_refused_with_what_to_say() -> None:
    model = own(torchs())
    del model.token_grid
    with pytest.raises(UserError, match=r"block\.attention is not known.*model\.token_grid = "):
        swap(model, "static_key")


class LoraLinear(nn.Module):
    """As PEFT wraps a linear map."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(self.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, self.out_features, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        more = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + more  # type: ignore[no-any-return]


def timms() -> tuple[nn.Module, str, str]:
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2)
    return model, "blocks.0.attn", "qkv"


def hugging_face() -> tuple[nn.Module, str, str]:
    transformers = pytest.importorskip("transformers", minversion="5.20")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**small, intermediate_size=16, image_size=8, patch_size=4)
    return transformers.ViTModel(config), "layers.0.attention", "q_proj"


@together
@pytest.mark.parametrize("init", ["transfer", "fresh"])
@pytest.mark.parametrize("make", [timms, hugging_face])
def test_an_adapter_of_low_rank_is_to_be_merged_first(make: Any, init: Any) -> None:
    model, path, name = make()
    attention = model.get_submodule(path)
    setattr(attention, name, LoraLinear(getattr(attention, name)))
    said = rf"{path}\.{name} is .*LoraLinear, .*: merge the adapter first"
    with pytest.raises(UserError, match=said) as error:
        swap(model, "softmax", init=init)
    assert "\n" not in str(error.value)
    assert not find_mixers(model)


@together
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_features_are_extracted_with_what_holds_the_mixers_as_leaves(library: str) -> None:
    model, node = timms()[0].eval(), "blocks.0"
    if library == "torchvision":
        model = TorchvisionViT(8, 4, 1, 2, 16, 32).eval()
        node = "encoder.layers.encoder_layer_0"
    report = swap(model, "static_key")
    leaves = [type(model.get_submodule(row.path)) for row in report.rows]
    extract = create_feature_extractor(model, [node], tracer_kwargs={"leaf_modules": leaves})
    seen: list[Tensor] = []
    model.get_submodule(node).register_forward_hook(lambda *call: seen.append(call[-1]))
    x = torch.randn(2, 3, 8, 8)
    features = extract(x)[node]  # before any further call of the model
    model(x)
    assert torch.equal(features, seen[-1])
