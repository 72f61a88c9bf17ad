# SPDX-License-Identifier: Apache-2.0
"""Which models `keymix.swap` takes: each with random weights, in double precision.

    python benchmarks/hosts_table.py
    python benchmarks/hosts_table.py vit_tiny CLIP

For each model (of those whose names contain one of the given texts): is the output the same after a
swap to softmax and after another from that (relative to its largest number); are the maps that
keymix reads of the original those that its own modules form, where hooks can see them (timm's
dropout of the map, transformers' output_attentions, PyTorch's need_weights); and which of MIXERS
are accepted and run. Models are small, or cut to few blocks, and nothing is downloaded. It prints a
table in Markdown, and counts. About 15 minutes on one core.
"""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.layers import Layer, find_layers
from keymix.mixers.contract import stir
from keymix.swap import swap
from measured import begin, options

MIXERS = (  # a column each
    *("static_key", "static_key(key_grid=1/4)"),
    *("spatial_reduction", "spatial_reduction(key_grid=1/1)"),
)
SAME = "spatial_reduction(key_grid=1/1)"  # computes what softmax does: its column is a gap
EXACT = 1e-6

CUT = (  # to two blocks
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"),
    *("vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224"),
    *("vit_base_patch16_clip_224", "vit_wee_patch16_reg1_gap_256", "vit_tiny_r_s16_p8_224"),
    *("vit_medium_patch16_gap_256", "flexivit_small", "naflexvit_base_patch16_gap", "test_vit"),
    *(
        "vit_base_patch16_rope_reg1_gap_256",
        "vit_small_patch16_rope_224",
        "vit_pe_core_tiny_patch16_384",
    ),
    *("eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "vit_base_patch16_xp_224"),
    *("vit_relpos_small_patch16_224", "beit_base_patch16_224", "beitv2_base_patch16_224"),
    *("beit3_base_patch16_224", "samvit_base_patch16_224", "cait_xxs24_224", "convit_tiny"),
    "vit_base_patch16_rpn_224",
)
WHOLE = (
    *("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224"),
    *("caformer_s18", "convformer_s18", "poolformer_s12", "maxvit_tiny_tf_224", "coatnet_0_224"),
    *("pvt_v2_b0", "pvt_v2_b2_li", "hiera_tiny_224", "xcit_nano_12_p16_224", "efficientvit_b0"),
    *("efficientvit_m0", "mobilevit_xxs", "mobilevitv2_050", "crossvit_tiny_240", "pit_ti_224"),
    *("tnt_s_patch16_224", "visformer_tiny", "volo_d1_224", "twins_pcpvt_small"),
    *("twins_svt_small", "levit_128s", "efficientformer_l1", "efficientformerv2_s0"),
    *("edgenext_xx_small", "coat_lite_tiny", "davit_tiny", "focalnet_tiny_srf", "nextvit_small"),
    *("fastvit_sa12", "gcvit_xxtiny", "mvitv2_tiny", "nest_tiny", "repvit_m0_9", "botnet26t_256"),
    *("tiny_vit_5m_224", "halonet26t", "shvit_s1", "swiftformer_xs", "convnext_atto", "resnet18"),
)
TIMM: dict[str, dict[str, Any]] = {
    **{name: {"depth": 2} for name in CUT},
    **{name: {} for name in WHOLE},
    "maxvit_tiny_tf_224": {"depths": (1, 1, 1, 1)},
    "coatnet_0_224": {"depths": (1, 1, 2, 2)},
}
TORCHVISION = ("vit_b_32", "swin_t", "swin_v2_t", "maxvit_t", "resnet18")
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 64}
SMALL |= {"patch_size": 8, "intermediate_size": 96}
TRANSFORMERS: dict[str, tuple[dict[str, Any], int]] = {  # configuration, side of the images
    **dict.fromkeys(
        (
            *("ViTForImageClassification", "DeiTForImageClassification", "ViTMAEModel"),
            *("Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"),
            *("DINOv3ViTModel", "CLIPVisionModel", "SiglipVisionModel", "DPTModel", "IJepaModel"),
            *("ViTMSNModel", "Data2VecVisionModel"),
        ),
        (SMALL, 64),
    ),
    "YolosModel": ({**SMALL, "image_size": (64, 64)}, 64),
    "BeitModel": ({**SMALL, "use_relative_position_bias": True}, 64),
    **dict.fromkeys(
        ("SwinModel", "Swinv2Model", "SegformerModel", "PvtModel", "PvtV2Model", "HieraModel"),
        ({}, 224),
    ),
}


class Block(nn.Module):
    """A user's block around some attention, before a norm."""

    def __init__(self, attention: nn.Module, dim: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), attention
        self.thrice = isinstance(attention, nn.MultiheadAttention)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention returns."""
        x = self.norm(x)
        if self.thrice:
            return x + self.attention(x, x, x)[0]  # type: ignore[no-any-return]
        return x + self.attention(x)  # type: ignore[no-any-return]


class LikeVitPytorch(nn.Module):
    """Attention as lucidrains' vit-pytorch has it: a norm inside, no biases."""

    def __init__(self, dim: int, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.heads, self.scale = heads, width**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.0)
        self.to_qkv = nn.Linear(dim, heads * width * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * width, dim), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        parts = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        maps = self.dropout(self.attend(q @ k.transpose(-1, -2) * self.scale))
        return self.to_out((maps @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Own(nn.Module):
    """A user's ViT of 8x8 patches: no library builds it, and it says where its tokens lie."""

    def __init__(self, blocks: nn.Module, dim: int = 32) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, dim, 8, 8)
        self.blocks, self.head = blocks, nn.Linear(dim, 10)
        self.token_grid = (8, 8)

    def forward(self, images: Tensor) -> Tensor:
        """Classify by the mean token."""
        tokens = self.cut(images).flatten(2).mT
        return self.head(self.blocks(tokens).mean(1))  # type: ignore[no-any-return]


def plain(make: Callable[[], nn.Module], dim: int = 32) -> nn.Module:
    """Return a user's ViT with two blocks around some attention."""
    return Own(nn.Sequential(*(Block(make(), dim) for _ in range(2))))


def encoder(**options: Any) -> nn.Module:
    """Return a user's ViT around PyTorch's encoder."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    return Own(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


OWN: dict[str, Callable[[], nn.Module]] = {
    "nn.MultiheadAttention in a block": lambda: plain(
        lambda: nn.MultiheadAttention(32, 4, batch_first=True)
    ),
    "nn.TransformerEncoder": encoder,
    "nn.TransformerEncoder, norm_first": lambda: encoder(norm_first=True),
    "attention like vit-pytorch's": lambda: plain(lambda: LikeVitPytorch(32)),
    "timm's Attention in a block": lambda: plain(lambda: timm.layers.Attention(32, 4)),
}


def built() -> Iterator[tuple[str, str, Callable[[], nn.Module], int]]:
    """Yield library, name, what builds it, and the side of its images."""
    for name, more in TIMM.items():
        size = timm.get_pretrained_cfg(name).input_size[-1]
        yield (
            "timm",
            name,
            lambda n=name, o=more: timm.create_model(n, num_classes=10, **o),
            size,
        )
    for name in TORCHVISION:
        yield (
            "torchvision",
            name,
            lambda n=name: torchvision.models.get_model(n, num_classes=10),
            224,
        )
    for name, (more, size) in TRANSFORMERS.items():
        yield "transformers", name, lambda n=name, o=more: _transformer(n, o), size
    for name, make in OWN.items():
        yield "own", name, make, 64


def _transformer(name: str, options: dict[str, Any]) -> nn.Module:
    kind: Any = getattr(transformers, name)
    return kind(kind.config_class(**options))  # type: ignore[no-any-return]


def answer(model: nn.Module, images: Tensor) -> Tensor:
    """Return the model's output, of the same random numbers at every call (MAE draws some)."""
    torch.manual_seed(0)
    with torch.no_grad():
        out: Any = model(images)
    for name in ("logits", "last_hidden_state"):
        out = getattr(out, name, out)
    return out[0] if isinstance(out, tuple | list) else out


def gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest number."""
    return float((one - other).abs().max() / one.abs().max())


def seen_maps(model: nn.Module, images: Tensor) -> list[Tensor | None]:
    """Return the map of each layer as its own modules form it, None where no hook sees one."""
    layers = [layer for layer in find_layers(model) if layer.attends]
    seen: dict[str, Tensor] = {}
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    hooks = []
    for layer in layers:
        drop = getattr(layer.module, "attn_drop", None)
        if isinstance(layer.module, nn.MultiheadAttention):

            def ask(module: Any, args: Any, kwargs: Any, _: Any, path: str = layer.path) -> None:
                more = {"need_weights": True, "average_attn_weights": False}
                seen[path] = type(module).forward(module, *args, **{**kwargs, **more})[1]

            hooks.append(layer.module.register_forward_hook(ask, with_kwargs=True))
        elif isinstance(drop, nn.Module):

            def keep(_m: Any, args: Any, _o: Any, path: str = layer.path) -> None:
                seen[path] = args[0]

            hooks.append(drop.register_forward_hook(keep))
    if hasattr(model, "config"):
        with torch.no_grad():
            torch.manual_seed(0)
            model.set_attn_implementation("eager")
            given = model(images, output_attentions=True).attentions or ()
        if len(given) == len(layers):
            seen |= {layer.path: maps for layer, maps in zip(layers, given, strict=True)}
    answer(model, images)
    for hook in hooks:
        hook.remove()
    return [seen.get(layer.path) for layer in layers]


def read_maps(model: nn.Module, layers: list[Layer], images: Tensor) -> list[Tensor]:
    """Return the map of each layer as keymix reads it."""
    maps: dict[str, Tensor] = {}
    hooks = []
    for layer in layers:

        def read(_m: Any, args: Any, kwargs: Any, _o: Any, layer: Layer = layer) -> None:
            maps[layer.path] = layer.map(args, kwargs, stage="final")

        hooks.append(layer.module.register_forward_hook(read, with_kwargs=True))
    answer(model, images)
    for hook in hooks:
        hook.remove()
    return [maps[layer.path] for layer in layers]


def short(error: BaseException) -> str:
    """Return an error's first words, without what is longest in them."""
    text = str(error).partition("; mixers can be put into")[0].replace("|", "/")
    text = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
    text = re.sub(r"no adapter knows \S+ or what attends in it, ", "no adapter knows ", text)
    text = re.sub(r"(\w+\.)+(?=[A-Z])", "", text.partition(": choose")[0])  # of classes
    text = re.sub(
        r" at (\S+\.attn): its windows are shifted.*", r" at \1, in shifted windows", text
    )
    text = text.replace("learns one key per position and so ", "").replace("mixer ", "")
    return " ".join(text.split())[:130]


def row(make: Callable[[], nn.Module], size: int) -> tuple[str, ...]:
    """Return what became of one model: verdict, layers, gap, maps, and a column a mixer."""
    torch.manual_seed(0)
    model = make().double().eval()
    stir(model, 0.1)
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    wanted = answer(model, images)
    try:
        layers = [layer for layer in find_layers(model) if layer.attends]
        swapped = copy.deepcopy(model)
        report = swap(swapped, "softmax", drift=False)
        once = gap(wanted, answer(swapped, images))
        swap(swapped, "softmax", drift=False)
        twice = gap(wanted, answer(swapped, images))
    except UserError as error:
        return (f"refused: {short(error)}", "", "", "", *("" for _ in MIXERS))
    maps = "–"
    hooked = seen_maps(copy.deepcopy(model), images)
    pairs = zip(read_maps(model, layers, images), hooked, strict=True)
    off = [gap(theirs.reshape(ours.shape), ours) for ours, theirs in pairs if theirs is not None]
    if off:
        maps = f"{max(off):.0e}"
    columns, refusals, softmax = [], [], max(once, twice)
    for mixer in MIXERS:
        other = copy.deepcopy(model)
        try:
            swap(other, mixer, drift=False)
            got = answer(other, images)
            if mixer == SAME:
                columns.append(f"{gap(wanted, got):.0e}")
                once = max(once, gap(wanted, got))
            else:
                columns.append("yes" if got.isfinite().all() else "NaN")
        except UserError as error:
            columns.append("no")
            refusals.append(f"`{mixer}`: {short(error)}")
    right = max(once, twice) < EXACT and all(each < EXACT for each in off)
    verdict = "works" if right else "WRONG"
    if refusals:
        verdict = f"{verdict} but for {refusals[0]}"
    return (verdict, str(len(report.rows)), f"{softmax:.0e}", maps, *columns)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", help="texts in names of models; all models without")
    asked = begin(parser, argv).names
    counts = {"works": 0, "works but": 0, "refused": 0, "other": 0}
    print()
    head = ("library", "model", "layers", "softmax", "maps", *MIXERS, "result")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for library, name, make, size in built():
        if asked and not any(text in name for text in asked):
            continue
        try:
            verdict, *rest = row(make, size)
        except Exception as error:  # a row of the table
            traceback.print_exc()
            verdict, rest = f"FAILS: {short(error)}", [""] * (3 + len(MIXERS))
        print(f"| {' | '.join((library, f'`{name}`', *rest, verdict))} |", flush=True)
        kind = "works but" if verdict.startswith("works but") else verdict.partition(":")[0]
        counts[kind if kind in counts else "other"] += 1
    print("\n" + ", ".join(f"{kind}: {number}" for kind, number in counts.items()))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
