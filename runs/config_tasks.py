"""Sizes and constants of a task grid: what the profiles hold in their blocks `tasks` and `synthetic`."""

from dataclasses import dataclass

from runs import arm
from runs.errors import require

GENERATED = ("planted_facts", "single_needle", "multi_key_needle", "key_value_retrieval", "variable_tracking")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class LongBenchConfig:
    """A further stratum, with DATA=. ctx_tokens: limits; sample: rows at each limit, the tasks in turn; null: all."""

    ctx_tokens: tuple[int, ...]
    sample: int | None

    def __post_init__(self) -> None:
        _lengths(self.ctx_tokens)
        require(self.sample is None or self.sample >= 1, "sample", self.sample, "at least 1, or null for all rows")


@dataclass(frozen=True)
class TasksConfig:
    """Size and constants of a task grid.

    tasks: generated ones, or longbench for its 16; documents: of each at each limit; ctx_tokens: limits of a whole
    prompt; arms: by name (runs/arm.py); seed: of the coins; text_seed: of the generator and of the sample; delta: of
    the certificate; dtype: of the model's weights; longbench: what DATA= adds, null where it adds nothing.
    """

    tasks: tuple[str, ...]
    documents: int
    ctx_tokens: tuple[int, ...]
    arms: tuple[str, ...]
    seed: int
    text_seed: int
    delta: float
    dtype: str
    longbench: LongBenchConfig | None

    def __post_init__(self) -> None:
        known = (*GENERATED, "longbench")
        for task in self.tasks:
            require(task in known, "tasks", task, f"one of {', '.join(known)}")
        _distinct("tasks", self.tasks)
        require(self.documents >= 1, "documents", self.documents, "at least 1")
        _lengths(self.ctx_tokens)
        for name in self.arms:
            arm.parse(name)
        _distinct("arms", self.arms)
        for field in ("seed", "text_seed"):
            require(0 <= getattr(self, field) < 2**63, field, getattr(self, field), "a whole number from 0 to 2^63 - 1")
        require(0 < self.delta < 1, "delta", self.delta, "a probability between 0 and 1")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        twice = "longbench" in self.tasks and self.longbench is not None
        require(not twice, "longbench", "a block", "null where tasks has it already")


def _lengths(limits: tuple[int, ...]) -> None:
    for limit in limits:
        require(limit >= 1, "ctx_tokens", limit, "at least 1")
    _distinct("ctx_tokens", limits)


def _distinct(field: str, values: tuple[object, ...]) -> None:
    require(len(set(values)) == len(values) > 0, field, list(values), "at least one, each once")
