"""The compiled CPU kernel against the reference, on every instruction set this machine runs."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.core.errors import InputError, MissingError
from weft.run.kernels import Accumulator, choose, cpu
from weft.run.kernels.cpu import Cpu, isas
from weft.run.kernels.exact import Exact
from weft.run.kernels.reference import ReferenceKernel
from weft.run.kernels.tiles import Tiles

ISAS = isas()


@dataclass(frozen=True)
class Operands:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    tiles: Tiles
    scale: float

    def wide(self) -> Operands:
        q, k, v, grad = (x.double() for x in (self.q, self.k, self.v, self.grad))
        return Operands(q, k, v, grad, self.tiles, self.scale)


def forward(kernel, x: Operands, into=None):
    return kernel.attend(x.q, x.k, x.v, x.tiles, x.scale, into and Accumulator(*into))


def backward(kernel, x: Operands, done):
    out, lse = done
    guarded = out, lse.masked_fill(lse == -torch.inf, torch.inf)
    return kernel.attend_backward(x.grad, x.q, x.k, x.v, guarded, x.tiles, x.scale)


def operands(
    seed: int,
    sizes: tuple[int, int, int, int, int],
    blocks: tuple[int, int],
    density: float,
    dtype=torch.float32,
) -> Operands:
    """Random tensors (batch, heads, q_len, kv_len, dim), q as [B, S, H, D] in memory, v as [B, H, S, D]."""
    batch, heads, q_len, kv_len, dim = sizes
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, q_len, heads, dim, generator=draw).to(dtype).transpose(1, 2)
    k = torch.randn(batch, kv_len, heads, dim, generator=draw).to(dtype).transpose(1, 2)
    v = torch.randn(batch, heads, kv_len, dim, generator=draw).to(dtype)
    grad = torch.randn(batch, heads, q_len, dim, generator=draw)
    shape = heads, -(-q_len // blocks[0]), -(-kv_len // blocks[1])
    active = np.random.default_rng(seed).random(shape) < density
    tiles = Tiles(None if active.all() else active, *blocks, q_len, kv_len)
    return Operands(q, k, v, grad, tiles, dim**-0.5)


SIZES = st.tuples(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([1, 16, 40, 64, 128]),
)
BLOCKS = st.tuples(st.sampled_from([8, 64, 128, 200]), st.sampled_from([16, 64, 300]))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(seed=st.integers(0, 2**16), sizes=SIZES, blocks=BLOCKS, density=st.sampled_from([0.1, 0.5, 1.0]))
def test_any_shape_and_mask_equals_the_reference(isa, seed, sizes, blocks, density):
    x = operands(seed, sizes, blocks, density)
    out, lse = forward(Cpu(isa), x)
    expected = forward(ReferenceKernel(), x.wide())
    torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(lse.double(), expected[1], rtol=0, atol=5e-6)
    for mine, theirs in zip(
        backward(Cpu(isa), x, (expected[0].float(), expected[1].float())),
        backward(ReferenceKernel(), x.wide(), expected),
        strict=True,
    ):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=3e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_it_is_as_accurate_as_torch(isa, dtype, dim):
    """At most 1.5 times SDPA's own error against float64; 16-bit inputs, float32 sums."""
    x = operands(3, (1, 4, 512, 700, dim), (128, 128), 1.0, dtype)
    expected = forward(ReferenceKernel(), x.wide())
    done = expected[0].float(), expected[1].float()
    pairs = [(forward(k, x)[0], *backward(k, x, done)) for k in (Cpu(isa), Exact())]
    truth = (expected[0], *backward(ReferenceKernel(), x.wide(), expected))
    for ours, theirs, right in zip(*pairs, truth, strict=True):
        # The norm, not the largest: one element in a million is chance.
        assert float((ours.double() - right).norm()) <= 1.5 * float((theirs.double() - right).norm())


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_is_read_as_it_is(isa):
    x = operands(5, (2, 3, 131, 97, 48), (64, 64), 0.6, torch.bfloat16)
    torch.testing.assert_close(
        forward(Cpu(isa), x)[0].double(), forward(ReferenceKernel(), x.wide())[0], rtol=0, atol=5e-6
    )


@pytest.mark.parametrize("isa", ISAS)
def test_a_running_result_is_merged_for_free(isa):
    x = operands(7, (1, 3, 150, 256, 32), (64, 64), 0.5)
    halves = [
        Operands(
            x.q,
            x.k[:, :, cut],
            x.v[:, :, cut],
            x.grad,
            Tiles(x.tiles.active[:, :, blocks], 64, 64, 150, 128),
            x.scale,
        )
        for cut, blocks in ((slice(0, 128), slice(0, 2)), (slice(128, 256), slice(2, 4)))
    ]
    kernel = Cpu(isa)
    done = forward(kernel, halves[1], forward(kernel, halves[0]))
    expected = forward(kernel, x)
    for mine, whole in zip(done, expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=2e-6)


def test_a_running_result_may_be_part_of_a_larger_one():
    x = operands(11, (1, 2, 64, 64, 16), (64, 64), 1.0)
    whole = torch.zeros(1, 2, 100, 16), torch.full((1, 2, 100), -torch.inf)
    part = whole[0][:, :, 20:84], whole[1][:, :, 20:84]
    forward(Cpu(), x, part)
    torch.testing.assert_close(part[0], forward(Cpu(), x)[0])
    assert not whole[0][:, :, :20].any() and (whole[1][:, :, 84:] == -torch.inf).all()


@pytest.mark.parametrize("isa", ISAS)
def test_rows_without_a_tile_are_zero_and_lse_is_minus_infinity(isa):
    active = np.array([[[0, 0], [1, 0]]], dtype=bool)
    q, k, v, grad = (torch.randn(1, 1, 16, 8) for _ in range(4))
    x = Operands(q, k, v, grad, Tiles(active, 8, 8, 16, 16), 0.3)
    out, lse = forward(Cpu(isa), x)
    assert not out[:, :, :8].any() and (lse[:, :, :8] == -torch.inf).all()
    dq, dk, dv = backward(Cpu(isa), x, (out, lse))
    assert not dq[:, :, :8].any() and not dk[:, :, 8:].any() and not dv[:, :, 8:].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_propagate_as_in_torch(isa, bad):
    x = operands(13, (1, 1, 40, 50, 16), (40, 50), 1.0)
    for tensor in (x.q, x.k, x.v):
        broken = tensor.clone()
        broken[0, 0, 3, 2] = bad
        parts = [broken if t is tensor else t for t in (x.q, x.k, x.v)]
        y = Operands(*parts, x.grad, x.tiles, x.scale)
        ours, theirs = forward(Cpu(isa), y)[0], forward(Exact(), y)[0]
        assert torch.equal(ours.isfinite(), theirs.isfinite())


def test_threads_do_not_change_a_bit():
    x = operands(17, (2, 3, 300, 300, 64), (64, 64), 0.4)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            done = forward(Cpu(), x)
            results.append((*done, *backward(Cpu(), x, done)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_threads_serve_a_forked_process():
    """Torch's own threads, which the kernel borrows, do not live on in a child."""
    x = operands(19, (1, 4, 130, 130, 32), (64, 64), 0.5)
    expected = forward(Cpu(), x)[0]  # the parent has used its threads
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # a child that waits for threads it does not have would wait for ever
        os._exit(0 if torch.equal(forward(Cpu(), x)[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_it_says_what_it_cannot_do():
    with pytest.raises(InputError, match="not float64 on cpu.*auto"):
        choose("cpu", "float64")
    with pytest.raises(InputError, match="not float32 on cuda"):
        choose("cpu", "float32", "cuda:0")
    with pytest.raises(InputError, match="has no sse1.*base"):
        Cpu("sse1")
    assert choose("auto", "float32").name == "cpu"
    assert choose("auto", "float64").name == "exact"


@pytest.fixture
def fresh_build(tmp_path, monkeypatch):
    """The kernel as on a machine that has not built it yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_built_once_into_a_folder_of_the_users_own(fresh_build: Path):
    path = cpu.library_path()
    assert path.parent == fresh_build / "weft"
    assert path.parent.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert cpu.library_path() == path


def test_without_a_compiler_it_says_what_to_install(fresh_build, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(MissingError, match="C compiler.*apt install gcc.*exact"):
        cpu.library_path()


def test_a_compiler_that_fails_is_quoted(fresh_build, monkeypatch):
    monkeypatch.setattr(cpu, "FLAGS", ["-O3", "--no-such-flag"])
    with pytest.raises(MissingError, match="no-such-flag"):
        cpu.library_path()
