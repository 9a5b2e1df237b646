"""Mutation test of `verify`: whatever changes the result is refused, by the name of what is wrong.

What a mutant does to the result is decided by running it, not by reading it.
"""

import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from tests.cases import Case, random_case
from tests.schedule.interpreter import changes_result
from tests.schedule.mutants import KINDS, mutants
from tests.schedule.partitions import random_schedule
from weft.core.errors import ScheduleError
from weft.core.schedule import Exchange, Schedule
from weft.schedule.reverse import reverse
from weft.schedule.verify import verify

COUNT = 40
IDEMPOTENT = {"double_transfer", "repeat_transfer"}
"""Forward, what is copied twice is the same; only sums notice."""

each_way = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def refusal(schedule: Schedule) -> str:
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def names_the_culprit(message: str, schedule: Schedule) -> bool:
    """It gives the index and the words of an operation, or says which tile or tensor is missing."""
    if found := re.match(rf"{re.escape(schedule.name)}: op (\d+), ", message):
        op = schedule.ops[int(found[1])]
        parts = op.transfers if isinstance(op, Exchange) else (op,)
        return any(message[found.end() :].startswith(f"{part}: ") for part in parts)
    return bool(
        re.match(
            rf"{re.escape(schedule.name)}: (tile \(head \d+, q block \d+, kv block \d+\) is never computed"
            r"|output of head \d+, q block \d+ never reaches rank \d+"
            r"|d(q|kv) of head \d+, computed on rank \d+, never gets home)\.",
            message,
        )
    )


@each_way
@pytest.mark.parametrize("kind", KINDS)
def test_verify_refuses_what_changes_the_result_and_names_it(kind, backward):
    seen = Counter()
    for mutant in islice(mutants(kind, backward=backward), COUNT):
        message, changed = refusal(mutant), changes_result(mutant)
        assert message or not changed, f"accepted, but wrong:\n{mutant}"
        assert not message or names_the_culprit(message, mutant), message
        seen[changed] += 1
    assert seen[True] >= 5 or (kind in IDEMPOTENT and not backward)


@pytest.mark.parametrize("seed", range(40))
def test_oracle_and_verify_agree_on_sound_schedules(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng, max_tokens=59, max_ranks=5)
    for schedule in (case.schedule, random_schedule(rng, case)):
        verify(schedule)
        assert not changes_result(schedule)


@pytest.mark.parametrize("keep", ["all", "none"])
@pytest.mark.parametrize("seed", range(40))
def test_oracle_and_verify_agree_on_sound_gradients(seed, keep):
    case = random_case(np.random.default_rng(seed), max_tokens=59, max_ranks=5)
    gradients = reverse(case.schedule, keep=keep)
    verify(gradients)
    assert not changes_result(gradients)


def test_gradients_of_any_partition_verify():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        case: Case = random_case(rng, max_tokens=59, max_ranks=5)
        verify(reverse(random_schedule(rng, case)))
