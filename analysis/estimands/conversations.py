"""Extension 3: whether the gate of the dialogues, left as it is, brings real conversations back to full's score."""

from typing import Any

import numpy as np
import pandas as pd

from analysis.estimands import Cells, Measured, measured, number, strata
from analysis.gated import CERTIFICATE, RANDOM, SYSTEMS, Gated, answers, conversations, over, threshold
from analysis.intervals import Interval
from analysis.monitor import monitored
from analysis.requests import Draws, Mask, Records
from analysis.verdict import Stratum
from runs.locomo_rows import CATEGORIES
from runs.registry import Claim

SHOWN = ("full", "topk", "poisson", CERTIFICATE)  # in numbers; a figure has them all


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per model: score gated by the certificate minus the full cache's, with the threshold of the calibration dialogues.

    Judged are the models that eviction damages heavily there; where there is none, each says so. Beside it every system,
    by category and by whether the evidence was fed, and the costs.
    """
    rows = conversations(frame)
    found = measured(rows, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))
    pairs = zip(found.strata, strata(rows, claim), strict=True)
    heavy = [stratum for stratum, cells in pairs if not _mild(_calibration(cells, claim), claim)]
    return Measured(heavy or found.strata, found.beside)


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    rows, task = cells.rows, str(claim.params["task"])
    found, known = answers(cells, task, "full", "topk", "uniform"), _calibration(cells, claim)
    limit, n, clusters = threshold(known, number(claim, "rho")), len(found.cells), len(found.cells.tasks)
    lacks = [*found.obstacles(claim), *_few(known, claim), *(mild := _mild(known, claim))]
    if limit is None or not n:
        return Stratum(cells.name, {}, n, clusters, obstacles=tuple(lacks)), {}
    gated, fixed = (Gated(found, over(found, at), draws) for at in (limit, number(claim, "absolute")))
    rate, most = gated.count / n, number(claim, "max_recomputed")
    lacks += [f"{rate:.1%} recomputed, at most {most:.0%}: the full cache by another name"] if rate > most else []
    measures = {"gated_minus_full": gated.difference(CERTIFICATE, "full")}
    beside = {
        **_scores(gated),
        **_parts(gated),
        "damage": gated.difference("full", "poisson"),
        "over_random_gate": gated.difference(CERTIFICATE, RANDOM),
        "calibration_damage": known.difference("official_full", "official", draws),
        "recomputed": gated.rate(),
        "threshold": limit,
        "gated_minus_full_absolute": fixed.difference(CERTIFICATE, "full"),
        "recomputed_absolute": fixed.rate(),
        "curve": gated.curves(),
        **_costs(gated),
        "monitor": monitored(rows[(rows["task"] == task) & (rows["system"] == "poisson")], number(claim, "delta")),
        "left_out": {"failed pairs": found.failed},
        "notes": mild,
    }
    return Stratum(cells.name, measures, n, clusters, obstacles=tuple(lacks)), beside


def _calibration(cells: Cells, claim: Claim) -> Records:
    return answers(cells, str(claim.params["calibration_task"]), "full")


def _few(known: Records, claim: Claim) -> list[str]:
    count, wanted = len(known.cells), int(number(claim, "calibration"))
    said = f"{count} calibration dialogues of {wanted}; make extension-2 runs them, and so does make extension-3"
    return [said] if count < wanted else []


def _mild(known: Records, claim: Claim) -> list[str]:
    """Why a model is not judged: on the calibration dialogues eviction costs less than what was named heavy."""
    if not len(known.cells):
        return []
    damage, least = (
        float((known.cells["official_full"] - known.cells["official"]).mean()),
        number(claim, "heavy_damage"),
    )
    return (
        [f"not judged: eviction cost {damage:.3f} in calibration, heavy damage is {least:g}"] if damage < least else []
    )


def _scores(gated: Gated) -> dict[str, Any]:
    """The score of every system, over all questions and by category."""
    kinds = gated.found.cells.rows["kind"].to_numpy()
    own = {kind: kinds == kind for kind in CATEGORIES.values() if (kinds == kind).any()}
    by = {system: {kind: gated.interval(system, mask) for kind, mask in own.items()} for system in SYSTEMS}
    return {
        "score": {system: gated.interval(system) for system in SYSTEMS},
        "score_by_category": {system: by[system] for system in SHOWN},
        "categories": [{"system": s, "category": kind, "score": x} for s, of in by.items() for kind, x in of.items()],
    }


def _parts(gated: Gated) -> dict[str, Any]:
    """The same of some questions: those that have an answer, by where their evidence is, those with a right label."""
    cells = gated.found.cells
    age, turns, left_out = cells["age"], cells["turns"], cells["left_out"]
    asked, wrong = cells.rows["kind"].to_numpy() != CATEGORIES[5], cells["wrong_label"]
    evidence = {"fed": age <= turns, "left out": age > turns, "unknown": np.isnan(age)}
    found = {
        "score_answerable": _some(gated, asked),
        "gated_minus_full_answerable": gated.difference(CERTIFICATE, "full", asked),
        "score_by_evidence": {where: _some(gated, own) for where, own in evidence.items() if own.any()},
        "evidence": {where: int(own.sum()) for where, own in evidence.items()},
        "history_left_out": float((left_out / (left_out + turns))[~cells.rows.duplicated(cells.by)].mean()),
    }
    if (right := wrong == 0).any():
        found |= {"gated_minus_full_right_labels": gated.difference(CERTIFICATE, "full", right)}
        found |= {"score_right_labels": _some(gated, right), "wrong_labels": int((wrong == 1).sum())}
    return found


def _some(gated: Gated, own: Mask) -> dict[str, Interval]:
    return {system: gated.interval(system, own) for system in SHOWN} if own.any() else {}


def _costs(gated: Gated) -> dict[str, Any]:
    """Tokens prefilled again a question; bytes of the caches, and of both while a question is recomputed."""
    cells = gated.found.cells
    whole, kept = cells["cache_bytes_before"], cells["cache_bytes_after"]
    both = (whole + kept)[gated.recomputed]
    return {
        "prefill_tokens": gated.prefill(),
        "cache_bytes": {"full": round(whole.mean()), "poisson": round(kept.mean())},
        "peak_bytes": int(both.max()) if len(both) else None,
    }
