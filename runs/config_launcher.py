"""Where the units of a plan run: this machine, or a Slurm site by the settings of its file in configs/launcher."""

import re
from dataclasses import dataclass

from runs.errors import require

LOCAL = "local"
_MODULE = re.compile(r"\w[\w.+-]*(/[\w.+-]+)*", re.ASCII)


@dataclass(frozen=True)
class LauncherConfig:
    """Where units run; name: "local", or of a Slurm site, as its file has it. What is None is left to the site.

    partition, account, qos, constraint, gres, memory (a node), time (a task's limit): as sbatch takes them. cpus: of a
    task, which computes in one process and one thread. tasks: the most of one array, each of which loads its model once.
    throttle: the most at once. warn_s: seconds between the warning and the limit, enough for one example. requeue:
    whether tasks may go back into the queue. modules: loaded before Python. container: words before python, such as
    apptainer, exec, --nv and the image. python: the interpreter on the nodes, None for the one that submits.
    judge_partition: of the job that judges, None for that of the array. Raises UserError for what cannot be meant.
    """

    name: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    memory: str | None = None
    time: str | None = None
    cpus: int = 1
    tasks: int = 100
    throttle: int = 16
    warn_s: int = 120
    requeue: bool = True
    modules: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    python: str | None = None
    judge_partition: str | None = None

    def __post_init__(self) -> None:
        named = re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name)
        require(bool(named), "name", self.name, "letters, digits, . _ and -, as the file is called")
        for field in ("cpus", "tasks", "throttle", "warn_s"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        for field in ("partition", "account", "qos", "constraint", "gres", "memory", "python", "judge_partition"):
            value = getattr(self, field)
            printable = value is None or (value.strip() == value != "" and value.isprintable())
            require(printable, field, value, "null, or printable text without spaces around it")
        for module in self.modules:
            require(bool(_MODULE.fullmatch(module)), "modules", module, "names such as cuda/12.4")
        for word in self.container:
            require(word.isprintable() and word != "", "container", word, "printable words")
        if self.time is not None:
            limit = limit_s(self.time)
            require(limit is not None, "time", self.time, "a limit as sbatch takes it, in quotes, such as '04:00:00'")
            require(limit is None or limit > self.warn_s, "warn_s", self.warn_s, f"less than the limit, {self.time}")


def limit_s(text: str) -> int | None:
    """Seconds of a limit in Slurm's notation; None for "infinite" and for what is no limit.

    Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isascii() and part.isdigit() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
    return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds
