"""One generate(), kept so that it can be run again: at a larger budget, or with the full cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cert.gate import Decision
from cert.hf.plans import Plans
from cert.policy import Policy

CACHE_NAMES = ("cache", "past_key_values")  # since transformers 5.24, and before


def given_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among keyword arguments, by either name, or None."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments, for another cache."""
    return {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}


def kept(value: Any) -> Any:
    """A tensor as a copy, which the caller cannot change; all else as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def copied(value: Any) -> Any:
    """Tensors, also in tuples and lists, as contiguous clones; all else as it is."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value


@dataclass(frozen=True)
class Call:
    """The arguments, the generators' state, and what the cache it continued from had seen."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ids: Tensor
    rng: list[Tensor]
    begun: tuple[Tensor, tuple[int, ...]] | None  # ids and compression points; None: an empty cache
    policy: Policy  # of the cache it was served from
    liked: bool  # compressed to another draw's counts, which no budget gives again
    runs: dict[float, Plans] = field(default_factory=dict)  # budget -> what that run's compressions decided

    @contextmanager
    def same_randomness(self) -> Iterator[None]:
        """Inside, sampling draws what it drew in that call; afterwards the generators are where they were."""
        with torch.random.fork_rng():
            torch.set_rng_state(self.rng[0])
            if self.rng[1:]:
                torch.cuda.set_rng_state_all(self.rng[1:])
            yield


@dataclass(frozen=True)
class Gated:
    """How session.gated() came to what it returned. Bytes are of tensors in caches, without a forward's own."""

    request: int  # of the compressed run: session.summary(request) says more
    decision: Decision  # what answered: the compressed cache, the escalated one, or the full cache
    certificate: float | None  # of the compressed run; None where it is undefined, or over a tenth of it
    escalated_certificate: float | None  # of the escalated run; None also where there was none
    prefill_tokens: int  # spent by the compressed run
    rerun_prefill_tokens: int  # spent by escalation and recomputation
    cache_bytes: int  # retained keys and values at the end of the compressed run
    full_bytes: int  # the same if nothing had been evicted
    peak_bytes: int | None  # the session's cache and the full one beside it, at the end of a recomputation
    rejected: tuple[Any, ...] = field(compare=False, repr=False)  # what generate() returned of the runs before


def random_state() -> list[Tensor]:
    """States of the CPU's and each CUDA device's generator."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
