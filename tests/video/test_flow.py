"""Rectified flow: what is drawn, what is weighed, where the sampler arrives; one clip is learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from tests.diffusers.toys import normal
from weft.core.errors import InputError
from weft.video import flow
from weft.video.transformer import DiTConfig, VideoDiT

WORDS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])


class Told(nn.Module):
    """Predicts what its first word says, wherever it is asked; keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, video: Tensor, timestep: Tensor, words: Tensor) -> Tensor:
        self.seen.append((video, timestep, words))
        return torch.zeros_like(video) + self.one * 0.1 * words[:, 0].reshape(-1, 1, 1, 1, 1)


def seed(number: int = 0) -> Generator:
    return Generator().manual_seed(number)


def test_the_shares_of_noise_are_logit_normal_and_weigh_by_their_square() -> None:
    video = torch.zeros(4001, 1, 1, 1, 1)
    for mean in (0.0, 1.0):
        given = flow.add_noise(video, WORDS[:1].expand(4001, -1), generator=seed(), logit_mean=mean)
        drawn = torch.logit(given.timestep)
        assert abs(drawn.mean() - mean) < 0.06 and abs(drawn.std() - 1) < 0.04
        torch.testing.assert_close(given.weight, 1 / given.timestep.clamp(min=0.15) ** 2)
        assert abs((given.video.flatten() / given.timestep).std() - 1) < 0.04


def test_a_video_and_its_noise_are_mixed_and_some_prompts_forgotten() -> None:
    video, words = normal(500, 2, 3, 4, 4), WORDS[:1].expand(500, -1)
    given, grey = (
        flow.add_noise(x, words, generator=seed(), drop=0.3) for x in (video, torch.zeros_like(video))
    )
    t = given.timestep.reshape(-1, 1, 1, 1, 1)
    torch.testing.assert_close(given.video - grey.video, (1 - t) * video)
    forgotten = (given.words == 0).all(1)
    assert 0.2 < forgotten.float().mean() < 0.4
    assert torch.equal(given.words[~forgotten], words[~forgotten])


def test_edges_count_where_an_error_has_them() -> None:
    flat, video = torch.full((1, 2, 3, 4, 6), 0.2).double(), torch.zeros(1, 2, 3, 4, 6).double()
    given = flow.NoisedBatch(video, torch.ones(1), WORDS[:1], torch.tensor([3.0]))
    plain, edged = (flow.weighted_loss(lambda *_: flat, given, video, edges) for edges in (0.0, 2.0))
    assert plain.item() == edged.item() == pytest.approx(3 * 0.04)
    striped = flat * torch.tensor([1.0, -1.0] * 3)  # neighbours across differ by 0.4, those above do not
    assert flow.weighted_loss(lambda *_: striped, given, video, 2.0).item() == pytest.approx(
        3 * (0.04 + 2 * 0.16)
    )


def test_the_loss_is_the_weighted_error_of_the_prediction() -> None:
    told, video = Told(), normal(2, 2, 3, 4, 4)
    found = flow.weighted_loss(told, flow.add_noise(video, WORDS, generator=seed(), drop=0.0), video).mean()
    _, timestep, _ = told.seen[0]
    error = (video - torch.tensor([0.1, 0.4]).reshape(-1, 1, 1, 1, 1)).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(found, (error / timestep.clamp(min=0.15) ** 2).mean())


def test_the_sampler_arrives_at_what_is_predicted_by_equal_steps() -> None:
    told, steps = Told(), list[float]()

    def on_step(index: int, timestep: Tensor, video: Tensor) -> Tensor:
        steps.append(float(timestep))
        return video

    made = flow.sample(told, WORDS, (2, 3, 4, 4), steps=4, guidance=1.0, generator=seed(), on_step=on_step)
    torch.testing.assert_close(
        made, torch.tensor([0.1, 0.4]).double().reshape(-1, 1, 1, 1, 1).expand_as(made)
    )
    assert steps == [1.0, 0.75, 0.5, 0.25]
    for at, share in enumerate(steps):  # a straight way
        torch.testing.assert_close(told.seen[at][0], share * told.seen[0][0] + (1 - share) * made)


def test_guidance_goes_away_from_the_empty_or_the_negative_prompt() -> None:
    for negative, wanted in ((None, (0.2, 0.8)), (torch.tensor([[2, 0, 0, 0]] * 2), (0.0, 0.6))):
        made = flow.sample(Told(), WORDS, (1, 1, 1, 1), steps=2, guidance=2.0, negative=negative)
        torch.testing.assert_close(made.flatten(), torch.tensor(wanted).double())


def test_a_video_that_is_not_guided_is_the_same_beside_one_that_is() -> None:
    config = DiTConfig(words=6, length=4, video=(2, 4, 4), patch=(1, 2, 2), width=12, depth=1, heads=2)
    torch.manual_seed(0)
    model = VideoDiT(config)
    nn.init.normal_(model.head.weight)

    def made(samples: int, guidance: Any) -> Tensor:
        generators = [seed(number) for number in range(samples)]
        return flow.sample(
            model, WORDS[:samples], (2, 3, 4, 4), steps=3, guidance=guidance, generator=generators
        )

    assert torch.equal(made(2, [1.0, 3.0])[:1], made(1, 1.0))


@pytest.mark.parametrize("wrong", [{"guidance": [1.0, 2.0, 3.0]}, {"negative": torch.zeros(3, 4).long()}])
def test_each_prompt_has_its_own_guidance_and_negative(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="3 .* for 2 prompts"):
        flow.sample(Told(), WORDS, (1, 1, 1, 1), steps=1, **wrong)


def test_a_prediction_stays_among_pixels() -> None:
    assert flow.sample(Told(), WORDS, (1, 1, 1, 1), steps=2, guidance=9.0).max() == 1


def test_a_seed_is_a_video_in_any_dtype() -> None:
    config = DiTConfig(words=6, length=4, video=(2, 4, 4), patch=(1, 2, 2), width=12, depth=1, heads=2)
    model = VideoDiT(config)
    nn.init.normal_(model.head.weight)

    def made(number: int, dtype: torch.dtype) -> Tensor:
        return flow.sample(model.to(dtype), WORDS, (2, 3, 4, 4), steps=3, generator=seed(number))

    assert torch.equal(made(1, torch.float32), made(1, torch.float32))
    torch.testing.assert_close(made(1, torch.float64).float(), made(1, torch.float32), atol=1e-4, rtol=0)
    assert (made(2, torch.float32) - made(1, torch.float32)).abs().max() > 0.1


def test_no_steps_are_refused() -> None:
    with pytest.raises(InputError, match="steps must be >= 1, got 0"):
        flow.sample(Told(), WORDS, (1, 1, 1, 1), steps=0)


def clip() -> Tensor:
    """A bright square that moves to the right over a dark ground."""
    video = torch.full((4, 3, 8, 8), -0.6)
    for frame in range(4):
        video[frame, 0, 2:5, frame + 1 : frame + 4] = 0.9
    return video


def test_one_clip_is_learned_and_made_again() -> None:
    torch.manual_seed(0)
    config = DiTConfig(words=6, length=4, video=(4, 8, 8), patch=(2, 4, 4), width=48, depth=2, heads=3)
    model, random = VideoDiT(config), seed()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    video, words = clip().expand(16, -1, -1, -1, -1), WORDS[:1].expand(16, -1)
    losses = list[float]()
    for _ in range(150):
        optimizer.zero_grad()
        value = flow.weighted_loss(model, flow.add_noise(video, words, generator=random), video).mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert sum(losses[-10:]) / 10 < losses[0] / 10
    made = flow.sample(model.eval(), WORDS[:1], video.shape[1:], steps=10, generator=seed(5))[0]
    assert (made - clip()).abs().mean() < 0.1
