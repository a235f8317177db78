"""What a session reports: the certificate of each step, layer and head, and the summary of a request."""

import itertools
import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from cert.attention import at_least_float32, full_attention
from cert.certificate import RequestCertificate, radius, request_certificate
from cert.errors import CertError
from cert.hf.cache import CertifiedCache, CertifiedLayer
from cert.hf.certify import Sums, certify
from cert.hf.compress import prefix_bytes
from cert.hf.state import Block, State
from cert.silent import retained_entropy

OFF = "certificates are switched off (delta=None)"
EQUAL_BUDGETS = 0.01  # arms whose realised budgets differ by more are not at equal budget
RULE = "empirical_bernstein"  # of the certificate
NUMBERS = {"certificate": RULE, "assisted_certificate": "assisted"}


def served_error(layer: CertifiedLayer, query: Tensor, out: Tensor) -> Tensor:
    """||o_hat - o|| [batch, heads], o over every row ever written, for the query as it was served."""
    if layer.audit is None:
        return torch.zeros(out.shape[:-1], device=out.device)
    return (full_attention(query, *layer.audit, layer.scale, layer.softcap) - out).norm(dim=-1)


@torch.no_grad()
def record(
    state: State, index: int, layer: CertifiedLayer, query: Tensor, out: Tensor, found: Tensor | Sums | None
) -> None:
    """Called by each compressible layer of a forward: the step of its last token; query, out [batch, heads, d].

    found: weights or sums, as certify() takes them.
    """
    cache, options = state.running, state.options
    if cache is None or not cache.events or state.feeding:
        return
    delta = None if cache.policy.no_certificate is not None else options.delta
    entropy = retained_entropy(found) if options.signals and isinstance(found, Tensor) else None
    if delta is not None or options.audit or entropy is not None:
        out = at_least_float32(out)
        if delta is None:
            no = torch.zeros(out.shape[:-1], dtype=torch.bool, device=out.device)
            parts: dict[str, Any] = {"exact": no, "undefined": no}
        else:
            parts = certify(layer, out, found) | {"delta": delta}
        err = served_error(layer, query, out) if options.audit else None
        place = (state.request, state.step, index, layer.length - 1)
        state.blocks.append(Block(*place, vector_norm(out, dim=-1), err=err, entropy=entropy, **parts))
    if index == cache.last:
        state.step += 1
        if options.callback is not None:
            step = {"request": state.request, "step": state.step - 1, "position": layer.length - 1}
            options.callback(step | _token(state))


def _token(state: State) -> dict[str, Any]:
    """The certificate of the step that has just ended, over its layers and heads, or why there is none."""
    now = (state.request, state.step - 1)
    assert state.running is not None
    mine = (b for b in reversed(state.blocks) if (b.request, b.step) == now)  # among those of others, when together
    blocks = list(itertools.islice(mine, len(state.running.compressible)))
    found = request_number(state, state.request, RULE, blocks)
    numbers = (None, None) if found is None else (found.value, found.undefined_share)
    return {"certificate": numbers[0], "undefined_share": numbers[1], "reason": state.reasons[state.request]}


def table(state: State) -> dict[str, list[Any]]:
    """Columns of equal length, one entry a request, step, layer and query head; `pandas.DataFrame(...)` takes it.

    With audit=True also the served error, and var_hat and max_term: cert.certificate.radius of any level.
    """
    names = ["request", "step", "layer", "head", "position", "radius", "relative", "out_norm", "assisted"]
    audited = ["err", "var_hat", "max_term"] if state.options.audit else []
    names += ["exact", "undefined", "reason", *audited]
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for block in state.blocks:
        batch, heads = block.out_norm.shape
        count = batch * heads
        radius = block.radius
        relative = None if radius is None else radius / block.out_norm
        columns["request"] += [block.request + row for row in range(batch) for _ in range(heads)]
        columns["head"] += list(range(heads)) * batch
        for name in ("step", "layer", "position"):
            columns[name] += [getattr(block, name)] * count
        columns["relative"] += _numbers(relative, count)
        for name in ("radius", "out_norm", "assisted", "exact", "undefined"):
            columns[name] += _numbers(getattr(block, name), count)
        columns["reason"] += [state.reasons[block.request] if radius is None else None] * count
        for name in audited:
            columns[name] += _numbers(getattr(block, name), count)
    return columns


def _numbers(x: Tensor | None, count: int) -> list[Any]:
    """Plain values, None for what is absent or not a number."""
    if x is None:
        return [None] * count
    return [None if value != value else value for value in x.flatten().tolist()]


def request_number(state: State, request: int, rule: str, blocks: list[Block]) -> RequestCertificate | None:
    """The request certificate over compressed layers, steps and heads; None where the composition has none."""
    own = [b for b in blocks if b.request <= request < b.request + b.out_norm.shape[0]]
    if state.reasons.get(request) is not None or any(b.var_hat is None for b in own):
        return None
    if not own:
        return request_certificate(torch.zeros(0, 0, 0), torch.zeros(0, 0, 0))
    own.sort(key=lambda b: b.layer)  # stable: the steps of a layer stay in their order
    layers = len({b.layer for b in own})

    def cube(name: str) -> Tensor:
        return torch.stack([getattr(b, name) for b in own])[:, request - own[0].request].unflatten(0, (layers, -1))

    found = radius(cube("var_hat"), cube("max_term"), own[0].delta, rule, anticipated=cube("anticipated"))
    return request_certificate(found.float().cpu(), cube("out_norm").float().cpu())


def mean_entropy(state: State, request: int) -> float | None:
    """Mean entropy of the retained attention over compressed layers, heads and steps; None where nothing was evicted."""
    blocks = [b for b in state.blocks if b.request <= request < b.request + b.out_norm.shape[0]]
    found = [b.entropy[request - b.request] for b in blocks if b.entropy is not None]
    return torch.stack(found).double().mean().item() if found else None


def mean_margin(cache: CertifiedCache) -> float | None:
    """Mean margin at the boundary of a top-k set over layers and KV heads; None where no head has one."""
    found = [x for layer in cache.compressible.values() for x in layer.margins if x == x]
    return sum(found) / len(found) if found else None


def storage_bytes(cache: CertifiedCache) -> dict[str, int]:
    """Bytes the cache holds, by kind; but for plan_bytes, in host memory, they are those of its tensors' storages."""
    found = dict.fromkeys(("cache_bytes_before", "cache_bytes_after", "padding_bytes", "scalar_bytes"), 0)
    found |= dict.fromkeys(("audit_bytes", "score_bytes", "sliding_bytes"), 0)
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
            continue
        stored = _size(layer.keys, layer.values)
        if not isinstance(layer, CertifiedLayer):
            found["sliding_bytes"] += stored
            continue
        before, after = prefix_bytes(layer)
        found["cache_bytes_before"] += before
        found["cache_bytes_after"] += after
        found["padding_bytes"] += stored - after
        found["scalar_bytes"] += _size(layer.log_weight, layer.position, layer.evicted, layer.anticipated, layer.tail)
        found["score_bytes"] += _size(layer.queries, layer.mass)
        found["audit_bytes"] += _size(*(layer.audit or ()))
    plans = [plan for event in cache.plans.values() for plan in event.values()]
    return found | {"plan_bytes": sum(_size(plan.prob, plan.position) for plan in plans)}


def held_bytes(*caches: Cache | None) -> int:
    """Bytes of all tensors that these caches hold, of whatever kind."""
    values = [
        value for cache in caches if cache is not None for layer in cache.layers for value in vars(layer).values()
    ]
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return _size(*(x for x in flat if isinstance(x, Tensor)))


def _size(*tensors: Tensor | None) -> int:
    return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


def summary(state: State, request: int) -> dict[str, Any]:
    """One request in numbers: certificates, and its cache as it is, or was when the request ended."""
    numbers = {name: request_number(state, request, rule, state.blocks) for name, rule in NUMBERS.items()}
    found = {name: None if one is None else asdict(one) for name, one in numbers.items()}
    facts = state.ended.get(request) or cache_facts(state)
    entropy = {"entropy": mean_entropy(state, request)} if state.options.signals else {}
    return {"request": request, **found, **entropy, "no_certificate": state.reasons[request], **facts}


def decisive(found: dict[str, Any]) -> float | None:
    """The request certificate of a summary as a gate takes it: None where it is undefined, or flagged for that."""
    one = found["certificate"]
    return None if one is None or one["flagged"] else one["value"]


def cache_facts(state: State) -> dict[str, Any]:
    """The session's cache as it is: budgets, bytes by kind, the kernel and why, prefill tokens spent so far."""
    assert state.cache is not None
    cache, policy = state.cache, state.cache.policy
    n = (cache.events or [cache.length])[-1]
    tokens, raised = policy.tokens(n) if n else (0, False)
    nominal = policy.budget if policy.budget is not None else min(1.0, (policy.budget_tokens or n) / max(n, 1))
    return {
        "documents": cache.documents,
        "nominal_budget": nominal,
        "budget_tokens": tokens,
        "expected_budget": cache.expected,
        "realised_budget": cache.realised,
        "budget_raised": raised,
        "compressions": len(cache.events),
        "prefix_bytes_before": cache.prefix_bytes[0],
        "prefix_bytes_after": cache.prefix_bytes[1],
        **storage_bytes(cache),
        **({"margin": mean_margin(cache)} if state.options.signals else {}),
        "kernel": state.kernel[0],
        "kernel_why": state.kernel[1],
        "prefill_tokens": state.prefill_tokens,
        "rerun_prefill_tokens": state.rerun_tokens,
    }


def budget_gap(summary_a: dict[str, Any], summary_b: dict[str, Any]) -> float:
    """|a - b| / max(a, b) of two arms' realised budgets, as their summary() gives them; warns above 1 %.

    Raises CertError where an arm was never compressed: it has no realised budget.
    """
    a, b = summary_a["realised_budget"], summary_b["realised_budget"]
    if a is None or b is None:
        raise CertError("budget_gap: an arm without a compression has no realised budget")
    gap = abs(a - b) / max(a, b)
    if gap > EQUAL_BUDGETS:
        warnings.warn(f"not at equal budget: realised {a:.4f} and {b:.4f}, {gap:.1%} apart", UserWarning, stacklevel=2)
    return float(gap)
