"""Extension 2: whether recomputing where the certificate is high restores what was said long ago."""

from typing import Any

import pandas as pd

from analysis.estimands import Cells, Measured, measured, number
from analysis.gated import CERTIFICATE, RANDOM, SYSTEMS, Gated, answers, conversations, over, threshold
from analysis.monitor import monitored, replays
from analysis.requests import Draws, Mask, Records
from analysis.verdict import Stratum
from runs.registry import Claim

BANDS = {f"{first}-{first + 4}": (first, first + 4) for first in range(1, 30, 5)}


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Per model: recall gated by the certificate minus gated at random, all questions; minus top-k, the oldest facts.

    The threshold is that of the calibration dialogues. Beside it every system, the costs, and coverage over time.
    """
    return measured(conversations(frame), claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    task, calibration = (str(claim.params[key]) for key in ("task", "calibration_task"))
    found, known = answers(cells, task, "full", "topk", "uniform"), answers(cells, calibration, "full")
    limit, wanted = threshold(known, number(claim, "rho")), int(number(claim, "calibration"))
    few = [f"{len(known.cells)} calibration dialogues of {wanted}"] if len(known.cells) < wanted else []
    n, clusters = len(found.cells), len(found.cells.tasks)
    if limit is None or not n:
        return Stratum(cells.name, {}, n, clusters, obstacles=(*found.obstacles(claim), *few)), {}
    gated = Gated(found, over(found, limit), draws)
    first, last = (int(age) for age in claim.params["old"])  # type: ignore[attr-defined]
    measures = {
        "over_random_gate": gated.difference(CERTIFICATE, RANDOM),
        "over_topk_old": gated.difference(CERTIFICATE, "topk", _aged(found, (first, last))),
    }
    rate, most = gated.count / n, number(claim, "max_recomputed")
    much = [f"{rate:.1%} recomputed, at most {most:.0%}: the full cache by another name"] if rate > most else []
    stratum = Stratum(cells.name, measures, n, clusters, obstacles=(*found.obstacles(claim), *few, *much))
    fixed = Gated(found, over(found, number(claim, "absolute")), draws)
    replayed, paths = replays(poisson := _poisson(cells, task))
    beside = {
        **_recall(gated),
        "recomputed": gated.rate(),
        "threshold": limit,
        "recall_absolute": fixed.interval(CERTIFICATE),
        "recomputed_absolute": fixed.rate(),
        **_calibration(known, claim, draws),
        **_costs(gated),
        "monitor": monitored(poisson, number(claim, "delta")),
        "replayed": replayed,
        "replayed_paths": paths,
        "left_out": {"failed pairs": found.failed},
    }
    return stratum, beside


def _recall(gated: Gated) -> dict[str, Any]:
    """Recall of every system, and by age: the four that the question is about in numbers, all of them for a figure."""
    bands = {band: _aged(gated.found, ages) for band, ages in BANDS.items()}
    bands = {band: own for band, own in bands.items() if own.any()}
    ages = {system: {band: gated.interval(system, own) for band, own in bands.items()} for system in SYSTEMS}
    return {
        "recall": {system: gated.interval(system) for system in SYSTEMS},
        "over_confidence_gate": gated.difference(CERTIFICATE, "poisson confidence-gated"),
        "recall_by_age": {system: ages[system] for system in ("full", "topk", "poisson", CERTIFICATE)},
        "ages": [
            {"system": system, "band": band, "recall": x} for system, of in ages.items() for band, x in of.items()
        ],
        "curve": gated.curves(),
    }


def _calibration(known: Records, claim: Claim, draws: Draws) -> dict[str, Any]:
    """What eviction costs on the calibration dialogues, by which damage is named heavy before extension 3."""
    damage = known.difference("official_full", "official", draws)
    least = number(claim, "heavy_damage")
    heavy = damage.value is not None and damage.value >= least
    said = f"damage is {'heavy' if heavy else 'not heavy'}: {damage.value:.3f} in calibration, heavy from {least:g} on"
    return {"calibration_damage": damage, "notes": [said]}


def _costs(gated: Gated) -> dict[str, Any]:
    """Tokens fed again, and bytes: of each system's cache, and of both caches while a question is recomputed."""
    cells = gated.found.cells
    full, kept = cells["cache_bytes_before"], cells["cache_bytes_after"]
    lengths = cells.rows.drop_duplicates(cells.by)["context_tokens"]
    return {
        "prefill_tokens": gated.prefill(),
        "cache_bytes": {"full": round(full.mean()), "poisson": round(kept.mean())},
        "peak_bytes": int((full + kept)[gated.recomputed].max()) if gated.count else None,
        "dialogue_tokens": round(lengths.median()),
    }


def _aged(found: Records, ages: tuple[int, int]) -> Mask:
    """The questions on facts of these ages."""
    age = found.cells["age"]
    return (age >= ages[0]) & (age <= ages[1])


def _poisson(cells: Cells, task: str) -> pd.DataFrame:
    rows = cells.rows
    return rows[(rows["task"] == task) & (rows["system"] == "poisson")]
