"""Receiver operating characteristics whose area is the pair-weighted AUC that is judged."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from analysis.compared import Compared, compared
from analysis.estimands import Cells, number
from analysis.estimands.attribution import answers
from analysis.intervals import Array, Codes
from analysis.requests import Draws, Mask, Records, arm, blame, budgets, records, signal, with_threshold
from runs.registry import Claim

# A policy's signals, each with the signal that an answer must have: the two of a claim are compared on the same answers.
SIGNALS = {
    "poisson": {"certificate": "certificate", "logprob": "certificate"},
    "topk": {"entropy": "entropy", "margin": "margin"},
}


class Curve(NamedTuple):
    """What a signal of a policy tells apart, and the true positive rate over the false one, from (0, 0) to (1, 1)."""

    policy: str
    signal: str
    of: Compared
    false: Array
    true: Array


def curves(cells: Cells, claim: Claim, draws: Draws) -> Iterator[Curve]:
    """The curves of claim 5 (failure against success) or claim 7 (induced against inherent failure) in a stratum."""
    for policy, names in SIGNALS.items():
        found, up, use = _classes(cells, claim, policy)
        for name, needed in names.items():
            two = compared(found.cells, up, use & ~np.isnan(signal(found.cells.rows, needed)), draws)
            if len(two.cells):
                yield Curve(policy, name, two, *averaged(signal(two.cells.rows, name), two.positive, two.code))


def _classes(cells: Cells, claim: Claim, policy: str) -> tuple[Records, Mask, Mask]:
    """A policy's answers, those of the class a signal should raise, and those of either class."""
    rows, success = with_threshold(cells.rows, claim), number(claim, "success")
    if claim.estimand == "prediction":
        found = records(cells, arm(rows, policy, str(claim.params["mode"]), budgets(claim)))
        return found, found.cells["official"] < success, np.ones(len(found.cells), dtype=bool)
    found = answers(cells, rows, claim, policy)
    induced, inherent, _ = blame(found.cells, success)
    return found, induced, induced | inherent


def averaged(score: Array, positive: Mask, code: Codes) -> tuple[Array, Array]:
    """(false, true) of the mean over cells of their ROC at each false positive rate, weighted by their pairs.

    Vertical averaging (Fawcett 2006, section 9.1): since all cells share the axis, the area below the mean is the mean of
    the areas, AUC = sum_c pairs_c AUC_c / sum_c pairs_c. A rate stands twice where the mean jumps. Every cell has both
    classes.
    """
    own = [code == c for c in np.unique(code)]
    each = [_rates(score[cell], positive[cell]) for cell in own]
    pairs = [float(positive[cell].sum() * (~positive[cell]).sum()) for cell in own]
    false = np.unique(np.concatenate([rate for rate, _ in each]))
    ends = np.stack([_ends(false, *one) for one in each])  # [cells, rates, 2]
    return np.repeat(false, 2), np.average(ends, axis=0, weights=pairs).ravel()


def _rates(score: Array, positive: Mask) -> tuple[Array, Array]:
    """(false, true) positive rates of one cell as the threshold falls past each distinct score."""
    _, rank = np.unique(-score, return_inverse=True)
    down, up = (np.concatenate([[0.0], np.cumsum(np.bincount(rank, of))]) for of in (~positive, positive))
    return down / down[-1], up / up[-1]


def _ends(at: Array, false: Array, true: Array) -> Array:
    """Lower and upper end [n, 2] at some rates of a curve that rises over its sorted false positive rates."""
    rate, first, count = np.unique(false, return_index=True, return_counts=True)
    low, high = true[first], true[first + count - 1]
    place = np.searchsorted(rate, at, "right") - 1
    on, after = rate[place] == at, np.minimum(place + 1, len(rate) - 1)
    width = np.where(on, 1, rate[after] - rate[place])
    between = high[place] + (low[after] - high[place]) * (at - rate[place]) / width
    return np.stack([np.where(on, low[place], between), np.where(on, high[place], between)], axis=1)
