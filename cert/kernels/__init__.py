"""Kernels that serve retained rows: which ones can, which one does, and why.

All compute softmax(cap(scale * q . k) + offset) v with a float32 offset. The reference also returns the weights, which
h2o's sums and self-signals are made of, and works in float32. `moments` and `triton` return what certificates are made
of in place of the weights, of one query a head. The others return the output alone, in the model's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from cert.errors import CertError
from cert.kernels.flash import EXTRA, flash
from cert.kernels.output import eager, flex, sdpa
from cert.kernels.selftest import TOLERANCE, trial

AUTO, REFERENCE, MOMENTS, TRITON = "auto", "reference", "moments", "triton"
# (q [batch, heads, m, d], k and v [batch, kv_heads, rows, d], offset [batch, kv_heads, m, rows] float32, -inf where not
# visible, scale, soft cap) -> out [batch, m, heads, d]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float, float | None], Tensor]
OUTPUT_ONLY: dict[str, Kernel] = {"sdpa": sdpa, "eager": eager, "flex": flex, "flash": flash}
NAMES = (AUTO, REFERENCE, MOMENTS, TRITON, *OUTPUT_ONLY)
CHOICE = (TRITON, "sdpa", "eager", MOMENTS, REFERENCE)  # the first that can
UNMEASURED = "flex and flash were run on no GPU yet, so they serve by name only"
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """What is to be served."""

    device: str  # torch's word: cpu, cuda
    dtype: torch.dtype
    head_dim: int
    softcap: float | None
    weights: bool  # a score or a self-signal is made of them
    certificate: bool


def cannot(name: str, case: Case) -> str | None:
    """Why a kernel cannot serve a case, or None where it can."""
    if name == REFERENCE:
        return None
    if case.weights:
        return "no weights, which h2o's sums and self-signals are made of"
    if name in OUTPUT_ONLY and case.certificate:
        return "output alone, no certificate (delta=None switches them off)"
    if name == TRITON:
        return _cannot_triton(case)
    half, sdpa_, flash_ = case.dtype in HALF, name == "sdpa", name == "flash"
    reasons = (
        ((sdpa_ or flash_) and case.softcap, "adds no offset after a soft cap (attn_logit_softcapping)"),
        (sdpa_ and half and case.device != "cpu", "takes a float32 offset beside half precision on a CPU only"),
        (flash_ and find_spec("flash_attn") is None, "flash_attn is not installed"),
        (flash_ and (case.device != "cuda" or not half), "serves bfloat16 and float16 on CUDA devices"),
        (flash_ and case.head_dim + EXTRA > 256, f"head_dim {case.head_dim} + {EXTRA} for the offset is above its 256"),
    )
    return next((why for applies, why in reasons if applies), None)


def _cannot_triton(case: Case) -> str | None:
    if case.device != "cuda":
        return "serves CUDA devices"
    if case.dtype not in TOLERANCE or case.head_dim > 256:
        return "serves float32, float16 and bfloat16, head_dim up to 256"
    return "is not installed" if find_spec("triton") is None else trial(case.device, case.dtype, case.head_dim)


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
    passed: dict[str, str] = {}
    for name in CHOICE:
        if not (why := cannot(name, case)):
            break
        passed[name] = why
    said = [f"{', '.join(n for n in passed if passed[n] == why)}: {why}" for why in dict.fromkeys(passed.values())]
    said += ["tried on this device, equal to the reference"] if name == TRITON else []
    return name, "; ".join([*said, UNMEASURED])
