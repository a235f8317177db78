"""The coins: uniforms addressed by (seed, document, layer, KV head, position), and the draw they decide."""

import hashlib

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cert.errors import CertError


def uniforms(
    seed: int, document: int | str, layer: int, n_heads: int, n_tokens: int, device: torch.device | None = None
) -> Float[Tensor, "n_heads n_tokens"]:
    """One uniform per KV head and logical position, the same on any device, in any order and for any later length.

    u = (2k + 1) / 2^24, k the top 23 bits of the position's Philox word, key = SHA-256 of (seed, document, layer,
    head): float32, never 0 or 1, so P(u <= prob) = prob within 6e-8, whatever the model's dtype.

    Returns [n_heads, n_tokens] float32; the columns of a shorter call are a prefix of a longer one's.
    Raises CertError for a negative size or a document that is neither an int nor a str.
    Source: Salmon et al., Parallel random numbers (2011); permanent random numbers, Ohlsson (1995).
    """
    if n_heads < 0 or n_tokens < 0:
        raise CertError(f"uniforms for {n_heads} heads, {n_tokens} tokens: expected numbers of at least 0")
    if isinstance(document, bool) or not isinstance(document, int | str):
        raise CertError(f"document of type {type(document).__name__}: expected int or str")
    bits = np.empty((n_heads, n_tokens), dtype=np.uint64)
    for head in range(n_heads):
        address = repr((int(seed), document, int(layer), head)).encode()
        key = int.from_bytes(hashlib.sha256(address).digest()[:16], "little")
        bits[head] = np.random.Philox(key=key).random_raw(n_tokens)
    odd = (bits >> np.uint64(41)) * np.uint64(2) + np.uint64(1)
    return torch.from_numpy((odd.astype(np.float64) / 2**24).astype(np.float32)).to(device)


def poisson_keep(prob: Float[Tensor, "*heads n"], u: Float[Tensor, "*#heads n"]) -> Bool[Tensor, "*heads n"]:
    """Poisson sampling: token i is retained iff u_i <= prob_i, each on its own coin.

    prob [.., n], u [.., n] of the same n. The same coins with smaller probabilities give a subset.
    Raises CertError where u has fewer than 16 bits (P(u < 0.001) would be 0.0029 in bfloat16).
    """
    if torch.finfo(u.dtype).bits < 32:
        raise CertError(f"u of dtype {u.dtype}: expected float32 or float64")
    return u <= prob
