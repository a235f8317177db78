"""Gates made of stored answers: one that is recomputed is full's own, since questions are asked on forks of the history.

A gate chooses the questions that are answered again with the full cache. The certificate's is a threshold that was found
on other dialogues (cert.gate); the others choose as many: by confidence, or by chance, of which the expectation is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.estimands import Cells
from analysis.intervals import Array, Bootstrap, Interval, Statistic, t_interval
from analysis.requests import Draws, Mask, Records, records, signal
from analysis.schedule import CURVE, gains
from cert.gate import Gate, quantile_threshold

CERTIFICATE, RANDOM = "poisson certificate-gated", "poisson random-gated"
CONFIDENCE = {f"{system} confidence-gated": system for system in ("topk", "poisson")}
SYSTEMS = ("full", "topk", "uniform", "poisson", *CONFIDENCE, CERTIFICATE, RANDOM)


def conversations(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with the columns that requests are told apart and clustered by elsewhere."""
    return frame.assign(conversation=frame["document"], ctx_tokens=0)


def answers(cells: Cells, task: str, *partners: str) -> Records:
    """Each Poisson answer of a task with those of other systems to the same question."""
    rows = cells.rows[cells.rows["task"] == task]
    by = {system: rows[rows["system"] == system] for system in ("poisson", *partners)}
    return records(cells, by.pop("poisson"), **by)


def threshold(calibration: Records, rho: float) -> float | None:
    """The certificate above which a share of about rho is recomputed; None without a calibration answer."""
    certificates = signal(calibration.cells.rows, "certificate")
    return quantile_threshold(certificates.tolist(), rho) if len(certificates) else None


def over(found: Records, limit: float) -> Mask:
    """The answers that a gate of this threshold recomputes, those without a certificate among them."""
    gate = Gate(limit)
    return np.array([gate.decide(value) != "answer" for value in signal(found.cells.rows, "certificate")], dtype=bool)


def lowest(confidence: Array, count: int) -> Array:
    """By how much each of n is among the `count` of lowest confidence: 1 or 0, ties at the boundary in equal shares."""
    if not count:
        return np.zeros(len(confidence))
    last = np.sort(confidence)[count - 1]
    below, tied = confidence < last, confidence == last
    return np.where(tied, (count - below.sum()) / tied.sum(), below)


@dataclass(frozen=True, eq=False)
class Gated:
    """Answers of the systems to the same questions, and which of them the certificate's gate recomputes."""

    found: Records
    recomputed: Mask
    draws: Draws

    @cached_property
    def boot(self) -> Bootstrap:
        """Resamples of the conversations."""
        return self.found.cells.bootstrap(*self.draws)

    @cached_property
    def count(self) -> int:
        """How many the certificate's gate recomputes, and with it every other one."""
        return int(self.recomputed.sum())

    def score(self, system: str) -> Array:
        """Scores [n] of a system that was served."""
        return self.found.cells["official" if system == "poisson" else f"official_{system}"]

    def share(self, system: str) -> Array:
        """By how much each answer [n] of a gated system is full's; of the random gate the expectation."""
        if system in CONFIDENCE:
            column = "logprob" if CONFIDENCE[system] == "poisson" else f"logprob_{CONFIDENCE[system]}"
            return lowest(self.found.cells[column], self.count)
        whole = np.full(len(self.recomputed), self.count / len(self.recomputed))
        return self.recomputed.astype(float) if system == CERTIFICATE else whole

    def recall(self, system: str, own: Mask | None = None) -> Statistic:
        """Mean score over some questions, all by default, as a function of the conversations' weights.

        Of a gated system sum_i w_i (x_i + r_i (full_i - x_i)) / sum_i w_i. The random gate has r = K_w / N_w in each
        resample, as the certificate's gate recomputes there; the set that confidence chose stays what it is.
        """
        if system == RANDOM:
            before, after, rate = self.recall("poisson", own), self.recall("full", own), self._mean(self.recomputed)
            return lambda weights: before(weights) + rate(weights) * (after(weights) - before(weights))
        base = "poisson" if system == CERTIFICATE else CONFIDENCE.get(system, system)
        values = self.score(base)
        if system != base:
            values = values + self.share(system) * (self.score("full") - values)
        return self._mean(values, own)

    def interval(self, system: str, own: Mask | None = None) -> Interval:
        """Its interval: t on the plain scale."""
        return t_interval(self.recall(system, own), self.boot)

    def difference(self, one: str, other: str, own: Mask | None = None) -> Interval:
        """Recall of one system minus that of another, paired."""
        if own is not None and not own.any():
            return Interval.undefined("no such question")
        first, second = self.recall(one, own), self.recall(other, own)
        return t_interval(lambda weights: first(weights) - second(weights), self.boot)

    def rate(self) -> Interval:
        """The share that the certificate's gate recomputes."""
        return t_interval(self._mean(self.recomputed), self.boot)

    def curves(self) -> dict[str, Any]:
        """Recall over the share recomputed, for each order of the questions; where the gates are."""
        cells, change = self.found.cells, self.score("full") - self.score("poisson")
        orders = {"certificate": signal(cells.rows, "certificate"), "confidence": signal(cells.rows, "logprob")}
        orders |= {"random": np.zeros(len(change)), "oracle": change}
        orders["certificate"] = np.where(np.isnan(orders["certificate"]), np.inf, orders["certificate"])
        start = float(self.score("poisson").mean())
        found = {
            name: [start, *(start + gains(order, change, cells.cluster, self.boot.ones, CURVE)[0])]
            for name, order in orders.items()
        }
        return {"share": [0.0, *CURVE], "at": [self.count / len(change)], **found}

    def prefill(self) -> Mapping[str, float]:
        """Tokens fed again a question, by gated system: a recomputation prefills the whole prompt."""
        tokens = self.found.cells["prompt_tokens"]
        return {system: float((self.share(system) * tokens).mean()) for system in (*CONFIDENCE, CERTIFICATE, RANDOM)}

    def _mean(self, values: Array | Mask, own: Mask | None = None) -> Statistic:
        own = np.ones(len(values), dtype=bool) if own is None else own
        cluster = self.found.cells.cluster[own]
        sums, counts = (np.bincount(cluster, x, self.boot.clusters) for x in (values[own], np.ones(own.sum())))

        def evaluate(weights: Array) -> Array:
            with np.errstate(invalid="ignore"):  # none of these was drawn: that resample counts for nothing
                mean: Array = (weights @ sums) / (weights @ counts)
            return mean

        return evaluate
