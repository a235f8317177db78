"""What Slurm is asked and told, through its own commands; what it refuses is said in its words. No shell reads a word."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from runs.config_launcher import LauncherConfig, limit_s
from runs.errors import UserError
from runs.registry import ROOT

SCRIPT = ROOT / "slurm" / "array.sbatch"
PATIENCE_S, RETRY_S = 120, 2
MAX_ARRAY = 1001  # Slurm's own default of MaxArraySize
PREFIX = "kvcert-"
# sbatch --test-only says so of what can never run, and of what cannot run today; only sbatch itself tells them apart
NOT_NOW = re.compile("Requested node configuration is not available|Required node not available|nodes are busy")
AVAILABLE = re.compile(r"up\|(idle|mixed|allocated|completing|planned)[~#%!+@^-]?")
UNANSWERED = re.compile("no answer|Unable to contact|timed out")
OWN = ("SQUEUE_", "SACCT_", "SINFO_")  # a user's own views of Slurm, which would hide jobs here


class UnsureError(UserError):
    """Slurm did not say whether it took a job."""


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


def require_taken(launcher: LauncherConfig) -> list[str]:
    """Raise UserError, in Slurm's words, where it would not take an array or a judge of a site; nothing is submitted.

    Returns its words where they may be no refusal: some nodes are down, drained or reserved now.
    """
    _require_time(launcher)
    unsure = []
    for command in (
        array_command(launcher, "test", 1, Path("/"), []),
        judge_command(launcher, "test", None, Path("/"), []),
    ):
        try:
            if shutil.which("sbatch"):
                asked([command[0], "--test-only", *command[1:]])
        except UserError as error:
            if not NOT_NOW.search(str(error)) or _all_available():
                raise
            unsure.append(str(error))
    return unsure


def _all_available() -> bool:
    told = asked(["sinfo", "-a", "-h", "-o", "%a|%T"]) if shutil.which("sinfo") else ""
    return all(map(AVAILABLE.fullmatch, told.split()))


def _require_time(launcher: LauncherConfig) -> None:
    # sbatch takes a job over its partition's limit where EnforcePartLimits=NO, the default, and it then waits for ever
    wanted = limit_s(launcher.time) if launcher.time else None
    if wanted is None or not shutil.which("sinfo"):
        return
    named = set(launcher.partition.split(",")) if launcher.partition else None
    limits = {}
    for line in asked(["sinfo", "-a", "-h", "-o", "%P|%l"]).splitlines():
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
    """Submit a job and return its number.

    UserError, in Slurm's words, where it is refused; UnsureError where it may be in the queue all the same.
    """
    try:
        said = asked(command)
    except UserError as error:
        raise (UnsureError if re.search("no answer|timed out", str(error)) else UserError)(str(error)) from None
    numbers = re.findall(r"^\s*(\d+)(?:;\S*)?\s*$", said, re.MULTILINE)  # a site's sbatch may greet before it
    if not numbers:
        raise UnsureError(
            f"{command[0]}: {' '.join(said.split())[:200]!r}; expected a job's number, as squeue shows it"
        )
    return numbers[-1]


def requeued(job: str, patience_s: float) -> str:
    """Put a running job back into the queue; "" where Slurm agreed, else why not.

    A controller that does not answer, as while it is restarted, is asked again for patience_s seconds.
    """
    last = time.monotonic() + patience_s
    while True:
        try:
            asked(["scontrol", "requeue", job], max(RETRY_S, last - time.monotonic()))
            return ""
        except UserError as error:
            why = str(error)
        if not UNANSWERED.search(why) or time.monotonic() > last:
            return why
        time.sleep(RETRY_S)


def cancelled(job: str) -> None:
    """Cancel a job. Raises UserError where Slurm does not."""
    asked(["scancel", job])


def asked(command: Sequence[str], patience_s: float | None = None) -> str:
    """What one of Slurm's commands prints, waited for at most patience_s (PATIENCE_S) seconds.

    Raises UserError with its own words, on one line, where it fails.
    """
    patience_s = patience_s or PATIENCE_S
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=patience_s, check=False,
            stdin=subprocess.DEVNULL, env=plain | {"LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(
            f"no {command[0]} on this machine; expected Slurm's commands, as a login node has them"
        ) from None
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]}: no answer from Slurm in {patience_s:.3g} s; expected a controller that runs"
        ) from None
    if done.returncode:
        words = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise UserError(f"{command[0]}: {'; '.join(words) or done.stdout.strip() or f'exit {done.returncode}'}")
    return done.stdout
