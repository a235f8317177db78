"""What a claim that compares two classes can count: of a plan before any row, and of answers that are in no pair."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from analysis.compared import certified
from analysis.estimands import Cells, number, strata
from analysis.estimands.attribution import answers
from analysis.requests import arm, blame, budgets, records, with_threshold
from analysis.verdict import Stratum
from runs.metrics import METRIC_OF
from runs.registry import Claim

MORE = "; without DATA= the other strata are judged alone; PROFILE=desktop with DATA= takes all rows"
BY_LENGTH, BY_POINT = ("prediction", "attribution"), ("synthetic",)  # estimands that compare, by what is counted apart


def too_few(claim: Claim, planned: pd.DataFrame, data: bool) -> list[str]:
    """The strata of which a plan has fewer answers than two classes of min_class, before any row: in words.

    planned: the plan's cells. data: with DATA=, where it says how there is a verdict: of the other strata, of more rows.
    """
    if claim.estimand not in BY_LENGTH or claim.min_class is None:
        return []
    found = []
    for cells in strata(planned.assign(metric=planned["task"].map(METRIC_OF)), claim):
        rows = with_threshold(cells.rows, claim)
        most = len(arm(rows, "poisson", str(claim.params["mode"]), budgets(claim)))
        if most < 2 * claim.min_class:
            found.append(
                f"{cells.name}: descriptive: {most} answers planned, not {claim.min_class} of each of two classes"
            )
    if found and data:
        found[-1] += MORE
    return found


def uncounted(claim: Claim, rows: pd.DataFrame, judged: Sequence[Stratum]) -> dict[str, dict[str, int]]:
    """By stratum and class, the certified answers in cells (model, task, budget) that lack the other class, if any."""
    if claim.estimand not in (*BY_LENGTH, *BY_POINT):
        return {}
    counted = {stratum.name: stratum.classes for stratum in judged}
    found = {cells.name: _totals(cells, claim) - Counter(counted[cells.name]) for cells in strata(rows, claim)}
    return {name: dict(more) for name, more in found.items() if more}


def _totals(cells: Cells, claim: Claim) -> Counter[str]:
    """Certified answers by class, by the names that the estimand gives its classes."""
    success, of = number(claim, "success"), claim.estimand
    rows = with_threshold(cells.rows, claim) if of in BY_LENGTH else cells.rows
    if of == "prediction":
        found = records(cells, arm(rows, "poisson", str(claim.params["mode"]), budgets(claim)))
    else:
        found = answers(cells, rows, claim, "poisson")
    if of == "attribution":
        first, second, _ = blame(found.cells, success)
    else:
        first, second = found.cells["official"] < success, found.cells["official"] >= success
    names = ("induced", "inherent") if of == "attribution" else ("failures", "successes")
    points = found.cells.rows["model"] + ", " + found.cells.rows["task"] if of in BY_POINT else None
    totals: Counter[str] = Counter()
    for name, mask in zip(names, (first, second), strict=True):
        own = mask & certified(found)
        totals.update({name: int(own.sum())} if points is None else Counter(f"{name} of {at}" for at in points[own]))
    return totals


def told(
    reasons: Sequence[str], judged: Sequence[Stratum], more: Mapping[str, Mapping[str, int]], unit: str
) -> list[str]:
    """The verdict engine's reasons, made true where there are answers that it was not told of; unit: what it counts.

    more: of uncounted(). Without it a stratum whose answers are all wrong would read as one that has none.
    """
    return [_told(reason, judged, more, unit) for reason in reasons]


def _told(reason: str, judged: Sequence[Stratum], more: Mapping[str, Mapping[str, int]], unit: str) -> str:
    for stratum in judged:
        rest = more.get(stratum.name, {})
        if stratum.measures and reason == f"{stratum.name}: no rows":
            here = ", ".join(f"{count:,} {name}" for name, count in rest.items())
            return f"{stratum.name}: " + (f"no cell has both classes: {here}" if rest else f"none of its {unit} counts")
        for name, count in rest.items():
            if reason.startswith(f"{stratum.name}: {stratum.classes[name]} {name} of at least"):
                return f"{reason}; {count:,} more in cells without the other class"
    return reason
