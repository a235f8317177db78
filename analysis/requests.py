"""Stored answers to records: an answer beside those it is compared with, the signals it gave, and who is to blame.

A request is one question of one example to one model; its answers differ in the arm: policy, mode, budget, draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.estimands import Cells, number
from analysis.intervals import Array, Interval, Statistic, t_interval
from analysis.verdict import Stratum
from runs.registry import Claim

REQUEST = ["model", "task", "ctx_tokens", "document", "example", "request"]  # examples may share a document
TAKEN = ["status", "official", "logprob", "realised_budget"]  # of an answer that another is compared with
Mask = NDArray[np.bool_]
Draws = tuple[int, int]  # resamples and seed of the bootstrap


@dataclass(frozen=True, eq=False)
class Records:
    """Answers whose partners are stored and none of which failed, and how many were left out because one did."""

    cells: Cells
    failed: int
    unit: str

    def obstacles(self, claim: Claim) -> tuple[str, ...]:
        """What forbids a verdict: more than the registered share of failed pairs."""
        of, limit = len(self.cells) + self.failed, number(claim, "max_failed_share")
        if self.failed <= limit * of:
            return ()
        share = f"{self.failed / of:.1%}, at most {limit:.0%}"
        return (f"{self.failed:,} of {of:,} {self.unit} have a failed member ({share})",)

    def stratum(self, claim: Claim, measures: Mapping[str, Interval]) -> Stratum:
        """The stratum of a claim that reads all records."""
        of = self.cells
        return Stratum(of.name, measures, len(of), len(of.tasks), obstacles=self.obstacles(claim))

    def difference(self, one: str, other: str, draws: Draws) -> Interval:
        """Mean over tasks of the paired difference of two columns, t on the plain scale."""
        if not len(self.cells):
            return Interval.undefined("no whole pair")
        change = mean_over_tasks(self.cells, self.cells[one] - self.cells[other])
        return t_interval(change, self.cells.bootstrap(*draws))

    def means(self, **columns: str) -> dict[str, float]:
        """Mean over tasks of columns, by the names they are given."""
        one, some = np.ones((1, len(self.cells.tasks))), columns.items() if len(self.cells) else ()
        return {name: float(mean_over_tasks(self.cells, self.cells[column])(one)[0]) for name, column in some}


def budgets(claim: Claim, key: str = "budgets") -> list[float]:
    """A registered list of fractions."""
    found = claim.params[key]
    return [float(each) for each in found] if isinstance(found, Sequence) else []


def arm(rows: pd.DataFrame, policy: str, mode: str, at: Sequence[float] = (), draw: int = 0) -> pd.DataFrame:
    """The answers of one arm, at some budgets or all there are. A second draw is another arm."""
    own = rows[(rows["policy"] == policy) & (rows["mode"] == mode) & (rows["draw"] == draw)]
    return own[own["budget"].isin(list(at))] if at else own


def records(like: Cells, own: pd.DataFrame, **partners: pd.DataFrame) -> Records:
    """Each answer of `own` with its partners' columns, as official_<name>; failed ones left out and counted.

    Where a partner is not stored there is no record: its cell is missing, which judging counts. The second run of the
    full cache, `again`, may be absent. pandas' MergeError where an answer has two partners of one name.
    """
    for name, rows in partners.items():
        columns = rows[[*REQUEST, *TAKEN]].rename(columns={column: f"{column}_{name}" for column in TAKEN})
        own = own.merge(columns, how="left" if name == "again" else "inner", on=REQUEST, validate="many_to_one")
    failed = np.any([own[name] == "failed" for name in ("status", *(f"status_{name}" for name in partners))], axis=0)
    return Records(Cells(like.name, own[~failed], like.by), int(failed.sum()), "pairs" if partners else "answers")


def with_threshold(rows: pd.DataFrame, claim: Claim) -> pd.DataFrame:
    """The rows of tasks whose score divides success from failure; others have a metric named in params.no_threshold.

    A task is left out whole, by the beginning of its metric's name: its failed answers carry no metric of their own.
    """
    named = claim.params["no_threshold"]
    metric = rows["metric"].fillna("").astype(str).str.lower()
    without = metric.str.startswith(tuple(map(str, named if isinstance(named, list) else [named])))
    return rows[~rows["task"].isin(rows.loc[without, "task"])]


def signal(rows: pd.DataFrame, name: str) -> Array:
    """A signal of each answer, high = bad: a certificate, -logprob, entropy, -margin, or a length as it is.

    certificate: NaN without a certified step; +inf where flagged, more than a tenth of its steps being undefined.
    """
    value: Array = rows[name].to_numpy(dtype=float, na_value=np.nan)
    if not name.startswith("certificate"):
        return -value if name.startswith("logprob") or name == "margin" else value
    flagged = rows["cert_flagged"].eq(True).to_numpy(dtype=bool)
    steps = rows["cert_steps"].to_numpy(dtype=float, na_value=0)
    return np.where(steps > 0, np.where(flagged, np.inf, value), np.nan)


def blame(cells: Cells, success: float) -> tuple[Mask, Mask, Mask]:
    """(induced, inherent, discordant) of answers with partners `full` and `again`.

    induced: every run of the full cache succeeds and this answer fails; inherent: all fail; discordant: the runs of the
    full cache disagree, whatever this answer does. success: the least official score of one.
    """
    failed, first, second = cells["official"] < success, cells["official_full"] >= success, cells["official_again"]
    again = np.where(np.isnan(second), first, second >= success)
    return failed & first & again, failed & ~first & ~again, first != again


def disagreement(rows: pd.DataFrame, success: float) -> float | None:
    """The design's own noise: the share of requests whose success differs between two Poisson draws; None without."""
    ok = rows[(rows["policy"] == "poisson") & (rows["status"] == "ok")]
    first, second = ok[ok["draw"] == 0], ok[ok["draw"] > 0]
    both = second.merge(first, on=[*REQUEST, "mode", "budget"], suffixes=("", "_first"))
    differs = (both["official"] >= success) != (both["official_first"] >= success)
    return float(differs.mean()) if len(both) else None


def mean_over_tasks(cells: Cells, values: Array) -> Statistic:
    """Mean over tasks of the mean of values [n] within each, as a function of the weights of the clusters.

    (1 / tasks) sum_t (sum_{i in t} w_i x_i / sum_{i in t} w_i). The only document of a task stands for it whatever its
    weight in the denominator, since the resamples exchange it for that of another such task.
    """
    codes, names = pd.factorize(cells.rows["task"])
    sums, counts = np.zeros((2, len(names), len(cells.tasks)))
    np.add.at(sums, (codes, cells.cluster), values)
    np.add.at(counts, (codes, cells.cluster), 1.0)
    alone = (counts > 0).sum(1) == 1

    def evaluate(weights: Array) -> Array:
        totals = np.where(alone, counts.sum(1), weights @ counts.T)
        with np.errstate(invalid="ignore"):  # a task of which no document was drawn: that resample counts for nothing
            mean: Array = ((weights @ sums.T) / totals).mean(1)
        return mean

    return evaluate
