"""Real worker processes on the smoke grid: same rows for any number of them, kills, failures, refusals."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import tiny_folder

from runs import execute, prepare, replay_cells
from runs.cells import content_id
from runs.data import Document
from runs.errors import UserError
from runs.execute import run, serve
from runs.grid import header, parts
from runs.store import Store
from scripts.compose import compose

SMALL = ("profile=smoke", "replay.documents=10", "replay.ctx_tokens=96")
REQUEST = {"model": None, "data": None, "ctx": None, "args": " ".join(SMALL[1:])}


def planned(root: Path):
    """A small plan of ten documents in three units, stored."""
    mine = parts([compose(list(SMALL))], None)
    found = [prepare.documents(part) for part in mine]
    plan = prepare.plan(mine, found, header(mine, REQUEST, "smoke", "d" * 64, "replay", "pydoc_topics"), [])
    store = Store(root)
    store.write_plan(plan)
    return store, plan, mine, found


def rows(store: Store, plan) -> list[dict]:
    return store.rows(plan, {"d" * 64}).to_pylist()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    store, plan, mine, found = planned(tmp_path_factory.mktemp("one"))
    report = run(store, plan, mine, found, store.missing(plan), workers=1)
    assert report.done == 10 and not report.failures and not report.died
    return rows(store, plan)


def test_rows_do_not_depend_on_the_number_of_workers(tmp_path: Path, undisturbed) -> None:
    store, plan, mine, found = planned(tmp_path)
    report = run(store, plan, mine, found, store.missing(plan), workers=2)
    assert not report.died and not report.failures  # a machine without memory is told from rows that differ
    assert rows(store, plan) == undisturbed and len(undisturbed) == 10 * 3 * 2 * 2 * 2
    assert store.missing(plan) == [] and run(store, plan, mine, found, store.missing(plan), workers=2).done == 0


def test_a_process_alone_serves_the_same_rows_and_stops_when_told(tmp_path: Path, undisturbed) -> None:
    store, plan, mine, _ = planned(tmp_path)
    done: list[str] = []

    def said(progress) -> None:
        example, computed, message = progress
        assert computed and message is None
        done.append(example)

    last, *others = reversed(plan.units)  # any units, in any order
    serve(store, plan, mine, {last: False, others[0]: False}, said, lambda: len(done) == 3)
    assert done == [*plan.units[last], plan.units[others[0]][0]] and store.missing(plan) == others[::-1]
    serve(store, plan, mine, dict.fromkeys(others, False), done.append, lambda: True)
    assert len(done) == 3
    serve(store, plan, mine, dict.fromkeys(others, False), lambda it: done.append(it[0]), lambda: False)
    assert sorted(done[3:]) == sorted(example for unit in others for example in plan.units[unit])
    assert rows(store, plan) == undisturbed


def test_a_process_loads_each_model_once_and_cuts_the_texts_of_no_other(tmp_path: Path, monkeypatch) -> None:
    models = [tiny_folder(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two", "three"))]
    configs = [
        compose(["profile=smoke", "model=custom", "replay.documents=5"], {"model.source": str(m)}) for m in models
    ]
    mine = parts(configs, None)
    found = [prepare.documents(part) for part in mine]
    plan = prepare.plan(mine, found, header(mine, REQUEST, "smoke", "d" * 64, "replay", "pydoc_topics"), [])
    store = Store(tmp_path / "store")
    store.write_plan(plan)
    units, loaded, cut = list(plan.units), [], []
    load, texts = execute.load_model, replay_cells.KIND.texts
    monkeypatch.setattr(execute, "load_model", lambda source, dtype: loaded.append(source.name) or load(source, dtype))
    kind = replace(replay_cells.KIND, texts=lambda part: cut.append(part.model) or texts(part))
    monkeypatch.setattr(replay_cells, "KIND", kind)
    serve(
        store, plan, mine, dict.fromkeys([units[4], units[0], units[5], units[1]], False), lambda _: None, lambda: False
    )
    assert loaded == ["one", "three"] and cut == ["one", "three"]
    assert store.missing(plan) == units[2:4]


def test_another_seed_gives_other_cells_and_other_numbers(tmp_path: Path, undisturbed) -> None:
    mine = parts([compose([*SMALL, "replay.seed=2", "replay.documents=2"])], None)
    found = [prepare.documents(part) for part in mine]
    plan = prepare.plan(mine, found, header(mine, REQUEST, "smoke", "d" * 64, "replay", "pydoc_topics"), [])
    store = Store(tmp_path)
    store.write_plan(plan)
    run(store, plan, mine, found, store.missing(plan), workers=1)
    other = rows(store, plan)
    assert not {r["cell"] for r in other} & {r["cell"] for r in undisturbed}
    assert {r["err"] for r in other} != {r["err"] for r in undisturbed[: len(other)]}


def test_kill_9_loses_nothing_and_doubles_nothing(tmp_path: Path, undisturbed) -> None:
    """The whole process tree is killed while it computes, twice; then the run is finished."""
    code = (
        "import sys; sys.path[:0] = [sys.argv[2], sys.argv[2] + '/tests/runs']\n"
        "from pathlib import Path; import test_execute as t\n"
        "if __name__ == '__main__':\n"
        "    s, p, m, f = t.planned(Path(sys.argv[1])); t.run(s, p, m, f, s.missing(p), 2)\n"
    )
    script = tmp_path / "run_it.py"
    script.write_text(code)
    store_path = tmp_path / "store"
    for wanted in (2, 5):
        child = subprocess.Popen(
            [sys.executable, str(script), str(store_path), str(Path(__file__).parents[2])],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while child.poll() is None and _finished(store_path) < wanted and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(ProcessLookupError):  # on an idle machine the last of it may end between the look and the kill
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    store, plan, mine, found = planned(store_path)
    before = 10 - sum(len(plan.units[unit]) for unit in store.missing(plan))
    report = run(store, plan, mine, found, store.missing(plan), workers=2)
    assert report.done <= 10 - before
    assert rows(store, plan) == undisturbed


def _finished(root: Path) -> int:
    """Documents in journals and published units, as a watcher sees them."""
    lines = sum(path.read_bytes().count(b"\n") for path in root.glob("journal/*/*.jsonl") if path.exists())
    return lines + 4 * len(list(root.glob("units/*.parquet")))


def test_orphaned_workers_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, os, time, multiprocessing as m; sys.path.insert(0, sys.argv[1])\n"
        "from runs.execute import _die_with\n"
        "if __name__ == '__main__':\n"
        "    c = m.get_context('spawn').Process(target=_die_with, args=(os.getpid(),)); c.start()\n"
        "    print(c.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parents[2])], stdout=subprocess.PIPE, text=True
    )
    orphan = int(parent.stdout.readline())
    time.sleep(1)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{orphan}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{orphan}/stat").read_text().split(")")[1].split()[0]:
            break  # ended, but nobody in this container reaps it
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{orphan}").exists()


def test_a_failing_document_is_a_row_and_the_others_finish(tmp_path: Path, monkeypatch) -> None:
    store, plan, mine, found = planned(tmp_path)
    broken = found[0][3]
    # A token outside the vocabulary: this document fails inside the worker, in the model itself.
    found[0][3] = type(broken)(broken.example, broken.task, broken.sha256, (999, *broken.ids[1:]))
    report = run(store, plan, mine, found, store.missing(plan), workers=2)
    assert report.done == 10 and list(report.failures) == [broken.example]
    counts = store.counts(plan)
    assert (counts["done"], counts["failed"], counts["missing"]) == (9 * 24, 24, 0)
    failed = [r for r in rows(store, plan) if r["status"] == "failed"]
    assert {r["example"] for r in failed} == {broken.example} and "IndexError" in failed[0]["message"]
    assert failed[0]["err"] is None


def test_failed_documents_are_tried_again_and_the_others_are_not(tmp_path: Path, undisturbed) -> None:
    store, plan, mine, found = planned(tmp_path)
    good = found[0][3]
    found[0][3] = replace(good, ids=(999, *good.ids[1:]))
    run(store, plan, mine, found, store.missing(plan), workers=1)
    found[0][3] = good
    report = run(store, plan, mine, found, store.failing(plan), workers=1)
    assert report.done == 1 and not report.failures and rows(store, plan) == undisturbed


def test_too_long_contexts_and_too_few_layers_are_refused() -> None:
    long = parts([compose(["profile=smoke", "replay.ctx_tokens=5000"])], None)
    with pytest.raises(UserError, match="4096 positions"):
        prepare.documents(long[0])
    deep = parts([compose([*SMALL, "replay.layers=9"])], None)
    with pytest.raises(UserError, match=r"4 full-attention layers and 4 .*PROFILE=smoke takes at least 9 and 2"):
        prepare.plan(
            deep, [prepare.documents(deep[0])], header(deep, REQUEST, "smoke", "d" * 64, "replay", "pydoc_topics"), []
        )


def test_another_model_makes_other_cells() -> None:
    (part,) = parts([compose([*SMALL, "replay.documents=2"])], None)
    found = [prepare.documents(part)]
    other = replace(part, source=replace(part.source, digest="0" * 64))
    plans = [
        prepare.plan([p], found, header([p], REQUEST, "x", "d" * 64, "replay", "pydoc_topics"), [])
        for p in (part, other)
    ]
    assert not set(plans[0].cells["cell"].to_pylist()) & set(plans[1].cells["cell"].to_pylist())


def test_whatever_changes_a_result_changes_the_cell_and_nothing_else_does(undisturbed) -> None:
    def ids(*changes: str) -> set[str]:
        mine = parts([compose([*SMALL, "replay.documents=2", *changes])], None)
        found = [prepare.documents(part) for part in mine]
        return set(
            prepare.plan(mine, found, header(mine, REQUEST, "x", "d" * 64, "replay", "pydoc_topics"), [])
            .cells["cell"]
            .to_pylist()
        )

    base = ids()
    for change in (
        "replay.seed=9", "replay.delta=0.1", "replay.kappa=0.5", "replay.ctx_tokens=100",
        "policies.certified.floor=0.2 policies.topk.floor=0.2", "policies.uniform.floor=0.2",
        "policies.certified.pool=3 policies.topk.pool=3",
    ):  # fmt: skip
        assert not base & ids(*change.split()), change
    assert base <= ids("replay.steps=3") and base <= ids("replay.heads=3")  # more cells, the old ones unchanged


def test_the_ids_of_stored_replays_stay_what_they_are() -> None:
    """Ids and the configuration's digest as they were when the published rows were computed."""
    mine = parts([compose(["profile=smoke"])], None)
    document = Document("made up", "pydoc_topics", "a" * 64, (1, 2, 3))
    made = prepare.plan(mine, [[document]], header(mine, REQUEST, "smoke", "d" * 64, "replay", "pydoc_topics"), [])
    ids = " ".join(made.cells["cell"].to_pylist())
    assert made.header["inputs"]["config"] == ["ef079b29cfd37d719a4fbed1"]
    assert (made.cells["cell"][0].as_py(), content_id(ids)) == ("2c5b60ccd4608fb1e9e07674", "45aab237828c2263ef870e03")
