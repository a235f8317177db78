"""Claim 2: how well the certificate ranks cells by their true attention error."""

from typing import Any

import numpy as np
import pandas as pd

from analysis.estimands import Cells, Measured, measured
from analysis.estimands.coverage import HEAD, facts, leave_one_out
from analysis.intervals import FISHER, Array, Interval, studentised
from analysis.verdict import Stratum
from analysis.weighted import MAX_CLUSTERS, rank_correlation, spearman
from runs.registry import Claim


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Spearman correlation of radius and err over the cells of each stratum (model x budget).

    Undefined radii are left out and counted. Beside it: the mean within layer and head, where nothing is gained by
    telling heads apart, and a constant per layer and head, which tells nothing else.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, f"radius_{claim.params['rule']}", resamples, seed))


def _stratum(cells: Cells, rule: str, resamples: int, seed: int) -> tuple[Stratum, dict[str, Any]]:
    ranked = cells.only(np.isfinite(cells[rule]))
    measures = {"spearman": correlation(ranked, rule, resamples, seed)}
    beside = _beside(ranked, rule) | {"undefined": len(cells) - len(ranked), **facts(cells)}
    return Stratum(cells.name, measures, len(ranked), len(ranked.tasks)), beside


def correlation(cells: Cells, rule: str, resamples: int, seed: int) -> Interval:
    """Spearman correlation of a radius and err, studentised on Fisher's z over clusters.

    More clusters than MAX_CLUSTERS are resampled in that many groups: the interval is wider, never narrower.
    """
    if np.isnan(rank_correlation(cells[rule], cells["err"])):
        return Interval.undefined("all radii or all errors are equal, or none is defined")
    grouped = Cells(cells.name, cells.rows.assign(group=cells.cluster % MAX_CLUSTERS), "group")
    boot = grouped.bootstrap(resamples, seed)
    return studentised(spearman(cells[rule], cells["err"], grouped.cluster), boot, FISHER)


def _beside(cells: Cells, rule: str) -> dict[str, Any]:
    radius, err = cells[rule], cells["err"]
    heads = [{**dict(zip(HEAD, key, strict=True)), "n": len(own), "spearman": rank_correlation(radius[own], err[own])}
             for key, own in cells.groups(*HEAD)]  # fmt: skip
    constant = leave_one_out(cells, 0.5)
    known = np.isfinite(constant)
    return {
        "spearman_within": _mean(np.array([head["spearman"] for head in heads])),
        "spearman_constant": rank_correlation(constant[known], err[known]),
        "spearman_head": heads,
    }


def _mean(values: Array) -> float | None:
    return float(np.nanmean(values)) if np.isfinite(values).any() else None
