"""Kernels that serve retained rows: which ones can, which one does, and why.

All compute softmax(cap(scale * q . k) + offset) v with a float32 offset. The reference also returns the weights, which
certificates and h2o's sums are made of, and works in float32. The others return the output alone, in the model's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from cert.errors import CertError
from cert.kernels.flash import EXTRA, flash
from cert.kernels.output import eager, flex, sdpa

AUTO, REFERENCE = "auto", "reference"
# (q [batch, heads, m, d], k and v [batch, kv_heads, rows, d], offset [batch, kv_heads, m, rows] float32, -inf where not
# visible, scale, soft cap) -> out [batch, m, heads, d]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float, float | None], Tensor]
OUTPUT_ONLY: dict[str, Kernel] = {"sdpa": sdpa, "eager": eager, "flex": flex, "flash": flash}
NAMES = (AUTO, REFERENCE, *OUTPUT_ONLY)
UNMEASURED = "flex and flash were run on no GPU yet, so they serve by name only"


@dataclass(frozen=True)
class Case:
    """What is to be served."""

    device: str  # torch's word: cpu, cuda
    dtype: torch.dtype
    head_dim: int
    softcap: float | None
    weights: bool  # a certificate or a score is made of them


def cannot(name: str, case: Case) -> str | None:
    """Why a kernel cannot serve a case, or None where it can."""
    half = case.dtype in (torch.float16, torch.bfloat16)
    if name == REFERENCE:
        return None
    if case.weights:
        return "returns the output alone; certificates and h2o's sums need the weights (delta=None switches them off)"
    if name in ("sdpa", "flash") and case.softcap is not None:
        return "adds no offset after a soft cap (attn_logit_softcapping)"
    if name == "sdpa" and half and case.device != "cpu":
        return "takes a float32 offset beside half-precision queries on a CPU only"
    if name == "flash":
        if find_spec("flash_attn") is None:
            return "flash_attn is not installed"
        if case.device != "cuda" or not half:
            return "flash_attn serves bfloat16 and float16 on CUDA devices"
        if case.head_dim + EXTRA > 256:
            return f"head_dim {case.head_dim} + {EXTRA} for the offset is above flash_attn's 256"
    return None


def best_kernel(case: Case, wanted: str = AUTO) -> tuple[str, str]:
    """The kernel that serves a case, and why that one: (name, reason).

    Raises CertError, with the reason, for a kernel asked for by name that cannot serve it, and for an unknown name.
    """
    if wanted not in NAMES:
        raise CertError(f"kernel {wanted!r}: expected one of {', '.join(NAMES)}")
    if wanted != AUTO:
        if why := cannot(wanted, case):
            raise CertError(f"kernel {wanted!r}: {why}")
        return wanted, "asked for by name"
    passed = []
    for name in ("sdpa", "eager", REFERENCE):
        if (why := cannot(name, case)) is None:
            return name, "; ".join([*dict.fromkeys(passed), UNMEASURED])
        passed.append(why if case.weights else f"{name} {why}")
    raise AssertionError("the reference serves every case")
