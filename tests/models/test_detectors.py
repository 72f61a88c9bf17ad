# SPDX-License-Identifier: Apache-2.0
"""Mask R-CNN and Cascade Mask R-CNN on small backbones: what goes in, what comes out, options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import keymix
from each import together
from keymix.analysis.counting import count
from keymix.decoders.detection.cascade import OVERLAPS, refined
from keymix.decoders.detection.cascade import _match as match
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.hosts.base import find_host
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.resize import GridBound
from keymix.models import create_model, load_weights
from keymix.models.backbone import draw_first_bias
from keymix.models.detectors import padded
from tolerances import close, differs

SMALL: dict[str, Any] = {
    "backbone": "caformer_micro_32",
    "backbone_size": 64,
    "num_classes": 3,
    "out_channels": 16,
    "samples": 16,
    "proposals": 12,
}
NAMES = ("mask_rcnn", "cascade_mask_rcnn")
both = pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])


def small(name: str = "mask_rcnn", **options: Any) -> Any:
    """A small detector, its weights drawn from one seed."""
    torch.manual_seed(0)
    return create_model(name, **{**SMALL, **options})


def images(*sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Images of some sizes, unequal and odd by default."""
    noise = torch.Generator().manual_seed(1)
    made = [torch.randn(3, *size, generator=noise) for size in sizes or ((61, 95), (70, 33))]
    return [image.to(dtype) for image in made]


def instances(batch: list[Tensor], count: int = 2) -> list[dict[str, Tensor]]:
    """Instances of each image: one half as wide as it, the next a third of that, and so on."""
    found = []
    for image in batch:
        height, width = image.shape[1:]
        boxes = torch.tensor(
            [[2, 3, 2 + width / (2 + i), 3 + height / (2 + i)] for i in range(count)]
        ).reshape(count, 4)
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        for mask, box in zip(masks, boxes.int().tolist(), strict=True):
            mask[box[1] : box[3], box[0] : box[2]] = 1
        labels = torch.arange(count) % 3 + 1
        found.append({"boxes": boxes.to(image.dtype), "labels": labels, "masks": masks})
    return found


def losses(model: Any, seed: int = 0, count: int = 2) -> dict[str, Tensor]:
    """The losses on the images, of a number of instances on each."""
    batch = images(dtype=next(model.parameters()).dtype)
    torch.manual_seed(seed)
    found: dict[str, Tensor] = model.train()(batch, instances(batch, count))
    return found


def total(found: dict[str, Tensor]) -> Tensor:
    return torch.stack([*found.values()]).sum()


def found_by(model: Any, batch: list[Tensor] | None = None) -> list[dict[str, Tensor]]:
    """What a model finds on the images, or others."""
    with torch.no_grad():
        found: list[dict[str, Tensor]] = model.eval()(images() if batch is None else batch)
    return found


def sure(model: Any, *logits: float) -> Any:
    """Give every box the same logits, one list for all stages."""
    for stage in model.decoder.stages:
        nn.init.zeros_(stage.box_predictor.cls_score.weight)
        with torch.no_grad():
            stage.box_predictor.cls_score.bias.copy_(torch.tensor(logits))
    return model


# ---- what goes in and comes out -----------------------------------------------------------------


@both
def test_losses_have_the_frameworks_names(name: str) -> None:
    parts = ("classifier", "box_reg", "mask")
    stages = [""] if name == "mask_rcnn" else ["_1", "_2", "_3"]
    wanted = {f"loss_{part}{stage}" for part in parts for stage in stages}
    found = losses(small(name))
    assert found.keys() == {"loss_objectness", "loss_rpn_box_reg"} | wanted
    assert all(loss.ndim == 0 and loss.isfinite() for loss in found.values())
    assert all(loss > 0 for loss in found.values())


@both
def test_every_parameter_has_a_gradient(name: str) -> None:
    model = small(name)
    total(losses(model)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@both
def test_detections_lie_on_their_image(name: str) -> None:
    model = small(name, detections=7, score_threshold=0.0)
    for image, found in zip(images(), found_by(model), strict=True):
        height, width = image.shape[1:]
        assert {k: tuple(v.shape) for k, v in found.items()} == {
            "boxes": (7, 4),
            "labels": (7,),
            "scores": (7,),
            "masks": (7, 28, 28),
            "size": (2,),
        }
        assert found["size"].tolist() == [height, width]
        assert found["labels"].dtype == torch.int64
        assert found["boxes"].min() >= 0
        assert found["boxes"][:, 2].max() <= width
        assert found["boxes"][:, 3].max() <= height
        assert (found["boxes"][:, 2:] > found["boxes"][:, :2]).all()
        assert set(found["labels"].tolist()) <= {1, 2, 3}
        assert found["scores"].tolist() == sorted(found["scores"].tolist(), reverse=True)
        assert 0 <= found["masks"].min() <= found["masks"].max() <= 1


@both
def test_a_batch_is_as_good_as_a_list_and_images_do_not_meet(name: str) -> None:
    model = small(name, score_threshold=0.0, detections=5)
    batch = images((64, 64), (64, 64))
    listed, stacked = found_by(model, batch), found_by(model, torch.stack(batch))  # type: ignore[arg-type]
    for index, image in enumerate(batch):
        alone = found_by(model, [image])[0]
        for key in ("boxes", "scores", "masks"):
            close(stacked[index][key], listed[index][key])
            close(alone[key], listed[index][key])


def test_images_are_padded_at_the_bottom_and_the_right() -> None:
    batch, sizes = padded([torch.ones(3, 33, 64), torch.ones(3, 10, 65)])
    assert sizes == [(33, 64), (10, 65)]
    assert batch.shape == (2, 3, 64, 96)
    assert batch[0, :, :33, :64].eq(1).all()
    assert batch[1, :, :10, :65].eq(1).all()
    assert int(batch.sum()) == 3 * (33 * 64 + 10 * 65)


@pytest.mark.parametrize("backbone", ["caformer_micro_32", "convnext_atto", "resnet18"])
def test_gradients_of_padded_images_stay_small(backbone: str) -> None:
    model = small(backbone=backbone).train()
    batch = images((60, 90), (90, 60))
    sum(model(batch, instances(batch)).values()).backward()
    norms = [each.grad.norm() for each in model.parameters() if each.grad is not None]
    assert torch.stack(norms).max() < 100


def test_a_first_bias_that_was_trained_stays() -> None:
    conv = nn.Conv2d(3, 2, 3)
    nn.init.constant_(conv.bias, 0.5)
    draw_first_bias(nn.Sequential(conv), 3)
    assert conv.bias.tolist() == [0.5, 0.5]


@both
def test_without_a_mask_head_boxes_alone_are_learned_and_found(name: str) -> None:
    model, batch = small(name, masks=False), images()
    targets = [{key: each[key] for key in ("boxes", "labels")} for each in instances(batch)]
    assert not any("mask" in key for key in (*model.state_dict(), *model.train()(batch, targets)))
    with torch.no_grad():
        assert all("masks" not in found for found in model.eval()(batch))
    model.reset_classifier(5)
    whole = small(name)
    with pytest.raises(UserError, match="'masks'"):
        whole.train()(batch, targets)


@both
def test_images_without_instances_train(name: str) -> None:
    model = small(name)
    found = losses(model, count=0)
    assert all(loss.isfinite() for loss in found.values())
    assert all(found[key] == 0 for key in found if "mask" in key or "box_reg" in key)
    assert all(found[key] > 0 for key in found if "classifier" in key or "objectness" in key)
    total(found).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@both
def test_without_proposals_nothing_is_found_and_training_goes_on(name: str) -> None:
    model = small(name)
    propose = model.decoder.rpn.filter_proposals

    def none(*given: Any) -> Any:
        boxes, scores = propose(*given)
        return [each[:0] for each in boxes], [each[:0] for each in scores]

    model.decoder.rpn.filter_proposals = none
    for found in found_by(model):
        assert [len(found[key]) for key in ("boxes", "labels", "scores", "masks")] == [0] * 4
    for number in (0, 2):
        assert all(loss.isfinite() for loss in losses(model, count=number).values())


def test_a_seed_draws_the_samples_and_evaluation_draws_nothing() -> None:
    model = small()
    one, same, other = losses(model, 3), losses(model, 3), losses(model, 4)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)
    before = torch.get_rng_state()
    found_by(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_boxes_stay_in_full_precision_under_autocast() -> None:
    model = small(score_threshold=0.0, proposals=2, samples=4)  # bfloat16 is slow on a CPU
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_bfloat16 = losses(model)
        found = found_by(model, images((40, 50)))[0]
    assert all(loss.dtype == torch.float32 for loss in in_bfloat16.values())
    assert {found[key].dtype for key in ("boxes", "scores", "masks")} == {torch.float32}
    full = losses(model)
    assert float(total(in_bfloat16)) == pytest.approx(float(total(full)), rel=0.05)
    total(in_bfloat16).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ---- the cascade --------------------------------------------------------------------------------


def test_a_stage_wants_more_overlap_than_the_one_before() -> None:
    model = small("cascade_mask_rcnn")
    truth = {"boxes": torch.tensor([[0.0, 0, 100, 100]]), "labels": torch.tensor([2])}
    boxes = [torch.tensor([[0.0, 0, width, 100] for width in (45, 55, 65, 75)])]  # IoU 0.45 to 0.75
    labels = [match(stage, boxes, [truth])[1][0].tolist() for stage in model.decoder.stages]
    assert labels == [[0, 2, 2, 2], [0, 0, 2, 2], [0, 0, 0, 2]]
    assert [s.proposal_matcher.high_threshold for s in model.decoder.stages] == [*OVERLAPS]


def test_weights_of_boxes_grow_from_stage_to_stage() -> None:
    weights = [stage.box_coder.weights for stage in small("cascade_mask_rcnn").decoder.stages]
    assert weights == [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]


def test_refined_boxes_are_moved_clipped_and_without_gradient() -> None:
    stage = small("cascade_mask_rcnn").decoder.stages[0]
    boxes = [torch.tensor([[10.0, 10, 30, 50]]), torch.tensor([[0.0, 0, 20, 20]])]
    shifts = torch.zeros(2, 16, requires_grad=True)
    moves = torch.zeros(2, 16)
    moves[0, 0], moves[1, 1] = 10 * 0.5, 10 * -0.25  # by half a width, and up by a quarter height
    found = refined(stage, boxes, shifts + moves, [(100, 35), (100, 100)])
    close(found[0], torch.tensor([[20.0, 10, 35, 50]]))  # clipped at 35
    close(found[1], torch.tensor([[0.0, 0, 20, 15]]))
    assert not found[0].requires_grad


def test_the_next_stage_gets_the_refined_boxes() -> None:
    model = small("cascade_mask_rcnn", score_threshold=0.0)
    seen: list[list[Tensor]] = []
    for stage in model.decoder.stages:
        stage.box_roi_pool = Seen(stage.box_roi_pool, seen)
    stages = model.decoder.stages
    for stage in stages:
        nn.init.zeros_(stage.box_predictor.bbox_pred.weight)
        nn.init.zeros_(stage.box_predictor.bbox_pred.bias)
    with torch.no_grad():
        stages[0].box_predictor.bbox_pred.bias[2] = 5 * torch.tensor(0.5).log()  # half as wide
    found_by(model, images((64, 64)))
    inside = (seen[0][0][:, 0] > 0) & (seen[0][0][:, 2] < 64)
    first, second = (boxes[0][inside] for boxes in seen[:2])
    close(second[:, 2] - second[:, 0], (first[:, 2] - first[:, 0]) / 2)
    close(seen[2][0], seen[1][0])  # the second stage moves nothing


class Seen(nn.Module):
    """Notes the boxes that are pooled."""

    def __init__(self, pool: nn.Module, seen: list[list[Tensor]]) -> None:
        super().__init__()
        self.pool, self.seen = pool, seen

    def forward(self, features: Any, boxes: list[Tensor], sizes: Any) -> Tensor:
        self.seen.append(boxes)
        pooled: Tensor = self.pool(features, boxes, sizes)
        return pooled


@pytest.mark.slow
def test_scores_and_masks_are_averaged_over_stages() -> None:
    model = small("cascade_mask_rcnn", score_threshold=0.0)
    logits = torch.tensor([[0.0, 1, 2, -1], [0.5, -1, 0, 2], [0.0, 0, 0, 3]])
    for stage, own, mask in zip(model.decoder.stages, logits, (-2.0, 0.0, 1.0), strict=True):
        nn.init.zeros_(stage.box_predictor.cls_score.weight)
        nn.init.zeros_(stage.mask_predictor.mask_fcn_logits.weight)
        with torch.no_grad():
            stage.box_predictor.cls_score.bias.copy_(own)
            stage.mask_predictor.mask_fcn_logits.bias.fill_(mask)
    found = found_by(model)[0]
    wanted = logits.softmax(-1).mean(0)
    close(found["scores"], wanted[found["labels"]])
    assert set(found["labels"].tolist()) == {1, 2, 3}
    mean = torch.tensor([-2.0, 0, 1]).sigmoid().mean()
    close(found["masks"], mean.expand_as(found["masks"]))


@pytest.mark.slow
def test_losses_of_later_stages_count_less() -> None:
    model = sure(small("cascade_mask_rcnn"), 0.0, 1, 2, 3)
    found = losses(model, count=0)  # all proposals are background, in all stages
    first = found["loss_classifier_1"]
    close(found["loss_classifier_2"], 0.5 * first)
    close(found["loss_classifier_3"], 0.25 * first)


def test_a_cascade_has_one_box_for_all_classes() -> None:
    widths = [s.box_predictor.bbox_pred.out_features for s in small(NAMES[1]).decoder.stages]
    assert widths == [4, 4, 4]
    assert small(NAMES[0]).decoder.roi_heads.box_predictor.bbox_pred.out_features == 4 * 4


# ---- options ------------------------------------------------------------------------------------


ANSWERS: dict[str, Tensor] = {}  # many options change the same detector


def answer(options: dict[str, Any], *, train: bool) -> Tensor:
    """All numbers that a small detector gives, after the draws of a seed."""
    base = {"score_threshold": 0.0, "detections": 8, **options}
    model = small(**base)
    if train:
        return total(losses(model)).detach()
    sure(model, 0.0, 0.1, 0.2, 0.3)
    found = found_by(model)
    return torch.cat([each[key].flatten() for each in found for key in ("boxes", "masks")])


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "backbone": ({}, {"backbone": "test_resnet"}, False),
    "backbone_options": ({}, {"backbone_options": {"head_dim": 8}}, False),
    "out_channels": ({}, {"out_channels": 24}, False),
    "map_norm": ({}, {"map_norm": False}, False),
    "freeze_norm": ({"backbone": "test_resnet"}, {"freeze_norm": False}, True),
    "proposals": ({}, {"proposals": 5}, False),
    "samples": ({}, {"samples": 8}, True),
    "score_threshold": ({}, {"score_threshold": 0.3}, False),
    "nms_threshold": ({}, {"nms_threshold": 0.9}, False),
    "detections": ({}, {"detections": 4}, False),
    "num_classes": ({}, {"num_classes": 4}, True),
    "drop_path_rate": ({}, {"drop_path_rate": 0.5}, True),
    "mixer": ({}, {"mixer": "key_value"}, False),
    "mixer_options": (
        {"mixer": "static_key"},
        {"mixer_options": {"activation": "relu"}},
        False,
    ),
    "backbone_size": ({"mixer": "static_key"}, {"backbone_size": 96}, False),
}


@pytest.mark.slow
@together
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_something(option: str) -> None:
    base, change, train = OPTIONS[option]
    key = f"{base}, {train=}"
    if key not in ANSWERS:
        ANSWERS[key] = answer(base, train=train)
        assert torch.equal(ANSWERS[key], answer(base, train=train))
    assert differs_at_all(ANSWERS[key], answer({**base, **change}, train=train))


def differs_at_all(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or differs(one, other)


def test_channels_are_those_of_the_images() -> None:
    model = small(in_chans=2, score_threshold=0.0)
    assert len(found_by(model, [torch.randn(2, 40, 50)])[0]["boxes"]) > 0


def test_thresholds_are_kept() -> None:
    model = sure(small(score_threshold=0.28, nms_threshold=0.2), 0.0, 0.1, 0.2, 0.3)
    for found in found_by(model):
        assert len(found["scores"]) > 0
        assert found["scores"].min() > 0.28
        assert set(found["labels"].tolist()) == {3}  # at 0.29, that of class 2 is 0.26
        overlap = torch.tril(boxes_iou(found["boxes"]), -1)
        assert overlap.max() <= 0.2


def boxes_iou(boxes: Tensor) -> Tensor:
    from torchvision.ops import box_iou

    found: Tensor = box_iou(boxes, boxes)
    return found


# ---- a model of timm's registry -----------------------------------------------------------------


@both
def test_timm_makes_it_by_name_and_it_says_what_it_is(name: str) -> None:
    model = timm.create_model(name, **SMALL)
    assert model.pretrained_cfg["architecture"] == name
    assert model.pretrained_cfg["num_classes"] == 80
    assert model.num_classes == 3
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16]
    assert model.feature_info[0]["module"].startswith("encoder.model.")
    last = model.pretrained_cfg["classifier"]
    assert tuple(map(model.get_submodule, last)) == model.get_classifier()
    assert {f"{path}.weight" for path in last} <= model.state_dict().keys()
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(p for ps in groups.values() for p in ps) == sorted(
        p for p, _ in model.named_parameters()
    )
    model.set_grad_checkpointing()
    total(losses(model)).backward()


def test_its_maps_are_those_of_its_backbone_and_end_in_its_pyramid() -> None:
    name = NAMES[0]
    model, x = small(name).eval(), torch.stack(images((64, 96), (64, 96)))
    final, maps = model.forward_intermediates(x)
    levels = model.forward_features(x)
    assert list(final) == list(levels)
    for key, level in levels.items():
        close(final[key], level)
    found = model.forward_head(levels, x, [(64, 96)] * 2)
    for one, other in zip(found, model(x), strict=True):
        close(one["boxes"], other["boxes"])
    for chosen in (None, (0, 2)):
        wanted = {} if chosen is None else {"out_indices": chosen}
        features = timm.create_model(name, features_only=True, **wanted, **SMALL).eval()
        known = features.feature_info
        features.load_state_dict(
            {f"model.{k}": t for k, t in model.state_dict().items()}, strict=False
        )
        given = features(x)
        assert [m.shape[1] for m in given] == known.channels()
        assert [m.shape[2:] for m in given] == [(64 // r, 96 // r) for r in known.reduction()]
        for one, index in zip(given, chosen or range(3), strict=True):
            close(one, maps[index])


def test_a_folder_of_timms_is_the_detector(tmp_path: Path) -> None:
    for choice in ({}, {"mixer": "conv_static_key", "mixer_options": {"kernel_size": 5}}):
        model = timm.create_model(
            NAMES[0], **SMALL, **choice, img_size=(96, 128), score_threshold=0.0
        )
        timm.models.save_for_hf(model.eval(), str(tmp_path), safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert (again.img_size, again.num_classes) == ((96, 128), 3)
        assert [*map(type, find_mixers(again).values())] == [
            *map(type, find_mixers(model).values())
        ]
        for found, wanted in zip(found_by(again), found_by(model), strict=True):
            assert len(wanted["boxes"])
            assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
        others = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=42)
        assert torch.equal(
            others.state_dict()["decoder.rpn.head.cls_logits.weight"],
            model.state_dict()["decoder.rpn.head.cls_logits.weight"],
        )


@both
def test_classes_can_be_reset(name: str) -> None:
    model = small(name, score_threshold=0.0)
    last = model.get_classifier()
    model.reset_classifier(5)
    assert model.num_classes == 5
    assert not set(model.get_classifier()) & set(last)
    fresh = create_model(name, **{**SMALL, "num_classes": 5})
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in fresh.state_dict().items()
    }
    assert losses(model)["loss_objectness"] > 0
    found_by(model)


def test_weights_of_a_classifier_start_the_encoder() -> None:
    classifier = create_model("caformer_micro_32", img_size=64, num_classes=7)
    model = small()
    heads = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("decoder.")}
    loaded = load_weights(model, classifier.state_dict())
    own = model.state_dict()
    for key, tensor in classifier.state_dict().items():
        if f"encoder.model.{key}" in own:
            assert torch.equal(own[f"encoder.model.{key}"], tensor)
    assert all(name.startswith("decoder.") for name in loaded.missing)
    assert all(torch.equal(own[key], tensor) for key, tensor in heads.items())
    assert all(name.startswith(("head", "norm")) for name in loaded.unused)


BACKBONES = {
    "cskaformer_s18": (64, 128, 320, 512),
    "resnet50": (256, 512, 1024, 2048),
    "swin_tiny_patch4_window7_224": (96, 192, 384, 768),
    "vit_small_patch16_224": (384,),
    "swin_micro_p2_32": None,
}


@pytest.mark.slow
@together
@pytest.mark.parametrize("backbone", BACKBONES)
def test_backbones_of_many_families_make_a_pyramid(backbone: str) -> None:
    with torch.device("meta"):
        model: Any = create_model("mask_rcnn", backbone=backbone)
        if BACKBONES[backbone] is not None:
            assert tuple(model.encoder.feature_info.channels()) == BACKBONES[backbone]
        levels = model.forward_features(torch.zeros(1, 3, 96, 160))
        assert [tuple(level.shape) for level in levels.values()][:3] == [
            (1, 256, 96 // 4 // 2**i, 160 // 4 // 2**i) for i in range(3)
        ]
        found = model.eval()([torch.zeros(3, 90, 130)])
        assert found[0]["boxes"].shape == (100, 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such backbone": ({"backbone": "resnet5000"}, "resnet5000"),
    "a decoder as backbone": ({"backbone": "mask_rcnn"}, "mask_rcnn"),
    "patches of 14 pixels": ({"backbone": "vit_small_patch14_dinov2"}, "14"),
    "one image size alone": ({"backbone": "cait_micro_p4_32"}, "cait_micro_p4_32"),
    "no mixer there": ({"backbone": "test_resnet", "mixer": "static_key"}, "ResNet"),
    "options without a mixer": ({"mixer_options": {"activation": "relu"}}, "mixer_options"),
    "no classes": ({"num_classes": 0}, "num_classes=0"),
    "a score above 1": ({"score_threshold": 1.5}, "score_threshold=1.5"),
    "an overlap below 0": ({"nms_threshold": -0.1}, "nms_threshold=-0.1"),
    "no proposals": ({"proposals": 0}, "proposals=0"),
    "the backbone's size": ({"backbone_options": {"img_size": 64}}, "img_size"),
    "a norm of one map": ({"backbone": "test_vit", "map_norm": True}, "map_norm"),
    "weights of its own": ({"pretrained": True}, "caformer_micro_32 has no weights of its own"),
}


@together
@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_detector_is_refused(case: str) -> None:
    options, culprit = REFUSED[case]
    with pytest.raises(UserError, match=culprit):
        create_model("mask_rcnn", **{**SMALL, **options})


# ---- mixers, counts and attention ---------------------------------------------------------------


def test_one_mixer_is_put_where_the_backbone_attends() -> None:
    def kinds(backbone: str, mixer: Any) -> set[tuple[str, str]]:
        with torch.device("meta"):
            mixers = find_mixers(small(backbone=backbone, mixer=mixer))
        return {(path.split(".")[3], each.mixer_name) for path, each in mixers.items()}

    kept = {("0", "sep_conv"), ("1", "sep_conv")}
    assert kinds("caformer_micro_32", "ska") == {*kept, ("2", "static_key"), ("3", "static_key")}
    assert kinds("caformer_s18", "ska") == {("2", "static_key"), ("3", "static_key")}  # timm's stay
    named = ["ska", "sep_conv", "mhsa", "mhsa"]
    assert ("0", "static_key") in kinds("caformer_micro_32", named)
    everywhere = {(str(stage), "pooling") for stage in range(4)}  # nothing attends in ConvFormer
    assert kinds("convformer_s18", "pooling") == everywhere


def test_mixers_keep_their_keys_where_the_backbone_was_trained() -> None:
    model = small(mixer=("sep_conv", "conv_static_key", "static_key", "softmax"))
    assert [place.path + ".mixer" for place in find_host(model).places(model)] == [
        *find_mixers(model)
    ]
    bound = {path: m for path, m in find_mixers(model).items() if isinstance(m, GridBound)}
    assert len(bound) == 3
    assert all(path.startswith("encoder.model.stages.") for path in bound)
    assert {m.resize for m in bound.values()} == {"pool_values"}
    assert [m.key_grid for m in bound.values()] == [(16, 16), (8, 8), (8, 8)]
    found_by(model, images((100, 150)))
    assert [m.key_grid for m in bound.values()] == [(16, 16), (8, 8), (8, 8)]
    chosen = small(mixer="static_key", mixer_options={"resize": "interpolate"})
    keys = [m for m in find_mixers(chosen).values() if isinstance(m, GridBound)]
    assert {m.resize for m in keys} == {"interpolate"}


@pytest.fixture
def counting(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("counting opens the task's training, whose arrays the shape checks cannot take")


@pytest.mark.slow
@pytest.mark.usefixtures("counting")
def test_with_static_keys_cost_is_linear_in_pixels() -> None:
    counts = {}
    for mixer in ("static_key", "softmax"):
        model = small(mixer=[mixer] * 4)
        counts[mixer] = [
            part(count(model, (3, 128, width), task="detection")) for width in (128, 256)
        ]
    once, twice = counts["static_key"]
    assert 1.98 * once < twice <= 2 * once  # averaged values are as many at any size
    assert counts["softmax"][1] > 2.2 * counts["softmax"][0]


def part(count: Any) -> int:
    """Multiply-adds of the mixers."""
    return sum(layer.macs for layer in count.layers if ".token_mixer" in layer.path)


@both
@pytest.mark.usefixtures("counting")
def test_heads_are_counted_at_their_most(name: str) -> None:
    model = small(name, proposals=40, detections=10)
    counted = count(model, (3, 64, 96), task="detection")
    heads = sum(layer.macs for layer in counted.layers if ".roi_heads" in layer.path)
    stages = 1 if name == "mask_rcnn" else 3
    boxes = 4 * 4 if name == "mask_rcnn" else 4
    box = 40 * (16 * 49 * 1024 + 1024 * 1024 + 1024 * (4 + boxes))
    conv = 9 * 14 * 14 * (16 * 256 + 3 * 256 * 256)
    mask = 10 * (conv + 28 * 28 * (256 * 256 + 256 * 4))
    assert heads == stages * (box + mask)


def test_attention_can_be_read() -> None:
    model = small(mixer="softmax")
    with_maps = [path for path, m in find_mixers(model).items() if isinstance(m, MapMixer)]
    maps = keymix.attention_maps(model.eval(), torch.stack(images((64, 64))), layers=with_maps)
    assert len(maps) == len(with_maps) == 3
