"""Time-uniform statements about certificates: what may be looked at after every unit, step or event.

Errors of one trajectory share one draw of coins, so they depend on each other in an unknown way: within a trajectory
only the weighted sum, the union and the replayed martingale below are valid; multiplying e-values is for units.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, log1p
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cert.errors import CertError

BET_CAP = 0.5  # share of the largest admissible bet: one unit can at most halve an e-value
GRID = 32  # equal mixture over lambda_0 / 2^j: later ranges may be 10^5 times the first event's, as in real attention

R = TypeVar("R")


class Point(NamedTuple):
    """One unit on the path: what was seen, the two bets laid before it, the two log e-values after it."""

    share: float | None
    q: float
    bet_alarm: float
    bet_evidence: float
    log_alarm: float
    log_evidence: float


class EProcess:
    """Betting e-processes across independent draws: an alarm for lost coverage and evidence for coverage.

    alarm     E_t = prod_s (1 + lam_s (X_s - alpha)),  0 <= lam_s < 1/alpha,             null: E[M_t | past] <= alpha
    evidence  E_t = prod_s (1 + lam_s (alpha - X_s)),  0 <= lam_s < 1/(1/q_min - alpha), null: E[M_t | past] >= alpha
    with X_t = A_t M_t / q_t, M_t in [0, 1] the share of unit t's head-steps whose error exceeds the radius.

    Under its null (for every t) each is a nonnegative supermartingale from 1, so P(sup E_t >= 1/eta) <= eta (Ville).
    Assumes: one unit is one draw (document, conversation); the audit coin A_t, of known probability q_t, depends on
    M_t through nothing but q_t, which may use the past and what is seen of unit t before its errors. Where q is the
    same for all units, feed the audited ones alone, with q = 1: the coin says nothing about M. Recomputations by a
    gate are not audits. Rejecting "E[M_t | past] >= alpha for every t" does not show it false for each t.

    Bets are aGRAPA, lam_t = (m - alpha) / (s2 + (m - alpha)^2) (mirrored for evidence), from mean m and variance s2
    of X_1 .. X_{t-1} and one pseudo-unit of mean alpha, clipped to [0, BET_CAP * largest].
    Source: Waudby-Smith & Ramdas, Estimating means of bounded random variables by betting (2024).
    """

    def __init__(self, alpha: float = 0.05, eta: float = 0.05, q_min: float = 1.0) -> None:
        _check_level("alpha", alpha)
        _check_level("eta", eta)
        if not 0 < q_min <= 1:
            raise CertError(f"q_min must lie in (0, 1]; got {q_min!r}")
        self.alpha, self.eta, self.q_min = alpha, eta, q_min
        self.path: list[Point] = []
        self.alarm_at: int | None = None  # number of units seen when the threshold was first reached
        self.evidence_at: int | None = None
        self._mean, self._squares = alpha, alpha * (1 / q_min - alpha)  # pseudo-unit: alpha, largest variance there

    def bets(self) -> tuple[float, float]:
        """Bets (alarm, evidence) on the next unit: functions of the past alone."""
        gap = self._mean - self.alpha
        bet = gap / (self._squares / (len(self.path) + 1) + gap * gap)
        top_alarm, top_evidence = BET_CAP / self.alpha, BET_CAP / (1 / self.q_min - self.alpha)
        return min(max(bet, 0.0), top_alarm), min(max(-bet, 0.0), top_evidence)

    def update(self, share: float | None, audited: bool | np.bool_ = True, q: float = 1.0) -> bool:
        """Take one unit (share M_t, None where not audited); True once the alarm was ever reached.

        Raises CertError for a share outside [0, 1], a q outside [q_min, 1], a share that contradicts `audited`,
        or an unaudited unit at q = 1. Goes on after an alarm: the path is kept whole.
        """
        x = self._weighted(share, audited, q)
        bet_alarm, bet_evidence = self.bets()
        last = self.path[-1] if self.path else Point(None, 1.0, 0.0, 0.0, 0.0, 0.0)
        log_alarm = last.log_alarm + log1p(bet_alarm * (x - self.alpha))
        log_evidence = last.log_evidence + log1p(bet_evidence * (self.alpha - x))
        self.path.append(Point(share, q, bet_alarm, bet_evidence, log_alarm, log_evidence))
        shift = x - self._mean
        self._mean += shift / (len(self.path) + 1)
        self._squares += shift * (x - self._mean)  # Welford, the pseudo-unit counted in
        threshold, n = -log(self.eta), len(self.path)
        if self.alarm_at is None and log_alarm >= threshold:
            self.alarm_at = n
        if self.evidence_at is None and log_evidence >= threshold:
            self.evidence_at = n
        return self.alarm_at is not None

    def _weighted(self, share: float | None, audited: bool | np.bool_, q: float) -> float:
        if not self.q_min <= q <= 1:
            raise CertError(f"audit probability must lie in [q_min, 1] = [{self.q_min}, 1]; got {q!r}")
        if not audited:
            if share is not None or q == 1:
                raise CertError(f"a unit not audited has share None and q < 1; got share {share!r}, q {q!r}")
            return 0.0
        if share is None or not 0 <= share <= 1:
            raise CertError(f"the share of an audited unit must lie in [0, 1]; got {share!r}")
        return share / q


def weighted_sum(share: ArrayLike, delta: float, audited: ArrayLike = True) -> NDArray[np.float64]:
    """Running e-value of one trajectory whose steps may depend on each other in any way.

    E_t = sum_{s <= t} A_s e_s / (s (s+1)),  e_s = M_s / delta;  P(sup_t E_t >= 1/eta) <= eta.
    share [steps] in [0, 1] (M_s, ignored where not audited), audited [steps]; returns E_t [steps].

    Assumes E[M_s] <= delta for every step s, unconditionally: the expectation is over the one draw the steps share
    and nothing is asked of E[M_s | earlier steps]. E_t does not fall and sum 1/(s(s+1)) = 1, so E[sup E_t] <= 1 and
    Markov's inequality is the proof (Vovk & Wang, E-values, 2021: the mean is the merger for arbitrary dependence).
    s counts ALL steps: weights are then fixed in advance and any choice of audits, even one looking at errors, only
    loses terms. E_t < 1/delta always, so an alarm is possible only for eta > delta: judge misses against a radius
    of level delta well below eta (delta = eta/10 alarms at the first step if all its heads miss).
    Raises CertError for shares outside [0, 1] or delta outside (0, 1).
    """
    _check_level("delta", delta)
    seen = np.where(audited, np.asarray(share, dtype=np.float64), 0.0)
    if seen.ndim != 1 or not ((seen >= 0) & (seen <= 1)).all():
        raise CertError("shares must be one trajectory [steps] of values in [0, 1] wherever audited")
    step = np.arange(1, len(seen) + 1)
    return np.cumsum(seen / delta / (step * (step + 1.0)))


def union_level(step: int, delta: float) -> float:
    """Level of step s = 1, 2, ... in a union over all steps: delta_s = delta / (s (s+1)), which sum to delta."""
    _check_level("delta", delta)
    if step < 1:
        raise CertError(f"steps count from 1; got {step!r}")
    return delta / (step * (step + 1))


def union_radius(rule: Callable[[float], R], step: int, delta: float) -> R:
    """Radius of step s from the caller's rule (level -> radius): P(any step's error > its radius) <= delta.

    Assumes P(err_s > rule(delta_s)) <= delta_s for each step by itself; any dependence between steps (Boole). One
    head: H heads at once need delta / H. The rule is, for instance, lambda level: radius(var_hat, max_term, level).
    """
    return rule(union_level(step, delta))


def poisson_increment(
    norm: ArrayLike, prob_before: ArrayLike, prob: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Conditional variance and range of the error increment of one streaming event, known before its coins.

    The linearised error after event t is S_t = sum_U (I_{t,i} / pi_{t,i} - 1) y_i, y_i = p_i (v_i - o). Given what
    was retained before, token i survives independently with probability rho_i = pi_{t,i} / pi_{t-1,i}, hence
    variance = sum_i (1/rho_i - 1) ||y_i||^2 / pi_{t-1,i}^2,
    range    = max over rho_i < 1 of max(1/rho_i - 1, 1) ||y_i|| / pi_{t-1,i}.
    norm = ||y_i||, prob_before, prob [.., n] of the tokens retained before the event (norm 0 elsewhere); returns
    two [..]. The range is of ONE token's term, which is what `freedman_pinelis` asks for.
    Assumes y fixed before any coin (query and population of the full run) and scores that never look at coins.
    Raises CertError unless 0 < prob <= prob_before <= 1 and norm >= 0.
    """
    norm, before, after = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (norm, prob_before, prob)))
    if not ((after > 0) & (after <= before) & (before <= 1) & (norm >= 0)).all():
        raise CertError("an event needs 0 < prob <= prob_before <= 1 and norm >= 0 for every token")
    odds, scaled = before / after - 1, norm / before
    reach = np.where(odds > 0, np.maximum(odds, 1.0) * scaled, 0.0)
    return np.asarray((odds * scaled**2).sum(-1)), np.asarray(reach.max(-1, initial=0.0))


def freedman_pinelis(variance: ArrayLike, bound: ArrayLike, delta: float = 0.05) -> NDArray[np.float64]:
    """Time-uniform radius r_t for the norm of a vector martingale: P(exists t: ||S_t|| > r_t) <= delta.

    For each lambda > 0, with psi(x) = e^x - 1 - x,
    G_t(lambda) = cosh(lambda ||S_t||) exp(-sum_{s <= t} V_s psi(lambda b_s) / b_s^2)
    is a nonnegative supermartingale from 1, and r_t solves mean_j G_t(lambda_j) = 1/delta in ||S_t|| (Ville).
    variance V [t, ..] and bound b [t, ..], one column per martingale (head); returns r [t, ..], in the unit of b.

    Assumes S_t in a Hilbert space; event s adds terms that are martingale differences one after another (for a
    Poisson event: its tokens), each of norm <= b_s, their conditional variances adding to at most V_s, with V_s and
    b_s known before the event. Holds for the linearised error of replayed streaming (query, population and so V_s
    fixed before the coins): the realised error carries a factor A / A_hat more. Not a served guarantee.

    Why: along x + s d the second derivative of cosh(lambda ||.||) is at most lambda^2 ||d||^2 cosh(lambda ||.||), and
    the first averages to 0, so E cosh(lambda ||x + d||) <= cosh(lambda ||x||) (1 + E psi(lambda ||d||)); then
    psi(x) / x^2 increases and 1 + u <= e^u. cosh >= exp / 2 is Pinelis's factor 2, here kept exact.
    lambda_0 is Bennett's optimum for the first event that draws anything (known before it), the rest its halvings.
    Source: Pinelis, Optimum bounds for the distributions of martingales in Banach spaces (1994), section 3.
    Raises CertError for negative or non-finite input, a zero bound where variance is positive, delta outside (0, 1).
    """
    _check_level("delta", delta)
    var, b = np.broadcast_arrays(np.asarray(variance, dtype=np.float64), np.asarray(bound, dtype=np.float64))
    if (
        not var.shape
        or not len(var)
        or not (np.isfinite(var) & np.isfinite(b) & (var >= 0) & (b >= 0) & ((b > 0) | (var == 0))).all()
    ):
        raise CertError(
            "variance and bound [t, ..], t >= 1, must be finite and >= 0, the bound > 0 where the variance is"
        )
    lam = _first_optimum(var, b, delta)[..., None] * 0.5 ** np.arange(GRID)
    with np.errstate(over="ignore"):  # a lambda far too large for a later range costs infinity and drops out
        moves = (var > 0)[..., None]
        spent = np.where(moves, var[..., None] * lam**2 * _bennett(np.where(moves, lam * b[..., None], 0)), 0)
    cost = np.cumsum(spent, axis=0)
    high = ((log(2 * GRID / delta) + cost) / lam).min(-1)  # there one term alone reaches 1/delta
    if not np.isfinite(high).all():
        raise CertError("bound: grows by more than the mixture's lambdas span after the first event")
    low = np.zeros_like(high)
    for _ in range(60):
        middle = (low + high) / 2
        x = lam * middle[..., None]
        log_cosh = np.logaddexp(x, -x) - log(2)
        crossed = np.logaddexp.reduce(log_cosh - cost, axis=-1) >= log(GRID / delta)
        low, high = np.where(crossed, low, middle), np.where(crossed, middle, high)
    return np.where(np.cumsum(var, axis=0) > 0, high, 0.0)


def _first_optimum(var: NDArray[np.float64], b: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Bennett's best lambda log(1 + b r / V) / b, r Bernstein's radius, for the first event of positive variance."""
    first = (var > 0).argmax(0)[None]
    v, c = (np.take_along_axis(x, first, 0)[0] for x in (var, b))
    v, c = np.where(v > 0, v, 1.0), np.where(v > 0, c, 1.0)  # never positive: any lambda, the radius is 0 anyway
    third = c * log(2 / delta) / 3
    return np.asarray(np.log1p(c * (third + np.sqrt(third**2 + 2 * v * log(2 / delta))) / v) / c)


def _bennett(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(e^x - 1 - x) / x^2 for x >= 0, 1/2 at 0."""
    far = np.maximum(x, 1e-5)  # below, the difference cancels and two terms of the series are exact to 1e-11
    return np.where(x < 1e-5, 0.5 + x / 6, (np.expm1(far) - far) / far**2)


def _check_level(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise CertError(f"{name} must lie in (0, 1); got {value!r}")
