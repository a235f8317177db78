"""make slurm-status on planted rows and a stand-in for squeue: every state, each failure's last words, the time left."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runs import slurm
from runs.cells import Plan
from runs.config_launcher import LauncherConfig
from runs.slurm import Asked, Line, Manifest
from runs.store import Store
from scripts import slurm_status
from scripts._cli import run
from tests.fake_slurm import FakeSlurm
from tests.planted_store import DESIGN, REQUEST, do, plan

PLAN = plan(documents=12, size=2)  # six units of two examples
UNITS = list(PLAN.units)
KEY = Plan.key("replay", "smoke", REQUEST)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(made.folder))
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    return made


@pytest.fixture
def store(fake: FakeSlurm, tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.write_plan(PLAN)
    return made


def submitted(store: Store, units: list[str], tasks: int, launcher: str = "h100") -> Manifest:
    lines = tuple(Line(KEY, unit, None) for unit in units)
    plans = {KEY: Asked("replay", REQUEST, DESIGN)}
    made = Manifest({"claim-1": KEY, "claim-2": KEY}, "smoke", plans, LauncherConfig(launcher), tasks, lines)
    slurm.write(store, made)
    return made


def finish(store: Store, unit: str, **how: object) -> None:
    do(store.attempt(unit, DESIGN, {"host": "here"}), **how)


def say(store: Store, made: Manifest, task: object, text: str) -> None:
    (slurm.folder(store, made.run) / f"{made.run}.{task}.log").write_text(text)


@pytest.fixture
def report(store: Store, capsys) -> Callable[[], dict]:
    def asked() -> dict:
        capsys.readouterr()
        assert slurm_status.main(["--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return asked


def test_units_come_from_the_store_and_the_queue_says_the_rest(fake: FakeSlurm, store: Store, report, capsys) -> None:
    made = submitted(store, UNITS, 6)
    finish(store, UNITS[0])
    finish(store, UNITS[1], failing={"example 2"})
    attempt = store.attempt(UNITS[2], DESIGN, {"host": "here"})
    attempt.fail("example 4", "RuntimeError: planted", 2.0)
    say(store, made, 4, "replay example 8: done\nslurmstepd: error: *** JOB 9 CANCELLED DUE TO TIME LIMIT ***\n\n")
    lines = ["0|COMPLETED|None", "1|FAILED|NonZeroExitCode", "2|RUNNING|None", "3|PENDING|JobArrayTaskLimit"]
    queue = [f"kvcert-{made.run}|9_{line}" for line in [*lines, "4|TIMEOUT|TimeLimit"]]
    fake.answer("squeue", out="\n".join([*queue, f"kvcert-{made.run}-judge|10|PENDING|Dependency"]) + "\n")
    found = report()
    (block,) = found["runs"]
    assert found["queue"] is None and block["run"] == made.run and block["claims"] == ["claim-1", "claim-2"]
    assert block["units"] == {"done": 1, "running": 1, "pending": 1, "failed": 1, "left": 2, "resubmitted": 0}
    assert block["waits"] == {"JobArrayTaskLimit": 1, "Dependency": 1} and block["at_work"] == 1
    words = "slurmstepd: error: *** JOB 9 CANCELLED DUE TO TIME LIMIT ***"
    assert block["ended"] == [
        {"task": 4, "state": "TIMEOUT", "reason": "TimeLimit", "units": 1, "last": words},
        {"task": 5, "state": "no longer known to Slurm", "reason": "", "units": 1, "last": "its log is empty"},
    ]
    assert block["failures"] == {"RuntimeError: planted": 6}
    # seven examples are neither published nor in a journal, two seconds each, one task at work
    assert block["eta_s"] == 14.0
    capsys.readouterr()
    assert slurm_status.main([]) == 0
    said = capsys.readouterr().out
    assert f"run {made.run} for claim-1, claim-2: 1 done, 1 running, 1 pending, 1 failed, 2 left of 6 units\n" in said
    assert "    1 tasks at work, about 14 s left; 1 waiting: JobArrayTaskLimit; 1 waiting: Dependency\n" in said
    assert f"    task 4: TIMEOUT (TimeLimit), 1 units left; it said last: {words}\n" in said
    assert "    6 cells failed: RuntimeError: planted\n" in said
    assert f"next: make slurm-all PROFILE=smoke STORE={store.root} LAUNCHER=h100\n" in said


def test_accounting_tells_of_tasks_that_the_controller_forgot(fake: FakeSlurm, store: Store, report) -> None:
    made = submitted(store, UNITS, 2)
    fake.answer("sacct", out=f"kvcert-{made.run}|9_0|OUT_OF_MEMORY|0:125\nkvcert-{made.run}|9_1|NODE_FAIL|1:0\n")
    ended = [(task["state"], task["reason"], task["units"]) for task in report()["runs"][0]["ended"]]
    assert ended == [("OUT_OF_MEMORY", "exit 0:125", 3), ("NODE_FAIL", "exit 1:0", 3)]


def test_more_tasks_at_work_take_less_time_and_none_take_no_time_that_is_known(fake, store: Store, report) -> None:
    made = submitted(store, UNITS, 6)
    finish(store, UNITS[0])
    seen = []
    for at_work in (0, 1, 5):
        lines = [f"kvcert-{made.run}|9_{i}|{'RUNNING' if i <= at_work else 'PENDING'}|None\n" for i in range(1, 6)]
        fake.answer("squeue", out="".join(lines))
        seen.append(report()["runs"][0]["eta_s"])
    assert seen == [None, 20.0, 4.0]


def test_what_was_submitted_again_is_no_failure_and_done_runs_ask_for_nothing(fake, store: Store, report) -> None:
    first = submitted(store, UNITS, 2)
    for unit in UNITS[::2]:
        finish(store, unit)
    second = submitted(store, UNITS[1::2], 1, launcher="slurm")
    fake.answer("squeue", out=f"kvcert-{first.run}|9_1|FAILED|None\nkvcert-{second.run}|11_0|RUNNING|None\n")
    old, new = sorted(report()["runs"], key=lambda block: block["run"] != first.run)
    assert old["units"]["resubmitted"] == 3 and old["ended"] == [] and old["next"] is None
    assert new["units"]["running"] == 3 and new["next"] is None
    for unit in UNITS[1::2]:
        finish(store, unit)
    calls = len(fake.calls("squeue"))
    assert sorted(block["units"]["done"] for block in report()["runs"]) == [3, 6]
    assert len(fake.calls("squeue")) == calls  # nothing is open, nobody is asked


def test_a_retry_is_judged_by_its_own_attempt(fake: FakeSlurm, store: Store, report) -> None:
    finish(store, UNITS[0], failing={"example 0"})
    made = submitted(store, UNITS[:1], 1)
    again = replace(made, lines=(Line(KEY, UNITS[0], 0),))
    slurm.write(store, again)
    fake.answer("squeue", out=f"kvcert-{again.run}|9_0|RUNNING|None\n")
    by_run = {block["run"]: block["units"] for block in report()["runs"]}
    assert by_run[made.run]["failed"] == 1 and by_run[again.run]["running"] == 1
    do(store.attempt(UNITS[0], DESIGN, {"host": "here"}, retry=True))
    assert {block["units"]["done"] for block in report()["runs"]} == {1}


def test_what_the_judge_said_is_shown(fake: FakeSlurm, store: Store, capsys) -> None:
    made = submitted(store, UNITS[:1], 1)
    finish(store, UNITS[0])
    say(store, made, "judge", "lines\nclaim-1 SUPPORTED; claim-2 KILLED\n")
    assert slurm_status.main([]) == 0
    said = capsys.readouterr().out
    assert "    the judge said: claim-1 SUPPORTED; claim-2 KILLED\n" in said and "next:" not in said


@pytest.mark.parametrize("broken", ["no answer", "no squeue"])
def test_where_the_queue_is_not_known_the_store_still_is(fake: FakeSlurm, store: Store, capsys, broken: str) -> None:
    submitted(store, UNITS, 6)
    finish(store, UNITS[0])
    if broken == "no squeue":
        (fake.folder / "squeue").unlink()
    else:
        err = "squeue: error: Unable to contact slurm controller (connect failure)\nslurm_load_jobs error\n"
        fake.answer("squeue", err=err, code=1)
    assert slurm_status.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("what is in the queue is not known: ")
    assert ("Unable to contact slurm controller" in said) == (broken == "no answer")
    assert "1 done, 0 running, 0 pending, 0 failed, 5 left of 6 units" in said


def test_without_a_run_it_says_so_and_a_store_that_is_not_there_is_refused(
    fake, store: Store, monkeypatch, capsys
) -> None:
    assert slurm_status.main([]) == 0 and capsys.readouterr().out == f"no run was submitted for {store.root}\n"
    monkeypatch.setenv("STORE", str(store.root / "nowhere"))
    assert run(lambda: slurm_status.main([])) == 2 and "no such folder" in capsys.readouterr().err
