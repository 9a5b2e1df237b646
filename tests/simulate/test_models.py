"""Models by name: their tokens and weights are those of the public configurations."""

import math

import pytest

from weft.core.errors import InputError
from weft.simulate.models import MODELS, ModelSizes, model

BILLIONS = {  # as the name says, rounded; modulation and embeddings are not counted here
    "wan2.1-1.3b": 1.3,
    "wan2.1-14b": 14,
    "dsv-0.8b": 0.8,
    "dsv-2.7b": 2.7,
    "dsv-30b": 30,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_layers_make_up_the_parameters_of_the_name(name):
    found = model(name)
    weights = found.layers * (found.weights + 2 * found.hidden**2)  # keys and values of the text
    assert 0.8 < weights / 1e9 / BILLIONS[name] < 1.1


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("wan2.1-14b", (), 75_600),
        ("cogvideox1.5-5b", (), 85_680),
        ("cogvideox-5b", (1360, 768, 321), 330_480),
        ("flux", (3072, 3072, 1), 36_864),
        ("dsv-2.7b", (448, 448, 40), 125_440),
        ("open-sora", (), 80 * 32 * 32),
    ],
)
def test_tokens_are_those_that_papers_count(name, size, tokens):
    assert math.prod(model(name).grid(*size)) == tokens


def test_every_matrix_is_counted():
    plain = ModelSizes(name="m", layers=1, heads=2, head_dim=8)
    assert plain.hidden == 16
    assert plain.weights == (4 + 2 * 4) * 256
    assert ModelSizes(name="m", layers=1, heads=2, head_dim=8, gated=True).weights == (4 + 3 * 4) * 256
    assert ModelSizes(name="m", layers=1, heads=2, head_dim=8, cross=7).weights == (4 + 2 * 4 + 2) * 256
    pair = ModelSizes(name="m", layers=1, heads=2, head_dim=8, attentions=2, mlps=2, mlp=3)
    assert pair.weights == (2 * 4 + 2 * 2 * 3) * 256


def test_names_are_their_own_keys_and_slips_are_told():
    assert all(name == found.name for name, found in MODELS.items())
    with pytest.raises(InputError) as slip:
        model("wan2.1-14")
    assert "wan2.1-14b" in slip.value.hint


def test_less_than_a_token_is_an_error():
    with pytest.raises(InputError):
        model("flux").grid(15, 15, 1)
