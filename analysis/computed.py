"""What the rows of a study come from: the plans it was judged by, the code and machines that computed them, the hours."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.study import Study, asked
from runs.cells import Plan
from runs.provenance import git_state
from runs.store import Store

PACKAGES = ("torch", "transformers")
MACHINE = {"cpus": "CPUs:", "threads": "threads of a process:"}


def grids(study: Study) -> pd.DataFrame:
    """Of each grid that has a plan: its population, cells, documents, and what computed its units; hours of one process.

    Columns: grid, claims, population, model digests, design, cells, stored, failed, documents, hours, device, machine, code,
    packages.
    """
    store, found = Store(study.store), []
    for grid in study.registry.grids:
        plan = store.read_plan(grid, study.profile, asked(store, grid, study.profile, study.request))
        if plan:
            claims = [claim.id for claim in study.registry.claims.values() if claim.grid == grid]
            counts = store.counts(plan)
            found.append(
                {"grid": grid, "claims": ", ".join(claims), "population": plan.header["population"]}
                | {
                    "model digests": _digests(plan.header["model"]["digest"]),
                    "design": plan.design[:12],
                    "cells": plan.cells.num_rows,
                    "stored": counts["done"],
                }
                | {"failed": counts["failed"], "documents": plan.header["documents"]["n"]}
                | _computing(store, plan)
            )
    return pd.DataFrame(found)


def git_revision(root: Path) -> str:
    """The commit of the code at hand, and whether it is changed."""
    return _revision(git_state(root)) or "no commit"


def _digests(digest: str | Sequence[str]) -> str:
    """Those of the models of a plan, which are of one or of several."""
    return ", ".join(each[:12] for each in ([digest] if isinstance(digest, str) else digest))


def _computing(store: Store, plan: Plan) -> dict[str, Any]:
    """Hours and provenance of a plan's units, of each the latest attempt, which holds what earlier ones had finished."""
    latest = {file.unit: file.path for file in store.unit_files() if file.unit in plan.units}
    metas = [store.meta(path) for path in latest.values()]
    runs = [run for meta in metas for run in meta["runs"]]
    seconds = sum(sum(meta["wall_s"].values()) for meta in metas)
    return {
        "hours": seconds / 3600,
        "device": _said(run.get("device") for run in runs),
        "machine": _said(_machine(run) for run in runs),
        "code": _said(_revision(run.get("git") or {}) for run in runs),
        "packages": _said(_packages(run.get("packages") or {}) for run in runs),
    }


def _machine(run: Mapping[str, Any]) -> str | None:
    parts = [run.get("platform"), *(f"{name} {run[key]}" for key, name in MACHINE.items() if key in run)]
    return ", ".join(filter(None, parts)) or None


def _revision(git: Mapping[str, Any]) -> str | None:
    return f"{git['revision'][:12]}{' with changes' if git.get('dirty') else ''}" if git.get("revision") else None


def _packages(packages: Mapping[str, str | None]) -> str | None:
    return ", ".join(f"{name} {packages[name]}" for name in PACKAGES if packages.get(name)) or None


def _said(values: Iterable[str | None]) -> str:
    return "; ".join(sorted({value for value in values if value})) or "not known"
