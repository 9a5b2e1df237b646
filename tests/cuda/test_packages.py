"""flash-attn-4 and cuDNN's block-sparse attention: what weft's adapters pass is compiled to real cubins.

No GPU is needed and none is used: shapes, dtypes, strides and rules are checked here, results are not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.cuda.case import KEYS, Case
from tests.cuda.fake_gpu import environment
from weft.run.kernels.choice import RULES, installed
from weft.run.kernels.rules import KernelSpec

pytestmark = [
    pytest.mark.skipif(
        not {"fa4", "cudnn_sparse"} <= installed(), reason="needs the extras fa4 and cudnn: make test-cuda"
    ),
    pytest.mark.timeout(900),  # the first test waits for its turn among all
]
BOTH, FORWARD, BACKWARD = ("forward", "backward"), ("forward",), ("backward",)

FA4 = Case("fa4", "sm_90", 128)
FA4_CASES = [
    *(replace(FA4, arch=arch) for arch in ("sm_90", "sm_100")),
    replace(FA4, dtype="float16", kv_heads=2, tokens_first=True),
    replace(FA4, arch="sm_100", head_dim=64, kv_heads=2, part="tokens"),
    replace(FA4, blocks=(128, 128)),
    replace(FA4, blocks=(64, 128), kv_heads=2, part="tokens"),
    replace(FA4, blocks=(64, 64), directions=FORWARD),
    replace(FA4, blocks=(128, 64), directions=FORWARD, tokens_first=True),
    replace(FA4, head_dim=64, blocks=(128, 128), has_empty=False),
    replace(FA4, head_dim=64, blocks=(64, 64), directions=FORWARD),
    replace(FA4, head_dim=64, blocks=(192, 128), directions=FORWARD),
    replace(FA4, head_dim=96, blocks=(64, 128)),
    replace(FA4, head_dim=256, blocks=(64, 64), directions=BACKWARD),
    replace(FA4, arch="sm_100", head_dim=256),
    replace(FA4, arch="sm_100", head_dim=256, blocks=(128, 128), directions=FORWARD),
    replace(FA4, arch="sm_100", blocks=(256, 128), kv_heads=2),
    replace(FA4, arch="sm_100", blocks=(256, 256), part="heads", batch=1),
    replace(FA4, arch="sm_100", blocks=(128, 128), directions=BACKWARD),
    replace(FA4, arch="sm_100", head_dim=64, blocks=(256, 128)),
]

CUDNN = Case("cudnn_sparse", "sm_90", 128, (64, 64))
CUDNN_CASES = [
    # Eight kernels: two architectures, two blocks, two directions.
    *(replace(CUDNN, arch=arch, blocks=(n, n)) for arch in ("sm_90", "sm_100") for n in (64, 128)),
    # Operands as they may lie in memory, heads that share keys, no empty row, other head dims.
    replace(CUDNN, tokens_first=True, part="heads"),
    replace(CUDNN, head_dim=96, part="tokens", kv_heads=2, has_empty=False, directions=FORWARD),
    replace(CUDNN, blocks=(128, 128), tokens_first=True, has_empty=False),
    replace(CUDNN, blocks=(128, 128), dtype="float16", head_dim=64, kv_heads=2, directions=FORWARD),
    replace(CUDNN, arch="sm_100", part="tokens", has_empty=False),
    replace(CUDNN, arch="sm_100", heads=1, kv_heads=1, batch=1),
    replace(CUDNN, arch="sm_100", blocks=(128, 128), part="heads", batch=1),
    replace(CUDNN, arch="sm_100", blocks=(128, 128), head_dim=64, tokens_first=True),
    replace(CUDNN, arch="sm_100", blocks=(128, 128), dtype="float16", kv_heads=2, directions=FORWARD),
    *(replace(CUDNN, arch="sm_120", blocks=(n, n), directions=FORWARD) for n in (64, 128)),
]

Answer = Callable[[Any], Any]


@pytest.fixture(scope="module")
def answer(request: pytest.FixtureRequest) -> Iterator[Answer]:
    """What a process of its own says of each case of the tests that run; two run at a time."""
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "case" in item.fixturenames
    ]
    with ThreadPoolExecutor(2) as pool:
        futures: dict[Any, Future[Any]] = {case: pool.submit(ask, case) for case in dict.fromkeys(asked)}
        yield lambda case: futures[case].result()
        for future in futures.values():
            future.cancel()


def ask(case: Case | tuple[Case, ...]) -> Any:
    cases = case if isinstance(case, tuple) else (case,)
    question = json.dumps(asdict(case) if isinstance(case, Case) else [asdict(each) for each in case])
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.cuda.case", question],
            env={**os.environ, **environment(cases[0].arch, folder)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=600,
        )
    if done.returncode:
        raise AssertionError(f"{case}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [*FA4_CASES, *CUDNN_CASES], ids=str)
def test_what_an_adapter_passes_compiles(case: Case, answer: Answer) -> None:
    found = answer(case)
    assert set(found["results"]) == set(case.directions)
    q = [case.batch, case.heads, case.rows, case.head_dim]
    kv = [case.batch, case.kv_heads, KEYS, case.head_dim]
    for direction, tensors in found["results"].items():
        if direction == "forward":
            assert tensors == [[q, case.dtype], [q[:3], "float32"]]
        else:
            assert tensors == [[shape, case.dtype] for shape in (q, kv, kv)]
    assert {arch for _, arch in found["cubins"]} == {int(case.arch.removeprefix("sm_"))}
    kinds = [kind.lower() for kind, _ in found["cubins"]]
    arch = case.arch.replace("_", "")
    for direction in case.directions:
        assert any(direction in kind and arch in kind for kind in kinds), kinds


@pytest.mark.parametrize("case", CUDNN_CASES[:4], ids=str)
def test_cudnn_launches_what_was_compiled(case: Case, answer: Answer) -> None:
    """Names and numbers of arguments; fake tensors have no values to compute with."""
    number, block = case.arch.removeprefix("sm_"), case.blocks[0]
    launches = dict(answer(case)["launches"])
    assert {kind for kind, _ in answer(case)["cubins"]} == set(launches)
    forward = f"BlockSparseAttnForwardSm{number}Blk{block}"
    backward = f"BlockSparseAttnBackwardSm{number}Blk{block}"
    assert launches[forward] == (15 if (number, block) == ("100", 64) else 11)
    assert launches[backward] == (12 if (number, block) == ("100", 128) else 16)
    assert launches["BucketedK2QCsrUniversal"] == 9


# Every rule of ours is one of theirs: what we refuse they refuse, and what we pass they take.

BLOCKS = [(32, 32), (64, 64), (64, 112), (64, 128), (64, 96), (128, 64), (128, 80), (128, 128), (128, 256)]
FA4_GRID = {
    arch: tuple(
        Case("fa4", arch, dim, blocks, (direction,), dtype)
        for direction, dim, blocks, dtype in [
            *product(BOTH, (64, 96, 128, 256), [*BLOCKS, (192, 128), (256, 128), (256, 256)], ["bfloat16"]),
            *product(BOTH, (8, 40, 64, 100, 128, 136, 160, 192, 256, 264), [None], ["bfloat16"]),
            *product(BOTH, (128,), [None, (256, 128)], ["float16", "float32"]),
        ]
    )
    for arch in ("sm_90", "sm_100")
}
CUDNN_GRID = {
    arch: tuple(
        Case("cudnn_sparse", arch, dim, blocks, (direction,), dtype, kv_heads=kv_heads)
        for direction, dim, blocks, dtype, kv_heads in [
            *product(BOTH, (64, 80, 96, 128, 256), [(64, 64), (128, 128)], ["bfloat16", "float16"], (4, 2)),
            *product(BOTH, (128,), [(32, 32), (256, 256)], ["bfloat16"], (4,)),
            *product(BOTH, (128,), [(64, 64)], ["float32"], (4,)),
        ]
    )
    for arch in ("sm_90", "sm_100", "sm_120")
}


@pytest.mark.parametrize("case", [*FA4_GRID.values(), *CUDNN_GRID.values()], ids=lambda cases: str(cases[0]))
def test_rules_are_those_of_the_package(case: tuple[Case, ...], answer: Answer) -> None:
    differ = []
    for each, theirs in zip(case, answer(case), strict=True):
        ours = RULES[each.backend](work_of(each), each.arch)
        if bool(ours) != bool(theirs):
            differ.append(f"{each}\n  ours:   {ours or 'serves'}\n  theirs: {theirs or 'accepts'}")
    assert not differ, "\n".join(differ)


def work_of(case: Case) -> KernelSpec:
    return KernelSpec(
        case.blocks is not None,
        case.directions == BACKWARD,
        case.head_dim,
        case.dtype,
        *(case.blocks or (0, 0)),
        group=case.heads // case.kv_heads,
    )
