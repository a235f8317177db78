"""The thirty-turn assistant as a user types it: the smoke grid to a verdict, status, plan, one row explained, CTX=."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkout import Done, checkout
from checkout import command as typed
from conftest import ROOT

from runs.registry import load
from scripts import manifest
from scripts._cli import settings
from scripts._grid import configs
from scripts.compose import compose

CELLS = 2 * 6 * 4 + 4 * 2


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Callable[..., Done]:
    """command("claim", "extension-2", ...) is python -m scripts.claim extension-2, in a copy that is frozen."""
    copy = checkout(tmp_path_factory.mktemp("checkout"))
    done = typed(copy, "freeze", STORE=str(copy / "none"))
    assert done.returncode == 0, done.stderr
    return partial(typed, copy, STORE=str(copy / "rows"), WORKERS="1")


@pytest.fixture(scope="module")
def result(command) -> dict:
    done = command("claim", "extension-2", "--json")
    assert done.returncode == 0, done.stderr
    assert "6 conversations in" in done.stderr and f"{CELLS} of {CELLS} cells done, 0 failed" in done.stderr
    return json.loads(done.stdout)


def test_the_smoke_grid_runs_to_a_verdict_that_is_no_evidence(result) -> None:
    assert result["verdict"] == "NOT_EVALUATED" and (result["rows"], result["planned"]) == (CELLS, CELLS)
    assert result["population"].startswith("tiny random Llama; dialogues of 30 turns")
    (stratum,) = result["strata"]
    assert (stratum["n"], stratum["clusters"]) == (12, 2)
    assert any("4 calibration dialogues of 100" in reason for reason in result["reasons"])
    beside = result["beside"]["tiny random Llama"]
    assert set(beside["recall"]) == set(load().grids["assistant"].settings["systems"])
    full, kept = beside["cache_bytes"]["full"], beside["cache_bytes"]["poisson"]
    assert kept < 0.2 * full and 3100 <= beside["dialogue_tokens"] <= 3200


def test_a_finished_grid_is_judged_again_drawn_explained_and_needs_no_torch(command, result) -> None:
    (folder,) = command.args
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'datasets'): sys.modules[name] = None\n"
        "from scripts import claim, judge, status, plan, retry_failed\n"
        "codes = [claim.main(['extension-2']), judge.main(['extension-2']), status.main([]), plan.main([])]\n"
        "sys.exit(max(*codes, retry_failed.main([])))\n"
    )
    environment = os.environ | {"PROFILE": "smoke", "STORE": command.keywords["STORE"]}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"all {CELLS} cells are stored, nothing to run" in done.stderr
    assert f"{CELLS} done, 0 missing, 0 failed of {CELLS} cells" in done.stdout and "figure" in done.stdout
    sizes = "2 dialogues x 6 questions x 4 systems + 1 models x 4 dialogues x 1 questions x 2 systems"
    assert sizes in done.stdout and "6 examples in 2 units, about" in done.stdout
    assert max(map(len, done.stdout.split("extension-2  Thirty-turn assistant")[1].splitlines())) <= 100
    cell = next(line.split("CELL=")[1] for line in done.stdout.splitlines() if "CELL=" in line)
    explained = command("explain", cell)
    assert explained.returncode == 0 and '"assistant"' in explained.stdout, explained.stderr


def test_ctx_is_the_length_of_a_history_and_data_is_refused(command, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PROFILE", "laptop")
    monkeypatch.setenv("CTX", "1500")
    (config,) = configs(settings(), load(), "assistant")
    assert config.assistant.ctx_tokens == 1500
    for variables in ({"CTX": "100"}, {"DATA": str(tmp_path)}):
        done = command("claim", "extension-2", **variables)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("profile", ["smoke", "laptop", "desktop", "paper"])
def test_profiles_have_the_registered_sizes(profile: str) -> None:
    registered = load().grids["assistant"].profiles[profile]
    config = compose([f"profile={profile}", f"model={registered.models[0]}"])
    block, models = config.assistant, len(registered.models)
    assert registered.sizes == {
        "models": models, "dialogues": block.dialogues, "questions": block.facts, "systems": len(block.systems)
    }  # fmt: skip
    assert registered.calibration == {
        "models": models, "dialogues": block.calibration, "questions": 1, "systems": len(block.calibration_systems)
    }  # fmt: skip
    assert (block.budget, block.audit, block.seed, block.text_seed, block.delta) == (0.1, 0.5, 1, 1, 0.05)
    params = load().claim("extension-2").params
    assert profile == "smoke" or block.calibration == params["calibration"] == 100
    used = [f"profile/{profile}.yaml#assistant", *(f"model/{model}.yaml" for model in registered.models)]
    used += [f"policy/{policy.name}.yaml" for policy in (*config.policies, config.full)]
    assert {f"configs/{name}" for name in used} == set(registered.configs)


def test_the_registered_manifest_is_what_the_generator_makes(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(manifest, "FOLDER", tmp_path)
    monkeypatch.setattr(manifest, "ROOT", tmp_path)
    assert manifest.main(["assistant"]) == 0
    made = json.loads((tmp_path / "assistant.json").read_text())
    registered = json.loads((ROOT / "prereg" / "manifests" / "assistant.json").read_text())
    assert len(set(made["documents"])) == 130
    assert made == registered or made["python"] != registered["python"]
