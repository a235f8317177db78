"""What an open session knows: options, the modules it serves, the running forward, and what was recorded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cert.certificate import DELTA
from cert.hf.arguments import OPTIONS, expect
from cert.hf.cache import CertifiedCache
from cert.hf.together import Together
from cert.kernels import AUTO
from cert.policy import Policy

Callback = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Options:
    """What certified() was asked for."""

    policy: Policy
    delta: float | None = DELTA
    seed: int = 0
    document: int | str | None = None
    audit: bool = False
    compress_every: int | None = None
    callback: Callback | None = None
    arms: tuple[Policy, ...] = ()
    signals: bool = False
    kernel: str = AUTO

    def __post_init__(self) -> None:
        for name, (holds, what) in OPTIONS.items():
            expect(holds(value := getattr(self, name)), name, value, what)


@dataclass
class Block:
    """One step of one layer, all rows and query heads: [batch, heads] each; radii None where there is no certificate."""

    request: int  # of the first row; row b is request + b
    step: int
    layer: int
    position: int
    out_norm: Tensor
    radius: Tensor | None
    assisted: Tensor | None
    exact: Tensor
    undefined: Tensor
    err: Tensor | None
    entropy: Tensor | None  # of the retained attention, with signals; None where nothing was evicted
    var_hat: Tensor | None  # what the radius is made of, so that one of another level can be
    max_term: Tensor | None


@dataclass
class State:
    """The part of a session that attention and report read and write."""

    options: Options
    before: dict[int, tuple[Any, str]] = field(default_factory=dict)  # id(config) -> config, its implementation
    modules: dict[int, Any] = field(default_factory=dict)  # id(attention module) -> module
    cache: CertifiedCache | None = None  # of the last forward
    running: CertifiedCache | None = None  # the cache of the forward under way
    batch: Together | None = None  # or the caches, one a row
    feeding: bool = False  # session.prefill(): neither compress nor record
    blocks: list[Block] = field(default_factory=list)
    reasons: dict[int, str | None] = field(default_factory=dict)  # request -> why it has no certificate
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)  # request -> what its cache was when it ended
    request: int = -1
    step: int = 0
    prefill_tokens: int = 0
    rerun_tokens: int = 0
    kernel: tuple[str, str] = ("", "")  # what serves, and why

    def weights(self, policy: Policy) -> bool:
        """Whether serving needs the attention weights: for h2o's sums, signals, certificates (one kernel for all arms)."""
        return policy.score == "h2o" or self.options.signals or self.options.delta is not None


OPEN: list[State] = []  # the sessions that are open
