"""Claim 3: what sampling costs in score against top-k that keeps as many tokens."""

from typing import Any

import numpy as np
import pandas as pd

from analysis.estimands import Cells, Measured, measured, number
from analysis.requests import Draws, Records, arm, records
from analysis.verdict import Stratum
from runs.registry import Claim


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per context length and budget: mean over tasks of the mean score difference of pairs, poisson minus top-k.

    Beside it the question-agnostic arms, and the realised budgets of both, which should be equal.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    found, agnostic = _pairs(cells, str(claim.params["mode"])), _pairs(cells, "agnostic")
    kept = found.means(poisson="realised_budget", topk="realised_budget_topk")
    gap = abs(kept["poisson"] / kept["topk"] - 1) if kept else np.nan
    beside = {
        "difference_agnostic": agnostic.difference("official", "official_topk", draws),
        "score": found.means(poisson="official", topk="official_topk"),
        "score_agnostic": agnostic.means(poisson="official", topk="official_topk"),
        "realised": kept,
        "left_out": {"failed pairs": found.failed},
        "notes": [f"the arms are not at equal budget: they differ by {gap:.1%}"]
        if gap > number(claim, "budget_gap")
        else [],
    }
    return found.stratum(claim, {"difference": found.difference("official", "official_topk", draws)}), beside


def _pairs(cells: Cells, mode: str) -> Records:
    return records(cells, arm(cells.rows, "poisson", mode), topk=arm(cells.rows, "topk", mode))
