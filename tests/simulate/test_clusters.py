"""Clusters by name: what the sources say is what a schedule meets."""

from pathlib import Path

import pytest

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate
from weft.simulate.gpus import DENSE, DEVICES, SPARSE, KernelSpeed, default_backends, kernels_of


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_makes_machines(device):
    one, four = cluster(f"8x{device}"), cluster(f"4x8x{device}")
    assert (one.machines, one.devices, four.machines, four.ranks) == (1, 8, 4, 32)
    assert four.nic_bandwidth <= 8 * four.inter.bandwidth, "a NIC is not wider than what hangs on it"
    assert four.inter.bandwidth < four.intra.bandwidth
    assert 0 < four.flops < DEVICES[device].tflops * 1e12


def test_an_a800_is_an_a100_with_less_nvlink():
    a100, a800 = cluster("8xa100"), cluster("8xa800")
    assert a800.flops == a100.flops
    assert a800.intra.bandwidth == pytest.approx(a100.intra.bandwidth * 2 / 3)


def test_a_ring_on_mi300x_has_one_of_seven_links():
    layout = Layout.even(1 << 16, 8)
    problem = Problem(batch=1, heads=64, kv_heads=64, head_dim=128, q=layout, kv=layout, dtype="bfloat16")
    topology = cluster("8xmi300x")
    hop = 2 * 64 * 128 * 2 * (1 << 13)
    for name, bandwidth in (("ring", 64e9), ("ulysses", 448e9)):
        timeline = simulate(build(name, problem, BlockMask.dense(64, 1 << 16)), topology)
        first = [s for s in timeline.spans if s.kind == "send" and s.op == 0 and s.rank == 0]
        size = sum(s.num_bytes for s in first)
        assert size == (hop if name == "ring" else hop * 3 // 2 * 7 // 8)
        took = max(s.end for s in first) - min(s.start for s in first) - topology.intra.latency
        assert size / took == pytest.approx(bandwidth * 0.88, rel=0.05), name


@pytest.mark.parametrize("name", ["8xh1000", "h100", "0xh100", "8x", "axbxh100", "2x0xh100"])
def test_what_is_no_cluster_says_what_is(name):
    with pytest.raises(InputError, match="There is no cluster.*Write 8xh100"):
        cluster(name)


def test_a_cluster_names_its_kernels_and_their_sources():
    h100 = cluster("8xh100")
    assert (h100.kernel, h100.sparse_kernel) == ("cudnn, FlashAttention-3 paper", "triton, estimate")
    assert h100.sparse_flops < h100.flops < 989e12, "the default kernel for sparse tiles is not the fastest"
    fa4 = cluster("8xh100:fa4")
    assert fa4.kernel.startswith("fa4, ") and fa4.sparse_kernel.startswith("fa4, ")
    assert fa4.flops > h100.flops and fa4.sparse_flops > h100.sparse_flops
    mixed = cluster("2x8xh100:fa4,cudnn_sparse")
    assert mixed.kernel.startswith("fa4, ") and mixed.sparse_kernel.startswith("cudnn_sparse, ")
    assert cluster("8xh100:exact").flops < 0.1 * h100.flops
    with pytest.raises(InputError, match="The speed of 'fa5' on h100 is unknown. Use one of .*cudnn.*fa4"):
        cluster("8xh100:fa5")


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_has_sourced_speeds_below_its_peak(device):
    known = DEVICES[device].like or device
    for table in (DENSE[known], SPARSE[known]):
        for kernel in table.values():
            assert 0 < kernel.backward < kernel.forward < DEVICES[known].tflops
            assert kernel.source
    chosen = kernels_of(device)
    assert (chosen["dense"][0], chosen["sparse"][0]) == default_backends(DEVICES[device].arch)


def test_a_card_with_pcie_is_its_sibling_behind_slower_links():
    nvlink, pcie = cluster("8xa100"), cluster("8xa100pcie")
    assert pcie.flops == nvlink.flops
    assert pcie.intra.bandwidth == pytest.approx(32e9 * 0.88)


def in_words(table: dict[str, KernelSpeed], default: str) -> str:
    bold = {name: f"**{name}**" if name == default else name for name in table}
    return "; ".join(f"{bold[name]} {k.forward:g} / {k.backward:g} ({k.source})" for name, k in table.items())


@pytest.mark.parametrize("device", DENSE)
def test_the_documents_have_the_speeds_that_are_assumed(device):
    arch = DEVICES[device].arch
    dense, sparse = default_backends(arch)
    row = f"| `{device}` | {arch} | {in_words(DENSE[device], dense)} | {in_words(SPARSE[device], sparse)} |"
    assert row in (Path(__file__).parents[2] / "docs/planning.md").read_text().splitlines()
