"""make plan: what the claims would run under PROFILE, and what it costs. No model is loaded. python -m scripts.plan"""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from runs.registry import ROOT, load
from scripts._cli import Settings, run, settings
from scripts._command import command
from scripts._costs import costs

ALONE = "hours are those of the examples: starting, planning and loading a model come on top, once a run and worker"


def main(argv: list[str] | None = None) -> int:
    """Print, for each grid of the profile, its claims, models, units, cells, needs and measured cost."""
    parser = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    chosen = settings()
    found = costs(chosen, load())
    print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found, chosen)))
    return 0


def _lines(found: list[dict[str, Any]], chosen: Settings) -> list[str]:
    lines = [f"profile {chosen.profile}, {chosen.workers} workers, rows in {chosen.store}", ALONE]
    for grid in found:
        named = len(grid["models"]) == grid["sizes"].get("models")
        lines += [
            f"{grid['grid']}: {_cells(grid)}",
            f"    for {', '.join(grid['claims'])}; models: {', '.join(grid['models']) if named else 'not all named yet'}",
            f"    {grid['missing']:,} cells missing; {_state(grid)}",
            *([f"    refused as typed: {grid['refused']}"] if grid["refused"] else []),
            *(f"    {claim}: {lack}" for claim, lacks in grid["too_few"].items() for lack in lacks),
        ]
    needs = dict.fromkeys(need for grid in found if grid["runnable"] for need in grid["needs"])
    return [*lines, *(f"needs {need}" for need in needs), f"next: {_next(found, chosen)}"]


def _cells(grid: Mapping[str, Any]) -> str:
    parts = [grid[key] for key in ("sizes", "calibration") if grid[key]]
    sizes = " + ".join(" x ".join(f"{n:,} {axis}" for axis, n in part.items()) for part in parts)
    generations = f" ({grid['cells']:,} generations)" if grid["kind"] != "replay" else ""
    further = f"; DATA= adds at most {grid['further']:,}" if grid["further"] else ""
    return f"{grid['cells']:,} cells = {sizes}{generations}{further}"


def _next(found: list[dict[str, Any]], chosen: Settings) -> str:
    """The command for the first grid that lacks cells and has all its models named; DATA= where it lacks that."""
    usual = chosen.store.resolve() == (ROOT / "runs" / "store").resolve()
    asked = {"profile": chosen.profile, "request": chosen.request}
    for grid in found:
        named = len(grid["models"]) >= grid["sizes"].get("models", 1)
        if grid["runnable"] and grid["missing"] and named and not (grid["refused"] and chosen.data):
            typed = command(grid["claims"][0], asked, None if usual else chosen.store)
            return typed + (" DATA=..." if grid["refused"] else "")
    return "make claims"


def _state(grid: Mapping[str, Any]) -> str:
    if not grid["runnable"]:
        return "this version has no runner for it yet"
    size = "" if grid["bytes"] is None else f", about {max(0.1, grid['bytes'] / 2**20):,.1f} MiB"
    cut = f"{grid['examples']:,} examples in {grid['units']:,} units{size}"
    if grid["hours"] is None:
        return f"{cut}; no seconds measured yet for {', '.join(grid['unmeasured'])}"
    hours = grid["hours"]
    took = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    return f"{cut}; the whole grid takes about {took}" + ("" if grid["missing"] else "; all done")


if __name__ == "__main__":
    sys.exit(run(main))
