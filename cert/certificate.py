"""From a retained set to a certificate: survey variance, largest term, radius, and the request's one number."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from cert.attention import at_least_float32, per_kv_head, weighted_values
from cert.errors import CertError

RULES = ("empirical_bernstein", "normal", "conservative", "assisted")
DELTA = 0.05  # a certificate fails to cover with at most this probability, nominally
KAPPA = 0.25  # weight of the anticipated variance in the assisted rule (ours)


def _per_query_head(x: Float[Tensor, "*lead kv_heads n"], heads: int) -> Float[Tensor, "*lead heads n"]:
    """A per-token quantity of each KV head, repeated for the query heads that share it."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def weight_variance(
    weight: Float[Tensor, "*lead heads n"], prob: Float[Tensor, "*#lead kv_heads n"]
) -> Float[Tensor, "*lead heads"]:
    """sum_S (1 - pi_i) w_i^2, the estimated relative variance of the Hajek denominator."""
    c = 1 - _per_query_head(at_least_float32(prob), weight.shape[-2])
    return (c * weight.square()).sum(-1)


def variance_of_moments(
    second: Float[Tensor, "*heads"],
    first: Float[Tensor, "*heads d"],
    total: Float[Tensor, "*heads"],
    shifted: Float[Tensor, "*heads d"],
) -> Float[Tensor, "*heads"]:
    """sum c w^2 ||v - o_hat||^2 from the sums of c w^2 ||u||^2, c w^2 u and c w^2, and o_hat - v_ref; u = v - v_ref.

    second - 2 (o_hat - v_ref) . first + ||o_hat - v_ref||^2 total, clamped at 0. Source: METHOD section 4.
    """
    var = second - 2 * (shifted * first).sum(-1) + shifted.square().sum(-1) * total
    return var.clamp(min=0)


def poisson_variance(
    weight: Float[Tensor, "*lead heads n"],
    prob: Float[Tensor, "*#lead kv_heads n"],
    v: Float[Tensor, "*#lead kv_heads n d"],
    out: Float[Tensor, "*lead heads d"],
) -> Float[Tensor, "*lead heads"]:
    """Estimated variance of the attention error under a Poisson design, from the retained tokens alone.

    V_hat = sum_S (1 - pi_i) w_i^2 ||v_i - o_hat||^2, computed from the running sums of c w^2 ||u||^2, c w^2 u and
    c w^2 with c = 1 - pi, u = v - v_ref and v_ref the first retained value (against cancellation); clamped at 0.
    With the true softmax p, the true o and all tokens, sum (1 - pi_i)/pi_i p_i^2 ||v_i - o||^2 is the linearised
    error's exact variance: weight = p / sqrt(pi) gives it.

    weight [.., heads, n], prob [.., kv_heads, n] (1 at padding), v [.., kv_heads, n, d], out [.., heads, d]; float32 or
    better. Source: Sarndal, Swensson, Wretman (1992), result 5.5.1; the pair formula of Sen, Yates and Grundy is
    identically 0 under Poisson sampling.
    """
    v = at_least_float32(v)
    reference = v[..., :1, :]
    centred = v - reference
    cw2 = (1 - _per_query_head(at_least_float32(prob), weight.shape[-2])) * weight.square()
    norms = centred.square().sum(-1, keepdim=True)
    second = weighted_values(cw2, norms).squeeze(-1)
    first = weighted_values(cw2, centred)
    shifted = (per_kv_head(out, v.shape[-3]) - reference).flatten(-3, -2)
    return variance_of_moments(second, first, cw2.sum(-1), shifted)


def max_term(
    weight: Float[Tensor, "*lead heads n"],
    prob: Float[Tensor, "*#lead kv_heads n"],
    v: Float[Tensor, "*#lead kv_heads n d"],
    out: Float[Tensor, "*lead heads d"],
    exact: bool = False,
) -> Float[Tensor, "*lead heads"]:
    """Bound b of the largest single error term w_i ||v_i - o_hat|| among retained tail tokens (prob < 1).

    b = max w_i ||v_i|| + ||o_hat|| max w_i, which one pass over the cache can carry; exact=True takes the maximum
    itself, in a second pass. 0 where no tail token is retained. Shapes as poisson_variance. Source: METHOD section 5.
    """
    heads = weight.shape[-2]
    v = at_least_float32(v)
    tail = weight * (_per_query_head(prob, heads) < 1)
    if exact:
        apart = per_kv_head(out, v.shape[-3])[..., :, None, :] - v[..., :, None, :, :]
        return (tail * vector_norm(apart, dim=-1).flatten(-3, -2)).amax(-1)
    return (tail * _per_query_head(vector_norm(v, dim=-1), heads)).amax(-1) + vector_norm(out, dim=-1) * tail.amax(-1)


def anticipated_variance(
    score: Float[Tensor, "*lead kv_heads n"],
    prob: Float[Tensor, "*lead kv_heads n"],
    v: Float[Tensor, "*lead kv_heads n d"],
) -> Float[Tensor, "*lead kv_heads"]:
    """The variance the score itself predicts, computed once at eviction from all tokens while they are still there.

    V_ant = sum_T (1 - pi_i)/pi_i s_i^2 ||v_i - v_bar||^2, s = score / sum(score), v_bar = sum s_i v_i. One scalar
    per KV head. Where every score is 0, s is uniform.

    score, prob [.., kv_heads, n] >= 0 of all tokens, v [.., kv_heads, n, d].
    Source: Isaki and Fuller (1982) for the notion; its use beside V_hat is ours (METHOD section 5).
    """
    score, prob, v = at_least_float32(score), at_least_float32(prob), at_least_float32(v)
    total = score.sum(-1, keepdim=True)
    share = torch.where(total > 0, score / total.clamp(min=1e-30), 1 / score.shape[-1])
    mean = share[..., None, :] @ v
    return ((1 - prob) / prob * share.square() * (v - mean).square().sum(-1)).sum(-1)


def radius(  # noqa: PLR0913 - the four rules need different sums, all keyword-only
    var_hat: Float[Tensor, "*heads"],
    max_term: Float[Tensor, "*heads"],
    delta: float = DELTA,
    rule: str = "empirical_bernstein",
    *,
    anticipated: Float[Tensor, "*heads"] | None = None,
    kappa: float = KAPPA,
    weight_var: Float[Tensor, "*heads"] | None = None,
    weight_max: Float[Tensor, "*heads"] | None = None,
) -> Float[Tensor, "*heads"]:
    """The certificate of one step and head: the error is at most r, nominally with probability 1 - delta.

    empirical_bernstein  r = b L/3 + sqrt((b L/3)^2 + 2 V_hat L), L = log(2/delta): Bernstein's inversion (ours)
    normal               r = z_{1 - delta/2} sqrt(V_hat)
    assisted             empirical_bernstein with V_hat + kappa * anticipated in place of V_hat (ours)
    conservative         r = (sqrt(2 V_hat L3) + 8/3 b L3) / (1 - eps), L3 = log(3/delta),
                         eps = sqrt(2 L3 weight_var) + 8/3 L3 weight_max; NaN, meaning undefined, where eps >= 1

    var_hat (poisson_variance), max_term b, anticipated per query head, weight_var (weight_variance), weight_max the
    largest tail weight: [.., heads]. Raises CertError for an unknown rule, a delta outside (0, 1) or a missing input.
    Source: Boucheron, Lugosi, Massart (2013), section 2.8; METHOD section 5.
    """
    if not 0 < delta < 1:
        raise CertError(f"delta {delta}: expected a level between 0 and 1")
    if rule == "normal":
        return NormalDist().inv_cdf(1 - delta / 2) * var_hat.sqrt()
    if rule == "conservative":
        if weight_var is None or weight_max is None:
            raise CertError("rule 'conservative': expected weight_var and weight_max")
        level = math.log(3 / delta)
        eps = (2 * level * weight_var).sqrt() + 8 / 3 * level * weight_max
        wide = ((2 * var_hat * level).sqrt() + 8 / 3 * max_term * level) / (1 - eps)
        return torch.where(eps < 1, wide, torch.nan)
    if rule == "assisted":
        if anticipated is None:
            raise CertError("rule 'assisted': expected the anticipated variance")
        var_hat = var_hat + kappa * anticipated
    elif rule != "empirical_bernstein":
        raise CertError(f"rule {rule!r}: expected one of {', '.join(RULES)}")
    level = math.log(2 / delta)
    third = max_term * level / 3
    return third + (third.square() + 2 * var_hat * level).sqrt()


def tail_flags(
    prob: Float[Tensor, "*lead kv_heads n"], evicted: Int[Tensor, "*lead kv_heads"]
) -> tuple[Bool[Tensor, "*lead kv_heads"], Bool[Tensor, "*lead kv_heads"]]:
    """Where a certificate is exact (r = 0), and where it is undefined.

    exact: nothing was evicted and every retained token was certain, so o_hat = o. undefined: tokens were evicted but no
    sampled token is retained: the sample shows no variance at all, and 0 would be a lie.

    prob [.., kv_heads, n] of the retained tokens, 1 at padding; evicted [.., kv_heads] counts of tokens gone.
    """
    sampled = (prob < 1).any(-1)
    return ~sampled & (evicted == 0), ~sampled & (evicted > 0)


@dataclass(frozen=True)
class RequestCertificate:
    """One request's certificates in one number, with what stands beside it; see `request_certificate`."""

    value: float | None  # mean over layers of sum(r) / sum(||o_hat||); None where no step has a certificate
    mean_relative: float | None  # mean of r / ||o_hat|| over layers, steps, heads
    top_decile: float | None  # mean of the largest tenth of r / ||o_hat||
    max_relative: float | None
    per_layer: tuple[float | None, ...]
    steps: int
    undefined_share: float
    flagged: bool  # more than a tenth undefined: to be ranked highest


def request_certificate(
    radius: Float[Tensor, "layers steps heads"], out_norm: Float[Tensor, "layers steps heads"]
) -> RequestCertificate:
    """The certificate of a whole answer: per compressed layer sum(r) / sum(||o_hat||), then the mean over layers.

    radius, out_norm [layers, steps, heads]; NaN radii are undefined: left out, and counted. Source: METHOD section 5.
    """
    defined = torch.isfinite(radius)
    share = 1.0 - defined.double().mean().item() if radius.numel() else 0.0
    r, o = torch.where(defined, radius, 0).double(), torch.where(defined, out_norm, 0).double()
    layers = [
        (a / b).item() if seen else None
        for a, b, seen in zip(r.sum((1, 2)), o.sum((1, 2)), defined.any(2).any(1), strict=True)
    ]
    known = [x for x in layers if x is not None]
    relative = (radius.double() / out_norm.double())[defined].sort(descending=True).values
    some = relative.numel() > 0
    return RequestCertificate(
        value=sum(known) / len(known) if known else None,
        mean_relative=relative.mean().item() if some else None,
        top_decile=relative[: math.ceil(relative.numel() / 10)].mean().item() if some else None,
        max_relative=relative[0].item() if some else None,
        per_layer=tuple(layers),
        steps=radius.shape[1],
        undefined_share=share,
        flagged=share > 0.1,
    )
