"""The budget of a whole cache, divided over layers and heads: uniform, pyramid, ada. The total is kept."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cert.errors import CertError

KINDS = ("uniform", "pyramid", "ada")


def layer_budgets(kind: str, tokens: int, n_layers: int, low: int, high: int) -> list[int]:
    """Tokens per layer, n_layers * tokens in all, each between low and high.

    uniform, ada: the same everywhere. pyramid: falling linearly with depth from 2 * tokens - b to b,
    b = low + (tokens - low) / 20.

    tokens per layer on average, low <= tokens <= high; low is what a layer needs at least (protected tokens and the
    spare tail), high the cached tokens. Raises CertError otherwise. Source: Cai et al., PyramidKV (2024), beta = 20.
    """
    if kind not in KINDS:
        raise CertError(f"allocation {kind!r}: expected one of {', '.join(KINDS)}")
    if not low <= tokens <= high:
        raise CertError(f"{tokens} tokens a layer: expected between {low} and {high}")
    if kind != "pyramid" or n_layers == 1:
        return [tokens] * n_layers
    reach = min(tokens - low - (tokens - low) / 20, high - tokens)  # half the height of the slope
    wanted = [tokens + reach * (1 - 2 * layer / (n_layers - 1)) for layer in range(n_layers)]
    steps = [math.floor(sum(wanted[: layer + 1]) + 0.5) for layer in range(n_layers)]
    return [now - before for now, before in zip(steps, [0, *steps], strict=False)]


def head_budgets(
    kind: str, tokens: int, score: Float[Tensor, "*lead kv_heads n"], low: int
) -> Int[Tensor, "*lead kv_heads"]:
    """Tokens per KV head of one layer, kv_heads * tokens in all, none below low.

    uniform, pyramid: the same for every head. ada: low everywhere, the rest in proportion to how many of the layer's
    kv_heads * tokens top scores lie in the head, a fifth of it evenly.

    score [.., kv_heads, n]; low: what a head needs at least, low <= tokens <= n; no head gets more than n.
    Raises CertError otherwise. Source: Feng et al., Ada-KV (2024), safeguard 0.2.
    """
    kv_heads, n = score.shape[-2:]
    if kind not in KINDS:
        raise CertError(f"allocation {kind!r}: expected one of {', '.join(KINDS)}")
    if not low <= tokens <= n:
        raise CertError(f"{tokens} tokens a head: expected between {low} and {n}")
    even = torch.full(score.shape[:-1], tokens, dtype=torch.int64, device=score.device)
    if kind != "ada" or kv_heads == 1:
        return even
    top = score.flatten(-2).topk(kv_heads * tokens, dim=-1).indices // n
    count = torch.zeros(score.shape[:-1], dtype=torch.float64, device=score.device)
    count.scatter_add_(-1, top, torch.ones_like(top, dtype=torch.float64))
    wanted = low + (tokens - low) * (
        0.8 * count / tokens + 0.2
    )  # at most low + (tokens - low) * (0.8 n / tokens + 0.2) <= n
    return _whole(wanted)


def _whole(wanted: Float[Tensor, "*lead heads"]) -> Int[Tensor, "*lead heads"]:
    """Whole numbers with the same sum: differences of the rounded running total, each within 1 of what was wanted."""
    running = (wanted.cumsum(-1) + 0.5).floor().long()
    return running.diff(dim=-1, prepend=torch.zeros_like(running[..., :1]))
