"""make plan: what the claims would run under PROFILE, and what it costs. No model is loaded. python -m scripts.plan"""

import argparse
import json
import math
import sys
from typing import Any

from runs.progress import progress
from runs.registry import Registry, load
from runs.store import Store
from scripts._cli import Settings, run, settings

RUNNABLE = "replay"  # the grid this version has a runner for


def main(argv: list[str] | None = None) -> int:
    """Print, for each grid of the profile, its claims, models, cells and measured cost."""
    parser = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    chosen = settings()
    found = costs(chosen, load())
    print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found, chosen)))
    return 0


def costs(chosen: Settings, registry: Registry) -> list[dict[str, Any]]:
    """For each grid that has the profile: sizes as registered, and hours where seconds per example were measured."""
    store = Store(chosen.store)
    found = []
    for name, grid in registry.grids.items():
        if chosen.profile not in grid.profiles:
            continue
        profile = grid.profiles[chosen.profile]
        plan = store.read_plan(name, chosen.profile, chosen.request)
        measured = progress(store, plan) if plan else None
        example_s = measured.example_s if measured else None
        examples = math.prod(profile.sizes.get(axis, 1) for axis in ("models", "documents"))
        found.append(
            {
                "grid": name,
                "claims": [claim.id for claim in registry.claims.values() if claim.grid == name],
                "models": list(profile.models),
                "sizes": dict(profile.sizes),
                "cells": profile.cells,
                "missing": measured.counts["missing"] if measured else profile.cells,
                "runnable": name == RUNNABLE,
                "hours": example_s * examples / chosen.workers / 3600 if example_s and name == RUNNABLE else None,
            }
        )
    return found


def _lines(found: list[dict[str, Any]], chosen: Settings) -> list[str]:
    lines = [f"profile {chosen.profile}, {chosen.workers} workers, rows in {chosen.store}"]
    for grid in found:
        sizes = " x ".join(f"{n:,} {axis}" for axis, n in grid["sizes"].items())
        minutes = None if grid["hours"] is None else f"about {60 * grid['hours']:.1f} minutes"
        if not grid["runnable"]:
            state = "this version has no runner for it yet"
        elif not grid["missing"]:
            state = f"all done; the whole grid takes {minutes}"
        else:
            state = f"the whole grid takes {minutes}" if minutes else "no seconds measured yet"
        few = (
            f"{', '.join(grid['models'])}"
            if len(grid["models"]) == grid["sizes"].get("models")
            else "not all named yet"
        )
        lines += [
            f"{grid['grid']}: {grid['cells']:,} cells = {sizes}",
            f"    for {', '.join(grid['claims'])}; models: {few}",
            f"    {grid['missing']:,} cells missing; {state}",
        ]
    left = any(grid["runnable"] and grid["missing"] for grid in found)
    suffix = "" if chosen.profile == "laptop" else f" PROFILE={chosen.profile}"
    return [*lines, f"next: make {'claim-1' if left else 'claims'}{suffix if left else ''}"]


if __name__ == "__main__":
    sys.exit(run(main))
