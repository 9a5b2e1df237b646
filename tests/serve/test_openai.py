"""The official OpenAI client, unmodified, against the server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.fake import Fake, serving

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def client(engine: Fake) -> Iterator[Any]:
    with (
        serving(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def create(client: Any, prompt: str = "a cat", **more: Any) -> Any:
    return client.videos.create(prompt=prompt, extra_body={"num_inference_steps": 3, **more})


def test_a_video_is_created_polled_and_downloaded(client: Any, tmp_path: Path) -> None:
    video = client.videos.create_and_poll(
        prompt="a cat", size="32x48", seconds="1", extra_body={"seed": 7, "num_inference_steps": 3}
    )
    assert (video.status, video.progress, video.size, video.seconds) == ("completed", 100, "32x48", "1")
    assert (video.object, video.error, video.remixed_from_video_id) == ("video", None, None)
    client.videos.download_content(video.id).write_to_file(tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes()[4:8] == b"ftyp"
    sheet = client.videos.download_content(video.id, variant="spritesheet").content
    assert sheet[8:12] == b"WEBP"


def test_a_picture_comes_as_a_file_or_as_a_data_url(client: Any, engine: Fake, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (16, 8), "red").save(tmp_path / "red.png")
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    for given in (
        {"input_reference": tmp_path / "red.png"},
        {"extra_body": {"input_reference": {"image_url": url}}},
    ):
        video = client.videos.create(prompt="a cat", **given)
        stored = engine.disk.of(video.id) / "reference.png"
        with Image.open(stored) as picture:
            assert picture.size == (16, 8)


def test_pages_follow_each_other_to_the_end(client: Any) -> None:
    ids = [create(client).id for _ in range(5)]
    assert [video.id for video in client.videos.list(limit=2)][:5] == ids[::-1]
    assert [video.id for video in client.videos.list(limit=2, order="asc")][-5:] == ids


def test_a_deleted_video_is_gone(client: Any) -> None:
    video = create(client)
    assert client.videos.delete(video.id).deleted
    for call in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError) as error:
            call(video.id)
        assert error.value.code == "not_found"


def test_a_failed_video_says_why(client: Any) -> None:
    video = client.videos.create_and_poll(prompt="fail", extra_body={"num_inference_steps": 9})
    assert (video.status, video.error.code) == ("failed", "internal_error")


def test_errors_arrive_with_their_code_and_param(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.videos.create(prompt="a cat", size="1000x701")
    assert (error.value.code, error.value.param) == ("invalid_size", "size")
    assert "Nearest: 1000x704" in error.value.message
    assert error.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError) as error:
        client.videos.create(prompt="a cat", model="sora-2")
    assert error.value.code == "model_not_found"


def test_images_are_generated_at_once(client: Any) -> None:
    made = client.images.generate(
        prompt="a fox", n=2, size="32x32", extra_body={"seed": 4, "num_inference_steps": 2}
    )
    assert [base64.b64decode(image.b64_json)[:8] for image in made.data] == [PNG, PNG]
    assert [one["seed"] for one in made.weft] == [4, 5]


def test_an_image_by_address_is_the_image(client: Any) -> None:
    made = client.images.generate(prompt="a fox", response_format="url", output_format="webp")
    address = made.data[0].url
    assert address.startswith(str(client.base_url))
    content = client.get(
        address.removeprefix(str(client.base_url)), cast_to=openai.HttpxBinaryResponseContent
    )
    assert content.content[8:12] == b"WEBP"


def test_partial_images_are_streamed_before_the_last(client: Any, engine: Fake) -> None:
    stream = client.images.generate(prompt="a fox", stream=True, partial_images=2, extra_body={"seed": 3})
    events = list(stream)
    kinds = [event.type.removeprefix("image_generation.") for event in events]
    assert kinds == ["partial_image", "partial_image", "completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert len({event.b64_json for event in events}) == 3


def test_a_stream_that_fails_raises(client: Any) -> None:
    with pytest.raises(openai.APIError, match="It went wrong"):
        list(client.images.generate(prompt="fail", stream=True, extra_body={"num_inference_steps": 9}))


def test_models_are_listed(client: Any) -> None:
    [model] = client.models.list()
    assert client.models.retrieve(model.id).weft["steps"] == 20
