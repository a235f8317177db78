"""Every config file composes; what Hydra or the dataclasses refuse is one line that names it; nothing stays behind."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from cert.policy import CHOICES as POLICY_CHOICES
from cert.policy import PRESETS, Policy
from runs.config import CHOICES, RunConfig
from runs.errors import UserError
from runs.registry import load
from scripts.compose import CONFIGS, compose, expand

SOURCE = {"model.source": "/some/model.gguf"}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def role(policy: str) -> str:
    """The arm that a preset can be in the replay."""
    preset = Policy.preset(policy, **({} if policy == "full" else {"budget": 0.25}))
    if preset.design == "topk":
        return "topk"
    return "uniform" if preset.score == "constant" else "certified"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        *([f"{group}={option}"] for group in ("model", "task", "profile", "launcher") for option in options(group)),
        *([f"policy@policies.{role(name)}={name}"] for name in options("policy") if name != "full"),
        *([x for x in line if not x.startswith("grid=")] for sweep in options("sweep") for line in expand(sweep)),
    ],
    ids=" ".join,
)
def test_every_file_of_every_group_composes(overrides: list[str]) -> None:
    config = compose(overrides, SOURCE if "model=custom" in overrides else None)
    assert isinstance(config, RunConfig)
    assert not GlobalHydra.instance().is_initialized()
    json.dumps(asdict(config))  # plain data, ready to be hashed


def test_every_group_is_composed_above() -> None:
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    assert groups == {"model", "task", "profile", "launcher", "policy", "sweep"}


def test_every_file_says_first_which_command_runs_it() -> None:
    for path in CONFIGS.rglob("*.yaml"):
        first = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
        assert first.startswith(("# make ", "# python: ", "# python -m ")), path


def test_policy_files_are_the_presets() -> None:
    assert set(options("policy")) == set(PRESETS)
    assert POLICY_CHOICES == CHOICES
    for name in set(PRESETS) - {"full"}:
        slot = role(name)
        arms = dict(
            zip(("certified", "topk", "uniform"), compose([f"policy@policies.{slot}={name}"]).policies, strict=True)
        )
        fields = asdict(arms[slot])
        assert fields.pop("name") == name
        assert Policy(**fields, budget=0.25) == Policy.preset(name, budget=0.25)


@pytest.mark.parametrize("profile", ["smoke", "laptop", "desktop", "paper"])
def test_profiles_have_the_registered_sizes(profile: str) -> None:
    registered = load().grids["replay"].profiles[profile]
    for model in registered.models:
        config = compose([f"profile={profile}", f"model={model}"])
        assert config.profile == profile
        replay = config.replay
        assert registered.sizes == {
            "models": len(registered.models),
            "budgets": len(replay.budgets),
            **{name: getattr(replay, name) for name in ("documents", "layers", "heads", "steps")},
        }
        assert (replay.budgets, replay.seed, replay.delta, replay.kappa) == ((0.125, 0.25, 0.5), 1, 0.05, 0.25)
        used = [f"profile/{profile}", f"model/{model}", f"task/{config.task.name}"]
        used += [f"policy/{policy.name}" for policy in config.policies]
        assert {f"configs/{name}.yaml" for name in used} <= {path.partition("#")[0] for path in registered.configs}
    first = compose([f"profile={profile}", f"model={registered.models[0]}"])
    assert compose([f"profile={profile}"]) == first


@pytest.mark.parametrize("profile", ["smoke", "laptop", "desktop", "paper"])
@pytest.mark.parametrize("grid", ["tasks", "synthetic"])
def test_task_grids_have_the_registered_sizes(grid: str, profile: str) -> None:
    registered = load().grids[grid].profiles[profile]
    config = compose([f"profile={profile}", f"model={registered.models[0]}"])
    block = getattr(config, grid)
    longbench = "longbench" in block.tasks
    sizes = {"models": len(registered.models), "lengths": len(block.ctx_tokens), "arms": len(block.arms)}
    sizes |= {"tasks": 16 if longbench else len(block.tasks)}
    sizes |= {"examples": block.documents} if longbench else {"documents": block.documents}
    sizes |= {"requests": 6} if block.tasks == ("planted_facts",) else {}
    assert {name: size for name, size in sizes.items() if size > 1} == {
        name: size for name, size in registered.sizes.items() if size > 1
    }
    assert (block.seed, block.text_seed, block.delta) == (1, 1, 0.05)
    used = [f"profile/{profile}.yaml#{grid}", *(f"model/{model}.yaml" for model in registered.models)]
    used += [f"policy/{policy.name}.yaml" for policy in (*config.policies[:2], config.full)]
    assert {f"configs/{name}" for name in used} == set(registered.configs)


@pytest.mark.parametrize("profile", ["smoke", "laptop", "desktop", "paper"])
def test_the_arms_are_the_registered_ones(profile: str) -> None:
    config = compose([f"profile={profile}"])
    full, second, *rest = config.tasks.arms
    assert (full, second) == ("full", "full again" if profile == "paper" else "poisson agnostic 0.25 draw 2")
    aware = [f"{policy} aware {budget}" for policy in ("topk", "poisson") for budget in (0.25, 0.5)]
    agnostic = [f"{policy} agnostic {budget}" for policy in ("topk", "poisson") for budget in (0.1, 0.25, 0.5)]
    assert rest == aware + agnostic
    assert config.synthetic.arms == ("full", *(f"poisson agnostic {budget}" for budget in (0.1, 0.25, 0.5)))


def test_the_sweep_of_the_paper_runs_the_registered_models() -> None:
    models = load().grids["replay"].profiles["paper"].models
    assert expand("replay_paper") == [["profile=paper", f"model={model}"] for model in models]
    with pytest.raises(UserError, match="replay_paper"):
        expand("nope")


def test_hub_models_are_pinned_by_commit() -> None:
    for name in options("model"):
        source = compose([f"model={name}"], SOURCE if name == "custom" else None).model.source
        assert source.startswith(("/", "pypi:", "tiny")) or len(source.partition("@")[2]) == 40


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["replay.budgets=[-0.1]"], ["replay.budgets", "-0.1", "above 0"]),
        (["replay.budgets=[1.5]"], ["replay.budgets", "1.5", "at most 1"]),
        (["replay.budgets=[nan]"], ["replay.budgets", "nan"]),
        (["replay.budgets=0.5"], ["replay.budgets", "list"]),
        (["replay.budgets=[]"], ["replay.budgets"]),
        (["replay.documents=0"], ["replay.documents", "at least 1"]),
        (["replay.documents=1.5"], ["replay.documents", "whole number"]),
        (["replay.documents=true"], ["replay.documents", "whole number"]),
        (["replay.documents=many"], ["replay.documents", "many", "whole number"]),
        (["replay.documents=1,2"], ["replay.documents", "1,2"]),
        (["replay=null"], ["replay", "mapping"]),
        (["+extra=1"], ["extra", "unknown"]),
        (["+replay.extra=1"], ["replay", "extra", "unknown"]),
        (["++replay.extra=1"], ["replay", "extra", "unknown"]),
        (["replya.x=1"], ["replya.x"]),
        (["~replay.seed"], ["replay", "seed", "missing"]),
        (["~policies.topk"], ["policies", "topk"]),
        (["~model"], ["model", "missing"]),
        (["model=nope"], ["model", "nope", "smollm2", "tiny"]),
        (["model=smolm2"], ["did you mean smollm2"]),
        (["profile=nope"], ["profile", "nope", "laptop"]),
        (["policy@policies.topk=nope"], ["policy", "nope", "snapkv"]),
        (["policy@policies.topk=certified"], ["policies.topk", "design topk"]),
        (["policies.certified.score=nope"], ["policies.certified.score", "nope", "snapkv"]),
        (["model=custom"], ["model.source", "MODEL="]),
        (["model.source=3"], ["model.source", "text"]),
        (["model=${oc.env:HOME}"], ["model", "no such option"]),
        (["model.name=${nowhere}"], ["model.name", "'nowhere' not found"]),
        (["replay.seed=${oc.env:NO_SUCH_VARIABLE}"], ["replay.seed", "NO_SUCH_VARIABLE"]),
        (["replay.seed=${profile}"], ["replay.seed", "whole number"]),
        (["hydra.run.dir=/tmp/x"], ["hydra.run.dir"]),
        (["replay.seed"], ["replay.seed"]),
        (["replay.budgets=[0.5"], ["replay.budgets=[0.5"]),
        (["--help"], ["--help"]),
        (["=3"], ["=3"]),
        ([""], ["key=value"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_does_not_fit_is_one_line_that_names_it(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        compose(overrides)
    message = str(error.value)
    assert "\n" not in message and "hydra.cc" not in message
    assert all(word in message for word in words), message
    assert not GlobalHydra.instance().is_initialized()
    assert compose().replay.documents == 56  # and the next one is not affected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: [unclosed", 'site.yaml", line 2'),
        ("name: site\n\tpartition: x", 'site.yaml", line 2'),
        ("name: site\nname: site", "duplicate key name"),
        ("name: site\npartition: a\0b", "unacceptable character"),
        ("name: site\n---\nname: site", "single document"),
        ("name: !!python/object/apply:os.system ['touch pwned']", "could not determine a constructor"),
        ("name: " + "[" * 3000, "recursion"),
        ("name: site\npartition: ${nope", "'${nope'"),
        ("name: site\npartition: ${nope}", "'nope' not found"),
        ("name: !!bool x", "expected YAML"),
        ("name: !!timestamp x", "expected YAML"),
        ("name: site\nmodules: !!set {a, b}", "not a supported"),
        ("name: site\n~: x", "key type"),
        ("", "config.launcher: key 'name' is missing"),
        ("- a", "where a mapping was expected"),
        ("name: site\npartition: no", "False where text was expected"),
        ("name: site\ncontainer: apptainer exec x", "where a list was expected"),
        ("name: site\nmodules: ['x; touch pwned']", "expected names such as cuda/12.4"),
    ],
)
def test_a_site_file_that_does_not_fit_is_one_line_too(tmp_path: Path, monkeypatch, text: str, says: str) -> None:
    monkeypatch.setattr("scripts.compose.CONFIGS", shutil.copytree(CONFIGS, tmp_path / "configs"))
    (tmp_path / "configs" / "launcher" / "site.yaml").write_text(text + "\n")
    with pytest.raises(UserError) as error:
        compose(["launcher=site"])
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not GlobalHydra.instance().is_initialized() and not Path("pwned").exists()


def test_a_site_file_that_may_not_be_read_is_one_line_too(tmp_path: Path, monkeypatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "site.yaml")

    monkeypatch.setattr("scripts.compose.hydra_compose", denied)
    with pytest.raises(UserError, match=r"Permission denied: 'site.yaml'"):
        compose(["launcher=site"])


@pytest.mark.parametrize(
    "text",
    [
        "/a b/c'd\"e;$(touch x)`y`",
        "${oc.env:HOME}",
        "${",
        "\\${x}",
        "a\\",
        "{a: 1}",
        "x=y,z",
        "null",
        "???",
        "a\nb",
        "漢",
    ],
)
def test_literal_values_stay_as_they_are(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["model=custom", "task=longbench"], {"model.source": text, "task.source": text})
    assert (config.model.source, config.task.source) == (text, text)
    assert not list(tmp_path.iterdir())  # no output folder, nothing executed


def test_interpolations_are_text() -> None:
    assert compose(["model.name=${oc.env:HOME}"]).model.name == "${oc.env:HOME}"
