"""What the caller passed: a wrong argument is one CertError that says what was expected, before any work."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from cert.errors import CertError
from cert.kernels import NAMES
from cert.policy import Policy


def number(value: Any, kind: type = Real) -> Any:
    """The value where it is a number of that kind, True and False being none, else NaN, which no comparison passes."""
    return value if isinstance(value, kind) and type(value) is not bool else math.nan


OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "policy": (lambda x: isinstance(x, Policy), "a Policy, such as Policy.preset('certified', budget=0.25)"),
    "delta": (lambda x: x is None or 0 < number(x) < 1, "a level between 0 and 1, or None for no certificates"),
    "seed": (lambda x: number(x, Integral) >= 0, "a whole number of at least 0"),
    "document": (lambda x: x is None or type(x) in (str, int), "a str, an int, or None for the ids' SHA-256"),
    "audit": (lambda x: isinstance(x, bool), "True or False"),
    "compress_every": (lambda x: x is None or number(x, Integral) >= 1, "at least 1 token, or None"),
    "callback": (lambda x: x is None or callable(x), "a function, or None"),
    "arms": (lambda x: isinstance(x, tuple) and all(isinstance(arm, Policy) for arm in x), "a list of policies"),
    "signals": (lambda x: isinstance(x, bool), "True or False"),
    "kernel": (lambda x: x in NAMES, f"one of {', '.join(NAMES)}"),
}


def expect(holds: bool, name: str, value: Any, what: str) -> None:
    """Raise CertError where a condition does not hold: what was given and what was expected, in one line."""
    if not holds:
        given = repr(value)[:60] if isinstance(value, str | Real | None) else f"of type {type(value).__name__}"
        raise CertError(f"{name} {given}: expected {what}")


def check_ids(what: str, ids: Any) -> Tensor:
    """Token ids of a forward, prefill or generate(): a tensor [batch, n] of whole numbers."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise CertError(f"{what}: expected input_ids, whole numbers [batch, n] in a tensor, and at least one token")
    return ids


def as_rows(ids: Any) -> Tensor:
    """Token ids [n] or [batch, n], also in lists, as a tensor [batch, n]."""
    try:
        rows = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CertError(f"prefill: expected token ids [n] or [batch, n], not {type(ids).__name__}") from error
    return check_ids("prefill", rows[None] if rows.ndim == 1 else rows)


def check_fed(ids: Tensor, vocabulary: int, position_ids: Any, first: int) -> None:
    """Ids [batch, m] that the model knows, at the logical positions from `first` on, where any are given."""
    if (odd := ids[(ids < 0) | (ids >= vocabulary)]).numel():
        raise CertError(f"token id {int(odd[0])}: expected 0 to {vocabulary - 1}, the model's vocabulary")
    due = torch.arange(first, first + ids.shape[1])
    if isinstance(position_ids, Tensor) and not bool((position_ids.cpu() == due).all()):
        raise CertError(f"position_ids: expected the logical positions from {first} on, whatever was evicted")


def check_mask(mask: Any, rows: int, n: int) -> None:
    """An attention mask, where there is one, has a column for each token, the cached ones included."""
    if isinstance(mask, Tensor) and mask.shape != (rows, n):
        raise CertError(f"attention_mask {list(mask.shape)}: expected [{rows}, {n}], a column for each token so far")
