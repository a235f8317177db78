"""What Slurm knows of the tasks of a run: what squeue says, and sacct where a site keeps accounts."""

import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from runs.errors import UserError
from runs.slurm_client import PREFIX, asked

ENDED = re.compile(
    "BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT"
)  # the other states come before a job's end


@dataclass(frozen=True)
class Task:
    """A job as Slurm knows it: its number there, its state, and why it waits or how it ended."""

    job: str
    state: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether it will not run again by itself."""
        return ENDED.fullmatch(self.state) is not None

    @property
    def runs(self) -> bool:
        """Whether it is on a node now."""
        return self.state in ("RUNNING", "COMPLETING", "CONFIGURING")


def queue(runs: Collection[str]) -> dict[str, dict[int | None, Task]]:
    """By run and number of the task (None: its judge) what Slurm knows: of jobs that ended, for minutes after it.

    Where accounting answers too, tasks that the controller has forgotten are there as well, with their exit codes.
    Raises UserError where there is no squeue, or where it does not answer.
    """
    if not runs:
        return {}
    names = ",".join(f"{PREFIX}{run}{end}" for run in runs for end in ("", "-judge"))
    told = asked(["squeue", "-a", "-h", "-r", "--states=all", f"--name={names}", "-o", "%j|%i|%T|%r"])
    accounted = ""
    if shutil.which("sacct"):
        with suppress(UserError):  # it is installed on sites that keep no accounts, too
            columns = "--format=JobName%64,JobID,State,ExitCode"
            accounted = asked(["sacct", "-n", "-P", "-X", "--starttime=now-30days", f"--name={names}", columns])
    return parsed(runs, told, accounted)


def parsed(runs: Collection[str], told: str, accounted: str = "") -> dict[str, dict[int | None, Task]]:
    """What squeue (name|job|state|reason) and sacct (name|job|state|exit code) said, by run and number of the task.

    Of several jobs of one task the one in the queue counts, else the latest; of the two witnesses squeue, its reason
    followed by the exit code.
    """
    found: dict[str, dict[int | None, Task]] = {run: {} for run in runs}
    exits: dict[str, str] = {}
    for source, text in (("sacct", accounted), ("squeue", told)):
        for line in text.splitlines():
            name, job, state, why = (*line.strip().split("|"), "", "", "", "")[:4]
            run, _, judge = name.removeprefix(PREFIX).partition("-")
            first, _, number = job.partition("_")
            if run not in found or not state.strip() or not re.fullmatch(r"[0-9]+" if judge else r"[0-9]+_[0-9]+", job):
                continue
            if source == "sacct":
                exits[job] = why = f"exit {why}"
            elif job in exits and ENDED.match(state):
                why = f"{why}, {exits[job]}"
            key = None if judge else int(number)
            old, new = found[run].get(key), Task(job, state.split()[0], why)
            if old is None or (not new.ended, int(first)) >= (not old.ended, int(old.job.partition("_")[0])):
                found[run][key] = new
    return found
