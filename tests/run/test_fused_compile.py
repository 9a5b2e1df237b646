"""The kernel of fused copies compiled for GPUs that are not here: no spills, 16 bytes at a time.

This says what the compiler made of it. It does not say that it runs, or how fast.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.run.copy_resources import KINDS, Made, compile_copies
from weft.run.kernels.triton_configs import TARGETS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def copies() -> dict[tuple[str, str], Made]:
    wanted = [(target, kind) for target in TARGETS for kind in KINDS]
    return dict(zip(wanted, compile_copies(wanted), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_fused_copies_have_no_spills_and_move_16_bytes(
    copies: dict[tuple[str, str], Made], target: str, kind: str
) -> None:
    made = copies[target, kind]
    assert made.spills == 0
    wide = "dwordx4" if target.startswith("gfx") else "v4.b32"
    single = ("ushort", "short") if target.startswith("gfx") else (".b16", ".u16")
    assert any(each.endswith(wide) for each in made.accesses) == (kind != "odd address")
    assert any(each.endswith(single) for each in made.accesses) == (kind == "odd address")
    if "cast" in kind and target == "sm_90":
        assert "cvt.rn.bf16x2.f32" in made.assembly, "casts round to the nearest"
