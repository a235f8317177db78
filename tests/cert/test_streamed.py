"""Replayed streaming: the path against its definition, the identity with the estimator, and its level by simulation."""

from math import sqrt

import numpy as np
import pytest
import torch

from cert.attention import full_attention, retained_attention
from cert.design import streaming_probs
from cert.draw import uniforms
from cert.errors import CertError
from cert.streamed import Event, replayed_path

TURNS, EACH, GROUP, D = 12, 12, 2, 4
N = TURNS * EACH


def head(seed: int = 0):
    """(q [group, d], k [n, d], v [n, d]) of one KV head, attention uneven enough to matter."""
    rng = np.random.default_rng(seed)
    return 2 * rng.standard_normal((GROUP, D)), rng.standard_normal((N, D)), rng.standard_normal((N, 3))


def history(coins, keep=25.0):
    """Events of one history of these coins: sizes depend on what is retained, never on a coin otherwise."""
    base, events = np.random.default_rng(1).exponential(size=N) + 0.1, []
    prob, present = np.ones(N), np.zeros(N, dtype=bool)
    for t in range(TURNS):
        present[t * EACH : (t + 1) * EACH] = True
        at = np.flatnonzero(present)
        size = base[at] * (1 + np.isin(at - 1, at)) * (1 + (at + t) % 3)
        if len(at) > keep:
            certain = torch.from_numpy(at < 2)
            prob[at] = streaming_probs(torch.from_numpy(size), torch.from_numpy(prob[at]), keep, certain).numpy()
        events.append(Event(at, prob[at].copy()))
        present[at] = coins[at] <= prob[at]
    return events


def retained(events, coins):
    """After each event: (logical places that are retained, their probabilities, tokens that have come)."""
    for t, event in enumerate(events):
        own = coins[event.position] <= event.prob
        yield event.position[own], event.prob[own], (t + 1) * EACH


def test_the_path_is_its_definition():
    """S_t in loops, p, o over all tokens whenever they come; those that have not come yet have no term."""
    q, k, v = head()
    coins = np.random.default_rng(2).random(N)
    events = history(coins)
    path = replayed_path(q, k, v, 0.5, events, coins)
    for j in range(GROUP):
        p = np.exp(0.5 * k @ q[j])
        p /= p.sum()
        o = sum(p[i] * v[i] for i in range(N))
        before = np.ones(N)
        for t, (at, prob, come) in enumerate(retained(events, coins)):
            weight = dict(zip(at, 1 / prob, strict=True))
            s = sum((weight.get(i, 0.0) - 1) * p[i] * (v[i] - o) for i in range(come))
            assert path.err[t, j] == pytest.approx(np.linalg.norm(s), rel=1e-9)
            event, variance = events[t], 0.0
            for i, now in zip(event.position, event.prob, strict=True):
                norm = np.linalg.norm(p[i] * (v[i] - o)) / before[i]
                variance += (before[i] / now - 1) * norm**2
                before[i] = now
            assert path.variance[t, j] == pytest.approx(variance, rel=1e-9, abs=1e-15)
    assert path.err.shape == path.radius.shape == path.bound.shape == (TURNS, GROUP)
    assert (path.err[:2] == 0).all() and (path.radius[:2] == 0).all() and path.err[-1].min() > 0


def test_the_last_error_is_the_estimators_up_to_its_factor():
    """o_hat - o = (A / A_hat) S exactly (METHOD section 3), with cert.attention as the estimator."""
    q, k, v = head(3)
    coins = uniforms(0, "d", 0, 1, N)[0].double().numpy()
    events = history(coins)
    path = replayed_path(q, k, v, 0.5, events, coins)
    *_, (at, prob, _) = retained(events, coins)
    query, key, value = (torch.from_numpy(x) for x in (q, k[None], v[None]))
    out, _ = retained_attention(
        query, key[:, at], value[:, at], -torch.from_numpy(prob).log()[None], 0.5
    )  # [heads, d] against one KV head
    total = np.exp(0.5 * q @ k.T)
    factor = total.sum(-1) / (total[:, at] / prob).sum(-1)
    err = (out - full_attention(query, key, value, 0.5)).norm(dim=-1).numpy()
    np.testing.assert_allclose(err, factor * path.err[-1], rtol=1e-5)


def test_level_and_variance_over_adaptive_histories():
    """250 draws, both heads by a union: the radius is crossed in at most delta of them; the variances are exact."""
    q, k, v = head(4)
    rng, reps, delta = np.random.default_rng(5), 250, 0.3
    crossed, above, squares, spent = 0, 0, np.zeros(GROUP), np.zeros(GROUP)
    for _ in range(reps):
        coins = rng.random(N)
        path = replayed_path(q, k, v, 0.5, history(coins), coins, delta, heads=GROUP)
        crossed += bool((path.err > path.radius).any())
        spread = np.sqrt(path.variance.cumsum(0))
        above += bool((path.err > spread).any())
        squares += path.err[-1] ** 2 / reps
        spent += path.variance.sum(0) / reps
    assert crossed / reps <= delta + 3.3 * sqrt(delta * (1 - delta) / reps)
    np.testing.assert_allclose(squares, spent, rtol=0.2)
    assert above / reps > delta and (path.radius[-1] < 8 * spread[-1]).all()  # no trivial level, no trivial bound


def test_heads_share_the_level():
    q, k, v = head(6)
    coins = np.random.default_rng(7).random(N)
    given = q, k, v, 0.5, history(coins), coins
    both, one = replayed_path(*given, 0.05, heads=10), replayed_path(*given, 0.005)
    assert np.array_equal(both.radius, one.radius) and (both.radius[-1] > replayed_path(*given).radius[-1]).all()
    alone = replayed_path(q[1:], *given[1:])
    for one, other in zip(alone, replayed_path(*given), strict=True):
        np.testing.assert_allclose(one[:, 0], other[:, 1], rtol=1e-9)


def test_no_later_event_changes_an_earlier_point():
    q, k, v = head(8)
    coins = np.random.default_rng(9).random(N)
    events = history(coins)
    whole, part = (replayed_path(q, k, v, 0.5, some, coins) for some in (events, events[:7]))
    for one, other in zip(whole, part, strict=True):
        assert np.array_equal(one[:7], other)


def test_a_probability_that_came_back_rounded_stays():
    q, k, v = head()
    coins = np.full(N, 0.1)
    at = np.arange(EACH)
    prob = np.full(EACH, 0.7)
    risen = replayed_path(q, k, v, 0.5, [Event(at, prob), Event(at, prob * (1 + 5e-7))], coins)
    assert (risen.variance[1] == 0).all() and np.array_equal(risen.err[0], risen.err[1])
    with pytest.raises(CertError, match="prob <= prob_before"):
        replayed_path(q, k, v, 0.5, [Event(at, prob), Event(at, prob * (1 + 1e-5))], coins)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event([0, 1], [1.0, 0.3]), Event([0, 1], [1.0, 0.3])], "event 1: token 1 was lost before it"),
        ([Event([0, 1], [1.0, 0.9]), Event([0, 2], [1.0, 1.0])], "event 1: token 1 is retained and not listed"),
        ([Event([0, 0], [1.0, 1.0])], "event 0: expected position and prob"),
        ([Event([0, N], [1.0, 1.0])], "event 0: expected position and prob"),
        ([Event([0, -1], [1.0, 1.0])], "event 0: expected position and prob"),
        ([Event([0, 1], [1.0])], "event 0: expected position and prob"),
        ([Event([0], [0.0])], "0 < prob"),
    ],
)
def test_events_that_contradict_the_coins_are_refused(events, message):
    events = [Event(np.array(event.position), np.array(event.prob)) for event in events]
    with pytest.raises(CertError, match=message):
        replayed_path(*head(), 0.5, events, np.full(N, 0.5))


def test_coins_for_every_token_and_an_event():
    with pytest.raises(CertError, match=r"coins \[3\]: expected one for each of the 144 tokens"):
        replayed_path(*head(), 0.5, [], np.full(3, 0.5))
    with pytest.raises(CertError, match="t >= 1"):
        replayed_path(*head(), 0.5, [], np.full(N, 0.5))
