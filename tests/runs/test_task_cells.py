"""Cells of the task grids: identity, absent arms, LongBench rows, and what is refused before anything runs."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runs import prepare, task_cells
from runs.errors import UserError
from runs.examples import Example, Request
from runs.grid import Part, header, inputs, parts
from scripts.compose import compose

BASE = ("profile=smoke", "tasks.documents=1", "tasks.seed=1000", "tasks.text_seed=1000")
REQUEST = {"model": None, "data": None, "ctx": None, "args": None}


def part(*changes: str, data: Path | None = None, grid: str = "tasks") -> Part:
    (made,) = parts([compose([*BASE, *changes])], str(data) if data else None, grid)
    return made


def plan(mine: Part, found=None):
    found = found or prepare.documents(mine)
    return prepare.plan([mine], [found], header([mine], REQUEST, "smoke", "d" * 64, mine.grid), [])


def ids(mine: Part) -> set[str]:
    return set(plan(mine).cells["cell"].to_pylist())


@pytest.fixture
def longbench(tmp_path: Path) -> Path:
    """Rows of two tasks with a question apart and of one without; two questions on one context, one row twice."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for task in ("qasper", "trec", "lcc"):
        rows = [
            {
                "context": f"{task} {i // 2} the quick brown fox.\n" * 3,
                "input": f"what is {i}?\n",
                "answers": [f"fox {i}"],
            }
            | {"all_classes": [f"fox {i}", "dog"] if task == "trec" else None}
            for i in range(4)
        ]
        lines = [json.dumps(row) for row in [*rows, rows[0]]]
        (folder / f"{task}.jsonl").write_text("\n".join(lines))
    return folder


def test_a_small_grid_has_every_request_under_every_arm() -> None:
    made = plan(part("tasks.documents=5"))
    assert made.cells.num_rows == 5 * 6 * 12 and [len(examples) for examples in made.units.values()] == [4, 1]
    rows = made.cells.to_pylist()
    assert {row["request"] for row in rows} == set(range(6)) and len({row["prompt_sha256"] for row in rows}) == 30
    assert {(row["arm"], row["policy"], row["mode"], row["budget"], row["draw"]) for row in rows if row["draw"]} == {
        ("poisson agnostic 0.25 draw 2", "poisson", "agnostic", 0.25, 1)
    }
    assert made.header["documents"] == {"n": 5, "registered_matching": None}
    assert made.header["absent"] == {"cells": 0, "registered": 0, "reason": None}


def test_contexts_are_held_in_four_bytes_a_token_and_name_the_same_cells(longbench: Path) -> None:
    mine = part("tasks.longbench.sample=null", data=longbench)
    found = prepare.documents(mine)
    assert all(sys.getsizeof(example.context) < 5 * len(example.context) + 100 for example in found)
    plain = [replace(example, context=tuple(example.context)) for example in found]
    assert plan(mine, plain).cells.equals(plan(mine, found).cells)


def test_whatever_changes_a_result_changes_every_cell() -> None:
    mine = part()
    base, found = ids(mine), prepare.documents(mine)
    for change in (
        "tasks.seed=9", "tasks.text_seed=9", "tasks.delta=0.1", "tasks.dtype=bfloat16", "tasks.ctx_tokens=[513]",
        "policies.certified.floor=0.2", "policies.topk.pool=3",
    ):  # fmt: skip
        assert not base & ids(part(change)), change
    assert not base & ids(replace(mine, source=replace(mine.source, digest="0" * 64)))
    budgets = part("tasks.arms=[topk aware 0.3,poisson agnostic 0.3]")
    assert not base & ids(budgets)
    (one,) = found
    for change in ({"max_new_tokens": 3}, {"metric": "qa_f1"}, {"newline_stops": False}, {"ctx_tokens": 400}):
        assert not base & set(plan(mine, [replace(one, **change)]).cells["cell"].to_pylist()), change
    answered = replace(one, requests=tuple(replace(request, answers=("x",)) for request in one.requests))
    assert not base & set(plan(mine, [answered]).cells["cell"].to_pylist())


def test_what_changes_no_result_changes_no_cell() -> None:
    base = ids(part())
    assert base < ids(part("tasks.documents=2"))
    assert base > ids(part("tasks.arms=[full,poisson aware 0.5]"))
    assert base == ids(part("policies.certified.name=other", "model.name=another", "replay.seed=7", "task=longbench"))


def test_a_plan_holds_while_its_inputs_do() -> None:
    assert inputs([part()]) == inputs([part("replay.seed=7", "replay.documents=3")])
    hub = inputs([part(data=Path(f"some/longbench@{'0' * 40}"))])
    assert hub["texts"] != inputs([part(data=Path(f"some/longbench@{'1' * 40}"))])["texts"]  # nothing is loaded for it
    for change in ("tasks.seed=9", "tasks.documents=3", "tasks.arms=[full]", "policies.topk.pool=3"):
        assert inputs([part()]) != inputs([part(change)]), change
    assert inputs([part(grid="synthetic")]) == inputs([part("tasks.seed=9", grid="synthetic")])


def test_longbench_rows_are_a_further_stratum_and_some_arms_do_not_exist(longbench: Path) -> None:
    mine = part("tasks.longbench.sample=null", data=longbench)
    found = prepare.documents(mine)
    made = plan(mine, found)
    rows = [example for example in found if example.task != "planted_facts"]
    assert {(example.task, example.agnostic) for example in rows} == {("qasper", True), ("trec", True), ("lcc", False)}
    assert len(rows) == 12 and made.cells.num_rows == 72 + 8 * 12 + 4 * 5  # the row that stands twice counts once
    assert made.header["absent"] == {"cells": 4 * 7, "registered": 0, "reason": task_cells.JOINED}
    assert made.header["documents"]["n"] == 1 + 6 and made.header["registered"]
    assert made.header["population_notes"] == [
        'a further stratum: 12 LongBench prompts of 3 tasks ("qasper": 4, "trec": 4, "lcc": 4)'
    ]
    assert len(made.units) == 4 and len({task_cells.name(example) for example in found}) == len(found)


def test_a_sample_takes_the_tasks_in_turn_and_a_registered_one_so_many_of_each(longbench: Path) -> None:
    further = prepare.documents(part("tasks.longbench.sample=4", data=longbench))[1:]
    assert sorted(example.task for example in further) == ["lcc", "qasper", "qasper", "trec"]
    mine = part("tasks.tasks=[longbench]", "tasks.longbench=null", "tasks.documents=3", data=longbench)
    found = prepare.documents(mine)
    assert [example.task for example in found] == ["qasper"] * 3 + ["trec"] * 3 + ["lcc"] * 3
    assert plan(mine, found).header["absent"]["registered"] == 3 * 7


def test_what_no_model_or_folder_can_give_is_refused(longbench: Path) -> None:
    with pytest.raises(UserError, match="4096 positions"):
        prepare.documents(part("tasks.ctx_tokens=[5000]"))
    with pytest.raises(UserError, match="4096 positions"):
        prepare.documents(part("tasks.ctx_tokens=[4090]"))  # with the question and the answer it is longer
    with pytest.raises(UserError, match="expected DATA="):
        part("tasks.tasks=[longbench]", "tasks.longbench=null")
    with pytest.raises(UserError, match="no LongBench rows"):
        part(grid="synthetic", data=longbench)
    with pytest.raises(UserError, match="too few"):
        prepare.documents(part("tasks.ctx_tokens=[64]"))
    broken = Example("planted_facts", "d" * 64, 512, (1, 300), (Request("x", (1,), ("a",)),), "contains", 4)
    with pytest.raises(UserError, match="token 300, its model knows 256"):
        task_cells._require_fit(part(), [broken], 4096, 256)
