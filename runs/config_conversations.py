"""Sizes and constants of a grid of conversations: what the profiles hold in their blocks `assistant` and `locomo`."""

from dataclasses import dataclass

from runs.config_tasks import DTYPES
from runs.conversations import SYSTEMS
from runs.errors import require


@dataclass(frozen=True)
class ServedConfig:
    """How conversations are served.

    systems: of runs/conversations.py; budget: fraction of the history's length that is kept after each turn; audit:
    probability of the audit coin; seed: of both kinds of coins; delta: of the certificate; dtype: of the weights.
    """

    systems: tuple[str, ...]
    budget: float
    audit: float
    seed: int
    delta: float
    dtype: str

    def __post_init__(self) -> None:
        for system in self.systems:
            require(system in SYSTEMS, "systems", system, f"one of {', '.join(SYSTEMS)}")
        once = len(set(self.systems)) == len(self.systems) > 0
        require(once, "systems", list(self.systems), "at least one, each once")
        alone = "topk" in self.systems and "poisson" not in self.systems
        require(not alone, "systems", "topk", "poisson beside it, whose counts it keeps")
        require(0 < self.budget <= 1, "budget", self.budget, "a fraction above 0 and at most 1")
        require(0 < self.audit <= 1, "audit", self.audit, "a probability above 0 and at most 1")
        require(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2^63 - 1")
        require(0 < self.delta < 1, "delta", self.delta, "a probability between 0 and 1")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class AssistantConfig(ServedConfig):
    """The thirty-turn assistant.

    dialogues: with a question on each of their facts; facts: of a dialogue, as many in each age band; calibration:
    further dialogues with one question each, served by calibration_systems; ctx_tokens: limit of a history's length;
    text_seed: of the generator.
    """

    dialogues: int
    facts: int
    calibration: int
    calibration_systems: tuple[str, ...]
    ctx_tokens: int
    text_seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        known = set(self.calibration_systems) <= set(self.systems)
        require(known, "calibration_systems", list(self.calibration_systems), "some of systems")
        for field in ("dialogues", "facts", "calibration", "ctx_tokens"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        fits = self.facts % 6 == 0 and self.facts <= 30
        require(fits, "facts", self.facts, "a multiple of 6, at most 30")
        require(0 <= self.text_seed < 2**63, "text_seed", self.text_seed, "a whole number from 0 to 2^63 - 1")


@dataclass(frozen=True)
class LocomoConfig(ServedConfig):
    """LoCoMo's conversations, which DATA= gives.

    conversations: how many, from the first; questions: a sample of each; ctx_tokens: limit of a whole prompt and its
    answer, never above the model's positions; null: all there are. text_seed: of the sample.
    """

    conversations: int | None
    questions: int | None
    ctx_tokens: int | None
    text_seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("conversations", "questions", "ctx_tokens"):
            value = getattr(self, field)
            require(value is None or value >= 1, field, value, "at least 1, or null for all there are")
        require(0 <= self.text_seed < 2**63, "text_seed", self.text_seed, "a whole number from 0 to 2^63 - 1")
