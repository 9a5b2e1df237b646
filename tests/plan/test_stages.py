"""Routes against brute force and against what is known of cyclic models."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations, product
from math import prod

import numpy as np
import pytest

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.problem import Switch
from weft.plan.stage_layouts import FREE, WHOLE, ModelStage, StageLayouts, State, choose_layouts
from weft.schedule.measure import measure
from weft.schedule.switch import switch

Sizes = dict[str, int]


def switches(found: StageLayouts) -> int:
    return sum(move.verb == "switch" for moves in found.moves for move in moves)


def busiest(links: dict[tuple[int, int], int], ranks: int) -> int:
    sent = [sum(n for (s, _), n in links.items() if s == r) for r in range(ranks)]
    got = [sum(n for (_, d), n in links.items() if d == r) for r in range(ranks)]
    return max([*sent, *got])


def move_cost(a: str, b: str, state: State, sizes: Sizes, axes: tuple[int, ...], axis: int) -> int:
    """From the very schedule that would run, on the largest shard of the other axes."""
    if a == WHOLE:
        return 0
    ranks = axes[axis]
    others = {dim: n for i, (dim, n) in enumerate(zip(state, axes, strict=True)) if i != axis}
    rest = 1
    for dim, size in sizes.items():
        if dim not in (a, b):
            rest *= -(-size // others[dim]) if dim in others else size
    before = Layout.even(sizes[a], ranks)
    if b == WHOLE:
        report = measure(switch(Switch.of(before, width=rest)))
    else:
        report = measure(switch(Switch.of(before, Layout.even(sizes[b], ranks), width=rest)))
    return busiest(report.link_bytes, ranks) // 4


def transition(a: State, b: State, sizes: Sizes, axes: tuple[int, ...]) -> tuple[int, int] | None:
    changed = [i for i in range(len(axes)) if a[i] != b[i]]
    options = []
    for order in permutations(changed):
        state, sent, calls = list(a), 0, 0
        for i in order:
            if b[i] != WHOLE and b[i] in state:
                break
            sent += move_cost(a[i], b[i], tuple(state), sizes, axes, i)
            calls += int(a[i] != WHOLE and axes[i] > 1)
            state[i] = b[i]
        else:
            options.append((sent, calls))
    return min(options, default=None)


def allowed(stage: ModelStage, state: State, sizes: Sizes, axes: tuple[int, ...]) -> bool:
    free = [dim for dim in sizes if dim not in stage.mixes]
    fits = any(
        all(sizes[dim] >= n for dim, n in zip(pick, axes, strict=True))
        for pick in permutations(free, len(axes))
    )
    touched = any(dim in stage.mixes for dim in state)
    if fits:
        return not touched and WHOLE not in state
    return WHOLE not in state if stage.inside else not touched


def inside(stage: ModelStage, state: State, sizes: Sizes, axes: tuple[int, ...]) -> tuple[int, int]:
    """What a stage sends that mixes what is sharded: Ulysses over the ranks that share it."""
    ranks = prod(n for dim, n in zip(state, axes, strict=True) if dim in stage.mixes)
    local = prod(-(-n // axes[state.index(d)]) if d in state else n for d, n in sizes.items())
    return (4 * local * (ranks - 1) // ranks, 2) if ranks > 1 else (0, 0)


def brute(
    stages: list[ModelStage], sizes: Sizes, axes: tuple[int, ...], entry: State, leave: State
) -> tuple[int, int]:
    states = [
        s
        for s in product([*sizes, WHOLE], repeat=len(axes))
        if len({d for d in s if d != WHOLE}) == sum(d != WHOLE for d in s)
    ]
    known: dict[tuple[State, State], tuple[int, int] | None] = {}
    best = None
    for path in product(states, repeat=len(stages)):
        if not all(allowed(st, s, sizes, axes) for st, s in zip(stages, path, strict=True)):
            continue
        starts = states if entry == (FREE,) * len(axes) else [entry]
        ends = states if leave == (FREE,) * len(axes) else [leave]
        for first, last in product(starts, ends):
            total, whole_path = [0, 0], (first, *path, last)
            for pair in zip(whole_path, whole_path[1:], strict=False):
                if pair not in known:
                    known[pair] = transition(*pair, sizes, axes)
                if (cost := known[pair]) is None:
                    break
                total = [total[0] + cost[0], total[1] + cost[1]]
            else:
                for stage, state in zip(stages, path, strict=True):
                    sent, calls = inside(stage, state, sizes, axes)
                    total = [total[0] + sent, total[1] + calls]
                if best is None or tuple(total) < best:
                    best = tuple(total)
    assert best is not None
    return best  # pyright: ignore


def random_case(seed: int) -> tuple[list[ModelStage], Sizes, tuple[int, ...], State, State]:
    rng = np.random.default_rng(seed)
    names = ["t", "h", "w"][: rng.integers(2, 4)]
    axes = (int(rng.integers(2, 6)),) if rng.random() < 0.75 else (2, int(rng.integers(1, 4)))
    sizes = {name: int(rng.choice([1, 2, 3, 5, 8, 12])) for name in names}
    length = int(rng.integers(1, 6 if len(axes) == 1 else 4))
    stages = [
        ModelStage(f"s{i}", tuple(n for n in names if rng.random() < 0.5), inside=bool(rng.random() < 0.4))
        for i in range(length)
    ]
    ends = [(WHOLE,) * len(axes), (FREE,) * len(axes), (*names, WHOLE)[: len(axes)]]
    entry, leave = (ends[int(rng.integers(3))] for _ in range(2))
    return stages, sizes, axes, entry, leave


@pytest.mark.parametrize("seed", range(200))
def test_no_sequence_of_layouts_is_cheaper(seed: int) -> None:
    stages, sizes, axes, entry, leave = random_case(seed)
    found = choose_layouts(stages, sizes, axes, entry=entry, exit=leave)
    assert found.cost[:2] == brute(stages, sizes, axes, entry, leave)
    assert replayed(found, sizes, axes, entry, leave)


def replayed(found: StageLayouts, sizes: Sizes, axes: tuple[int, ...], entry: State, leave: State) -> bool:
    """Whether the moves lead from layout to layout, and every stage may run in its own."""
    state = list(entry)
    if FREE in entry:  # wherever the first move begins, or the first stage is
        state = list(found.layouts[0])
        for move in reversed(found.moves[0]):
            state[move.axis] = move.source
    for stage, layout, moves in zip(found.stages, found.layouts, found.moves, strict=False):
        for move in moves:
            assert state[move.axis] == move.source
            state[move.axis] = move.target
        assert tuple(state) == layout
        assert allowed(stage, layout, sizes, axes)
    for move in found.moves[-1]:
        assert state[move.axis] == move.source
        state[move.axis] = move.target
    return FREE in leave or tuple(state) == leave


@pytest.mark.parametrize(("dims", "ratio"), [(2, Fraction(2)), (3, Fraction(3, 2)), (4, Fraction(4, 3))])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dims_in_turn_need_k_over_k_minus_1_switches_a_layer(dims: int, ratio: Fraction, ranks: int) -> None:
    sizes = {f"d{i}": 8 for i in range(dims)}
    layers = 2 * (dims - 1) * dims
    stages = [ModelStage(f"{n}.{d}", (d,)) for n in range(layers) for d in sizes]
    found = choose_layouts(stages, sizes, ranks, width=6, entry=FREE, exit=FREE)
    # The last layout lasts to the end, so one switch less than in an endless model.
    assert switches(found) == layers * ratio - 1
    M = 6 * 8**dims
    assert found.cost.num_bytes == switches(found) * M * (ranks - 1) // ranks**2
    assert found.cost.calls == switches(found)


def test_a_full_model_costs_what_ulysses_costs() -> None:
    sizes = {"t": 8, "h": 8, "w": 8}
    stages = [ModelStage(f"{n}", ("t", "h", "w"), inside=True) for n in range(5)]
    found = choose_layouts(stages, sizes, 4, width=2)
    M = 2 * 8**3
    attention, end = 5 * (4 * M // 4) * 3 // 4, M * 3 // 4
    assert found.cost.num_bytes == attention + end
    assert found.cost.calls == 5 * 2 + 1


def test_a_norm_over_all_tokens_is_gathered_once_for_its_neighbours_too() -> None:
    sizes = {"t": 4, "s": 4}
    a, b, norm = ModelStage("a", ("s",)), ModelStage("b", ("t",)), ModelStage("norm", ("t", "s"))
    found = choose_layouts([a, norm, norm, b], sizes, 2, width=4)
    assert found.layouts == (("t",), (WHOLE,), (WHOLE,), ("s",))
    assert switches(found) == 0
    assert [str(m) for moves in found.moves for m in moves] == ["split t", "gather t", "split s", "gather s"]


def test_one_image_is_not_dealt_by_frames() -> None:
    """T = 1: sharding time would leave all work to rank 0 and cost two switches; a gather is one."""
    stages = [ModelStage(f"{d}{n}", (d,)) for n in range(2) for d in ("space", "time")]
    found = choose_layouts(stages, {"time": 1, "space": 16}, 4)
    assert found.layouts == ((WHOLE,), ("space",), (WHOLE,), ("space",))
    batched = choose_layouts(stages, {"time": 1, "space": 16, "batch": 4}, 4)
    assert set(batched.layouts) == {("batch",)}
    assert batched.cost.calls == 1


def test_more_ranks_than_any_one_dim_has_indices() -> None:
    stages = [ModelStage(d, (d,)) for _ in range(3) for d in ("t", "h", "w")]
    found = choose_layouts(stages, {"t": 4, "h": 4, "w": 4}, (4, 3))
    for stage, layout in zip(stages, found.layouts, strict=True):
        assert WHOLE not in layout
        assert not {*stage.mixes} & {*layout}


def test_a_pointwise_stage_stays_where_it_is_and_the_largest_dim_breaks_ties() -> None:
    found = choose_layouts([ModelStage("mlp", ())], {"t": 3, "s": 64}, 2, entry=FREE, exit=FREE)
    assert found.layouts == (("s",),)
    found = choose_layouts([ModelStage("mlp", ())], {"t": 3, "s": 64}, 2, entry="t", exit=FREE)
    assert found.layouts == (("t",),)


def test_it_tells_what_it_does() -> None:
    found = choose_layouts(
        [ModelStage("spatial", ("s",)), ModelStage("temporal", ("t",))], {"t": 4, "s": 4}, 2, width=2
    )
    told = str(found).splitlines()
    assert told[0].split() == ["spatial", "mixes", "s", "sharded", "t", "split", "t"]
    assert told[1].split() == ["temporal", "mixes", "t", "sharded", "s", "switch", "t", "→", "s"]
    assert told[2:] == ["gather s", f"{8 + 16} bytes, 2 calls a rank"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stages": [ModelStage("x", ("u",))]}, "Stage x mixes an unknown dim 'u'"),
        ({"entry": "u"}, "entry='u' is not a layout"),
        ({"exit": ("t", "s")}, "is not a layout over 1 axes"),
        ({"ranks": 0}, "ranks must be >= 1 on each axis"),
        ({"ranks": (2, 2), "stages": [], "entry": ("t", "s"), "exit": ("s", "t")}, "cannot swap"),
        ({"sizes": {"t": 0}}, "of size 0 cannot be sharded"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict, said: str) -> None:
    base = {"stages": [ModelStage("x", ("t",))], "sizes": {"t": 4, "s": 4}, "ranks": 2}
    with pytest.raises(InputError, match=said):
        choose_layouts(**(base | given))
