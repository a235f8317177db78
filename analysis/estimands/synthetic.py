"""Extension 5: on every synthetic task and model, whether the certificate tells failures from successes."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd

from analysis.compared import NO_PAIR, Compared, certified, compared, counted, flagged
from analysis.estimands import Cells, Measured, measured, number
from analysis.estimands.attribution import answers
from analysis.intervals import LOGIT, Interval, studentised
from analysis.requests import Draws, blame, signal
from analysis.verdict import Stratum
from analysis.weighted import combination
from runs.registry import Claim


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """The AUC of the certificate in each point (model and task), failure against success: the smallest, and the mean.

    Pairs within a budget. Beside it every point, the same of the log-probability, and attribution over all points.
    """
    return measured(frame, claim, lambda cells: _stratum(cells, claim, (resamples, seed)))


def _stratum(cells: Cells, claim: Claim, draws: Draws) -> tuple[Stratum, dict[str, Any]]:
    success, found = number(claim, "success"), answers(cells, cells.rows, claim, "poisson")
    wrong, use = found.cells["official"] < success, certified(found)
    whole, (induced, inherent, _) = compared(found.cells, wrong, use, draws), blame(found.cells, success)
    own = {f"{model}, {task}": rows for (model, task), rows in found.cells.groups("model", "task")}
    points = {
        name: compared(Cells(cells.name, found.cells.rows.iloc[at], cells.by), wrong[at], use[at], draws)
        for name, at in own.items()
    }
    aucs = {name: point.auc("certificate") for name, point in points.items()}
    beside = {
        "auc_point": aucs,
        "auc_logprob_point": {name: point.auc("logprob") for name, point in points.items()},
        "mean_auc_logprob": mean_auc(whole, points, "logprob"),
        "auc_attribution": compared(found.cells, induced, (induced | inherent) & use, draws).auc("certificate"),
        "flagged": flagged(found),
        "left_out": counted(found, whole),
    }
    measures = {"min_auc": smallest(list(aucs.values())), "mean_auc": mean_auc(whole, points, "certificate")}
    counts = {name: point.count("failures", "successes") for name, point in points.items()}
    classes = {f"{kind} of {name}": n for name, of in counts.items() for kind, n in of.items()}
    tasks, known = int(number(claim, "tasks")), cells.rows.groupby("model", sort=False)["task"].nunique()
    short = [f"{model}: {n} of its {tasks} registered points" for model, n in known.items() if n != tasks]
    obstacles = (*found.obstacles(claim), *short)
    return Stratum(cells.name, measures, len(whole.cells), len(whole.cells.tasks), classes, obstacles), beside


def smallest(points: list[Interval]) -> Interval:
    """The smallest of several AUCs; undefined where one of them is.

    Bounds: the smallest low and the smallest high, each at level 1 - (1 - level) / points (Bonferroni): the point that
    looks worst was chosen for looking so.
    """
    values = [point.value for point in points if point.value is not None]
    if len(values) < len(points) or not points:
        return _lacking(len(points) - len(values), len(points))

    def bounds(level: float) -> tuple[float, float]:
        ends = [point.at(1 - (1 - level) / len(points)) for point in points]
        return min(low for low, _ in ends), min(high for _, high in ends)

    return Interval(min(values), bounds)


def mean_auc(whole: Compared, points: Collection[str], of: str) -> Interval:
    """The mean of the points' AUCs, studentised on the logit scale with all points in one resample."""
    score, rows = signal(whole.cells.rows, of), whole.cells.rows
    point = (rows["model"] + ", " + rows["task"]).to_numpy()
    if lacking := set(points) - set(point):
        return _lacking(len(lacking), len(points))
    parts = [(1 / len(points), whole.smooth(np.where(point == name, score, np.nan))) for name in points]
    return studentised(combination(parts), whole.boot, LOGIT) if parts else NO_PAIR


def _lacking(count: int, of: int) -> Interval:
    return Interval.undefined(f"{count} of {of} points have no cell with both classes")
