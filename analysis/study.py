"""The whole study from one store: every claim judged, and what a reader is shown of it, pictures and tables.

A claim plugs in by an entry of its own in analysis/figures.py (DRAWN, or PICTURES) and analysis/tables_study.py (TABLES).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.estimands import Cells, strata
from analysis.judge import REGISTERED, Judged, Request, judge
from runs.cells import alike
from runs.registry import ROOT, Claim, Registry, Rules, load
from runs.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_EVALUATED, SYNTHETIC = "not evaluated", "synthetic rows"


@dataclass(frozen=True, eq=False)
class Study:
    """The registered claims, or some of them, judged from the rows of one store under one profile and request."""

    registry: Registry
    rules: Rules
    judged: Mapping[str, Judged]
    profile: str
    request: Request
    store: Path
    root: Path

    def claim(self, claim_id: str) -> Claim:
        """The registered claim."""
        return self.registry.claim(claim_id)

    def result(self, claim_id: str) -> Mapping[str, Any]:
        """The verdict of a claim, as its JSON has it."""
        return self.judged[claim_id].result

    def rows(self, claim_id: str) -> pd.DataFrame:
        """The rows of a claim that are ok; empty where there are none."""
        frame = self.judged[claim_id].frame
        return pd.DataFrame() if frame is None else frame[frame["status"] == "ok"]

    def strata(self, claim_id: str) -> Iterator[Cells]:
        """The strata of a claim that have rows, failed ones among them."""
        frame = self.judged[claim_id].frame
        yield from (cells for cells in strata(frame, self.claim(claim_id)) if len(cells)) if frame is not None else ()

    @property
    def draws(self) -> tuple[int, int]:
        """Resamples and seed of every bootstrap."""
        return self.rules.resamples, self.rules.seed

    @property
    def synthetic(self) -> bool:
        """Whether any rows are made up, in which case everything made from them says so."""
        return any(found.result["synthetic"] for found in self.judged.values())

    def lacks(self, claims: Sequence[str]) -> list[str]:
        """Why claims show nothing: one line for each that has no rows that are ok, with what is missing."""
        empty = [result for result in map(self.result, claims) if not any(result["beside"].values())]
        return [f"{one['id']} {NOT_EVALUATED}: {'; '.join(one['reasons'])}" for one in empty]

    def marks(self, claims: Sequence[str]) -> list[str]:
        """What must stand on all that is made from the rows of these claims: made up, of other data, missing, failed."""
        results = [self.result(claim_id) for claim_id in claims]
        said = [SYNTHETIC] if any(result["synthetic"] for result in results) else []
        said += filter(None, (elsewhere(self.request, result) for result in results))
        for result in results:
            lack = [key for key in ("missing", "failed") if result[key] and result["beside"]]
            said += [f"{result[key]:,} of {result['planned']:,} cells {key}" for key in lack]
        return list(dict.fromkeys(said))


def study(
    profile: str = "laptop",
    request: Request = REGISTERED,
    store: Path | None = None,
    root: Path = ROOT,
    rules: Rules | None = None,
    only: Collection[str] = (),
) -> Study:
    """Judge every claim, or only some, from the rows of a store (runs/store by default); nothing is written.

    Errors as `judge`.
    """
    registry = load(root)
    rules, where = rules or registry.rules, store or root / "runs" / "store"
    plans = {grid: asked(Store(where), grid, profile, request) for grid in registry.grids}
    found = {
        name: judge(name, profile, plans[registry.claim(name).grid], where, root, rules)
        for name in only or registry.claims
    }
    return Study(registry, rules, found, profile, request, where, root)


def asked(store: Store, grid: str, profile: str, request: Request) -> Request:
    """The request under which a store has a grid's plan: the given one, or the only one that differs in the data alone.

    No one place of data is every grid's: real conversations are read from a file, and most grids need none. Several
    whose texts and settings are equal are one, typed in several ways.
    """
    if store.plan_path(grid, profile, request).is_file():
        return request
    stored = [header for header in store.plans() if (header["grid"], header["profile"]) == (grid, profile)]
    others = [one for one in stored if {**one["request"], "data": None} == {**request, "data": None}]
    return others[0]["request"] if others and all(alike(others[0], one) for one in others[1:]) else request


def elsewhere(typed: Request, result: Mapping[str, Any]) -> str:
    """What must be said of a verdict from other data than the user named."""
    found = result["request"]["data"]
    return f"{result['id']}: rows of DATA={found}" if typed["data"] and found not in (None, typed["data"]) else ""


@dataclass(frozen=True)
class Picture:
    """A figure: the claims whose rows it shows, a caption, the points it draws, and how it draws them.

    points: the rows behind it, all that is needed to draw it again; empty where the rows allow none.
    """

    claims: tuple[str, ...]
    caption: str
    points: Callable[[Study], pd.DataFrame]
    draw: Callable[["Figure", Study, pd.DataFrame], None]


@dataclass(frozen=True)
class Table:
    """A table: the claims whose rows it is made of, a caption, and its rows; empty where the rows allow none."""

    claims: tuple[str, ...]
    caption: str
    rows: Callable[[Study], pd.DataFrame]


def numbers(result: Mapping[str, Any]) -> pd.DataFrame:
    """All numbers of a verdict in long form: stratum, name, of, estimate, low, high.

    name: the path to it in the JSON; of: which layer and head, or place in a curve, of a list. Undefined is NaN.
    """
    found = []
    for stratum in result["strata"]:
        every = {**stratum["measures"], **result["beside"].get(stratum["name"], {})}
        found += [{"stratum": stratum["name"], **row} for row in _flat(every, "")]
    columns = ["stratum", "name", "of", "estimate", "low", "high"]
    return pd.DataFrame(found, columns=columns).astype(dict.fromkeys(columns[3:], float))


def _flat(value: Any, path: str, of: str = "") -> Iterator[dict[str, Any]]:
    if isinstance(value, Mapping) and "estimate" in value:
        yield {"name": path, "of": of, **{end: value[end] for end in ("estimate", "low", "high")}}
    elif isinstance(value, Mapping):
        place = ", ".join(f"{key} {value[key]}" for key in ("model", "layer", "head") if key in value)
        for key, item in value.items():
            if key not in ("model", "layer", "head"):
                yield from _flat(item, f"{path} {key}".strip(), place or of)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _flat(item, path, str(i))
    elif value is None or isinstance(value, int | float):
        yield {"name": path, "of": of, "estimate": value}
