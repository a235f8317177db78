"""Turns, ratios, the interval of a median against the binomial and by simulation, the slope against numpy."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from runs.timing import Watch, interval, machine, medians, ratios, slope


def test_cases_take_turns_in_alternating_order() -> None:
    """A clock that moves only within a case: each case's own seconds, and the order of the calls."""
    now, called, said = 0.0, [], []

    def case(name: str, seconds: float):
        def run() -> None:
            nonlocal now
            called.append(name)
            now += seconds * (1 + len(called))

        return run

    watch = Watch(said.append, lambda: now)
    found = watch.take_turns({"a": case("a", 1), "b": case("b", 10)}, 3)
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [2, 5, 6], "b": [30, 40, 70]}
    assert said == [f"turn {turn} of 3: {name}" for turn, name in zip((1, 1, 2, 2, 3, 3), called, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 20, 60, 101])
def test_the_interval_is_of_the_order_statistics_that_the_binomial_names(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    mid, low, high = interval(values.tolist())
    k = max(1, int(binom.ppf(0.025, n, 0.5)))
    assert binom.cdf(k - 1, n, 0.5) <= 0.025 < binom.cdf(k, n, 0.5) or n < 6
    assert mid == pytest.approx(np.median(values))
    assert (low, high) == (np.sort(values)[k - 1], np.sort(values)[n - k])
    assert n >= 6 or (low, high) == (values.min(), values.max())


def test_the_interval_covers_the_median_of_skewed_times() -> None:
    """4,000 samples of 15: at least 95 %, and not by much more than the discrete level 0.965."""
    draws = np.random.default_rng(0).lognormal(size=(4000, 15))
    covered = np.mean([low <= 1.0 <= high for _, low, high in map(interval, draws.tolist())])
    exact = 1 - 2 * binom.cdf(3, 15, 0.5)
    assert exact > 0.95 and abs(covered - exact) < 4 * math.sqrt(exact * (1 - exact) / 4000)


def test_without_values_there_is_no_median() -> None:
    with pytest.raises(ValueError, match="no median"):
        interval([])


def test_ratios_are_turn_by_turn() -> None:
    assert ratios([2, 9], [1, 3]) == [2, 3]
    assert medians({"one": [3, 1, 8], "other": [1, 2]}) == {"one": 3, "other": 1.5}
    with pytest.raises(ValueError, match="zip"):
        ratios([1, 2], [1])


def test_the_slope_is_that_of_least_squares() -> None:
    g = np.random.default_rng(1)
    x, y = g.normal(size=20), g.normal(size=20)
    assert slope(x.tolist(), y.tolist()) == pytest.approx(np.polyfit(x, y, 1)[0])


def test_the_machine_in_words() -> None:
    found = machine("cpu")
    assert found["device"] == "cpu" and found["processor"] and found["cores"] >= 1 and found["load_average"] >= 0
