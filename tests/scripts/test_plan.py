"""make plan: sizes as registered, cost as measured, and nothing guessed where nothing was."""

import time

import pytest

from runs.registry import load
from scripts import plan
from scripts._cli import settings
from tests.planted_store import plan as made_plan
from tests.planted_store import planted


@pytest.fixture
def costs(tmp_path, monkeypatch):
    """costs(PROFILE=...) by grid, over a store in the test's folder."""

    def found(**variables: str):
        for name, value in ({"STORE": str(tmp_path), "WORKERS": "2"} | variables).items():
            monkeypatch.setenv(name, value)
        return {grid["grid"]: grid for grid in plan.costs(settings(), load())}

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


def test_the_printed_plan_says_what_is_not_measured(costs, capsys) -> None:
    costs(PROFILE="paper")
    assert plan.main([]) == 0
    said = capsys.readouterr().out
    assert "76,800 cells = 4 models x 2 lengths x 16 tasks x 50 examples x 12 arms (76,800 generations)" in said
    assert "6,400 examples in 1,664 units; no seconds measured yet for Qwen2.5-1.5B-Instruct, Qwen2.5-7B" in said
    assert said.rstrip().endswith("next: make claim-1 PROFILE=paper")


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
