"""Links between ranks, in Python and in TOML, where no slip of the pen is ignored."""

import math

import pytest

from weft.core.errors import InputError
from weft.core.topology import LOOPBACK, Link, Speed, Topology

FAST, SLOW = Link(latency=1e-6, bandwidth=1e11), Link(latency=1e-5, bandwidth=1e10)

CLUSTER = """
name = "two boxes"
machines = 2
devices = 3
flops = 2e14
[intra]
latency = 1e-6
bandwidth = 1e11
[inter]
latency = 1e-5
bandwidth = 1e10
[[links]]
from = 0
to = 4
latency = 0
bandwidth = 7
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> Topology:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return Topology.from_toml(path)

    return read


def test_toml_gives_what_python_gives(read):
    odd = (0, 4, Link(latency=0, bandwidth=7))
    expected = Topology(
        name="two boxes", machines=2, devices=3, intra=FAST, inter=SLOW, flops=2e14, links=(odd,)
    )
    assert read(CLUSTER) == expected
    assert read("") == Topology()


MEASURED = """
two_sided = true
transport = "symmetric"
comm_slowdown = 0.1
nic_bandwidth = 5e10
[[attention]]
tokens = 2048
density = 0.25
block = 64
head_dim = 128
flops = 1e14
"""


def test_every_field_is_written_and_read_again(read):
    speed = Speed(tokens=2048, density=0.25, block=64, head_dim=128, flops=1e14)
    assert read(MEASURED) == Topology(
        two_sided=True, transport="symmetric", comm_slowdown=0.1, nic_bandwidth=5e10, attention=(speed,)
    )
    for text in (CLUSTER, MEASURED):
        assert read(read(text).to_toml()) == read(text)


def test_ranks_fill_a_machine_before_the_next(read):
    topology = read(CLUSTER)
    assert [topology.machine(rank) for rank in range(topology.ranks)] == [0, 0, 0, 1, 1, 1]
    assert topology.link(0, 2) == topology.link(5, 3) == FAST
    assert topology.link(2, 3) == SLOW


def test_a_link_of_its_own_goes_one_way_only(read):
    topology = read(CLUSTER)
    assert topology.link(0, 4).bandwidth == 7
    assert topology.link(4, 0) == SLOW


def test_local_is_one_machine_on_loopback():
    assert Topology.local(5).ranks == 5
    assert Topology.local(5).link(0, 4) == LOOPBACK


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("machnes = 2", r"unknown key 'machnes'. Did you mean 'machines'\?"),
        ("colour = 2", "unknown key 'colour'. Known: name, machines, devices"),
        (
            "[intra]\nlatency = 0\nbandwith = 1",
            r"\[intra\].* unknown key 'bandwith'. Did you mean 'bandwidth'",
        ),
        ("[inter]\nlatency = 0", r"\[inter\]: missing required key 'bandwidth'"),
        ("intra = 3", r"\[intra\] must be a table of latency, bandwidth, got 3"),
        ("machines = 'two'", "machines must be a whole number, got 'two'"),
        ("flops = true", "flops must be a number, got True"),
        ("[intra]\nlatency = 'x'\nbandwidth = 1", "latency must be a number, got 'x'"),
        ("[intra]\nlatency = nan\nbandwidth = 1", "latency must be a number, got nan"),
        ("machines = 99999999999", "ranks, got 99,999,999,999"),
        ("machines = 0x" + "f" * 5000, "machines must be a whole number, got too large to show"),
        ("name = " + "[" * 100_000, "nested too deeply"),
        ("machines = 0", "must be ≥ 1, got 0 and 1"),
        ("links = 3", "links must be a list of tables, got 3"),
        ("[[links]]\nfrom = 0\nlatency = 0\nbandwidth = 1", r"\[\[links\]\]: missing required key 'to'"),
        ("[[links]]\nfrom = 0\nto = 1\nlatency = 0\nbandwidth = 1", "ranks 0 and 1. local has ranks 0 to 0"),
        (
            "devices = 2\n[[links]]\nfrom = 'a'\nto = 1\nlatency = 0\nbandwidth = 1",
            "cluster.toml .*from must be a whole number, got 'a'",
        ),
        ("devices = 2\n[[links]]\nfrom = 0\nto = 1\nlatensy = 0\nbandwidth = 1", "Did you mean 'latency'"),
        ("machines = ", "is not TOML"),
        ("two_sided = 1", "two_sided must be true or false, got 1"),
        ("transport = 'shm'", "transport must be one of '', 'group', 'symmetric', got 'shm'"),
        ("barriers = 'no'", "barriers must be true or false, got 'no'"),
        ("comm_slowdown = 1.0", "comm_slowdown must be in \\[0, 1\\), got 1.0"),
        ("pair_bandwidth = -1", "pair_bandwidth must be ≥ 0, got -1.0"),
        ("memory_bandwidth = nan", "memory_bandwidth must be a number, got nan"),
        ("attention = 3", "attention must be a list of tables, got 3"),
        ("[[attention]]\ntokens = 8", "missing required key 'density'. The keys are tokens, density, block"),
        (f"{MEASURED}colour = 3", "unknown key 'colour'. Known: tokens, density"),
        (MEASURED.replace("64", "0"), "block of a measured attention must be > 0, got 0"),
    ],
)
def test_bad_toml_names_the_file_and_the_rule(read, text, words):
    with pytest.raises(InputError, match=words):
        read(text)


@pytest.mark.parametrize("text", ["machines = 1.5", "devices = 2.5", "name = 3"])
def test_counts_are_whole_and_names_are_text(read, text):
    with pytest.raises(InputError):
        read(text)


@pytest.mark.parametrize("latency", [-1e-9, math.nan, math.inf])
def test_latency_is_finite_and_not_negative(latency):
    with pytest.raises(InputError, match="latency"):
        Link(latency=latency, bandwidth=1.0)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan, math.inf])
def test_bandwidth_is_finite_and_positive(bandwidth):
    with pytest.raises(InputError, match="bandwidth"):
        Link(latency=0.0, bandwidth=bandwidth)


@pytest.mark.parametrize("flops", [0.0, -1.0, math.nan, math.inf])
def test_flops_are_finite_and_positive(flops):
    with pytest.raises(InputError, match="flops"):
        Topology(flops=flops)


@pytest.mark.parametrize(
    "text",
    [
        "flops = 1e308",
        "call_seconds = 1e308",
        "memory_bandwidth = 5e-324",
        "[intra]\nlatency = 1e308\nbandwidth = 1",
        "[inter]\nlatency = 0\nbandwidth = 5e-324",
    ],
)
def test_numbers_whose_products_would_not_be_finite_are_refused(read, text):
    with pytest.raises(InputError, match="e-324|e.308"):
        read(text)
