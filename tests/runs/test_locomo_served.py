"""LoCoMo's questions answered for real by the tiny model: rows, interrupts, swapped questions. The file is made up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_locomo import conversation, write

from runs import execute, prepare, systems
from runs.conversation_cells import KIND
from runs.grid import Part, header, parts
from runs.locomo_metrics import METRIC_VERSION, score
from runs.locomo_rows import WRONG_LABELS
from runs.models import load_model
from runs.store import Store
from scripts.compose import compose

DESIGN = "d" * 64
REQUEST = {"model": None, "data": None, "ctx": None, "args": "small"}
SMALL = ("profile=smoke", "locomo.seed=1000", "locomo.text_seed=1000", "locomo.ctx_tokens=900", "locomo.questions=3")
SYSTEMS = ("full", "topk", "uniform", "poisson")


@pytest.fixture(scope="module")
def part(tmp_path_factory) -> Part:
    """Two conversations of four sessions, of which three have room; a list names one label."""
    folder = tmp_path_factory.mktemp("locomo")
    write(folder, *(conversation(i, sessions=6, messages=4) for i in range(2)))
    (folder / WRONG_LABELS).write_text('[["talk-0", "What did Ada find on day 1?"]]')
    (one,) = parts([compose(list(SMALL))], str(folder), "locomo")
    return one


@pytest.fixture(scope="module")
def texts(part: Part) -> list[Any]:
    return prepare.documents(part)


def planned(root: Path, part: Part, texts: list[Any]):
    plan = prepare.plan([part], [texts], header([part], REQUEST, "smoke", DESIGN, "locomo"), [])
    store = Store(root)
    store.write_plan(plan)
    return store, plan


def rows(store: Store, plan) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "wall_s"} for row in store.rows(plan, {DESIGN}).to_pylist()]


def work(root: Path, part: Part, texts: list[Any]) -> list[str]:
    """What one worker does; the conversations it computed."""
    store, plan = planned(root, part, texts)
    done: list[execute.Progress] = []
    worker = execute.Worker(store.root, plan.design, (part,), done.append)
    for job in execute._jobs(plan, [part], [texts], store.missing(plan), []):
        worker.work(job)
    assert not [message for _, _, message in done if message]
    return [name for name, computed, _ in done if computed]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, part: Part, texts: list[Any]) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("store")
    assert len(work(root, part, texts)) == 2
    return rows(*planned(root, part, texts))


def test_rows_say_what_was_fed_asked_and_scored(part: Part, texts: list[Any], undisturbed) -> None:
    assert len(undisturbed) == 2 * 3 * 4 and {row["system"] for row in undisturbed} == set(SYSTEMS)
    for row in undisturbed:
        text = next(one for one in texts if one.document == row["document"])
        question = text.questions[row["request"]]
        assert (row["task"], row["kind"], row["age"]) == ("locomo", question.kind, question.age)
        assert (row["turns"], row["left_out"]) == (len(text.turns), text.left_out) and text.left_out > 0
        assert row["context_tokens"] == sum(map(len, text.turns)) and row["truncated"]
        assert json.loads(row["answers"]) == list(question.answers)
        assert row["metric"] == f"locomo {METRIC_VERSION}" and not row["scorer_exception"]
        assert row["official"] == row["corrected"] == score(row["kind"], row["prediction"], question.answers[0])
        assert (row["certificate"] is not None) == (row["system"] in ("uniform", "poisson"))
        assert row["n_tokens"] == row["context_tokens"]
    labels = {(row["kind"], row["wrong_label"]) for row in undisturbed if row["document"] == texts[0].document}
    assert labels == {("multi_hop", True), ("temporal", False), ("open_domain", False)}


def test_the_plan_says_how_much_was_left_out(tmp_path: Path, part: Part, texts: list[Any]) -> None:
    _, plan = planned(tmp_path, part, texts)
    left = sum(question.age > len(one.turns) for one in texts for question in one.questions)
    _, note = plan.header["population_notes"]
    assert left == 6 and note.startswith("2 conversations begin later") and f"{left} of 6 questions" in note
    assert plan.header["population"] == "tiny random Llama; LoCoMo in 900 tokens"


@pytest.mark.parametrize("question", [0, 1, 2])
def test_interrupted_in_the_middle_of_a_conversation_the_rows_are_the_same(
    tmp_path: Path, part: Part, texts: list[Any], undisturbed, monkeypatch: pytest.MonkeyPatch, question: int
) -> None:
    """The second conversation stops behind a question that was answered; what the first one gave is not computed again."""
    whole = systems._answered

    def stopping(session, serving, one, i, ends):
        yield from whole(session, serving, one, i, ends)
        if one.document == texts[1].document and i == question:
            raise KeyboardInterrupt

    monkeypatch.setattr(systems, "_answered", stopping)
    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, part, texts)
    store, plan = planned(tmp_path, part, texts)
    assert store.counts(plan)["done"] <= 12
    monkeypatch.setattr(systems, "_answered", whole)
    assert work(tmp_path, part, texts) == [texts[1].name]
    assert rows(store, plan) == undisturbed
    assert work(tmp_path, part, texts) == []


def test_another_question_changes_no_retained_set_and_no_other_answer(
    part: Part, texts: list[Any], undisturbed
) -> None:
    """Bit-equal probabilities and rows of every cache at the end of the history, whatever is asked there."""
    serving = KIND.serving(part, load_model(part.source, torch.float32))
    kept: list[dict[str, list[Any]]] = []
    whole = systems._ends

    def tensors(layer) -> list[Any]:
        return [x.clone() for x in (*layer.stored, layer.prob, layer.real) if x is not None]

    def seen(*arguments):
        ends = whole(*arguments)
        caches = {name: end.cache.compressible.values() for name, end in ends.items()}
        kept.append({name: [x for layer in layers for x in tensors(layer)] for name, layers in caches.items()})
        return ends

    one = texts[0]
    first, *others = one.questions
    swapped = replace(one, questions=(replace(first, ids=others[0].ids[::-1], kind="single_hop"), *others))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systems, "_ends", seen)
        for text in (one, swapped):
            planned_rows = KIND.cells(part, [text])
            found = {(row["request"], row["system"]): row for row in serving(text, planned_rows)}
            for row in undisturbed:
                if row["document"] == one.document and (row["request"] > 0 or text is one):
                    mine = found[row["request"], row["system"]]
                    assert all(mine[name] == value for name, value in row.items() if name in mine and name != "wall_s")
    before, after = kept
    assert before.keys() == after.keys() == set(SYSTEMS)
    for system in SYSTEMS:
        assert all(torch.equal(x, y) for x, y in zip(before[system], after[system], strict=True))
    assert len(before["poisson"][0].flatten()) < len(before["full"][0].flatten())


def test_what_can_change_a_score_changes_the_cell(part: Part, texts: list[Any]) -> None:
    """A question of another category, answer or wording is another cell; a label's wrongness, which is ours, is none."""
    one = texts[0]
    (first, *others) = one.questions
    base = [cell["cell"] for cell in KIND.cells(part, [one])]
    for change in ({"kind": "single_hop"}, {"answers": ("a blue kite",)}, {"ids": (*first.ids, 65)}):
        changed = [
            cell["cell"] for cell in KIND.cells(part, [replace(one, questions=(replace(first, **change), *others))])
        ]
        assert not set(changed[:4]) & set(base) and changed[4:] == base[4:]
    same = replace(one, questions=(replace(first, wrong_label=None, age=1), *others))
    assert [cell["cell"] for cell in KIND.cells(part, [same])] == base
