"""The gate: which answers from a compressed cache stand, which get a larger budget, which the full cache gives again.

A certificate here is a request certificate (cert.certificate.request_certificate), or any signal that is high where
an answer is to be distrusted. None, NaN and infinity are undefined: ranked above all others, and never answered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf, isfinite, isnan
from numbers import Real
from typing import Any, Literal

import numpy as np

from cert.errors import CertError

Decision = Literal["answer", "escalate", "recompute"]


def quantile_threshold(certificates: Iterable[float | None], rho: float) -> float:
    """Threshold above which a share of about rho of requests like the calibration's lie, to be recomputed.

    The order statistic of place ceil((n + 1)(1 - rho)) of n certificates; +inf where that place is above n, or holds
    an undefined one.

    Promise: where the n certificates and the next one are exchangeable, P(the next is above) is at most rho, and above
    rho - 1/(n + 1) unless ties sit at the threshold. So E[share recomputed] is about rho over calibration sets and
    requests together, not for the one calibration at hand. Not exchangeable: requests of another source, and, exactly,
    several requests of one dialogue; with many dialogues the promise then holds in the limit. At a threshold of +inf
    the undefined alone are recomputed, however many.

    certificates [n]; rho in (0, 1). Raises CertError for another rho, for n = 0, and for what is no number.
    Source: split conformal prediction, Vovk, Gammerman, Shafer (2005), section 4.2.2; METHOD section 6 (ours) for its use.
    """
    if not _is_number(rho) or not 0 < rho < 1:
        raise CertError(f"rho {rho!r}: expected a share between 0 and 1 of requests to recompute")
    ranked = np.sort([ranking(certificate) for certificate in certificates])
    n = len(ranked)
    if n == 0:
        raise CertError("certificates: expected those of at least one calibration request, found none")
    place = ceil((n + 1) * (1 - Fraction(str(float(rho)))))  # as typed: in floats 10 * (1 - 0.7) is above 3
    return float(ranked[place - 1]) if place <= n else inf


def absolute_threshold(certificates: Mapping[str, Iterable[float | None]], model: str, rho: float) -> float:
    """One threshold for every model: quantile_threshold of the certificates of the one that is named.

    Promises its rate for that model alone: elsewhere the share recomputed is whatever it comes to.
    certificates: model -> [n]. Raises CertError for a model without any, and as quantile_threshold does.
    """
    if model not in certificates:
        raise CertError(f"model {model!r}: expected one with calibration certificates: {', '.join(certificates)}")
    return quantile_threshold(certificates[model], rho)


@dataclass(frozen=True)
class Gate:
    """The rule: a certificate above the threshold is no answer. Below 0 none is; at infinity all that are defined are.

    threshold: of the request certificate, relative to the attention output (no unit). escalate_to: a larger budget,
    as a fraction of the logical length, to try first; None goes to the full cache at once.
    Raises CertError for a threshold that is no number, and for a budget outside (0, 1].
    """

    threshold: float
    escalate_to: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.threshold) or isnan(self.threshold):
            raise CertError(f"threshold {self.threshold!r}: expected a number, such as quantile_threshold(...) gives")
        budget = self.escalate_to
        if budget is not None and not (_is_number(budget) and 0 < budget <= 1):
            raise CertError(f"escalate_to {budget!r}: expected a budget above 0 and at most 1, or None")

    def decide(self, certificate: float | None, escalated: bool = False) -> Decision:
        """What to do with an answer of this certificate; after an escalation, with that of the escalated run.

        At most the threshold: answer. Undefined: recompute, whatever the threshold. Above: escalate, once and where a
        budget is given, else recompute. Raises CertError for what is neither a number nor None.
        """
        value = ranking(certificate)
        if isfinite(value) and value <= self.threshold:
            return "answer"
        return "recompute" if escalated or self.escalate_to is None or not isfinite(value) else "escalate"


def ranking(certificate: float | None) -> float:
    """The certificate as it is ranked: inf where it is undefined (None, NaN, infinite), above all that say something.

    Raises CertError for what is neither a number nor None.
    """
    if certificate is not None and not _is_number(certificate):
        raise CertError(f"certificate of type {type(certificate).__name__}: expected a number, or None where undefined")
    return inf if certificate is None or not isfinite(certificate) else float(certificate)


def _is_number(value: Any) -> bool:
    """Whether it is a real number, True and False being none."""
    return type(value) is not bool and isinstance(value, Real)
