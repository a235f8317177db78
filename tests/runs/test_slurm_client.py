"""What Slurm is told, word by word, and what it answers: recorded from Slurm 22.05, refusals in its own words."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from runs import slurm_client, slurm_queue
from runs.config_launcher import LauncherConfig
from runs.errors import UserError
from runs.slurm_client import UnsureError
from runs.slurm_queue import Task, parsed
from tests.fake_slurm import FakeSlurm

SITE = LauncherConfig("site")
FULL = LauncherConfig(
    "h100", "gpu", "me@lab", "high", "a100|h100", "gpu:h100:1", "64G", "08:00:00", 4, 64, 8, 600, False,
    ("cuda/12.4", "gcc"), ("apptainer", "exec", "an image.sif"), "/opt/python", "cpu",
)  # fmt: skip
HOSTILE = "/s/a b'\"$(touch pwned)`x`;%j\n/slurm/abc"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(made.folder))
    return made


# ---------------------------------------------------------------- commands


def test_the_array_is_told_everything_of_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = slurm_client.array_command(FULL, "abc", 10, Path("/s/slurm/abc"), ["-m", "x", "a b"])
    at = command.index(str(ROOT / "slurm" / "array.sbatch"))
    options, script = command[:at], command[at:]
    assert set(options) == {
        "sbatch", "--parsable", "--job-name=kvcert-abc", "--nodes=1", "--ntasks=1", "--export=ALL", "--chdir=/s/slurm/abc",
        "--output=/s/slurm/abc/abc.%a.log", "--open-mode=append", "--array=0-9%8", "--signal=B:USR1@600", "--no-requeue",
        "--cpus-per-task=4", "--gres=gpu:h100:1", "--constraint=a100|h100", "--partition=gpu", "--account=me@lab",
        "--qos=high", "--mem=64G", "--time=08:00:00",
    }  # fmt: skip
    container = ["apptainer", "exec", "an image.sif", "/opt/python"]
    assert script[1:] == [str(ROOT), "cuda/12.4 gcc", *container, "-m", "x", "a b"]
    assert len(options) == len(set(options)) and Path(script[0]).is_file()


def test_what_a_site_leaves_open_is_left_to_slurm() -> None:
    command = slurm_client.array_command(SITE, "abc", 3, Path("/s/slurm/abc"), ["-m", "x"])
    names = {word.split("=")[0] for word in command if word.startswith("--")}
    assert not names & {"--partition", "--account", "--qos", "--mem", "--time", "--gres", "--constraint"}
    assert "--array=0-2%3" in command and "--requeue" in command  # no throttle above the number of tasks
    assert command[-4:] == ["", sys.executable, "-m", "x"]


def test_the_judge_waits_for_all_tasks_and_asks_for_no_gpu() -> None:
    command = slurm_client.judge_command(FULL, "abc", "17", Path("/s/slurm/abc"), ["-m", "judge"])
    assert {"--dependency=afterany:17", "--kill-on-invalid-dep=yes", "--partition=cpu", "--cpus-per-task=1"} <= {
        *command
    }
    assert not any(word.startswith(("--gres", "--constraint", "--array", "--signal")) for word in command)
    assert "--output=/s/slurm/abc/abc.judge.log" in command and "--job-name=kvcert-abc-judge" in command
    alone = slurm_client.judge_command(replace(FULL, judge_partition=None), "abc", None, Path("/s"), [])
    assert "--partition=gpu" in alone and not any(word.startswith(("--dep", "--kill")) for word in alone)


def test_hostile_names_stay_one_argument_and_no_pattern_of_slurm() -> None:
    command = slurm_client.array_command(SITE, "abc", 1, Path(HOSTILE), ["-m", "x", f"{HOSTILE}/manifest.json"])
    assert f"--chdir={HOSTILE}" in command and command[-1] == f"{HOSTILE}/manifest.json"
    assert f"--output={HOSTILE.replace('%', '%%')}/abc.%a.log" in command
    assert shlex.split(shlex.join(command)) == command


# ---------------------------------------------------------------- answers

SQUEUE = """kvcert-aaa|20_2|PENDING|JobArrayTaskLimit
kvcert-aaa-judge|21|PENDING|Dependency
kvcert-aaa|20_0|RUNNING|None
kvcert-aaa|20_1|FAILED|NonZeroExitCode
kvcert-aaa|20_3|PENDING|BeginTime
wrap|14|COMPLETED|None
kvcert-bbb|30_[4-9%2]|PENDING|Resources
kvcert-bbb|30_0|CANCELLED|None
"""


def test_tasks_and_judge_are_told_apart_by_name_and_number() -> None:
    found = parsed(["aaa", "bbb", "ccc"], SQUEUE)
    assert found["aaa"] == {
        0: Task("20_0", "RUNNING", "None"),
        1: Task("20_1", "FAILED", "NonZeroExitCode"),
        2: Task("20_2", "PENDING", "JobArrayTaskLimit"),
        3: Task("20_3", "PENDING", "BeginTime"),
        None: Task("21", "PENDING", "Dependency"),
    }
    assert found["bbb"] == {0: Task("30_0", "CANCELLED", "None")} and found["ccc"] == {}


def test_of_two_jobs_of_one_task_the_one_in_the_queue_counts_then_the_later() -> None:
    lines = ["kvcert-a|9_0|FAILED|x", "kvcert-a|10_0|TIMEOUT|y"]
    for text in ("\n".join(lines), "\n".join(reversed(lines))):
        assert parsed(["a"], text)["a"][0].job == "10_0"
    for text in ("\n".join([*lines, "kvcert-a|8_0|PENDING|z"]), "\n".join(["kvcert-a|8_0|PENDING|z", *lines])):
        assert parsed(["a"], text)["a"][0].job == "8_0"  # a controller that was killed gives low numbers again


def test_accounting_adds_what_the_controller_forgot_and_exit_codes() -> None:
    accounted = "kvcert-a|9_0|COMPLETED|0:0\nkvcert-a|9_1|FAILED|0:9\nkvcert-a|9_2|CANCELLED by 0|0:15\n"
    accounted += "kvcert-a|9_[3-5%2]|PENDING|0:0\nkvcert-a|9_6|RUNNING|0:0\nkvcert-a-judge|10|PENDING|0:0\n"
    found = parsed(["a"], "kvcert-a|9_1|FAILED|NonZeroExitCode\nkvcert-a|9_6|RUNNING|None\n", accounted)["a"]
    assert found[0] == Task("9_0", "COMPLETED", "exit 0:0") and found[0].ended
    assert found[1] == Task("9_1", "FAILED", "NonZeroExitCode, exit 0:9")
    assert found[2] == Task("9_2", "CANCELLED", "exit 0:15")
    assert found[6] == Task("9_6", "RUNNING", "None") and found[6].runs and not found[6].ended
    assert set(found) == {0, 1, 2, 6, None}


@pytest.mark.parametrize(
    "state", ["COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "CANCELLED"]
)
def test_states_that_end_a_job(state: str) -> None:
    assert Task("1", state, "").ended and not Task("1", state, "").runs


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "SUSPENDED", "REQUEUE_HOLD", "RUNNING", "COMPLETING"])
def test_states_that_do_not(state: str) -> None:
    assert not Task("1", state, "").ended
    assert Task("1", state, "").runs == (state in ("RUNNING", "COMPLETING"))


def test_lines_that_are_no_jobs_are_passed_over() -> None:
    """A site's greeting, a torn line, numbers that are none: what is a job among them is still found."""
    names = ("kvcert-a", "kvcert-a-judge", "kvcert-b", "nothing")
    jobs = ("", "x", "x_0", "9_x", "9_", "_0", "9_\u00b2", "9_[0-3]", "-1_0", "9_0_0", "9+0")
    noise = [f"{name}|{job}|RUNNING|None" for name in names for job in jobs]
    noise += [
        "Welcome",
        "|",
        "|||",
        "kvcert-a",
        "kvcert-a|9_0",
        "kvcert-a|9_0||",
        "kvcert-a|9_0| |",
        "kvcert-a-judge|9_0|RUNNING",
    ]
    told = "\n".join([*noise, "kvcert-a|9_1|RUNNING|None", *noise, "kvcert-a-judge|10|PENDING|Dependency"])
    expected = {1: Task("9_1", "RUNNING", "None"), None: Task("10", "PENDING", "Dependency")}
    assert parsed(["a", "b"], told, "\n".join(noise)) == {"a": expected, "b": {}}


def test_how_a_user_likes_to_see_the_queue_hides_no_job(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_PARTITION", "SACCT_FORMAT", "SINFO_STATES", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    for tool in ("squeue", "sacct", "sinfo", "sbatch"):
        (fake.folder / tool).write_text("#!/bin/sh\n/usr/bin/env\n")
        said = slurm_client.asked([tool])
        assert "SLURM_CONF=x" in said and not any(f"{own}_" in said for own in ("SQUEUE", "SACCT", "SINFO"))


def test_the_queue_is_asked_by_name_for_ended_jobs_too(fake: FakeSlurm) -> None:
    fake.answer("squeue", out="kvcert-a|9_0|FAILED|None\n")
    assert slurm_queue.queue(["a", "b"]) == {"a": {0: Task("9_0", "FAILED", "None")}, "b": {}}
    (words,) = fake.calls("squeue")
    assert {"-a", "-h", "-r", "--states=all", "--name=kvcert-a,kvcert-a-judge,kvcert-b,kvcert-b-judge"} <= set(words)
    assert slurm_queue.queue([]) == {} and len(fake.calls("squeue")) == 1


def test_without_accounting_the_queue_suffices_and_with_it_both_are_asked(fake: FakeSlurm) -> None:
    assert slurm_queue.queue(["a"]) == {"a": {}}  # sacct is there and answers that there are no accounts
    fake.answer("sacct", out="kvcert-a|9_0|TIMEOUT|0:0\n")
    assert slurm_queue.queue(["a"]) == {"a": {0: Task("9_0", "TIMEOUT", "exit 0:0")}}
    (fake.folder / "sacct").unlink()
    assert slurm_queue.queue(["a"]) == {"a": {}}


@pytest.mark.parametrize(
    ("out", "most"),
    [("MaxArraySize            = 1001\n", 1001), ("MaxArraySize = 7", 7), ("MaxArraySize = 0", 1), ("nothing", 1001)],
)
def test_the_site_says_how_large_an_array_may_be(fake: FakeSlurm, out: str, most: int) -> None:
    fake.answer("scontrol", "show config", out=out)
    assert slurm_client.max_array() == most


@pytest.mark.parametrize(
    ("partition", "time", "refused"),
    [
        (None, "60", False),
        (None, "61", True),
        ("main", "01:00:01", True),
        ("urgent", "7-00", False),
        ("main,urgent", "61", False),
        ("elsewhere", "61", False),  # sbatch refuses it, in its words
        (None, None, False),
    ],
)
def test_a_limit_above_the_partitions_is_refused(fake: FakeSlurm, partition, time, refused: bool) -> None:
    site = replace(SITE, partition=partition, time=time)
    if not refused:
        slurm_client.require_taken(site)
        return
    with pytest.raises(UserError, match=r"launcher.time: .*PartitionTimeLimit\): main 1:00:00"):
        slurm_client.require_taken(site)


REFUSALS = [  # as Slurm 22.05 writes them
    (
        "sbatch: error: invalid partition specified: nope\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
        "sbatch: invalid partition specified: nope; Batch job submission failed: Invalid partition name specified",
    ),
    (
        "sbatch: error: Invalid generic resource (gres) specification\n",
        "sbatch: Invalid generic resource (gres) specification",
    ),
    (
        "allocation failure: Requested node configuration is not available\n",
        "sbatch: allocation failure: Requested node configuration is not available",
    ),
    ("", "sbatch: exit 1"),
]


@pytest.mark.parametrize(("err", "says"), REFUSALS)
def test_refusals_are_slurms_words_on_one_line(fake: FakeSlurm, err: str, says: str) -> None:
    fake.answer("sbatch", err=err, code=1)
    for ask in (
        lambda: slurm_client.submitted(["sbatch", "--parsable", "x"]),
        lambda: slurm_client.require_taken(SITE),
    ):
        with pytest.raises(UserError) as error:
            ask()
        assert str(error.value) == says


def test_a_site_is_tried_with_an_array_and_a_judge(fake: FakeSlurm) -> None:
    slurm_client.require_taken(replace(FULL, time="00:30:00", partition="main", warn_s=60))
    array, judge = fake.calls("sbatch")
    assert array[0] == judge[0] == "--test-only" and "--gres=gpu:h100:1" in array and "--gres=gpu:h100:1" not in judge
    assert "--partition=main" in array and "--partition=cpu" in judge
    fake.answer("sbatch", "--partition=cpu", err=REFUSALS[0][0], code=1)
    with pytest.raises(UserError, match="Invalid partition name"):
        slurm_client.require_taken(replace(FULL, time=None))


@pytest.mark.parametrize(
    "nodes", ["up|down", "up|drained", "up|draining", "up|maint", "up|idle*", "down|idle", "drain|mixed", "up|reserved"]
)
@pytest.mark.parametrize("why", ["Requested node configuration is not available", "Required node not available (down)"])
def test_nodes_that_are_away_today_make_no_refusal(fake: FakeSlurm, nodes: str, why: str) -> None:
    """Then sbatch takes the job and lets it wait, though sbatch --test-only says the same as of what can never run."""
    fake.answer("sbatch", "--test-only", err=f"allocation failure: {why}\n", code=1)
    fake.answer("sinfo", "%T", out=f"up|idle\n{nodes}\nup|mixed\n")
    assert slurm_client.require_taken(SITE) == [f"sbatch: allocation failure: {why}"] * 2
    fake.answer("sbatch", "--test-only", err=REFUSALS[0][0], code=1)
    with pytest.raises(UserError, match="Invalid partition name"):
        slurm_client.require_taken(SITE)


@pytest.mark.parametrize("out", ["123;harness\n", "123\n", "--- 7 users ---\nChecking account ... OK\n12\n 123\n\n"])
def test_a_job_number_may_name_its_cluster_and_come_after_a_greeting(fake: FakeSlurm, out: str) -> None:
    fake.answer("sbatch", out=out)
    assert slurm_client.submitted(["sbatch", "x"]) == "123"


@pytest.mark.parametrize(
    ("out", "err", "code"),
    [
        ("", "", 0),
        ("Submitted\nbatch job x", "", 0),
        ("", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n", 1),
    ],
)
def test_where_slurm_does_not_say_whether_it_took_a_job_that_is_another_error(fake, out: str, err: str, code) -> None:
    fake.answer("sbatch", out=out, err=err, code=code)
    with pytest.raises(UnsureError):
        slurm_client.submitted(["sbatch", "x"])
    fake.answer("sbatch", err=REFUSALS[0][0], code=1)
    with pytest.raises(UserError) as error:
        slurm_client.submitted(["sbatch", "x"])
    assert not isinstance(error.value, UnsureError)


def test_a_requeue_says_why_not(fake: FakeSlurm) -> None:
    assert slurm_client.requeued("9_1", 0) == ""
    fake.answer("scontrol", "requeue", err="Requested operation is presently disabled for job 9\n", code=1)
    assert slurm_client.requeued("9_1", 60) == "scontrol: Requested operation is presently disabled for job 9"
    assert len(fake.calls("scontrol")) == 2  # that is final
    (fake.folder / "scontrol").unlink()  # inside a container, say
    assert "no scontrol on this machine" in slurm_client.requeued("9_1", 60)


def test_a_requeue_waits_for_a_controller_that_is_restarted(fake: FakeSlurm, monkeypatch) -> None:
    lost = "slurm_update error: Unable to contact slurm controller (connect failure)\n"
    fake.answer("scontrol", "requeue", err=lost, code=1)
    slept = []

    def restarted(seconds: float) -> None:
        slept.extend([seconds] * (seconds == slurm_client.RETRY_S))  # subprocess waits by it too
        if len(slept) == 3:
            fake.answer("scontrol", "requeue")

    monkeypatch.setattr(slurm_client.time, "sleep", restarted)
    assert slurm_client.requeued("9_1", 60) == "" and len(slept) == 3
    fake.answer("scontrol", "requeue", err=lost, code=1)
    assert slurm_client.requeued("9_1", 0) == f"scontrol: {lost.strip()}"


def test_without_slurm_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch on this machine"):
        slurm_client.require_slurm()
    with pytest.raises(UserError, match="no squeue on this machine"):
        slurm_queue.queue(["a"])
    assert slurm_client.max_array() == 1001
    slurm_client.require_taken(replace(SITE, time="99-00"))


def test_a_controller_that_does_not_answer_is_not_waited_for_for_ever(fake, monkeypatch) -> None:
    monkeypatch.setattr(slurm_client, "PATIENCE_S", 0.2)
    (fake.folder / "squeue").write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    with pytest.raises(UserError, match=r"squeue: no answer from Slurm in 0\.2 s"):
        slurm_queue.queue(["a"])


def test_a_requeue_waits_no_longer_than_until_the_limit(fake: FakeSlurm, monkeypatch) -> None:
    monkeypatch.setattr(slurm_client, "RETRY_S", 0.1)
    (fake.folder / "scontrol").write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    assert re.match(r"scontrol: no answer from Slurm in 0\.\d+ s;", slurm_client.requeued("9_1", 0.3))
