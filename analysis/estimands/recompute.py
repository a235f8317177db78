"""Extension 1: what the certificate gains when it chooses the requests that are answered again with the full cache."""

from typing import Any

import pandas as pd

from analysis.estimands import Cells, Measured, measured, number
from analysis.requests import Draws, arm, budgets, records
from analysis.schedule import Schedule
from analysis.verdict import Stratum
from runs.registry import Claim

OVER = {"over_random": "random", "over_confidence": "confidence"}


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per context length: gain in score of recomputing a fraction chosen by the certificate, over chance and confidence.

    Beside it other fractions, and the ratio to chance where chance gains anything for certain.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    own = arm(cells.rows, "poisson", str(claim.params["mode"]), budgets(claim))
    found = records(cells, own, after=arm(cells.rows, "full", "full"))
    fraction, others = number(claim, "fraction"), budgets(claim, "beside_fractions")
    plan = Schedule(found, (fraction, *others), draws)
    beside = plan.beside(fraction)
    gain, chance = beside["gain"], beside["gain"]["random"]
    certain = chance.at(number(claim, "level"))[0] > 0
    beside = {
        **{
            f"{name}_{100 * at:g}": plan.difference("certificate", rival, at)
            for at in others
            for name, rival in OVER.items()
        },
        "ratio_to_random": gain["certificate"].value / chance.value if certain else None,
        "ratio_to_random_confidence": gain["confidence"].value / chance.value if certain else None,
    } | beside
    measures = {name: plan.difference("certificate", rival, fraction) for name, rival in OVER.items()}
    return found.stratum(claim, measures), beside
