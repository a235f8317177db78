"""What an open session knows: options, the modules it serves, the running forward, and what was recorded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cert.certificate import DELTA, radius
from cert.hf.arguments import OPTIONS, expect
from cert.hf.cache import CertifiedCache
from cert.hf.together import Together
from cert.kernels import AUTO, Case, best_kernel
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
    exact: Tensor
    undefined: Tensor
    var_hat: Tensor | None = None  # what the radius is made of, so that one of another level can be
    max_term: Tensor | None = None
    anticipated: Tensor | None = None
    delta: float = DELTA
    err: Tensor | None = None
    entropy: Tensor | None = None  # of the retained attention, with signals; None where nothing was evicted

    @property
    def radius(self) -> Tensor | None:
        """The certificate; nothing was computed for it before somebody looks."""
        return (
            None if self.var_hat is None or self.max_term is None else radius(self.var_hat, self.max_term, self.delta)
        )

    @property
    def assisted(self) -> Tensor | None:
        """The certificate by the assisted rule."""
        if self.var_hat is None or self.max_term is None or self.anticipated is None:
            return None
        return radius(self.var_hat, self.max_term, self.delta, "assisted", anticipated=self.anticipated)


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
    chosen: dict[Case, tuple[str, str]] = field(default_factory=dict)

    def certifies(self, policy: Policy) -> bool:
        """Whether steps under a policy have a certificate here."""
        return self.options.delta is not None and policy.no_certificate is None

    def serves(
        self, policy: Policy, device: str, dtype: torch.dtype, head_dim: int, softcap: float | None
    ) -> tuple[str, str]:
        """The kernel for retained rows under a policy, and why; chosen once for each kind of case."""
        weights = policy.score == "h2o" or self.options.signals
        case = Case(device, dtype, head_dim, softcap, weights, self.certifies(policy))
        if case not in self.chosen:
            self.chosen[case] = best_kernel(case, self.options.kernel)
        return self.chosen[case]


OPEN: list[State] = []  # the sessions that are open
