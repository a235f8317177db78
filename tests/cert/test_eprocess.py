"""Levels and powers of the sequential procedures, by seeded simulation with a binomial bound and by enumeration."""

import itertools
from math import exp, log, sqrt

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from cert.certificate import radius
from cert.eprocess import (
    EProcess,
    freedman_pinelis,
    poisson_increment,
    union_level,
    union_radius,
    weighted_sum,
)
from cert.errors import CertError


def most(level: float, reps: int) -> float:
    """Largest share of `reps` events of probability <= level that is no evidence against it (z = 3.3)."""
    return level + 3.3 * sqrt(level * (1 - level) / reps)


SHARES = {  # miss shares of one unit, coverage 1 - mean
    "bernoulli": lambda rng, mean, n: (rng.random(n) < mean).astype(float),
    "beta": lambda rng, mean, n: rng.beta(10 * mean, 10 * (1 - mean), n),
    "u-shaped": lambda rng, mean, n: rng.beta(mean / 3, (1 - mean) / 3, n),
    "rare": lambda rng, mean, n: np.where(rng.random(n) < mean / 0.3, 0.3, 0.0),
}


def run(shares, **settings) -> EProcess:
    process = EProcess(**settings)
    for share in shares:
        process.update(float(share))
    return process


# ---------------------------------------------------------------- betting across units


@pytest.mark.parametrize("kind", SHARES)
def test_level_at_coverage_exactly_95(kind):
    rng, reps = np.random.default_rng(1), 200
    ends = [run(SHARES[kind](rng, 0.05, 200)) for _ in range(reps)]
    assert sum(p.alarm_at is not None for p in ends) / reps <= most(0.05, reps)
    assert sum(p.evidence_at is not None for p in ends) / reps <= most(0.05, reps)


@pytest.mark.parametrize(("kind", "units"), [("bernoulli", 200), ("u-shaped", 200), ("beta", 40), ("rare", 80)])
def test_coverage_85_alarms(kind, units):
    rng, reps = np.random.default_rng(2), 100
    assert sum(run(SHARES[kind](rng, 0.15, units)).alarm_at is not None for _ in range(reps)) / reps > 0.9


@pytest.mark.parametrize(("kind", "units"), [("beta", 200), ("bernoulli", 350)])
def test_coverage_99_is_found(kind, units):
    rng, reps = np.random.default_rng(3), 100
    assert sum(run(SHARES[kind](rng, 0.01, units)).evidence_at is not None for _ in range(reps)) / reps > 0.9


def test_level_against_bold_play():
    """An adversary who knows the next bet picks the two-point share that would just reach the threshold.

    The crossing rate is then close to the level (0.10 of 0.2), so a bet that looked at its own unit would show.
    """
    rng, reps, alpha, eta = np.random.default_rng(4), 300, 0.2, 0.2

    def alarms() -> bool:
        process = EProcess(alpha, eta)
        for _ in range(200):
            bet, _ = process.bets()
            wealth = exp(process.path[-1].log_alarm) if process.path else 1.0
            share = min(1.0, alpha + (1.000001 / eta / wealth - 1) / bet) if bet > 0 else 1.0
            if process.update(share if rng.random() < alpha / share else 0.0):
                return True
        return False

    rate = sum(alarms() for _ in range(reps)) / reps
    assert 0.05 < rate <= most(eta, reps)


def test_adaptive_audits_need_the_weights():
    """Units that look bad are audited more often: the weighted process keeps the level, the bare one alarms."""
    rng, reps, units = np.random.default_rng(5), 100, 400
    weighted = bare = caught = 0
    for _ in range(reps):
        looks_bad = rng.random(units) < 0.5
        q = np.where(looks_bad, 0.95, 0.15)
        coins = rng.random(units) < q
        null, plain, broken = EProcess(q_min=0.15), EProcess(), EProcess(q_min=0.15)
        misses = rng.random(units) < np.where(looks_bad, 0.1, 0.0)  # mean exactly 0.05
        worse = rng.random(units) < np.where(looks_bad, 0.28, 0.02)  # mean 0.15
        for i in range(units):
            null.update(float(misses[i]) if coins[i] else None, coins[i], q[i])
            broken.update(float(worse[i]) if coins[i] else None, coins[i], q[i])
            if coins[i]:
                plain.update(float(misses[i]))
        weighted += null.alarm_at is not None or null.evidence_at is not None
        bare += plain.alarm_at is not None
        caught += broken.alarm_at is not None
    assert weighted / reps <= most(0.1, reps)  # two procedures at 0.05 each
    assert bare / reps > most(0.05, reps)
    assert caught / reps > 0.9


def test_path_by_hand():
    process = run([0.4, 0.0])
    first, second = process.path
    assert (first.bet_alarm, first.bet_evidence, first.log_alarm) == (0.0, 0.0, 0.0)
    mean = (0.05 + 0.4) / 2
    variance = (0.05 * 0.95 + (0.4 - 0.05) * (0.4 - mean)) / 2
    bet = (mean - 0.05) / (variance + (mean - 0.05) ** 2)
    assert second.bet_alarm == pytest.approx(bet, rel=1e-12)
    assert second.log_alarm == pytest.approx(log(1 - bet * 0.05), rel=1e-12)
    assert second.log_evidence == 0.0
    good = run([0.0, 0.0]).path[1]
    assert good.bet_alarm == 0.0
    assert good.log_evidence == pytest.approx(log(1 + good.bet_evidence * 0.05), rel=1e-12)


def test_weights_by_hand():
    """X = M/q on audited units and 0 elsewhere; the pseudo-unit has the largest variance of an X of mean alpha."""
    process = EProcess(q_min=0.25)
    process.update(0.5, True, 0.25)
    process.update(None, False, 0.4)
    bet = process.path[1].bet_alarm
    mean = (0.05 + 2.0) / 2
    variance = (0.05 * (4 - 0.05) + (2 - 0.05) * (2 - mean)) / 2
    assert bet == pytest.approx((mean - 0.05) / (variance + (mean - 0.05) ** 2), rel=1e-12)
    assert process.path[1].log_alarm == pytest.approx(log(1 - bet * 0.05), rel=1e-12)


def test_goes_on_after_the_alarm_in_log_space():
    process = run([1.0] * 3000)
    assert process.alarm_at is not None and process.alarm_at < 10
    assert len(process.path) == 3000
    assert 1000 < process.path[-1].log_alarm < np.inf  # exp of it is no float any more
    brief = run([1.0] * 7)
    while brief.path[-1].log_alarm >= log(20):
        brief.update(0.0)
    assert brief.update(0.0)  # reached once: it stays


@pytest.mark.parametrize("q_min", [0.1, 1.0])
def test_bets_stay_admissible(q_min):
    """Whatever comes next, both factors stay positive: 0 <= lam < 1/alpha and lam < 1/(1/q_min - alpha)."""
    for shares in ([1.0] * 50, [0.0] * 50, [0.0, 1.0] * 25):
        process = EProcess(q_min=q_min)
        for share in shares:
            process.update(share, True, q_min)
            up, down = process.bets()
            assert 0 <= up < 1 / 0.05 and 0 <= down < 1 / (1 / q_min - 0.05)
            assert up == 0 or down == 0


@pytest.mark.parametrize(
    ("share", "audited", "q"),
    [
        (1.1, True, 1.0),
        (-0.1, True, 1.0),
        (float("nan"), True, 1.0),
        (None, True, 1.0),
        (0.5, True, 0.1),
        (0.5, True, 1.5),
        (0.5, True, float("nan")),
        (0.5, False, 0.5),
        (None, False, 1.0),
    ],
)
def test_bad_units_are_refused_and_leave_no_trace(share, audited, q):
    process = EProcess(q_min=0.2)
    with pytest.raises(CertError):
        process.update(share, audited, q)
    assert process.path == []


@pytest.mark.parametrize("settings", [{"alpha": 0.0}, {"eta": 1.0}, {"q_min": 0.0}, {"q_min": 1.5}])
def test_bad_settings(settings):
    with pytest.raises(CertError):
        EProcess(**settings)


# ---------------------------------------------------------------- one trajectory, any dependence


@pytest.mark.parametrize("chance", [0.3, 0.49, 0.6, 0.8])
def test_weighted_sum_keeps_its_level_under_one_shared_coin(chance):
    """One coin of probability `chance` decides all steps: share delta/chance at each, marginal mean delta."""
    rng, reps, delta, eta = np.random.default_rng(6), 1000, 0.05, 0.5
    coins = rng.random(reps) < chance
    alarms = [weighted_sum(np.full(400, coin * delta / chance), delta).max() >= 1 / eta for coin in coins]
    assert np.mean(alarms) <= most(eta, reps)
    assert any(alarms) == (chance < eta)  # sharp: just below the level it alarms with the coin


DEPENDENT = {  # shares [steps] of one trajectory of marginal mean delta, from one uniform and a generator
    "independent": lambda rng, u, delta, steps: (rng.random(steps) < delta).astype(float),
    "one coin": lambda rng, u, delta, steps: np.full(steps, float(u < delta)),
    "one step each": lambda rng, u, delta, steps: (np.floor(u / delta) == np.arange(steps)).astype(float),
    "bursts": lambda rng, u, delta, steps: np.repeat(rng.random(steps // 10) < 2 * delta, 10) * 0.5,
    "heads": lambda rng, u, delta, steps: np.full(steps, rng.beta(delta, 1 - delta)),
}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_weighted_sum_keeps_its_level_as_the_study_uses_it(kind):
    """delta = 0.005 against eta = 0.05, a hundred steps: what analysis.monitor does."""
    rng, reps, delta, eta = np.random.default_rng(16), 2000, 0.005, 0.05
    shares = [DEPENDENT[kind](rng, u, delta, 100) for u in rng.random(reps)]
    assert np.mean([weighted_sum(share, delta)[-1] >= 1 / eta for share in shares]) <= most(eta, reps)
    assert abs(np.mean(shares) - delta) < 0.004  # the null is not empty


def test_running_product_fails_under_one_shared_coin():
    """The form offered nowhere: betting over dependent steps of one trajectory as if they were units."""
    rng, reps = np.random.default_rng(7), 60
    wrong = [run(np.full(200, coin * 0.15)).alarm_at is not None for coin in rng.random(reps) < 1 / 3]
    right = [weighted_sum(np.full(200, coin * 0.15), 0.05).max() >= 20 for coin in rng.random(reps) < 1 / 3]
    assert np.mean(wrong) > most(0.05, reps)
    assert np.mean(right) <= most(0.05, reps)


def test_weighted_sum_by_hand_and_its_reach():
    assert weighted_sum([1.0, 0.0, 0.5], 0.1).tolist() == pytest.approx([5.0, 5.0, 5.0 + 5 / 12])
    assert weighted_sum([1.0, np.nan, 0.5], 0.1, [True, False, True])[-1] == pytest.approx(5.0 + 5 / 12)
    everything_missed = np.ones(10_000)
    assert weighted_sum(everything_missed, 0.05).max() < 20  # delta = eta can never alarm
    assert weighted_sum(everything_missed, 0.005)[0] >= 20  # delta = eta / 10 does at once
    assert weighted_sum([0.15] * 3, 0.005)[-1] >= 20  # and with coverage 0.85 at the third step


def test_weighted_sum_survives_audits_chosen_after_looking():
    """Auditing just the steps that missed cannot raise the sum above auditing all."""
    shares = np.random.default_rng(8).random(50) * (np.arange(50) % 3 == 0)
    assert (weighted_sum(shares, 0.1, shares > 0) <= weighted_sum(shares, 0.1)).all()


@pytest.mark.parametrize("shares", [[1.1], [np.nan], [-0.1], [[0.1]]])
def test_weighted_sum_refuses(shares):
    with pytest.raises(CertError):
        weighted_sum(shares, 0.1)


def test_union_levels_sum_to_delta():
    assert sum(union_level(s, 0.05) for s in range(1, 20_000)) == pytest.approx(0.05, rel=1e-4)
    for step, delta in ((0, 0.05), (1, 0.0), (1, 1.0)):
        with pytest.raises(CertError):
            union_level(step, delta)


def test_union_radius_covers_all_steps_where_the_plain_one_does_not():
    """Independent normal errors of variance 1, 40 steps: the hardest dependence for a union is none."""
    rng, reps = np.random.default_rng(9), 1000
    err = np.abs(rng.standard_normal((reps, 40)))
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)

    def rule(level: float) -> float:
        return radius(one, zero, level, "normal").item()

    running = np.array([union_radius(rule, s, 0.05) for s in range(1, 41)])
    assert (err > running).any(1).mean() <= most(0.05, reps)
    assert (err > rule(0.05)).any(1).mean() > 0.5
    assert running[0] == rule(0.025) and running[2] == rule(0.05 / 12)


# ---------------------------------------------------------------- replayed streaming


def mixture(norm: float, variance, bound, lam) -> float:
    """The supermartingale itself, from its formula: mean over lambda of cosh(lambda ||S||) exp(-sum V psi / b^2)."""
    spent = sum(v * (np.exp(lam * b) - 1 - lam * b) / b**2 for v, b in zip(variance, bound, strict=True) if v > 0)
    return float(np.mean(np.exp(lam * norm - spent) + np.exp(-lam * norm - spent)) / 2)


def lambdas(v: float, b: float, delta: float):
    level = log(2 / delta)
    best = log(1 + b * (b * level / 3 + sqrt((b * level / 3) ** 2 + 2 * v * level)) / v) / b
    return best * 0.5 ** np.arange(32)


@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_boundary_solves_the_mixture(delta):
    rng = np.random.default_rng(10)
    variance, bound = rng.exponential(size=15) * np.arange(15) ** 2, rng.exponential(size=15) + 0.1
    got = freedman_pinelis(variance, bound, delta)
    lam = lambdas(variance[1], bound[1], delta)  # the first event of positive variance
    assert got[0] == 0
    for t in range(1, 15):
        seen = variance[: t + 1], bound[: t + 1]
        want = brentq(lambda r, seen=seen: mixture(r, *seen, lam) - 1 / delta, 0, 2 * got[t], xtol=1e-11)
        assert got[t] == pytest.approx(want, rel=1e-9)


def test_mixture_is_a_supermartingale_exactly():
    """All 2^6 * 2^6 histories of two Poisson events on six vectors: the mean never rises, at any history."""
    rng = np.random.default_rng(11)
    for scale in (0.005, 1.0, 3.0):
        y, lam = scale * rng.standard_normal((6, 3)), np.array([0.05, 0.3, 1.0])
        norm, first = np.linalg.norm(y, axis=1), rng.uniform(0.2, 1.0, 6)
        start = poisson_increment(norm, np.ones(6), first)
        total = 0.0
        for keep in itertools.product([False, True], repeat=6):
            kept = np.array(keep)
            chance = np.where(kept, first, 1 - first).prod()
            now = mixture(np.linalg.norm((kept / first - 1) @ y), [start[0]], [start[1]], lam)
            total += chance * now
            second = first * np.where(kept, rng.uniform(0.3, 1.0, 6), 1.0)  # any function of the retained set
            after = poisson_increment(norm * kept, first, second)
            later = 0.0
            for again in itertools.product([False, True], repeat=int(kept.sum())):
                still = kept.copy()
                still[kept] = again
                rho = (second / first)[kept]
                p = np.where(again, rho, 1 - rho).prod()
                s = np.linalg.norm((still / second - 1) @ y)
                later += p * mixture(s, [start[0], after[0]], [start[1], after[1]], lam)
            assert later <= now * (1 + 1e-12)
        assert total <= 1
        assert scale > 0.005 or total > 1 - 1e-6  # tight for small steps: a smaller variance would not do


@pytest.mark.parametrize("wide", [1, 20])  # the largest step is a retained token's, then an evicted one's
def test_increment_is_the_exact_moment_and_range(wide):
    rng = np.random.default_rng(12)
    before, y = rng.uniform(0.3, 1.0, 5), rng.standard_normal((5, 2)) * np.array([[1], [wide], [1], [9], [1]])
    after = before * np.array([0.5, 0.9, 0.2, 1.0, 0.7])
    variance = reach = 0.0
    for keep in itertools.product([0, 1], repeat=5):
        rho = after / before
        p = np.where(keep, rho, 1 - rho).prod()
        step = (np.array(keep) / after - 1 / before)[:, None] * y  # all five were retained before
        variance += p * (step.sum(0) ** 2).sum()
        reach = max(reach, np.linalg.norm(step[rho < 1], axis=1).max())
    got = poisson_increment(np.linalg.norm(y, axis=1), before, after)
    assert got == (pytest.approx(variance, rel=1e-12), pytest.approx(reach, rel=1e-12))


def histories(reps: int, seed: int, turns: int = 30):
    """Streaming compression of 240 arriving vectors to about 25, the sizes depending on what was retained."""
    rng = np.random.default_rng(seed)
    n, arrival = turns * 8, np.repeat(np.arange(turns), 8)
    y = rng.standard_normal((n, 4))
    norm, base = np.linalg.norm(y, axis=1), rng.exponential(size=n) + 0.1
    u, prob, keep = rng.random((reps, n)), np.ones((reps, n)), np.ones((reps, n), dtype=bool)
    variance, bound, error = (np.empty((turns, reps)) for _ in range(3))
    for t in range(turns):
        here = keep & (arrival <= t)
        size = base * (1 + np.roll(here, 1, axis=1))
        tau = 25 / (here * size / prob).sum(1, keepdims=True)
        after = np.where(here, np.minimum(prob, tau * size), prob)
        variance[t], bound[t] = poisson_increment(np.where(here, norm, 0.0), prob, after)
        prob = after
        keep &= u <= prob
        error[t] = np.linalg.norm((np.where(arrival <= t, keep / prob - 1, 0.0)) @ y, axis=1)
    return variance, bound, error


def test_streaming_errors_stay_below_the_boundary():
    variance, bound, error = histories(600, 13)
    got = freedman_pinelis(variance, bound, 0.05)
    assert (error > got).any(0).mean() <= most(0.05, 600)
    assert np.median(got[-1] / error[-1]) < 12  # and it is no trivial bound
    assert (error[-1] ** 2).mean() == pytest.approx(variance.sum(0).mean(), rel=0.15)
    fixed_time = 1.96 * np.sqrt(variance.cumsum(0))  # a running normal radius read as an anytime one
    assert (error > fixed_time).any(0).mean() > most(0.05, 600)


def test_coin_flips_stay_below_the_boundary():
    """The simple random walk for 2,000 steps, at a level where crossings do occur."""
    walk = np.random.default_rng(14).choice([-1.0, 1.0], size=(2000, 1000)).cumsum(0)
    got = freedman_pinelis(np.ones((2000, 1)), np.ones((2000, 1)), 0.5)
    rate = (np.abs(walk) > got).any(0).mean()
    assert 0.02 < rate <= most(0.5, 1000)


def test_boundary_has_prefix_scale_and_batch():
    rng = np.random.default_rng(15)
    variance, bound = rng.exponential(size=(12, 2, 3)), rng.exponential(size=(12, 2, 3)) + 0.1
    got = freedman_pinelis(variance, bound)
    assert (np.diff(got, axis=0) >= 0).all()
    assert np.array_equal(got[:5], freedman_pinelis(variance[:5], bound[:5]))  # no look ahead
    np.testing.assert_allclose(freedman_pinelis(variance * 1e-8, bound * 1e-4), got * 1e-4, rtol=1e-12)
    np.testing.assert_allclose(freedman_pinelis(variance[:, 1, 2], bound[:, 1, 2]), got[:, 1, 2], rtol=1e-12)


def test_boundary_edges():
    assert freedman_pinelis([0.0, 0.0], [0.0, 0.0]).tolist() == [0.0, 0.0]
    late = freedman_pinelis([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1e9, 1.0])
    assert late.tolist() == [0.0, *freedman_pinelis([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])]
    for variance, bound in (
        ([-1.0], [1.0]),
        ([1.0], [0.0]),
        ([np.nan], [1.0]),
        ([1.0], [np.inf]),
        (np.ones(()), np.ones(())),
        (np.ones((0, 2)), np.ones((0, 2))),
    ):
        with pytest.raises(CertError):
            freedman_pinelis(variance, bound)
    with pytest.raises(CertError, match="grows"):
        freedman_pinelis([1.0, 1e30], [1.0, 1e15])
    with pytest.raises(CertError):
        poisson_increment([1.0], [0.5], [0.6])


def test_small_steps_reach_the_gaussian_boundary():
    """As b -> 0 with V fixed, psi(lambda b) / b^2 -> lambda^2 / 2: the sub-Gaussian mixture."""
    got = freedman_pinelis([1.0], [1e-9], 0.05)[0]
    lam = lambdas(1.0, 1e-9, 0.05)
    want = brentq(lambda r: np.mean(np.exp(-(lam**2) / 2) * np.cosh(lam * r)) - 20, 0, 20, xtol=1e-12)
    assert got == pytest.approx(want, rel=1e-7)
