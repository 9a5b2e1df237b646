"""Forecasts: the loads of the next step, from the steps before and from an earlier run."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.forecast import Forecast

HEADS, LAYERS, STEPS = 12, 6, 8
TRACE = Path(__file__).parents[3] / "shared" / "data" / "wan_sparge_head_blocks.npz"


def shares(loads: np.ndarray) -> np.ndarray:
    return loads / loads.sum(axis=-1, keepdims=True)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(np.log(shares(found) / shares(wanted))).max())


def run(seed: int, *, drift: float = 0.0, noise: float = 0.0) -> np.ndarray:
    """[steps, layers, heads]: loads that go on in one direction, each with noise of its own."""
    random = np.random.default_rng(seed)
    start, along = random.normal(10, 1, (LAYERS, HEADS)), random.normal(0, drift, (LAYERS, HEADS))
    steps = np.arange(STEPS)[:, None, None]
    logs = start + steps * along + random.normal(0, noise, (STEPS, LAYERS, HEADS))
    return np.rint(np.exp(logs)).astype(np.int64)


def seen(loads: np.ndarray, prior: np.ndarray | None = None) -> Forecast:
    """All steps of a run but the last."""
    by_layer = None if prior is None else {n: dict(enumerate(prior[:, n])) for n in range(LAYERS)}
    forecast = Forecast(by_layer)
    for step, layers in enumerate(loads[:-1]):
        for layer, each in enumerate(layers):
            forecast.observe(layer, step, each)
    return forecast


@given(seed=st.integers(0, 50), factor=st.integers(2, 1000))
def test_a_factor_that_all_heads_share_changes_nothing(seed: int, factor: int) -> None:
    loads = run(seed, drift=0.1, noise=0.1)
    plain, scaled = (seen(x, x).expected(2, STEPS - 1) for x in (loads, factor * loads))
    np.testing.assert_allclose(plain, scaled, rtol=1e-5)


@given(seed=st.integers(0, 50))
def test_changes_that_are_noise_are_not_carried_on(seed: int) -> None:
    loads = run(seed, noise=0.1)
    assert error(seen(loads).expected(1, STEPS - 1), loads[-2, 1]) < 1e-3


@given(seed=st.integers(0, 50))
def test_changes_that_go_on_are_carried_on(seed: int) -> None:
    loads = run(seed, drift=0.2)
    found = seen(loads).expected(1, STEPS - 1)
    assert error(found, loads[-1, 1]) < 0.02 < 0.1 < error(loads[-2, 1], loads[-1, 1])


@given(seed=st.integers(0, 50))
def test_a_perfect_earlier_run_is_followed(seed: int) -> None:
    loads = run(seed, noise=0.3)
    assert error(seen(loads, loads).expected(3, STEPS - 1), loads[-1, 3]) < 1e-3


@given(seed=st.integers(0, 50))
def test_an_earlier_run_of_something_else_does_little_harm(seed: int) -> None:
    loads, other = run(seed, noise=0.05), run(seed + 1000, noise=0.05)
    with_it, without = (
        np.array([seen(loads, prior).expected(n, STEPS - 1) for n in range(LAYERS)])
        for prior in (other, None)
    )
    ours, plain = (np.log(shares(found) / shares(loads[-1])).std() for found in (with_it, without))
    assert ours < 1.25 * plain


def test_another_run_begins_anew() -> None:
    loads = run(4, drift=0.3)
    forecast = seen(loads)
    for layer in range(LAYERS):
        forecast.observe(layer, 0, loads[0, layer])
    assert error(forecast.expected(0, 1), loads[0, 0]) < 1e-3, "the change between runs is no trend"


def test_heads_without_work_are_expected_to_have_little() -> None:
    forecast = Forecast()
    forecast.observe(0, 0, np.array([0, 1000, 1000]))
    found = forecast.expected(0, 1)
    assert found.min() >= 1 and found[0] < found[1] / 500


@pytest.mark.skipif(not TRACE.exists(), reason="the trace lies beside the checkout")
@pytest.mark.parametrize("layers", [slice(None), slice(0, None, 2), slice(10, None)])
def test_forecasts_of_a_real_run_are_better_than_its_last_step(layers: slice) -> None:
    counts = np.load(TRACE)["counts"].astype(np.int64)[:, layers]
    forecast, errors = Forecast(), []
    for step, (now, then) in enumerate(zip(counts, counts[1:], strict=False)):
        for layer, loads in enumerate(now):
            forecast.observe(layer, step, loads)
            found = [shares(x) - shares(then[layer]) for x in (forecast.expected(layer, step + 1), loads)]
            errors.append([float(x @ x) for x in found])
    ours, last = np.mean(errors[5 * counts.shape[1] :], axis=0)
    assert ours < 0.95 * last
