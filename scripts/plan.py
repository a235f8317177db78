"""make plan: what the claims would run under PROFILE, and what it costs. No model is loaded. python -m scripts.plan"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from statistics import mean
from typing import Any

import yaml

from runs.grid import RUNNABLE, UNIT_EXAMPLES
from runs.progress import progress
from runs.registry import ROOT, Profile, Registry, load
from runs.store import Store
from scripts._cli import Settings, run, settings

APART = ("models", "lengths", "tasks")  # sizes whose examples share no unit
TOGETHER = ("documents", "examples", "dialogues", "conversations")


def main(argv: list[str] | None = None) -> int:
    """Print, for each grid of the profile, its claims, models, units, cells and measured cost."""
    parser = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    chosen = settings()
    found = costs(chosen, load())
    print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found, chosen)))
    return 0


def costs(chosen: Settings, registry: Registry) -> list[dict[str, Any]]:
    """For each grid that has the profile: sizes as registered, and what of its cost was measured.

    hours: of the whole grid, from the mean seconds of an example of each of its models; bytes: likewise, from those of
    stored rows; both null where some are not measured.
    """
    store, found = Store(chosen.store), []
    measured = _measured(store, chosen.profile)
    for name, grid in registry.grids.items():
        if chosen.profile not in grid.profiles:
            continue
        profile = grid.profiles[chosen.profile]
        plan = store.read_plan(name, chosen.profile, chosen.request)
        known = measured.get(name, {"example_s": {}, "bytes": 0, "rows": 0})
        models = _models(chosen, profile)
        examples = sum(math.prod(sizes.get(axis, 1) for axis in (*APART, *TOGETHER)) for sizes in profile.parts)
        lacking = [model for model in models if model not in known["example_s"]]
        whole_s = sum(mean(known["example_s"][model]) for model in models if model not in lacking) / max(1, len(models))
        runs = name in RUNNABLE
        found.append(
            {
                "grid": name,
                "kind": grid.kind,
                "claims": [claim.id for claim in registry.claims.values() if claim.grid == name],
                "models": list(profile.models),
                "sizes": dict(profile.sizes),
                "calibration": dict(profile.calibration),
                "cells": profile.cells,
                "missing": progress(store, plan).counts["missing"] if plan else profile.cells,
                "units": len(plan.units) if plan else sum(map(_units, profile.parts)),
                "examples": sum(map(len, plan.units.values())) if plan else examples,
                "runnable": runs,
                "unmeasured": lacking,
                "hours": whole_s * examples / chosen.workers / 3600 if runs and not lacking else None,
                "bytes": round(known["bytes"] / known["rows"] * profile.cells) if runs and known["rows"] else None,
            }
        )
    return found


def _units(sizes: Mapping[str, int]) -> int:
    groups, each = (math.prod(sizes.get(axis, 1) for axis in axes) for axes in (APART, TOGETHER))
    return groups * math.ceil(each / UNIT_EXAMPLES)


def _models(chosen: Settings, profile: Profile) -> list[str]:
    """The models of a run by the name that provenance has: that of their configuration, or MODEL=, MODELS= as typed."""
    if chosen.model or chosen.models:
        return list(chosen.models) or [str(chosen.model)]
    files = [ROOT / "configs" / "model" / f"{name}.yaml" for name in profile.models]
    return [yaml.safe_load(path.read_text(encoding="utf-8"))["name"] for path in files]


def _measured(store: Store, profile: str) -> dict[str, Any]:
    """By grid, from the stored units of a profile: seconds of examples by model, bytes and rows."""
    found: dict[str, Any] = {}
    for file in store.unit_files():
        meta = store.meta(file.path)
        if meta["plan"]["profile"] != profile:
            continue
        grid = found.setdefault(meta["plan"]["grid"], {"example_s": {}, "bytes": 0, "rows": 0})
        grid["bytes"] += file.path.stat().st_size
        grid["rows"] += meta["rows"]
        for example, wall_s in meta["wall_s"].items():
            config = meta["runs"][meta["run_of"][example]].get("config") or {}
            grid["example_s"].setdefault(config.get("model", {}).get("name"), []).append(wall_s)
    return found


def _lines(found: list[dict[str, Any]], chosen: Settings) -> list[str]:
    lines = [f"profile {chosen.profile}, {chosen.workers} workers, rows in {chosen.store}"]
    for grid in found:
        parts = [grid[key] for key in ("sizes", "calibration") if grid[key]]
        sizes = " + ".join(" x ".join(f"{n:,} {axis}" for axis, n in part.items()) for part in parts)
        named = len(grid["models"]) == grid["sizes"].get("models")
        generations = f" ({grid['cells']:,} generations)" if grid["kind"] != "replay" else ""
        lines += [
            f"{grid['grid']}: {grid['cells']:,} cells = {sizes}{generations}",
            f"    for {', '.join(grid['claims'])}; models: {', '.join(grid['models']) if named else 'not all named yet'}",
            f"    {grid['missing']:,} cells missing; {_state(grid)}",
        ]
    left = next((grid for grid in found if grid["runnable"] and grid["missing"]), None)
    suffix = "" if chosen.profile == "laptop" else f" PROFILE={chosen.profile}"
    return [*lines, f"next: make {left['claims'][0]}{suffix}" if left else "next: make claims"]


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
