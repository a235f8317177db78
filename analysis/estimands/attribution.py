"""Claim 7: among failures, whether a signal tells those that eviction induced from those the model has anyway."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.compared import certified, compared, counted, flagged
from analysis.estimands import Cells, Measured, measured, number
from analysis.intervals import Interval
from analysis.requests import (
    REQUEST,
    Draws,
    Records,
    arm,
    blame,
    budgets,
    disagreement,
    records,
    signal,
    with_threshold,
)
from analysis.verdict import Stratum
from runs.registry import Claim

PANEL = {"poisson": ("certificate", "logprob"), "topk": ("entropy", "margin", "logprob")}
RIVALS = {  # what might explain the certificate away: its AUC's name -> the signal
    "auc_logprob": "logprob", "auc_assisted": "certificate_assisted", "auc_ctx_tokens": "prompt_tokens",
    "auc_answer_tokens": "answer_tokens", "auc_full_logprob": "logprob_full",
}  # fmt: skip


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per context length: AUC(certificate), induced against inherent failures, and its difference to AUC(-logprob).

    Beside it what might explain it away, the AUC pooled over cells, DeLong's intervals, the noise floor, and the panel
    of what a deterministic policy has to signal its own failures.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    success, rows = number(claim, "success"), with_threshold(cells.rows, claim)
    found, topk = (answers(cells, rows, claim, policy) for policy in PANEL)
    induced, inherent, discordant = blame(found.cells, success)
    use = (induced | inherent) & certified(found)
    two, pooled = compared(found.cells, induced, use, draws), compared(found.cells, induced, use, draws, within=())
    asked = len(rows.loc[rows["policy"] == "full", REQUEST].drop_duplicates())
    beside = {name: two.auc(of) for name, of in RIVALS.items()} | {
        "auc_pooled": pooled.auc("certificate"),
        "auc_delong": two.delong("certificate"),
        "auc_difference_delong": two.delong("certificate", "logprob"),
        "panel_poisson": panel(found, PANEL["poisson"], success, draws),
        "panel_topk": panel(topk, PANEL["topk"], success, draws),
        "flagged": flagged(found),
        "full_runs": 1 + int(np.isfinite(found.cells["official_again"]).any()),
        **({} if (noise := disagreement(rows, success)) is None else {"draw_noise": noise}),
        "left_out": counted(found, two) | {
            "discordant full runs": int(discordant.sum()),
            "successes": int((found.cells["official"] >= success).sum()),
            "no question-agnostic arms": asked - len(rows.loc[rows["mode"] == "agnostic", REQUEST].drop_duplicates()),
        },
    }  # fmt: skip
    measures = {"auc": two.auc("certificate"), "auc_difference": two.difference("certificate", "logprob")}
    size, classes = (len(two.cells), len(two.cells.tasks)), two.count("induced", "inherent")
    return Stratum(cells.name, measures, *size, classes, found.obstacles(claim)), beside


def answers(cells: Cells, rows: pd.DataFrame, claim: Claim, policy: str) -> Records:
    """A policy's answers with those of both runs of the full cache, where there are two."""
    own = arm(rows, policy, str(claim.params["mode"]), budgets(claim))
    return records(cells, own, full=arm(rows, "full", "full"), again=arm(rows, "full", "full", draw=1))


def panel(found: Records, names: Sequence[str], success: float, draws: Draws) -> dict[str, dict[str, Interval]]:
    """The AUC of each signal, failure against success and induced against inherent; a null signal is in no pair."""
    cells, (induced, inherent, _) = found.cells, blame(found.cells, success)
    kinds = {"failure": (cells["official"] < success, np.ones_like(induced)), "induced": (induced, induced | inherent)}
    known = {name: ~np.isnan(signal(cells.rows, name)) for name in names}
    return {
        name: {kind: compared(cells, up, use & known[name], draws).auc(name) for kind, (up, use) in kinds.items()}
        for name in names
    }
