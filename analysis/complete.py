"""How complete the rows of a plan are, and what forbids a verdict whatever they say."""

from collections.abc import Mapping

import pandas as pd

from analysis.classes import too_few
from analysis.verdict import Tally
from runs.cells import Plan
from runs.registry import Claim, Grid, Registry

Request = Mapping[str, str | int | None]


def registered(grid: Grid, profile: str, request: Request, plan: Plan | None) -> int:
    """Cells of the registered design under a request, but those that do not exist by nature, as the plan counts them.

    MODEL= is one model in place of all of them.
    """
    known = grid.profiles.get(profile)
    if known is None:
        return 0
    absent = plan.header.get("absent", {}).get("registered", 0) if plan else 0
    return known.cells // (known.sizes.get("models", 1) if request.get("model") else 1) - absent


def tally(grid: Grid, profile: str, request: Request, plan: Plan | None, rows: pd.DataFrame | None) -> Tally:
    """How complete the rows are; what the registered design has and the stored plan has not is missing too.

    A plan with ARGS= is of another design, as large as it says.
    """
    size = registered(grid, profile, request, plan)
    if plan is None or rows is None:
        return Tally(size, size, 0)
    planned = plan.cells.num_rows if request.get("args") else max(plan.cells.num_rows, size)
    return Tally(planned, planned - len(rows), int((rows["status"] != "ok").sum()))


def obstacles(registry: Registry, claim: Claim, profile: str, request: Request, plan: Plan | None) -> list[str]:
    """What forbids a verdict whatever the rows say."""
    found, size = [], registered(registry.grids[claim.grid], profile, request, plan)
    if not size:
        found.append(f"grid {claim.grid} has no registered cells under profile {profile}")
    if not claim.judging:
        found.append(f"this version cannot judge it: its estimand ({claim.estimand}) is no part of it")
    if plan and not request.get("args") and plan.cells.num_rows < size:
        lack = size - plan.cells.num_rows
        found.append(f"the stored plan lacks {lack:,} of the {size:,} registered cells")
    if plan and not plan.header["model"].get("trained", True):
        found.append("a model with random weights is never evidence")
    if plan and plan.header.get("synthetic"):
        found.append("synthetic rows are never evidence")
    if profile == "smoke":
        found.append("the smoke profile is never evidence")
    if request.get("args"):
        found.append(f"ARGS={request['args']} is not the registered design")
    return [*found, *(too_few(claim, plan.cells.to_pandas(), bool(request.get("data"))) if plan else [])]
