"""Nothing lost, nothing doubled, whatever is killed, torn, full or read-only.

.venv/bin/python -m pytest tests/runs/test_store.py
"""

import errno
import json
import math
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runs import files, journal
from runs import store as store_module
from runs.cells import Plan, cell_id, in_units
from runs.errors import UserError
from runs.schema import REPLAY, row_schema
from runs.store import Store
from tests.planted_store import DESIGN, REQUEST, do, header, made_up, plan, planted, work

ROOT = Path(__file__).resolve().parents[2]
# A server that has imported everything once (pyarrow imports pandas at its first table from Python values) forks a child
# in milliseconds, so that a child can be killed in the middle of its work, many times.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.planted_store", "pytest", "pandas"])


whole = store_module._read


def rows_of(store, made=None):
    return store.rows(made or plan(), {DESIGN})


def assert_undisturbed(root, made=None):
    """Rows, counts and files are those of a run that nothing has happened to."""
    made = made or plan()
    store = work(root)
    assert store.rows(made, {DESIGN}).equals(pa.Table.from_pylist(expected_rows(made), schema=REPLAY.arrow))
    assert store.counts(made) == {"done": made.cells.num_rows, "missing": 0, "failed": 0, "refused": 0}
    assert [(file.unit, file.number) for file in store.unit_files()] == [(unit, 0) for unit in sorted(made.units)]
    assert sum(pq.read_metadata(file.path).num_rows for file in store.unit_files()) == made.cells.num_rows


def expected_rows(made):
    return [made_up(cell | {"design": made.design}) for cell in made.cells.to_pylist()]


def child(target, *args):
    process = FORK.Process(target=target, args=args)
    process.start()
    return process


# ---------------------------------------------------------------- kill -9


@pytest.fixture(scope="module")
def many():
    return plan(documents=40, steps=2, size=2)


def test_killed_at_twenty_random_moments_the_rows_equal_an_undisturbed_run(tmp_path, many):
    Store(tmp_path / "undisturbed").write_plan(many)
    child(work, tmp_path).join()  # the server of children has started
    began = time.monotonic()
    child(work, tmp_path / "undisturbed").join()
    whole_s = time.monotonic() - began
    moments, killed, interrupted, stores = random.Random(25), 0, 0, 0
    while killed < 20:
        root, stores = tmp_path / str(stores), stores + 1
        Store(root).write_plan(many)
        while killed < 20 and Store(root).missing(many):
            process = child(work, root)
            time.sleep(moments.uniform(0, whole_s / 5))
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            interrupted += 0 < len(Store(root).missing(many)) < len(many.units)
        assert_undisturbed(root, many)
        assert rows_of(Store(root), many).equals(rows_of(Store(tmp_path / "undisturbed"), many))
    assert interrupted >= 5, "the children died before or after their work: the test shows nothing"


CALLS = [(os, name) for name in ("write", "fsync", "link", "ftruncate")]
CALLS += [(Path, name) for name in ("open", "touch", "unlink", "mkdir")]


def killed_at(root, step):
    """Work until the `step`-th call that touches the disk, and die there: half a line written, nothing cleaned up."""
    os.fsync = no_fsync
    calls = iter(range(10**9))

    def deadly(original, name):
        def call(*args, **kwargs):
            if next(calls) == step:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for owner, name in CALLS:
        setattr(owner, name, deadly(getattr(owner, name), name))
    work(root)


def no_fsync(_):
    """A power failure is not tested here, and hundreds of fsyncs take their time."""


def test_killed_at_every_single_call_that_touches_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", no_fsync)
    small = plan(documents=2, steps=1, size=2)
    deaths = 0
    for step in range(200):
        root = tmp_path / str(step)
        Store(root).write_plan(small)
        process = child(killed_at, root, step)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        assert_undisturbed(root, small)
        for left in Store(root).journals():  # died between the link and the removal: `make gc` removes it
            assert Store(root).unit_files(left.unit)
        if process.exitcode == 0:
            break
        deaths += 1
    assert deaths >= 12


def test_a_kill_loses_at_most_the_example_in_flight(tmp_path):
    made = plan(documents=4, size=4)
    Store(tmp_path).write_plan(made)
    (unit,) = made.units
    attempt = Store(tmp_path).attempt(unit, DESIGN, {})
    for example in attempt.missing[:3]:
        attempt.record(example, [made_up(cell) for cell in attempt.planned(example)], 1.0)
    later = Store(tmp_path).attempt(unit, DESIGN, {})
    assert later.missing == ["example 3"]
    assert later.finished == attempt.finished
    assert Store(tmp_path).missing(made) == [unit], "a journal is no unit"


# ---------------------------------------------------------------- what a crash leaves behind


def half_done(root):
    """A unit with two examples in a journal; returns the journal's file."""
    made = plan(documents=3, size=3)
    Store(root).write_plan(made)
    (unit,) = made.units
    attempt = Store(root).attempt(unit, DESIGN, {})
    for example in attempt.missing[:2]:
        attempt.record(example, [made_up(cell) for cell in attempt.planned(example)], 1.0)
    return Store(root).journals()[0].path, made


TORN = {
    "last line torn": (lambda text: text[:-100], 1),
    "last newline missing": (lambda text: text[:-1], 2),
    "first line torn": (lambda text: text[50:], 1),
    "middle overwritten": (lambda text: text[: len(text) // 2 - 200] + b"\0" * 400 + text[len(text) // 2 + 200 :], 0),
    "a digit changed": (lambda text: text.replace(b'"wall_s":1.0', b'"wall_s":7.0', 1), 1),
    "empty": (lambda _: b"", 0),
    "garbage": (lambda _: os.urandom(999), 0),
    "garbage before": (lambda text: b"\xff\x00 {}\n" + text, 2),
    "blank lines": (lambda text: b"\n\n \n" + text + b"\n", 2),
    "every line twice": (lambda text: text + text, 2),
    "valid JSON without checksum": (lambda text: b'{"example": "example 0", "rows": []}\n' + text, 2),
}


@pytest.mark.parametrize("damage", TORN)
def test_a_damaged_journal_loses_only_what_is_damaged(tmp_path, damage):  # CASES 25
    path, made = half_done(tmp_path)
    spoil, left = TORN[damage]
    path.write_bytes(spoil(path.read_bytes()))
    (unit,) = made.units
    assert len(Store(tmp_path).attempt(unit, DESIGN, {}).finished) == left
    assert_undisturbed(tmp_path, made)


def test_journals_of_all_earlier_attempts_are_put_together(tmp_path):
    made = plan(documents=4, size=4)
    Store(tmp_path).write_plan(made)
    (unit,) = made.units
    for _ in range(3):  # each process dies after one example
        attempt = Store(tmp_path).attempt(unit, DESIGN, {})
        attempt.record(attempt.missing[0], [made_up(cell) for cell in attempt.planned(attempt.missing[0])], 1.0)
    assert [file.k for file in Store(tmp_path).journals()] == [0, 1, 2]
    assert Store(tmp_path).attempt(unit, DESIGN, {}).missing == ["example 3"]
    assert_undisturbed(tmp_path, made)


def test_rows_of_another_version_in_a_journal_are_computed_again(tmp_path):
    path, made = half_done(tmp_path)
    old, new = journal.read(path)
    for row in old["rows"]:
        del row["entropy"]
    path.write_bytes(b"")
    journal.append(path, old)
    journal.append(path, new)
    (unit,) = made.units
    assert Store(tmp_path).attempt(unit, DESIGN, {}).missing == ["example 0", "example 2"]


def test_temporary_files_of_killed_processes_are_no_units(tmp_path):
    store, made = planted(tmp_path)
    for folder in ("units", "plans"):
        (tmp_path / folder / ".0123456789abcdef.tmp").write_bytes(b"PAR1 half")
    (tmp_path / "units" / "README").write_text("not a unit")
    (tmp_path / "units" / f"{'a' * 24}.0.parquet.bak").write_text("not a unit")
    assert_undisturbed(tmp_path, made)
    assert len(store.plans()) == 1


SPOILT = {
    "truncated": lambda data: data[:-200],
    "cut to half": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "text": lambda _: b"not a parquet file at all",
    "zeros in the middle": lambda data: data[:400] + bytes(200) + data[600:],
    "no metadata of ours": lambda data: data.replace(b"kvcert", b"kvcerx"),
}


@pytest.mark.parametrize("damage", SPOILT)
@pytest.mark.parametrize("what", ["unit", "plan"])
def test_a_damaged_parquet_is_named_in_one_line(tmp_path, damage, what):
    store, made = planted(tmp_path)
    path = store.unit_files()[0].path if what == "unit" else store.plan_files()[0]
    path.write_bytes(SPOILT[damage](path.read_bytes()))
    with pytest.raises(UserError) as caught:
        todo = Store(tmp_path).read_plan("replay", "smoke", REQUEST)
        Store(tmp_path).rows(todo, {DESIGN})
        Store(tmp_path).meta(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    path.unlink()
    Store(tmp_path).write_plan(made)
    assert_undisturbed(tmp_path, made)


def test_no_flipped_bit_changes_a_row_unnoticed(tmp_path):
    store, made = planted(tmp_path, plan(documents=1))
    path = store.unit_files()[0].path
    good, before = path.read_bytes(), store.rows(made, {DESIGN})
    noticed = 0
    for position in range(0, len(good), 37):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        try:
            assert store.rows(made, {DESIGN}).equals(before), position
        except UserError:
            noticed += 1
    assert noticed > 50


def test_a_damaged_plan_is_replaced_when_the_plan_is_made_again(tmp_path):
    store, made = planted(tmp_path)
    store.plan_files()[0].write_bytes(b"PAR1")
    store.write_plan(made)
    assert store.read_plan("replay", "smoke", REQUEST).cells.equals(made.cells)


# ---------------------------------------------------------------- several processes


def work_when(barrier, root, failures):
    barrier.wait()
    try:
        work(root)
    except BaseException as error:
        failures.put(repr(error))
        raise


def assert_clean(root, made):
    assert_undisturbed(root, made)
    assert sorted(path.suffix for path in root.rglob("*") if path.is_file()) == [".parquet"] * (len(made.units) + 1)


def test_two_workers_on_one_store_double_nothing(tmp_path, many):
    Store(tmp_path).write_plan(many)
    barrier, failures = FORK.Barrier(2), FORK.SimpleQueue()
    processes = [child(work_when, barrier, tmp_path, failures) for _ in range(2)]
    for process in processes:
        process.join()
    assert failures.empty(), failures.get()
    assert_clean(tmp_path, many)


def publish_when(barrier, root, made, failures):
    """Record every unit, wait, and publish all units at the same moment as the other process."""
    try:
        store, attempts = Store(root), []
        for unit in made.units:
            attempts.append(store.attempt(unit, DESIGN, {"host": str(os.getpid())}))
            for example in attempts[-1].missing:
                attempts[-1].record(example, [made_up(cell) for cell in attempts[-1].planned(example)], 1.0)
            barrier.wait(30)
            attempts[-1].publish()
    except BaseException as error:
        failures.put(repr(error))
        barrier.abort()
        raise


def test_of_two_processes_that_publish_a_unit_at_once_one_wins(tmp_path, many):
    Store(tmp_path).write_plan(many)
    barrier, failures = FORK.Barrier(2), FORK.SimpleQueue()
    processes = [child(publish_when, barrier, tmp_path, many, failures) for _ in range(2)]
    for process in processes:
        process.join()
    assert failures.empty(), failures.get()
    assert_clean(tmp_path, many)


def test_an_orphan_that_publishes_late_changes_nothing(tmp_path):
    made = plan()
    Store(tmp_path).write_plan(made)
    unit = next(iter(made.units))
    orphan = Store(tmp_path).attempt(unit, DESIGN, {"host": "orphan"})
    orphan.record("example 0", [made_up(cell) for cell in orphan.planned("example 0")], 9.0)
    store = work(tmp_path)
    before = {file.path: file.path.read_bytes() for file in store.unit_files()}
    assert store.journals() == [], "its journal went with the unit"
    do(orphan)
    assert {file.path: file.path.read_bytes() for file in store.unit_files()} == before
    assert store.provenance(unit)["runs"] == [{"host": "orphan"}, {"host": "planted"}]
    assert_clean(tmp_path, made)


def test_where_hard_links_do_not_exist_a_unit_is_renamed_and_doubles_are_dropped(tmp_path, monkeypatch):
    made = plan()
    Store(tmp_path).write_plan(made)
    first, second, third = sorted(made.units)
    raced = []

    def no_link(source, target):
        if target.name.startswith(second) and not raced:  # another process is faster, twice
            raced[:] = [target, target.with_name(f"{second}.1.parquet")]
            for path in raced:
                path.write_bytes(source.read_bytes())
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", no_link)
    store = work(tmp_path)
    found = [(file.unit, file.number) for file in store.unit_files()]
    assert found == [(first, 0), (second, 0), (second, 1), (second, 2), (third, 0)]
    assert store.counts(made) == {"done": 36, "missing": 0, "failed": 0, "refused": 0}
    assert rows_of(store, made).equals(pa.Table.from_pylist(expected_rows(made), schema=REPLAY.arrow))
    assert not list(tmp_path.rglob("*.tmp"))


# ---------------------------------------------------------------- a disk that is full or read-only


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root; the file size limit below tests the same path")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("room", [0, 1, 3, 6, 12])
def test_a_full_disk_is_one_clear_error_and_the_run_resumes(small_disk, room):
    root, made = small_disk / "store", plan(documents=8, steps=12)
    Store(root).write_plan(made)
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk).f_bavail
    ballast.write_bytes(bytes(4096 * (free - room)))
    with pytest.raises(UserError, match=f"cannot write {root}.*No space left on device"):
        work(root)
    for file in Store(root).unit_files():
        Store(root).meta(file.path)
    assert not list(root.rglob("*.tmp"))
    ballast.unlink()
    assert_undisturbed(root, made)


def test_a_full_disk_cuts_the_journal_back_to_whole_lines(small_disk):
    path = small_disk / f"{'a' * 24}.0.0.jsonl"
    journal.append(path, {"example": "kept"})
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(UserError, match="No space left"):
        journal.append(path, {"example": "x" * 4096 * (free + 1)})
    assert path.stat().st_size < 4096
    journal.append(path, {"example": "after"})
    assert [payload["example"] for payload in journal.read(path)] == ["kept", "after"]


def work_limited(root, limit, told):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        work(root)
    except UserError as error:
        told.put(str(error))


@pytest.mark.parametrize("limit", [0, 100, 5000, 12000])
def test_a_write_that_is_cut_short_is_one_clear_error_and_the_run_resumes(tmp_path, limit):
    made, told = plan(), FORK.SimpleQueue()
    Store(tmp_path).write_plan(made)
    process = child(work_limited, tmp_path, limit, told)
    process.join()
    assert process.exitcode == 0
    assert "File too large" in told.get()
    assert not list(tmp_path.rglob("*.tmp"))
    assert_undisturbed(tmp_path, made)


@pytest.fixture
def read_only(tmp_path):
    """A function that makes a folder read-only also for root, by mounting it so."""
    mounted = []

    def make(folder):
        folder.mkdir(exist_ok=True)
        if os.geteuid() != 0:
            for path in [folder, *folder.rglob("*")]:
                path.chmod(path.stat().st_mode & ~0o222)
            return
        for how in (["--bind", str(folder), str(folder)], ["-o", "remount,bind,ro", str(folder)]):
            if subprocess.run(["mount", *how], capture_output=True, check=False).returncode:
                pytest.skip("root without the right to mount: no folder is read-only to it")
            mounted[:] = [folder]

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)


def test_a_read_only_store_is_refused_before_any_work(tmp_path, read_only):
    root, made = tmp_path / "store", plan()
    read_only(root)
    with pytest.raises(UserError, match=f"cannot write {root}/plans: (Read-only file system|Permission denied)"):
        Store(root).write_plan(made)


def test_a_read_only_store_with_a_plan_is_refused_before_the_first_example(tmp_path, read_only):
    root, made = tmp_path / "store", plan()
    Store(root).write_plan(made)
    read_only(root)
    with pytest.raises(UserError, match=f"cannot write {root}/journal: (Read-only file system|Permission denied)"):
        Store(root).attempt(next(iter(made.units)), DESIGN, {})


def test_a_complete_read_only_store_can_be_used(tmp_path, read_only):
    root = tmp_path / "store"
    _, made = planted(root)
    read_only(root)
    Store(root).write_plan(made)
    assert_undisturbed(root, made)
    for file in Store(root).unit_files():
        assert Store(root).attempt(file.unit, DESIGN, {}).publish() == file.path


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_every_refusal_of_the_disk_names_path_and_reason(tmp_path, monkeypatch, code):
    made = plan()
    Store(tmp_path).write_plan(made)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    attempt = Store(tmp_path).attempt(next(iter(made.units)), DESIGN, {})
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match=f"cannot write {attempt._journal}: {os.strerror(code)}"):
        attempt.record("example 0", [made_up(cell) for cell in attempt.planned("example 0")], 1.0)
    assert attempt.missing == ["example 0", "example 1"]
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/plans: {os.strerror(code)}"):
        Store(tmp_path).write_plan(plan(profile="laptop"))
    monkeypatch.undo()
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/units/.*: {os.strerror(code)}"):
        do(attempt)
    monkeypatch.undo()
    assert_undisturbed(tmp_path, made)


def test_a_store_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        Store(tmp_path / "store").plans()
    with pytest.raises(UserError, match="Not a directory"):
        Store(tmp_path / "store").read_plan("replay", "smoke", REQUEST)
    with pytest.raises(UserError, match="Not a directory"):
        Store(tmp_path / "store").write_plan(plan())


def test_a_path_longer_than_any_file_system_takes_is_refused(tmp_path):
    store = Store(tmp_path / ("a" * 5000))
    for does in (store.plans, lambda: store.read_plan("replay", "smoke", REQUEST), lambda: store.write_plan(plan())):
        with pytest.raises(UserError, match="File name too long"):
            does()


# ---------------------------------------------------------------- files that are none of this store


def altered(path, **over):
    """Write the metadata of a parquet file anew, with other values; one that is ... is left out."""
    table = pq.read_table(path)
    meta = json.loads(table.schema.metadata[b"kvcert"]) | over
    meta = {key: value for key, value in meta.items() if value is not ...}
    pq.write_table(table.replace_schema_metadata({"kvcert": json.dumps(meta)}), path)
    return path


@pytest.mark.parametrize(
    "metadata", [None, {"other": "x"}, {"kvcert": "{}"}, {"kvcert": "[]"}, {"kvcert": "null"}, {"kvcert": "{"}]
)
@pytest.mark.parametrize("folder", ["plans", "units"])
def test_a_foreign_parquet_file_is_named_in_one_line(tmp_path, folder, metadata):
    store, _ = planted(tmp_path)
    path = tmp_path / folder / ("a" * 24 + (".parquet" if folder == "plans" else ".0.parquet"))
    pq.write_table(pa.table({"cell": ["x"]}).replace_schema_metadata(metadata), path)
    with pytest.raises(UserError, match=str(path)) as error:
        store.meta(path)
    assert "\n" not in str(error.value) and "expected" in str(error.value)


@pytest.mark.parametrize(
    "over",
    [
        {key: wrong}
        for key in ("unit", "number", "design", "rows", "plan", "runs", "run_of", "wall_s")
        for wrong in (..., None)
    ]
    + [{"plan": {}}, {"runs": []}, {"runs": [1]}, {"run_of": {"x": 0}}, {"run_of": {"example 0": [0]}}],
)
def test_a_unit_without_what_a_run_writes_is_named(tmp_path, over):
    store, _ = planted(tmp_path)
    path = altered(store.unit_files()[0].path, **over)
    with pytest.raises(UserError, match=f"{path} is no unit of this store: its metadata"):
        store.meta(path)


@pytest.mark.parametrize(
    "key",
    [
        "grid",
        "kind",
        "profile",
        "design",
        "request",
        "registered",
        "population",
        "population_notes",
        "model",
        "documents",
    ],
)
def test_a_plan_without_a_key_is_named(tmp_path, key):
    store, _ = planted(tmp_path)
    path = altered(store.plan_files()[0], **{key: ...})
    for does in (store.plans, lambda: store.read_plan("replay", "smoke", REQUEST)):
        with pytest.raises(UserError, match=f"{path} is no plan of this store: its metadata have no '{key}'"):
            does()


def test_a_unit_among_the_plans_and_a_plan_among_the_units_are_named(tmp_path):
    store, made = planted(tmp_path)
    unit, stored = store.unit_files()[0].path, store.plan_files()[0]
    stray = tmp_path / "plans" / ("a" * 24 + ".parquet")
    stray.write_bytes(unit.read_bytes())
    with pytest.raises(UserError, match=f"{stray} is no plan of this store"):
        store.plans()
    other = tmp_path / "units" / ("a" * 24 + ".0.parquet")
    other.write_bytes(stored.read_bytes())
    with pytest.raises(UserError, match=f"cannot use {other}: other columns"):
        store.find_cell(made.cells["cell"][0].as_py())


def test_a_plan_under_another_name_is_named(tmp_path):
    store, _ = planted(tmp_path)
    path = store.plan_files()[0]
    renamed = path.rename(path.with_name("a" * 24 + ".parquet"))
    with pytest.raises(UserError, match=f"{renamed} has another plan's name; expected {path.name}"):
        store.plans()


def test_a_plan_under_the_name_of_another_request_is_not_taken_for_it(tmp_path):
    store, _ = planted(tmp_path)
    other = store.plan_path("replay", "laptop", REQUEST)
    store.plan_files()[0].rename(other)
    with pytest.raises(UserError, match=f"{other} has another plan's name"):
        store.read_plan("replay", "laptop", REQUEST)
    store.write_plan(plan(profile="laptop"))  # what cannot be read is replaced
    assert store.read_plan("replay", "laptop", REQUEST).header["profile"] == "laptop"


def test_an_empty_plan_file_is_named_once(tmp_path):
    store, _ = planted(tmp_path)
    store.plan_files()[0].write_bytes(b"")
    for does in (store.plans, lambda: store.read_plan("replay", "smoke", REQUEST)):
        with pytest.raises(UserError) as error:
            does()
        assert str(error.value).count("cannot read") == str(error.value).count("expected") == 1


def test_reading_creates_nothing(tmp_path):
    store = Store(tmp_path / "store")
    assert store.plans() == []
    assert store.read_plan("replay", "smoke", REQUEST) is None
    assert store.counts(plan()) == {"done": 0, "missing": 36, "failed": 0, "refused": 0}
    assert store.missing(plan()) == list(plan().units)
    assert rows_of(store).num_rows == 0
    assert not (tmp_path / "store").exists()


# ---------------------------------------------------------------- values


def one_cell(tmp_path, **values):
    """Record one row with the given values; returns its attempt."""
    made = plan(documents=1, steps=1, size=1)
    Store(tmp_path).write_plan(made)
    (unit,) = made.units
    attempt = Store(tmp_path).attempt(unit, DESIGN, {})
    attempt.record("example 0", [made_up(cell) | values for cell in attempt.planned("example 0")], 1.0)
    return attempt


def both_ways(tmp_path, attempt):
    """The rows as a later process recovers them from the journal, and as they stand in the published unit."""
    store = Store(tmp_path)
    yield store.attempt(attempt.unit, DESIGN, {}).finished["example 0"]
    attempt.publish()
    yield store.rows(attempt.plan, {DESIGN}).to_pylist()


@pytest.mark.parametrize(
    "text", ["None", "NA", "", "null", "NaN", "\0", "Ünïcode 漢字 🙂", 'quote " \\n \n\r\u2028', " "]
)
def test_text_stays_text(tmp_path, text):  # CASES 28
    for rows in both_ways(tmp_path, one_cell(tmp_path, undefined=text)):
        assert [row["undefined"] for row in rows] == [text, text]


FLOATS = [0.1, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308, 2.0**-1074, math.pi, 1e16 + 2, 123456789.123456789]


@pytest.mark.parametrize("value", FLOATS)
def test_floats_are_bit_exact(tmp_path, value):
    for rows in both_ways(tmp_path, one_cell(tmp_path, err=value)):
        assert [row["err"].hex() for row in rows] == [value.hex()] * 2


def test_null_stays_null_and_integers_stay_integers(tmp_path):
    for rows in both_ways(tmp_path, one_cell(tmp_path, radius_normal=None, n_kept=2**53 + 1, exact=False, margin=0)):
        for row in rows:
            assert row["radius_normal"] is None
            assert (row["n_kept"], type(row["n_kept"])) == (2**53 + 1, int)
            assert row["exact"] is False
            assert (row["margin"], type(row["margin"])) == (0.0, float)


def test_numpy_scalars_become_plain_values(tmp_path):
    values = {"err": np.float32(0.1), "n_kept": np.int64(7), "exact": np.bool_(True), "out_norm": np.float64(0.1)}
    for rows in both_ways(tmp_path, one_cell(tmp_path, **values)):
        assert rows[0]["err"] == float(np.float32(0.1))
        assert (rows[0]["n_kept"], rows[0]["exact"], rows[0]["out_norm"]) == (7, True, 0.1)


REFUSED = [
    ("err", math.nan, "column err is nan; expected a finite number"),
    ("err", math.inf, "column err is inf; expected a finite number"),
    ("radius_normal", -math.inf, "column radius_normal is -inf; expected a finite number"),
    ("radius_assisted", np.float32("nan"), "column radius_assisted is np.float32"),
    ("err", "0.1", "column err is '0.1'; expected a finite number"),
    ("err", True, "column err is True; expected a finite number"),
    ("err", None, "column err is null; expected a value as status is ok"),
    ("cell", None, "column cell is null; expected a value"),
    ("n_kept", 1.0, "column n_kept is 1.0; expected a 64-bit integer"),
    ("n_kept", 2**63, "column n_kept is 9223372036854775808; expected a 64-bit integer"),
    ("n_kept", True, "column n_kept is True; expected a 64-bit integer"),
    ("exact", 1, "column exact is 1; expected true or false"),
    ("undefined", 3, "column undefined is 3; expected Unicode text"),
    ("undefined", "\ud800", "column undefined is '.ud800'; expected Unicode text"),
    ("undefined", b"x", "column undefined is b'x'; expected Unicode text"),
    ("status", "done", "column status is 'done'; expected one of ok, failed"),
    ("surprise", 1, "unknown column 'surprise'"),
    ("budget", 0.25, "column budget is 0.25; expected 0.125 as planned"),
    ("design", "e" * 64, "column design is 'eeee"),
    ("document", "document 1", "column document is 'document 1'; expected 'document 0' as planned"),
]


@pytest.mark.parametrize(("column", "value", "message"), REFUSED)
def test_a_wrong_value_is_refused_when_recorded_naming_column_and_cell(tmp_path, column, value, message):
    with pytest.raises(UserError, match=message) as caught:
        one_cell(tmp_path, **{column: value})
    if column != "cell":
        assert plan(documents=1, steps=1).cells["cell"][0].as_py() in str(caught.value)
    (left,) = Store(tmp_path).journals()
    assert left.path.read_bytes() == b""


def test_a_missing_column_is_refused(tmp_path):
    made = plan()
    Store(tmp_path).write_plan(made)
    attempt = Store(tmp_path).attempt(next(iter(made.units)), DESIGN, {})
    rows = [made_up(cell) for cell in attempt.planned("example 0")]
    for row in rows:
        del row["margin"]
    with pytest.raises(UserError, match="missing column 'margin'"):
        attempt.record("example 0", rows, 1.0)


def test_rows_must_be_exactly_the_planned_cells(tmp_path):
    made = plan()
    Store(tmp_path).write_plan(made)
    attempt = Store(tmp_path).attempt(next(iter(made.units)), DESIGN, {})
    rows = [made_up(cell) for cell in attempt.planned("example 0")]
    for wrong in (rows[1:], [*rows, rows[0]], [*rows[1:], rows[1]], []):
        with pytest.raises(UserError, match="expected one for each of its 6 planned cells"):
            attempt.record("example 0", wrong, 1.0)
    with pytest.raises(UserError, match="no example 'example 5'"):
        attempt.record("example 5", rows, 1.0)
    with pytest.raises(UserError, match="no example 'example 5'"):
        attempt.fail("example 5", "no", 1.0)
    with pytest.raises(UserError, match="lacks 2 examples"):
        attempt.publish()


def test_the_order_of_recording_does_not_show(tmp_path):
    made = plan(documents=3, size=3)
    for root, turn in ((tmp_path / "a", 1), (tmp_path / "b", -1)):
        Store(root).write_plan(made)
        attempt = Store(root).attempt(next(iter(made.units)), DESIGN, {})
        for example in attempt.missing[::turn]:
            attempt.record(example, [made_up(cell) for cell in attempt.planned(example)][::turn], 1.0)
        assert [row for rows in attempt.finished.values() for row in rows] == expected_rows(made)
        attempt.publish()
    tables = [pq.read_table(Store(root).unit_files()[0].path) for root in (tmp_path / "a", tmp_path / "b")]
    assert tables[0].equals(tables[1])
    assert tables[0]["cell"].equals(made.cells["cell"])


def test_a_unit_carries_its_schema_and_where_its_rows_come_from(tmp_path):
    store, made = planted(tmp_path, provenance={"git": {"revision": "abc", "dirty": False}, "config": {"seed": 0}})
    for unit, examples in made.units.items():
        (file,) = store.unit_files(unit)
        assert pq.read_schema(file.path).remove_metadata() == REPLAY.arrow
        meta = store.provenance(unit)
        assert meta["runs"] == [{"git": {"revision": "abc", "dirty": False}, "config": {"seed": 0}}]
        assert meta["wall_s"] == dict.fromkeys(examples, 2.0)
        assert meta["plan"] == made.header
        assert (meta["unit"], meta["number"], meta["design"]) == (unit, 0, DESIGN)
    with pytest.raises(UserError, match="no unit 'abc'"):
        store.provenance("abc")


def test_each_example_keeps_the_provenance_of_the_process_that_computed_it(tmp_path):
    _, made = half_done(tmp_path)
    (unit,) = made.units
    do(Store(tmp_path).attempt(unit, DESIGN, {"git": "later", "tuple": (1, 2)}))
    meta = Store(tmp_path).provenance(unit)
    assert meta["runs"] == [{}, {"git": "later", "tuple": [1, 2]}]
    assert meta["run_of"] == {"example 0": 0, "example 1": 0, "example 2": 1}


def test_a_resumed_process_of_equal_provenance_is_one_run(tmp_path):
    made, run = plan(documents=2, size=2), {"config": {"budgets": (0.125, 0.5)}}
    Store(tmp_path).write_plan(made)
    (unit,) = made.units
    killed = Store(tmp_path).attempt(unit, DESIGN, run)
    killed.record("example 1", [made_up(cell) for cell in killed.planned("example 1")], 1.0)
    do(Store(tmp_path).attempt(unit, DESIGN, run))
    assert Store(tmp_path).provenance(unit)["runs"] == [{"config": {"budgets": [0.125, 0.5]}}]


# ---------------------------------------------------------------- failures


def test_a_failed_example_is_rows_with_a_message_neither_missing_nor_done(tmp_path):
    store, made = planted(tmp_path, failing={"example 1"})
    assert store.missing(made) == []
    assert store.counts(made) == {"done": 30, "missing": 0, "failed": 6, "refused": 0}
    assert store.failing(made) == list(made.units)[:1]
    rows = [row for row in rows_of(store).to_pylist() if row["status"] == "failed"]
    assert {row["example"] for row in rows} == {"example 1"}
    for row, cell in zip(rows, made.cells.to_pylist()[6:12], strict=True):
        assert row["message"] == "RuntimeError: planted"
        assert {name: row[name] for name in cell} == cell
        assert row["err"] is None


def test_running_again_leaves_failures_alone_and_a_retry_replaces_them(tmp_path):
    store, made = planted(tmp_path, failing={"example 0", "example 3"})
    first = next(iter(made.units))
    assert store.attempt(first, DESIGN, {}).missing == []
    assert store.attempt(first, DESIGN, {}).finished["example 0"][0]["status"] == "failed"
    retry = store.attempt(first, DESIGN, {"host": "retry"}, retry=True)
    assert (retry.missing, retry.number) == (["example 0"], 1)
    do(retry, failing={"example 0"})  # in vain
    assert store.counts(made)["failed"] == 12
    do(store.attempt(first, DESIGN, {"host": "again"}, retry=True))
    assert store.counts(made) == {"done": 30, "missing": 0, "failed": 6, "refused": 0}
    assert [file.number for file in store.unit_files(first)] == [0, 1, 2]
    assert store.provenance(first)["runs"] == [{"host": "again"}, {"host": "planted"}]
    finished = store.attempt(first, DESIGN, {}).finished
    assert {row["status"] for rows in finished.values() for row in rows} == {"ok"}
    assert store.failing(made) == [list(made.units)[1]]
    do(store.attempt(store.failing(made)[0], DESIGN, {}, retry=True))
    assert rows_of(store).equals(pa.Table.from_pylist(expected_rows(made), schema=REPLAY.arrow))
    assert store.journals() == []


def test_a_retry_with_nothing_to_retry_adds_no_file(tmp_path):
    store, made = planted(tmp_path)
    for unit in made.units:
        attempt = store.attempt(unit, DESIGN, {}, retry=True)
        assert attempt.missing == []
        assert store.journals() == []
        attempt.publish()
    assert_undisturbed(tmp_path, made)


def test_a_journal_that_outlived_its_unit_is_no_part_of_the_retry(tmp_path):
    made = plan(documents=1, size=1)
    Store(tmp_path).write_plan(made)
    (unit,) = made.units
    first = Store(tmp_path).attempt(unit, DESIGN, {})
    first.fail("example 0", "RuntimeError: planted", 1.0)
    (left,) = Store(tmp_path).journals()
    lines = left.path.read_bytes()
    first.publish()
    left.path.write_bytes(lines)  # killed between the link and the removal
    assert Store(tmp_path).attempt(unit, DESIGN, {}, retry=True).missing == ["example 0"]


def test_a_killed_retry_resumes_from_its_own_journal(tmp_path):
    store, made = planted(tmp_path, plan(documents=2, size=2), failing={"example 0", "example 1"})
    (unit,) = made.units
    killed = store.attempt(unit, DESIGN, {}, retry=True)
    killed.record("example 0", [made_up(cell) for cell in killed.planned("example 0")], 1.0)
    assert store.attempt(unit, DESIGN, {}, retry=True).missing == ["example 1"]
    assert store.counts(made)["failed"] == 12, "a retry that is not published changes no row"
    do(store.attempt(unit, DESIGN, {}, retry=True))
    assert store.counts(made)["failed"] == 0


def test_the_ok_rows_of_the_earlier_attempt_win(tmp_path):
    store, made = planted(tmp_path, plan(documents=1, size=1))
    (file,) = store.unit_files()
    other = [row | {"err": 77.0} for row in expected_rows(made)]
    for number, rows in ((1, other), (10, other), (2, [row | {"status": "failed", "message": "x"} for row in other])):
        store.publish(file.unit, number, pa.Table.from_pylist(rows, schema=REPLAY.arrow), store.meta(file.path))
    assert [file.number for file in store.unit_files()] == [0, 1, 2, 10]
    assert rows_of(store, made).equals(pa.Table.from_pylist(expected_rows(made), schema=REPLAY.arrow))


def test_a_failed_row_needs_a_message():
    cell = plan().cells.to_pylist()[0] | {"design": DESIGN}
    with pytest.raises(UserError, match="column message is null"):
        REPLAY.checked([REPLAY.failed(cell, "x") | {"message": None}])
    assert REPLAY.checked([REPLAY.failed(cell, "")])[0]["message"] == ""


def test_a_failed_row_still_says_which_cell_it_is():
    cell = plan().cells.to_pylist()[0] | {"design": DESIGN}
    with pytest.raises(UserError, match="column document is null; expected a value as status is failed"):
        REPLAY.checked([REPLAY.failed(cell | {"document": None}, "x")])


# ---------------------------------------------------------------- designs


OLD = "e" * 64


def test_rows_of_another_design_are_refused_and_counted(tmp_path):
    planted(tmp_path, plan(design=OLD))
    store, made = Store(tmp_path), plan()
    store.write_plan(made)
    assert store.counts(made) == {"done": 0, "missing": 36, "failed": 0, "refused": 36}
    with pytest.raises(UserError, match="all 36 rows of grid replay are of another design; expected dddddddddddd"):
        store.rows(made, {DESIGN})
    assert store.missing(made) == list(made.units)
    assert_rows_are_of(store.rows(made, {OLD, DESIGN}), OLD)


def test_rows_of_another_design_beside_accepted_ones_are_left_out(tmp_path):
    planted(tmp_path, plan(documents=6, design=OLD))
    store, made = Store(tmp_path), plan()
    store.write_plan(made)
    do(store.attempt(list(made.units)[1], DESIGN, {}))
    assert store.counts(made) == {"done": 12, "missing": 24, "failed": 0, "refused": 24}
    assert store.rows(made, {DESIGN}).to_pylist() == expected_rows(made)[12:24]


def assert_rows_are_of(table, design):
    assert table.num_rows == 36
    assert set(table["design"].to_pylist()) == {design}


def test_rows_of_an_accepted_older_design_are_not_computed_again(tmp_path):
    planted(tmp_path, plan(design=OLD))
    store, made = Store(tmp_path), plan()
    store.write_plan(made)
    assert store.missing(made, {DESIGN, OLD}) == []
    assert store.counts(made, {DESIGN, OLD}) == {"done": 36, "missing": 0, "failed": 0, "refused": 0}
    work(tmp_path)  # the new design's rows exist as well: they come first
    assert_rows_are_of(store.rows(made, {DESIGN, OLD}), DESIGN)
    assert_rows_are_of(store.rows(made, {OLD}), OLD)


def test_cells_that_another_profile_cut_into_other_units_count(tmp_path):
    planted(tmp_path, plan(documents=4, size=4, profile="laptop"))
    store, made = Store(tmp_path), plan(documents=6, size=1)
    store.write_plan(made)
    assert store.missing(made) == list(made.units)[4:]
    assert store.counts(made) == {"done": 24, "missing": 12, "failed": 0, "refused": 0}


def test_rows_of_unplanned_cells_are_left_out(tmp_path):
    store, _ = planted(tmp_path, plan(documents=6, size=6))
    less = plan(documents=2, size=2)
    assert rows_of(store, less)["cell"].equals(less.cells["cell"])


def test_an_attempt_needs_a_stored_plan_of_its_design(tmp_path):
    store, made = planted(tmp_path)
    unit = next(iter(made.units))
    for wrong in ((unit, OLD), ("a" * 24, DESIGN), ("../../x", DESIGN)):
        with pytest.raises(UserError, match="is in no plan"):
            store.attempt(*wrong, {})


def test_a_plan_that_is_written_later_is_found_by_the_same_store(tmp_path):
    store, _ = planted(tmp_path)
    later = plan(documents=1, size=1, profile="laptop")
    store.write_plan(later)
    assert store.attempt(next(iter(later.units)), DESIGN, {}).missing == ["example 0"]


def test_plans_are_kept_by_grid_profile_and_request(tmp_path):
    store, mine = Store(tmp_path), REQUEST | {"model": "../../x; $(touch pwned) 'q'"}
    for made in (plan(), plan(profile="laptop"), plan(documents=2, request=mine), plan(documents=3, request=mine)):
        store.write_plan(made)
    assert [(made["profile"], made["request"]["model"]) for made in store.plans()] == [
        ("laptop", None),
        ("smoke", mine["model"]),
        ("smoke", None),
    ]
    assert store.read_plan("replay", "smoke", mine).cells.equals(plan(documents=3).cells)
    assert store.read_plan("replay", "smoke", dict(reversed(REQUEST.items()))).header == header()
    assert store.read_plan("replay", "paper", REQUEST) is None
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {tmp_path / "plans"}


def test_rows_of_a_kind_without_columns_are_refused():
    with pytest.raises(UserError, match="rows of kind 'dance' have no columns"):
        row_schema("dance")


def test_units_with_columns_of_another_version_are_named(tmp_path):
    store, made = planted(tmp_path)
    file = store.unit_files()[0]
    table = pq.read_table(file.path)
    pq.write_table(table.drop_columns(["margin"]), file.path)
    with pytest.raises(UserError, match=f"cannot use {file.path}: other columns"):
        store.rows(made, {DESIGN})


# ---------------------------------------------------------------- finding a cell


def test_a_cell_is_found_by_a_unique_beginning_of_its_id(tmp_path):
    store, made = planted(tmp_path)
    for wanted in expected_rows(made)[::7]:
        found = store.find_cell(wanted["cell"][:10].upper())
        assert found.row == wanted
        assert found.meta["unit"] == wanted["unit"]
        assert found.path == store.unit_files(wanted["unit"])[0].path


def test_an_unknown_or_ambiguous_beginning_is_refused(tmp_path):
    made = Plan(header(), cells_that_begin_alike())
    store, _ = planted(tmp_path, made)
    with pytest.raises(UserError, match=r"2 cells begin so: abcd0{20}, abcd0{19}1"):
        store.find_cell("abcd")
    with pytest.raises(UserError, match="no stored row has it"):
        store.find_cell("ffff")
    assert store.find_cell("abcd" + "0" * 20).row["example"] == "a"


def cells_that_begin_alike():
    cells = [
        {"cell": f"abcd{k:020x}", "example": name, "document": name, "model": "m", "task": "t", "step": k}
        for k, name in enumerate("ab")
    ]
    return in_units(cells, DESIGN, 1)


def test_the_row_that_counts_is_the_one_that_is_found(tmp_path):
    store, made = planted(tmp_path, plan(documents=1, size=1), failing={"example 0"})
    (unit,) = made.units
    do(store.attempt(unit, DESIGN, {"host": "retry"}, retry=True))
    found = store.find_cell(made.cells["cell"][0].as_py())
    assert (found.row["status"], found.meta["number"]) == ("ok", 1)


# ---------------------------------------------------------------- size


def test_the_largest_plan_comes_back_as_it_was_written(tmp_path):
    cells = [
        {"cell": f"{k:024x}", "example": f"{k // 96:064x}", "document": f"{k // 96:064x}"}
        | {"model": f"model {k % 4}", "task": f"task {k % 16}", "arm": f"arm {k % 12}"}
        for k in range(76_800)
    ]
    made, store = Plan(header(), in_units(cells, DESIGN, 2)), Store(tmp_path)
    store.write_plan(made)
    assert store.read_plan("replay", "smoke", REQUEST).cells.equals(made.cells)


def test_each_unit_is_read_once_however_many_there_are(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(os, "fsync", no_fsync)
    store, made = planted(tmp_path, plan(documents=200, steps=6, size=1))
    monkeypatch.setattr(store_module, "_read", lambda path, *more: read.append(path) or whole(path, *more))
    for look in (store.missing, store.counts, lambda made: rows_of(store, made)):
        read.clear()
        look(made)
        assert sorted(read) == [file.path for file in store.unit_files()] and len(read) == 200


def test_the_store_imports_neither_torch_nor_pandas():
    code = "import sys, runs.store, runs.provenance; print(sorted({'torch', 'pandas', 'hydra'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_journal_line_is_a_checksum_and_json(tmp_path):
    path = tmp_path / "x.jsonl"
    journal.append(path, {"example": "ä", "rows": [0.1, None]})
    digest, text = path.read_text(encoding="ascii").split(" ", 1)
    assert len(digest) == 64
    assert json.loads(text) == {"example": "ä", "rows": [0.1, None]}
    with pytest.raises(ValueError, match="JSON"):
        journal.append(path, {"rows": [math.nan]})
    assert len(journal.read(path)) == 1
    assert journal.read(tmp_path / "gone.jsonl") == []


def test_a_replaced_file_is_never_half_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.replace(path, b"old")

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match="No space left"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_cell_ids_do_not_depend_on_the_process():
    code = (
        "from runs.cells import cell_id; print(cell_id({'b': 0.1, 'a': ['x', None, 1e-300], 'c': {'z': 1, 'y': True}}))"
    )
    seeds = ("0", "1")
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout.strip()
        for seed in seeds
    }
    assert told == {cell_id({"a": ["x", None, 1e-300], "b": 0.1, "c": {"y": True, "z": 1}}).encode()}
