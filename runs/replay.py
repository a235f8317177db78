"""The replay: every cell of the grid from one dense run, the draw independent of its queries (claims 1, 2, E6).

One document gives budgets x layers x heads x steps cells. `err` compares the retained set with full attention over the
same q, K, V, so nothing but the eviction can differ. All cells of a layer are computed in one vectorised pass.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cert.attention import logits, weighted_values
from cert.certificate import (
    RULES,
    anticipated_variance,
    max_term,
    poisson_variance,
    radius,
    tail_flags,
    weight_variance,
)
from cert.design import protected_set, topk_set
from cert.draw import poisson_keep, uniforms
from cert.policy import Policy
from cert.scores import constant, knorm, snapkv, streaming, value_weighted
from cert.silent import boundary_margin, retained_entropy
from runs.capture import Decoded, LayerCapture
from runs.config import ReplayConfig

METHOD = "replay-1"  # part of every cell id: raise it when a change here changes a number


def spread(count: int, wanted: int) -> tuple[int, ...]:
    """`wanted` of 0 .. count - 1, evenly spread, both ends included."""
    if wanted == 1:
        return (0,)
    return tuple(math.floor(i * (count - 1) / (wanted - 1) + 0.5) for i in range(wanted))


def spread_heads(heads: int, kv_heads: int, wanted: int) -> tuple[int, ...]:
    """Query heads from as many KV groups as there are, another member of the group each time."""
    group = heads // kv_heads
    rounds = math.ceil(wanted / kv_heads)
    if rounds == 1:
        return tuple(g * group + i % group for i, g in enumerate(spread(kv_heads, wanted)))
    return tuple((i % kv_heads) * group + (i // kv_heads + i % kv_heads) % group for i in range(wanted))


def replay_document(
    decoded: Decoded, document: str, config: ReplayConfig, policies: dict[str, Policy]
) -> Iterator[dict[str, object]]:
    """The measured columns of every cell of one document, in the order layer, budget, head, step.

    document: its SHA-256, which addresses the coins. policies: "certified", "topk" and "uniform"; budgets are set here.
    Undefined radii and margins are None; a NaN anywhere else raises FloatingPointError.
    """
    even: dict[tuple[int, float], Tensor] = {}
    for layer, capture in decoded.layers.items():
        step = _Step(capture, config.heads)
        score = token_score(policies["certified"], capture, step.n)
        coins = uniforms(config.seed, document, layer, score.shape[0], step.n, device=score.device)
        for budget in config.budgets:
            if (score.shape[0], budget) not in even:  # it knows no score: one design for every layer
                uniform = policies["uniform"].with_budget(budget)
                even[score.shape[0], budget] = uniform.plan(torch.ones_like(score), coins)[0]
        draws = [_draw(policies, budget, score, coins, even[score.shape[0], budget]) for budget in config.budgets]
        arms = {name: torch.stack([draw[name] for draw in draws])[:, step.group] for name in draws[0]}
        measured = _measure(step, arms, score[step.group], config)
        yield from _rows(measured, step, config, policies["certified"], layer)


def token_score(policy: Policy, capture: LayerCapture, n: int) -> Tensor:
    """The policy's score of the document's n tokens, [kv_heads, n]. Not h2o, which needs every query."""
    k, v = capture.keys[:, :n], capture.values[:, :n]
    if policy.score == "snapkv":
        score = snapkv(capture.window, k, capture.scale, policy.pool)
    else:
        score = {"knorm": knorm, "streaming": streaming, "constant": constant}[policy.score](k)
    return value_weighted(score, v) if policy.value_weighted else score


class _Step:
    """All decode steps of one layer; every chosen query head stands beside its own KV head, so heads = kv_heads = h."""

    def __init__(self, capture: LayerCapture, wanted: int) -> None:
        q = torch.stack(capture.queries).float()  # [s, heads, d]
        kv_heads, total, _ = capture.keys.shape
        self.heads = spread_heads(q.shape[1], kv_heads, wanted)
        self.group = [head // (q.shape[1] // kv_heads) for head in self.heads]
        self.steps, self.n, self.scale = q.shape[0], total - q.shape[0], capture.scale
        # [1, 1, h, N, d], stored by dimension: the product would turn a copy for each step otherwise
        k = capture.keys[self.group].float().mT.contiguous().mT[None, None]
        self.logits = logits(q[None, :, list(self.heads)], k, self.scale)  # [1, s, h, N], the same for every arm
        self.v = capture.values[self.group].float()[None, None]
        # Step j = 1..s sees the n tokens of the document and the j generated ones written so far.
        seen = self.n + torch.arange(1, self.steps + 1, device=q.device)
        self.unseen = (torch.arange(total, device=q.device) >= seen[:, None])[:, None]  # [s, 1, N]

    def over(self, x: Tensor, fill: float) -> Tensor:
        """A quantity [b, h, n] of the document's tokens, continued by `fill` for the generated ones: [b, 1, h, N]."""
        return torch.cat([x, x.new_full((*x.shape[:-1], self.steps), fill)], -1)[:, None]

    def attend(self, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Attention with an offset [b, h, n] on the document's tokens: out [b, s, h, d], weight [b, s, h, N]."""
        log_weight = torch.where(self.unseen, -torch.inf, self.over(offset, 0.0))
        weight = (self.logits + log_weight).softmax(-1)
        return weighted_values(weight, self.v), weight


def _draw(policies: dict[str, Policy], budget: float, score: Tensor, coins: Tensor, even: Tensor) -> dict[str, Tensor]:
    """The three arms at one budget, [kv_heads, n] each: the same coins, and the same realised counts for top-k.

    even: the uniform arm's inclusion probabilities.
    """
    prob, keep = policies["certified"].with_budget(budget).plan(score, coins)
    protected = protected_set(score.shape[-1], policies["topk"].sinks, policies["topk"].recent, score.device)
    topk = topk_set(score, keep.sum(-1), protected)
    return {
        "prob": prob,
        "keep": keep,
        "topk": topk,
        "protected": protected.expand_as(keep),
        "uniform_prob": even,
        "uniform_keep": poisson_keep(even, coins),
    }


def _offset(keep: Tensor, prob: Tensor) -> Tensor:
    """log(1/prob) on retained tokens, -inf elsewhere."""
    return torch.where(keep, -prob.log(), -torch.inf)


def _measure(step: _Step, arms: dict[str, Tensor], score: Tensor, config: ReplayConfig) -> dict[str, Tensor]:
    """Every measured column, broadcastable to [budgets, steps, heads]."""
    prob, keep, one = arms["prob"], arms["keep"], torch.ones_like(arms["prob"])
    full, p = step.attend(torch.zeros_like(score)[None])
    out, weight = step.attend(_offset(keep, prob))
    topk_out, topk_weight = step.attend(_offset(arms["topk"], one))
    uniform_out, _ = step.attend(_offset(arms["uniform_keep"], arms["uniform_prob"]))
    every, values = step.over(prob, 1.0), step.v[0, :, :, : step.n]
    exact, undefined = tail_flags(torch.where(keep, prob, 1.0), (~keep).sum(-1))
    by_budget = {
        "var_anticipated": anticipated_variance(score.expand_as(prob), prob, values.expand(*prob.shape, -1)),
        "margin": boundary_margin(score.expand_as(prob), arms["topk"], arms["protected"]),
        "exact": exact,
        "undefined": undefined,
        "expected_kept": prob.double().sum(-1),
        "n_kept": keep.sum(-1),
    }
    cells = {
        "err": (out - full).norm(dim=-1),
        "out_norm": out.norm(dim=-1),
        "full_norm": full.norm(dim=-1),
        "var_hat": poisson_variance(weight, every, step.v, out),
        "var_true": poisson_variance(p / every.sqrt(), every, step.v, full.expand_as(out)),
        "max_term": max_term(weight, every, step.v, out),
        "err_topk": (topk_out - full).norm(dim=-1),
        "err_uniform": (uniform_out - full).norm(dim=-1),
        "entropy": retained_entropy(topk_weight),
    } | {name: x[:, None] for name, x in by_budget.items()}
    terms = {
        "anticipated": cells["var_anticipated"].expand_as(cells["var_hat"]),
        "weight_var": weight_variance(weight, every),
        "weight_max": (weight * (every < 1)).amax(-1),
    }
    for rule in RULES:
        r = radius(cells["var_hat"], cells["max_term"], config.delta, rule, kappa=config.kappa, **terms)
        cells[f"radius_{rule}"] = r.masked_fill(cells["undefined"], torch.nan)  # exact: r is 0 by itself
    return cells


def _rows(
    measured: dict[str, Tensor], step: _Step, config: ReplayConfig, policy: Policy, layer: int
) -> Iterator[dict[str, object]]:
    """One dict a cell, Python numbers only."""
    size = (len(config.budgets), step.steps, len(step.heads))
    columns = {name: x.expand(size).tolist() for name, x in measured.items()}
    for b, budget in enumerate(config.budgets):
        tokens, raised = policy.with_budget(budget).tokens(step.n)
        for h, head in enumerate(step.heads):
            for s in range(step.steps):
                cell = {name: values[b][s][h] for name, values in columns.items()}
                cell["undefined"] = "no sampled token retained" if cell["undefined"] else None
                yield _checked(cell) | {
                    "budget": budget,
                    "layer": layer,
                    "kv_head": step.group[h],
                    "head": head,
                    "step": s + 1,
                    "n_tokens": step.n + s + 1,
                    "budget_tokens": tokens,
                    "budget_raised": raised,
                }


def _checked(cell: dict[str, object]) -> dict[str, object]:
    """NaN means undefined in a radius or a margin, and is a fault of ours anywhere else."""
    for name, value in cell.items():
        if isinstance(value, float) and not math.isfinite(value):
            if not (name.startswith(("radius_", "margin")) and math.isnan(value)):
                raise FloatingPointError(f"{name} is {value}")
            cell[name] = None
    return cell
