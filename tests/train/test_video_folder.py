"""Folders of clips: what is read is what was written, and what cannot be read is named."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weft.core.errors import InputError
from weft.train.latent_folder import LatentFolder
from weft.train.video_folder import ClipDataset, VideoFolder

av = pytest.importorskip("av")

FRAMES, HEIGHT, WIDTH = 21, 48, 80
TONES = np.arange(FRAMES, dtype=np.uint8) * 10


def film(tones: Sequence[int] = TONES) -> np.ndarray:
    """Frames of one tone each, with a corner that is red."""
    clip = np.ones((1, HEIGHT, WIDTH, 3), np.uint8) * np.array(tones, np.uint8)[:, None, None, None]
    clip[:, : HEIGHT // 2, : WIDTH // 2] = (250, 0, 0)
    return clip


def video(path: Path, clip: np.ndarray, codec: str = "libx264", kind: str = "yuv420p") -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    with av.open(str(path), "w", options={"movflags": "faststart"} if path.suffix == ".mp4" else {}) as out:
        stream = out.add_stream(codec, rate=16)
        stream.height, stream.width, stream.pix_fmt = *clip.shape[1:3], kind
        stream.options = {"crf": "10"} if codec == "libx264" else {}
        for frame in clip:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=kind)))
        out.mux(stream.encode())


def pictures(folder: Path, clip: np.ndarray, name: str) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    for i, frame in enumerate(clip, 1):
        video(folder / name.format(i), frame[None], "png", "rgb24")


def tell(folder: Path, *lines: tuple[str, str]) -> None:
    text = "\n".join(json.dumps({"file": file, "caption": caption}) for file, caption in lines)
    (folder / "captions.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of every kind."""
    root = tmp_path_factory.mktemp("mixed")
    video(root / "b.mp4", film())
    video(root / "deep" / "a.WEBM", film(), "libvpx-vp9")
    video(root / "c.gif", film(), "gif", "rgb8")
    pictures(root / "walk", film(), "{}.png")
    pictures(root, film(), "run_{:03}.png")
    (root / "walk" / "._1.png").write_bytes(b"left by another system")
    kinds = ("walk/", "run_*.png", "b.mp4", "./deep/a.WEBM", "c.gif")
    tell(root, *((name, f"clip {i}") for i, name in enumerate(kinds)), ("b.mp4", "once more"))
    return root


def test_every_kind_is_read_in_the_order_of_the_captions(mixed) -> None:
    clips = VideoFolder(mixed, 7, 24)
    assert clips.names == ["walk", "run_*.png", "b.mp4", "deep/a.WEBM", "c.gif", "b.mp4"]
    assert (clips.num_clips, clips.skipped) == (6, [])
    pixels, captions = clips.batch(range(6))
    assert (pixels.shape, pixels.dtype) == ((6, 7, 24, 24, 3), np.uint8)
    assert captions == [f"clip {i}" for i in range(5)] + ["once more"]
    # 21 frames in 7 spans of 3, of which it is the middle one; a GIF has coarse colours.
    for clip, off in zip(pixels, (1, 1, 4, 4, 40, 4), strict=True):
        assert np.abs(clip[:, -1, -1].astype(int) - TONES[1::3, None]).max() <= off
        assert np.abs(clip[:, 0, 0].astype(int) - (250, 0, 0)).max() <= max(off, 8)
    assert clips.vocabulary.encode("clip 3 more")[:4] == [2, clips.vocabulary.words.index("3"), 8, 0]


@pytest.mark.parametrize("size", [24, 48, (16, 48), (5, 3), (96, 160)])
def test_frames_fill_the_size_and_are_cropped_around_the_middle(mixed, size) -> None:
    clips = VideoFolder(mixed, 1, size)
    (clip,), _ = clips.batch([0])
    height, width = (size, size) if isinstance(size, int) else size
    assert clip.shape == (1, height, width, 3)
    red = clip[0, :, :, 0] > 175
    ratio = max(height / HEIGHT, width / WIDTH)
    across, down = red[0].sum(), red[:, 0].sum()
    assert abs(across - width / 2) <= max(1, ratio) and abs(down - height / 2) <= max(1, ratio)


def test_scaling_takes_the_mean_of_an_area(tmp_path) -> None:
    small = np.random.default_rng(0).integers(0, 256, (2, 12, 20, 3), np.uint8)
    noisy = small.repeat(4, 1).repeat(4, 2).astype(int)
    noisy[:, ::2] = np.clip(noisy[:, ::2] * 2 - 128, 0, 255)
    pictures(tmp_path / "a", noisy.astype(np.uint8), "{}.png")
    tell(tmp_path, ("a", ""))
    (clip,), _ = VideoFolder(tmp_path, 2, (12, 20)).batch([0])
    wanted = noisy.reshape(2, 12, 4, 20, 4, 3).mean((2, 4))
    assert np.abs(clip - wanted).max() <= 3


def test_a_film_is_shown_as_its_header_says(tmp_path) -> None:
    """Upright, if a telephone was turned; without what was cut off, if it is still there; by any name."""
    video(tmp_path / "plain.mp4", film())
    turned = bytearray((tmp_path / "plain.mp4").read_bytes())
    place = turned.find(b"tkhd") + 44
    turned[place : place + 36] = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, HEIGHT << 16, 0, 1 << 30)
    (tmp_path / "turned.mp4").write_bytes(turned.replace(b"VideoHandler", b"Vid\xe9oHandler"))
    with av.open(str(tmp_path / "plain.mp4")) as given, av.open(str(tmp_path / "cut.mp4"), "w") as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(video=0):
            if packet.dts is not None:
                shift = int(6 / 16 / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
                made.mux(packet)
    tell(tmp_path, ("turned.mp4", ""), ("cut.mp4", ""))
    clips = VideoFolder(tmp_path, 5, (40, 24))
    (upright, cut), _ = clips.batch([0, 1])
    assert np.abs(upright[0, 2, -3].astype(int) - (250, 0, 0)).max() < 12  # to the right, clockwise
    assert np.abs(upright[0, -3, 2].astype(int) - 20).max() < 8
    assert np.abs(cut[:, -1, -1, 0].astype(int) - TONES[6:][1::3]).max() < 8
    assert clips.skipped == [("plain.mp4", "has no caption")]


def test_what_cannot_be_used_is_counted_and_named(tmp_path, caplog) -> None:
    video(tmp_path / "good.mp4", film())
    video(tmp_path / "short.mp4", film(TONES[:4]))
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.webm").write_text("not a film\n" * 99)
    (tmp_path / "silent.gif").write_bytes((tmp_path / "good.mp4").read_bytes())
    with av.open(str(tmp_path / "sound.mp4"), "w") as out:
        stream = out.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        out.mux([*stream.encode(sound), *stream.encode()])
    names = ("gone.mp4", "good.mp4", "short.mp4", "empty.mp4", "text.webm", "sound.mp4", "empty.mp4")
    tell(tmp_path, *((name, "a cat") for name in names))
    with caplog.at_level(logging.WARNING):
        clips = VideoFolder(tmp_path, 5, 16)
    assert clips.names == ["good.mp4"]
    assert clips.skipped == [
        ("gone.mp4", "is not there"),
        ("short.mp4", "has 4 frames, 5 are needed"),
        ("empty.mp4", "cannot be read: Invalid data found when processing input"),
        ("text.webm", "cannot be read: Invalid data found when processing input"),
        ("sound.mp4", "has no pictures"),
        ("silent.gif", "has no caption"),
    ]
    assert "6 skipped: gone.mp4 is not there; short.mp4" in caplog.text and "; …" in caplog.text
    tell(tmp_path, ("gone.mp4", "a cat"))
    with pytest.raises(InputError, match=r"no usable clip in .*7 skipped: gone.mp4 is not there; "):
        VideoFolder(tmp_path, 5, 16)


def test_frames_of_too_many_pixels_are_left_out(mixed, monkeypatch) -> None:
    monkeypatch.setattr("weft.train.video_folder.MAX_PIXELS", 100)
    with pytest.raises(InputError, match=r"b\.mp4 has frames of \d+ × \d+ pixels"):
        VideoFolder(mixed, frames=2, size=8).batch([0])


def test_a_clip_that_breaks_late_is_replaced_by_the_next_good_one(tmp_path, caplog) -> None:
    for i in range(4):
        video(tmp_path / f"{i}.mp4", film(TONES[i : i + 9]))
    for name in ("0.mp4", "2.mp4", "3.mp4"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) * 7 // 10])  # the header is at the front
    tell(tmp_path, *((f"{i}.mp4", str(i)) for i in range(4)))
    clips, forgetful = VideoFolder(tmp_path, 3, 16), VideoFolder(tmp_path, 3, 16, cache_bytes=0)
    assert (clips.num_clips, clips.skipped) == (4, [])
    _, captions = clips.batch([2, 1, 0, 3, 2])
    assert captions == ["1"] * 5
    assert [name for name, _ in clips.skipped] == ["2.mp4", "3.mp4", "0.mp4"]
    assert "2.mp4 cannot be read" in caplog.text
    (tmp_path / "1.mp4").unlink()
    assert clips.batch([0])[1] == ["1"]  # it is kept
    with pytest.raises(InputError, match=r"no usable clip in .* 4 skipped"):
        forgetful.batch([0])


def test_only_so_much_is_kept(mixed, monkeypatch) -> None:
    clips = VideoFolder(mixed, 2, 8, cache_bytes=2 * (2 * 8 * 8 * 3) + 1)
    decoded = list[str]()
    decode = VideoFolder._decode
    monkeypatch.setattr(VideoFolder, "_decode", lambda self, n, c: decoded.append(n) or decode(self, n, c))
    first, again = (clips.batch([0, 1, 2])[0] for _ in range(2))
    assert np.array_equal(first, again)
    assert decoded == ["walk", "run_*.png", "b.mp4", "b.mp4"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"file": "a.mp4", "caption": "a"', r"Line 3 of .*captions.jsonl is not JSON: Expecting"),
        (b'{"file": "a.mp4", "caption": "\xff"}', "Line 3 of .* is not JSON: .*utf-8"),
        (b'["a.mp4", "a cat"]', "Line 3 of .* has no file or no caption"),
        (b'{"file": "a.mp4"}', "Line 3 of .* has no file or no caption"),
        (b'{"file": "a.mp4", "caption": 7}', "Line 3 of .* has no file or no caption"),
        (b'{"file": "", "caption": "a"}', "Line 3 of .* has no file or no caption"),
        (b'{"file": "x/../../a.mp4", "caption": "a"}', r"Line 3 of .* leads out of the folder: x/\.\./"),
        (b'{"file": "/etc/a.mp4", "caption": "a"}', "Line 3 of .* leads out of the folder: /etc"),
    ],
)
def test_a_wrong_line_of_captions_is_refused_by_its_number(tmp_path, line, says) -> None:
    good = '{"file": "b.mp4", "caption": "a line\u2028or two"}'.encode()
    (tmp_path / "captions.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\r\n" + line)
    with pytest.raises(InputError, match=says):
        VideoFolder(tmp_path, 5, 16)
    with pytest.raises(InputError, match=r"There is no .*other.jsonl\. It must have a line for each clip"):
        VideoFolder(tmp_path, 5, 16, captions="other.jsonl")


# Latents.


def test_latents_are_read_as_they_were_saved(tmp_path) -> None:
    many, one, half = (
        torch.randn(3, 2, 5, 4, 3),
        torch.randn(2, 5, 4, 3),
        torch.randn(1, 2, 5, 4, 3).bfloat16(),
    )
    save_file({"latents": many}, tmp_path / "b.safetensors", {"captions": json.dumps(["x", "y", "z"])})
    save_file({"latents": one, "more": one.clone()}, tmp_path / "a.safetensors")
    (tmp_path / "deep").mkdir()
    save_file({"latents": half}, tmp_path / "deep" / "c.safetensors")
    tell(tmp_path, ("deep/c.safetensors", "half"), ("a.safetensors", "one"))
    clips: ClipDataset = LatentFolder(tmp_path)
    assert (clips.num_clips, clips.skipped) == (5, [])
    found, captions = clips.batch([0, 3, 1, 4])
    assert captions == ["one", "z", "x", "half"]
    assert found.dtype == np.float32
    assert np.array_equal(found, torch.stack([one, many[2], many[0], half[0].float()]).numpy())


def test_latents_that_cannot_be_used_are_counted_and_named(tmp_path) -> None:
    usual = torch.ones(2, 1, 5, 4, 3)
    for name, latents, captions in (
        ("a", torch.ones(1, 5, 3, 3), ["other"]),
        ("b", torch.stack([usual[0], usual[1] * torch.nan]), ["good", "nan"]),
        ("c", usual, ["one of two"]),
        ("d", torch.ones(5, 3, 3), ["flat"]),
        ("e", usual.to(torch.uint8), ["pixels", "pixels"]),
        ("g", usual, "no list"),
    ):
        save_file({"latents": latents}, tmp_path / f"{name}.safetensors", {"captions": json.dumps(captions)})
    save_file({"other": usual}, tmp_path / "h.safetensors")
    save_file({"latents": usual}, tmp_path / "i.safetensors", {"captions": "["})
    (tmp_path / "j.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-1])
    tell(tmp_path, ("k.safetensors", "gone"))
    clips = LatentFolder(tmp_path)
    assert clips.names == ["b.safetensors[0]", "b.safetensors[1]"]
    reasons = {name[0]: reason for name, reason in clips.skipped}
    assert sorted(reasons) == list("acdeghijk")
    assert reasons["a"] == "has clips of 1×5×3×3, most are of 1×5×4×3"
    assert reasons["c"] == reasons["g"] == "has 2 clips, and not as many captions"
    assert reasons["d"] == "has latents 5×3×3 of F32, not [N,] T, C, H, W of floats" and "U8" in reasons["e"]
    assert (
        all(reasons[name].startswith("cannot be read: ") for name in "hij") and reasons["k"] == "is not there"
    )
    assert clips.batch([1])[1] == ["good"]
    assert clips.skipped[-1] == ("b.safetensors[1]", "has numbers that are not finite")
    with pytest.raises(InputError, match="no usable clip in .*nowhere. The folder has no clips"):
        LatentFolder(tmp_path / "nowhere")
