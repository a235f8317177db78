"""make slurm-status: what is done, running, pending, failed of each submitted run, why, and how long the rest takes.

python -m scripts.slurm_status [--json]. The store says what is done, squeue (and sacct, where a site has it) the rest.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runs import slurm, slurm_queue
from runs.errors import UserError
from runs.progress import progress
from runs.registry import ROOT
from runs.slurm import Manifest
from runs.slurm_queue import Task
from runs.store import Store
from scripts._cli import run, settings
from scripts._command import command
from scripts.status import duration

Queue = Mapping[str, Mapping[int | None, Task]]


def main(argv: list[str] | None = None) -> int:
    """Print each run with its units, failures and time left; exit 0 whatever they are."""
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm_status", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    chosen = settings()
    chosen.require_store()
    found = report(Store(chosen.store.absolute()))
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    if found["queue"]:
        print(f"what is in the queue is not known: {found['queue']}")
    for block in found["runs"]:
        print("\n".join(_lines(block)))
    if not found["runs"]:
        print(f"no run was submitted for {chosen.store}")
    return 0


def report(store: Store) -> dict[str, Any]:
    """Each run of a store: units by state, tasks at work and waiting, failures, seconds left, the command that goes on.

    queue: why squeue did not answer, None where it did; without it units that are not done count as left.
    """
    made, numbers, why = slurm.manifests(store), slurm.published(store), None
    queue: Queue = {}
    try:
        queue = slurm_queue.queue([name for name, mine in made.items() if not mine.is_done(numbers)])
    except UserError as error:
        why = str(error)
    states = {name: slurm.states(store, mine, queue.get(name, {}), numbers) for name, mine in made.items()}
    live = {unit for mine in states.values() for (_, unit), state in mine.items() if state in ("running", "pending")}
    for mine in states.values():
        mine |= {key: "resubmitted" for key, state in mine.items() if state == "left" and key[1] in live}
    return {"queue": why, "runs": [_run(store, made[name], queue.get(name, {}), states[name]) for name in made]}


def _run(
    store: Store, made: Manifest, tasks: Mapping[int | None, Task], states: Mapping[tuple[int, str], str]
) -> dict[str, Any]:
    units, folder = Counter(states.values()), slurm.folder(store, made.run)
    at_work = sum(task.runs for number, task in tasks.items() if number is not None)
    left = Counter(number for (number, _), state in states.items() if state == "left")
    known = [progress(store, plan) for plan in slurm.plans(store, made)] if units["done"] < len(states) else []
    etas = [of.eta_s(at_work) for of in known] if at_work else [None]
    waits = Counter(task.reason for task in tasks.values() if not task.runs and not task.ended)
    return {
        "run": made.run,
        "claims": list(made.claims),
        "folder": str(folder),
        "units": {name: units[name] for name in ("done", "running", "pending", "failed", "left", "resubmitted")},
        "tasks": made.tasks,
        "at_work": at_work,
        "waits": dict(waits),
        "ended": [_ended(made, number, tasks.get(number), n, folder) for number, n in sorted(left.items())],
        "failures": dict(sum((Counter(of.failures) for of in known), Counter())),
        "eta_s": None if None in etas else sum(etas),
        "judge": slurm.last_line(folder / f"{made.run}.judge.log") or None,
        "next": _next(store, made) if units["left"] or units["failed"] else None,
    }


def _ended(made: Manifest, number: int, task: Task | None, units: int, folder: Path) -> dict[str, Any]:
    """A task that ended before its units were done: how, and the last it said."""
    state, reason = (task.state, task.reason) if task else ("no longer known to Slurm", "")
    last = slurm.last_line(folder / f"{made.run}.{number}.log") or "its log is empty"
    return {"task": number, "state": state, "reason": reason, "units": units, "last": last}


def _next(store: Store, made: Manifest) -> str:
    """The command that submits what is left."""
    target = f"slurm-{next(iter(made.claims))}" if len(made.claims) == 1 else "slurm-all"
    asked = [made.plans[plan].request for plan in made.claims.values()]
    request = max(asked, key=lambda request: bool(request["data"]))
    elsewhere = None if store.root.resolve() == (ROOT / "runs" / "store").resolve() else store.root
    launcher = "" if made.launcher.name == "slurm" else f" LAUNCHER={made.launcher.name}"
    return command(target, {"profile": made.profile, "request": request}, elsewhere) + launcher


def _lines(block: Mapping[str, Any]) -> list[str]:
    units = block["units"]
    said = ", ".join(f"{n:,} {name}" for name, n in units.items() if n or name != "resubmitted")
    lines = [f"run {block['run']} for {', '.join(block['claims'])}: {said} of {sum(units.values()):,} units"]
    if block["at_work"] or block["waits"]:
        eta = "" if block["eta_s"] is None else f", about {duration(block['eta_s'])} left"
        waits = "".join(f"; {n:,} waiting: {reason}" for reason, n in block["waits"].items())
        lines.append(f"{block['at_work']:,} tasks at work{eta}{waits}")
    for task in block["ended"]:
        why = f" ({task['reason']})" if task["reason"] not in ("", "None") else ""
        lines.append(
            f"task {task['task']}: {task['state']}{why}, {task['units']:,} units left; it said last: {task['last']}"
        )
    lines += [f"{n:,} cells failed: {' '.join(message.split())[:200]}" for message, n in block["failures"].items()]
    if block["judge"]:
        lines.append(f"the judge said: {block['judge']}")
    lines.append(f"logs: {block['folder']}")
    return [lines[0], *(f"    {line}" for line in [*lines[1:], *([f"next: {block['next']}"] if block["next"] else [])])]


if __name__ == "__main__":
    sys.exit(run(main))
