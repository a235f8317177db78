"""A policy is a composition of score, design, allocation and compensation; baselines are presets of it."""

from dataclasses import dataclass, fields, replace
from numbers import Integral, Real

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cert import allocate, draw
from cert import design as designs
from cert.errors import CertError

CHOICES = {
    "score": ("none", "constant", "snapkv", "h2o", "streaming", "knorm"),
    "design": ("none", "topk", "poisson"),
    "allocation": allocate.KINDS,
    "compensation": ("none", "hajek", "merge"),
}
NUMBERS = {Integral: ("budget_tokens", "pool", "window", "sinks", "recent"), Real: ("budget", "certain_share", "floor")}


@dataclass(frozen=True)
class Policy:
    """How a cache is compressed: which score, which design, how the budget is divided, what compensates.

    budget: fraction of the logical length, 0 < budget <= 1, or budget_tokens: tokens per head; exactly one of them,
    unless design is "none". window: last queries that score (tokens); pool: odd max-pool width of the score;
    value_weighted: score times ||v||; sinks, recent: protected tokens; certain_share: share of the budget that top
    scores and protected tokens hold for certain; floor: share of the tail's size spread evenly.
    Raises CertError, naming the field, for anything else, and for poisson + merge.
    """

    score: str = "snapkv"
    design: str = "poisson"
    allocation: str = "uniform"
    compensation: str = "hajek"
    budget: float | None = None
    budget_tokens: int | None = None
    pool: int = 1
    value_weighted: bool = False
    window: int = 32
    sinks: int = 4
    recent: int = 32
    certain_share: float = 0.25
    floor: float = 0.1

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise CertError(f"{name} {getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        if (self.score == "none") != (self.design == "none"):
            raise CertError(f"score {self.score!r} with design {self.design!r}: expected none for both or for neither")
        if self.design == "poisson" and self.compensation == "merge":
            raise CertError("design 'poisson' with compensation 'merge': merged values have no inclusion probability")
        if self.design == "none" and self.compensation != "none":
            raise CertError(f"compensation {self.compensation!r}: expected none where nothing is evicted")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for kind, names in NUMBERS.items():
            for name in names:
                value = getattr(self, name)
                optional = value is None and name.startswith("budget")
                if not optional and (type(value) is bool or not isinstance(value, kind)):
                    raise CertError(f"{name} of type {type(value).__name__}: expected a number")
        given = [x for x in (self.budget, self.budget_tokens) if x is not None]
        if len(given) != (self.design != "none"):
            raise CertError("expected exactly one of budget and budget_tokens, and none of them for design 'none'")
        if self.budget is not None and not 0 < self.budget <= 1:
            raise CertError(f"budget {self.budget}: expected a fraction above 0 and at most 1")
        if self.budget_tokens is not None and self.budget_tokens < 1:
            raise CertError(f"budget_tokens {self.budget_tokens}: expected at least 1")
        if self.pool < 1 or self.pool % 2 == 0:
            raise CertError(f"pool {self.pool}: expected an odd width of at least 1")
        if min(self.sinks, self.recent) < 0 or self.window < 1:
            raise CertError("sinks, recent: expected at least 0; window: at least 1")
        for name in ("certain_share", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise CertError(f"{name} {getattr(self, name)}: expected a share between 0 and 1")

    @classmethod
    def preset(cls, name: str, **changes: object) -> "Policy":
        """A named composition with some fields changed: Policy.preset("certified", budget=0.25)."""
        if name not in PRESETS:
            raise CertError(f"policy {name!r}: expected one of {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(changes) - known):
            raise CertError(f"policy field {unknown[0]!r}: expected one of {', '.join(sorted(known))}")
        return cls(**{**PRESETS[name], **changes})  # type: ignore[arg-type] # checked field by field on construction

    def with_budget(self, budget: float) -> "Policy":
        """The same composition at another budget, a fraction."""
        return replace(self, budget=budget, budget_tokens=None)

    @property
    def no_certificate(self) -> str | None:
        """Why this composition carries no certificate, or None if it does."""
        if self.design == "poisson" and self.compensation == "hajek":
            return None
        return (
            f"design {self.design} with compensation {self.compensation}: no inclusion probabilities to estimate from"
        )

    def tokens(self, n: int) -> tuple[int, bool]:
        """Tokens per head of a cache of n, and whether the budget had to be raised (METHOD section 2)."""
        if self.design == "none":
            return n, False
        budget = self.budget or min(1.0, (self.budget_tokens or n) / n)  # exactly one of them is given
        return designs.budget_tokens(budget, n, min(n, self.sinks + self.recent))

    def plan(
        self,
        scores: Float[Tensor, "*lead kv_heads n"],
        u: Float[Tensor, "*#lead kv_heads n"],
        layer: int = 0,
        n_layers: int = 1,
    ) -> tuple[Float[Tensor, "*lead kv_heads n"], Bool[Tensor, "*lead kv_heads n"]]:
        """Inclusion probabilities and retained set of one layer: (prob, keep), both [.., kv_heads, n].

        design "topk": prob is 1 on the retained tokens and 0 elsewhere. scores as cert.scores returns them, already
        pooled and value-weighted; u from cert.draw.uniforms; layer, n_layers place the layer among the compressed ones
        for the pyramid. Raises CertError as the stages do.
        """
        n = scores.shape[-1]
        if self.design == "none":
            return torch.ones_like(scores), torch.ones_like(scores, dtype=torch.bool)
        tokens = self.head_tokens(scores, layer, n_layers)
        if self.design == "topk":
            keep = designs.topk_set(scores, tokens, designs.protected_set(n, self.sinks, self.recent, scores.device))
            return keep.to(scores.dtype), keep
        certain = designs.certainty_set(scores, tokens, self.sinks, self.recent, self.certain_share)
        prob = designs.inclusion_probs(scores, tokens, certain, self.floor)
        return prob, draw.poisson_keep(prob, u)

    def head_tokens(
        self, scores: Float[Tensor, "*lead kv_heads n"], layer: int, n_layers: int
    ) -> Int[Tensor, "*lead kv_heads"]:
        """Tokens for each KV head of one layer, [.., kv_heads]: the budget after allocation."""
        n = scores.shape[-1]
        average, _ = self.tokens(n)
        low = min(n, self.sinks + self.recent + designs.SPARE)
        mine = allocate.layer_budgets(self.allocation, average, n_layers, low, n)[layer]
        return allocate.head_budgets(self.allocation, mine, scores, low)


_TOPK = {"design": "topk", "compensation": "none"}
PRESETS: dict[str, dict[str, object]] = {
    "full": {"score": "none", "design": "none", "compensation": "none"},
    "streaming_llm": {"score": "streaming", **_TOPK},
    "h2o": {"score": "h2o", **_TOPK},
    "snapkv": {"score": "snapkv", "pool": 7, **_TOPK},
    "topk": {"score": "snapkv", **_TOPK},
    "pyramid": {"score": "snapkv", "allocation": "pyramid", **_TOPK},
    "ada": {"score": "snapkv", "allocation": "ada", **_TOPK},
    "merge": {"score": "h2o", "design": "topk", "compensation": "merge"},
    "uniform": {"score": "constant", "certain_share": 0.0},
    "certified": {"score": "snapkv"},
    "certified_value": {"score": "snapkv", "value_weighted": True},
}
