"""Sampling designs: which tokens are certain, and with which probability each other one is retained."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cert.errors import CertError

SPARE = 16  # tail tokens a budget must leave room for: below that nothing is sampled and eviction is silent again


def budget_tokens(budget: float, n: int, protected: int) -> tuple[int, bool]:
    """Tokens to keep of n, and whether the budget had to be raised to leave a tail to sample.

    round(budget * n), halves up, raised to protected + 16 (at most n) where smaller (ours).

    budget: fraction of the logical length, 0 < budget <= 1. protected: sinks plus recent tokens.
    Raises CertError outside that range.
    """
    if not 0 < budget <= 1:
        raise CertError(f"budget {budget}: expected a fraction above 0 and at most 1")
    wanted = math.floor(budget * n + 0.5)
    floor = min(n, protected + SPARE)
    return max(wanted, floor), wanted < floor


def protected_set(n: int, sinks: int = 4, recent: int = 32, device: torch.device | None = None) -> Bool[Tensor, "n"]:
    """Mask [n] of the first `sinks` and the last `recent` tokens, which every arm retains."""
    position = torch.arange(n, device=device)
    return (position < sinks) | (position >= n - recent)


def certainty_set(
    score: Float[Tensor, "*heads n"],
    budget: int | Tensor,
    sinks: int = 4,
    recent: int = 32,
    certain_share: float = 0.25,
) -> Bool[Tensor, "*heads n"]:
    """Mask of the tokens kept for certain: sinks, recent ones, and the m top scores elsewhere.

    m = max(0, floor(certain_share * budget) - sinks - recent); ties go to the earlier token.

    score [.., n]: any real numbers, larger is more important. budget: tokens, a number or one per head [..].
    Raises CertError for a score that is not finite. Source: METHOD section 2; share 0.25 is ours.
    """
    if not torch.isfinite(score).all():
        raise CertError("score: expected finite numbers, found NaN or infinity")
    n = score.shape[-1]
    mask = protected_set(n, sinks, recent, score.device).expand(score.shape)
    tokens = torch.as_tensor(budget, device=score.device).expand(score.shape[:-1])
    top = (torch.floor(certain_share * tokens.double()) - sinks - recent).clamp(min=0)
    return mask | (_rank(score.masked_fill(mask, -math.inf)) < top[..., None]) & ~mask


def _rank(score: Float[Tensor, "*heads n"]) -> Int[Tensor, "*heads n"]:
    """0 for the largest score of a head, 1 for the next, ties to the earlier token."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(score.shape[-1], device=score.device).expand(order.shape)
    return torch.empty_like(order).scatter_(-1, order, places)


def mixed_size(
    size: Float[Tensor, "*heads n"], tail: Bool[Tensor, "*heads n"], floor: float
) -> Float[Tensor, "*heads n"]:
    """Tail sizes that sum to 1 per head, a share `floor` of them spread evenly; 0 outside the tail.

    s_i = (1 - floor) * size_i / sum_tail(size) + floor / |tail|, and 1/|tail| where every size is 0.
    Raises CertError for NaN, infinite or negative sizes, and for a floor outside [0, 1].
    """
    if not 0 <= floor <= 1:
        raise CertError(f"floor {floor}: expected a share between 0 and 1")
    if not torch.isfinite(size).all() or (size < 0).any():
        raise CertError("size: expected finite numbers of at least 0, found NaN, infinity or a negative one")
    inside = torch.where(tail, size, 0).double()
    # The largest size is scaled to 1 first, so that neither tiny nor huge scores under- or overflow the sum.
    inside = inside / inside.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    total = inside.sum(-1, keepdim=True)
    even = tail.double() / tail.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(total > 0, (1 - floor) * inside / total.clamp(min=1e-300) + floor * even, even)


def capped_proportional(size: Float[Tensor, "*heads n"], total: Float[Tensor, "*heads"]) -> Float[Tensor, "*heads n"]:
    """Probabilities min(1, tau * size_i) whose sum is `total`, head by head; 0 where the size is 0.

    The largest k sizes are set to 1, k the first count at which (total - k) * size_(k+1) < the sum of the
    remaining sizes; the others are (total - k) * size / that sum. Where at most `total` sizes are positive: all 1.
    Source: Tille, Sampling Algorithms (2006), section 2.10.
    """
    ordered, order = size.double().sort(dim=-1, descending=True)
    remaining = ordered.flip(-1).cumsum(-1).flip(-1)  # summed from the small end, where precision matters
    left = total.double()[..., None] - torch.arange(size.shape[-1], device=size.device)
    certain = ((left * ordered >= remaining) & (left > 0)).cumprod(-1).bool()
    count = certain.sum(-1, keepdim=True)
    rest = torch.where(certain, 0, ordered).sum(-1, keepdim=True)
    tau = (total.double()[..., None] - count) / rest.clamp(min=1e-300)
    prob = torch.where(certain, 1.0, (tau * ordered).clamp(max=1.0))
    return torch.zeros_like(prob).scatter_(-1, order, prob).masked_fill_(size == 0, 0.0)


def inclusion_probs(
    size: Float[Tensor, "*heads n"],
    budget: int | float | Tensor,
    certain: Bool[Tensor, "*heads n"],
    floor: float = 0.1,
) -> Float[Tensor, "*heads n"]:
    """Inclusion probabilities of a Poisson design with a certainty set: sum(prob) = budget in every head.

    prob_i = 1 on `certain`; elsewhere min(1, tau * s_i) with s_i = (1 - floor) * size_i / sum_tail(size)
    + floor / |tail|, tau such that the tail sums to budget - |certain|. So prob_i >= floor * tail budget / |tail|.
    All sizes zero: uniform. budget >= n: prob = 1, the degenerate design that evicts nothing.

    size [.., n] >= 0; budget in tokens, the certain ones included, a number or one per head [..];
    certain [.., n] boolean; prob [.., n] in the dtype of size, float32 at least.
    Raises CertError for NaN or negative sizes and for a budget that leaves a tail but nothing to sample in it.
    Source: METHOD section 2; the even share `floor` is ours.
    """
    certain = certain.expand(size.shape)
    n_certain = certain.sum(-1)
    tokens = torch.as_tensor(budget, dtype=torch.float64, device=size.device).expand(size.shape[:-1])
    everything = tokens >= size.shape[-1]
    starved = ~everything & (tokens <= n_certain) & (n_certain < size.shape[-1])
    if starved.any() or not torch.isfinite(tokens).all():
        raise CertError(
            f"budget {tokens.min().item():g} tokens: expected more than the {int(n_certain.max())} certain ones "
            f"(or all {size.shape[-1]}), else nothing is sampled and the error cannot be estimated"
        )
    prob = capped_proportional(mixed_size(size, ~certain, floor), (tokens - n_certain).clamp(min=0))
    prob = torch.where(certain | everything[..., None], 1.0, prob)
    prob = prob.to(torch.promote_types(size.dtype, torch.float32))
    if not (prob > 0).all():
        raise CertError("size: a tail token of size 0 could never be retained; expected floor > 0 or sizes above 0")
    return prob


def streaming_probs(
    size: Float[Tensor, "*heads n"],
    prob_before: Float[Tensor, "*heads n"],
    budget: int | float | Tensor,
    certain: Bool[Tensor, "*heads n"],
    floor: float = 0.1,
) -> Float[Tensor, "*heads n"]:
    """Overall inclusion probabilities after one more compression of an already sampled cache.

    prob_i = min(prob_before_i, tau * s_i), tau such that sum_i prob_i / prob_before_i = budget over the tokens
    present (all of which are retained so far); prob_i = prob_before_i on `certain`. Keep token i iff u_i <= prob_i,
    u_i its ONE permanent coin: prob_i is then the probability that it survives all events, and 1/prob_i its weight.

    Shapes and errors as inclusion_probs; prob_before [.., n] in (0, 1], 1 for a token never sampled; n counts the
    tokens still present. The sizes may depend on what was retained, never on the coins.
    Source: METHOD section 2 (ours); permanent random numbers, Ohlsson (1995).
    """
    if not ((prob_before > 0) & (prob_before <= 1)).all():
        raise CertError("prob_before: expected probabilities above 0 and at most 1")
    certain = certain.expand(size.shape)
    before = prob_before.double()
    ratio = mixed_size(size, ~certain, floor) / before
    conditional = inclusion_probs(ratio, budget, certain, floor=0.0)
    prob = torch.where(certain, before, before * conditional.double())
    return prob.to(torch.promote_types(size.dtype, torch.float32))


def topk_set(
    score: Float[Tensor, "*heads n"], count: int | Tensor, protected: Bool[Tensor, "*#heads n"]
) -> Bool[Tensor, "*heads n"]:
    """Deterministic eviction: the protected tokens and the top scores elsewhere, `count` tokens in every head.

    score [.., n] any finite numbers, ties to the earlier token; count a number or one per head [..];
    a head whose protected tokens already exceed its count keeps just these.
    """
    if not torch.isfinite(score).all():
        raise CertError("score: expected finite numbers, found NaN or infinity")
    tokens = torch.as_tensor(count, device=score.device).expand(score.shape[:-1])
    return protected | (_rank(score.masked_fill(protected, math.inf)) < tokens[..., None])
