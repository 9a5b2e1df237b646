"""What `auto` takes on which GPU, what a named backend refuses, and that the document says the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.backend_table import BARE, FULL, MARKS, WHY, cells, table
from weft.core.errors import InputError
from weft.run.kernels import choice, choose, composite
from weft.run.kernels.choice import GpuPlatform, decide, refusal
from weft.run.kernels.rules import ARCHITECTURES, KernelSpec

DOCUMENT = Path(__file__).parents[2] / "docs/kernels_gpu.md"
ALL = list(cells())


def work(block: int = 0, head_dim: int = 128, **options: Any) -> KernelSpec:
    return KernelSpec(
        bool(block), options.pop("backward", False), head_dim, block_q=block, block_k=block, **options
    )


def test_the_document_has_the_table_of_choices() -> None:
    assert DOCUMENT.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0].strip() == table()


def test_the_document_gives_the_reason_of_every_choice() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text and reason in text for name, reason in WHY.items())


def test_16_bit_operands_are_never_computed_in_float32() -> None:
    assert {choice.arch for _, choice, _ in ALL} == set(ARCHITECTURES)
    assert {found.backend for *_, found in ALL} == set(choice.RULES) - {"exact", "gather"}


def test_a_choice_is_the_first_that_serves_and_the_others_say_why_not() -> None:
    for asked, there, found in ALL:
        assert not refusal(found.backend, asked, there)
        assert all(found.passed.values()) and found.backend in WHY
        before = choice.order(asked, there)[: len(found.passed)]
        assert tuple(found.passed) == before


def test_nothing_is_taken_that_is_not_installed() -> None:
    for asked, there, found in ALL:
        assert found.backend not in choice.NEEDS or found.backend in there.installed
        bare = decide(asked, GpuPlatform(there.arch))
        assert bare.backend in ("flash", "gather")


@pytest.mark.parametrize(
    ("arch", "asked", "bare", "full"),
    [
        ("sm_80", work(), "flash", "flash"),
        ("sm_90", work(), "cudnn", "fa4"),
        ("sm_100", work(), "cudnn", "fa4"),
        ("sm_90", work(backward=True), "cudnn", "fa4"),
        ("gfx942", work(), "flash", "flash"),
        ("gfx950", work(64), "triton", "triton"),
        ("sm_89", work(128), "triton", "triton"),
        ("sm_90", work(64), "triton", "cudnn_sparse"),
        ("sm_90", work(64, 64, backward=True), "triton", "triton"),
        ("sm_90", work(128, 64, backward=True), "triton", "fa4"),
        ("sm_100", work(128), "triton", "cudnn_sparse"),
        ("sm_90", work(128, group=2, backward=True), "triton", "fa4"),
        ("sm_90", work(40), "gather", "gather"),
        ("sm_90", work(16), "triton", "triton"),
        ("sm_80", work(48), "triton", "triton"),
        ("sm_80", work(64, 256), "triton", "triton"),
        ("sm_80", work(64, 264), "exact", "exact"),
        ("sm_90", work(64, 72), "triton", "fa4"),
    ],
)
def test_the_choice_for_common_shapes(arch: str, asked: KernelSpec, bare: str, full: str) -> None:
    assert decide(asked, GpuPlatform(arch, BARE)).backend == bare
    assert decide(asked, GpuPlatform(arch, FULL)).backend == full


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_operands_go_to_the_exact_path(dtype: str) -> None:
    for block in (0, 64):
        assert decide(work(block, dtype=dtype), GpuPlatform("sm_90", FULL)).backend == "exact"


def test_what_the_user_activated_in_torch_comes_before_cudnn() -> None:
    assert decide(work(), GpuPlatform("sm_90", BARE, activated=True)).backend == "flash"


def test_deterministic_algorithms_leave_out_backwards_that_are_not() -> None:
    strict = GpuPlatform("sm_90", FULL, deterministic=True)
    assert [decide(work(backward=backward), strict).backend for backward in (False, True)] == ["fa4", "flash"]
    assert decide(work(64, backward=True), strict).backend == "triton"


def test_a_judge_passes_the_choice_on_and_its_reason_is_kept() -> None:
    found = decide(work(), GpuPlatform("sm_90", FULL), lambda name, _: "wrong" * (name in ("fa4", "cudnn")))
    assert found.backend == "flash" and found.passed == {"fa4": "wrong", "cudnn": "wrong"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU without packages, whose kernels are never made."""
    monkeypatch.setattr(composite, "platform_of", lambda _: GpuPlatform("sm_90", BARE))
    monkeypatch.setattr(composite, "make", lambda name: Made(name))
    composite._warn_gather.cache_clear()
    return torch.device("cuda:0")


class Made:
    def __init__(self, name: str) -> None:
        self.name, self.grouped = name, name != "gather"


@pytest.mark.parametrize(
    ("backend", "asked", "name"),
    [
        ("auto", work(), "cudnn"),
        ("auto", work(64), "dense cudnn, sparse triton"),
        ("triton", work(64), "triton"),
        ("gather", work(64), "dense cudnn, sparse gather"),
        ("flash", work(), "flash"),
        ("auto", work(dtype="float32"), "exact"),
    ],
)
def test_a_composite_tells_its_whole_choice(
    hopper: torch.device, backend: str, asked: KernelSpec, name: str
) -> None:
    found = choose(backend, asked.dtype, str(hopper), asked)
    assert found.name == name and found.grouped == ("gather" not in name)


def test_the_two_directions_may_have_different_backends(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composite, "platform_of", lambda _: GpuPlatform("sm_90", FULL))
    found = choose("cudnn_sparse", "bfloat16", str(hopper), work(64, 64))
    assert found.name == "dense fa4, sparse cudnn_sparse and triton"


@pytest.mark.parametrize(
    ("backend", "asked", "message"),
    [
        ("flash", work(64), r"dense tiles.*takes 'triton'"),
        ("gather", work(), r"sparse tiles.*takes 'cudnn'"),
        ("fa4", work(), r"needs flash-attn-4, which is not here.*takes 'cudnn'"),
        ("triton", work(40), r"multiples of 16 tokens, not 40 by 40.*takes 'gather'"),
        ("triton", work(64, 264), r"head dims end at 256, not 264.*takes 'exact'"),
        ("cudnn", work(head_dim=20), r"multiples of 8, not 20.*takes 'flash'"),
        ("flash", work(dtype="float32"), r"bfloat16 and float16, not float32.*takes 'exact'"),
        ("cpu", work(), r"on the CPU, not bfloat16 on cuda"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused_with_what_would(
    hopper: torch.device, backend: str, asked: KernelSpec, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        choose(backend, asked.dtype, str(hopper), asked)


def test_a_failed_parity_test_refuses_a_named_backend(hopper: torch.device) -> None:
    with pytest.raises(InputError, match="off by 700.*takes 'flash'"):
        choose("cudnn", "bfloat16", str(hopper), work(), lambda name, _: "off by 700" * (name == "cudnn"))


def test_gathering_is_said_aloud_once(hopper: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        for _ in range(3):
            choose("auto", "bfloat16", str(hopper), work(40))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once for each direction"
    assert "blocks of 40 by 40 tokens" in said[0] and "triton: its blocks are multiples of 16" in said[0]


@pytest.mark.parametrize(
    ("capability", "arch"),
    {(8, 0): "sm_80", (8, 6): "sm_86", (9, 0): "sm_90", (10, 3): "sm_100", (12, 1): "sm_120"}.items(),
)
def test_the_machine_is_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str
) -> None:
    choice.arch_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for version, there in ((91500, False), (92000, True)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        found = choice.platform_of(torch.device("cuda:0"))
        assert found == GpuPlatform(arch, choice.installed() | ({"cudnn"} if there else set()))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert "cudnn" not in choice.platform_of(torch.device("cuda:0")).installed
    torch.use_deterministic_algorithms(True)
    try:
        assert choice.platform_of(torch.device("cuda:0")).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    choice.arch_of.cache_clear()


def test_scales_that_are_not_above_0_are_computed_exactly() -> None:
    for asked, there, found in ALL[::7]:
        turned = replace(asked, positive=False)
        assert decide(turned, there).backend == "exact"
        assert "a scale above 0" in refusal(found.backend, turned, there)
