"""The formulas of limits.md: elements that each rank sends, forward, for a dense mask and sizes that divide.

E is the number of elements of the whole query, K of the whole key; P = U × R ranks.
"""

from __future__ import annotations

from fractions import Fraction

from weft.core.problem import Problem


def usp(problem: Problem, u: int, r: int) -> int:
    """Q and O to whoever has their heads, K and V too and then once around the ring."""
    elements = problem.batch * problem.head_dim
    E, K = elements * problem.heads * problem.q.size, elements * problem.kv_heads * problem.kv.size
    share = Fraction(1, problem.ranks)
    sent = (2 * E + 2 * K) * share * Fraction(u - 1, u) + 2 * K * share * (r - 1)
    assert sent.denominator == 1, "choose sizes that divide"
    return int(sent)


def ulysses(problem: Problem) -> int:
    return usp(problem, problem.ranks, 1)


def ring(problem: Problem) -> int:
    """Also what fetching everything costs."""
    return usp(problem, 1, problem.ranks)
