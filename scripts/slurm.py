"""make slurm-claim-N, slurm-extension-N, slurm-all: submit what is missing as one job array, and a job that judges it.

python -m scripts.slurm claim-1; with --dry-run (DRY_RUN=1) script and commands are printed, and nothing is written.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from runs import slurm, slurm_client, slurm_queue
from runs.cells import Plan
from runs.config_launcher import LOCAL, LauncherConfig
from runs.errors import UnusedDataError, UserError
from runs.grid import RUNNABLE
from runs.prereg import accept
from runs.registry import ROOT, Registry, load
from runs.slurm import Asked, Line, Manifest
from runs.slurm_client import UnsureError
from runs.store import Store
from scripts._cli import Settings, dry_run, run, settings
from scripts._grid import lent, stored_plan, to_do
from scripts.compose import compose


@dataclass(frozen=True)
class Wanted:
    """Cells of a grid that claims need, of one task alone or all, with the designs that rows may have."""

    grid: str
    settings: Settings
    designs: frozenset[str]
    claims: Sequence[str]
    task: str | None = None


@dataclass(frozen=True)
class Missing:
    """The plan of each claim, the plans by name, and by plan and model the lines to do, by unit."""

    claims: dict[str, str]
    plans: dict[str, Asked]
    groups: dict[tuple[str, str], dict[str, Line]]


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 where it was submitted or nothing is to do, 2 for a user's mistake and for what Slurm refuses."""
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm", description=__doc__)
    parser.add_argument("claim", help="claim-1 .. claim-7, extension-1 .. extension-6, or all")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted")
    options = parser.parse_args(argv)
    chosen, registry, dry = settings(), load(), options.dry_run or dry_run()
    store, launcher = Store(chosen.store.absolute()), _launcher(chosen)
    if not dry:
        slurm_client.require_slurm()
    for words in dict.fromkeys(slurm_client.require_taken(launcher)):
        print(f"note: {words}, for now or for ever: nodes are down, drained or reserved", file=sys.stderr)
    most = min(launcher.tasks, slurm_client.max_array())
    claims = list(registry.claims) if options.claim == "all" else [registry.claim(options.claim).id]
    found = _missing(claims, chosen, registry, write=not dry)
    with nullcontext() if dry else slurm.submitting(store):
        _submit(found, store, launcher, chosen.profile, most, dry)
    return 0


def _submit(found: Missing, store: Store, launcher: LauncherConfig, profile: str, most: int, dry: bool) -> None:
    """Submit, or show, what of the missing units is not in the queue."""
    queued = _queued(store)
    groups = [[line for unit, line in lines.items() if unit not in queued] for lines in found.groups.values()]
    if not any(groups):
        n = sum(map(len, found.groups.values()))
        waiting = f"all {n:,} missing units are in the queue already: make slurm-status"
        print(waiting if n else f"all cells are stored in {store.root}: nothing to do, nothing submitted")
        return
    tasks, lines = slurm.arranged([group for group in groups if group], most)
    (_shown if dry else _submitted)(store, Manifest(found.claims, profile, found.plans, launcher, tasks, lines))


def _launcher(chosen: Settings) -> LauncherConfig:
    launcher = compose(chosen.launcher).launcher
    *_, file = (word.partition("=")[2] for word in chosen.launcher if word.startswith("launcher="))
    if launcher.name != file:  # it is what make slurm-status proposes
        raise UserError(
            f"configs/launcher/{file}.yaml: name: {launcher.name!r}; expected {file}, as the file is called"
        )
    if launcher.name == LOCAL:
        raise UserError("LAUNCHER=local: that is this machine, as make claim-1 has it; expected a Slurm site")
    if "\\" in str(chosen.store.absolute()):
        raise UserError(f"STORE={chosen.store}: a backslash in a log's path means something to Slurm; expected none")
    return launcher


def _missing(claims: Sequence[str], chosen: Settings, registry: Registry, write: bool) -> Missing:
    """What is missing or failed of the plans of some claims, and of the rows that they are calibrated on.

    Of several claims those that cannot be planned are left out, and named on stderr. Raises UserError where that is all
    of them, where none of them took DATA=, and for a design that is not the locked one.
    """
    store, found, several = Store(chosen.store), Missing({}, {}, {}), len(claims) > 1
    failed: dict[str, UserError] = {}
    for want in _wanted(claims, chosen, registry):
        try:
            asked, plan = _planned(want.settings, registry, want.grid, write, several)
        except UserError as error:
            failed[", ".join(want.claims)] = error
            continue
        key = Plan.key(want.grid, chosen.profile, asked.request)
        found.plans[key] = Asked(want.grid, asked.request, plan.design)
        if want.task is None:
            found.claims.update(dict.fromkeys(want.claims, key))
        numbers = slurm.published(store)
        models = dict(zip(plan.cells["unit"].to_pylist(), plan.cells["model"].to_pylist(), strict=True))
        for unit in to_do(store, plan, want.designs, want.task):
            lines = found.groups.setdefault((key, models[unit]), {})
            lines[unit] = Line(key, unit, numbers.get(unit))
    took = any(asked.request["data"] for asked in found.plans.values())
    if failed and (not found.claims or (chosen.data and not took)):
        raise next(iter(failed.values()))
    for names, why in failed.items():
        print(f"left out: {names}: {' '.join(str(why).split())}", file=sys.stderr)
    return found


def _wanted(claims: Sequence[str], chosen: Settings, registry: Registry) -> Iterator[Wanted]:
    """The grids of some claims, each once, and behind them the rows that claims are calibrated on."""
    accepted = {claim: accept(ROOT, claim, registry).grids for claim in claims}
    for grid in dict.fromkeys(registry.claim(claim).grid for claim in claims):
        mine = [claim for claim in claims if registry.claim(claim).grid == grid]
        yield Wanted(grid, chosen, frozenset.intersection(*(accepted[claim] for claim in mine)), mine)
    for claim in map(registry.claim, claims):
        if claim.calibration:
            plain, task = lent(chosen, claim)
            designs = accept(ROOT, registry.owner(claim.calibration), registry).grids
            yield Wanted(claim.calibration, plain, designs, [claim.id], task)


def _planned(chosen: Settings, registry: Registry, grid: str, write: bool, several: bool) -> tuple[Settings, Plan]:
    """A grid's plan and the settings it has; of several grids DATA= is for those that can use it."""
    if grid not in RUNNABLE:
        raise UserError(f"this version has no runner for grid {grid}")
    try:
        return chosen, stored_plan(chosen, registry, grid, write).plan
    except UnusedDataError:
        if not several:
            raise
    without = replace(chosen, data=None)
    return without, stored_plan(without, registry, grid, write).plan


def _queued(store: Store) -> set[str]:
    """The units that tasks in the queue will do, of this run or another."""
    made, numbers = slurm.manifests(store), slurm.published(store)
    unfinished = [name for name, mine in made.items() if not mine.is_done(numbers)]
    tasks = slurm_queue.queue(unfinished) if shutil.which("sbatch") else {}  # a dry run elsewhere
    return {
        line.unit
        for name, mine in tasks.items()
        for number, task in mine.items()
        if number is not None and number < made[name].tasks and not task.ended
        for line in made[name].task(number)
    }


def _commands(store: Store, made: Manifest, array: str | None) -> tuple[list[str], list[str]]:
    """The commands that submit a run: its array, and the judge of the array with that number."""
    folder = slurm.folder(store, made.run)
    path = str(folder / "manifest.json")
    return (
        slurm_client.array_command(made.launcher, made.run, made.tasks, folder, ["-m", "scripts.slurm_task", path]),
        slurm_client.judge_command(made.launcher, made.run, array, folder, ["-m", "scripts.slurm_judge", path]),
    )


def _submitted(store: Store, made: Manifest) -> None:
    """Submit both jobs, or none. Raises UserError in Slurm's words."""
    folder = slurm.folder(store, made.run)
    fresh = not folder.exists()
    try:
        slurm.write(store, made)
        array = slurm_client.submitted(_commands(store, made, None)[0])
    except UserError as error:
        if fresh and not isinstance(error, UnsureError):  # tasks that are in the queue need their manifest
            shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        judge = slurm_client.submitted(_commands(store, made, array)[1])
    except BaseException:  # an interrupt, too
        try:
            slurm_client.cancelled(array)
        except UserError as error:
            print(f"job {array} goes on without a judge: {error}", file=sys.stderr)
        raise
    print(f"{_summary(made)}: job {array}, and judge {judge} after it; logs in {folder}\nhow far: make slurm-status")


def _shown(store: Store, made: Manifest) -> None:
    array, judge = _commands(store, made, "<number of the array>")
    print(f"{_summary(made)}: nothing is submitted or written (dry run)\n\n# {slurm_client.SCRIPT}")
    print(slurm_client.SCRIPT.read_text(encoding="utf-8"))
    print(f"# commands\n{shlex.join(array)}\n{shlex.join(judge)}")


def _summary(made: Manifest) -> str:
    units = sum(line is not None for line in made.lines)
    return f"run {made.run}: {units:,} units in {made.tasks:,} tasks, {min(made.tasks, made.launcher.throttle)} at once"


if __name__ == "__main__":
    sys.exit(run(main))
