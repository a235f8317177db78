"""Confidence intervals over clusters (documents, conversations): METHOD.md section 8, one function a construction.

They say how far an estimate may be off because other documents could have been drawn. A drawn document brings all its
models, budgets, heads, steps and questions, so a statistic is a function of one weight per cluster (analysis/weighted),
evaluated at weights 1 (the estimate) and on all resamples at once.

One-sided errors in per cent at a nominal 2.5 (truth below the interval / above it): 28 documents of 72 cells, 4,000
simulated studies each, Spearman correlation with a true value of 0.94 (documents alike), 0.92 (documents dominate) and
0.81 (documents of very uneven fidelity):
    percentile                     2.5 / 4.0     1.5 / 5.1     6.9 / 1.5
    BCa                            3.2 / 3.8     3.2 / 4.5     4.7 / 2.6
    t on Fisher's z                2.2 / 2.5     1.6 / 4.2     4.9 / 1.7
    studentised                    2.5 / 2.7     2.3 / 3.5     2.9 / 2.0
    studentised, not below t       1.9 / 2.3     1.5 / 3.2     2.6 / 1.6      the one used, as below
AUC of 0.6 and 0.8 (1,500 studies): used 2.1-2.7 / 2.0-2.8, t on the logit 2.3-3.1 / 2.3-2.7. Median: 1.9-2.3 / 2.7-3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit

Array = NDArray[np.float64]
Codes = NDArray[np.int64]
Statistic = Callable[[Array], Array]  # weights [b, clusters] -> values [b]
Smooth = Callable[[Array], tuple[Array, Array]]  # ... and the gradient [b, clusters]; of degree 0 in the weights
Bounds = Callable[[float], tuple[float, float]]  # level, e.g. 0.95 -> low, high


class Scale(NamedTuple):
    """A transformation on which errors are nearer to a t distribution; slope: its derivative."""

    forward: Callable[[Array], Array]
    back: Callable[[Array], Array]
    slope: Callable[[Array], Array]


IDENTITY = Scale(np.positive, np.positive, np.ones_like)
LOGIT = Scale(logit, expit, lambda x: 1 / (x * (1 - x)))
FISHER = Scale(np.arctanh, np.tanh, lambda x: 1 / (1 - x * x))


@dataclass(frozen=True)
class Interval:
    """An estimate with bounds at any level, from one bootstrap; value None: undefined, for the reason given."""

    value: float | None
    bounds: Bounds
    reason: str = ""

    @staticmethod
    def undefined(reason: str) -> "Interval":
        """An estimate that the rows do not allow."""
        return Interval(None, lambda _: (np.nan, np.nan), reason)

    def at(self, level: float) -> tuple[float, float]:
        """(low, high) with low <= value <= high at every level, on which the disjointness of rules rests."""
        low, high = self.bounds(level)
        return (low, high) if self.value is None else (min(low, self.value), max(high, self.value))


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Resamples of clusters within tasks: weights [resamples, clusters] and the task of each cluster."""

    weights: Array
    tasks: Codes

    @property
    def clusters(self) -> int:
        """Number of clusters; t has one degree of freedom less."""
        return len(self.tasks)

    @cached_property
    def ones(self) -> Array:
        """The weights of the sample itself."""
        return np.ones((1, self.clusters))

    def t(self, tail: float) -> float:
        """Quantile of t with clusters - 1 degrees of freedom that leaves `tail` above it."""
        return float(stdtrit(self.clusters - 1, 1 - tail))

    def linearised(self, gradient: Array, weights: Array) -> Array:
        """Standard errors [b] of a smooth statistic at some weights: between the clusters of a task, over tasks."""
        variance = np.zeros(len(weights))
        for task in range(self.tasks.max() + 1):
            own = self.tasks == task
            w, u, n = weights[:, own], gradient[:, own], own.sum()
            mean = (w * u).sum(1, keepdims=True) / np.maximum(w.sum(1, keepdims=True), 1)
            variance += n / max(n - 1, 1) * (w * (u - mean) ** 2).sum(1)
        return np.sqrt(variance)


def resample(tasks: Sequence[object], resamples: int, seed: int) -> Bootstrap:
    """Draw resamples of the clusters whose tasks are given; the same seed draws the same.

    Of the n clusters of a task n - 1 are drawn with replacement and weighted n / (n - 1): the variance of a mean is then
    unbiased (Rao and Wu 1988); drawing n loses 1 / n of it, half where n = 2. Tasks of one cluster are taken together.
    """
    codes = np.unique(np.asarray(tasks, str), return_inverse=True)[1].astype(np.int64)
    alone = np.bincount(codes)[codes] == 1
    if alone.any() and not alone.all():
        codes[alone] = codes[~alone][0] if alone.sum() == 1 else len(codes)
    elif alone.all():
        codes[:] = 0
    codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    rng = np.random.default_rng(seed)
    weights = np.ones((resamples, len(codes)))
    for task in range(codes.max() + 1):
        own = np.flatnonzero(codes == task)
        if (n := len(own)) > 1:
            weights[:, own] = rng.multinomial(n - 1, np.full(n, 1 / n), size=resamples) * (n / (n - 1))
    return Bootstrap(weights, codes)


def proportion(hits: Array, totals: Array, draws: int, boot: Bootstrap) -> Interval:
    """Share sum(hits) / sum(totals) of per-cluster sums: logit scale, bootstrap standard error, t quantile.

    logit(p) -+ t_{clusters - 1} se(p*) / (p (1 - p)). Nothing missed: low = ((1 - level) / 2)^(1 / draws), the exact
    bound for so many independent draws; nothing hit: its mirror image.
    """
    share = float(hits.sum() / totals.sum())
    if share in (0, 1):
        return _at_edge(share, draws)
    with np.errstate(invalid="ignore"):  # a resample without any row of these clusters counts for nothing
        return t_interval(lambda w: (w @ hits) / (w @ totals), boot, LOGIT)


def t_interval(statistic: Statistic, boot: Bootstrap, scale: Scale = IDENTITY) -> Interval:
    """g(x) -+ t_{clusters - 1} g'(x) se, where se is the standard deviation of the resamples: for differences."""
    replicates = statistic(boot.weights)
    error = float(np.std(replicates[np.isfinite(replicates)], ddof=1))
    return _bounded(statistic(boot.ones), boot, scale, lambda tail: (error * boot.t(tail), error * boot.t(tail)))


def studentised(statistic: Smooth, boot: Bootstrap, scale: Scale) -> Interval:
    """Bootstrap-t on the scale g, with the linearised standard error in each resample, nowhere narrower than t.

    q = (g(x*) - g(x)) / (g'(x*) se*(x*)); low = g(x) - max(t, q_{1 - tail}) g'(x) se(x), high likewise (Efron and
    Tibshirani 1993, section 12.5; the floor is ours, see above). Spearman takes FISHER, AUC takes LOGIT; an AUC of 0 or
    1 is bounded as a proportion of as many draws as there are clusters.
    """
    value, gradient = statistic(boot.ones)
    if scale is LOGIT and value[0] in (0, 1):
        return _at_edge(float(value[0]), boot.clusters)
    error = boot.linearised(gradient, boot.ones)[0]
    replicates, gradients = statistic(boot.weights)
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = scale.slope(replicates) * boot.linearised(gradients, boot.weights)
        q = (scale.forward(replicates) - scale.forward(value)) / errors
    q = q[np.isfinite(q)]

    def reach(tail: float) -> tuple[float, float]:
        low, high = np.quantile(q, [tail, 1 - tail]) if len(q) else (0, 0)
        return error * max(boot.t(tail), high), error * max(boot.t(tail), -low)

    return _bounded(value, boot, scale, reach)


def median(values: Array, cluster: Codes, boot: Bootstrap) -> Interval:
    """Median over cells [n]: the t interval of the share below it, read on the quantile function (Woodruff 1952)."""
    value = float(np.median(values))
    member = np.equal.outer(np.arange(boot.clusters), cluster).astype(float)
    below = (values < value) + (values == value) / 2
    share = proportion(member @ below, member.sum(1), len(values), boot)

    def bounds(level: float) -> tuple[float, float]:
        low, high = np.quantile(values, share.bounds(level))
        return float(low), float(high)

    return Interval(value, bounds if boot.clusters > 1 else share.bounds)


def _at_edge(value: float, draws: int) -> Interval:
    def bounds(level: float) -> tuple[float, float]:
        reach = ((1 - level) / 2) ** (1 / draws)
        return (reach, 1.0) if value else (0.0, 1 - reach)

    return Interval(value, bounds)


def _bounded(value: Array, boot: Bootstrap, scale: Scale, reach: Bounds) -> Interval:
    def bounds(level: float) -> tuple[float, float]:
        down, up = reach((1 - level) / 2)
        if not (down or up):
            return float(value[0]), float(value[0])  # clusters all alike, where the slope may be infinite
        low, high = (scale.back(scale.forward(value) + scale.slope(value) * by)[0] for by in (-down, up))
        return float(low), float(high)

    if not np.isfinite(value[0]):
        return Interval.undefined("not defined on these rows")
    return Interval(float(value[0]), bounds if boot.clusters > 1 else lambda _: (np.nan, np.nan))
