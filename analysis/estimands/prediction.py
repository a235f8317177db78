"""Claim 5: whether the certificate predicts a wrong answer better than the log-probability of the answer does."""

from typing import Any

import pandas as pd

from analysis.compared import certified, compared, counted, flagged
from analysis.estimands import Cells, Measured, measured, number
from analysis.requests import Draws, arm, budgets, records, with_threshold
from analysis.verdict import Stratum
from runs.registry import Claim


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per context length: AUC(certificate) - AUC(-logprob), failure against success, pairs within model, task, budget.

    Both AUCs are of the same answers, those with a certificate. Beside it each AUC, both pooled over all cells, and the
    interval of DeLong's formula.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    every = arm(cells.rows, "poisson", str(claim.params["mode"]), budgets(claim))
    own = every[every.index.isin(with_threshold(cells.rows, claim).index)]
    found = records(cells, own)
    wrong, use = found.cells["official"] < number(claim, "success"), certified(found)
    two, pooled = compared(found.cells, wrong, use, draws), compared(found.cells, wrong, use, draws, within=())
    beside = {
        "auc": two.auc("certificate"),
        "auc_logprob": two.auc("logprob"),
        "auc_assisted": two.auc("certificate_assisted"),
        "auc_pooled": pooled.auc("certificate"),
        "auc_logprob_pooled": pooled.auc("logprob"),
        "auc_difference_delong": two.delong("certificate", "logprob"),
        "flagged": flagged(found),
        "left_out": counted(found, two) | {"tasks without threshold": len(every) - len(own)},
    }
    measures, classes = {"auc_difference": two.difference("certificate", "logprob")}, two.count("failures", "successes")
    return Stratum(cells.name, measures, len(two.cells), len(two.cells.tasks), classes, found.obstacles(claim)), beside
