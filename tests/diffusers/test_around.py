"""The table of `around`: what people do to a parallelized model is right on 2 and 3 ranks, or it raises."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from tests.diffusers import (  # noqa: E402
    around_changes,
    around_copies,
    around_graphs,
    around_hooks,
    around_lora,
    around_pipes,
    around_wrappers,
)
from tests.diffusers.around import ROWS, check  # noqa: E402
from tests.worlds import world  # noqa: E402
from weft.run.spawn.pool_rank import PRELOAD  # noqa: E402

TABLE = (
    around_copies,
    around_graphs,
    around_hooks,
    around_lora,
    around_pipes,
    around_wrappers,
    around_changes,
)
PRELOAD += [each.__name__ for each in TABLE if each.__name__ not in PRELOAD]  # it takes ranks seconds

pytestmark = pytest.mark.filterwarnings("ignore")


def _marks(name: str, size: int) -> list[Any]:
    compiles = name == "resolutions_under_compile" and size > 2  # 10 s of each rank
    return [pytest.mark.soak] if compiles else []


NORMAL = [pytest.param(name, size, marks=_marks(name, size)) for name in ROWS for size in ROWS[name].ranks]


@pytest.mark.parametrize(("name", "size"), NORMAL)
def test_row(name: str, size: int) -> None:
    check(name, ROWS[name].on(size), world(size))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "size"), NORMAL)
def test_row_on_every_model(name: str, size: int) -> None:
    for model in ROWS[name].models:
        check(name, model, world(size))
