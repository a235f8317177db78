"""Scheduling: the requests that a signal ranks worst are answered again at a cost, and what that gains in score."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from analysis.intervals import Array, Bootstrap, Codes, Interval, Statistic, t_interval
from analysis.requests import Draws, Records, signal
from analysis.weighted import BATCH

GROUP = ["model", "ctx_tokens", "budget"]  # requests are ranked within one
SIGNALS = ("certificate", "confidence", "oracle", "random")
CURVE = np.round(np.linspace(0.05, 1, 20), 2)  # fractions at which a figure shows the gain


def gains(score: Array, change: Array, cluster: Codes, weights: Array, fractions: Array) -> Array:
    """Gain [b, fractions] of answering again the requests with the highest scores, in one group.

    In a resample request i has the weight w_i of its cluster. In the order of the scores a total weight of f sum w is
    taken, the request at the boundary in part, ties in equal shares; gain = sum taken_i change_i / sum w_i. A NaN score
    ranks last. The order is the same in every resample, so that weights are only summed along it.
    """
    last = np.where(np.isnan(score), -np.inf, score)
    order = np.argsort(-last, kind="stable")
    ranked = last[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    step = max(1, BATCH // len(order))
    return np.concatenate(
        [_taken(weights[i : i + step][:, cluster[order]], change[order], starts, fractions)
         for i in range(0, len(weights), step)]
    )  # fmt: skip


def _taken(weight: Array, change: Array, starts: Codes, fractions: Array) -> Array:
    tied, won = (np.add.reduceat(values, starts, axis=1) for values in (weight, weight * change))  # [b, blocks]
    below, gained = np.cumsum(tied, axis=1), np.cumsum(won, axis=1)
    total, row = below[:, -1], np.arange(len(weight))
    found = np.empty((len(weight), len(fractions)))
    for k, fraction in enumerate(fractions):
        at = (below < fraction * total[:, None]).sum(1)  # where the boundary falls
        with np.errstate(invalid="ignore"):  # nothing of the group was drawn: that resample counts for nothing
            inside = (fraction * total - below[row, at] + tied[row, at]) / tied[row, at]
            found[:, k] = (gained[row, at] + (inside - 1) * won[row, at]) / total
    return found


@dataclass(frozen=True, eq=False)
class Schedule:
    """Pairs with their score before (`official`) and after (`official_after`), and the fractions answered again.

    A gain is the mean over groups (model, context length, budget). The choices: by certificate, by confidence, at
    random (the fraction of the mean change), and the best possible of that size (oracle).
    """

    found: Records
    fractions: tuple[float, ...]
    draws: Draws
    _known: dict[tuple[str, int], Array] = field(default_factory=dict)

    @cached_property
    def boot(self) -> Bootstrap:
        """Resamples of the clusters within task."""
        return self.found.cells.bootstrap(*self.draws)

    def difference(self, one: str, other: str, fraction: float) -> Interval:
        """Gain of one choice minus that of another, t on the plain scale; ranks are taken anew in every resample."""
        return self._interval(lambda w: self._gain(one, fraction, w) - self._gain(other, fraction, w))

    def gain(self, choice: str, fraction: float) -> Interval:
        """Gain in mean score of one choice."""
        return self._interval(lambda w: self._gain(choice, fraction, w))

    def beside(self, fraction: float) -> dict[str, Any]:
        """Every choice's gain at a fraction and, without intervals, at all; pairs left out, ranked last or first."""
        certificate = signal(self.found.cells.rows, "certificate")
        curve = {name: [0.0, *self._mean(name, self.boot.ones, CURVE)[0]] for name in SIGNALS if len(certificate)}
        return {
            "gain": {name: self.gain(name, fraction) for name in SIGNALS},
            "curve": {"at": [fraction], "share": [0.0, *CURVE]} | curve,
            "ranked_last": int(np.isnan(certificate).sum()),
            "flagged": int(np.isinf(certificate).sum()),
            "left_out": {"failed pairs": self.found.failed},
        }

    def _interval(self, statistic: Statistic) -> Interval:
        return t_interval(statistic, self.boot) if len(self.found.cells) else Interval.undefined("no whole pair")

    def _gain(self, choice: str, fraction: float, weights: Array) -> Array:
        key = (choice, len(weights))  # the sample itself, or all resamples
        if key not in self._known:
            self._known[key] = self._mean(choice, weights, np.array(self.fractions))
        return self._known[key][:, self.fractions.index(fraction)]

    def _mean(self, choice: str, weights: Array, fractions: Array) -> Array:
        cells = self.found.cells
        change = cells["official_after"] - cells["official"]
        score = {"oracle": change, "random": np.zeros(len(cells))}.get(choice)
        score = signal(cells.rows, {"confidence": "logprob"}.get(choice, choice)) if score is None else score
        parts = [
            gains(score[own], change[own], cells.cluster[own], weights, fractions) for _, own in cells.groups(*GROUP)
        ]
        mean: Array = np.mean(parts, axis=0)
        return mean
