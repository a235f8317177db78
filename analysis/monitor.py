"""Coverage watched while conversations come in: a bet across conversations, a weighted sum within each. No torch.

`monitored(rows)` takes the rows of one model and one system with certificates ("poisson"), in the order of the plan, a
row a question, with the columns
    document           the conversation: its questions share one draw of coins, so it is one unit and one trajectory
    status             "failed" rows have no steps; they are left out and counted
    audited            bool: the conversation's audit coin, of one known probability for all, tossed before anything of it
                       is seen; the same on all of its rows
    miss_steps         where audited, a JSON list with a number an answer step: the share of the step's heads (all
                       compressed layers) whose served error is above the radius of level delta, an undefined radius
                       counted as a miss; null elsewhere
    miss_steps_strict  the same steps against the radius of level delta / STRICT
and returns numbers, lists and mappings alone, to stand under a stratum's `beside`: there the numbers are printed, and
the two lists of paths are for figures_monitor.

Across: M_t = mean of miss_steps over all steps of conversation t, into cert.eprocess.EProcess: conversations must be
independent draws. Within: cert.eprocess.weighted_sum of miss_steps_strict over all steps of a conversation, one question
after another, whatever their dependence. Each conversation's sum has its own level eta, and so has each of the two bets.
Both watch served errors, for which no design guarantees the level: they test it.
"""

import json
from math import log
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cert.eprocess import EProcess, weighted_sum
from runs.errors import UserError

STRICT = 10  # delta / STRICT is well below eta: a sum of e-values of at most STRICT / delta must be able to alarm
LN10 = log(10)


def monitored(rows: pd.DataFrame, delta: float = 0.05, eta: float = 0.05) -> dict[str, Any]:
    """Both monitors over these rows; see the module for the columns.

    log10_alarm, log10_evidence, log10_trajectory: the largest each e-value ever was, against log10_threshold = 1/eta;
    betting: a path over audited conversations; trajectories: for each, where its sum rose and to what.
    Raises UserError for a coin that changes within a conversation and for lists that are none of shares, naming it.
    """
    ok = rows[rows["status"] == "ok"]
    groups = {str(document): own for document, own in ok.groupby("document", sort=False)}
    steps = {document: _steps(document, own) for document, own in groups.items() if _coin(document, own)}
    seen = {document: both for document, both in steps.items() if len(both[0])}
    process = EProcess(alpha=delta, eta=eta)
    for share, _ in seen.values():
        process.update(float(share.mean()))
    sums = {document: weighted_sum(strict, delta / STRICT) for document, (_, strict) in seen.items()}
    tops = [float(path[-1]) for path in sums.values()]
    return {
        "conversations": rows["document"].nunique(),
        "audited": len(steps),
        "without_steps": len(steps) - len(seen),
        "failed": len(rows) - len(ok),
        "miss": float(np.mean([point.share for point in process.path])) if seen else None,
        "delta": delta,
        "log10_threshold": -log(eta) / LN10,
        "log10_alarm": max((point.log_alarm / LN10 for point in process.path), default=None),
        "log10_evidence": max((point.log_evidence / LN10 for point in process.path), default=None),
        "log10_trajectory": log(max(tops)) / LN10 if tops and max(tops) > 0 else None,
        "trajectory_alarms": sum(top >= 1 / eta for top in tops),
        "betting": [
            {
                "document": document, "share": point.share, "bet_alarm": point.bet_alarm,
                "bet_evidence": point.bet_evidence, "log10_alarm": point.log_alarm / LN10,
                "log10_evidence": point.log_evidence / LN10,
            }
            for document, point in zip(seen, process.path, strict=True)
        ],
        "trajectories": [{"document": document, **_rises(path)} for document, path in sums.items()],
    }  # fmt: skip


def replays(rows: pd.DataFrame) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Replayed streaming (runs/replayed.py): its summary, and the path of each audited conversation.

    crossed: the share of heads whose linearised error was ever above its time-uniform radius, the mean and the largest
    over conversations; the mean has an expectation of at most delta, whatever the events, if the coins are fair.
    """
    known = rows[rows["replayed"].notna()]
    paths = [
        {"document": document, **json.loads(text)}
        for document, text in zip(known["document"], known["replayed"], strict=True)
    ]
    last = [path["crossed"][-1] for path in paths]
    summary = {"conversations": len(paths), "crossed": float(np.mean(last)) if last else None}
    return summary | {"most_crossed": max(last, default=None)}, paths


def _coin(document: str, own: pd.DataFrame) -> bool:
    """Whether a conversation was audited: one coin for all of its questions."""
    coins = set(own["audited"])
    if not coins <= {True, False} or len(coins) != 1:
        raise UserError(
            f"conversation {document}: audited is {sorted(map(str, coins))}; expected one coin, true or false"
        )
    return bool(coins.pop())


def _steps(document: str, own: pd.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(miss_steps, miss_steps_strict) of a conversation's questions, one after another."""
    both = [tuple(_shares(document, name, text) for text in own[name]) for name in ("miss_steps", "miss_steps_strict")]
    if [len(x) for x in both[0]] != [len(x) for x in both[1]]:
        raise UserError(
            f"conversation {document}: miss_steps and miss_steps_strict differ in length; expected one step each"
        )
    plain, strict = (np.array([share for steps in lists for share in steps], dtype=np.float64) for lists in both)
    return plain, strict


def _shares(document: str, name: str, text: Any) -> list[float]:
    """One stored list of shares."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, list) or not all(type(x) in (int, float) and 0 <= x <= 1 for x in found):
        raise UserError(f"conversation {document}: {name} is {str(text)[:60]!r}; expected a JSON list of shares 0 to 1")
    return found


def _rises(path: NDArray[np.float64]) -> dict[str, Any]:
    """The steps, counted from 1, at which a sum rose, and its value from then on."""
    at = np.flatnonzero(np.diff(path, prepend=0.0))
    return {"steps": len(path), "at": (at + 1).tolist(), "e": path[at].tolist()}
