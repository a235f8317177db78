"""A replay from the user's settings: its plan stored before its first cell, what is missing run, what was done said."""

import sys
from collections.abc import Collection
from pathlib import Path

from runs.cells import Plan
from runs.config import RunConfig
from runs.digests import grid_digest
from runs.grid import Part, header, parts
from runs.registry import ROOT, Registry
from runs.store import Store
from scripts._cli import Settings
from scripts.compose import compose


def configs(settings: Settings, registry: Registry, grid: str) -> list[RunConfig]:
    """One configuration a model: those of the profile, or the one of MODEL= or of ARGS="model=..."."""
    base = [f"profile={settings.profile}"]
    if settings.data:
        base.append("task=longbench")
    if settings.ctx:
        base.append(f"replay.ctx_tokens={settings.ctx}")
    if settings.model:
        named = {"model.source": settings.model, "model.name": settings.model}
        return [compose([*base, "model=custom", *settings.args], named)]
    if any(arg.startswith("model=") for arg in settings.args):
        return [compose([*base, *settings.args])]
    models = registry.grids[grid].profiles[settings.profile].models
    return [compose([*base, f"model={model}", *settings.args]) for model in models]


def stored_plan(settings: Settings, registry: Registry, grid: str) -> tuple[Plan, tuple[Part, ...]]:
    """The plan of the user's request: the stored one where its inputs are unchanged, else a new one, written first.

    Raises UserError for anything in the request that is not there or does not fit.
    """
    store, mine = Store(settings.store), parts(configs(settings, registry, grid), settings.data)
    profile = registry.grids[grid].profiles[settings.profile]
    (task,) = (Path(path).stem for path in profile.configs if path.startswith("configs/task/"))
    wanted = header(mine, settings.request, settings.profile, grid_digest(registry, grid), grid, task)
    plan = store.read_plan(grid, settings.profile, settings.request)
    if plan is not None and all(plan.header[key] == wanted[key] for key in ("design", "inputs", "model")):
        return plan, mine
    # Only a new plan needs the tokenizer, and with it torch and transformers: a finished one is judged in seconds.
    from runs import prepare

    found = [prepare.documents(part) for part in mine]
    plan = prepare.plan(mine, found, wanted, [ROOT / path for path in profile.manifests])
    store.write_plan(plan)
    return plan, mine


def compute(settings: Settings, registry: Registry, grid: str, designs: Collection[str]) -> int:
    """Run the cells that the store lacks, and say on stderr what was done; 1 where some failed or a worker died.

    designs: the digests that rows may carry, those of declared deviations included.
    """
    plan, mine = stored_plan(settings, registry, grid)
    store = Store(settings.store)
    # Failed examples are tried again: what failed for want of memory must not stay so.
    missing = list(dict.fromkeys([*store.missing(plan, designs), *store.failing(plan)]))
    if not missing:
        return _said(store, plan, designs, f"all {plan.cells.num_rows:,} cells are stored, nothing to run")
    from runs import execute, prepare  # as above: only where there is something to compute

    found = [prepare.documents(part) for part in mine]
    report = execute.run(store, plan, mine, found, missing, settings.workers)
    for example, message in report.failures.items():
        print(f"failed: {example}: {message}", file=sys.stderr)
    if report.died:
        print(
            "a worker died (killed, or out of memory); the same command goes on, WORKERS=1 needs less memory",
            file=sys.stderr,
        )
    return _said(store, plan, designs, f"{report.done} documents in {report.wall_s:.0f} s") or int(report.died)


def _said(store: Store, plan: Plan, designs: Collection[str], what: str) -> int:
    counts = store.counts(plan, designs)
    print(
        f"{what}; {counts['done']:,} of {plan.cells.num_rows:,} cells done, {counts['failed']:,} failed, in {store.root}",
        file=sys.stderr,
    )
    return int(counts["failed"] > 0)
