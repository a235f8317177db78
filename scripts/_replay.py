"""A replay plan from the user's settings: stored before its first cell, and reused while its inputs are equal."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runs.cells import Plan
from runs.config import RunConfig
from runs.grid import Part, header, parts
from runs.registry import ROOT, Registry
from runs.store import Store
from scripts._cli import Settings
from scripts.compose import compose

if TYPE_CHECKING:
    from runs.execute import Report


@dataclass(frozen=True)
class Prepared:
    """A stored plan, and the parts it came from."""

    store: Store
    plan: Plan
    parts: tuple[Part, ...]


def configs(settings: Settings, registry: Registry, grid: str) -> list[RunConfig]:
    """One configuration a model: the profile's models, or the one of MODEL=."""
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


def stored_plan(settings: Settings, registry: Registry, grid: str, design: str) -> Prepared:
    """The plan of the user's request: the stored one where its inputs are unchanged, else a new one, written first.

    Raises UserError for anything in the request that is not there or does not fit.
    """
    store = Store(settings.store)
    mine = parts(configs(settings, registry, grid), settings.data)
    wanted = header(mine, settings.request, settings.profile, design, grid)
    plan = store.read_plan(grid, settings.profile, settings.request)
    if plan is None or any(plan.header[key] != wanted[key] for key in ("design", "inputs", "model")):
        # Only a new plan needs the tokenizer, and with it torch and transformers: a finished one is judged in seconds.
        from runs import prepare

        manifests = registry.grids[grid].profiles[settings.profile].manifests
        found = [prepare.documents(part) for part in mine]
        plan = prepare.plan(mine, found, wanted, [ROOT / path for path in manifests])
        store.write_plan(plan)
    return Prepared(store, plan, mine)


def run_missing(prepared: Prepared, workers: int) -> "Report | None":
    """Run what the store lacks of the plan; None where nothing is missing."""
    if not prepared.store.missing(prepared.plan):
        return None
    from runs import execute, prepare  # torch, only where there is something to compute

    found = [prepare.documents(part) for part in prepared.parts]
    return execute.run(prepared.store, prepared.plan, prepared.parts, found, workers)
