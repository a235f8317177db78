"""Extension 6: coverage in the worst layer and head, of the certificate assisted by the anticipated variance."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.estimands import Cells, Measured, measured, number
from analysis.estimands.coverage import by_head, covered, draws
from analysis.estimands.fidelity import correlation
from analysis.intervals import Interval, median
from analysis.verdict import Stratum
from analysis.weighted import rank_correlation
from runs.registry import Claim

PLAIN = "radius_empirical_bernstein"


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per budget: pooled and worst-head coverage, median radius over the plain one, and Spearman, all assisted.

    Every head, and the same of the plain certificate, stand beside.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, resamples, seed))


def _stratum(cells: Cells, claim: Claim, resamples: int, seed: int) -> tuple[Stratum, dict[str, Any]]:
    slack, rule = number(claim, "slack"), f"radius_{claim.params['rule']}"
    hit = {name: covered(cells, cells[column], slack) for name, column in (("assisted", rule), ("plain", PLAIN))}
    boot, n_draws = cells.bootstrap(resamples, seed), draws(cells)
    ranked = cells.only(np.isfinite(cells[rule]))
    measures = {
        "coverage": cells.share(hit["assisted"], n_draws, boot),
        "worst_head": worst(cells, hit["assisted"], resamples, seed),
        "radius_ratio": _ratio(cells, rule, resamples, seed),
        "spearman": correlation(ranked, rule, resamples, seed),
    }
    known = np.isfinite(cells[PLAIN])
    beside = {
        "coverage_plain": cells.share(hit["plain"], n_draws, boot),
        "worst_head_plain": worst(cells, hit["plain"], resamples, seed),
        "spearman_plain": rank_correlation(cells[PLAIN][known], cells["err"][known]),
        "heads": by_head(cells, hit),
        "undefined": len(cells) - len(ranked),
    }
    return Stratum(cells.name, measures, len(cells), boot.clusters), beside


def worst(cells: Cells, hit: NDArray[np.bool_], resamples: int, seed: int) -> Interval:
    """The smallest share of hits over the layers and heads of all models.

    Bounds: the smallest low and the smallest high of all heads at once, each at level 1 - (1 - level) / heads
    (Bonferroni): the head that looks worst was chosen for looking so.
    """
    shares = []
    for _, rows in cells.groups("model"):
        model, mine = Cells(cells.name, cells.rows.iloc[rows], cells.by), hit[rows]
        boot = model.bootstrap(resamples, seed)
        for _, own in model.groups("layer", "head"):
            shares.append(model.share_of(own, mine, len(np.unique(model.cluster[own])), boot))

    def bounds(level: float) -> tuple[float, float]:
        ends = [share.at(1 - (1 - level) / len(shares)) for share in shares]
        return min(low for low, _ in ends), min(high for _, high in ends)

    return Interval(min(share.value for share in shares if share.value is not None), bounds)


def _ratio(cells: Cells, rule: str, resamples: int, seed: int) -> Interval:
    both = cells.only(np.isfinite(cells[rule]) & (cells[PLAIN] > 0))
    if not len(both):
        return Interval.undefined("no cell has both radii")
    return median(both[rule] / both[PLAIN], both.cluster, both.bootstrap(resamples, seed))
