"""One compression event: scores, probabilities, the draw, and the rows that are moved."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from cert import allocate, scores
from cert.attention import per_kv_head, retained_attention
from cert.certificate import anticipated_variance
from cert.design import SPARE, protected_set, streaming_probs, topk_set
from cert.draw import poisson_keep, uniforms
from cert.errors import CertError
from cert.hf.cache import CertifiedCache, CertifiedLayer, ids_sha256
from cert.hf.plans import Plan, Plans, least_prob
from cert.merge import merged_values
from cert.policy import Policy
from cert.silent import boundary_margin

Place = tuple[int, int]  # of a layer among the compressed ones, and how many these are
LOGITS_AT_ONCE = 2**22  # of a multi-token step over retained rows, which are processed in pieces


@torch.no_grad()
def compress(
    cache: CertifiedCache,
    seed: int,
    document: int | str | None,
    smaller: tuple[Plans, ...] = (),
    like: CertifiedCache | None = None,
) -> None:
    """Evict down to the policy's budget in every full-attention layer; the cache's own coins decide.

    The first event draws from all tokens, a later one from those still there, by streaming_probs and the ONE permanent
    coin of each. A second call without new tokens in between changes nothing. smaller: plans of runs at smaller
    budgets; prob = max(prob, theirs), so that what they retained is retained. like: whose counts top-k keeps, event by
    event.
    """
    if cache.ids is None:
        raise CertError("compress: nothing was fed yet")
    cache.check_whole()
    if cache.events and cache.events[-1] == cache.length:
        return
    if not cache.events:
        cache.settle()
    if not cache.documents:
        cache.documents = tuple(map(ids_sha256, cache.ids)) if document is None else (document,)
    cache.events.append(cache.length)
    cache.compressing, cache.liked = True, like is not None
    layers = cache.compressible
    before = sum(prefix_bytes(layer)[0] for layer in layers.values())
    plan = cache.plans.setdefault(cache.length, {})
    for place, (index, layer) in enumerate(layers.items()):
        if cache.policy.design == "none":
            continue
        heads, where = layer.stored[0].shape[1], layer.stored[0].device
        coins = torch.stack([uniforms(seed, name, index, heads, cache.length, where) for name in cache.documents])
        theirs = [plans[cache.length][index] for plans in smaller if index in plans.get(cache.length, {})]
        least, at = least_prob(theirs, coins, layer.position), (place, len(layers))
        counts = None if like is None else like.compressible[index].real.sum(-1)
        event = first_event if layer.log_weight is None else later_event
        plan[index] = event(layer, cache.policy, coins, least, at, counts)
        if layer.log_weight is not None and not cache.terms.often:
            layer.queries = None
    cache.compressing = False
    _take_stock(cache, plan, before)


def _take_stock(cache: CertifiedCache, plan: dict[int, Plan], before: int) -> None:
    """The cache's budgets and bytes after an event that decided `plan`."""
    layers = cache.compressible.values()
    rows = sum(layer.real.sum().item() for layer in layers)
    logical = sum(layer.real[..., 0].numel() * layer.length for layer in layers)
    cache.realised = rows / logical
    cache.expected = sum(x.expected for x in plan.values()) / logical if plan else 1.0
    cache.prefix_bytes = (before, sum(prefix_bytes(layer)[1] for layer in layers))


def prefix_bytes(layer: CertifiedLayer) -> tuple[int, int]:
    """Bytes of keys and values if nothing had been evicted, and of the retained ones, without padding."""
    row = sum(x.shape[-1] * x.element_size() for x in layer.stored)
    return layer.real[..., 0].numel() * layer.length * row, int(layer.real.sum()) * row


# ---------------------------------------------------------------- scores


def retained_weights(layer: CertifiedLayer, query: Tensor, scale: float, first: int) -> tuple[Tensor, Tensor]:
    """Attention of m new tokens at positions first.. over the stored rows: (out [batch, m, heads, d], weight)."""
    k, v = (x[:, None] for x in layer.stored)
    return retained_attention(query.transpose(1, 2), k, v, layer.offset(query.shape[2], first), scale, layer.softcap)


def pieces(layer: CertifiedLayer, query: Tensor) -> list[tuple[int, Tensor]]:
    """The new queries [batch, heads, m, d] in pieces that keep memory flat: (place of the first, queries)."""
    size = max(1, LOGITS_AT_ONCE // max(1, layer.stored[0][0].numel()))
    return [(start, query[:, :, start : start + size]) for start in range(0, query.shape[2], size)]


def attention_share(layer: CertifiedLayer, weight: Tensor) -> Tensor:
    """Estimated attention p_i = prob_i w_i [batch, kv_heads, rows], summed over steps, averaged over query heads."""
    grouped = per_kv_head(weight, layer.prob.shape[-2])  # [batch, m, kv_heads, group, rows]
    return layer.prob * grouped.mean(-2).sum(1)


def token_scores(layer: CertifiedLayer, policy: Policy) -> Tensor:
    """The policy's score of every stored row [batch, kv_heads, rows], 0 at padding."""
    k, v = layer.stored
    if policy.score == "h2o":
        assert layer.mass is not None
        score = layer.mass
    elif policy.score == "snapkv":
        score = _window_score(layer, policy.pool)
    elif policy.score == "streaming" and layer.position is not None:
        score = (layer.position + 1) / layer.length
    else:
        score = {"streaming": scores.streaming, "knorm": scores.knorm, "constant": scores.constant}[policy.score](k)
    return (scores.value_weighted(score, v) if policy.value_weighted else score) * layer.real


def _window_score(layer: CertifiedLayer, pool: int) -> Tensor:
    assert layer.queries is not None
    queries, scale, k = layer.queries, layer.scale, layer.stored[0]
    if layer.log_weight is None:
        return scores.snapkv(queries, k, scale, pool, layer.softcap)
    first = layer.length - queries.shape[2]
    total = torch.zeros(k.shape[:-1], device=k.device)
    for start, piece in pieces(layer, queries):
        total = total + attention_share(layer, retained_weights(layer, piece, scale, first + start)[1])
    total = total / queries.shape[2]
    return total if pool == 1 else functional.max_pool1d(total, pool, stride=1, padding=pool // 2)


# ---------------------------------------------------------------- events


def first_event(
    layer: CertifiedLayer, policy: Policy, coins: Tensor, least: Tensor, at: Place, counts: Tensor | None = None
) -> Plan:
    """Compress a layer that has evicted nothing yet, prob = max(the policy's, least); at: its place among how many."""
    score, (k, v) = token_scores(layer, policy), layer.stored
    protected = protected_set(layer.length, policy.sinks, policy.recent, score.device)
    prob = policy.plan(score, coins, *at)[0] if counts is None else topk_set(score, counts, protected).to(score.dtype)
    prob = torch.maximum(prob, least)
    keep = poisson_keep(prob, coins)  # topk: prob is 0 or 1, which no coin is
    plan = Plan(prob.cpu(), None, float(prob.double().sum()))
    if layer.terms.signals and policy.design == "topk":
        layer.margins = tuple(boundary_margin(score, keep, protected).flatten().tolist())
    if bool((prob == 1).all()):
        return plan
    if policy.design == "poisson":
        layer.anticipated = anticipated_variance(score, prob, v)
    if layer.terms.audit:
        layer.audit = (k.clone(), v.clone())
    layer.position = torch.arange(layer.length, dtype=torch.int32, device=keep.device).expand(keep.shape)
    _evict(layer, policy, keep, prob, score)
    return plan


def later_event(
    layer: CertifiedLayer, policy: Policy, coins: Tensor, least: Tensor, at: Place, counts: Tensor | None = None
) -> Plan:
    """Compress again: overall prob = max(streaming_probs, least), the same coins; V_ant of the event is added."""
    assert layer.position is not None
    score, before, real, v = token_scores(layer, policy), layer.prob, layer.real, layer.stored[1]
    wanted = _streaming_budgets(layer, policy, score, *at) if counts is None else counts
    prob, keep, expected = before.clone(), real.clone(), 0.0
    for row, head in torch.cartesian_prod(*(torch.arange(x) for x in real.shape[:2])).tolist():
        here = real[row, head].nonzero().squeeze(-1)
        budget = int(wanted[row, head])
        if budget >= len(here):
            expected += len(here)
            continue
        position = layer.position[row, head, here].long()
        mine, had = score[row, head, here], before[row, head, here]
        certain = protected_set(layer.length, policy.sinks, policy.recent, position.device)[position]
        bound = least[row, head, here]
        if policy.design == "topk":
            keep[row, head, here] = topk_set(mine, budget, certain) | (bound > 0)
            expected += int(keep[row, head, here].sum())
            continue
        now = torch.maximum(streaming_probs(mine, had, budget, certain, policy.floor), bound)
        prob[row, head, here] = now
        keep[row, head, here] = certain | poisson_keep(now, coins[row, head, position])
        expected += float((now / had).double().sum())
        again = (now / had).clamp(max=1)  # the probability of surviving this event
        added = anticipated_variance((mine / had)[None], again[None], v[row, head, here][None])
        assert layer.anticipated is not None
        layer.anticipated[row, head] += added[0]
    chance = prob if policy.design == "poisson" else keep.to(prob.dtype)
    plan = Plan(chance.cpu(), layer.position.cpu(), expected)
    _evict(layer, policy, keep, prob, score)
    return plan


def _streaming_budgets(layer: CertifiedLayer, policy: Policy, score: Tensor, place: int, places: int) -> Tensor:
    """Tokens [batch, kv_heads] that a head may keep now: the budget is a fraction of the logical length."""
    n, width = layer.length, score.shape[-1]
    low = min(n, policy.sinks + policy.recent + SPARE)
    mine = allocate.layer_budgets(policy.allocation, policy.tokens(n)[0], places, low, n)[place]
    if mine >= width:
        return torch.full(score.shape[:-1], width)
    return allocate.head_budgets(policy.allocation, mine, score, low)


def _evict(layer: CertifiedLayer, policy: Policy, keep: Tensor, prob: Tensor, score: Tensor) -> None:
    """Move the retained rows to contiguous storage of their own, padded to the fullest head."""
    (k, v), position = layer.stored, layer.position
    assert position is not None
    if policy.compensation == "merge":
        v = (
            merged_values(score, k, v, keep & layer.real)
            if layer.log_weight is None
            else _merge_real(layer, keep, score)
        )
    count = keep.sum(-1)
    width = int(count.max())
    order = torch.argsort(~keep, dim=-1, stable=True)[..., :width]
    padding = torch.arange(width, device=keep.device) >= count[..., None]

    def moved(x: Tensor) -> Tensor:
        return x.gather(-1, order)

    def moved_rows(x: Tensor) -> Tensor:
        index = order[..., None].expand(*order.shape, x.shape[-1])
        return x.gather(-2, index).masked_fill_(padding[..., None], 0)

    layer.keys, layer.values = moved_rows(k), moved_rows(v)
    layer.position = moved(position).masked_fill_(padding, -1)
    retained = torch.where(keep, prob.float(), 1.0).clamp(max=1.0)
    layer.log_weight = (-moved(retained).log()).abs().masked_fill_(padding, -math.inf)
    layer.evicted, layer.standing, layer.tail = layer.length - count, None, None
    if layer.mass is not None:
        layer.mass = moved(layer.mass).masked_fill_(padding, 0)


def _merge_real(layer: CertifiedLayer, keep: Tensor, score: Tensor) -> Tensor:
    """merged_values head by head without the padding rows, whose keys are zeros."""
    k, out = layer.stored[0], layer.stored[1].clone()
    for row, head in torch.cartesian_prod(*(torch.arange(x) for x in keep.shape[:2])).tolist():
        here = layer.real[row, head]
        part = (score[row, head, here][None], k[row, head, here][None], out[row, head, here][None])
        out[row, head, here] = merged_values(*part, keep[row, head, here][None])[0]
    return out
