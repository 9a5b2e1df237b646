"""Names of sparse attention: those of masks that need a model's scores are refused, not approximated."""

from __future__ import annotations

import pytest

from weft.core.errors import InputError
from weft.masks.spec import PRODUCERS
from weft.sparse.methods import SYNTHETIC, parse_method


@pytest.mark.parametrize("name", sorted(SYNTHETIC))
def test_synthetic_scores_are_refused_for_a_model(name: str) -> None:
    assert name in PRODUCERS
    with pytest.raises(InputError, match=f"'{name}' selects blocks by synthetic scores") as error:
        parse_method(f"{name}:density=0.2")
    assert "topk:0.2" in error.value.hint
