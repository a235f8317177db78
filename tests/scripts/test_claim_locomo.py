"""make extension-3 as a user types it: the calibration it lacks, LoCoMo's answers, shared rows, every kind of bad input."""

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
from tiny_locomo import conversation, write

from scripts import manifest


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Callable[..., Done]:
    """command("claim", "extension-3", ...) is python -m scripts.claim extension-3, in a copy that is frozen."""
    copy = checkout(tmp_path_factory.mktemp("checkout"))
    done = typed(copy, "freeze", STORE=str(copy / "none"))
    assert done.returncode == 0, done.stderr
    return partial(typed, copy)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Two made-up conversations of a length that the tiny model has room for."""
    return write(tmp_path_factory.mktemp("locomo"), *(conversation(i, sessions=6, messages=8) for i in range(2)))


@pytest.fixture(scope="module")
def store(tmp_path_factory, command, data: str) -> str:
    """A store in which extension-3 was run in the smoke profile."""
    where = str(tmp_path_factory.mktemp("store"))
    done = command("claim", "extension-3", "--json", STORE=where, DATA=data)
    assert done.returncode == 0, done.stderr
    calibrated, own = [line for line in done.stderr.splitlines() if " cells done, " in line]
    assert calibrated.startswith("4 conversations in") and "8 of 56 cells done, 0 failed" in calibrated
    assert own.startswith("2 conversations in") and "16 of 16 cells done, 0 failed" in own
    result = json.loads(done.stdout)
    assert result["verdict"] == "NOT_EVALUATED" and (result["rows"], result["missing"], result["failed"]) == (16, 0, 0)
    assert result["population"] == "tiny random Llama; LoCoMo"
    reasons = " ".join(result["reasons"])
    assert "random weights" in reasons and "4 calibration dialogues of 100" in reasons
    assert result["beside"]["tiny random Llama"]["evidence"] == {"fed": 4, "left out": 0, "unknown": 0}
    return where


def test_again_nothing_is_computed_and_nothing_needs_torch(store: str, data: str, command) -> None:
    done = command("claim", "extension-3", STORE=store, DATA=data)
    assert done.returncode == 0
    assert "assistant_calibration is stored, nothing to run" in done.stderr
    assert "all 16 cells are stored, nothing to run" in done.stderr
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'nltk'): sys.modules[name] = None\n"
        "from scripts import claim, judge, status, plan\n"
        "sys.exit(max(claim.main(['extension-3']), judge.main(['extension-3']), status.main([]), plan.main([])))\n"
    )
    (folder,) = command.args
    command_line, given = [sys.executable, "-c", code], {"PROFILE": "smoke", "STORE": store, "DATA": data}
    again = subprocess.run(
        command_line, cwd=folder, env=os.environ | given, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr


def test_extension_2_goes_on_from_the_calibration_dialogues(store: str, command) -> None:
    done = command("claim", "extension-2", "--json", STORE=store)
    assert done.returncode == 0, done.stderr
    assert "2 conversations in" in done.stderr and "56 of 56 cells done, 0 failed" in done.stderr


def test_the_same_file_typed_as_its_folder_is_another_plan_of_the_same_rows(store: str, data: str, command) -> None:
    done = command("claim", "extension-3", STORE=store, DATA=str(Path(data).parent))
    assert done.returncode == 0 and "all 16 cells are stored, nothing to run" in done.stderr
    assert f"make extension-3 DATA={Path(data).parent} the same on a real model" in " ".join(done.stdout.split())
    assert (
        json.loads(command("judge", "extension-3", "--json", STORE=store).stdout)["rows"] == 16
    )  # of either: the same
    every = command("judge_all", STORE=store).stdout.splitlines()
    assert not next(line for line in every if line.startswith("extension-3")).endswith("no rows")


def test_one_row_is_explained_with_the_command_that_makes_it(store: str, data: str, command) -> None:
    rows = command("claim", "extension-3", STORE=store, DATA=data).stdout
    cell = rows.split("make explain CELL=")[1].split()[0]
    done = command("explain", cell, STORE=store)
    assert done.returncode == 0 and '"locomo locomo/1"' in done.stdout and "\n    nltk " in done.stdout
    assert f"make extension-3 PROFILE=smoke DATA={data} STORE=an_empty_folder" in done.stdout


BAD = [
    ({}, "grid locomo: expected DATA=, LoCoMo's JSON file or the folder it is in"),
    ({"DATA": "/nowhere/locomo10.json"}, "DATA=/nowhere/locomo10.json: no such file"),
    ({"DATA": "longbench"}, "qasper.json, conversation 1: key 'sample_id' is missing"),
    ({"CTX": "5000"}, "context limit 5000: tiny random Llama has 4096 positions"),
    ({"CTX": "300"}, "LoCoMo conversation talk-0: its last message has"),
    ({"ARGS": "locomo.questions=0"}, "locomo.questions"),
    ({"ARGS": "locomo.systems=[topk]"}, "poisson beside it"),
    ({"ARGS": "locomo.kwestions=2"}, "kwestions"),
    ({"MODEL": "/nowhere.gguf"}, "expected a .gguf file"),
]


@pytest.mark.parametrize(("variables", "said"), BAD, ids=[said for _, said in BAD])
def test_a_mistake_is_one_line_and_code_2_before_anything_is_computed(
    tmp_path: Path, data: str, command, variables: dict[str, str], said: str
) -> None:
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench" / "qasper.json").write_text('[{"context": "a", "input": "b"}]')
    if variables.get("DATA") == "longbench":
        variables = {"DATA": str(tmp_path / "longbench")}
    given = variables if not variables or "DATA" in variables else {"DATA": data} | variables
    done = command("claim", "extension-3", STORE=str(tmp_path / "store"), **given)
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()


def test_the_manifest_is_that_of_the_published_file(shared_data: Callable[[str], Path], monkeypatch) -> None:
    monkeypatch.setenv("DATA", str(shared_data("locomo")))
    registered = json.loads((manifest.FOLDER / "locomo.json").read_text())
    assert manifest.manifest_of("locomo") == registered and len(registered["documents"]) == 10
