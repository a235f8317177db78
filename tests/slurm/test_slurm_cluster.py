"""A real Slurm: two nodes started for these tests (start.sh), a study under everything that goes wrong, the same rows.

Skipped where Slurm is not installed (apt-get install --no-install-recommends slurm-wlm munge) or where this is not root;
never run in CI. About two minutes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT
from tiny_folder import tiny_folder

from runs import slurm
from runs.sources import TINY
from runs.store import Store
from scripts import slurm as submit
from scripts._cli import run

HERE = Path(__file__).parent
HOSTILE = "a b'\"$(touch pwned)`touch pwned`;%j %%"
PATIENCE_S = 600  # until something that is asked for is seen; the machine may be busy
SEARCH = f"{os.environ['PATH']}:/usr/sbin"
ABSENT = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=SEARCH)]

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.environ.get("CI") == "true", reason="CI starts no cluster"),
    pytest.mark.skipif(bool(ABSENT), reason=f"no Slurm here: {', '.join(ABSENT)} not found"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a cluster of one's own needs root"),
]
Done = subprocess.CompletedProcess[str]


def until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


class Cluster:
    """Two nodes of two CPUs, and Slurm's commands for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"PATH": SEARCH, "SLURM_CONF": str(folder / "slurm.conf")}

    def script(self, name: str, *arguments: str) -> None:
        # to a file: the daemons keep what they were started with, and a pipe would never end
        with (self.folder.parent / "script.log").open("a") as log:
            command = ["bash", str(HERE / name), str(self.folder), *arguments]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=90, check=False)
        assert done.returncode == 0, (self.folder.parent / "script.log").read_text()

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def jobs(self) -> list[list[str]]:
        """Name, number, state and reason of every job that is known, those that ended too."""
        told = self.ask("squeue", "-h", "-r", "--states=all", "-o", "%j|%i|%T|%r")
        return [line.split("|") for line in told.splitlines()]

    def state(self, job: str) -> str:
        return next((state for _, number, state, _ in self.jobs() if number == job), "")

    def node(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-o", "%N").strip()

    def wait(self, job: str, *states: str) -> None:
        until(f"{job} {states}", lambda: self.state(job) in states)

    def ended(self, *jobs: str) -> None:
        """Wait until the tasks of these arrays, and these jobs, have ended, however they did."""
        live = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")
        until(
            f"the end of {jobs}: {self.jobs()}",
            lambda: not [job for _, job, state, _ in self.jobs() if job.split("_")[0] in jobs and state in live],
        )


class Impatient(threading.Thread):
    """Releases what Slurm requeued and holds for two minutes, and counts how many tasks of an array run at once."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster, self.most, self.stopped = cluster, Counter[str](), threading.Event()

    def run(self) -> None:
        seen: dict[str, float] = {}
        while not self.stopped.wait(0.3):
            try:
                jobs = self.cluster.jobs()
            except AssertionError:  # the controller is being restarted
                continue
            running = Counter(job.split("_")[0] for _, job, state, _ in jobs if state == "RUNNING")
            self.most |= running
            held = {job for _, job, state, reason in jobs if state == "PENDING" and reason == "BeginTime"}
            seen = {job: seen.get(job, time.monotonic()) for job in held}
            for job, since in seen.items():
                if time.monotonic() - since > 2.5:  # earlier it would revoke the new credential
                    with suppress(AssertionError):
                        self.cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster") / "run")
    made.script("start.sh")
    try:
        yield made
    finally:
        made.script("stop.sh")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the project for the commands to run in, under a name that must not matter."""
    copy = tmp_path_factory.mktemp("checkout") / HOSTILE
    for folder in ("cert", "runs", "analysis", "scripts", "prereg", "configs", "paper", "slurm"):
        ignored = shutil.ignore_patterns("store", "out", "__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    return copy


class Study:
    """A user at the login node: commands with the same settings, and the store they write."""

    def __init__(self, cluster: Cluster, checkout: Path, store: Path, **variables: str) -> None:
        self.cluster, self.checkout, self.store = cluster, checkout, Store(store)
        self.variables = {"PROFILE": "smoke", "STORE": str(store), "WORKERS": "2", **variables}

    def command(self, module: str, *arguments: str, **more: str) -> Done:
        command = [sys.executable, "-m", f"scripts.{module}", *arguments]
        environment = self.cluster.environment | self.variables | more
        return subprocess.run(
            command, cwd=self.checkout, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def submit(self, **more: str) -> tuple[slurm.Manifest, str]:
        """Submit what is missing; the run and the number of its array."""
        known = set(slurm.manifests(self.store))
        done = self.command("slurm", "claim-1", **more)
        assert done.returncode == 0, done.stderr
        (made,) = (run for name, run in slurm.manifests(self.store).items() if name not in known)
        found = re.search(r"job (\d+), and judge (\d+) after it", done.stdout)
        assert found, done.stdout
        return made, found[1]

    def log(self, made: slurm.Manifest, task: object) -> str:
        path = slurm.folder(self.store, made.run) / f"{made.run}.{task}.log"
        return path.read_text() if path.exists() else ""

    def at_work(self, made: slurm.Manifest, task: int) -> None:
        """Wait until a task has finished an example since it was started last."""
        begin = f"run {made.run}, task {task}, "
        until(f"task {task} computes", lambda: ": done" in "".join(self.log(made, task).split(begin)[1:][-1:]))

    def status(self) -> dict:
        done = self.command("slurm_status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def rows(self) -> list[dict]:
        (header,) = self.store.plans()
        plan = self.store.read_plan(header["grid"], header["profile"], header["request"])
        assert self.store.missing(plan) == []
        return self.store.rows(plan, {plan.design}).to_pylist()


def python_of(array: str, task: int) -> int:
    """The process that computes a task."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        mine = {f"SLURM_ARRAY_JOB_ID={array}".encode(), f"SLURM_ARRAY_TASK_ID={task}".encode()}
        if b"scripts.slurm_task" in words and mine <= set(environment) and words[0].endswith(b"python"):
            found.append(int(folder.name))
    (pid,) = found
    return pid


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def impatient(cluster: Cluster) -> Iterator[Impatient]:
    made = Impatient(cluster)
    made.start()
    yield made
    made.stopped.set()
    made.join()


def test_a_study_survives_everything_and_equals_a_local_run(
    cluster: Cluster, impatient: Impatient, checkout: Path, tmp_path: Path
) -> None:
    sizes = {name: value for name, value in TINY.items() if name != "seed"}
    model = tiny_folder(tmp_path / f"model {HOSTILE}\nx", **sizes)
    grid = "replay.documents=32 replay.ctx_tokens=2000 replay.steps=40"  # eight units; half a second an example
    site = "launcher.throttle=2 launcher.time=00:30:00 launcher.warn_s=60"
    study = Study(cluster, checkout, tmp_path / f"{HOSTILE}\nx" / "store", MODEL=str(model), ARGS=f"{grid} {site}")

    # ---- one array, no larger than the site allows
    first, array = study.submit()
    assert first.tasks == 4 and [len(first.task(i)) for i in range(4)] == [2, 2, 2, 2]
    again = study.command("slurm", "claim-2")  # on the same rows
    assert again.returncode == 0 and "all 8 missing units are in the queue already" in again.stdout

    # ---- throttled: two of its tasks at once on four CPUs; the other two are held back for later
    tasks = [f"{array}_{i}" for i in range(4)]
    until("two run", lambda: [cluster.state(task) for task in tasks[:2]] == ["RUNNING"] * 2)
    until(
        "two wait",
        lambda: [why for _, task, _, why in cluster.jobs() if task in tasks[2:]] == ["JobArrayTaskLimit"] * 2,
    )
    cluster.ask("scontrol", "hold", *tasks[2:])

    # ---- one task is killed, one preempted, one on a node that goes down, one warned of its limit as the controller ends
    study.at_work(first, 0)
    os.kill(python_of(array, 0), signal.SIGKILL)
    study.at_work(first, 1)
    urgent = ["sbatch", "--partition=urgent", "--cpus-per-task=2", f"--output={tmp_path / 'urgent'}", "--wrap=sleep 1"]
    cluster.ask(*urgent, f"--nodelist={cluster.node(tasks[1])}")
    cluster.wait(tasks[1], "PENDING")
    cluster.ask("scontrol", "release", tasks[2])
    study.at_work(first, 2)
    node = cluster.node(tasks[2])
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    cluster.wait(tasks[2], "PENDING")
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    cluster.ask("scontrol", "release", tasks[3])
    study.at_work(first, 3)
    cluster.ask("scancel", "--signal=USR1", "--batch", tasks[3])
    cluster.script("stop.sh", "slurmctld")
    cluster.script("start.sh", "again")
    until("task 3 is back in the queue", lambda: "warned of the time limit" in study.log(first, 3))
    cluster.ended(array, str(int(array) + 1))

    # ---- what is left is what the killed task had not published, and it is said why
    assert [cluster.state(task) for task in tasks] == ["FAILED", "COMPLETED", "COMPLETED", "COMPLETED"]
    assert impatient.most[array] == 2
    starts = [study.log(first, i).count(f"run {first.run}, task {i}, ") for i in range(4)]
    assert starts[0] == 1 and min(starts[1:]) >= 2
    assert "not back in the queue" not in study.log(first, 3)
    (block,) = study.status()["runs"]
    left = block["units"]["left"]
    assert left in (1, 2) and block["units"] == dict.fromkeys(block["units"], 0) | {"done": 8 - left, "left": left}
    (ended,) = block["ended"]
    assert (ended["task"], ended["state"]) == (0, "FAILED") and ended["last"].endswith(": done")
    assert block["judge"] == "claim-1 NOT_EVALUATED"
    said = study.command("slurm_status").stdout
    assert "task 0: FAILED" in said and "next: make slurm-claim-1 PROFILE=smoke MODEL=" in said

    # ---- submitted again, only that runs; its job is cancelled and a process of it outlives it, stopped in the middle
    wrapper = tmp_path / "own session"
    wrapper.write_text('#!/bin/bash\nsetsid "$@" &\nwait\n')
    wrapper.chmod(0o755)
    second, orphaned = study.submit(ARGS=f"{grid} {site} launcher.container=['{wrapper}'] launcher.tasks=1")
    assert [line.unit for line in second.task(0)] == [line.unit for line in first.task(0)][-left:]
    study.at_work(second, 0)
    orphan = python_of(orphaned, 0)
    os.kill(orphan, signal.SIGSTOP)
    cluster.ask("scancel", f"{orphaned}_0")
    cluster.ended(orphaned)
    assert cluster.state(f"{orphaned}_0") == "CANCELLED" and alive(orphan)

    # ---- another job does the rest of its work, then the orphan goes on to its end: the first complete attempt stays
    third, last = study.submit()
    rest = [line.unit for i in range(third.tasks) for line in third.task(i)]
    assert rest and rest == [line.unit for line in second.task(0)][-len(rest) :]  # it may have published one before
    cluster.ended(last, str(int(last) + 1))
    files = {file.path: file.path.read_bytes() for file in study.store.unit_files()}
    os.kill(orphan, signal.SIGCONT)
    until("the orphan has ended", lambda: not alive(orphan))
    assert study.log(second, 0).splitlines()[-1].startswith("done: ")
    assert {file.path: file.path.read_bytes() for file in study.store.unit_files()} == files
    assert len(files) == 8 and {file.number for file in study.store.unit_files()} == {0}
    assert {path.name for path in (study.store.root / "units").iterdir()} == {path.name for path in files}
    assert not study.store.journals()

    # ---- rows equal the plan, and a local run bit for bit; nothing is left to submit
    rows = study.rows()
    assert len(rows) == len({row["cell"] for row in rows}) == 32 * 3 * 2 * 2 * 40
    local = Study(cluster, checkout, tmp_path / "local", MODEL=str(model), ARGS=grid)
    done = local.command("claim", "claim-1")
    assert done.returncode == 0 and local.rows() == rows, done.stderr
    nothing = study.command("slurm", "claim-1")
    assert nothing.returncode == 0 and "nothing to do, nothing submitted" in nothing.stdout
    assert all(block["units"]["done"] == sum(block["units"].values()) for block in study.status()["runs"])
    assert not list(tmp_path.rglob("pwned")) and not list(checkout.rglob("pwned"))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("launcher.partition=nope", "Invalid partition name specified"),
        ("launcher.time=01:00:01", "launcher.time: '01:00:01'; expected at most that of the partition"),
        ("launcher.gres=gpu:1", "Invalid generic resource (gres) specification"),
        ("launcher.gres=gpu:h100:1", "Invalid generic resource (gres) specification"),
        ("launcher.memory=900G", "Requested node configuration is not available"),
        ("launcher.cpus=3", "Requested node configuration is not available"),
        ("launcher.constraint=fast", "Invalid feature specification"),
        ("launcher.judge_partition=nope", "Invalid partition name specified"),
    ],
)
def test_what_slurm_refuses_is_one_line_in_its_words(
    cluster: Cluster, tmp_path: Path, monkeypatch, capsys, argument: str, says: str
) -> None:
    store = tmp_path / "store"
    variables = {"PROFILE": "smoke", "STORE": str(store), "ARGS": argument}
    for name, value in (cluster.environment | variables).items():
        monkeypatch.setenv(name, value)
    for more in ([], ["--dry-run"]):
        assert run(lambda more=more: submit.main(["claim-1", *more])) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert not store.exists() and not [name for name, *_ in cluster.jobs() if name.startswith("kvcert-test")]
