"""make plan: sizes as registered, cost as measured, and nothing guessed where nothing was."""

import json
import time

import pyarrow as pa
import pytest

from runs.cells import Plan, cell_id, in_units
from runs.registry import load
from runs.store import Store
from scripts import _costs, plan
from scripts._cli import settings
from tests.planted_store import header, planted
from tests.planted_store import plan as made_plan


@pytest.fixture
def costs(tmp_path, monkeypatch):
    """costs(PROFILE=...) by grid, over a store in the test's folder."""

    def found(**variables: str):
        for name, value in ({"STORE": str(tmp_path), "WORKERS": "2"} | variables).items():
            monkeypatch.setenv(name, value)
        return {grid["grid"]: grid for grid in _costs.costs(settings(), load())}

    return found


def test_the_paper_is_planned_in_seconds_without_a_row(costs) -> None:
    began = time.monotonic()
    found = costs(PROFILE="paper")
    assert time.monotonic() - began < 10
    tasks = found["tasks"]
    assert (tasks["cells"], tasks["examples"], tasks["units"]) == (76_800, 4 * 2 * 16 * 50, 4 * 2 * 16 * 13)
    assert (found["synthetic"]["examples"], found["synthetic"]["units"]) == (1600, 400)
    assert (found["replay"]["examples"], found["replay"]["units"]) == (112, 28)
    assert tasks["hours"] is None and tasks["bytes"] is None and len(tasks["unmeasured"]) == 4
    assert (found["assistant"]["examples"], found["assistant"]["units"]) == (4 * (60 + 100), 4 * (15 + 25))
    assert all(found[grid]["runnable"] and found[grid]["hours"] is None for grid in ("assistant", "locomo"))
    assert found["architectures"]["hours"] is None
    assert found["architectures"]["unmeasured"] == ["12 models that MODELS= may name"]


def test_the_printed_plan_says_what_is_not_measured(costs, capsys) -> None:
    costs(PROFILE="paper")
    assert plan.main([]) == 0
    said = capsys.readouterr().out
    assert "76,800 cells = 4 models x 2 lengths x 16 tasks x 50 examples x 12 arms (76,800 generations)" in said
    assert "6,400 examples in 1,664 units; no seconds measured yet for Qwen2.5-1.5B-Instruct, Qwen2.5-7B" in said
    assert f"next: make claim-1 PROFILE=paper STORE={settings().store} DATA=..." in said
    assert said.count("expected DATA=, a folder with LongBench .jsonl files") == 3
    assert "needs the hub, once, for Qwen/Qwen2.5-1.5B-Instruct, Qwen/Qwen2.5-7B-Instruct, meta-llama" in said
    assert "needs a GPU" in said and "come on top, once a run and worker" in said


def test_hours_and_bytes_come_from_stored_units_of_the_profile_and_its_models(costs, tmp_path, capsys) -> None:
    run = {"config": {"model": {"name": "tiny random Llama"}}}
    store, made = planted(tmp_path, made_plan(), provenance=run)
    seconds = [s for file in store.unit_files() for s in store.meta(file.path)["wall_s"].values()]
    stored = sum(file.path.stat().st_size for file in store.unit_files())
    replay = costs(PROFILE="smoke")["replay"]
    assert replay["hours"] == pytest.approx(sum(seconds) / len(seconds) * 4 / 2 / 3600)
    assert replay["bytes"] == round(stored / made.cells.num_rows * 96) and replay["unmeasured"] == []
    assert costs(PROFILE="smoke")["tasks"]["hours"] is None
    assert costs(PROFILE="laptop")["replay"]["hours"] is None
    assert costs(PROFILE="smoke", MODEL="other.gguf")["replay"]["unmeasured"] == ["other.gguf"]
    costs(PROFILE="smoke", MODEL="")
    assert (
        plan.main([]) == 0 and "4 examples in 1 units, about 0.1 MiB; the whole grid takes" in capsys.readouterr().out
    )


def test_each_length_costs_its_own_seconds(costs, tmp_path) -> None:
    """Documents of 512 tokens of 1 s and of 1,024 of 5 s: 60 of each are registered for the desktop."""
    run = {"config": {"model": {"name": "a.gguf"}}}
    store, (short, long) = Store(tmp_path), (_desktop(length) for length in (512, 1024))
    both = Plan(short.header, pa.concat_tables([short.cells, long.cells]))
    store.write_plan(both)
    for unit in short.units:
        _done(store, unit, both.design, run, 1.0)
    tasks = costs(PROFILE="desktop", MODEL="a.gguf")["tasks"]
    assert (tasks["hours"], tasks["unmeasured"], tasks["missing"]) == (None, ["a.gguf at 1,024 tokens"], 8640 - 8)
    for unit in long.units:
        _done(store, unit, both.design, run, 5.0)
    tasks = costs(PROFILE="desktop", MODEL="a.gguf")["tasks"]
    assert tasks["unmeasured"] == [] and tasks["missing"] == 8640 - 2 * 8
    assert tasks["hours"] == pytest.approx((4 * 1.0 + 4 * 5.0) / 2 / 3600)  # the plan at hand, of eight documents
    whole = costs(PROFILE="desktop", MODEL="a.gguf", CTX="1024")["tasks"]
    assert whole["hours"] == pytest.approx(
        120 * 5.0 / 2 / 3600
    )  # without one: as many as registered, all of that length


def _desktop(length: int) -> Plan:
    """Four documents of a length, one request, two arms."""
    cells = []
    for k in range(4):
        for arm in ("full", "topk aware 0.25"):
            fields = {"example": f"{k} {length}", "document": f"{k} {length}", "model": "a", "task": "t", "arm": arm}
            fields |= {"ctx_tokens": length, "request": 0, "kind": "lookup", "prompt_sha256": "0" * 64}
            fields |= {"policy": "full", "mode": "full", "budget": 1.0, "draw": 0}
            cells.append({"cell": cell_id(fields), **fields})
    request = {"model": "a.gguf", "data": None, "ctx": None, "args": None}
    head = header(grid="tasks", kind="tasks", profile="desktop", request=request, documents={"n": 8})
    return Plan(head, in_units(cells, head["design"], 2))


def _done(store: Store, unit: str, design: str, run: dict, seconds: float) -> None:
    attempt = store.attempt(unit, design, run)
    for example in attempt.missing:
        attempt.fail(example, "planted", seconds)
    attempt.publish()


def test_what_a_profile_needs_is_said_and_what_is_given_is_not(costs) -> None:
    assert all(grid["needs"] == [] for grid in costs(PROFILE="laptop").values())
    (hub,) = costs(PROFILE="desktop")["tasks"]["needs"]
    assert hub == "the hub, once, for Qwen/Qwen2.5-0.5B-Instruct (HF_TOKEN where one is gated), or MODEL="
    assert costs(PROFILE="desktop", MODEL="a.gguf")["tasks"]["needs"] == []
    assert len(costs(PROFILE="paper", MODEL="a.gguf")["tasks"]["needs"]) == 1  # the GPU


def test_models_that_are_not_named_are_missing(costs) -> None:
    grid = costs(PROFILE="laptop")["architectures"]
    assert (grid["missing"], grid["examples"], grid["units"]) == (145_152, 12 * 56, 12 * 14)
    assert grid["unmeasured"] == ["SmolLM2-135M-Instruct", "11 models that MODELS= may name"]
    assert costs(PROFILE="paper", MODEL="a.gguf")["tasks"]["cells"] == 19_200


def test_a_plan_of_one_of_twelve_models_lacks_the_others(costs, tmp_path) -> None:
    request = dict.fromkeys(("model", "data", "ctx", "args"))
    planted(tmp_path, made_plan(grid="architectures", profile="laptop", request=request))  # 36 cells
    grid = costs(PROFILE="laptop")["architectures"]
    assert (grid["missing"], grid["units"]) == (145_152 - 36, 12 * 14)


def test_the_next_command_has_the_settings_at_hand(costs, capsys) -> None:
    costs(PROFILE="desktop", MODEL="my model.gguf")
    assert plan.main([]) == 0
    store = settings().store
    assert f"next: make claim-1 PROFILE=desktop MODEL='my model.gguf' STORE={store}\n" in capsys.readouterr().out


def test_what_data_adds_is_counted_before_there_is_a_plan(costs, tmp_path) -> None:
    """Three tasks: lcc has no question apart; each row has 5 arms that are not agnostic, and 7 that are."""
    row = {"context": "The quick brown fox. " * 9, "input": "What is it?\n", "answers": ["fox"], "all_classes": ["fox"]}
    for task in ("qasper", "trec", "lcc"):
        rows = [row | {"context": f"{i} {row['context']}"} for i in range(2)]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = costs(PROFILE="laptop", DATA=str(tmp_path))
    tasks = found["tasks"]
    assert tasks["further"] == 4 * 12 + 2 * 5 and tasks["examples"] == 40 + 6
    assert tasks["unmeasured"] == ["SmolLM2-135M-Instruct"]
    assert [lack.partition(";")[0] for lack in tasks["too_few"]["claim-7"]] == [
        "2,048 tokens: descriptive: 12 answers planned, not 30 of each of two classes"
    ]
    assert "12 answers planned" in tasks["too_few"]["claim-5"][0] and tasks["too_few"].keys() == {"claim-5", "claim-7"}
    assert found["synthetic"]["refused"].endswith("has no LongBench rows here; expected no DATA=")
    assert found["replay"]["refused"] is None and found["synthetic"]["further"] == 0
    assert (
        costs(PROFILE="laptop", DATA=f"some/longbench@{'0' * 40}")["tasks"]["further"] == 0
    )  # nothing is loaded for it


def test_the_registered_sample_of_longbench_cannot_decide_claims_5_and_7(costs, shared_data) -> None:
    tasks = costs(PROFILE="laptop", DATA=str(shared_data("longbench")))["tasks"]
    assert (tasks["further"], tasks["examples"]) == (314, 40 + 32)
    assert "48 answers planned" in tasks["too_few"]["claim-5"][0]
    assert "54 answers planned" in tasks["too_few"]["claim-7"][0]
    assert costs(PROFILE="desktop", DATA=str(shared_data("longbench")))["tasks"]["too_few"] == {}
