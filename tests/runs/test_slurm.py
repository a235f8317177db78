"""A run's manifest: every unit once, one model a task, named by content; and what a run's units are at."""

import errno
import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs import slurm
from runs.cells import Plan
from runs.config_launcher import LauncherConfig
from runs.errors import UserError
from runs.slurm import Asked, Line, Manifest
from runs.slurm_queue import Task
from runs.store import Store
from tests.planted_store import DESIGN, REQUEST, do, plan

SITE = LauncherConfig("site")
KEY = Plan.key("replay", "smoke", REQUEST)
LINES = tuple(Line(KEY, f"{i:024x}", None) for i in range(5))
MADE = Manifest({"claim-1": KEY}, "smoke", {KEY: Asked("replay", REQUEST, DESIGN)}, SITE, 2, LINES)


def groups_of(sizes: list[int]) -> list[list[Line]]:
    return [[Line(f"grid {g}", f"{g}-{k}", None) for k in range(size)] for g, size in enumerate(sizes)]


# ---------------------------------------------------------------- arranged


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 40))
def test_every_line_is_one_tasks_and_a_task_has_one_model(sizes: list[int], most: int) -> None:
    groups = groups_of(sizes)
    tasks, lines = slurm.arranged(groups, most)
    assert tasks == min(most, sum(sizes))
    mine = [[line for line in lines[i::tasks] if line] for i in range(tasks)]  # task i takes lines i, i + tasks, ...
    assert Counter(line for task in mine for line in task) == Counter(line for group in groups for line in group)
    assert all(mine)
    loads = [len({line.plan for line in task}) for task in mine]
    assert all(n == 1 for n in loads) if tasks >= len(groups) else sum(loads) == len(groups)
    for task in mine:  # grouped: no model comes back once it has gone
        changes = sum(line.plan != before.plan for line, before in zip(task[1:], task, strict=False))
        assert changes == len({line.plan for line in task}) - 1
    assert len(lines) == tasks * max(map(len, mine)) and lines[-tasks:].count(None) < tasks


@pytest.mark.parametrize(("sizes", "most"), [([7], 3), ([9, 1], 3), ([5, 5, 1], 4), ([6, 4, 2], 7), ([3, 3], 6)])
def test_the_longest_task_is_as_short_as_one_model_a_task_allows(sizes: list[int], most: int) -> None:
    """Oracle: every way to share the tasks among the models."""
    tasks, lines = slurm.arranged(groups_of(sizes), most)
    shares = [share for share in product(range(1, most + 1), repeat=len(sizes)) if sum(share) == most]
    best = min(max(-(-n // share) for n, share in zip(sizes, share, strict=True)) for share in shares)
    assert len(lines) == tasks * best


def test_plan_order_is_kept_within_a_task() -> None:
    tasks, lines = slurm.arranged([list(LINES)], 2)
    assert [line for line in lines[0::tasks] if line] == [LINES[0], LINES[2], LINES[4]]
    assert [line for line in lines[1::tasks] if line] == [LINES[1], LINES[3]]


# ---------------------------------------------------------------- manifest


def test_a_manifest_reads_as_it_was_written_under_its_own_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    hostile = {"model": "a b'\"$(touch pwned)`x`\n;/\\", "data": None, "ctx": 3, "args": "x='y z'"}
    made = replace(MADE, plans={KEY: Asked("replay", hostile, DESIGN)}, lines=(*LINES, None))
    made = replace(made, launcher=replace(SITE, time="1", warn_s=5, modules=("cuda/12.4",)))
    path = slurm.write(store, made)
    assert path == tmp_path / "slurm" / made.run / "manifest.json"
    assert slurm.read(path) == made and slurm.read(path).run == made.run
    assert slurm.manifests(store) == {made.run: made}


def test_a_run_is_named_by_all_of_its_content_and_by_nothing_else() -> None:
    others = [
        replace(MADE, claims={"claim-2": KEY}),
        replace(MADE, profile="paper"),
        replace(MADE, plans={KEY: Asked("replay", REQUEST | {"ctx": 1}, DESIGN)}),
        replace(MADE, plans={KEY: Asked("replay", REQUEST, "e" * 64)}),
        replace(MADE, launcher=replace(SITE, throttle=3)),
        replace(MADE, tasks=1),
        replace(MADE, lines=LINES[:-1]),
        replace(MADE, lines=(replace(LINES[0], retry=0), *LINES[1:])),
    ]
    assert len({made.run for made in (MADE, *others)}) == len(others) + 1
    assert replace(MADE, claims={"claim-1": KEY}).run == MADE.run and len(MADE.run) == 12


def test_tasks_take_every_so_manyth_line_and_there_is_no_other() -> None:
    assert MADE.task(0) == list(LINES[0::2]) and MADE.task(1) == list(LINES[1::2])
    for number in (-1, 2):
        with pytest.raises(UserError, match="expected 0 to 1"):
            MADE.task(number)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "", "no valid JSON"),
        (lambda text: text[: len(text) // 2], "no valid JSON"),
        (lambda text: "[]", "mapping was expected"),
        (lambda text: text.replace('"unit"', '"nit"', 1), "unknown key 'nit'"),
        (lambda text: text.replace('"tasks": 2', '"tasks": 3', 1), "is the manifest of run"),
        (lambda text: text.replace('"warn_s": 120', '"warn_s": 0', 1), "warn_s"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_named(tmp_path: Path, change, says: str) -> None:
    path = slurm.write(Store(tmp_path), MADE)
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=says) as error:
        slurm.read(path)
    assert str(path) in str(error.value)


def test_an_absent_manifest_is_named_and_no_run_is_none(tmp_path: Path) -> None:
    assert slurm.manifests(Store(tmp_path)) == {}
    with pytest.raises(UserError, match=r"cannot read .*on a disk all nodes share"):
        slurm.read(tmp_path / "slurm" / "x" / "manifest.json")
    (tmp_path / "slurm" / "no run").mkdir(parents=True)
    assert slurm.manifests(Store(tmp_path)) == {}


# ---------------------------------------------------------------- how far


@pytest.mark.parametrize(
    ("retry", "published", "done"),
    [
        (None, None, False),
        (None, 0, True),
        (None, 3, True),
        (0, None, False),
        (0, 0, False),
        (0, 1, True),
        (2, 1, False),
    ],
)
def test_a_retried_unit_is_done_once_a_later_attempt_is_published(retry, published, done: bool) -> None:
    numbers = {} if published is None else {"u": published}
    assert slurm.is_done(Line(KEY, "u", retry), numbers) == done


def test_units_are_what_the_store_says_and_only_then_what_the_queue_says(tmp_path: Path) -> None:
    """Six units, one a task: published, published with a failure, and four by the state of their task."""
    store, made = Store(tmp_path), plan(documents=6, size=1)
    store.write_plan(made)
    units = list(made.units)
    do(store.attempt(units[0], DESIGN, {"host": "here"}))
    do(store.attempt(units[1], DESIGN, {"host": "here"}), failing={"example 1"})
    lines = tuple(Line(KEY, unit, None) for unit in units)
    run = replace(MADE, tasks=6, lines=lines)
    tasks = {
        0: Task("9_0", "FAILED", "late"),  # its unit is there, whatever became of it
        1: Task("9_1", "COMPLETED", "None"),
        2: Task("9_2", "RUNNING", "None"),
        3: Task("9_3", "PENDING", "BeginTime"),
        4: Task("9_4", "OUT_OF_MEMORY", "None"),
    }
    found = slurm.states(store, run, tasks, slurm.published(store))
    assert list(found.values()) == ["done", "failed", "running", "pending", "left", "left"]
    assert list(found) == list(enumerate(units))
    assert not run.is_done(slurm.published(store)) and replace(run, lines=lines[:2]).is_done(slurm.published(store))


@pytest.mark.parametrize(
    ("text", "last"),
    [(b"", ""), (b"\n \n", ""), (b"one\ntwo\n\n", "two"), (b"a\n\xff b", "\ufffd b"), (b"x" * 9000 + b"\nend", "end")],
)
def test_the_last_line_of_a_log_is_the_last_that_says_something(tmp_path: Path, text: bytes, last: str) -> None:
    (tmp_path / "log").write_bytes(text)
    assert slurm.last_line(tmp_path / "log") == last
    assert slurm.last_line(tmp_path / "absent") == ""


def test_a_manifest_is_plain_json(tmp_path: Path) -> None:
    stored = json.loads(slurm.write(Store(tmp_path), MADE).read_text())
    assert stored["lines"][0] == {"plan": KEY, "unit": "0" * 24, "retry": None}


def test_of_two_submits_at_once_the_later_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with slurm.submitting(store):
        with pytest.raises(UserError, match=r"another submit to .*store is at work"), slurm.submitting(store):
            pytest.fail("two at once")
        with slurm.submitting(Store(tmp_path / "other")):
            pass
    with slurm.submitting(store):
        pass
    assert slurm.manifests(store) == {}


def test_a_disk_without_locks_refuses_no_submit(tmp_path: Path, monkeypatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(slurm.fcntl, "flock", none)
    with slurm.submitting(Store(tmp_path)), slurm.submitting(Store(tmp_path)):
        pass
