# SPDX-License-Identifier: Apache-2.0
"""What a swap saves and costs in models that scripts without keymix trained, next to ToMe.

    python benchmarks/plain_models.py timm_vit --data CIFAR10_FOLDER --out FOLDER
    python benchmarks/swap_table.py timm_vit --data CIFAR10_FOLDER --weights FOLDER --peers

Without any training after the swap: spatial reduction and static keys in all layers, the plan that
`keymix.swap.search` finds at 0.5 points, and Token Merging (https://arxiv.org/abs/2210.09461, from
the paper's equations; timm's ViT alone). Points are of test images that took no part in any choice,
with the 95 % interval of the paired difference; latency is of a batch, in turns with the original.
Keys are estimated on three draws of calibration images; ``--keys`` compares the ways to do so.
``--peers`` adds what else makes a trained ViT cheaper: weights of 8 bits in ONNX Runtime, heads
pruned by importance, a model of fewer blocks (plain_models.py timm_vit_small). ``--recover N``
trains swapped models, and the model itself, on N training images once.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import onnxruntime
import torch
import torch.nn.functional as F
from onnxruntime.quantization import quantize_dynamic
from torch import Tensor, nn

import keymix
from keymix.analysis.measure import measure_paired
from keymix.analysis.statistics import bonett_price
from keymix.swap.calibration import Estimate, gather
from keymix.swap.held_out import HeldOut
from keymix.swap.search import search
from measured import begin, options, table
from plain_models import MODELS, SIDE, one_epoch, prepared, right, split


class TokenMerging(nn.Module):
    """A timm ViT that merges its ``r`` most similar pairs of tokens in every block (ToMe, Sec. 3).

    Tokens of even index look for their nearest one of odd index, by the cosine of their keys, means
    over heads; the r closest pairs become their mean, weighted by how many patches each stands for,
    s. Attention is proportional: softmax(Q K^T / sqrt(d) + log s). The class token stays.
    """

    def __init__(self, vit: Any, r: int) -> None:
        super().__init__()
        self.vit, self.r = vit, r

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        vit = self.vit
        x = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
        size = x.new_ones(len(x), x.shape[1], 1)
        for block in vit.blocks:
            y, keys = self._attend(block.attn, block.norm1(x), size)
            x, size = self._merge(x + block.ls1(y), keys, size)
            x = x + block.ls2(block.mlp(block.norm2(x)))
        logits: Tensor = vit.forward_head(vit.norm(x))
        return logits

    def _attend(self, attn: Any, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = size.log().mT[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(-1, -1, q.shape[-2], -1))
        return attn.proj(y.transpose(1, 2).flatten(2)), k.mean(1)

    def _merge(self, x: Tensor, keys: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        keys = F.normalize(keys, dim=-1)
        scores = keys[:, ::2] @ keys[:, 1::2].mT
        scores[:, 0] = -torch.inf  # the class token looks for none
        best, other = scores.max(-1)
        order = best.argsort(-1, descending=True)[..., None]
        r = min(self.r, order.shape[1] - 1)
        merged, kept = order[:, :r], order[:, r:].sort(1).values
        into = other[..., None].gather(1, merged)

        def both(t: Tensor) -> Tensor:  # sums of pairs; the class token comes first
            even, odd = t[:, ::2], t[:, 1::2]
            wide = t.shape[-1]
            stays = even.gather(1, kept.expand(-1, -1, wide))
            sums = odd.scatter_add(
                1, into.expand(-1, -1, wide), even.gather(1, merged.expand(-1, -1, wide))
            )
            return torch.cat((stays, sums), 1)

        total = both(size)
        return both(x * size) / total, total


class InOnnxRuntime(nn.Module):
    """A model as ONNX Runtime computes it, with weights of 8 bits if asked for."""

    def __init__(self, model: nn.Module, *, int8: bool) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))  # says where it runs
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            shape = ({0: torch.export.Dim("batch")},)
            example = torch.zeros(2, 3, SIDE, SIDE)
            torch.onnx.export(model, (example,), path, dynamic_shapes=shape, verbose=False)
            if int8:
                quantize_dynamic(path, path.with_name("int8.onnx"))
                path = path.with_name("int8.onnx")
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self.session = onnxruntime.InferenceSession(path, options)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        named = {self.session.get_inputs()[0].name: images.numpy()}
        return torch.from_numpy(self.session.run(None, named)[0])


def pruned(vit: Any, images: Tensor, labels: Tensor, count: int) -> nn.Module:
    """Take the least important heads out of timm's ViT, the last of no block.

    A head's importance is the mean of |dL/dm| over images, m a factor of its output that is one
    (Michel et al., https://arxiv.org/abs/1905.10650, Sec. 4.1), divided by the norm over a block.
    """
    vit = copy.deepcopy(vit)
    heads, width = vit.blocks[0].attn.num_heads, vit.blocks[0].attn.head_dim
    importance = torch.zeros(len(vit.blocks), heads)
    masks: list[Tensor] = []
    hooks = [
        block.attn.proj.register_forward_pre_hook(
            lambda _, args, i=i: ((args[0].unflatten(-1, (heads, width)) * masks[i]).flatten(-2),)
        )
        for i, block in enumerate(vit.blocks)
    ]
    for some, theirs in zip(images.split(32), labels.split(32), strict=True):
        masks[:] = [torch.ones(len(some), 1, heads, 1, requires_grad=True) for _ in vit.blocks]
        F.cross_entropy(vit(some), theirs, reduction="sum").backward()
        found = [m.grad.abs().sum((0, 1, 3)) for m in masks if m.grad is not None]
        importance += torch.stack(found)
    for hook in hooks:
        hook.remove()
    importance /= importance.norm(dim=1, keepdim=True)
    kept = torch.ones_like(importance, dtype=torch.bool)
    for place in importance.flatten().argsort().tolist():
        if count and kept[place // heads].sum() > 1:
            kept[place // heads, place % heads] = False
            count -= 1
    for block, mine in zip(vit.blocks, kept, strict=True):
        attn, rows = block.attn, mine.repeat_interleave(width)
        attn.num_heads, attn.attn_dim = int(mine.sum()), int(rows.sum())
        attn.qkv.weight = nn.Parameter(attn.qkv.weight.detach()[rows.repeat(3)])
        if attn.qkv.bias is not None:
            attn.qkv.bias = nn.Parameter(attn.qkv.bias.detach()[rows.repeat(3)])
        attn.proj.weight = nn.Parameter(attn.proj.weight.detach()[:, rows])
    return vit


def recovered(model: nn.Module, data: tuple[Tensor, Tensor]) -> nn.Module:
    """Train a copy on images once, the rate falling from 3e-4 to nothing."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    steps = len(data[0]) // 64
    torch.manual_seed(0)
    one_epoch(model, data, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps))
    return model.eval()


def trained(name: str, given: Any) -> nn.Module:
    """Return a model with the weights that its script left."""
    model = MODELS[name]()
    model.load_state_dict(torch.load(given.weights / f"{name}.pt", weights_only=True)["model"])
    return model.eval()


def rows(name: str, given: Any) -> Iterator[list[Any]]:
    """Measure everything of one model, a row each."""
    model = trained(name, given)
    images, labels = split(given.data, "test", given.test + given.chosen)
    shown = prepared(images)
    choosing, judging = slice(given.test, None), slice(given.test)
    before = right(model, images[judging], labels[judging])
    yield ["the model", f"{100 * float(before.double().mean()):.1f} %", "", "", ""]

    def line(what: str, changed: nn.Module, macs: float | None = None) -> list[Any]:
        change = right(changed, images[judging], labels[judging]).double() - before.double()
        low, high, _ = bonett_price(change.numpy())
        sizes = (3, SIDE, SIDE)
        pair = measure_paired(model, changed, sizes, batch_size=given.batch_size, repeats=30)
        spread = f"{pair.ratio:.2f} ({pair.ratio_q1:.2f} to {pair.ratio_q3:.2f})"
        points = f"{100 * float(change.mean()):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
        ceiling = "" if macs is None else f"{macs:.2f}"
        return [what, points, spread, pair.verdict, ceiling]

    def counted(changed: nn.Module) -> float:
        size = (3, SIDE, SIDE)
        return keymix.count(changed, size).macs / keymix.count(model, size).macs

    def after(what: str, changed: nn.Module) -> Iterator[list[Any]]:
        if given.recover:
            yield line(f"{what}, after training", recovered(changed, seen))

    seen = split(given.data, "train", max(given.recover, 3 * given.calibration))
    calibration = prepared(seen[0][: 3 * given.calibration])
    draws = calibration.split(given.calibration)
    for mixer in ("spatial_reduction(key_grid=1/4)", "spatial_reduction(key_grid=1/16)"):
        changed = copy.deepcopy(model)
        report = keymix.swap(changed, mixer, drift=False) if name != "timm_swin" else None
        if report is not None:
            yield line(f"{mixer}, all blocks", changed, counted(changed))
            yield from after(f"{mixer}, all blocks", changed)
    for number, draw in enumerate(draws):
        changed = copy.deepcopy(model)
        keymix.swap(changed, "static_key", calibration=draw, drift=False)
        yield line(f"static_key, all blocks, draw {number}", changed, counted(changed))
    yield from after("static_key, all blocks, last draw", changed)
    yield from after("the model itself", model)
    found = search(
        model,
        calibration=draws[0],
        images=shown[choosing],
        labels=labels[choosing],
        max_drop=0.005,
        batch_size=given.batch_size,
    )
    print(found.answer)
    if found.report is not None:
        yield line("the plan of the search", found.report.swapped, counted(found.report.swapped))
    for r in given.merge if name == "timm_vit" else ():
        yield line(f"ToMe, r = {r}", TokenMerging(copy.deepcopy(model), r))
    if given.peers:
        yield line("ONNX Runtime", InOnnxRuntime(model, int8=False))
        yield line("ONNX Runtime, weights in int8", InOnnxRuntime(model, int8=True))
    if given.peers and name == "timm_vit":
        some = slice(256)
        for count in (1, 2, 4):
            fewer = pruned(model, prepared(seen[0][some]), seen[1][some], count)
            yield line(f"{count} of 12 heads pruned", fewer, counted(fewer))
        if (given.weights / "timm_vit_small.pt").exists():
            smaller = trained("timm_vit_small", given)
            yield line("three blocks, trained as long", smaller, counted(smaller))


def keys(name: str, given: Any) -> Iterator[list[Any]]:
    """Measure ways to set static keys in all blocks: held-out loss and accuracy of each draw."""
    model = trained(name, given)
    images, labels = split(given.data, "test", given.test)
    draws = prepared(split(given.data, "train", 3 * given.calibration)[0]).split(given.calibration)
    held_out = HeldOut(prepared(images), labels)
    ways: dict[str, Callable[[nn.Module, Tensor], object]] = {
        "the model": lambda _, draw: None,
        "keys at random": lambda own, draw: keymix.swap(own, "static_key", drift=False),
        "least squares in one pass": lambda own, draw: keymix.swap(
            own, "static_key", calibration=gather(model, draw), drift=False
        ),
    }
    for estimate in get_args(Estimate):
        ways[estimate] = lambda own, draw, estimate=estimate: keymix.swap(
            own, "static_key", calibration=draw, estimate=estimate, drift=False
        )
    for what, way in ways.items():
        losses, scores = [], []
        for number, draw in enumerate(draws[: 1 if what == "the model" else 3]):
            torch.manual_seed(number)
            own = copy.deepcopy(model)
            way(own, draw)
            loss, score = held_out.score(own)
            losses.append(f"{loss:.3f}")
            scores.append(f"{100 * score:.1f}")
        yield [what, ", ".join(losses), ", ".join(scores)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of one model."""
    parser = options(__doc__)
    add: Callable[..., Any] = parser.add_argument
    add("model", choices=MODELS)
    add("--data", type=Path, required=True, help="folder of CIFAR-10 as parquet")
    add("--weights", type=Path, required=True, help="where plain_models.py wrote")
    add("--test", type=int, default=2000, help="test images that judge")
    add("--chosen", type=int, default=2000, help="other test images, by which the search chooses")
    add("--calibration", type=int, default=64, help="training images of a draw")
    add("--batch-size", type=int, default=32)
    add("--merge", type=int, nargs="*", default=[8, 16, 32], help="tokens merged in a block")
    add("--peers", action="store_true", help="int8, fewer heads, a smaller model")
    add("--recover", type=int, default=0, metavar="N", help="train on N images after the swap")
    add("--keys", action="store_true", help="only ways to set static keys, in all blocks")
    given = begin(parser, argv)
    if given.keys:
        table(("keys", "held-out loss, each draw", "top-1, %"), keys(given.model, given))
        return 0
    heads = ("what", "points (95 %)", "time / original", "test", "multiply-adds / original")
    table(heads, rows(given.model, given))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
