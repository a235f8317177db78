"""Statistics as functions of cluster weights: evaluated on all resamples at once, from sums per cluster or pair."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from analysis.intervals import Array, Codes, Smooth, Statistic

MAX_CLUSTERS = 128  # of a rank correlation, whose forms grow with their cube
BATCH = 2**22  # doubles in flight


def task_mean(sums: Array, totals: Array, tasks: Codes) -> Statistic:
    """Mean over tasks of the mean within each, from per-cluster sums and counts [clusters] and the clusters' tasks."""
    member = np.equal.outer(np.arange(tasks.max() + 1), tasks)
    return lambda weights: ((weights @ (member * sums).T) / (weights @ (member * totals).T)).mean(1)


def combination(parts: Sequence[tuple[float, Smooth]]) -> Smooth:
    """Linear combination of smooth statistics: the difference of two AUCs, the mean of several."""

    def evaluate(weights: Array) -> tuple[Array, Array]:
        terms = [(factor * value, factor * slope) for factor, part in parts for value, slope in [part(weights)]]
        return reduce(lambda one, other: (one[0] + other[0], one[1] + other[1]), terms)

    return evaluate


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman correlation with midranks; NaN where x or y is constant or has fewer than two values."""
    if len(x) < 2:
        return np.nan
    rx, ry = (_midranks(values) - (len(values) + 1) / 2 for values in (x, y))
    scale = np.sqrt((rx @ rx) * (ry @ ry))
    return float(rx @ ry / scale) if scale else np.nan


def _midranks(values: Array) -> Array:
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right") + 1) / 2


def spearman(x: Array, y: Array, cluster: Codes) -> Smooth:
    """Spearman correlation of cells x, y [n] with midranks, as a function of the weights of their clusters [n].

    In a resample the centred midrank of cell i is sum_c w_c A_ic - W / 2: A_ic counts the cells of cluster c below i
    (ties 1/2), W all cells. So the sum of the products of two ranks is a cubic form in the weights, of size clusters^3
    whatever the number of cells (at most MAX_CLUSTERS); the sum of the squares of one is (W^3 - sum of t^3) / 12 over
    groups of tied cells of weight t.
    """
    size = np.bincount(cluster).astype(float)
    first, second = np.triu_indices(len(size))
    cube = _cubic_form(_counts_below(x, cluster), _counts_below(y, cluster), cluster)[first, second]
    cube *= np.where(first == second, 1, 2)[:, None]  # [pairs of clusters, clusters]
    squares_x, squares_y = _rank_squares(x, cluster), _rank_squares(y, cluster)

    def batch(w: Array) -> tuple[Array, Array]:
        slope, total = (w[:, first] * w[:, second]) @ cube, w @ size
        products = (slope * w).sum(1) - total**3 / 4
        (xx, slope_x), (yy, slope_y) = squares_x(w), squares_y(w)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = products / np.sqrt(xx * yy)
            relative = 3 * (slope - np.outer(total**2 / 4, size)) / products[:, None]
            return value, value[:, None] * (relative - slope_x / (2 * xx[:, None]) - slope_y / (2 * yy[:, None]))

    def evaluate(weights: Array) -> tuple[Array, Array]:
        step = max(1, BATCH // len(first))
        done = [batch(weights[i : i + step]) for i in range(0, len(weights), step)]
        return np.concatenate([value for value, _ in done]), np.concatenate([slope for _, slope in done])

    return evaluate


def _counts_below(values: Array, cluster: Codes) -> Array:
    columns = [np.sort(values[cluster == c]) for c in range(cluster.max() + 1)]
    return np.stack([(np.searchsorted(c, values) + np.searchsorted(c, values, "right")) / 2 for c in columns], axis=1)


def _cubic_form(p: Array, q: Array, cluster: Codes) -> Array:
    """Symmetric [clusters, clusters, clusters] with form(w, w, w) = sum over cells of w_c (p w) (q w)."""
    form = np.stack([p[cluster == c].T @ q[cluster == c] for c in range(cluster.max() + 1)])
    form = (form + form.transpose(0, 2, 1)) / 2
    return (form + form.transpose(1, 0, 2) + form.transpose(2, 1, 0)) / 3


def _rank_squares(values: Array, cluster: Codes) -> Smooth:
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    size, alone = np.bincount(cluster).astype(float), count[group] == 1
    single = np.bincount(cluster[alone], minlength=len(size)).astype(float)
    tied = np.zeros((len(count), len(size)))
    np.add.at(tied, (group[~alone], cluster[~alone]), 1.0)
    tied = tied[count > 1].T  # [clusters, groups]

    def evaluate(w: Array) -> tuple[Array, Array]:
        total, weight = w @ size, w @ tied
        squares = total**3 - w**3 @ single - (weight**3).sum(1)
        return squares / 12, (np.outer(total**2, size) - w**2 * single - weight**2 @ tied.T) / 4

    return evaluate


def auc(score: Array, positive: NDArray[np.bool_], cell: Codes, cluster: Codes, clusters: int) -> tuple[Smooth, int]:
    """Pair-weighted AUC: concordant pairs over all pairs, both summed over cells (model x task x budget), ties 1/2.

    score: high where positive is expected; pairs are formed within a cell only. Also returned: the number of one-class
    cells, which have no pair. NaN where there is no pair at all.
    """
    concordant, pairs, one_class = np.zeros((clusters, clusters)), np.zeros((clusters, clusters)), 0
    for own in (cell == c for c in np.unique(cell)):
        up, down = own & positive, own & ~positive
        one_class += not (up.any() and down.any())
        wins = np.greater.outer(score[up], score[down]) + np.equal.outer(score[up], score[down]) / 2
        place = np.ix_(cluster[up], cluster[down])
        np.add.at(concordant, place, wins)
        np.add.at(pairs, place, 1.0)

    def evaluate(weights: Array) -> tuple[Array, Array]:
        won, of = weights @ (concordant + concordant.T), weights @ (pairs + pairs.T)  # gradients of the two forms
        total = (of * weights).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = (won * weights).sum(1) / total
            return value, 2 * (won - value[:, None] * of) / total[:, None]

    return evaluate, one_class
