"""What Slurm is asked and told, through its own commands; what it refuses is said in its words. No shell reads a word."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runs.config_launcher import LauncherConfig, limit_s
from runs.errors import UserError
from runs.registry import ROOT

SCRIPT = ROOT / "slurm" / "array.sbatch"
PATIENCE_S, RETRY_S = 120, 2
MAX_ARRAY = 1001  # Slurm's own default of MaxArraySize
ENDED = re.compile(
    "BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT"
)  # the other states come before a job's end
PREFIX = "kvcert-"


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


def require_slurm() -> None:
    """Raise UserError where jobs cannot be submitted from this machine."""
    if not shutil.which("sbatch"):
        raise UserError(
            "no sbatch on this machine; expected a login node of a Slurm cluster (DRY_RUN=1 shows what it would be told)"
        )


def max_array() -> int:
    """The site's MaxArraySize, the most tasks of one array; Slurm's default where there is no scontrol to ask."""
    if not shutil.which("scontrol"):
        return MAX_ARRAY
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", asked(["scontrol", "show", "config"]), re.MULTILINE)
    return max(1, int(match[1])) if match else MAX_ARRAY


def require_taken(launcher: LauncherConfig) -> None:
    """Raise UserError, in Slurm's words, where it would not take an array or a judge of a site; nothing is submitted."""
    _require_time(launcher)
    if shutil.which("sbatch"):
        for command in (
            array_command(launcher, "test", 1, Path("/"), []),
            judge_command(launcher, "test", None, Path("/"), []),
        ):
            asked([command[0], "--test-only", *command[1:]])


def _require_time(launcher: LauncherConfig) -> None:
    # sbatch takes a job over its partition's limit where EnforcePartLimits=NO, the default, and it then waits for ever
    wanted = limit_s(launcher.time) if launcher.time else None
    if wanted is None or not shutil.which("sinfo"):
        return
    named = set(launcher.partition.split(",")) if launcher.partition else None
    limits = {}
    for line in asked(["sinfo", "-h", "-o", "%P|%l"]).splitlines():
        name, _, limit = line.strip().rpartition("|")
        if (name.rstrip("*") in named) if named else name.endswith("*"):
            limits[name.rstrip("*")] = limit
    known = [limit_s(limit) for limit in limits.values()]
    if known and all(limit is not None and limit < wanted for limit in known):
        allowed = ", ".join(f"{name} {limit}" for name, limit in limits.items())
        raise UserError(
            f"launcher.time: {launcher.time!r}; expected at most that of the partition (PartitionTimeLimit): {allowed}"
        )


def array_command(launcher: LauncherConfig, run: str, tasks: int, folder: Path, words: Sequence[str]) -> list[str]:
    """sbatch's words for a job array of which each task runs `words`; each word stays one argument to its end."""
    own = [f"--array=0-{tasks - 1}%{min(launcher.throttle, tasks)}", f"--signal=B:USR1@{launcher.warn_s}"]
    own += ["--requeue" if launcher.requeue else "--no-requeue", f"--cpus-per-task={launcher.cpus}"]
    own += [f"--{name}={value}" for name in ("gres", "constraint") if (value := getattr(launcher, name))]
    return _sbatch(launcher, PREFIX + run, folder / f"{run}.%a.log", [*own, *_in(launcher.partition)], words)


def judge_command(
    launcher: LauncherConfig, run: str, array: str | None, folder: Path, words: Sequence[str]
) -> list[str]:
    """sbatch's words for a job that runs `words` once every task of an array has ended, however it did."""
    own = [f"--dependency=afterany:{array}", "--kill-on-invalid-dep=yes"] if array else []
    own += ["--cpus-per-task=1"]
    own += _in(launcher.judge_partition or launcher.partition)
    return _sbatch(launcher, f"{PREFIX}{run}-judge", folder / f"{run}.judge.log", own, words)


def _in(partition: str | None) -> list[str]:
    return [f"--partition={partition}"] if partition else []


def _sbatch(launcher: LauncherConfig, name: str, log: Path, own: Sequence[str], words: Sequence[str]) -> list[str]:
    # Slurm expands %j and the like in paths, and a backslash turns that off (runs/slurm.py refuses it); %a is ours
    folder = str(log.parent).replace("%", "%%")
    named = {"account": launcher.account, "qos": launcher.qos, "mem": launcher.memory, "time": launcher.time}
    site = [f"--{option}={value}" for option, value in named.items() if value]
    files = [f"--chdir={log.parent}", f"--output={folder}/{log.name}", "--open-mode=append"]
    command = ["sbatch", "--parsable", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--export=ALL", *files]
    script = [str(SCRIPT), str(Path.cwd()), " ".join(launcher.modules), *launcher.container]
    return [*command, *own, *site, *script, launcher.python or sys.executable, *words]


def submitted(command: Sequence[str]) -> str:
    """Submit a job and return its number; UserError, in Slurm's words, where it is refused."""
    return asked(command).strip().partition(";")[0]


def requeued(job: str, patience_s: float) -> str:
    """Put a running job back into the queue; "" where Slurm agreed, else why not.

    A controller that does not answer, as while it is restarted, is asked again for patience_s seconds.
    """
    last = time.monotonic() + patience_s
    while True:
        try:
            asked(["scontrol", "requeue", job])
            return ""
        except UserError as error:
            why = str(error)
        if "Unable to contact" not in why or time.monotonic() > last:
            return why
        time.sleep(RETRY_S)


def cancelled(job: str) -> None:
    """Cancel a job. Raises UserError where Slurm does not."""
    asked(["scancel", job])


def queue(runs: Collection[str]) -> dict[str, dict[int | None, Task]]:
    """By run and number of the task (None: its judge) what Slurm knows: of jobs that ended, for minutes after it.

    Where accounting answers too, tasks that the controller has forgotten are there as well, with their exit codes.
    Raises UserError where there is no squeue, or where it does not answer.
    """
    if not runs:
        return {}
    names = ",".join(f"{PREFIX}{run}{end}" for run in runs for end in ("", "-judge"))
    told = asked(["squeue", "-h", "-r", "--states=all", f"--name={names}", "-o", "%j|%i|%T|%r"])
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
            if run not in found or not state or not (judge or number.isdigit()):
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


def asked(command: Sequence[str]) -> str:
    """What one of Slurm's commands prints. Raises UserError with its own words, on one line, where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S, check=False,
            stdin=subprocess.DEVNULL, env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(
            f"no {command[0]} on this machine; expected Slurm's commands, as a login node has them"
        ) from None
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]}: no answer from Slurm in {PATIENCE_S} s; expected a controller that runs"
        ) from None
    if done.returncode:
        words = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise UserError(f"{command[0]}: {'; '.join(words) or done.stdout.strip() or f'exit {done.returncode}'}")
    return done.stdout
