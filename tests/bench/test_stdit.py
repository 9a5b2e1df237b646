"""The models that switching is measured on, by themselves."""

from __future__ import annotations

import pytest
import torch

from bench.stdit import AXES, AxialBlock, STDiT, rotated
from tests.diffusers.toys import AxialForecast, normal, seeded
from weft.core.errors import InputError

TIMES = torch.tensor([3.0, 500.0], dtype=torch.float64)


@pytest.mark.parametrize("axes", AXES)
def test_before_training_each_patch_is_on_its_own(axes: str) -> None:
    """Gates begin at 0, so what comes out at a place is what went in there: patches are put back right."""
    model = STDiT(2, width=8, heads=2, axes=axes).double()
    video = normal(2, 2, 3, 4, 6)
    other = video.clone()
    other[1, :, 2, 2:4, 4:6] += 1
    changed = (model(video, TIMES) != model(other, TIMES)).any(1).nonzero()
    assert {tuple(place) for place in changed.tolist()} == {(1, 2, h, w) for h in (2, 3) for w in (4, 5)}


@pytest.mark.parametrize("axes", AXES)
def test_after_training_everything_reaches_everything(axes: str) -> None:
    model = seeded(STDiT(2, width=8, heads=2, depth=1, axes=axes, text=5))
    video, text = normal(1, 2, 3, 4, 6).requires_grad_(), normal(1, 4, 5).requires_grad_()
    out = model(video, TIMES[:1], text)
    assert out.shape == video.shape
    grads = torch.autograd.grad(out[0, 0, 0, 0, 0], (video, text))
    assert all((grad != 0).all() for grad in grads)
    assert (model(video, TIMES[1:], text) != out).all()


def test_a_block_attends_along_its_own_dim() -> None:
    block = seeded(AxialBlock(6, 2, 2))
    x = normal(2, 3, 5, 6).requires_grad_()
    (grad,) = torch.autograd.grad(block(x)[1, 2, 3].sum(), x)
    touched = {tuple(place) for place in (grad != 0).any(-1).nonzero().tolist()}
    assert touched == {(1, 2, s) for s in range(5)}


@pytest.mark.parametrize("D", [1, 4, 5])
def test_rotary_products_depend_on_distances(D: int) -> None:
    x, y = (normal(D, seed=s).expand(1, 7, 1, D) for s in (1, 2))
    products = (rotated(x)[0, :, 0] @ rotated(y)[0, :, 0].T).numpy()
    for distance in range(-6, 7):
        assert products.diagonal(distance).max() - products.diagonal(distance).min() < 1e-12


def test_a_forecast_keeps_the_shape_of_its_fields() -> None:
    fields = normal(2, 3, 4, 2, 5)
    assert seeded(AxialForecast(5, width=8))(fields).shape == fields.shape


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="'time height' is unknown"):
        STDiT(axes="time height")
    with pytest.raises(InputError, match="5 × 6 cannot be cut into patches of 2 × 2"):
        STDiT()(torch.zeros(1, 4, 1, 5, 6), TIMES[:1])
