"""The commands as a user types them: real processes, the smoke grid, every kind of bad input."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkout import Done, checkout
from checkout import command as typed
from tiny_folder import tiny_folder


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    return checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def command(copy: Path) -> Callable[..., Done]:
    """command("claim", "claim-1", MODEL=...) is python -m scripts.claim claim-1 with the user's variables."""
    return partial(typed, copy)


@pytest.fixture(scope="module")
def store(tmp_path_factory, command) -> str:
    """A store in which claim-1 was run in the smoke profile."""
    where = str(tmp_path_factory.mktemp("store"))
    done = command("claim", "claim-1", "--json", STORE=where)
    assert done.returncode == 0, done.stderr
    assert "4 documents in" in done.stderr and "96 of 96 cells done, 0 failed" in done.stderr
    return where


def test_the_smoke_profile_runs_and_is_never_evidence(store: str, command, copy) -> None:
    done = command("judge", "claim-1", STORE=store)
    assert done.returncode == 0 and "NOT_EVALUATED on smoke: tiny random Llama" in done.stdout
    assert "the smoke profile is never evidence" in done.stdout
    result = json.loads(command("judge", "claim-1", "--json", STORE=store).stdout)
    assert result["verdict"] == "NOT_EVALUATED" and (result["rows"], result["missing"], result["failed"]) == (96, 0, 0)
    assert [s["name"] for s in result["strata"]] == ["budget 12.5 %", "budget 25 %", "budget 50 %"]
    assert all(s["n"] == 32 and s["clusters"] == 4 for s in result["strata"])
    assert json.loads((copy / "analysis/out/claim-1.json").read_text()) == result


@pytest.mark.parametrize("claim", ["claim-2", "extension-6"])
def test_claims_on_one_grid_share_their_rows(store: str, claim: str, command) -> None:
    done = command("claim", claim, STORE=store)
    assert done.returncode == 0 and "nothing to run" in done.stderr


@pytest.mark.parametrize("claim", ["extension-2", "extension-3"])
def test_claims_without_rows_say_what_is_missing(store: str, claim: str, command) -> None:
    done = command("judge", claim, "--json", STORE=store, PROFILE="laptop")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["verdict"] == "NOT_EVALUATED"
    assert result["missing"] > 0 and result["rows"] == 0 and result["reasons"]


def test_a_finished_claim_is_judged_without_torch(store: str, copy) -> None:
    """With torch and transformers absent, both the second run and the judge still work."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'datasets'): sys.modules[name] = None\n"
        "from scripts import claim, judge, status, plan\n"
        "sys.exit(claim.main(['claim-1']) + judge.main(['claim-2']) + status.main([]) + plan.main([]))\n"
    )
    environment = os.environ | {"PROFILE": "smoke", "STORE": store}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_another_model_makes_other_rows_and_is_named(store: str, tmp_path: Path, command, copy) -> None:
    folder = tiny_folder(tmp_path / "small model; touch pwned")
    done = command("claim", "claim-1", "--json", STORE=store, MODEL=str(folder), ARGS="replay.documents=2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["population"].startswith("small model; touch pwned")
    assert result["population_notes"] and result["verdict"] == "NOT_EVALUATED"
    assert json.loads(command("judge", "claim-1", "--json", STORE=store).stdout)["rows"] == 96  # the first is untouched
    assert not (copy / "pwned").exists()


def test_data_gives_longbench_documents(store: str, tmp_path: Path, command) -> None:
    rows = [json.dumps({"context": f"{i} " + "The quick brown fox. " * 20, "answers": ["x"]}) for i in range(5)]
    (tmp_path / "qasper.jsonl").write_text("\n".join(rows))
    done = command("claim", "claim-1", "--json", STORE=store, DATA=str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["population"] == "tiny random Llama; LongBench" and result["rows"] == 96
    assert "not the registered population" in result["population_notes"][0]


BAD = [
    ("claim", {"MODEL": "no/such/model"}, "expected a .gguf file"),
    ("claim", {"MODEL": "some/model"}, "must be pinned"),
    ("claim", {"MODEL": "some/model@" + 40 * "0"}, "cannot load its config"),
    ("claim", {"MODEL": "x'; touch pwned; echo '"}, "expected a .gguf file"),
    ("claim", {"MODEL": "$(touch pwned)"}, "expected a .gguf file"),
    ("claim", {"MODEL": '"quoted"'}, "expected a .gguf file"),
    ("claim", {"DATA": "/nowhere"}, "no such folder"),
    ("claim", {"PROFILE": "huge"}, "expected one of smoke, laptop, desktop, paper"),
    ("claim", {"WORKERS": "0"}, "whole number of at least 1"),
    ("claim", {"WORKERS": "many"}, "whole number of at least 1"),
    ("claim", {"CTX": "-5"}, "whole number of at least 1"),
    ("claim", {"CTX": "5000"}, "4096 positions"),
    ("claim", {"ARGS": "replay.budgets=[-0.1]"}, "fractions above 0 and at most 1"),
    ("claim", {"ARGS": "replay.budgets=[0.25,1.5]"}, "fractions above 0 and at most 1"),
    ("claim", {"ARGS": "replay.documents=0"}, "at least 1"),
    ("claim", {"ARGS": "replay.dokuments=3"}, "dokuments"),
    ("claim", {"ARGS": "+extra=1"}, "extra"),
    ("claim", {"ARGS": "model=nope"}, "no such option"),
    ("claim", {"ARGS": "'unbalanced"}, "ARGS="),
    ("claim", {"ARGS": "replay.documents=5000"}, "documents of 128 tokens"),
    ("claim", {"PROFILE": "paper"}, "expected DATA="),
    ("claim", {"WORKERS": "9" * 5000}, "whole number of at least 1"),
    ("claim", {"MODEL": "~nosuchuser/x"}, "no such file or folder"),
    ("claim", {"DATA": "~nosuchuser/x"}, "no such file or folder"),
    ("claim", {"MODEL": "x" * 5000}, "no such file or folder"),
    ("claim", {"ARGS": "policies.uniform.compensation=merge"}, "expected hajek"),
    ("claim", {"ARGS": "policies.certified.score=h2o"}, "policies.certified.score"),
    ("claim", {"ARGS": "policies.certified.certain_share=1.0 policies.topk.certain_share=1.0"}, "less than 1"),
    ("claim", {"ARGS": "policies.topk.pool=7"}, "as policies.certified"),
    ("judge", {"PROFILE": "huge"}, "expected one of"),
]


@pytest.mark.parametrize(
    ("module", "variables", "says"),
    BAD,
    ids=[f"{module}-{next(iter(given.values()))[:40]}" for module, given, _ in BAD],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, module: str, variables: dict, says: str, command, copy
) -> None:
    done = command(module, "claim-1", STORE=str(tmp_path / "store"), **variables)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert says in done.stderr
    assert not (tmp_path / "store").exists() and not (copy / "pwned").exists()


def test_a_model_whose_files_lack_weights_is_refused(tmp_path: Path, command) -> None:
    folder = tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    done = command("claim", "claim-1", STORE=str(tmp_path / "store"), MODEL=str(folder))
    assert done.returncode == 2 and "weights of its config" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "store" / "units").glob("*.parquet"))


def test_a_typed_store_that_is_not_there_is_refused_by_the_judge(tmp_path: Path, command) -> None:
    done = command("judge", "claim-1", STORE=str(tmp_path / "nowhere"))
    assert done.returncode == 2 and "no such folder" in done.stderr


def test_a_broken_data_line_is_named_by_number(tmp_path: Path, command) -> None:
    (tmp_path / "trec.jsonl").write_text('{"context": "a"}\n{"context": \n')
    done = command("claim", "claim-1", STORE=str(tmp_path / "store"), DATA=str(tmp_path))
    assert done.returncode == 2 and "trec.jsonl, line 2: broken JSON" in done.stderr


@pytest.mark.parametrize("claim", ["claim-9", "claim", "extension-0", "../claim-1", ""])
def test_unknown_claims_are_refused(claim: str, command) -> None:
    done = command("claim", claim)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no registered claim" in done.stderr


def test_a_corrupt_unit_is_named(store: str, tmp_path: Path, command) -> None:
    broken = shutil.copytree(store, tmp_path / "store")
    for unit in (broken / "units").glob("*.parquet"):
        unit.write_bytes(unit.read_bytes()[:100])
    for module in ("judge", "claim"):
        done = command(module, "claim-1", STORE=str(broken))
        assert done.returncode == 2 and ".parquet" in done.stderr and done.stderr.count("\n") == 1
