"""Claim 4: what eviction costs in score against the full cache."""

from typing import Any

import pandas as pd

from analysis.estimands import Cells, Measured, measured, number
from analysis.requests import Draws, arm, records
from analysis.verdict import Stratum
from runs.registry import Claim


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per context length: mean over tasks of the mean score difference of pairs, full minus poisson.

    The full cache's score is that of its first run. Beside it the same at the larger budget.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    full, mode, larger = arm(cells.rows, "full", "full"), str(claim.params["mode"]), number(claim, "beside_budget")
    found, other = (
        records(cells, arm(cells.rows, "poisson", mode, [at]), full=full) for at in (number(claim, "budget"), larger)
    )
    beside = {
        f"difference_{100 * larger:g}": other.difference("official_full", "official", draws),
        "score": found.means(full="official_full", poisson="official"),
        "left_out": {"failed pairs": found.failed},
    }
    return found.stratum(claim, {"difference": found.difference("official_full", "official", draws)}), beside
