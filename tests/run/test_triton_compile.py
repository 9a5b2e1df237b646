"""The Triton kernels compiled for GPUs that are not here: no spills, matrix units in use, memory that fits.

This says what the compiler made of them. It does not say that they run, or how fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product

import pytest

from tests.run.triton_launches import KINDS, Launched, compile_launches
from tests.run.triton_resources import Case, Resources, cases, compile_all, overlapped, small_cases
from weft.run.kernels.triton_configs import (
    BLOCKS,
    HEAD_DIMS,
    KERNELS,
    SMALL_TARGETS,
    TARGETS,
    TMA_TARGETS,
    Config,
    configs,
)

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(1800),
]

OVERLAPS = "3.7.1"
"""The triton whose assembler was seen to interleave products and exponentials; nobody asks it to."""
INSIDE = {32: 24, 64: 40, 128: 72, 256: 160}
"""Head dims that are padded."""
ALL_TARGETS = (*TARGETS, *SMALL_TARGETS)


def configurations(target: str, kernel: str, head_dim: int) -> list[Config]:
    """Whatever a launch may take, whichever blocks its mask has."""
    pairs = product(BLOCKS, BLOCKS)
    return list(dict.fromkeys(c for pair in pairs for c in configs(target, kernel, head_dim, *pair)))


# In every run: what each kernel takes by default, and each way in which the forward may issue its products.
CHOSEN = [replace(case, head_dim=INSIDE[case.head_dim]) for case in cases(TARGETS)]
CHOSEN += [
    Case(target, "forward", 128, 128, config, dense=dense, even=dense, add=not dense)
    for target in ("sm_90", "sm_100")
    for config in configurations(target, "forward", 128)
    if config.early or config.specialize
    for dense in (False, True)
]
CHOSEN += [replace(case, group=3) for case in CHOSEN if case.kernel == "grad_keys" and case.head_dim == 72]
CHOSEN += [case for case in cases(SMALL_TARGETS) if case.kernel == "forward"]
CHOSEN += [case for case in small_cases() if (case.kernel, case.head_dim) == ("merge_rows", 128)]

EVERYTHING = [
    Case(
        target,
        kernel,
        of(head_dim),
        block or max(config.bq, config.bk),
        config,
        dense=dense,
        even=even,
        add=add,
    )
    for target, kernel, head_dim in product(ALL_TARGETS, KERNELS, HEAD_DIMS)
    for config in configurations(target, kernel, head_dim)
    for of, block, dense, even, add in (
        (INSIDE.__getitem__, 0, False, False, True),
        (int, 0, False, True, False),
        (INSIDE.__getitem__, 128, False, True, True),
        (int, 128, True, False, True),
        (INSIDE.__getitem__, 128, True, True, False),
    )
    # Tiles as large as blocks, and what blocks of 128 take, which is also what dense tiles take.
    if not block or config in configs(target, kernel, head_dim, 128, 128)
]
EVERYTHING += [replace(case, dtype="fp16") for case in CHOSEN if case.kernel in KERNELS] + list(small_cases())


def called(case: Case) -> str:
    config = case.config
    tile = f"{config.bq}x{config.bk}-w{config.warps}-s{config.stages}"
    tile += "-early" * config.early + "-specialized" * config.specialize
    flags = "".join(name[0] for name in ("dense", "even", "add") if getattr(case, name))
    flags += f"-group{case.group}" * (case.group > 1)
    return f"{case.target}-{case.kernel}-D{case.head_dim}-block{case.block}-{tile}-{case.dtype}-{flags}"


Compiled = Callable[[tuple[Case, ...]], dict[Case, Resources]]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """All of a list at once, on the processors that are there; later tests read the answer."""

    @cache
    def build(wanted: tuple[Case, ...]) -> dict[Case, Resources]:
        return dict(zip(wanted, compile_all(wanted, min(2, os.cpu_count() or 1)), strict=True))

    return build


def check(case: Case, found: Resources) -> None:
    assert found.spills == 0
    assert found.resident >= case.config.warps, "one program does not fit"
    assert found.scratch == 0, "a launch would allocate"
    if case.kernel in KERNELS:
        assert found.matrix > 0, "no matrix unit is used"
    if case.target in SMALL_TARGETS:
        assert found.shared <= 99 * 1024
    if case.kernel == "forward" and case.target in TMA_TARGETS:
        assert found.bulk > 0 and found.copies == 0, "loads do not go through descriptors"
        assert bool(found.reassigned) == case.config.specialize
        assert not case.config.early or found.overlapped > 0 or version("triton") != OVERLAPS


@pytest.mark.parametrize("case", CHOSEN, ids=called)
def test_no_spills_and_the_units_of_the_target(compiled: Compiled, case: Case) -> None:
    check(case, compiled(tuple(CHOSEN))[case])


@pytest.mark.soak
@pytest.mark.parametrize("case", EVERYTHING, ids=called)
def test_every_configuration_has_no_spills(compiled: Compiled, case: Case) -> None:
    check(case, compiled(tuple(EVERYTHING))[case])


@pytest.fixture(scope="module")
def launched() -> dict[tuple[str, str], list[Launched]]:
    wanted = list(product(("sm_80", "sm_90", "sm_100", "gfx942"), KINDS))
    return dict(zip(wanted, compile_launches(wanted), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_launched_is_what_was_compiled(
    launched: dict[tuple[str, str], list[Launched]], target: str, kind: str
) -> None:
    """Rows of 72 numbers are no multiple of what Triton itself notices; strides are given in eights."""
    found = launched[target, kind]
    assert [each.kernel for each in found] == ["forward", "forward", "prepare", "grad_queries", "grad_keys"]
    assert all(each.spills == 0 for each in found)
    for each in found[:2]:
        assert (each.bulk > 0, each.copies > 0) == (target in TMA_TARGETS, target == "sm_80")


@pytest.mark.parametrize(("target", "kernel"), list(product(ALL_TARGETS, KERNELS)))
def test_every_pair_of_blocks_has_a_configuration(target: str, kernel: str) -> None:
    for head_dim, block_q, block_k in product(HEAD_DIMS, BLOCKS, BLOCKS):
        found = configs(target, kernel, head_dim, block_q, block_k)
        assert found and all(block_q % c.bq == 0 and block_k % c.bk == 0 for c in found)
        assert len(set(found)) == len(found)


def test_each_claim_has_a_configuration() -> None:
    """The gates above hold where a claim is made; here that claims are made."""
    assert any(c.early for c in configurations("sm_90", "forward", 128))
    assert any(c.specialize for c in configurations("sm_100", "forward", 128))
    assert any((c.bq, c.bk) == (128, 128) for c in configurations("sm_90", "forward", 128))


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        ("HGMMA gsb0\nMUFU.EX2\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nMUFU.EX2", 1),
        ("HGMMA gsb0\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nMUFU.EX2", 0),
        ("MUFU.EX2\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nHGMMA gsb0", 1),
        ("MUFU.EX2\nHGMMA\nWARPGROUP.DEPBAR.LE gsb0, 0x0", 0),
    ],
)
def test_exponentials_under_a_product_are_counted(loop: str, count: int) -> None:
    assert overlapped(f"MUFU.EX2\n.L_x_1:\n{loop}\n@P0 BRA `(.L_x_1)\nMUFU.EX2") == count
