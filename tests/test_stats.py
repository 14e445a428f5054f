"""Bootstrap intervals: fixed numbers, edge cases, and what five seeds are worth."""

import math

import numpy as np
import pytest
from scipy import stats

from pgprog.stats import bootstrap_mean, percentile_coverage


def test_mean_is_the_mean_and_lies_in_its_interval():
    values = [0.40, 0.58, 0.51, 0.47, 0.54]
    interval = bootstrap_mean(values)
    assert interval.mean == pytest.approx(sum(values) / 5, rel=1e-15)
    assert min(values) <= interval.low < interval.mean < interval.high <= max(values)


def test_interval_of_two_values_is_their_range():
    # A resample of {a, b} is a, (a + b)/2 or b, with chances 1/4, 1/2, 1/4: the 2.5% and 97.5% quantiles are a and b.
    assert bootstrap_mean([0.25, 0.75])[1:] == (0.25, 0.75)


def test_the_bounds_are_those_of_95_percent():
    # Of 20 values, two of them 1 and the rest 0, the mean of a resample is Binomial(20, 1/10) / 20, whose 2.5% and
    # 97.5% quantiles are 0 and 5/20; at 90% the upper one is 4/20.
    low, high = stats.binom.ppf([0.025, 0.975], 20, 2 / 20) / 20
    assert bootstrap_mean([1.0] * 2 + [0.0] * 18)[1:] == (pytest.approx(low), pytest.approx(high, rel=1e-12))
    assert high != stats.binom.ppf(0.95, 20, 2 / 20) / 20


def test_equal_values_have_an_interval_of_one_point():
    assert bootstrap_mean([0.95] * 5) == (pytest.approx(0.95, rel=1e-15),) * 3


def test_one_value_has_no_interval_and_none_raises():
    assert bootstrap_mean([0.5]) == (0.5, None, None)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([])


def test_the_interval_is_the_same_every_time():
    assert bootstrap_mean([0.1, 0.4, 0.35]) == bootstrap_mean([0.1, 0.4, 0.35])


def test_coverage_formula_agrees_with_simulation_for_five_seeds():
    rng = np.random.default_rng(1)
    trials, n = 4000, 5
    samples = rng.normal(size=(trials, n))
    means = samples[np.arange(trials)[:, None, None], rng.integers(0, n, (trials, 1000, n))].mean(-1)
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    covered = ((low < 0) & (high > 0)).mean()
    # The formula takes the bootstrap's distribution as normal, which at n = 5 moves the coverage by about a percent.
    z = 5
    assert abs(covered - percentile_coverage(n)) < 0.01 + z * math.sqrt(0.84 * 0.16 / trials)
    assert percentile_coverage(n) == pytest.approx(
        2 * stats.t.cdf(1.959963984540054 * math.sqrt(0.8), 4) - 1, rel=1e-12
    )
    assert math.isnan(percentile_coverage(1))
