"""Replayed streaming: the linearised error of one query along the compressions of a growing cache, and its radius.

The full run's query, keys and values are fixed, so that the error at each event is a martingale over the coins.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cert.eprocess import freedman_pinelis, poisson_increment
from cert.errors import CertError

Floats = NDArray[np.float64]
ROUNDED = 1e-6  # a cache stores log(1/prob) in float32: a probability that stays may come back larger by a rounding


class Event(NamedTuple):
    """One compression of one KV head: the tokens then present, and the probability of each to be there afterwards."""

    position: ArrayLike  # [m] logical places: the tokens retained so far, and those that are new
    prob: ArrayLike  # [m] overall inclusion probabilities pi_t


class Path(NamedTuple):
    """What `replayed_path` finds, [events, query heads] each."""

    err: Floats  # ||S_t||
    radius: Floats  # r_t
    variance: Floats  # of the increment of event t, given what was retained before
    bound: Floats  # range of one token's term in it


def replayed_path(  # noqa: PLR0913 - q, k, v and their scale, the events, the coins; the level has defaults
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    scale: float,
    events: Sequence[Event],
    coins: ArrayLike,
    delta: float = 0.05,
    heads: int = 1,
) -> Path:
    """Error and time-uniform radius of one fixed query, after each event of a streamed cache.

    S_t = sum_U (I_{t,i} / pi_{t,i} - 1) y_i,  y_i = p_i (v_i - o),  p = softmax_U(scale q.k), o = sum_U p_i v_i,
    I_{t,i} = [u_i <= pi_{t,i}] with the ONE coin of each token, I = pi = 1 for tokens that have not come yet;
    P(exists t and head: ||S_t|| > r_t) <= delta over all `heads` by a union, each at delta / heads (freedman_pinelis).

    q [group, d]: a query for each query head of one KV head; k [n, d], v [n, d'] of ALL tokens, the later ones
    included: the population. events in order; coins [n], as cert.draw.uniforms gives them.
    Assumes q, k, v of a run that saw none of the coins, and probabilities that depend on them through what was
    retained alone. The linearised error leaves out the factor A / A_hat of the realised one (METHOD section 3).
    Raises CertError where an event lists a token that was gone or leaves out one that was there, and for
    probabilities that rise or shapes that do not fit.
    """
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    norm, y = _terms(scale * query @ key.T, value)
    u, n = np.asarray(coins, dtype=np.float64), y.shape[1]
    if u.shape != (n,):
        raise CertError(f"coins {list(u.shape)}: expected one for each of the {n} tokens")
    prob, known, kept = np.ones(n), np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    err, moved = [], []
    for t, event in enumerate(events):
        at, now = np.asarray(event.position), np.asarray(event.prob, dtype=np.float64)
        _check_present(t, at, now, known, kept)
        after = np.where(now <= prob[at] * (1 + ROUNDED), np.minimum(now, prob[at]), now)
        moved.append(poisson_increment(norm[:, at], prob[at], after))
        prob[at], known[at], kept[at] = after, True, u[at] <= now
        weight = np.where(known, kept / prob - 1, 0.0)
        err.append(np.linalg.norm(weight @ y, axis=-1))
    shape = len(events), len(y)
    variance, bound = (np.array([pair[i] for pair in moved]).reshape(shape) for i in range(2))
    return Path(np.array(err).reshape(shape), freedman_pinelis(variance, bound, delta / heads), variance, bound)


def _terms(logit: Floats, v: Floats) -> tuple[Floats, Floats]:
    """(||y_i|| [group, n], y [group, n, d'])."""
    p = np.exp(logit - logit.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = p[..., None] * (v - (p @ v)[:, None])
    return np.linalg.norm(y, axis=-1), y


def _check_present(
    t: int, at: NDArray[np.int64], prob: Floats, known: NDArray[np.bool_], kept: NDArray[np.bool_]
) -> None:
    """An event takes every token that was retained, none that was lost, and each once."""
    if (
        at.ndim != 1
        or at.shape != prob.shape
        or len(np.unique(at)) != len(at)
        or not ((at >= 0) & (at < len(known))).all()
    ):
        raise CertError(f"event {t}: expected position and prob [m], each of the {len(known)} tokens at most once")
    if (gone := at[known[at] & ~kept[at]]).size:
        raise CertError(f"event {t}: token {gone[0]} was lost before it; expected the retained tokens and new ones")
    if (left := np.setdiff1d(np.flatnonzero(kept), at)).size:
        raise CertError(f"event {t}: token {left[0]} is retained and not listed; expected every token that is there")
