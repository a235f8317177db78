"""The replay as a plain loop over its cells, each from its definition: what its speed and its numbers are measured by."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cert.attention import full_attention, retained_attention
from cert.certificate import RULES, anticipated_variance, max_term, poisson_variance, radius, weight_variance
from cert.design import protected_set, topk_set
from cert.draw import uniforms
from cert.policy import Policy
from cert.silent import boundary_margin, retained_entropy
from runs.capture import Decoded, LayerCapture
from runs.config import ReplayConfig
from runs.replay import spread_heads, token_score


def plain_cells(
    decoded: Decoded, document: str, config: ReplayConfig, policies: dict[str, Policy]
) -> Iterator[dict[str, float | int]]:
    """The numbers of replay_document's cells, in its order; where a radius is undefined or exact this says nothing of it."""
    for layer, capture in decoded.layers.items():
        heads = spread_heads(capture.window.shape[0], capture.keys.shape[0], config.heads)
        for budget in config.budgets:
            for head in heads:
                for step in range(1, config.steps + 1):
                    cell = {"layer": layer, "budget": budget, "head": head, "step": step}
                    with_budget = {name: policy.with_budget(budget) for name, policy in policies.items()}
                    coins = (config.seed, document, layer)
                    yield cell | _cell(capture, head, step, with_budget, coins, config)


def _cell(
    capture: LayerCapture,
    head: int,
    step: int,
    policies: dict[str, Policy],
    address: tuple[int, str, int],
    config: ReplayConfig,
) -> dict[str, float | int]:
    kv_heads, n, scale = capture.keys.shape[0], capture.keys.shape[1] - config.steps, capture.scale
    h, seen = head // (capture.window.shape[0] // kv_heads), n + step
    score = token_score(policies["certified"], capture, n)
    coins = uniforms(*address, kv_heads, n, device=score.device)
    prob, keep = policies["certified"].plan(score, coins)
    even, evenly = policies["uniform"].plan(torch.ones_like(score), coins)
    protected = protected_set(n, policies["topk"].sinks, policies["topk"].recent, score.device).expand_as(keep)
    topk = topk_set(score, keep.sum(-1), protected)
    q = capture.queries[step - 1][head : head + 1].float()
    k, v = (x[h : h + 1, :seen].float() for x in (capture.keys, capture.values))

    def with_new(x: Tensor, fill: float) -> Tensor:
        return torch.cat([x[h : h + 1], x.new_full((1, step), fill)], -1)

    def served(keep: Tensor, prob: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        there = with_new(keep, True)[0]
        mine, values = with_new(prob, 1.0)[:, there], v[:, there]
        return *retained_attention(q, k[:, there], values, -mine.log(), scale), mine, values

    full = full_attention(q, k, v, scale)
    every = with_new(prob, 1.0)
    p = retained_attention(q, k, v, torch.zeros_like(every), scale)[1]
    out, weight, mine, values = served(keep, prob)
    topk_out, topk_weight, *_ = served(topk, torch.ones_like(prob))
    found = {
        "err": (out - full).norm(),
        "out_norm": out.norm(),
        "full_norm": full.norm(),
        "var_hat": poisson_variance(weight, mine, values, out),
        "var_true": poisson_variance(p / every.sqrt(), every, v, full),
        "var_anticipated": anticipated_variance(score[h : h + 1], prob[h : h + 1], v[:, :n]),
        "max_term": max_term(weight, mine, values, out),
        "err_topk": (topk_out - full).norm(),
        "err_uniform": (served(evenly, even)[0] - full).norm(),
        "entropy": retained_entropy(topk_weight),
        "margin": boundary_margin(score[h : h + 1], topk[h : h + 1], protected[h : h + 1]),
        "expected_kept": prob[h].double().sum(),
        "n_kept": keep[h].sum(),
    }
    terms = {
        "anticipated": found["var_anticipated"],
        "weight_var": weight_variance(weight, mine),
        "weight_max": (weight * (mine < 1)).amax(-1),
    }
    for rule in RULES:
        sums = (found["var_hat"], found["max_term"], config.delta, rule)
        found[f"radius_{rule}"] = radius(*sums, kappa=config.kappa, **terms)
    return {name: x.item() for name, x in found.items()}
