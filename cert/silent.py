"""Theorem 1 as code: deterministic eviction fails silently; a Poisson design sees it, but in the draws that miss.

Let D be the tokens a value-blind rule (top-k on attention scores) evicts, fixed before anything is altered, and add
c u to the value of each: v_i -> v_i + c u on D (`alter_evicted`), u a fixed direction. Nothing the compressed run
reads changes: retained keys and values, scores, queries, weights, output, and so every self-signal computed from
them (`retained_entropy`, `boundary_margin`), are the same to the bit. The true error is ||(o_S - o) - c p(D) u||, with
p(D) the full attention on D: it grows without bound in c, with slope p(D) ||u||.

Under the Poisson design each token of D is retained with probability pi_i > 0. Averaged over draws the variance
estimate (true p and o in each summand) equals V, which is quadratic in c. This is a statement about the average: a
draw that misses D altogether, probability prod_D (1 - pi_i) (`log_miss_prob`), holds nothing altered, and there the
certificate is exactly as silent as top-k is. A score weighted by values sees the alteration and is outside the theorem.

Source: theorem 1 of the paper under study as METHOD section 7 restates it; the two self-signals are ours.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cert.attention import at_least_float32


def alter_evicted(
    v: Float[Tensor, "*lead kv_heads n d"],
    keep: Bool[Tensor, "*lead kv_heads n"],
    direction: Float[Tensor, "d"],
    size: float,
) -> Float[Tensor, "*lead kv_heads n d"]:
    """The values with size * direction added on every evicted token; retained values are the same bits.

    v'_i = v_i + size * direction where keep_i is False, v_i elsewhere. v [.., kv_heads, n, d] in any dtype, which is
    kept; keep [.., kv_heads, n] the retained set of the rule under attack; size in the unit of v.
    """
    return torch.where(keep[..., None], v, v + (size * direction).to(v.dtype))


def log_miss_prob(
    prob: Float[Tensor, "*lead kv_heads n"], keep: Bool[Tensor, "*lead kv_heads n"]
) -> Float[Tensor, "*lead kv_heads"]:
    """Log-probability that a Poisson draw retains none of D, and is therefore silent about it too.

    log P = sum_{i in D} log(1 - pi_i), D = the tokens where keep is False: -inf where one of them is a certainty
    token of the design, 0 where D is empty. prob [.., kv_heads, n]; returns [.., kv_heads], float64, natural log.
    """
    return torch.where(keep, 0.0, torch.log1p(-prob.double())).sum(-1)


def retained_entropy(weight: Float[Tensor, "*lead heads n"]) -> Float[Tensor, "*lead heads"]:
    """Entropy of the attention over retained tokens, a self-signal of deterministic eviction (high = bad).

    H = -sum w_i log w_i in nats, 0 log 0 = 0. weight [.., heads, n] as `retained_attention` returns it.
    """
    return torch.special.entr(at_least_float32(weight)).sum(-1)


def boundary_margin(
    score: Float[Tensor, "*heads n"], keep: Bool[Tensor, "*heads n"], protected: Bool[Tensor, "*#heads n"]
) -> Float[Tensor, "*heads"]:
    """Margin at the boundary of the retained set, a self-signal of deterministic eviction (low = bad).

    The score of the last token kept minus that of the first evicted: min over keep minus max over the rest, among
    tokens that compete, so without the `protected` ones (sinks, recent), which are kept whatever they score.
    Negative where keep is no top set of score. score, keep [.., kv_heads, n], protected [.., n]; returns
    [.., kv_heads] in the unit of score, NaN (undefined) where no competing token is kept, or none is evicted.
    """
    score = at_least_float32(score)
    last_kept = score.masked_fill(~keep | protected, torch.inf).amin(-1)
    first_evicted = score.masked_fill(keep, -torch.inf).amax(-1)
    margin = last_kept - first_evicted
    return torch.where(margin.isfinite(), margin, torch.nan)
