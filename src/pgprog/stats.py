"""Bootstrap confidence intervals over seeds."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    """A mean and its percentile bootstrap interval; no bounds where there is one value only."""

    mean: float
    low: float | None
    high: float | None

    def as_dict(self, values: Sequence[float]) -> dict[str, Any]:
        """For JSON, with the values that it stands on."""
        return {"mean": self.mean, "ci95": [self.low, self.high], "seeds": list(values)}


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """The mean of independent values with a 95% percentile bootstrap interval, from a fixed generator.

    Percentile, since scipy's default (BCa) is NaN where all values are equal; there the interval is that one value.
    Raises ValueError without values.
    """
    if len(values) == 0:
        raise ValueError("no values: an interval needs at least one")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, None, None)
    from scipy import stats  # late, for it takes most of a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        ci = stats.bootstrap(
            (np.asarray(values),),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    return Interval(mean, float(ci.low), float(ci.high))


def percentile_coverage(n: int) -> float:
    """How often the 95% percentile bootstrap of n normal values really covers their mean.

    The bootstrap's spread is that of a mean with variance s^2 (n - 1) / n^2, where a t interval has s^2 / n and wider
    quantiles:

        coverage(n) = P(|t_{n-1}| < 1.96 sqrt((n - 1) / n))

    0.846 for n = 5, 0.90 for n = 10; NaN for n = 1. Exact up to the normal approximation of the bootstrap's own
    distribution.
    """
    if n < 2:
        return math.nan
    from scipy import stats

    z = stats.norm.ppf(0.5 + CONFIDENCE / 2)
    return float(2 * stats.t.cdf(z * math.sqrt((n - 1) / n), n - 1) - 1)
