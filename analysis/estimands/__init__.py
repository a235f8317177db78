"""Rows to measures: one module an estimand, each with measure(frame, claim, resamples, seed) -> Measured.

Here is what they share: the division of a claim's rows into strata, and their clusters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.intervals import Array, Bootstrap, Codes, Interval, proportion, resample
from analysis.verdict import Stratum
from runs.errors import UserError
from runs.registry import CLAIMS, Claim


@dataclass(frozen=True)
class Measured:
    """What the rows say: the strata that are judged, and by stratum name what is reported beside, never judged."""

    strata: Sequence[Stratum]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Cells:
    """The rows of one stratum, or some of them, with what an interval needs to know of them."""

    name: str
    rows: pd.DataFrame
    by: str  # the column whose values are the clusters

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Array:
        """A numeric column; null is NaN."""
        return self.rows[column].to_numpy(dtype=float, na_value=np.nan)

    @cached_property
    def cluster(self) -> Codes:
        """The cluster of each row, numbered in order of appearance."""
        return pd.factorize(self.rows[self.by])[0].astype(np.int64)

    @cached_property
    def tasks(self) -> list[str]:
        """The task of each cluster."""
        return list(self.rows.drop_duplicates(self.by)["task"])

    def bootstrap(self, resamples: int, seed: int) -> Bootstrap:
        """Resamples of the clusters within task."""
        return resample(self.tasks, resamples, seed)

    def share(self, hit: NDArray[np.bool_], draws: int, boot: Bootstrap) -> Interval:
        """The share of rows that are hit; draws: how many independent ones the rows rest on."""
        return self.share_of(np.arange(len(self)), hit, draws, boot)

    def share_of(self, own: NDArray[np.int64], hit: NDArray[np.bool_], draws: int, boot: Bootstrap) -> Interval:
        """The same for the rows at some positions, with the resamples of all."""
        hits, totals = (np.bincount(self.cluster[own], values, boot.clusters) for values in (hit[own], own >= 0))
        return proportion(hits.astype(float), totals.astype(float), draws, boot)

    def only(self, keep: NDArray[np.bool_]) -> "Cells":
        """The rows where keep is true."""
        return Cells(self.name, self.rows[keep], self.by)

    def groups(self, *columns: str) -> Iterator[tuple[tuple[Any, ...], NDArray[np.int64]]]:
        """Each combination of columns, in order of appearance, with the positions of its rows."""
        codes, keys = pd.factorize(pd.MultiIndex.from_frame(self.rows[list(columns)]))
        for code, key in enumerate(keys):
            yield tuple(key), np.flatnonzero(codes == code)


def measured(frame: pd.DataFrame, claim: Claim, one: Callable[[Cells], tuple[Stratum, dict[str, Any]]]) -> Measured:
    """Measure each stratum of a claim with `one`; a stratum without rows stays in the list, with nothing measured."""
    found, beside = [], {}
    for cells in strata(frame, claim):
        if len(cells):
            stratum, beside[cells.name] = one(cells)
        else:
            stratum = Stratum(cells.name, {}, 0, 0)
        found.append(stratum)
    return Measured(found, beside)


def number(claim: Claim, key: str) -> float:
    """A registered constant of the estimand. Raises UserError where it is no number."""
    value = claim.params.get(key)
    if not isinstance(value, int | float):
        raise UserError(f"{CLAIMS}: {claim.id}.params.{key}: {value!r}; expected a number")
    return float(value)


def label(axis: str, value: Any) -> str:
    """A value of an axis as a stratum's name says it: budget 12.5 %, 6,000 tokens, a model's own name."""
    if axis == "budget":
        return f"budget {100 * value:g} %"
    return f"{value:,} tokens" if axis == "ctx_tokens" else str(value)


def strata(frame: pd.DataFrame, claim: Claim) -> list[Cells]:
    """The rows of each stratum that the claim names; one without rows where a registered level has none.

    The last axis takes the registered levels, where there are some: rows of another level are of no stratum. Every other
    axis takes the values that occur.
    """
    if not claim.strata.by:
        return [Cells("all", frame, claim.cluster)]
    *outer, last = claim.strata.by
    found = []
    for key, rows in frame.groupby(outer, sort=False) if outer else [((), frame)]:
        for level in claim.strata.levels or rows[last].unique():
            name = ", ".join(label(axis, value) for axis, value in zip(claim.strata.by, (*key, level), strict=True))
            found.append(Cells(name, rows[rows[last] == level], claim.cluster))
    return found
