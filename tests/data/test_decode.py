# SPDX-License-Identifier: Apache-2.0
"""Files of every kind become 8-bit grey or RGB; damaged ones are named."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import EpsImagePlugin, Image
from torchvision.transforms import v2

import keymix
from keymix.data.decode import FORMATS, convert, fit, open_image, pixels_of, read_image
from keymix.data.files import SUFFIXES
from keymix.errors import UserError


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def corner(path: Path, in_chans: int = 3) -> list[int]:
    return read_image(path, 4, in_chans)[:, 0, 0].tolist()


def test_grey_images_repeat_their_channel(tmp_path: Path) -> None:
    assert corner(saved(Image.new("L", (4, 4), 77), tmp_path / "a.png")) == [77] * 3
    assert corner(saved(Image.new("1", (4, 4), 1), tmp_path / "b.png")) == [255] * 3
    assert corner(saved(Image.new("RGB", (4, 4), (77, 77, 77)), tmp_path / "c.png"), 1) == [77]


@pytest.mark.parametrize("value", [0, 200, 30000, 65535])
def test_sixteen_bit_images_keep_their_range(tmp_path: Path, value: int) -> None:
    deep = Image.fromarray(np.full((4, 4), value, dtype=np.uint16))
    for name in ("a.png", "a.tif"):
        assert corner(saved(deep, tmp_path / name)) == [round(value / 257)] * 3


def test_transparency_becomes_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 127))
    grey = Image.new("LA", (4, 4), (5, 0))
    assert corner(saved(clear, tmp_path / "clear.png")) == [255] * 3
    assert corner(saved(half, tmp_path / "half.png")) == [128] * 3
    assert corner(saved(grey, tmp_path / "grey.png"), 1) == [255]


def test_palettes_become_their_colours(tmp_path: Path) -> None:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert corner(saved(palette, tmp_path / "a.png")) == [10, 20, 30]
    assert corner(saved(palette, tmp_path / "b.png", transparency=1)) == [255] * 3
    assert corner(saved(palette, tmp_path / "c.gif")) == [10, 20, 30]


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    red = Image.new("CMYK", (4, 4), (0, 255, 255, 0))
    seen = corner(saved(red, tmp_path / "red.jpg", quality=95))
    assert np.abs(np.array(seen) - [255, 0, 0]).max() < 10


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_of_several_frames_the_first_is_read(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if suffix == "webp" else {}
    path = tmp_path / f"a.{suffix}"
    saved(frames[0], path, save_all=True, append_images=frames[1:], **options)
    with Image.open(path) as image:
        assert image.n_frames == 3
    assert corner(path) == [255, 0, 0]


def test_floats_have_no_eight_bit_meaning(tmp_path: Path) -> None:
    path = saved(Image.new("F", (4, 4), 0.5), tmp_path / "depth.tif")
    with pytest.raises(UserError, match=r"depth\.tif: floating-point pixels"):
        read_image(path, 4)


def test_integers_beyond_sixteen_bits_are_refused(tmp_path: Path) -> None:
    path = saved(Image.new("I", (4, 4), 70000), tmp_path / "counts.tif")
    with pytest.raises(UserError, match="32-bit integer pixels"):
        read_image(path, 4)


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "tif", "webp"])
@pytest.mark.parametrize("keep", [0, 20, 0.7])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, keep: float) -> None:
    path = saved(picture(0, (64, 64)), tmp_path / f"cat.{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    with pytest.raises(UserError, match=r"cannot read image .*cat\."):
        read_image(path, 64)


def test_missing_files_and_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.png: .*No such file"):
        read_image(tmp_path / "none.png", 4)
    (tmp_path / "text.png").write_text("not pixels")
    with pytest.raises(UserError, match=r"text\.png: not an image"):
        read_image(tmp_path / "text.png", 4)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def other(kind: str) -> bytes:
    """An image of a kind that no data may have."""
    stream = io.BytesIO()
    picture(0, (32, 32)).save(stream, kind)
    return stream.getvalue()


def test_the_decoders_are_those_of_the_suffixes() -> None:
    Image.init()
    known = Image.registered_extensions()
    assert {known[suffix] for suffix in SUFFIXES} == set(FORMATS)


def test_images_are_opened_in_one_place() -> None:
    """No other line of keymix gives a file to all of Pillow's decoders."""
    root = Path(keymix.__file__).parent
    found = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if re.search(r"Image\.open\(|imread\(|read_image\(.*torchvision", file.read_text("utf-8"))
    }
    assert found == {"data/decode.py"}


@pytest.mark.parametrize("kind", ["EPS", "ICO", "JPEG2000", "TGA"])
def test_other_kinds_of_images_are_never_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    content = EPS if kind == "EPS" else other(kind)
    path = tmp_path / "e.png"
    path.write_bytes(content)

    def ghostscript(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript)
    with pytest.raises(UserError, match=r"cannot read image .*e\.png: not an image"):
        read_image(path, 4)
    with pytest.raises(OSError, match="cannot identify"):
        open_image(content)


def test_a_phone_s_photo_of_several_pictures_is_read(tmp_path: Path) -> None:
    photo, preview = picture(0, (32, 32)), picture(1, (16, 16))
    path = tmp_path / "IMG_0001.jpg"
    photo.save(path, "MPO", save_all=True, append_images=[preview])
    with open_image(path) as image:
        assert (image.format, image.size) == ("MPO", (32, 32))
    assert np.abs(read_image(path, 32).numpy().astype(int).transpose(1, 2, 0) - photo).mean() < 12


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_suffix_is_read(tmp_path: Path, suffix: str) -> None:
    image = picture(0, (8, 8)).convert({".pbm": "1", ".pgm": "L"}.get(suffix, "RGB"))
    assert read_image(saved(image, tmp_path / f"a{suffix}"), 8).shape == (3, 8, 8)


def test_an_image_of_the_size_is_left_alone() -> None:
    image = pixels_of(picture(3, (20, 12)))
    assert fit(image, (12, 20), 1.0) is image


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (33, 71), (200, 31)])
def test_the_evaluation_crop_is_torchvision_s(size: tuple[int, int]) -> None:
    image = picture(1, size)
    theirs = v2.Compose([v2.Resize(32, v2.InterpolationMode.BICUBIC), v2.CenterCrop(28)])(image)
    ours = fit(pixels_of(image), (28, 28), 0.875)
    assert ours.shape == (3, 28, 28)
    difference = np.abs(ours.numpy().astype(int) - pixels_of(theirs).numpy().astype(int))
    # The long side may round to one pixel more or less, a shift of less than one pixel.
    assert np.median(difference) <= 6


def test_a_full_crop_keeps_the_centre_and_the_shape() -> None:
    wide = Image.new("RGB", (90, 30), "black")
    wide.paste((255, 0, 0), (30, 0, 60, 30))
    array = fit(pixels_of(wide), (10, 10), 1.0)
    assert array.shape == (3, 10, 10)
    assert array[0, 5].min() > 200  # the red middle third, and nothing else
    assert array[1].max() == 0


def test_pixels_are_channels_first() -> None:
    image = convert(picture(0, (5, 7)), 3)
    assert pixels_of(image).shape == (3, 7, 5)
    assert pixels_of(convert(image, 1)).shape == (1, 7, 5)
    assert tuple(pixels_of(image)[:, 6, 4].tolist()) == image.getpixel((4, 6))


def test_read_image_owns_its_memory(tmp_path: Path) -> None:
    image = read_image(saved(picture(0), tmp_path / "a.png"), (8, 12))
    assert image.dtype == torch.uint8
    assert image.shape == (3, 8, 12)
    image.zero_()  # writable


@pytest.mark.parametrize("options", [{"in_chans": 2}, {"crop_pct": 0.0}, {"image_size": -1}])
def test_bad_options_are_named(tmp_path: Path, options: dict) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        read_image(tmp_path / "a.png", **{"image_size": 4, **options})
