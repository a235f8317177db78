"""Two classes of answers and the signals that should tell them apart: pair-weighted AUCs, clustered and by DeLong."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analysis.delong import delong, normal_interval
from analysis.estimands import Cells
from analysis.intervals import LOGIT, Array, Bootstrap, Codes, Interval, Smooth, studentised, t_interval
from analysis.requests import Draws, Mask, Records, signal
from analysis.weighted import auc, combination

CELL = ("model", "task", "budget")
NO_PAIR = Interval.undefined("no cell has both classes")


@dataclass(frozen=True, eq=False)
class Compared:
    """Answers of two classes, in the cells that hold both; positive: those a signal should raise.

    code: the cell of each answer. without_pair: cells that lack a class or both; undefined, they weigh nothing.
    """

    cells: Cells
    positive: Mask
    code: Codes
    without_pair: int
    draws: Draws

    @cached_property
    def boot(self) -> Bootstrap:
        """Resamples of the clusters within task."""
        return self.cells.bootstrap(*self.draws)

    def count(self, positive: str, negative: str) -> dict[str, int]:
        """Answers of each class by its name."""
        up = int(self.positive.sum())
        return {positive: up, negative: len(self.cells) - up}

    def smooth(self, score: Array) -> Smooth:
        """The AUC of a score [n] as a function of the clusters' weights; an answer whose score is NaN is in no pair."""
        known, cluster = ~np.isnan(score), self.cells.cluster
        return auc(score[known], self.positive[known], self.code[known], cluster[known], self.boot.clusters)[0]

    def auc(self, name: str) -> Interval:
        """The pair-weighted AUC of a signal, studentised on the logit scale."""
        smooth = self._smooths(name)
        return studentised(smooth[0], self.boot, LOGIT) if smooth else NO_PAIR

    def difference(self, one: str, other: str) -> Interval:
        """The AUC of one signal minus that of another, t on the plain scale."""
        if not (smooth := self._smooths(one, other)):
            return NO_PAIR
        gap = combination(list(zip((1.0, -1.0), smooth, strict=True)))
        return t_interval(lambda weights: gap(weights)[0], self.boot)

    def delong(self, *names: str) -> Interval:
        """The interval that takes answers for independent: of one AUC, or of the difference of two."""
        if not len(self.cells):
            return NO_PAIR
        value, cov = delong([signal(self.cells.rows, name) for name in names], self.positive, self.code)
        sign = np.array([1.0, -1.0])[: len(names)]
        return normal_interval(float(sign @ value), float(sign @ cov @ sign))

    def _smooths(self, *names: str) -> list[Smooth]:
        return [self.smooth(signal(self.cells.rows, name)) for name in names] if len(self.cells) else []


def compared(cells: Cells, positive: Mask, use: Mask, draws: Draws, within: Sequence[str] = CELL) -> Compared:
    """The two classes among the answers where `use` is true, in cells made by `within` (none: one cell, all pooled)."""
    code: Codes = np.zeros(len(cells), dtype=np.int64)
    if within and len(cells):
        code[:] = cells.rows.groupby(list(within)).ngroup()
    cell_count = len(np.unique(code))
    ups, size = (np.bincount(code, use & of, cell_count) for of in (positive, np.ones_like(use)))
    both = (ups > 0) & (ups < size)
    own = use & both[code]
    return Compared(cells.only(own), positive[own], code[own], cell_count - int(both.sum()), draws)


def certified(found: Records) -> Mask:
    """The answers that have a certificate: both signals of a claim are compared on these."""
    return ~np.isnan(signal(found.cells.rows, "certificate"))


def counted(found: Records, two: Compared) -> dict[str, int]:
    """What no AUC was made of."""
    uncertified = int((~certified(found)).sum())
    return {
        f"failed {found.unit}": found.failed,
        "no certificate": uncertified,
        "cells without a pair": two.without_pair,
    }


def flagged(found: Records) -> int:
    """Answers that rank highest because over a tenth of their steps is undefined."""
    return int(np.isinf(signal(found.cells.rows, "certificate")).sum())
