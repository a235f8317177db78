"""A grid from the user's settings: its plan stored before its first cell, what is missing run, what was done said."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from analysis.classes import too_few
from runs.cells import Plan, alike
from runs.config import RunConfig
from runs.digests import grid_digest
from runs.errors import UserError
from runs.grid import CONVERSATIONS, REPLAYS, Part, header, parts
from runs.prereg import accept
from runs.registry import ROOT, Claim, Registry
from runs.store import Store
from scripts._cli import Settings
from scripts.compose import compose


@dataclass(frozen=True)
class Planned:
    """A stored plan, its parts, and, where it had to be made just now, the texts of each part."""

    plan: Plan
    parts: tuple[Part, ...]
    found: Sequence[Sequence[Any]] | None


def configs(settings: Settings, registry: Registry, grid: str) -> list[RunConfig]:
    """One configuration a model: those of the profile, of MODELS=, or the one of MODEL= or of ARGS="model=..."."""
    profile = registry.grids[grid].profiles.get(settings.profile)
    if profile is None:
        raise UserError(f"PROFILE={settings.profile}: grid {grid} is not registered for it")
    base = [f"profile={settings.profile}", *_longbench(settings, grid), *_length(settings, grid)]
    if settings.models and grid != "architectures":
        raise UserError("MODELS=: only extension-4 takes several models; expected MODEL=")
    if typed := settings.models or ((settings.model,) if settings.model else ()):
        _distinct(typed, profile.sizes["models"] if settings.models else 1, settings.profile)
        named = [{"model.source": model, "model.name": model} for model in typed]
        return [compose([*base, "model=custom", *settings.args], names) for names in named]
    if any(arg.startswith("model=") for arg in settings.args):
        return [compose([*base, *settings.args])]
    if not profile.models:
        raise UserError(f"PROFILE={settings.profile}: no model is registered for grid {grid}; expected MODELS=")
    return [compose([*base, f"model={model}", *settings.args]) for model in profile.models]


def _distinct(typed: Sequence[str], most: int, profile: str) -> None:
    if len(typed) > most:
        raise UserError(f"MODELS=: {len(typed)} models; PROFILE={profile} takes at most {most}")
    if twice := [model for model in typed if typed.count(model) > 1]:
        raise UserError(f"MODELS=: {twice[0]} twice; expected different models")


def _longbench(settings: Settings, grid: str) -> list[str]:
    return ["task=longbench"] if settings.data and grid in REPLAYS else []


def _length(settings: Settings, grid: str) -> list[str]:
    """CTX= as overrides: of a task grid the length of LongBench's stratum where DATA= adds one, else of its own tasks."""
    if not settings.ctx:
        return []
    if grid in (*REPLAYS, *CONVERSATIONS):
        return [f"{'replay' if grid in REPLAYS else grid}.ctx_tokens={settings.ctx}"]
    further = settings.data and getattr(compose([f"profile={settings.profile}"]), grid).longbench
    return [f"{grid}.{'longbench.' if further else ''}ctx_tokens=[{settings.ctx}]"]


def header_of(settings: Settings, registry: Registry, grid: str, mine: Sequence[Part]) -> dict[str, Any]:
    """The header of the plan that a request asks for, but for what its texts decide."""
    profile = registry.grids[grid].profiles[settings.profile]
    task = next((Path(path).stem for path in profile.configs if path.startswith("configs/task/")), None)
    return header(mine, settings.request, settings.profile, grid_digest(registry, grid), grid, task)


def stored_plan(settings: Settings, registry: Registry, grid: str, write: bool = True) -> Planned:
    """The plan of the user's request: the stored one where its inputs are unchanged, else a new one, written first.

    Raises UserError for anything in the request that is not there or does not fit.
    """
    store, mine = Store(settings.store), parts(configs(settings, registry, grid), settings.data, grid)
    wanted = header_of(settings, registry, grid, mine)
    plan = store.read_plan(grid, settings.profile, settings.request)
    if plan is not None and alike(plan.header, wanted):
        return Planned(plan, mine, None)
    # Only a new plan needs the tokenizer, and with it torch and transformers: a finished one is judged in seconds.
    from runs import prepare

    found = [prepare.documents(part) for part in mine]
    manifests = registry.grids[grid].profiles[settings.profile].manifests
    plan = prepare.plan(mine, found, wanted, [ROOT / path for path in manifests])
    if write:
        store.write_plan(plan)
    return Planned(plan, mine, found)


def lent(settings: Settings, claim: Claim) -> tuple[Settings, str]:
    """The settings and the task of the rows that a claim is calibrated on."""
    return replace(settings, data=None, ctx=None, args=(), models=()), str(claim.params["calibration_task"])


def calibrate(settings: Settings, registry: Registry, claim: Claim) -> int:
    """Run what the store lacks of the rows that a claim is calibrated on; nothing where it is not, or DATA= is no use."""
    if not claim.calibration:
        return 0
    stored_plan(settings, registry, claim.grid)  # a mistake in its own settings is told first
    plain, task = lent(settings, claim)
    designs = accept(ROOT, registry.owner(claim.calibration), registry).grids
    return compute(plain, registry, claim.calibration, designs, task=task)


def to_do(store: Store, plan: Plan, designs: Collection[str], task: str | None = None) -> list[str]:
    """The units, of one task alone or of all, that lack cells, and those with failed examples.

    What failed for want of memory must not stay so.
    """
    own = plan.cells if task is None else plan.cells.filter(pc.equal(plan.cells["task"], task))
    wanted = set(own["unit"].to_pylist())
    return [unit for unit in dict.fromkeys([*store.missing(plan, designs), *store.failing(plan)]) if unit in wanted]


def compute(
    settings: Settings,
    registry: Registry,
    grid: str,
    designs: Collection[str],
    retry_only: bool = False,
    task: str | None = None,
) -> int:
    """Run the cells that the store lacks, and say on stderr what was done; 1 where some failed or a worker died.

    designs: the digests that rows may carry, those of declared deviations included. retry_only: of the cells that the
    store lacks none, only examples that failed. task: cells of this one alone.
    """
    planned, store = stored_plan(settings, registry, grid), Store(settings.store)
    plan = planned.plan
    if settings.data:
        _warn(registry, plan)
    missing = store.failing(plan) if retry_only else to_do(store, plan, designs, task)
    if not missing:
        every = f"all {plan.cells.num_rows:,} cells are stored" if task is None else f"{task} is stored"
        stored = "no example failed" if retry_only else every
        return _said(store, plan, designs, f"{stored}, nothing to run")
    from runs import execute, prepare  # as above: only where there is something to compute
    from runs.kinds import kind_named

    found = planned.found or prepare.texts(planned.parts, plan, missing)
    report = execute.run(store, plan, planned.parts, found, missing, settings.workers)
    for example, message in report.failures.items():
        print(f"failed: {example}: {message}", file=sys.stderr)
    if report.died:
        print(
            "a worker died (killed, or out of memory); the same command goes on, WORKERS=1 needs less memory",
            file=sys.stderr,
        )
    noun = kind_named(plan.header["kind"]).noun
    return _said(store, plan, designs, f"{report.done} {noun}s in {report.wall_s:.0f} s") or int(report.died)


def _warn(registry: Registry, plan: Plan) -> None:
    """A registered sample of LongBench can be too small for a claim: said before hours are spent on it."""
    for claim in (claim for claim in registry.claims.values() if claim.grid == plan.header["grid"]):
        for lack in too_few(claim, plan.cells.to_pandas(), data=True):
            print(f"note: {claim.id}: {lack}", file=sys.stderr)


def _said(store: Store, plan: Plan, designs: Collection[str], what: str) -> int:
    counts = store.counts(plan, designs)
    print(
        f"{what}; {counts['done']:,} of {plan.cells.num_rows:,} cells done, {counts['failed']:,} failed, in {store.root}",
        file=sys.stderr,
    )
    return int(counts["failed"] > 0)
