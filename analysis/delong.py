"""DeLong's variance of AUCs, which takes every answer for independent: a check on the clustered intervals."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from analysis.intervals import Array, Codes, Interval


def delong(scores: Sequence[Array], positive: NDArray[np.bool_], cell: Codes) -> tuple[Array, Array]:
    """Pair-weighted AUCs [k] of scores [k, n], and their covariance [k, k] if the answers were independent.

    Within a cell of m positives and n negatives psi_ij = 1 (x_i > y_j), 1/2 (=), 0; cov = S(psi_i.) / m + S(psi_.j) / n
    (DeLong, DeLong and Clarke-Pearson 1988); cells are weighted by their pairs. A class of one in a cell adds nothing.
    """
    value, covariance, pairs = np.zeros(len(scores)), np.zeros((len(scores), len(scores))), 0
    for own in (cell == c for c in np.unique(cell)):
        up, down = own & positive, own & ~positive
        psi = np.stack([np.greater.outer(s[up], s[down]) + np.equal.outer(s[up], s[down]) / 2 for s in scores])
        of = psi[0].size
        value += of * psi.mean((1, 2))
        for part in (psi.mean(2), psi.mean(1)):
            away, size = part - part.mean(1, keepdims=True), part.shape[1]
            covariance += of**2 * (away @ away.T) / (size * max(size - 1, 1))
        pairs += of
    return value / pairs, covariance / pairs**2


def normal_interval(value: float, variance: float) -> Interval:
    """x -+ z sd."""
    reach = float(np.sqrt(variance))
    return Interval(
        value, lambda level: (value - ndtri((1 + level) / 2) * reach, value + ndtri((1 + level) / 2) * reach)
    )
