"""make slurm-claim-N with stand-ins for Slurm: what is submitted, what is refused, and what the submitted words then do."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, SETTINGS
from tiny_folder import tiny_folder
from tiny_locomo import conversation, write

from runs import execute, replay_cells, slurm
from runs.config_launcher import LauncherConfig
from runs.errors import UserError
from runs.registry import load
from runs.store import Store
from scripts import slurm as submit
from scripts import slurm_judge, slurm_task
from scripts._cli import run
from tests.fake_slurm import FakeSlurm

HOSTILE = "a b'\"$(touch pwned)`touch pwned`;%j %%\n* {x} ☃"
SMALL = "replay.documents=10 replay.ctx_tokens=96"  # three units
PATIENCE_S = 900  # with a task that takes seconds; the machine may be busy


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    monkeypatch.chdir(ROOT)
    for name, value in {"PROFILE": "smoke", "STORE": str(tmp_path / "store"), "ARGS": SMALL}.items():
        monkeypatch.setenv(name, value)
    for tool in ("sbatch", "squeue", "scontrol"):
        assert shutil.which(tool) == str(made.folder / tool)
    return made


@pytest.fixture
def store(fake: FakeSlurm, tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def only(store: Store) -> slurm.Manifest:
    (made,) = slurm.manifests(store).values()
    return made


def requests(made: slurm.Manifest) -> dict[str, dict]:
    """What each grid of a run was asked with; no two of its plans are of one grid."""
    found = {asked.grid: dict(asked.request) for asked in made.plans.values()}
    assert len(found) == len(made.plans)
    return found


def started(call: list[str], number: int, **variables: str) -> subprocess.Popen[str]:
    """A task as Slurm starts it: the script and its arguments by bash, elsewhere, output to its log."""
    script = call.index(str(ROOT / "slurm" / "array.sbatch"))
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "100"} | variables
    return subprocess.Popen(
        ["bash", *call[script:]], cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ran(call: list[str], number: int = 0, **variables: str) -> tuple[int, str]:
    task = started(call, number, **variables)
    said, _ = task.communicate(timeout=PATIENCE_S)
    return task.returncode, said


def rows(root: Path) -> list[dict]:
    store = Store(root)
    (header,) = store.plans()
    plan = store.read_plan(header["grid"], header["profile"], header["request"])
    return store.rows(plan, {plan.design}).to_pylist()


# ---------------------------------------------------------------- what is submitted


def test_what_is_missing_goes_into_one_array_and_one_judge(fake: FakeSlurm, store: Store, monkeypatch, capsys) -> None:
    monkeypatch.setenv("LAUNCHER", "cpu")
    monkeypatch.setenv("ARGS", f"{SMALL} launcher.partition=main launcher.time=00:30:00 launcher.throttle=1")
    fake.answer("scontrol", "show config", out="MaxArraySize = 2\n")
    assert submit.main(["claim-1"]) == 0
    made = only(store)
    array, judge = fake.calls("sbatch", "--test-only")
    assert [call[0] for call in fake.calls("sbatch")[:2]] == ["--test-only"] * 2
    assert {"--array=0-1%1", "--partition=main", "--time=00:30:00", "--mem=4G", f"--job-name=kvcert-{made.run}"} <= set(
        array
    )
    assert {"--dependency=afterany:100", "--kill-on-invalid-dep=yes"} <= set(judge)
    folder = store.root / "slurm" / made.run
    assert array[-4:] == [sys.executable, "-m", "scripts.slurm_task", str(folder / "manifest.json")]
    assert judge[-4:] == [sys.executable, "-m", "scripts.slurm_judge", str(folder / "manifest.json")]
    plan = store.read_plan("replay", "smoke", requests(made)["replay"])
    assert [line.unit for line in made.lines if line] == list(plan.units) and made.tasks == 2
    assert requests(made)["replay"]["args"] == SMALL  # the launcher makes no other population
    said = capsys.readouterr().out
    assert f"run {made.run}: 3 units in 2 tasks, 1 at once: job 100, and judge 101 after it; logs in {folder}" in said


def test_a_dry_run_prints_script_and_commands_and_writes_nothing(
    fake: FakeSlurm, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert submit.main(["claim-1"]) == 0
    said = capsys.readouterr().out
    assert (ROOT / "slurm" / "array.sbatch").read_text() in said
    assert "\nsbatch --parsable --job-name=kvcert-" in said and "afterany:<number of the array>" in said
    assert not (tmp_path / "store").exists() and not fake.calls("sbatch", "--test-only")
    monkeypatch.delenv("DRY_RUN")
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm at all
    assert submit.main(["claim-1", "--dry-run"]) == 0 and capsys.readouterr().out == said
    assert not (tmp_path / "store").exists()


def test_units_in_the_queue_are_not_submitted_twice(fake: FakeSlurm, store: Store, capsys) -> None:
    assert submit.main(["claim-1"]) == 0
    made = only(store)
    fake.answer("squeue", out="".join(f"kvcert-{made.run}|100_{i}|PENDING|Priority\n" for i in range(3)))
    assert submit.main(["claim-2"]) == 0  # the same grid
    assert "all 3 missing units are in the queue already" in capsys.readouterr().out
    assert len(fake.calls("sbatch", "--test-only")) == 2
    states = ["RUNNING", "FAILED", "COMPLETED"]  # one still runs, two ended without their rows
    fake.answer("squeue", out="".join(f"kvcert-{made.run}|100_{i}|{state}|None\n" for i, state in enumerate(states)))
    assert submit.main(["claim-1"]) == 0
    (again,) = (run for name, run in slurm.manifests(store).items() if name != made.run)
    assert [line.unit for line in again.lines if line] == [made.task(i)[0].unit for i in (1, 2)]


def test_every_runnable_claim_goes_into_one_array_and_the_others_are_named(
    fake: FakeSlurm, store: Store, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("ARGS", "")
    data = tmp_path / "data"
    data.mkdir()
    row = {"input": "?", "answers": ["x"], "all_classes": None, "length": 4}
    rows = [row | {"_id": str(i), "context": f"{i} " + "The quick brown fox. " * 20} for i in range(5)]
    (data / "qasper.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.setattr(submit, "RUNNABLE", ("replay", "tasks", "synthetic"))
    assert submit.main(["all"]) == 0
    made, said = only(store), capsys.readouterr()
    assert {grid: bool(request["data"]) for grid, request in requests(made).items()} == {
        "replay": True, "tasks": True, "synthetic": False,
    }  # fmt: skip
    assert "claim-1" in made.claims and "extension-5" in made.claims and "extension-3" not in made.claims
    assert "left out: extension-3: this version has no runner for grid assistant" in said.err
    assert all(len({line.plan for line in made.task(i)}) == 1 for i in range(made.tasks))
    assert len(fake.calls("sbatch", "--test-only")) == 2


def test_rows_that_a_claim_is_calibrated_on_go_with_it(
    fake: FakeSlurm, store: Store, tmp_path, monkeypatch, capsys
) -> None:
    """LoCoMo's claim needs some rows of the grid of dialogues, made without DATA= and ARGS=; no other of them."""
    registry = load()
    claims = dict(registry.claims)
    params = {**claims["extension-3"].params, "calibration_task": "assistant_calibration"}
    claims["extension-3"] = replace(claims["extension-3"], calibration="assistant", params=params)
    monkeypatch.setattr(submit, "load", lambda: replace(registry, claims=claims))
    monkeypatch.setattr(submit, "accept", lambda *_: SimpleNamespace(grids=frozenset()))
    monkeypatch.setenv("ARGS", "locomo.questions=1")
    monkeypatch.setenv("DATA", write(tmp_path / "data", conversation(0), conversation(1)))
    assert submit.main(["extension-3"]) == 0
    assert capsys.readouterr().err == ""
    made = only(store)
    asked = requests(made)
    assert set(made.claims) == {"extension-3"} and made.plans[made.claims["extension-3"]].grid == "locomo"
    assert asked["locomo"]["data"] and asked["locomo"]["args"] and not asked["assistant"]["data"]
    assert asked["assistant"]["args"] is None
    units = {line.unit: made.plans[line.plan].grid for line in made.lines if line}
    for grid, tasks in (("assistant", {"assistant_calibration"}), ("locomo", {"locomo"})):
        plan = store.read_plan(grid, "smoke", asked[grid])
        mine = [cell for cell in plan.cells.to_pylist() if units.get(cell["unit"]) == grid]
        assert {cell["task"] for cell in mine} == tasks
        others = {cell["unit"] for cell in plan.cells.to_pylist() if cell["task"] in tasks}
        assert {unit for unit, of in units.items() if of == grid} == others


# ---------------------------------------------------------------- what is refused


def refused(capsys, *arguments: str) -> str:
    assert run(lambda: submit.main(list(arguments))) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


NODE = "allocation failure: Requested node configuration is not available\n"
PARTITION = "sbatch: error: invalid partition specified: nope\n"
PARTITION += "sbatch: error: Batch job submission failed: Invalid partition name specified\n"


@pytest.mark.parametrize("stage", ["--test-only", "--array="])
@pytest.mark.parametrize(("err", "says"), [(PARTITION, "Invalid partition name specified"), (NODE, "not available")])
def test_what_slurm_refuses_is_said_in_its_words_and_leaves_nothing(
    fake: FakeSlurm, store: Store, capsys, stage: str, err: str, says: str
) -> None:
    if stage == "--array=":  # taken when tried, refused when meant: an account's limit, say
        fake.answer("sbatch", "--array=", err=err, code=1)
        fake.answer("sbatch", "--test-only")
    else:
        fake.answer("sbatch", "--test-only", err=err, code=1)
    assert says in refused(capsys, "claim-1")
    assert slurm.manifests(store) == {} and {path.name for path in (store.root / "slurm").glob("*")} <= {".submitting"}
    assert not fake.calls("scancel") and not any("--dependency=afterany:100" in call for call in fake.calls("sbatch"))


def test_without_its_judge_the_array_is_cancelled(fake: FakeSlurm, store: Store, capsys) -> None:
    fake.answer("sbatch", "--dependency", err="sbatch: error: Job dependency problem\n", code=1)
    assert "Job dependency problem" in refused(capsys, "claim-1")
    assert fake.calls("scancel") == [["100"]]


def test_an_array_that_cannot_be_cancelled_either_is_named(fake: FakeSlurm, store: Store, capsys) -> None:
    lost = "error: Unable to contact slurm controller (connect failure)\n"
    fake.answer("sbatch", "--dependency", err=f"sbatch: {lost}", code=1)
    fake.answer("scancel", err=f"scancel: {lost}", code=1)
    assert run(lambda: submit.main(["claim-1"])) == 2
    said = capsys.readouterr().err.splitlines()
    why = "Unable to contact slurm controller (connect failure)"
    assert said == [f"job 100 goes on without a judge: scancel: {why}", f"error: sbatch: {why}"]


def test_an_interrupt_between_array_and_judge_leaves_neither(fake: FakeSlurm, store: Store, monkeypatch) -> None:
    ask = submit.slurm_client.submitted

    def interrupted(command: list[str]) -> str:
        if any(word.startswith("--dependency") for word in command):
            raise KeyboardInterrupt
        return ask(command)

    monkeypatch.setattr(submit.slurm_client, "submitted", interrupted)
    assert run(lambda: submit.main(["claim-1"])) == 130
    assert fake.calls("scancel") == [["100"]]


def test_a_submit_that_was_not_answered_keeps_what_its_tasks_would_need(fake: FakeSlurm, store: Store, capsys) -> None:
    """Slurm may have taken the array; then the next submit finds it in the queue."""
    late = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
    fake.answer("sbatch", "--array=", err=late, code=1)
    fake.answer("sbatch", "--test-only")
    assert "Socket timed out" in refused(capsys, "claim-1")
    made = only(store)
    fake.answer("squeue", out="".join(f"kvcert-{made.run}|100_{i}|PENDING|Priority\n" for i in range(3)))
    assert submit.main(["claim-1"]) == 0
    assert "all 3 missing units are in the queue already" in capsys.readouterr().out


def test_a_store_that_cannot_be_written_is_one_line(fake: FakeSlurm, store: Store, monkeypatch, capsys) -> None:
    """The disk gets full when the manifest is written: nothing is submitted, and no empty run stays."""
    write = Path.open

    def full(path: Path, *arguments: object, **more: object) -> object:
        if path.parent.parent == store.root / "slurm":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", full)
    assert "No space left on device" in refused(capsys, "claim-1")
    monkeypatch.undo()
    assert not fake.calls("sbatch", "--test-only")
    assert [path.name for path in (store.root / "slurm").iterdir()] == [".submitting"]


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"LAUNCHER": "moon"}, "launcher=moon: no such option; expected one of cpu, h100, h200, local, slurm"),
        ({"LAUNCHER": "$(touch pwned)"}, "launcher"),
        ({"LAUNCHER": "../run"}, "launcher"),
        ({"LAUNCHER": "local"}, "expected a Slurm site"),
        ({"ARGS": "launcher.time=01:01:00"}, "at most that of the partition (PartitionTimeLimit): main 1:00:00"),
        ({"ARGS": "launcher.warn_s=0"}, "launcher.warn_s: 0; expected at least 1"),
        ({"ARGS": "launcher.name=other"}, "configs/launcher/slurm.yaml: name: 'other'; expected slurm"),
        ({"ARGS": "launcher.partitoin=x"}, "partitoin"),
        ({"ARGS": "launcher=cpu", "LAUNCHER": "h100"}, "expected one of them"),
        ({"ARGS": "launcher.time=61"}, "launcher.time: 61 where text was expected"),
        ({"STORE": "/tmp/back\\slash"}, "a backslash in a log's path"),
        ({"STORE": "/tmp/a\udcff"}, "STORE='/tmp/a\\udcff': expected text in UTF-8"),
        ({"MODEL": "/tmp/a\udcff"}, "MODEL='/tmp/a\\udcff': expected text in UTF-8"),
        ({"DRY_RUN": "maybe"}, "DRY_RUN=maybe: expected 1"),
        ({"MODEL": "no/such/model"}, "expected a .gguf file"),
        ({"PROFILE": "huge"}, "expected one of smoke"),
    ],
)
def test_what_does_not_fit_is_one_line(
    fake: FakeSlurm, store: Store, monkeypatch, capsys, variables, says: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert says in refused(capsys, "claim-1")
    assert not store.root.exists() and not fake.calls("sbatch", "--test-only") and not Path("pwned").exists()


def test_claims_that_are_not_there_or_cannot_be_run_are_refused(fake: FakeSlurm, monkeypatch, capsys) -> None:
    assert "no registered claim" in refused(capsys, "claim-9")
    monkeypatch.setattr(submit, "RUNNABLE", ("replay", "architectures"))
    assert "this version has no runner for grid tasks" in refused(capsys, "claim-3")
    monkeypatch.setenv("PROFILE", "desktop")
    assert "PROFILE=desktop: grid architectures is not registered for it" in refused(capsys, "extension-4")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"MODEL": "no/such/model"}, "expected a .gguf file"),
        ({"DATA": "/no/such/folder"}, "/no/such/folder: no such folder"),
    ],
)
def test_what_no_claim_can_use_is_refused_for_all_of_them(
    fake: FakeSlurm, monkeypatch, capsys, variables, says
) -> None:
    monkeypatch.setenv("ARGS", "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert says in refused(capsys, "all")
    assert not fake.calls("sbatch", "--test-only")


def test_without_slurm_nothing_is_tried(fake: FakeSlurm, store: Store, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no sbatch on this machine" in refused(capsys, "claim-1")
    assert not store.root.exists()


def test_nodes_that_are_away_today_are_a_note(fake: FakeSlurm, store: Store, capsys) -> None:
    """Before maintenance, say: sbatch takes the array, and it waits."""
    fake.answer("sbatch", "--test-only", err=NODE, code=1)
    fake.answer("sinfo", "%T", out="up|drained\n")
    assert submit.main(["claim-1"]) == 0
    said = capsys.readouterr()
    why = "sbatch: allocation failure: Requested node configuration is not available"
    assert said.err == f"note: {why}, for now or for ever: nodes are down, drained or reserved\n"
    assert "job 100, and judge 101 after it" in said.out


def test_units_in_a_queue_that_cannot_be_seen_are_not_submitted_again(fake, store: Store, monkeypatch, capsys) -> None:
    assert submit.main(["claim-1"]) == 0
    capsys.readouterr()
    (fake.folder / "squeue").rename(fake.folder / "hidden")
    monkeypatch.setenv("PATH", str(fake.folder))
    assert "no squeue on this machine" in refused(capsys, "claim-1")
    assert len(fake.calls("sbatch", "--test-only")) == 2


def test_two_submits_at_once_submit_once(fake: FakeSlurm, store: Store, capsys) -> None:
    with slurm.submitting(store):
        assert "another submit to" in refused(capsys, "claim-1") and not fake.calls("sbatch", "--test-only")
        assert submit.main(["claim-1", "--dry-run"]) == 0
    assert submit.main(["claim-1"]) == 0


def test_a_controller_that_is_down_is_reported_before_planning(fake: FakeSlurm, store: Store, capsys) -> None:
    fake.answer(
        "scontrol", err="slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)\n", code=1
    )
    assert "Unable to contact slurm controller" in refused(capsys, "claim-1")
    assert not store.root.exists()


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """A checkout in which a registered constant of the smoke profile was changed after the freeze."""
    copy = tmp_path_factory.mktemp("changed")
    for folder in ("cert", "runs", "analysis", "scripts", "prereg", "configs", "slurm"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("store", "out", "__pycache__"))
    path = copy / "configs" / "profile" / "smoke.yaml"
    path.write_text(path.read_text().replace("kappa: 0.25", "kappa: 0.5"))
    return copy


def test_a_lock_that_does_not_match_is_refused(fake: FakeSlurm, store: Store, changed: Path) -> None:
    command = [sys.executable, "-m", "scripts.slurm", "claim-1"]
    done = subprocess.run(command, cwd=changed, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "smoke.yaml: replay: claim-1 grid differs from prereg/LOCK" in done.stderr
    assert not store.root.exists() and not fake.calls("sbatch", "--test-only")


# ---------------------------------------------------------------- what the submitted words do


def test_hostile_names_reach_the_tasks_as_they_are(fake: FakeSlurm, tmp_path: Path, monkeypatch, capsys) -> None:
    """Store and model have every bad name; the tasks and the judge run as Slurm would run them, from its own words."""
    root, model = tmp_path / HOSTILE / "store", tiny_folder(tmp_path / f"model {HOSTILE}")
    for name, value in {"STORE": str(root), "MODEL": str(model), "ARGS": f"{SMALL} launcher.tasks=2"}.items():
        monkeypatch.setenv(name, value)
    assert submit.main(["claim-1"]) == 0
    array, judge = fake.calls("sbatch", "--test-only")
    for number in range(2):
        code, said = ran(array, number)
        assert code == 0 and said.splitlines()[-1] == f"done: {(6, 4)[number]} examples computed, 0 failed"
    monkeypatch.setattr(slurm_judge, "show", lambda claim, chosen, as_json: f"{chosen.model == str(model)}")
    assert slurm_judge.main([judge[-1]]) == 0
    capsys.readouterr()
    assert submit.main(["claim-1"]) == 0 and "nothing to do, nothing submitted" in capsys.readouterr().out
    assert len(fake.calls("sbatch", "--test-only")) == 2
    assert len(rows(root)) == 10 * 3 * 2 * 2 * 2
    assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists()


def test_the_judge_writes_the_verdict_and_says_it_last(fake: FakeSlurm, store: Store, monkeypatch, capsys) -> None:
    judged = []
    monkeypatch.setattr(slurm_judge, "show", lambda claim, chosen, as_json: judged.append((claim, chosen)) or "KILLED")
    assert submit.main(["extension-6"]) == 0
    capsys.readouterr()
    path = str(store.root / "slurm" / only(store).run / "manifest.json")
    assert slurm_judge.main([path]) == 0 and capsys.readouterr().out == "extension-6 KILLED\n"
    ((claim_id, chosen),) = judged
    assert (claim_id, chosen.profile, chosen.store, chosen.args) == (
        "extension-6",
        "smoke",
        store.root,
        tuple(SMALL.split()),
    )

    def fails(*_: object, **__: object) -> str:
        raise UserError("all rows are of\nanother design")

    monkeypatch.setattr(slurm_judge, "show", fails)
    assert slurm_judge.main([path]) == 2
    assert capsys.readouterr().out == "extension-6 not judged: all rows are of another design\n"


TEN = "replay.documents=10 replay.ctx_tokens=96 launcher.tasks=1"  # units of four, four and two examples
Signals = dict[int, tuple[signal.Signals, ...]]


@pytest.fixture
def task(fake: FakeSlurm, monkeypatch, capsys) -> Callable[..., tuple[int, list[str]]]:
    """task({n: signals}) runs the submitted task here, told these signals while it computes its n-th example."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "100")
    monkeypatch.setenv("ARGS", TEN)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    decode = replay_cells.decode

    def once(at: Signals | None = None) -> tuple[int, list[str]]:
        numbers = count(1)

        def told(*arguments: object) -> object:
            for sent in (at or {}).get(next(numbers), ()):
                os.kill(os.getpid(), sent)
            return decode(*arguments)

        capsys.readouterr()
        monkeypatch.setattr(replay_cells, "decode", told)
        code = slurm_task.main([fake.calls("sbatch", "--test-only")[0][-1]])
        assert {number: signal.getsignal(number) for number in before} == before
        return code, capsys.readouterr().out.splitlines()

    return once


@pytest.mark.parametrize(("example", "units_left"), [(1, 3), (3, 3), (4, 2), (9, 1)])
def test_warned_it_finishes_its_example_and_goes_back_into_the_queue(
    fake: FakeSlurm, store: Store, task, example: int, units_left: int
) -> None:
    submit_ten(store)
    code, said = task({example: (signal.SIGUSR1,)})
    assert code == 0 and fake.calls("scontrol", "show") == [["requeue", "100_0"]]
    assert said[-1] == f"warned of the time limit: {example} examples computed, {units_left} units left"
    assert len(store.unit_files()) == 3 - units_left
    code, said = task()  # as Slurm starts it again
    assert code == 0 and said[-1] == f"done: {10 - example} examples computed, 0 failed"
    assert len(rows(store.root)) == 10 * 3 * 2 * 2 * 2 and not store.journals()


def submit_ten(store: Store) -> None:
    assert submit.main(["claim-1"]) == 0
    assert only(store).tasks == 1


def test_warned_in_its_last_example_it_is_done(fake: FakeSlurm, store: Store, task) -> None:
    submit_ten(store)
    code, said = task({10: (signal.SIGUSR1,)})
    assert code == 0 and said[-1] == "done: 10 examples computed, 0 failed" and not fake.calls("scontrol", "show")


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGTERM)]
)
def test_told_to_end_it_abandons_its_example_and_asks_for_nothing(fake: FakeSlurm, store: Store, task, signals) -> None:
    submit_ten(store)
    code, said = task({6: signals})
    assert code == 143 and said[-1].startswith("told to end: ") and not fake.calls("scontrol", "show")
    assert len(store.unit_files()) == 1 and len(store.journals()) == 1
    code, said = task()
    assert code == 0 and said[-1] == "done: 5 examples computed, 0 failed"
    assert len(rows(store.root)) == 10 * 3 * 2 * 2 * 2 and not store.journals()


def test_told_to_end_where_nobody_heard_it_asks_for_nothing_either(fake, store: Store, task, monkeypatch) -> None:
    """A cancelled job must not put itself back into the queue, even where something swallowed what interrupted it."""
    submit_ten(store)
    end = slurm_task.Signals._end

    def unheard(signals: slurm_task.Signals, *arguments: Any) -> None:
        with suppress(slurm_task.Ended):
            end(signals, *arguments)

    monkeypatch.setattr(slurm_task.Signals, "_end", unheard)
    code, said = task({2: (signal.SIGTERM,)})
    assert code == 143 and said[-1].startswith("told to end: ") and not fake.calls("scontrol", "show")
    assert sum(line.endswith(": done") for line in said) == 2


def test_the_end_that_its_own_requeue_brings_is_no_failure(fake: FakeSlurm, store: Store, task) -> None:
    submit_ten(store)
    (fake.folder / "scontrol").write_text("#!/bin/sh\nkill -TERM $PPID\nkill -TERM $$\n")  # all of the job
    code, said = task({2: (signal.SIGUSR1,)})
    assert code == 0 and said[-1] == "warned of the time limit: 2 examples computed, 3 units left"


def test_where_it_may_not_go_back_it_says_so_and_fails(fake: FakeSlurm, store: Store, task, monkeypatch) -> None:
    submit_ten(store)
    fake.answer("scontrol", "requeue", err="Requested operation is presently disabled for job 100_0\n", code=1)
    code, said = task({2: (signal.SIGUSR1,)})
    after = "submitting again does what is left"
    disabled = "scontrol: Requested operation is presently disabled for job 100_0"
    assert code == 1 and said[-1] == f"not back in the queue: {disabled}; {after}"


def test_where_requeue_is_switched_off_slurm_is_not_asked(fake: FakeSlurm, store: Store, task, monkeypatch) -> None:
    monkeypatch.setenv("ARGS", f"{TEN} launcher.requeue=false")
    submit_ten(store)
    assert "--no-requeue" in fake.calls("sbatch", "--test-only")[0]
    code, said = task({2: (signal.SIGUSR1,)})
    assert code == 1 and said[-1].startswith("not back in the queue: launcher.requeue is false; ")
    assert not fake.calls("scontrol", "show")


def test_without_a_finished_example_it_does_not_come_back_for_ever(
    fake: FakeSlurm, store: Store, task, monkeypatch
) -> None:
    submit_ten(store)
    load = execute.load_model
    monkeypatch.setattr(execute, "load_model", lambda *it: os.kill(os.getpid(), signal.SIGUSR1) or load(*it))
    code, said = task()
    assert code == 1 and "no example was finished within None; expected a longer launcher.time" in said[-1]
    assert not fake.calls("scontrol", "show") and not store.unit_files()


def until(task: subprocess.Popen[str], words: str, times: int) -> None:
    """Wait until a task has said some words so often."""
    assert task.stdout is not None
    for _ in range(times):
        while words not in (line := task.stdout.readline()):
            assert line, f"{words!r} never came"


def test_an_orphan_neither_doubles_nor_tears_rows(fake: FakeSlurm, store: Store, monkeypatch) -> None:
    """A task stopped in the middle outlives its job; another does all of its work; then the first goes on to its end."""
    monkeypatch.setenv("ARGS", "replay.documents=8 replay.ctx_tokens=1500 replay.steps=4 launcher.tasks=1")
    assert submit.main(["claim-1"]) == 0  # two units; an example takes a second
    slow = fake.calls("sbatch", "--test-only")[0]
    orphan = started(slow, 0)
    until(orphan, ": done", 2)
    orphan.send_signal(signal.SIGSTOP)
    assert len(store.journals()) == 1 and not store.unit_files()
    code, text = ran(slow)
    done = re.search(r"done: (\d) examples computed, 0 failed", text)
    assert code == 0 and done and int(done[1]) in (5, 6)  # what the orphan had finished is in its journal
    before = rows(store.root), [file.path.read_bytes() for file in store.unit_files()]
    orphan.send_signal(signal.SIGCONT)
    said, _ = orphan.communicate(timeout=PATIENCE_S)
    assert orphan.returncode == 0, said
    assert (rows(store.root), [file.path.read_bytes() for file in store.unit_files()]) == before
    assert [file.number for file in store.unit_files()] == [0, 0] and not store.journals()
    cells = [row["cell"] for row in before[0]]
    assert len(cells) == len(set(cells)) == 8 * 3 * 2 * 2 * 4
    assert {path.name for path in (store.root / "units").iterdir()} == {file.path.name for file in store.unit_files()}


def test_failed_examples_are_tried_once_more_a_submit(fake: FakeSlurm, store: Store, monkeypatch, capsys) -> None:
    """A task that comes back does not try again what it has tried; the next submit does."""
    monkeypatch.setenv("ARGS", "replay.documents=2 replay.ctx_tokens=96")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")

    def tried(why: str | None) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            if why:
                patch.setattr("runs.replay_cells.decode", lambda *_: (_ for _ in ()).throw(RuntimeError(why)))
            code = slurm_task.main([fake.calls("sbatch", "--test-only")[-2][-1]])
        return code, capsys.readouterr().out.splitlines()[-1]

    assert submit.main(["claim-1"]) == 0
    assert tried("no memory") == (1, "done: 2 examples computed, 2 failed")
    assert tried("no memory") == (0, "done: 0 examples computed, 0 failed")
    assert submit.main(["claim-1"]) == 0
    assert [line.retry for made in slurm.manifests(store).values() for line in made.lines if line] == [None, 0]
    assert tried(None) == (0, "done: 2 examples computed, 0 failed")
    assert submit.main(["claim-1"]) == 0 and "nothing to do" in capsys.readouterr().out


# ---------------------------------------------------------------- what a task refuses


def test_a_task_under_another_lock_computes_nothing(fake: FakeSlurm, store: Store, changed: Path) -> None:
    """The checkout changed while the array was in the queue."""
    assert submit.main(["claim-1"]) == 0
    array = [word if word != str(ROOT) else str(changed) for word in fake.calls("sbatch", "--test-only")[0]]
    code, said = ran(array)
    assert code == 2 and "claim-1 grid differs from prereg/LOCK" in said.splitlines()[-1]
    assert not store.unit_files() and not store.journals()


def test_a_task_whose_plan_is_another_one_computes_nothing(
    fake: FakeSlurm, store: Store, tmp_path: Path, monkeypatch
) -> None:
    model = tiny_folder(tmp_path / "model")
    monkeypatch.setenv("MODEL", str(model))
    assert submit.main(["claim-1"]) == 0
    path = fake.calls("sbatch", "--test-only")[0][-1]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    tiny_folder(model, seed=1)
    with pytest.raises(UserError, match="grid replay: another model, text or code than planned"):
        slurm_task.main([path])
    for plan in (store.root / "plans").iterdir():
        plan.unlink()
    with pytest.raises(UserError, match="its plan is another one than this run was submitted with"):
        slurm_task.main([path])
    assert not store.unit_files()


@pytest.mark.parametrize(("number", "says"), [("", "SLURM_ARRAY_TASK_ID=: expected"), ("7", "expected 0 to 2")])
def test_a_task_that_is_none_is_refused(fake: FakeSlurm, monkeypatch, number: str, says: str) -> None:
    assert submit.main(["claim-1"]) == 0
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number)
    with pytest.raises(UserError, match=says):
        slurm_task.main([fake.calls("sbatch", "--test-only")[0][-1]])


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error(fake: FakeSlurm, store: Store, monkeypatch) -> None:
    monkeypatch.setenv("ARGS", f"{SMALL} launcher.gres=gpu:1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert submit.main(["claim-1"]) == 0
    assert "--gres=gpu:1" in fake.calls("sbatch", "--test-only")[0]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    with pytest.raises(UserError, match=r"launcher\.gres: 'gpu:1', but torch .* sees no GPU"):
        slurm_task.main([fake.calls("sbatch", "--test-only")[0][-1]])
    assert not store.unit_files()


# ---------------------------------------------------------------- the guide


def test_the_guide_names_commands_settings_and_keys_that_exist() -> None:
    guide, makefile = (ROOT / "docs" / "cluster.md").read_text(), (ROOT / "Makefile").read_text()
    six = re.findall(r"^    (.+?)\s+# (\d)  ?\S", guide, re.MULTILINE)
    assert [number for _, number in six] == list("123456")
    helped = set(re.findall(r"^##   make ([\w-]+)", makefile, re.MULTILINE))
    for name in re.findall(r"make ([a-z]+(?:-[a-z]+)*(?:-\d)?)\b", guide):
        assert re.sub(r"extension-\d$", "extension-N", re.sub(r"claim-\d$", "claim-N", name)) in helped, name
    for setting in re.findall(r"\b([A-Z_]+)=", guide):
        assert setting in (*SETTINGS, "KVCERT_CACHE"), setting
    keys = {field.name for field in fields(LauncherConfig)}
    assert set(re.findall(r"launcher\.(\w+)=", guide)) <= keys
    assert set(re.findall(r"`(\w+)(?:: \w+)?`", guide)) & keys >= {
        "requeue",
        "tasks",
        "time",
        "warn_s",
        "throttle",
        "python",
    }


# ---------------------------------------------------------------- the script


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "slurm" / "array.sbatch"), *arguments]
    environment = os.environ | variables
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_script_becomes_its_command_with_every_word_as_it_was(tmp_path: Path) -> None:
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.getppid(), dict(os.environ)]))"
    done = script(str(tmp_path), "", sys.executable, "-c", code, HOSTILE, "")
    words, where, _, environment = json.loads(done.stdout)
    assert words == [HOSTILE, ""] and where == str(tmp_path) and done.returncode == 0
    fixed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    assert fixed.items() <= environment.items()
    assert script(str(tmp_path), "", "/bin/sh", "-c", "exit 7").returncode == 7
    assert script(str(tmp_path), "", "-a", "x", "/bin/true").returncode == 127  # a word, no option of bash's own exec


def test_the_script_is_replaced_by_python_and_survives_an_early_warning(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print(os.getpid(), open('/proc/self/stat').read())"
    command = ["bash", str(ROOT / "slurm" / "array.sbatch"), str(tmp_path), "", sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and said.split()[0] == str(child.pid)


def test_the_script_loads_modules_and_names_a_folder_that_the_node_lacks(tmp_path: Path) -> None:
    code = 'module() { echo module "$@" $not_set; }; export -f module; exec bash "$@"'
    array = str(ROOT / "slurm" / "array.sbatch")
    command = ["bash", "-c", code, "x", array, str(tmp_path), "cuda/12.4 gcc", "echo", "ran"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "module load cuda/12.4 gcc\nran\n"
    lost = script(str(tmp_path / "nowhere"), "", "echo", "ran")
    assert lost.returncode == 2 and lost.stdout == ""
    assert f"does not see {tmp_path / 'nowhere'}; expected a disk that all nodes share" in lost.stderr
