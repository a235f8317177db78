"""make status, make explain and make gc as a user sees them, on planted rows."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runs import garbage, journal, prereg
from runs.cells import Plan
from runs.errors import UserError
from runs.progress import progress
from runs.registry import CLAIMS, IDS, ROOT
from runs.store import Store
from scripts import explain, freeze, gc, status
from tests.planted_store import DESIGN, REQUEST, do, made_up, plan, planted, work

SETTINGS = ("PROFILE", "MODEL", "DATA", "STORE", "WORKERS", "CTX", "ARGS", "CELL")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with the registered claims, frozen, and a store beside it."""
    repo = tmp_path / "repo"
    for folder in ("prereg", "configs"):
        shutil.copytree(ROOT / folder, repo / folder)
    for name in (prereg.LOCK, prereg.DEVIATIONS):
        (repo / name).unlink(missing_ok=True)
    (repo / prereg.DEVIATIONS).write_text("# Deviations\n")
    for name in (
        *prereg.JUDGING,
        *re.findall(r"(?:analysis|cert|prereg/manifests)/[\w/]+\.\w+", (ROOT / CLAIMS).read_text()),
    ):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("")
    prereg.freeze(repo, lambda _: False, "2026-01-01")
    for module in (status, explain, gc):
        monkeypatch.setattr(module, "ROOT", repo)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    monkeypatch.setenv("WORKERS", "2")
    return repo


@pytest.fixture
def store(root, tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def design(root):
    return prereg.grid_digest(prereg.load(root), "replay", root)


def said_by(main, argv, capsys):
    assert main(argv) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- status


def test_without_rows_status_says_what_to_run(root, capsys):
    said = said_by(status.main, [], capsys)
    assert all(f"no rows yet: make {claim}\n" in said for claim in IDS)


def test_a_store_that_was_typed_and_is_not_there_is_refused(root, monkeypatch):
    monkeypatch.setenv("STORE", str(root / "nowhere"))
    with pytest.raises(UserError, match="no such folder"):
        status.main([])


def test_status_counts_done_missing_and_failed_and_tells_the_time_left(store, design, capsys):
    made = plan(documents=8, size=2, design=design)
    store.write_plan(made)
    units = list(made.units)
    for unit, seconds in zip(units[:2], (2.0, 30.0), strict=True):
        do(store.attempt(unit, design, {}), failing={"example 2"}, wall_s=seconds)
    open_unit = store.attempt(units[2], design, {})
    open_unit.record("example 4", [made_up(cell) for cell in open_unit.planned("example 4")], 12.0)
    found = json.loads(said_by(status.main, ["--json"], capsys))
    assert list(found) == list(IDS)
    (told,) = found["claim-1"]["plans"]
    counts = {name: told[name] for name in ("done", "missing", "failed", "refused", "total")}
    assert counts == {"done": 18, "missing": 24, "failed": 6, "refused": 0, "total": 48}
    assert (told["examples_left"], told["examples_in_journals"]) == (3, 1)
    assert told["eta_s"] == 12.0 * 3 / 2  # the median of 2, 2, 12, 30, 30; three examples, two workers
    assert told["failures"] == {"RuntimeError: planted": 6}
    assert told["next"] == f"make claim-1 PROFILE=smoke STORE={store.root}"
    assert found["extension-6"]["plans"][0]["next"].startswith("make extension-6 ")
    said = said_by(status.main, [], capsys)
    assert "planted rows: 18 done, 24 missing, 6 failed of 48 cells  [PROFILE=smoke]" in said
    assert "6 failed: RuntimeError: planted" in said
    assert f"3 examples left, about 18 s with 2 workers: make claim-2 PROFILE=smoke STORE={store.root}" in said
    assert "1 examples are done, their units not yet whole" in said


def test_status_of_a_complete_plan_names_no_command(store, design, capsys):
    planted(store.root, plan(design=design))
    said = said_by(status.main, [], capsys)
    assert "planted rows: 36 done, 0 missing, 0 failed of 36 cells" in said
    assert "make claim-1" not in said
    assert progress(store, plan(design=design)).eta_s(2) == 0.0


def test_status_before_the_first_example_knows_no_time(store, design, capsys):
    store.write_plan(plan(design=design))
    assert "6 examples left: make claim-1 PROFILE=smoke" in said_by(status.main, [], capsys)


def test_status_names_rows_of_another_design(store, design, capsys):
    planted(store.root)
    assert "planned under an earlier design" in said_by(status.main, [], capsys)
    store.write_plan(plan(design=design))
    said = said_by(status.main, [], capsys)
    assert "36 of the missing have rows of another design" in said
    assert "planned under an earlier design" not in said


def test_what_the_user_typed_is_quoted_in_the_command(store, design, capsys):
    evil = "a'b $(touch pwned); x"
    made = plan(design=design, request=REQUEST | {"model": evil, "ctx": 64, "args": "replay.documents=4 seed=1"})
    store.write_plan(made)
    (told,) = json.loads(said_by(status.main, ["--json"], capsys))["claim-1"]["plans"]
    echoed = subprocess.run(
        ["sh", "-c", told["next"].replace("make", "printf '%s\\n'")], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert echoed == [
        "claim-1", "PROFILE=smoke", f"MODEL={evil}", "CTX=64", "ARGS=replay.documents=4 seed=1", f"STORE={store.root}",
    ]  # fmt: skip


def test_a_multi_line_failure_is_one_line(store, design, capsys):
    made = plan(documents=1, size=1, design=design)
    store.write_plan(made)
    attempt = store.attempt(next(iter(made.units)), design, {})
    attempt.fail("example 0", "first\n  second\x1b" + "x" * 999, 1.0)
    attempt.publish()
    (line,) = [line for line in said_by(status.main, [], capsys).splitlines() if "6 failed: " in line][:1]
    assert "first second" in line
    assert len(line) < 240


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min"), (273_600, "3 d 4 h")],
)
def test_durations_are_said_in_two_units(seconds, text):
    assert status.duration(seconds) == text


# ---------------------------------------------------------------- explain


RUN = {
    "git": {"revision": "0123abcd", "dirty": True},
    "packages": {"torch": "2.13.0"},
    "config": {"seed": 7, "text": "None"},
    "host": "planted",
    "threads": 1,
}


def test_explain_tells_row_file_plan_process_and_command(store, design, capsys):
    made = plan(design=design)
    planted(store.root, made, provenance=RUN)
    cell = made.cells["cell"][5].as_py()
    wanted = made_up(made.cells.to_pylist()[5] | {"design": design})
    found = json.loads(said_by(explain.main, [cell[:12], "--json"], capsys))
    assert found["row"] == wanted
    assert found["run"] == RUN
    assert found["plan"] == made.header
    assert (found["example_wall_s"], found["attempt"]) == (2.0, 0)
    assert found["file"] == str(store.unit_files(wanted["unit"])[0].path)
    assert found["again"] == "git checkout 0123abcd && make claim-1 PROFILE=smoke STORE=an_empty_folder"
    said = said_by(explain.main, [cell], capsys)
    for part in (
        cell,
        wanted["document"],
        repr(wanted["err"]),
        "0123abcd",
        '"torch"',
        "2.13.0",
        found["file"],
        found["again"],
    ):
        assert part.strip('"') in said
    assert re.search(r"text +\"None\"\n", said)
    assert re.search(r"message +null\n", said)


def test_explain_takes_the_id_from_the_environment(store, design, capsys, monkeypatch):
    made = plan(design=design)
    planted(store.root, made)
    monkeypatch.setenv("CELL", made.cells["cell"][0].as_py())
    assert "example 0" in said_by(explain.main, [], capsys)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("ffffffff", "no stored row has it"),
        ("abc", "is no cell id"),
        ("$(touch pwned)", "is no cell id"),
        ("../../../etc/passwd", "is no cell id"),
        ("abcd", "2 cells begin so"),
        ("", "no cell is named"),
    ],
)
def test_a_cell_that_is_not_one_is_refused_in_one_line(store, cell, message):
    cells = plan(documents=2, steps=1).cells
    ids = [f"abcd{k:020x}" for k in range(cells.num_rows)]
    planted(store.root, Plan(plan().header, cells.slice(0, 2).set_column(0, "cell", [ids[:2]])))
    told = subprocess.run(
        [sys.executable, "-m", "scripts.explain"],
        cwd=ROOT,
        env=os.environ | {"CELL": cell},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("error: ")
    assert message in told.stderr
    assert told.stderr.count("\n") == 1


def test_a_damaged_unit_is_named_by_every_command(store, design):
    planted(store.root, plan(design=design))
    path = store.unit_files()[0].path
    path.write_bytes(b"")
    for main, argv in ((status.main, []), (explain.main, ["abcd"]), (gc.main, [])):
        with pytest.raises(UserError, match=f"cannot read {path}"):
            main(argv)


def test_a_renamed_plan_is_named_by_status(store, design):
    planted(store.root, plan(design=design))
    path = store.plan_files()[0]
    renamed = path.rename(path.with_name("a" * 24 + ".parquet"))
    with pytest.raises(UserError, match=f"{renamed} has another plan's name"):
        status.main([])


def test_a_parquet_file_of_another_program_is_named_by_gc_and_freeze(store):
    path = store.root / "units" / ("a" * 24 + ".0.parquet")
    path.parent.mkdir()
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"kvcert": "{}"}), path)
    for does in (lambda: gc.main([]), lambda: freeze.registered_designs(store)):
        with pytest.raises(UserError, match=f"{path} is no unit of this store"):
            does()


def test_a_row_whose_example_its_metadata_lack_is_named_by_explain(store, design):
    planted(store.root, plan(design=design))
    path = store.unit_files()[0].path
    table = pq.read_table(path)
    meta = json.loads(table.schema.metadata[b"kvcert"]) | {"run_of": {}, "wall_s": {}}
    pq.write_table(table.replace_schema_metadata({"kvcert": json.dumps(meta)}), path)
    with pytest.raises(UserError, match=f"{path}: its metadata have no example"):
        explain.main([table["cell"][0].as_py()])


# ---------------------------------------------------------------- gc


def age(path):
    old = path.stat().st_mtime - garbage.LEFT_AFTER_S - 1
    os.utime(path, (old, old))


def everything(store):
    return {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}


def test_gc_lists_and_with_yes_removes_rows_of_designs_that_no_claim_accepts(store, design, capsys):
    planted(store.root, plan(design=design))
    kept = everything(store)
    old = plan(profile="laptop", documents=3)
    store.write_plan(old)
    half = store.attempt(list(old.units)[1], DESIGN, {})
    half.record("example 2", [made_up(cell) for cell in half.planned("example 2")], 1.0)
    do(store.attempt(next(iter(old.units)), DESIGN, {}))
    before = everything(store)
    said = said_by(gc.main, [], capsys)
    assert everything(store) == before
    assert f"rows of design {DESIGN[:12]}, 12 rows, " in said
    assert f"plan of design {DESIGN[:12]}" in said
    assert f"journal of design {DESIGN[:12]}" in said
    size = sum(len(data) for path, data in before.items() if path not in kept)
    assert f"to be removed: 3 files, 12 rows, {size / 1024:.4g} KiB; make gc ARGS=--yes removes them" in said
    assert "removed: 3 files, 12 rows" in said_by(gc.main, ["--yes"], capsys)
    assert everything(store) == kept
    assert f"nothing to remove in {store.root}" in said_by(gc.main, ["--yes"], capsys)


def test_gc_takes_yes_from_args(store, design, capsys, monkeypatch):
    planted(store.root)
    monkeypatch.setenv("ARGS", "--yes")
    assert "removed: 4 files, 36 rows" in said_by(gc.main, [], capsys)
    assert everything(store) == {}


def test_gc_keeps_rows_that_a_deviation_names(root, store, design, capsys):
    planted(store.root)
    with (root / prereg.DEVIATIONS).open("a") as text:
        text.write(f"\n## 2026-02-01 claim-2 grid {DESIGN}\nA comment in a config was corrected.\n")
    assert "nothing to remove" in said_by(gc.main, ["--yes"], capsys)


def test_gc_keeps_the_locked_designs_rows_and_refuses_where_the_lock_does_not_match(root, store, design):
    planted(store.root)
    before = everything(store)
    text = (root / CLAIMS).read_text()
    (root / CLAIMS).write_text(text.replace("title: Damage", "title: Any damage", 1))
    with pytest.raises(UserError, match="claim-4"):
        gc.main(["--yes"])
    assert everything(store) == before


def test_gc_removes_what_killed_processes_left_but_nothing_of_a_live_one(store, design, capsys):
    made = plan(documents=4, size=1, design=design)
    store.write_plan(made)
    units = list(made.units)
    done = store.attempt(units[0], design, {})
    done.record("example 0", [made_up(cell) for cell in done.planned("example 0")], 1.0)
    journal_of_done = store.journals(units[0])[0].path
    lines = journal_of_done.read_bytes()
    done.publish()
    journal_of_done.write_bytes(lines)  # killed between the link and the removal
    half = store.attempt(units[1], design, {})
    half.record("example 1", [made_up(cell) for cell in half.planned("example 1")], 1.0)
    fresh = journal.create(store.root / "journal", units[2], 0)
    torn = journal.create(store.root / "journal", units[3], 0)
    torn.write_bytes(lines[:100])
    temporary = [store.root / folder / f".{k:016x}.tmp" for folder in ("plans", "units") for k in range(2)]
    for path in temporary:
        path.write_bytes(b"PAR1")
    for path in (torn, temporary[0], temporary[2], store.journals(units[1])[0].path, store.unit_files()[0].path):
        age(path)
    gone = {journal_of_done, torn, temporary[0], temporary[2]}
    kept = {path: data for path, data in everything(store).items() if path not in gone}
    said = said_by(gc.main, ["--yes"], capsys)
    assert everything(store) == kept
    assert fresh in kept
    assert "journal of a published unit" in said
    assert "journal without a whole line" in said
    assert said.count("left by a process that was killed") == 2
    work(store.root, design)
    assert store.missing(made) == []


def test_gc_keeps_the_journal_of_a_retry(store, design, capsys):
    made = plan(documents=2, size=2, design=design)
    planted(store.root, made, failing={"example 0", "example 1"})
    retry = store.attempt(next(iter(made.units)), design, {}, retry=True)
    retry.record("example 0", [made_up(cell) for cell in retry.planned("example 0")], 1.0)
    assert "nothing to remove" in said_by(gc.main, ["--yes"], capsys)
    assert store.attempt(retry.unit, design, {}, retry=True).missing == ["example 1"]


def test_gc_on_a_store_that_cannot_be_changed_says_so(store, monkeypatch):
    planted(store.root)

    def refuse(*_, **__):
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=r"cannot write .*: Read-only file system"):
        garbage.remove(garbage.find(store, set()))


def test_gc_beside_a_run_that_publishes_lists_what_is_still_there(store, design, monkeypatch):
    made = plan(design=design)
    store.write_plan(made)
    unit = next(iter(made.units))
    store.attempt(unit, design, {})
    journal_path = store.journals()[0].path
    age(journal_path)
    assert [item.path for item in garbage.find(store, {design})] == [journal_path]
    read = journal.read
    monkeypatch.setattr(journal, "read", lambda path: (read(path), path.unlink())[0])
    assert garbage.find(store, {design}) == []
    store.attempt(unit, design, {})
    age(store.journals()[0].path)
    monkeypatch.setattr(garbage, "_old", lambda path: path.unlink() or True)
    monkeypatch.setattr(journal, "read", read)
    assert garbage.find(store, {design}) == []
