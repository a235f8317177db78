"""What the grids of a profile would run, need and cost: from the registration, the settings, and what is stored."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import yaml

from analysis.classes import too_few
from analysis.complete import registered
from runs import arm
from runs.cells import Plan
from runs.config import RunConfig
from runs.errors import UserError
from runs.grid import REPLAYS, RUNNABLE, UNIT_EXAMPLES, Part, require_data
from runs.longbench import NO_SPLIT
from runs.longbench_rows import load_rows, sample
from runs.progress import progress
from runs.registry import ROOT, Profile, Registry
from runs.sources import HUB_ID, Source
from runs.store import Store
from scripts._cli import Settings
from scripts.compose import compose

APART = ("models", "lengths", "tasks")  # sizes whose examples share no unit
TOGETHER = ("documents", "examples", "dialogues", "conversations")
Examples = Counter[tuple[str, int | None]]  # by model and length; no length: of any


def costs(chosen: Settings, registry: Registry) -> list[dict[str, Any]]:
    """For each grid that has the profile: sizes as registered, what it needs, and what of its cost was measured.

    refused: what a run would say of DATA=. further: cells that DATA= adds where no plan counts them yet. too_few: claims
    that no answers to it can decide. hours: of all examples, each as the mean of its model and length; bytes: likewise,
    from those of stored rows; both null where some are not measured.
    """
    store, config = Store(chosen.store), compose([f"profile={chosen.profile}", *chosen.args])
    seconds, sizes = _measured(store, chosen.profile)
    found = []
    for name, grid in registry.grids.items():
        if chosen.profile not in grid.profiles:
            continue
        profile, plan = grid.profiles[chosen.profile], store.read_plan(name, chosen.profile, chosen.request)
        models, further = _models(chosen, profile), _further(chosen, config, name)
        examples, known = _examples(chosen, config, name, profile, plan, further), seconds.get(name, {})
        cells = registered(grid, chosen.profile, chosen.request, plan)
        cells = plan.cells.num_rows if plan and (chosen.args or plan.cells.num_rows > cells) else cells
        stored, rows = sizes.get(name, (0, 0))
        runs, lacking = name in RUNNABLE, _lacking(examples, known)
        found.append(
            {
                "grid": name,
                "kind": grid.kind,
                "claims": [claim.id for claim in registry.claims.values() if claim.grid == name],
                "models": models,
                "sizes": dict(profile.sizes),
                "calibration": dict(profile.calibration),
                "cells": cells,
                "missing": cells - plan.cells.num_rows + progress(store, plan).counts["missing"] if plan else cells,
                "units": len(plan.units) if plan and plan.cells.num_rows >= cells else sum(map(_units, profile.parts)),
                "examples": sum(examples.values()),
                "further": len(further),
                "runnable": runs,
                "needs": _needs(chosen, config, profile),
                "refused": _refused(chosen, config, name),
                "too_few": _too_few(registry, name, plan, further, chosen),
                "unmeasured": lacking,
                "hours": _seconds(examples, known) / chosen.workers / 3600 if runs and not lacking else None,
                "bytes": round(stored / rows * cells) if runs and rows else None,
            }
        )
    return found


def _refused(chosen: Settings, config: RunConfig, grid: str) -> str | None:
    """What a run says of DATA= where it is lacking, or of no use."""
    try:
        require_data(Part(config, Source("", "", "", ""), Path(chosen.data) if chosen.data else None, (0, 1), grid))
    except UserError as error:
        return str(error)
    return None


def _needs(chosen: Settings, config: RunConfig, profile: Profile) -> list[str]:
    """What must be there beside this checkout and DATA=: models of the hub, a GPU."""
    hub = [source.partition("@")[0] for _, source in _configured(profile) if HUB_ID.fullmatch(source)]
    found = [f"the hub, once, for {', '.join(hub)} (HF_TOKEN where one is gated), or MODEL="] if hub else []
    if chosen.model or chosen.models:
        found = []
    if "bfloat16" in (config.tasks.dtype, config.synthetic.dtype):
        found.append("a GPU; the profiles for a CPU are laptop and desktop")
    return found


def _configured(profile: Profile) -> list[tuple[str, str]]:
    """Name and source of each model that a profile is registered with."""
    files = [ROOT / "configs" / "model" / f"{name}.yaml" for name in profile.models]
    known = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files]
    return [(model["name"], model["source"]) for model in known]


def _models(chosen: Settings, profile: Profile) -> list[str]:
    """The models of a run by the name that provenance has: that of their configuration, or MODEL=, MODELS= as typed."""
    if chosen.model or chosen.models:
        return list(chosen.models) or [str(chosen.model)]
    return [name for name, _ in _configured(profile)]


def _further(chosen: Settings, config: RunConfig, grid: str) -> pd.DataFrame:
    """Cells that DATA= adds to the tasks grid, a column `row` with them; a copy on the hub is not loaded for it."""
    more, data = (config.tasks.longbench if grid == "tasks" else None), chosen.data
    # A single file is LoCoMo's, which the conversations take.
    if not more or not data or HUB_ID.fullmatch(data) or Path(data).is_file():
        return pd.DataFrame()
    rows, arms = load_rows(data), [arm.parse(text) for text in config.tasks.arms]
    drawn = sample(rows, more.sample, config.tasks.text_seed).rows
    return pd.DataFrame(
        {"row": row["id"], "task": row["task"], "ctx_tokens": limit}
        | {name: getattr(one, name) for name in ("policy", "mode", "budget", "draw")}
        for limit in ([chosen.ctx] if chosen.ctx else more.ctx_tokens)
        for row in drawn
        for one in arms
        if one.mode != "agnostic" or (row["task"] not in NO_SPLIT and row["input"])
    )


def _examples(
    chosen: Settings, config: RunConfig, grid: str, profile: Profile, plan: Plan | None, further: pd.DataFrame
) -> Examples:
    """How many examples of each model and length a grid has: those of its plan, else those of its registered sizes."""
    models = _models(chosen, profile)
    each = sum(math.prod(sizes.get(axis, 1) for axis in (*APART[1:], *TOGETHER)) for sizes in profile.parts)
    found: Examples = Counter()
    if plan:
        columns = [name for name in ("model", "ctx_tokens", "example") if name in plan.cells.column_names]
        planned = plan.cells.select(columns).to_pandas().drop_duplicates()
        names = dict(zip(planned["model"].unique(), models, strict=False))  # parts stand in the order of their models
        lengths = planned["ctx_tokens"].tolist() if "ctx_tokens" in columns else [None] * len(planned)
        found.update(zip(planned["model"].map(names), lengths, strict=True))
    else:
        lengths = _lengths(chosen, config, grid)
        found.update({(model, length): each // len(lengths) for model in models for length in lengths})
        more = Counter(further.drop_duplicates(["row", "ctx_tokens"])["ctx_tokens"]) if len(further) else {}
        found.update({(model, length): count for model in models for length, count in more.items()})
    if not chosen.model and (unnamed := profile.sizes.get("models", 1) - len(models)) > 0:
        found[f"{unnamed} models that MODELS= may name", None] = unnamed * each
    return found


def _lengths(chosen: Settings, config: RunConfig, grid: str) -> list[int | None]:
    """The limits in tokens that a grid's examples have, as far as they are configured."""
    block = config.replay if grid in REPLAYS else getattr(config, grid)
    if chosen.ctx and not (chosen.data and getattr(block, "longbench", None)):
        return [chosen.ctx]
    limits: int | tuple[int, ...] | None = block.ctx_tokens
    return list(limits) if isinstance(limits, tuple) else [limits]


def _units(sizes: Mapping[str, int]) -> int:
    groups, each = (math.prod(sizes.get(axis, 1) for axis in axes) for axes in (APART, TOGETHER))
    return groups * math.ceil(each / UNIT_EXAMPLES)


def _too_few(
    registry: Registry, grid: str, plan: Plan | None, further: pd.DataFrame, chosen: Settings
) -> dict[str, list[str]]:
    planned = plan.cells.to_pandas() if plan else further
    claims = [claim for claim in registry.claims.values() if claim.grid == grid and len(planned)]
    found = {claim.id: too_few(claim, planned, bool(chosen.data)) for claim in claims}
    return {claim: lacks for claim, lacks in found.items() if lacks}


def _measured(
    store: Store, profile: str
) -> tuple[dict[str, dict[tuple[str, int | None], list[float]]], dict[str, tuple[int, int]]]:
    """By grid, from the stored units of a profile: seconds of examples by model and length; bytes and rows."""
    lengths: dict[str, int] = {}
    for header in store.plans():
        plan = store.read_plan(header["grid"], header["profile"], header["request"])
        if plan and header["profile"] == profile and "ctx_tokens" in plan.cells.column_names:
            lengths.update(zip(plan.cells["unit"].to_pylist(), plan.cells["ctx_tokens"].to_pylist(), strict=True))
    seconds: dict[str, dict[tuple[str, int | None], list[float]]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for file in store.unit_files():
        meta = store.meta(file.path)
        if meta["plan"]["profile"] != profile:
            continue
        grid, (stored, rows) = meta["plan"]["grid"], sizes.get(meta["plan"]["grid"], (0, 0))
        sizes[grid] = stored + file.path.stat().st_size, rows + meta["rows"]
        for example, wall_s in meta["wall_s"].items():
            model = (meta["runs"][meta["run_of"][example]].get("config") or {}).get("model", {}).get("name")
            seconds.setdefault(grid, {}).setdefault((model, lengths.get(file.unit)), []).append(wall_s)
    return seconds, sizes


def _of(known: Mapping[tuple[str, int | None], list[float]], key: tuple[str, int | None]) -> list[float]:
    """The seconds of a model's examples of a length; of units that no plan names, whatever their length."""
    return known.get(key) or known.get((key[0], None)) or []


def _lacking(examples: Examples, known: Mapping[tuple[str, int | None], list[float]]) -> list[str]:
    """What was not measured: a model, or one at a length where others of its lengths were."""
    absent = [key for key in examples if not _of(known, key)]
    whole = {model for model, _ in absent} - {model for model, length in examples if (model, length) not in absent}
    return list(dict.fromkeys(model if model in whole else f"{model} at {length:,} tokens" for model, length in absent))


def _seconds(examples: Examples, known: Mapping[tuple[str, int | None], list[float]]) -> float:
    return sum(mean(_of(known, key)) * count for key, count in examples.items())
