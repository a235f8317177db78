"""Task grids computed for real on the tiny model: kills, several processes, a full disk, failures; rows stay equal."""

import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import frame
from runs import execute, prepare
from runs.errors import UserError
from runs.grid import header, parts
from runs.store import Store
from scripts.compose import compose

DESIGN = "d" * 64
SMALL = ("profile=smoke", "tasks.documents=3", "tasks.seed=1000", "tasks.text_seed=1000")
SMALL += ("tasks.tasks=[single_needle,variable_tracking]",)  # of one request each
SMALL += ("tasks.arms=[full,topk aware 0.25,poisson aware 0.25,poisson agnostic 0.25]",)
REQUEST = {"model": None, "data": None, "ctx": None, "args": "small"}
CELLS = 6 * 4


@pytest.fixture(scope="module")
def texts():
    """Parts and examples, made once; planned() stores a plan of them."""
    mine = parts([compose(list(SMALL))], None, "tasks")
    return mine, [prepare.documents(part) for part in mine]


def planned(root: Path, texts):
    mine, found = texts
    plan = prepare.plan(mine, found, header(mine, REQUEST, "smoke", DESIGN, "tasks"), [])
    store = Store(root)
    store.write_plan(plan)
    return store, plan, mine, found


def rows(store: Store, plan) -> list[dict]:
    """All rows, in plan order, without their seconds."""
    return [{k: v for k, v in row.items() if k != "wall_s"} for row in store.rows(plan, {DESIGN}).to_pylist()]


def work(root: Path, texts, found=None, retry: bool = False) -> list[tuple[str, bool, str | None]]:
    """What one worker process does, without the pool above it: its progress. found: given to it in place of the texts."""
    store, plan, mine, same = planned(root, texts)
    progress = execute.get_context("spawn").SimpleQueue()
    execute._start(store.root, plan.design, mine, progress, os.getppid())
    failing = store.failing(plan) if retry else []
    for job in execute._jobs(plan, mine, found or same, failing or store.missing(plan), failing):
        execute._work(job)
    return [progress.get() for _ in iter(progress.empty, True)]


def forked(root: Path, texts) -> int:
    """A process that works on the store, from this one, which has torch and the examples in memory already."""
    if child := os.fork():
        return child
    code = 1
    try:
        work(root, texts)
        code = 0
    finally:
        os._exit(code)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, texts):
    store, plan, mine, found = planned(tmp_path_factory.mktemp("one"), texts)
    report = execute.run(store, plan, mine, found, store.missing(plan), workers=1)
    assert report.done == 6 and not report.failures and not report.died
    assert len(rows(store, plan)) == plan.cells.num_rows == CELLS
    return rows(store, plan), frame.digest(frame.load(store, plan, {DESIGN}))


def test_rows_and_their_digest_do_not_depend_on_the_number_of_workers(tmp_path: Path, texts, undisturbed) -> None:
    store, plan, mine, found = planned(tmp_path, texts)
    execute.run(store, plan, mine, found, store.missing(plan), workers=2)
    assert (rows(store, plan), frame.digest(frame.load(store, plan, {DESIGN}))) == undisturbed
    assert store.missing(plan) == []


def test_killed_at_twenty_random_moments_nothing_is_lost_or_doubled(tmp_path: Path, texts, undisturbed) -> None:
    moments = random.Random(0)
    for _ in range(20):
        child = forked(tmp_path, texts)
        time.sleep(moments.uniform(0.05, 1.0))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    child = forked(tmp_path, texts)
    assert os.waitpid(child, 0)[1] == 0
    store, plan, _, _ = planned(tmp_path, texts)
    assert store.missing(plan) == [] and rows(store, plan) == undisturbed[0]
    assert sum(store.meta(file.path)["rows"] for file in store.unit_files()) == CELLS
    # a kill between two calls can leave a temporary file, or the journal of a published unit: no reader takes them
    assert {file.unit for file in store.journals()} <= {file.unit for file in store.unit_files()}


def test_two_processes_on_one_store_double_no_row(tmp_path: Path, texts, undisturbed) -> None:
    children = [forked(tmp_path, texts) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    store, plan, _, _ = planned(tmp_path, texts)
    assert rows(store, plan) == undisturbed[0]
    assert sum(store.meta(file.path)["rows"] for file in store.unit_files()) == CELLS


def test_a_failing_example_is_rows_and_the_others_finish_and_a_retry_does_it_alone(
    tmp_path, texts, undisturbed
) -> None:
    _, (good,) = texts
    broken = replace(good[3], context=(999, *good[3].context[1:]))  # no such token: it fails in the model itself
    done = work(tmp_path, texts, [[*good[:3], broken, *good[4:]]])
    assert len(done) == 6 and [(name, computed) for name, computed, message in done if message] == [(broken.name, True)]
    store, plan, _, _ = planned(tmp_path, texts)
    counts = store.counts(plan)
    assert (counts["done"], counts["failed"], counts["missing"]) == (CELLS - 4, 4, 0)
    failed = [row for row in rows(store, plan) if row["status"] == "failed"]
    assert {row["example"] for row in failed} == {broken.name} and "token id 999" in failed[0]["message"]
    assert failed[0]["prediction"] is None and failed[0]["prompt_sha256"]
    assert [name for name, computed, _ in work(tmp_path, texts, retry=True) if computed] == [broken.name]
    assert rows(store, plan) == undisturbed[0]


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_from_there(tmp_path: Path, texts, undisturbed) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root; tests/runs/test_store.py has a file size limit beside it")
    try:
        store, plan, _, _ = planned(disk / "store", texts)
        (disk / "ballast").write_bytes(bytes(4096 * (os.statvfs(disk).f_bavail - 12)))
        with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
            work(store.root, texts)
        for file in store.unit_files():
            store.meta(file.path)
        (disk / "ballast").unlink()
        assert 0 < sum(computed for _, computed, _ in work(store.root, texts)) < 6
        assert rows(store, plan) == undisturbed[0]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("text", ["None", "NA", "nan", "", "null", ' x\ny,"z"'])
def test_predictions_that_look_like_nothing_stay_text(tmp_path: Path, texts, undisturbed, text: str) -> None:
    store, plan, _, _ = planned(tmp_path, texts)
    by_cell = {row["cell"]: row | {"prediction": text, "wall_s": 0.5} for row in undisturbed[0]}
    for unit in plan.units:
        attempt = store.attempt(unit, DESIGN, {"host": "planted"})
        for example in attempt.missing:
            attempt.record(example, [by_cell[cell["cell"]] for cell in attempt.planned(example)], 0.5)
        attempt.publish()
    assert {row["prediction"] for row in rows(store, plan)} == {text}
    assert frame.load(store, plan, {DESIGN})["prediction"].tolist() == [text] * CELLS
