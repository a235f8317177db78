"""Cells of a grid of conversations, and such a grid computed: identity, audit coins, kills in the middle, failures."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import frame
from runs import assistant, execute, prepare
from runs.conversations import Conversation, Question, audited
from runs.errors import UserError
from runs.grid import Part, header, inputs, parts
from runs.store import Store
from scripts.compose import compose

DESIGN = "d" * 64
BASE = ("profile=smoke", "assistant.seed=1000", "assistant.text_seed=1000", "assistant.budget=0.3")
REQUEST = {"model": None, "data": None, "ctx": None, "args": "small"}
TURNS = tuple(tuple((7 * i * i + 31 * t + 3 * i) % 251 for i in range(60)) for t in range(7))


def part(*changes: str) -> Part:
    (made,) = parts([compose([*BASE, *changes])], None, "assistant")
    return made


def talk(number: int, task: str = assistant.TASK) -> Conversation:
    """A short one: execution needs no thirty turns."""
    questions = tuple(Question("room", (number, 40, 77, q), ("a",), age=q + 1) for q in range(2))
    turns = tuple((number, *turn) for turn in TURNS)
    whole = Conversation(task, f"{number}{task}".ljust(64, "x"), turns, questions, "contains", 4)
    return whole if task == assistant.TASK else replace(whole, questions=questions[:1])


TALKS = [*(talk(number) for number in range(5)), *(talk(number, assistant.CALIBRATION) for number in range(2))]
CELLS = 5 * 2 * 4 + 2 * 2


def plan(mine: Part, found=None):
    found = TALKS if found is None else found
    return prepare.plan([mine], [found], header([mine], REQUEST, "smoke", DESIGN, "assistant"), [])


def ids(mine: Part, found=None) -> set[str]:
    return set(plan(mine, found).cells["cell"].to_pylist())


# ---------------------------------------------------------------- cells


def test_a_plan_has_every_question_under_every_system_and_the_coins_before_anything_is_seen() -> None:
    made = plan(part())
    rows = made.cells.to_pylist()
    assert len(rows) == CELLS and sorted(map(len, made.units.values())) == [1, 2, 4]
    assert {(row["task"], row["system"]) for row in rows} == {
        *(("assistant", system) for system in ("full", "topk", "uniform", "poisson")),
        *(("assistant_calibration", system) for system in ("full", "poisson")),
    }
    assert all(row["budget"] == (1.0 if row["system"] == "full" else 0.3) for row in rows)
    coins = {row["document"]: row["audited"] for row in rows}
    assert coins == {one.document: audited(1000, one.document, 0.5) for one in TALKS} and len(set(coins.values())) == 2
    assert {(row["example"], row["request"], row["age"]) for row in rows} == {
        (one.name, number, question.age) for one in TALKS for number, question in enumerate(one.questions)
    }
    assert made.header["population"] == "tiny random Llama; dialogues of 30 turns in CPython docs"


def test_whatever_changes_a_result_changes_every_cell() -> None:
    base = ids(part())
    for change in (
        "assistant.seed=9", "assistant.delta=0.1", "assistant.dtype=bfloat16", "assistant.budget=0.2",
        "policies.certified.floor=0.2", "policies.topk.pool=3", "policies.uniform.recent=16",
    ):  # fmt: skip
        assert not base & ids(part(change)), change
    mine = part()
    assert not base & ids(replace(mine, source=replace(mine.source, digest="0" * 64)))
    for change in ({"max_new_tokens": 3}, {"metric": "qa_f1"}, {"newline_stops": False}):
        assert not base & ids(mine, [replace(one, **change) for one in TALKS]), change
    joined = [replace(one, turns=(one.turns[0] + one.turns[1], *one.turns[2:])) for one in TALKS]
    assert not base & ids(mine, joined)  # the same text, compressed at other places
    answered = [replace(one, questions=tuple(replace(q, answers=("x",)) for q in one.questions)) for one in TALKS]
    assert not base & ids(mine, answered)


def test_an_audited_conversation_has_other_cells_and_what_changes_no_result_has_the_same() -> None:
    base, every = ids(part()), ids(part("assistant.audit=1.0"))
    own = plan(part()).cells.to_pylist()
    assert base & every == {row["cell"] for row in own if row["audited"]}
    assert base == ids(part("policies.certified.name=other", "model.name=another", "tasks.seed=7", "task=longbench"))
    assert base > ids(part("assistant.systems=[full,poisson]"))


def test_a_plan_holds_while_its_inputs_do() -> None:
    assert inputs([part()]) == inputs([part("tasks.seed=7", "replay.documents=3", "synthetic.documents=9")])
    for change in ("assistant.seed=9", "assistant.dialogues=3", "assistant.facts=12", "policies.uniform.recent=16"):
        assert inputs([part()]) != inputs([part(change)]), change


def test_what_no_model_or_folder_can_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="4096 positions"):
        prepare.documents(part("assistant.ctx_tokens=4090", "assistant.dialogues=1", "assistant.calibration=1"))
    with pytest.raises(UserError, match="too few for 30 turns"):
        prepare.documents(part("assistant.ctx_tokens=100"))
    with pytest.raises(UserError, match="DATA="):
        parts([compose([*BASE])], str(tmp_path), "assistant")


def test_the_smoke_profile_makes_its_dialogues() -> None:
    found = prepare.documents(part())
    assert [one.task for one in found] == ["assistant"] * 2 + ["assistant_calibration"] * 4
    assert [len(one.questions) for one in found] == [6, 6, 1, 1, 1, 1] and len({one.document for one in found}) == 6


# ---------------------------------------------------------------- execution


def planned(root: Path):
    mine = part()
    made, store = plan(mine), Store(root)
    store.write_plan(made)
    return store, made, (mine,), [TALKS]


def rows(store: Store, made) -> list[dict]:
    """All rows, in plan order, without their seconds."""
    return [{k: v for k, v in row.items() if k != "wall_s"} for row in store.rows(made, {DESIGN}).to_pylist()]


def work(root: Path, found=None, retry: bool = False) -> list[tuple[str, bool, str | None]]:
    """What one worker process does, without the pool above it: its progress."""
    store, made, mine, same = planned(root)
    progress = execute.get_context("spawn").SimpleQueue()
    execute._start(store.root, made.design, mine, progress, os.getppid())
    failing = store.failing(made) if retry else []
    for job in execute._jobs(made, mine, found or same, failing or store.missing(made), failing):
        execute._work(job)
    return [progress.get() for _ in iter(progress.empty, True)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("one")
    began = time.monotonic()
    assert all(computed and not message for _, computed, message in work(root))
    store, made, _, _ = planned(root)
    assert len(rows(store, made)) == CELLS
    return rows(store, made), frame.digest(frame.load(store, made, {DESIGN})), time.monotonic() - began


def test_rows_and_their_digest_do_not_depend_on_the_number_of_workers(tmp_path: Path, undisturbed) -> None:
    store, made, mine, found = planned(tmp_path)
    report = execute.run(store, made, mine, found, store.missing(made), workers=2)
    assert report.done == len(TALKS) and not report.failures
    assert (rows(store, made), frame.digest(frame.load(store, made, {DESIGN}))) == undisturbed[:2]


def test_killed_in_the_middle_of_conversations_the_same_rows_come_in_the_end(tmp_path: Path, undisturbed) -> None:
    moments, took = random.Random(0), undisturbed[2]
    for attempt in range(7):
        child = os.fork()
        if not child:
            try:
                work(tmp_path)
            finally:
                os._exit(0)
        if attempt < 6:
            time.sleep(moments.uniform(0.02, 0.4) * took)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    store, made, _, _ = planned(tmp_path)
    assert store.missing(made) == [] and rows(store, made) == undisturbed[0]
    assert sum(store.meta(file.path)["rows"] for file in store.unit_files()) == CELLS


def test_a_failing_conversation_is_rows_and_a_retry_does_it_alone(tmp_path: Path, undisturbed) -> None:
    broken = replace(TALKS[1], turns=((999,), *TALKS[1].turns[1:]))  # no such token: it fails in the model itself
    done = work(tmp_path, [[TALKS[0], broken, *TALKS[2:]]])
    assert [name for name, _, message in done if message] == [broken.name]
    store, made, _, _ = planned(tmp_path)
    failed = [row for row in rows(store, made) if row["status"] == "failed"]
    assert {row["example"] for row in failed} == {broken.name} and len(failed) == 8 and "999" in failed[0]["message"]
    assert failed[0]["prediction"] is None and failed[0]["audited"] is not None and failed[0]["age"]
    assert [name for name, computed, _ in work(tmp_path, retry=True) if computed] == [broken.name]
    assert rows(store, made) == undisturbed[0]
