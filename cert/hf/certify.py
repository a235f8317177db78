"""What a certificate is made of at one step of one layer, and what of it stays the same until the next compression."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cert.certificate import max_term, poisson_variance, tail_flags
from cert.hf.cache import CertifiedLayer
from cert.kernels.moments import tail_rows

Sums = tuple[Tensor, Tensor]  # var_hat and max_term [batch, heads]


@dataclass(frozen=True)
class Standing:
    """Of one layer between two compressions, for each query head: [batch, heads]; rows come, none of them sampled."""

    exact: Tensor
    undefined: Tensor
    lost: bool  # some head is undefined
    anticipated: Tensor


def standing(layer: CertifiedLayer, heads: int) -> Standing:
    """The layer's flags and anticipated variances, worked out at the first step behind a compression."""
    if layer.standing is None:
        assert layer.evicted is not None and layer.anticipated is not None
        group = heads // layer.evicted.shape[-1]
        exact, undefined = (x.repeat_interleave(group, -1) for x in tail_flags(layer.prob, layer.evicted))
        anticipated = layer.anticipated.repeat_interleave(group, -1)
        layer.standing = Standing(exact, undefined, bool(undefined.any()), anticipated)
    return layer.standing


def tail(layer: CertifiedLayer) -> Tensor:
    """tail_rows of the rows that the last compression left, worked out likewise."""
    if layer.tail is None:
        layer.tail = tail_rows(layer.prob, layer.stored[1])
    return layer.tail


def certify(layer: CertifiedLayer, out: Tensor, found: Tensor | Sums | None) -> dict[str, Tensor]:
    """What the certificates of one step are made of, from the retained rows alone: [batch, heads] each, NaN: undefined.

    out [batch, heads, d]; found: the weights [batch, heads, rows] or, where a kernel summed them up, the sums; None of
    a layer that has evicted nothing.
    """
    if found is None:
        zero = torch.zeros(out.shape[:-1], device=out.device)
        yes = torch.ones_like(zero, dtype=torch.bool)
        return {"var_hat": zero, "max_term": zero, "anticipated": zero, "exact": yes, "undefined": ~yes}
    if isinstance(found, Tensor):
        prob, v = layer.prob, layer.stored[1]
        found = poisson_variance(found, prob, v, out), max_term(found, prob, v, out)
    still = standing(layer, out.shape[-2])
    if still.lost:
        found = found[0].masked_fill(still.undefined, torch.nan), found[1].masked_fill(still.undefined, torch.nan)
    anticipated = still.anticipated.to(found[0].dtype)
    beside = {"anticipated": anticipated, "exact": still.exact, "undefined": still.undefined}
    return {"var_hat": found[0], "max_term": found[1], **beside}
