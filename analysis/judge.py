"""Stored rows to a verdict: analysis/out/<claim>.json. No torch, no Hydra, no data: the plan in the store says it all."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import classes, complete
from analysis import frame as frames
from analysis.complete import Request
from analysis.estimands import Measured
from analysis.intervals import Interval
from analysis.text import shown
from analysis.verdict import Stratum, Tally, Verdict, decide, kill_level
from runs.cells import Plan
from runs.prereg import accept
from runs.registry import ROOT, Claim, Registry, Rules, load
from runs.store import Store

OUT = "analysis/out"
DIGITS = 10  # significant ones in the JSON: sums in another order differ after the 13th
REGISTERED: Request = {"model": None, "data": None, "ctx": None, "args": None}


@dataclass(frozen=True)
class Judged:
    """A verdict as JSON, and the rows it rests on (None: there is no plan)."""

    result: dict[str, Any]
    frame: pd.DataFrame | None


def judged(
    claim_id: str,
    profile: str = "laptop",
    request: Request = REGISTERED,
    store: Path | None = None,
    root: Path = ROOT,
    rules: Rules | None = None,
) -> Judged:
    """Judge a claim from the rows of the plan stored for a profile and request, and write analysis/out/<claim>.json.

    Otherwise as `judge`. Raises UserError also where the result cannot be written.
    """
    found = judge(claim_id, profile, request, store, root, rules)
    text = json.dumps(found.result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    frames.write(root / OUT / f"{claim_id}.json", text.encode())
    return found


def judge(
    claim_id: str,
    profile: str = "laptop",
    request: Request = REGISTERED,
    store: Path | None = None,
    root: Path = ROOT,
    rules: Rules | None = None,
) -> Judged:
    """Judge a claim from the rows of the plan stored for a profile and request; nothing is written.

    store: folder of the rows, runs/store by default. rules: those of claims.yaml by default; another seed gives other
    bounds, the same seed the same bytes. Raises UserError where prereg/ does not match its LOCK, all rows are of another
    design, or a file of the store is damaged.
    """
    registry = load(root)
    claim, accepted, rules = registry.claim(claim_id), accept(root, claim_id, registry), rules or registry.rules
    where = Store(store or root / "runs" / "store")
    plan = where.read_plan(claim.grid, profile, request)
    rows = None if plan is None else frames.whole(where, plan, accepted.grids)
    known = rows if plan is None or rows is None else frames.calibrated(rows, plan, claim, where, registry, root)
    strata, beside = _measured(claim, rules, known, registry.grids[claim.grid].kind)
    tally = complete.tally(registry.grids[claim.grid], profile, request, plan, rows)
    decided = decide(claim, rules, strata, tally, complete.obstacles(registry, claim, profile, request, plan))
    more = classes.uncounted(claim, rows, strata) if rows is not None and strata else {}
    verdict = replace(decided, reasons=tuple(classes.told(decided.reasons, strata, more, _unit(claim))))
    kill = kill_level(rules, strata)
    versions = frames.code_versions(where, plan) if plan else 0
    result = _head(claim, profile, request, plan, verdict, versions) | {
        "design": accepted.design,
        "judging": accepted.judging,
        "strata": [_stratum(claim, rules, stratum, kill) | _more(more, stratum) for stratum in strata],
        "missing": tally.missing,
        "failed": tally.failed,
        "rows": tally.planned - tally.missing,
        "planned": tally.planned,
        "deviations": [asdict(deviation) for deviation in accepted.deviations],
        "beside": beside,
        "level": rules.level,
        "kill_level": kill,
        "resamples": rules.resamples,
        "seed": rules.seed,
        "rows_digest": None if known is None else frames.digest(known),
        "store": shown(where.root, root),
        "next": _next(registry, claim, profile, request, tally),
    }
    return Judged(_plain(result, rules.level), rows)


def _measured(
    claim: Claim, rules: Rules, rows: pd.DataFrame | None, kind: str
) -> tuple[Sequence[Stratum], Mapping[str, Any]]:
    """Measure the rows that are ok; of answers all of them, since pairs with a failed member are counted there."""
    known = None if rows is None else rows[rows["status"] == "ok"] if kind == "replay" else rows
    if known is None or known.empty or not claim.judging:
        return [], {}
    estimand = import_module(f"analysis.estimands.{claim.estimand}")
    ruled = replace(claim, params={**asdict(rules), **claim.params})  # what holds for every claim holds for pairs too
    found: Measured = estimand.measure(known, ruled, rules.resamples, rules.seed)
    return found.strata, found.beside


def _head(
    claim: Claim, profile: str, request: Request, plan: Plan | None, verdict: Verdict, versions: int
) -> dict[str, Any]:
    population = plan.header["population"] if plan else None
    mixed = [f"its rows come from {versions} versions of the code (make explain tells which)"] if versions > 1 else []
    return {
        "id": claim.id,
        "title": claim.title,
        "question": claim.question,
        "verdict": verdict.outcome,
        "population": population,
        "synthetic": bool(plan and plan.header.get("synthetic")),
        "population_notes": [*(plan.header["population_notes"] if plan else []), *mixed],
        "profile": profile,
        "request": dict(request),
        "reasons": verdict.reasons,
        "cluster": claim.cluster,
        "unit": _unit(claim),
        "words": {**claim.measures, **claim.beside},
        "paper": claim.paper_text,
        "rules": {
            "supported_if": " and ".join(map(str, claim.supported_if)),
            "killed_if": " or ".join(map(str, claim.killed_if)),
        },
    }


def _unit(claim: Claim) -> str:
    return str(claim.params.get("unit", "cells"))


def _more(more: Mapping[str, Mapping[str, int]], stratum: Stratum) -> dict[str, Any]:
    """The stratum's key `one_class`, where there are such answers."""
    return {"one_class": more[stratum.name]} if stratum.name in more else {}


def _stratum(claim: Claim, rules: Rules, stratum: Stratum, kill: float) -> dict[str, Any]:
    measures = {
        name: {"estimate": interval.value}
        | dict(zip(("low", "high"), interval.at(rules.level), strict=True))
        | dict(zip(("kill_low", "kill_high"), interval.at(kill), strict=True))
        for name, interval in stratum.measures.items()
    }
    first = measures.get(claim.supported_if[0].measure, {})
    paper = claim.paper.get(stratum.name, claim.paper.get(stratum.name.split(", ")[-1]))
    return {
        "name": stratum.name,
        **{key: first.get(key) for key in ("estimate", "low", "high")},
        "n": stratum.n,
        "clusters": stratum.clusters,
        "supported_if": " and ".join(map(str, claim.supported_if)),
        "killed_if": " or ".join(map(str, claim.killed_if)),
        "paper": claim.paper_text if paper is None else paper,
        "classes": stratum.classes,
        "measures": measures,
    }


def _next(registry: Registry, claim: Claim, profile: str, request: Request, tally: Tally) -> str:
    able = [other for other in registry.claims.values() if other.judging]
    settings = {"PROFILE": None if profile == "laptop" else profile} | {k.upper(): v for k, v in request.items()}
    typed = "".join(f" {key}={shlex.quote(str(value))}" for key, value in settings.items() if value)
    if claim not in able:
        return f"nothing yet; what this version can run: {', '.join(f'make {other.id}' for other in able)}"
    if tally.missing:
        return f"make {claim.id}{typed}   runs the missing cells"
    if profile == "smoke":
        data = f" DATA={shlex.quote(str(request['data']))}" if request["data"] else ""
        return f"make {claim.id}{data}   the same on a real model"
    same = [f"make {other.id}{typed}" for other in able if other.grid == claim.grid and other != claim]
    return f"{', '.join(same)}   the same rows" if same else "make claims   where every claim stands"


def _plain(value: Any, level: float) -> Any:
    """JSON of a result: intervals at `level`, floats to DIGITS significant digits, undefined ones null."""
    if isinstance(value, Interval):
        low, high = value.at(level)
        return _plain({"estimate": value.value, "low": low, "high": high}, level)
    if isinstance(value, Mapping):
        return {key: _plain(item, level) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, level) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
