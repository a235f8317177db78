"""One run from Hydra overrides: python -m scripts.run profile=smoke grid=tasks computes one example and prints a summary.

With --sweep NAME the runs of configs/sweep/NAME.yaml, one after the other, into the store. grid: replay (the default),
tasks or synthetic; MODEL=, DATA=, CTX= and STORE= as for make.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from runs.errors import UserError
from runs.grid import RUNNABLE, parts
from runs.prereg import accept
from runs.registry import ROOT, Registry, load
from scripts._cli import PROFILES, Settings, run, settings
from scripts._grid import compute, configs, header_of
from scripts.compose import expand

ANSWER = (
    "request",
    "kind",
    "age",
    "arm",
    "system",
    "official",
    "certificate",
    "logprob",
    "realised_budget",
    "prediction",
)
RADIUS = "radius_empirical_bernstein"
MEDIANS = {"median_error": "err", "median_radius": RADIUS}


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, 1 where an example or a run of the sweep failed, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m scripts.run", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="profile=smoke grid=tasks tasks.seed=7 model=tiny ...")
    parser.add_argument("--example", type=int, default=0, help="which of the run's, from 0; nothing is stored")
    parser.add_argument("--json", action="store_true", help="every column of its rows, a JSON object a line")
    parser.add_argument("--sweep", help="compute and store all runs of a sweep instead")
    options = parser.parse_intermixed_args(argv)
    if options.sweep:
        return sweep(options.sweep, options.overrides)
    rows, failed = example(options.overrides, options.example)
    for line in [json.dumps(row, ensure_ascii=False) for row in rows] if options.json else summary(rows):
        print(line)
    if failed:
        print(f"failed: {failed}", file=sys.stderr)
    return int(bool(failed))


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """An example's rows for people: answers one a line; of a replay the cells of a layer and budget together."""
    if not rows:
        return []
    shown = _cells(rows) if "err" in rows[0] else [{name: row[name] for name in ANSWER if name in row} for row in rows]
    table = [
        [name.replace("_", " ") for name in shown[0]],
        *([_said(value) for value in row.values()] for row in shown),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return [
        f"example {rows[0]['example']}, {rows[0]['model']}",
        *lines,
        f"{len(rows):,} rows, not stored; --json: all columns",
    ]


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for layer, budget in dict.fromkeys((row["layer"], row["budget"]) for row in rows):
        own = [row for row in rows if (row["layer"], row["budget"]) == (layer, budget)]
        known = [row for row in own if row[RADIUS] is not None]
        medians = {name: median(row[of] for row in known) if known else None for name, of in MEDIANS.items()}
        covered = sum(row["err"] <= row[RADIUS] for row in known)
        found.append({"layer": layer, "budget": budget, "cells": len(own), "covered": covered, **medians})
    return found


def _said(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)[1:-1][:40]
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def chosen_by(overrides: Sequence[str]) -> tuple[str, Settings]:
    """The grid and the settings of a run: grid= and profile= apart, the rest as ARGS= has it. Raises UserError."""
    named = {
        key: text.partition("=")[2] for key in ("grid", "profile") for text in overrides if text.startswith(f"{key}=")
    }
    known, base = {"grid": RUNNABLE, "profile": PROFILES}, settings()
    for key, value in named.items():
        if value not in known[key]:
            raise UserError(f"{key}={value}: expected one of {', '.join(known[key])}")
    rest = tuple(text for text in overrides if not text.startswith(("grid=", "profile=")))
    grid, profile = named.get("grid", "replay"), named.get("profile", base.profile)
    return grid, replace(base, profile=profile, args=(*base.args, *rest))


def example(overrides: Sequence[str], number: int = 0) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of one example of a run's first model, computed here and stored nowhere, or why there are none.

    Raises UserError for what the overrides do not allow, and where the run has no such example.
    """
    import torch  # seconds: the help and a mistake in the overrides do not wait for them

    from runs.execute import computed
    from runs.kinds import kind_named
    from runs.models import load_model
    from runs.prepare import plan

    (grid, chosen), registry = chosen_by(overrides), load()
    mine = parts(configs(chosen, registry, grid)[:1], chosen.data, grid)
    (part,) = mine
    kind = kind_named(part.kind)
    texts = kind.texts(part)
    if not 0 <= number < len(texts):
        raise UserError(f"--example {number}: the run has {len(texts)}; expected 0 to {len(texts) - 1}")
    torch.set_num_threads(1)
    header = header_of(chosen, registry, grid, mine)
    cells = [
        cell | {"design": header["design"]} for cell in plan(mine, [[texts[number]]], header, []).cells.to_pylist()
    ]
    serving = kind.serving(part, load_model(part.source, getattr(torch, kind.dtype(part))))
    return computed(serving, texts[number], cells)


def sweep(name: str, overrides: Sequence[str]) -> int:
    """Compute the runs of a sweep; one that fails does not stop the others, all that failed are listed: then 1."""
    registry, failed = load(), []
    runs = [[*line, *overrides] for line in expand(name)]
    for number, line in enumerate(runs, 1):
        print(f"run {number} of {len(runs)}: {' '.join(line)}", file=sys.stderr)
        try:
            if _computed(registry, line):
                failed.append((line, "some cells failed"))
        except UserError as error:
            failed.append((line, " ".join(str(error).split())))
    for line, why in failed:
        print(f"failed: {' '.join(line)}: {why}", file=sys.stderr)
    return int(bool(failed))


def _computed(registry: Registry, line: Sequence[str]) -> int:
    grid, chosen = chosen_by(line)
    claim = next(claim.id for claim in registry.claims.values() if claim.grid == grid)
    return compute(chosen, registry, grid, accept(ROOT, claim, registry).grids)


if __name__ == "__main__":
    sys.exit(run(main))
