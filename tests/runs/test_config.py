"""Configuration dataclasses: whatever is out of range or of another type is refused, and the line names it."""

from dataclasses import dataclass, field, replace

import pytest

from runs.build import build
from runs.config import LauncherConfig, ModelConfig, PolicyConfig, ReplayConfig, RunConfig, TaskConfig
from runs.config_conversations import AssistantConfig, LocomoConfig
from runs.config_tasks import LongBenchConfig, TasksConfig
from runs.errors import UserError

CERTIFIED = PolicyConfig("certified", "snapkv", "poisson", "uniform", "hajek", 1, False, 32, 4, 32, 0.25, 0.1)
TOPK = replace(CERTIFIED, name="topk", design="topk", compensation="none")
UNIFORM = replace(CERTIFIED, name="uniform", score="constant", certain_share=0.0)
REPLAY = ReplayConfig((0.125, 0.25, 0.5), 56, 1024, 4, 3, 6, 0, 0.05, 0.25)
FULL = replace(CERTIFIED, name="full", score="none", design="none", compensation="none")
LONGBENCH = LongBenchConfig((2048,), 32)
TASKS = TasksConfig(("planted_facts",), 40, (512,), ("full", "topk aware 0.25"), 1, 1, 0.05, "float32", LONGBENCH)
SERVED = (("full", "topk", "uniform", "poisson"), 0.1, 0.5, 1, 0.05, "float32")
ASSISTANT = AssistantConfig(*SERVED, 30, 12, 100, ("full", "poisson"), 1200, 1)
LOCOMO = LocomoConfig(*SERVED, 10, 20, 4096, 1)
RUN = RunConfig(
    "laptop",
    ModelConfig("tiny", "tiny"),
    TaskConfig("pydoc_topics", None, "CPython docs"),
    (CERTIFIED, TOPK, UNIFORM),
    REPLAY,
    LauncherConfig("local"),
    FULL,
    TASKS,
    TASKS,
    ASSISTANT,
    LOCOMO,
)


@pytest.mark.parametrize(
    ("whole", "name", "value"),
    [
        *((REPLAY, "budgets", value) for value in ((), (0.0,), (-0.1,), (1.5,), (float("nan"),), (0.5, 0.5))),
        *((REPLAY, name, 0) for name in ("documents", "ctx_tokens", "layers", "heads", "steps")),
        *((REPLAY, "seed", value) for value in (-1, 2**63)),
        *((REPLAY, "delta", value) for value in (0.0, 1.0, float("nan"))),
        *((REPLAY, "kappa", value) for value in (-0.1, float("inf"), float("nan"))),
        *((ASSISTANT, "systems", value) for value in ((), ("full", "full"), ("full", "nope"), ("full", "topk"))),
        *((ASSISTANT, name, value) for name in ("budget", "audit") for value in (0.0, -0.1, 1.5, float("nan"))),
        *((ASSISTANT, "facts", value) for value in (0, 5, 7, 36)),
        *((ASSISTANT, name, 0) for name in ("dialogues", "calibration", "ctx_tokens")),
        *((ASSISTANT, name, -1) for name in ("seed", "text_seed")),
        (ASSISTANT, "calibration_systems", ("h2o",)),
        *((LOCOMO, name, 0) for name in ("conversations", "questions", "ctx_tokens")),
        *((LOCOMO, name, value) for name in ("seed", "text_seed") for value in (-1, 2**63)),
        (LOCOMO, "systems", ("full", "topk")),
        *((CERTIFIED, name, "nope") for name in ("score", "design", "allocation", "compensation")),
        *((CERTIFIED, "pool", value) for value in (0, 2, -1)),
        *((CERTIFIED, name, -1) for name in ("window", "sinks", "recent")),
        (CERTIFIED, "window", 0),
        *((CERTIFIED, name, value) for name in ("certain_share", "floor") for value in (-0.1, 1.1, float("nan"))),
        *((RUN.model, name, " ") for name in ("name", "source")),
        (RUN.task, "name", "poetry"),
        (RUN.launcher, "name", "moon base"),
        (RUN, "profile", "phone"),
        (RUN, "policies", (CERTIFIED, TOPK)),
        (RUN, "full", CERTIFIED),
        *((TASKS, "tasks", value) for value in ((), ("poetry",), ("planted_facts", "planted_facts"))),
        (TASKS, "documents", 0),
        *((TASKS, "ctx_tokens", value) for value in ((), (0,), (512, 512))),
        *((TASKS, "arms", value) for value in ((), ("full", "full"))),
        *((TASKS, name, value) for name in ("seed", "text_seed") for value in (-1, 2**63)),
        *((TASKS, "delta", value) for value in (0.0, 1.0, float("nan"))),
        (TASKS, "dtype", "float8"),
        (TASKS, "tasks", ("longbench",)),
        (LONGBENCH, "ctx_tokens", ()),
        (LONGBENCH, "sample", 0),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(whole: object, name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        replace(whole, **{name: value})


@pytest.mark.parametrize("name", ["topk aware 0", "poisson sometimes 0.25", "best", "topk aware 0.25 draw 2"])
def test_an_arm_that_is_none_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UserError, match=f"arm '{name}'"):
        replace(TASKS, arms=("full", name))


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        ("topk", {"pool": 7}),
        ("topk", {"score": "streaming"}),
        ("topk", {"value_weighted": True}),
        ("topk", {"recent": 31}),
        ("uniform", {"compensation": "none"}),
        ("uniform", {"compensation": "merge"}),
        ("uniform", {"sinks": 5}),
        ("uniform", {"value_weighted": True}),
        ("certified", {"score": "h2o"}),
        ("certified", {"score": "none"}),
        ("certified", {"allocation": "pyramid"}),
        ("certified", {"certain_share": 1.0}),
    ],
)
def test_what_the_replay_would_not_follow_is_refused(role: str, changes: dict[str, object]) -> None:
    arms = dict(zip(("certified", "topk", "uniform"), RUN.policies, strict=True))
    arms[role] = replace(arms[role], **changes)
    RUN.require_replayable()
    with pytest.raises(UserError, match="policies"):
        replace(RUN, policies=tuple(arms.values())).require_replayable()


@pytest.mark.parametrize("value", [(1.0,), (1e-9,), (0.5, 0.25)])
def test_the_ends_of_the_range_are_taken(value: tuple[float, ...]) -> None:
    assert replace(REPLAY, budgets=value).budgets == value


@pytest.mark.parametrize(
    ("policies", "role"),
    [
        ((TOPK, TOPK, UNIFORM), "certified"),
        ((replace(CERTIFIED, compensation="none"), TOPK, UNIFORM), "certified"),
        ((CERTIFIED, CERTIFIED, UNIFORM), "topk"),
        ((CERTIFIED, TOPK, CERTIFIED), "uniform"),
        ((CERTIFIED, TOPK, replace(UNIFORM, design="topk")), "uniform"),
    ],
)
def test_an_arm_in_a_role_it_cannot_play_is_refused(policies: tuple[PolicyConfig, ...], role: str) -> None:
    with pytest.raises(UserError, match=rf"policies\.{role}"):
        replace(RUN, policies=policies)


# ---------------------------------------------------------------- build


@dataclass(frozen=True)
class Inner:
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise UserError(f"n: {self.n}; expected at least 0")


@dataclass(frozen=True)
class Outer:
    x: float
    flag: bool
    inner: Inner
    items: tuple[Inner, ...] = ()
    text: str | None = None
    named: dict[str, float] = field(default_factory=dict)


GOOD = {"x": 1, "flag": True, "inner": {"n": 0}}


def test_build_fills_nested_dataclasses_and_converts_whole_numbers_only() -> None:
    built = build(Outer, {**GOOD, "items": [{"n": 1}, Inner(2)], "named": {"a": 2}}, "here")
    assert built == Outer(1.0, True, Inner(0), (Inner(1), Inner(2)), None, {"a": 2.0})
    assert type(built.x) is type(built.named["a"]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": 1}, "here: unknown key 'y'; expected x, flag, inner, items, text, named"),
        ({"x": "1"}, "here.x: '1' where a number was expected"),
        ({"x": True}, "here.x: True where a number was expected"),
        ({"flag": 1}, "here.flag: 1 where true or false was expected"),
        ({"inner": 3}, "here.inner: 3 where a mapping was expected"),
        ({"inner": {}}, "here.inner: key 'n' is missing"),
        ({"inner": {"n": 1.0}}, "here.inner.n: 1.0 where a whole number was expected"),
        ({"inner": {"n": -1}}, "here.inner.n: -1; expected at least 0"),
        ({"items": {"n": 1}}, "here.items: {'n': 1} where a list was expected"),
        ({"items": [{"n": 1}, {"n": -1}]}, "here.items[1].n: -1; expected at least 0"),
        ({"text": 1}, "here.text: 1 where text was expected"),
        ({"named": {"a": "b"}}, "here.named.a: 'b' where a number was expected"),
        ({"named": {1: 2.0}}, "here.named: {1: 2.0} where a mapping with names as keys was expected"),
    ],
)
def test_build_refuses_and_says_where(change: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        build(Outer, {**GOOD, **change}, "here")
    assert str(error.value) == message


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_build_wants_a_mapping(data: object) -> None:
    with pytest.raises(UserError, match=r"here: .* where a mapping was expected"):
        build(Outer, data, "here")
