"""make status: what is done, missing, failed, and how long the rest will take, per claim. python -m scripts.status"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runs.cells import Plan
from runs.prereg import ROOT, grid_digest, load
from runs.progress import progress
from runs.store import Store
from scripts import _cli
from scripts._command import command, typed


def main(argv: Sequence[str] | None = None) -> int:
    """Print each claim's plans with their counts, the time left and the command that goes on."""
    parser = ArgumentParser("scripts.status", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args(argv).json
    settings = _cli.settings()
    settings.require_store()
    found = report(settings.store, settings.workers)
    print(json.dumps(found, indent=1) if as_json else "\n".join(_lines(found, settings)))
    return 0


def report(root: Path, workers: int) -> dict[str, Any]:
    """By claim: title, grid, and for each stored plan its settings, counts, failures, seconds left and next command."""
    registry, store = load(ROOT), Store(root)
    named = None if root.resolve() == (ROOT / "runs" / "store").resolve() else root
    grids: dict[str, list[tuple[Mapping[str, Any], dict[str, Any]]]] = {grid: [] for grid in registry.grids}
    for header in store.plans():
        if header["grid"] in grids and (plan := store.read_plan(header["grid"], header["profile"], header["request"])):
            current = header["design"] == grid_digest(registry, header["grid"], ROOT)
            grids[header["grid"]].append((header, _plan(store, plan, workers) | {"current": current}))
    return {
        claim.id: {
            "title": claim.title,
            "grid": claim.grid,
            "runnable": bool(claim.judging),
            "plans": [plan | {"next": command(claim.id, header, named)} for header, plan in grids[claim.grid]],
        }
        for claim in registry.claims.values()
    }


def _plan(store: Store, plan: Plan, workers: int) -> dict[str, Any]:
    header, made = plan.header, progress(store, plan)
    return {
        "settings": typed(header),
        "profile": header["profile"],
        "request": header["request"],
        "population": header["population"],
        "total": plan.cells.num_rows,
        **made.counts,
        "examples_left": made.left,
        "examples_in_journals": made.in_journals,
        "eta_s": made.eta_s(workers),
        "failures": made.failures,
    }


def _lines(found: Mapping[str, Any], settings: _cli.Settings) -> list[str]:
    lines, workers = [], settings.workers
    asked = {"profile": settings.profile, "request": settings.request}
    for claim, block in found.items():
        lines.append(f"{claim:<12} {block['title']}")
        if not block["plans"]:
            lines.append(
                f"    no rows yet: {command(claim, asked)}"
                if block["runnable"]
                else "    this version cannot run it yet"
            )
        for plan in block["plans"]:
            lines += [f"    {line}" for line in _plan_lines(plan, workers)]
    return lines


def _plan_lines(plan: Mapping[str, Any], workers: int) -> list[str]:
    counts = ", ".join(f"{plan[name]:,} {name}" for name in ("done", "missing", "failed"))
    lines = [f"{plan['population']}: {counts} of {plan['total']:,} cells"]
    if plan["settings"]:
        lines[0] += f"  [{plan['settings']}]"
    if not plan["current"]:
        lines.append("planned under an earlier design: these rows count only where DEVIATIONS.md names it")
    if plan["refused"]:
        lines.append(f"{plan['refused']:,} of the missing have rows of another design, which are not used")
    lines += [f"{cells:,} failed: {' '.join(message.split())[:200]}" for message, cells in plan["failures"].items()]
    if plan["missing"]:
        eta = "" if plan["eta_s"] is None else f", about {duration(plan['eta_s'])} with {workers} workers"
        lines.append(f"{plan['examples_left']:,} examples left{eta}: {plan['next']}")
        if plan["examples_in_journals"]:
            lines.append(f"{plan['examples_in_journals']:,} examples are done, their units not yet whole")
    return lines


def duration(seconds: float) -> str:
    """Two units of time, the larger first: 45 s, 3 min 20 s, 5 h 12 min, 3 d 4 h."""
    whole = round(seconds)
    for size, name, small, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // small} {part}"
    return f"{whole} s"


if __name__ == "__main__":
    sys.exit(_cli.run(main))
