"""The task claims as a user types them: the smoke grid, shared rows, failed examples, every kind of bad input."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import Done, checkout
from checkout import command as typed
from conftest import ROOT

from runs.digests import grid_digest
from runs.errors import UserError
from runs.registry import load
from runs.store import Store
from scripts import manifest, retry_failed
from scripts._cli import Settings, settings
from scripts._grid import compute, configs, stored_plan

DEVELOPMENT = "tasks.seed=1000 tasks.text_seed=1000 tasks.documents=5 tasks.arms=[full,'poisson agnostic 0.25']"


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Callable[..., Done]:
    """command("claim", "claim-3", ...) is python -m scripts.claim claim-3, in a copy of the project that is frozen."""
    copy = checkout(tmp_path_factory.mktemp("checkout"))
    done = typed(copy, "freeze", STORE=str(copy / "none"))
    assert done.returncode == 0, done.stderr
    return partial(typed, copy)


@pytest.fixture(scope="module")
def store(tmp_path_factory, command) -> str:
    """A store in which claim-3 was run in the smoke profile."""
    where = str(tmp_path_factory.mktemp("store"))
    done = command("claim", "claim-3", "--json", STORE=where)
    assert done.returncode == 0, done.stderr
    assert "2 examples in" in done.stderr and "144 of 144 cells done, 0 failed" in done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] == "NOT_EVALUATED" and (result["rows"], result["missing"], result["failed"]) == (144, 0, 0)
    assert result["population"] == "tiny random Llama; planted facts in CPython docs"
    return where


@pytest.mark.parametrize("claim", ["claim-4", "claim-7", "extension-1"])
def test_task_claims_share_their_rows(store: str, claim: str, command) -> None:
    done = command("claim", claim, "--json", STORE=store)
    assert done.returncode == 0 and "all 144 cells are stored, nothing to run" in done.stderr
    assert json.loads(done.stdout)["rows"] == 144


def test_a_finished_grid_needs_no_torch(store: str, command) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'datasets'): sys.modules[name] = None\n"
        "from scripts import claim, judge, status, plan, retry_failed\n"
        "codes = [claim.main(['claim-3']), judge.main(['claim-4']), status.main([]), plan.main([])]\n"
        "sys.exit(max(*codes, retry_failed.main([])))\n"
    )
    environment = os.environ | {"PROFILE": "smoke", "STORE": store}
    (folder,) = command.args
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "144 done, 0 missing, 0 failed of 144 cells" in done.stdout
    assert "2 examples in 1 units, about" in done.stdout and "the whole grid takes about" in done.stdout
    assert "no example failed, nothing to run" in done.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """here(CTX=...) sets the user's variables in this process, PROFILE=smoke and a store that is not there yet."""

    def chosen(**variables: str) -> Settings:
        for name, value in ({"PROFILE": "smoke", "STORE": str(tmp_path / "store")} | variables).items():
            monkeypatch.setenv(name, value)
        return settings()

    return chosen


def test_failed_examples_are_done_once_more_and_nothing_else_is(here, monkeypatch, capsys) -> None:
    """A unit whose example failed for a reason that is gone, and another that was never begun."""
    monkeypatch.setattr(retry_failed, "accept", lambda *_: SimpleNamespace(grids={grid_digest(load(), "tasks")}))
    chosen = here(ARGS=DEVELOPMENT)
    plan, store = stored_plan(chosen, load(), "tasks").plan, Store(chosen.store)
    first, second = plan.units
    attempt = store.attempt(first, plan.design, {"host": "planted"})
    for example in attempt.missing:
        attempt.fail(example, "RuntimeError: out of memory", 1.0)
    attempt.publish()
    here(ARGS="", PROFILE="laptop")
    assert retry_failed.main([]) == 0 and "no plan of these settings" in capsys.readouterr().err
    here(ARGS="", PROFILE="", WORKERS="1")
    assert retry_failed.main([]) == 0
    assert "4 examples in" in capsys.readouterr().err
    assert store.failing(plan) == [] and store.missing(plan) == [second]
    assert retry_failed.main([]) == 0 and "no example failed, nothing to run" in capsys.readouterr().err


def test_a_plan_that_cannot_be_taken_up_does_not_stop_the_others(here, monkeypatch, capsys) -> None:
    monkeypatch.setattr(retry_failed, "accept", lambda *_: SimpleNamespace(grids={grid_digest(load(), "tasks")}))
    for args in (DEVELOPMENT, f"{DEVELOPMENT} tasks.delta=0.1"):
        stored_plan(here(ARGS=args), load(), "tasks")
    here(ARGS="")
    taken = []

    def compute(mine: Settings, *_: object, retry_only: bool) -> int:
        taken.append((mine.args, retry_only))
        raise UserError("the folder of DATA= has gone")

    monkeypatch.setattr(retry_failed, "compute", compute)
    assert retry_failed.main([]) == 2 and capsys.readouterr().err.count("error: the folder of DATA= has gone") == 2
    assert {args[-1] for args, retry_only in taken if retry_only} == {shlex.split(DEVELOPMENT)[-1], "tasks.delta=0.1"}


BAD = [
    ({"CTX": "5000"}, "4096 positions"),
    ({"CTX": "64"}, "too few"),
    ({"ARGS": "tasks.arms=[best]"}, "arm 'best': unknown"),
    ({"ARGS": "tasks.documents=0"}, "at least 1"),
    ({"ARGS": f"tasks.documents={10**9}"}, "sentences, expected at most so many"),
    ({"ARGS": "tasks.dtype=float8"}, "float32"),
    ({"ARGS": "tasks.longbench.sample=0"}, "at least 1"),
    ({"ARGS": "tasks.dokuments=2"}, "dokuments"),
    ({"ARGS": "policies.full=1"}, "policies.full"),
    ({"ARGS": "policies.full.design=topk"}, "design none"),
    ({"DATA": "/nowhere"}, "no such folder"),
    ({"PROFILE": "paper"}, "expected DATA="),
    ({"MODEL": "no/such/model"}, "expected a .gguf file"),
]


@pytest.mark.parametrize(("variables", "says"), BAD, ids=[f"{k}={v}" for given, _ in BAD for k, v in given.items()])
def test_bad_input_is_refused_before_anything_is_written(here, variables: dict, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        stored_plan(chosen := here(**variables), load(), "tasks")
    assert "\n" not in str(error.value) and not chosen.store.exists()


def test_a_grid_without_longbench_rows_refuses_data(here, tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has no LongBench rows here"):
        stored_plan(here(DATA=str(tmp_path)), load(), "synthetic")


def test_a_stratum_too_small_for_a_claim_is_named_before_it_is_run(here, tmp_path: Path, monkeypatch, capsys) -> None:
    row = {"context": "The quick brown fox. " * 9, "input": "What is it?\n", "answers": ["fox"], "all_classes": None}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row))

    def begin(*_: object) -> None:
        said = capsys.readouterr().err
        assert (
            "note: claim-5: 256 tokens: descriptive: 2 answers planned, not 30 of each of two classes; without" in said
        )
        assert "note: claim-7: 256 tokens: descriptive: 3 answers" in said and "claim-3" not in said
        raise InterruptedError

    monkeypatch.setattr("runs.execute.run", begin)
    with pytest.raises(InterruptedError):
        compute(here(DATA=str(tmp_path)), load(), "tasks", {grid_digest(load(), "tasks")})


def test_ctx_is_of_the_further_stratum_where_there_is_one(here, tmp_path: Path) -> None:
    (config,) = configs(here(CTX="700"), load(), "tasks")
    assert (config.tasks.ctx_tokens, config.tasks.longbench.ctx_tokens) == ((700,), (256,))
    (config,) = configs(here(CTX="700", DATA=str(tmp_path)), load(), "tasks")
    assert (config.tasks.ctx_tokens, config.tasks.longbench.ctx_tokens) == ((512,), (700,))
    (config,) = configs(here(CTX="700", DATA=str(tmp_path)), load(), "synthetic")
    assert config.synthetic.ctx_tokens == (700,)


def test_a_mistake_is_one_line_and_exit_2(tmp_path: Path, command) -> None:
    done = command("claim", "claim-3", STORE=str(tmp_path / "store"), CTX="5000")
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "store").exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_registered_manifests_are_what_the_generator_makes(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(manifest, "FOLDER", tmp_path)
    monkeypatch.setattr(manifest, "ROOT", tmp_path)
    assert manifest.main(["planted_facts", "synthetic"]) == 0
    for name, grid in (("planted_facts", "tasks"), ("synthetic", "synthetic")):
        made = json.loads((tmp_path / f"{name}.json").read_text())
        sizes = load().grids[grid].profiles["laptop"].sizes
        assert len(set(made["documents"])) == sizes.get("tasks", 1) * sizes["documents"]
        registered = json.loads((ROOT / "prereg" / "manifests" / f"{name}.json").read_text())
        same = [made[key] == registered[key] for key in ("tokenizer", "ctx_tokens", "seed", "tasks")]
        assert (all(same) and made["documents"] == registered["documents"]) or made["python"] != registered["python"]
