"""One task of a job array: python -m scripts.slurm_task MANIFEST computes its lines, as slurm/array.sbatch calls it.

Warned of the time limit (USR1) it finishes the example in flight and goes back into the queue; told to end (TERM) it
abandons that example. Either way what was finished is in a journal or published.
"""

import argparse
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from runs import slurm, slurm_client
from runs.cells import alike
from runs.config_launcher import LauncherConfig
from runs.errors import UserError
from runs.grid import parts
from runs.prereg import accept
from runs.registry import ROOT, Registry, load
from runs.slurm import Line, Manifest
from runs.store import Store
from scripts._cli import Settings, run
from scripts._grid import configs, header_of


class Ended(BaseException):
    """Slurm ends the task: not an Exception, so that nothing takes it for an example that failed."""


class Signals:
    """What Slurm tells this process inside `with`; before and after it signals do what they did."""

    warned = False
    ended = False
    leaving = False  # whether this process is about to end by itself

    def __enter__(self) -> "Signals":
        handlers = {signal.SIGUSR1: self._warn, signal.SIGTERM: self._end}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self.leaving = True
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def stopped(self) -> bool:
        """Whether no further example may begin."""
        return self.warned or self.ended

    def _warn(self, _number: int, _frame: FrameType | None) -> None:
        self.warned = True

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        first, self.ended = not self.ended, True
        if first and not self.leaving:  # what cleans up must not be interrupted again
            raise Ended


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done or back in the queue, 1 where examples failed or work is left, 2 bad input, 143 told to end."""
    with Signals() as told:  # before anything that takes its time
        parser = argparse.ArgumentParser(prog="python -m scripts.slurm_task", description=__doc__)
        parser.add_argument("manifest", type=Path)
        path = parser.parse_args(argv).manifest
        try:
            return _done(path, told)
        except Ended:
            print("told to end: the example in flight is abandoned, what was finished is stored", flush=True)
            return 143


def _done(path: Path, told: Signals) -> int:
    made, store, registry = slurm.read(path), Store(path.absolute().parents[2]), load()
    number = _number()
    mine, job = made.task(number), f"{os.environ.get('SLURM_ARRAY_JOB_ID')}_{number}"
    print(f"run {made.run}, task {number}, job {job} on {socket.gethostname()}: {len(mine)} units", flush=True)
    counts = Counter[str]()
    for key in dict.fromkeys(line.plan for line in mine):
        numbers = slurm.published(store)
        todo = [line for line in mine if line.plan == key and not slurm.is_done(line, numbers)]
        if todo and not told.stopped:
            _compute(made, registry, store, todo, told, counts)
    if told.ended:  # and something that was interrupted has kept it to itself
        raise Ended
    numbers = slurm.published(store)
    if left := sum(not slurm.is_done(line, numbers) for line in mine):
        return _again(made, job, left, counts["computed"], told)
    print(f"done: {counts['computed']} examples computed, {counts['failed']} failed", flush=True)
    return int(counts["failed"] > 0)


def _number() -> int:
    text = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not text.isdigit():
        raise UserError(f"SLURM_ARRAY_TASK_ID={text}: expected a task's number, as Slurm sets it in a job array")
    return int(text)


def _compute(
    made: Manifest, registry: Registry, store: Store, lines: Sequence[Line], told: Signals, counts: Counter[str]
) -> None:
    """Compute the lines of one plan. Raises UserError where this node would plan something else than was planned."""
    asked = made.plans[lines[0].plan]
    grid, owner = asked.grid, registry.owner(asked.grid)
    claims = {owner, *(claim for claim, key in made.claims.items() if key == lines[0].plan)}
    accepted = [accept(ROOT, claim, registry).grids for claim in claims]
    plan = store.read_plan(grid, made.profile, asked.request)
    if not plan or plan.design != asked.design or not all(plan.design in designs for designs in accepted):
        raise UserError(f"grid {grid}: its plan is another one than this run was submitted with; expected a new submit")
    chosen = Settings(made.profile, None, None, store.root, 1, None, ()).of(made.profile, asked.request)
    mine = parts(configs(chosen, registry, grid), chosen.data, grid)
    if not alike(plan.header, header_of(chosen, registry, grid, mine)):
        raise UserError(
            f"grid {grid}: another model, text or code than planned, on {socket.gethostname()}; expected those"
        )
    from runs.execute import Progress, serve  # torch: seconds that a refusal need not wait for

    if "gpu" in (made.launcher.gres or ""):
        require_gpu(made.launcher)

    def said(progress: Progress) -> None:
        example, computed, message = progress
        counts["computed"] += computed
        counts["failed"] += message is not None
        if computed:
            print(f"failed: {example}: {message}" if message else f"{grid} {example}: done", flush=True)

    serve(store, plan, mine, {line.unit: line.retry is not None for line in lines}, said, lambda: told.stopped)


def require_gpu(launcher: LauncherConfig) -> None:
    """Raise UserError where torch sees no GPU though the site's file asks for one: days on a CPU would pass unseen."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"launcher.gres: {launcher.gres!r}, but torch {torch.__version__} sees no GPU on {socket.gethostname()};"
            " expected a CUDA build (make setup TORCH_INDEX=) and a driver it knows"
        )


def _again(made: Manifest, job: str, left: int, computed: int, told: Signals) -> int:
    """Back into the queue with what is left when the limit comes; 1 where that cannot be or would not help."""
    print(f"warned of the time limit: {computed} examples computed, {left} units left", flush=True)
    why = "" if made.launcher.requeue else "launcher.requeue is false"
    if not computed:  # it would come back for ever
        why = f"no example was finished within {made.launcher.time}; expected a longer launcher.time"
    told.leaving = True
    why = why or slurm_client.requeued(job, made.launcher.warn_s / 2)
    if why and not told.ended:  # where it has agreed Slurm ends all of the job, scontrol with it
        print(f"not back in the queue: {why}; submitting again does what is left", flush=True)
    return int(bool(why) and not told.ended)


if __name__ == "__main__":
    sys.exit(run(main))
