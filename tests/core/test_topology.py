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
        ("machnes = 2", r"no 'machnes'. Did you mean 'machines'\?"),
        ("colour = 2", "no 'colour'. Known: name, machines, devices"),
        (
            "[intra]\nlatency = 0\nbandwith = 1",
            r"\[intra\].* no 'bandwith'. Did you mean 'bandwidth'",
        ),
        ("[inter]\nlatency = 0", r"\[inter\]: bandwidth is not told"),
        ("intra = 3", r"\[intra\] is 3. It is a table of latency, bandwidth"),
        ("machines = 'two'", "machines = 'two'. It is a whole number"),
        ("flops = true", "flops = True. It is a number"),
        ("[intra]\nlatency = 'x'\nbandwidth = 1", "latency = 'x'. It is a number"),
        ("[intra]\nlatency = nan\nbandwidth = 1", "latency = nan. It is a number"),
        ("machines = 99999999999", "99,999,999,999 ranks. At most"),
        ("machines = 0x" + "f" * 5000, "machines = too large to show. It is a whole number"),
        ("name = " + "[" * 100_000, "nested too deeply"),
        ("machines = 0", "0 machines × 1 devices is empty"),
        ("links = 3", "links = 3. It is a list of tables"),
        ("[[links]]\nfrom = 0\nlatency = 0\nbandwidth = 1", r"\[\[links\]\]: to is not told"),
        ("[[links]]\nfrom = 0\nto = 1\nlatency = 0\nbandwidth = 1", "ranks 0 and 1. local has ranks 0 to 0"),
        (
            "devices = 2\n[[links]]\nfrom = 'a'\nto = 1\nlatency = 0\nbandwidth = 1",
            "cluster.toml .*from = 'a'. It",
        ),
        ("devices = 2\n[[links]]\nfrom = 0\nto = 1\nlatensy = 0\nbandwidth = 1", "Did you mean 'latency'"),
        ("machines = ", "is not TOML"),
        ("two_sided = 1", "two_sided = 1. It is true or false"),
        ("transport = 'shm'", "transport must be one of '', 'group', 'symmetric', got 'shm'"),
        ("barriers = 'no'", "barriers = 'no'. It is true or false"),
        ("comm_slowdown = 1.0", "comm_slowdown=1.0 leaves nothing. Give a share below 1"),
        ("pair_bandwidth = -1", "pair_bandwidth=-1.0. Give a number, 0 or more"),
        ("memory_bandwidth = nan", "memory_bandwidth = nan. It is a number"),
        ("attention = 3", "attention = 3. It is a list of tables"),
        ("[[attention]]\ntokens = 8", "density is not told. It is a table of tokens, density, block"),
        (f"{MEASURED}colour = 3", "no 'colour'. Known: tokens, density"),
        (MEASURED.replace("64", "0"), "A measured attention has block=0"),
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
