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

import pytest

from tests.run.triton_resources import Case, Resources, cases, compile_all, small_cases
from weft.run.kernels.triton_configs import BLOCKS, HEAD_DIMS, KERNELS, TARGETS, TMA_TARGETS, configs

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(1800),
]

OVERLAPS = "3.7.1"
"""The version of triton whose assembler was seen to interleave products and exponentials, by its own will."""
# The hard half: the widest head with the largest block, and the smallest of the kernel with two sums.
CHOSEN = [
    case
    for case in cases()
    if (case.head_dim, case.block) == (128, 128)
    or (case.head_dim, case.block, case.kernel) == (64, 64, "grad_keys")
]
CHOSEN += [replace(case, group=3) for case in CHOSEN if case.kernel == "grad_keys" and case.block == 128]


def called(case: Case) -> str:
    config = case.config
    tile = f"{config.bq}x{config.bk}-w{config.warps}-s{config.stages}"
    flags = "".join(name[0] for name in ("dense", "even", "add") if getattr(case, name))
    flags += f"-group{case.group}" * (case.group > 1)
    return f"{case.target}-{case.kernel}-D{case.head_dim}-block{case.block}-{tile}-{case.dtype}-{flags}"


@pytest.fixture(scope="module")
def compiled() -> Callable[[tuple[Case, ...]], dict[Case, Resources]]:
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
    if case.kernel == "forward" and case.target in TMA_TARGETS:
        assert found.bulk > 0 and found.copies == 0, "loads do not go through descriptors"
        assert bool(found.reassigned) == case.config.specialize
        assert not case.config.early or found.overlapped > 0 or version("triton") != OVERLAPS


@pytest.mark.parametrize("case", CHOSEN, ids=called)
def test_no_spills_and_the_matrix_units_of_the_target(
    compiled: Callable[[tuple[Case, ...]], dict[Case, Resources]], case: Case
) -> None:
    check(case, compiled(tuple(CHOSEN))[case])


EVERYTHING = [
    Case(target, kernel, head_dim, block, config, **flags)
    for target in TARGETS
    for kernel in KERNELS
    for head_dim in HEAD_DIMS
    for block in BLOCKS
    for config in configs(target, kernel, head_dim, block, block)
    # Where all is active there are no blocks of the mask: the kernels are given the largest.
    for flags in ({}, {"even": True, "add": False}, *([{"dense": True}] if block == max(BLOCKS) else []))
]
EVERYTHING += [replace(case, dtype="fp16") for case in CHOSEN] + list(small_cases())
CHOSEN += [case for case in small_cases() if (case.kernel, case.head_dim) == ("merge_rows", 128)]


@pytest.mark.soak
@pytest.mark.parametrize("case", EVERYTHING, ids=called)
def test_every_configuration_has_no_spills(
    compiled: Callable[[tuple[Case, ...]], dict[Case, Resources]], case: Case
) -> None:
    check(case, compiled(tuple(EVERYTHING))[case])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_pair_of_blocks_has_a_configuration(target: str, kernel: str, head_dim: int) -> None:
    for block_q in BLOCKS:
        for block_k in BLOCKS:
            found = configs(target, kernel, head_dim, block_q, block_k)
            assert found and all(block_q % c.bq == 0 and block_k % c.bk == 0 for c in found)


def test_configurations_of_small_gpus_fit_their_shared_memory(
    compiled: Callable[[tuple[Case, ...]], dict[Case, Resources]],
) -> None:
    """sm_86, sm_89 and sm_120 have 99 KiB for a program, and of sm_80's table what fits in them."""
    small = configs("sm_86", "grad_keys", 128, 64, 64)
    assert small[0] != configs("sm_80", "grad_keys", 128, 64, 64)[0]
    wanted = tuple(Case("sm_80", "grad_keys", 128, 64, config) for config in small)
    assert max(found.shared for found in compiled(wanted).values()) <= 99 * 1024
