"""Claim 6: what the certificate gains when it chooses the requests that are answered again at twice the budget."""

from typing import Any

import pandas as pd

from analysis.estimands import Cells, Measured, measured, number
from analysis.requests import Draws, arm, records
from analysis.schedule import Schedule
from analysis.verdict import Stratum
from runs.registry import Claim


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per context length: gain in score of escalating a fraction chosen by the certificate, minus chosen at random.

    Beside it the best possible choice (no room where it could not gain either), confidence, and the agnostic arms.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    fraction = number(claim, "fraction")
    plan, agnostic = (_plan(cells, claim, mode, draws) for mode in (str(claim.params["mode"]), "agnostic"))
    oracle = plan.difference("oracle", "random", fraction)
    most = oracle.at(number(claim, "level"))[1]
    room = f"no room: the best choice of all gains at most {most:.4f} more than chance"
    beside = {
        "oracle_difference": oracle,
        "confidence_difference": plan.difference("confidence", "random", fraction),
        "gain_difference_agnostic": agnostic.difference("certificate", "random", fraction),
        **plan.beside(fraction),
        "notes": [room] if most < number(claim, "no_room") else [],
    }
    return plan.found.stratum(claim, {"gain_difference": plan.difference("certificate", "random", fraction)}), beside


def _plan(cells: Cells, claim: Claim, mode: str, draws: Draws) -> Schedule:
    before, after = (arm(cells.rows, "poisson", mode, [number(claim, key)]) for key in ("budget", "escalated_budget"))
    return Schedule(records(cells, before, after=after), (number(claim, "fraction"),), draws)
