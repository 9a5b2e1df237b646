"""Every backend against the reference, on the GPU that is here. It has never run: weft has seen none."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from weft.run.kernels import make
from weft.run.kernels.choice import RULES, platform_of, refusal
from weft.run.kernels.parity_sample import compare_with_reference
from weft.run.kernels.rules import HALF, KernelSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and has never run")

BLOCKS = ((0, 0), (64, 64), (64, 128), (128, 128), (256, 128))
WORKS = [
    KernelSpec(bool(blocks[0]), backward, head_dim, dtype, *blocks, group)
    for blocks, backward, head_dim, dtype, group in product(
        BLOCKS, (False, True), (64, 72, 96, 128, 256), HALF, (1, 2)
    )
]


@pytest.mark.parametrize("backend", RULES)
def test_a_backend_equals_the_reference(backend: str) -> None:
    device = torch.device("cuda", 0)
    served = [work for work in WORKS if not refusal(backend, work, platform_of(device))]
    if not served:
        pytest.skip("serves nothing of this on this GPU")
    kernel = make(backend)
    wrong = {str(work): why for work in served if (why := compare_with_reference(kernel, work, device))}
    assert not wrong
