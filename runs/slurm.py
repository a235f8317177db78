"""A Slurm job array from missing units: its manifest, and how far it is. No torch, nothing here talks to Slurm.

    slurm/<run>/manifest.json    the units, of which task i takes lines i, i + tasks, i + 2 tasks, ...
    slurm/<run>/<run>.<i>.log    what task i said, <run>.judge.log what the judging said
These lie in the store. A run is named by the hash of its manifest, never by the number of a job: a controller that was
killed gives the same number twice.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from runs import files
from runs.build import build
from runs.cells import Plan, content_id
from runs.config_launcher import LauncherConfig
from runs.errors import UserError
from runs.slurm_queue import Task
from runs.store import Store


@dataclass(frozen=True)
class Line:
    """A unit of a plan; retry: the number of the attempt whose failed examples are tried again, None for none."""

    plan: str
    unit: str
    retry: int | None


@dataclass(frozen=True)
class Asked:
    """What names a stored plan, beside its profile; design: that of its rows."""

    grid: str
    request: Mapping[str, object]
    design: str


@dataclass(frozen=True)
class Manifest:
    """What a run computes: of which plans, for which claims (id to plan), where, and in how many tasks.

    plans: by the name of their file (`Plan.key`). lines: with gaps (None), so that the lines of one task are of as few
    models as can be.
    """

    claims: dict[str, str]
    profile: str
    plans: dict[str, Asked]
    launcher: LauncherConfig
    tasks: int
    lines: tuple[Line | None, ...]

    @property
    def run(self) -> str:
        """The run's name, 12 hex digits of its content."""
        return content_id(asdict(self))[:12]

    def is_done(self, numbers: Mapping[str, int]) -> bool:
        """Whether nothing of it is left to compute; numbers: `published`."""
        return all(line is None or is_done(line, numbers) for line in self.lines)

    def task(self, number: int) -> list[Line]:
        """The lines of a task. Raises UserError where there is no such task."""
        if not 0 <= number < self.tasks:
            raise UserError(f"task {number}: run {self.run} has {self.tasks}; expected 0 to {self.tasks - 1}")
        return [line for line in self.lines[number :: self.tasks] if line]


def arranged(groups: Sequence[Sequence[Line]], most: int) -> tuple[int, tuple[Line | None, ...]]:
    """(tasks, lines) of at most so many tasks: all lines of a task are of one group wherever there are enough tasks.

    groups: the lines that need one model, each group of at least one. The longest task is as short as that allows.
    """
    tasks = min(most, sum(map(len, groups)))
    if tasks < len(groups):
        columns: list[list[Line]] = [[] for _ in range(tasks)]
        for group in sorted(groups, key=len, reverse=True):
            min(columns, key=len).extend(group)
    else:
        shares = [1] * len(groups)
        for _ in range(tasks - len(groups)):
            longest = max(range(len(groups)), key=lambda i: len(groups[i]) / shares[i])
            shares[longest] += 1
        columns = [list(group[k::n]) for group, n in zip(groups, shares, strict=True) for k in range(n)]
    height = max(map(len, columns))
    return tasks, tuple(column[row] if row < len(column) else None for row in range(height) for column in columns)


# ---------------------------------------------------------------- in the store


def folder(store: Store, run: str) -> Path:
    """Where a run's manifest and logs lie."""
    return store.root / "slurm" / run


@contextmanager
def submitting(store: Store) -> Iterator[None]:
    """Keep other submits out from a look at the queue until the jobs are in it. Raises UserError where one is at work."""
    path = store.root / "slurm" / ".submitting"
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another submit to {store.root} is at work; expected one at a time: try again") from None
        except OSError:  # a disk without locks: two submits at once compute the same rows, of which the first stay
            pass
        yield


def write(store: Store, manifest: Manifest) -> Path:
    """Store a manifest atomically under its run's name and return its path; UserError where that is not possible."""
    path = folder(store, manifest.run) / "manifest.json"
    files.replace(path, (json.dumps(asdict(manifest), indent=1) + "\n").encode())
    return path


def read(path: Path) -> Manifest:
    """Read a manifest. Raises UserError where it is not there, damaged or another run's."""
    try:
        made = build(Manifest, json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; expected a manifest, on a disk all nodes share"
        ) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: no valid JSON ({error}); expected the manifest that submitting wrote") from None
    if made.run != path.parent.name:
        raise UserError(f"{path} is the manifest of run {made.run}; expected that of {path.parent.name}")
    return made


def manifests(store: Store) -> dict[str, Manifest]:
    """All runs of a store by name, the oldest first."""
    paths = [path / "manifest.json" for path in files.listing(store.root / "slurm") if path.is_dir()]
    there = [path for path in paths if path.is_file()]
    return {path.parent.name: read(path) for path in sorted(there, key=lambda path: path.stat().st_mtime)}


def plans(store: Store, made: Manifest) -> list[Plan]:
    """The plans of a run, as far as they are still stored."""
    found = (store.read_plan(asked.grid, made.profile, asked.request) for asked in made.plans.values())
    return [plan for plan in found if plan]


def published(store: Store) -> dict[str, int]:
    """The number of the latest published attempt by unit."""
    return {file.unit: file.number for file in store.unit_files()}


def is_done(line: Line, numbers: Mapping[str, int]) -> bool:
    """Whether a line's unit is published, by a later attempt than the one whose failures it tries again."""
    return numbers.get(line.unit, -1) > (-1 if line.retry is None else line.retry)


def last_line(path: Path) -> str:
    """The last line of a log that is not empty, "" where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# ---------------------------------------------------------------- how far


def states(
    store: Store, made: Manifest, tasks: Mapping[int | None, Task], numbers: Mapping[str, int]
) -> dict[tuple[int, str], str]:
    """done, failed, running, pending or left, by task and unit: from the store, and what is not there from the queue.

    numbers: `published`. failed: published with failed examples; left: not published, and its task will not run again.
    """
    failing: set[str] = set()
    for plan in plans(store, made):
        failing.update(store.failing(plan))
    found = {}
    for number in range(made.tasks):
        task = tasks.get(number)
        waiting = "left" if task is None or task.ended else "running" if task.runs else "pending"
        for line in made.task(number):
            ended = "failed" if line.unit in failing else "done"
            found[number, line.unit] = ended if is_done(line, numbers) else waiting
    return found
