"""The gate's rule by hand, and the rate its threshold promises by simulation."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from math import ceil, inf, nan, sqrt

import numpy as np
import pytest

from cert.errors import CertError
from cert.gate import Gate, absolute_threshold, quantile_threshold, ranking


@pytest.mark.parametrize(
    ("rho", "want"),
    [(0.05, inf), (0.1, 0.9), (0.15, 0.9), (0.25, 0.8), (0.5, 0.5), (0.7, 0.3), (0.9, 0.1), (0.99, 0.1)],
)
def test_threshold_is_the_order_statistic(rho, want):
    """Nine certificates: place ceil(10 (1 - rho)); 10 * (1 - 0.7) in floats would be one place too far."""
    certificates = [x / 10 for x in range(1, 10)]
    assert quantile_threshold(reversed(certificates), rho) == want
    assert quantile_threshold(iter(np.array(certificates)), np.float64(rho)) == want


def test_every_place_is_the_decimal_one():
    for n in (1, 2, 9, 19, 99):
        places = [float(x) for x in range(1, n + 1)] + [inf]
        for percent in range(1, 100):
            place = -(-(n + 1) * (100 - percent) // 100)  # in whole numbers
            assert quantile_threshold(places[:n], percent / 100) == places[place - 1]


@pytest.mark.parametrize("missing", [None, nan, inf, np.float64(nan)])
def test_undefined_rank_highest(missing):
    assert quantile_threshold([missing, 1.0, 2.0, 3.0], 0.4) == 3.0
    assert quantile_threshold([missing, 1.0, missing, 3.0], 0.4) == inf
    assert quantile_threshold([missing], 0.6) == inf
    assert ranking(missing) == inf and ranking(0.0) == 0.0 and ranking(-1.0) == -1.0


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.1, 2.0, nan])
def test_no_other_rho(rho):
    with pytest.raises(CertError, match=r"rho .*: expected a share between 0 and 1"):
        quantile_threshold([1.0], rho)


def test_no_empty_calibration():
    with pytest.raises(CertError, match="found none"):
        quantile_threshold([], 0.2)


@pytest.mark.parametrize(("n", "rho"), [(19, 0.25), (40, 0.12)])
def test_rate_over_calibrations_and_requests_is_the_promised_one(n, rho):
    """4,000 pairs of calibration and next certificate: P(above) = 1 - ceil((n+1)(1-rho))/(n+1), within 4 sigma."""
    rng, reps = np.random.default_rng(1), 4000
    draws = rng.lognormal(size=(reps, n + 1))
    above = np.mean([row[-1] > quantile_threshold(row[:-1], rho) for row in draws])
    promised = 1 - ceil((n + 1) * (1 - rho)) / (n + 1)
    assert rho - 1 / (n + 1) < promised <= rho
    assert abs(above - promised) < 4 * sqrt(promised * (1 - promised) / reps)


def test_rate_with_undefined_certificates_and_ties():
    """A tenth undefined, the rest rounded so that they tie: at most rho, the undefined among the recomputed."""
    rng, reps, rho = np.random.default_rng(2), 2000, 0.3
    done = 0
    for _ in range(reps):
        values = [None if rng.random() < 0.1 else round(rng.exponential(), 1) for _ in range(41)]
        gate = Gate(quantile_threshold(values[:-1], rho))
        done += gate.decide(values[-1]) == "recompute"
    assert 0.2 < done / reps < rho + 4 * sqrt(rho * (1 - rho) / reps)


def test_absolute_is_one_models_threshold():
    calibration = {"a": [1.0, 2.0, 3.0], "b": [10.0, 20.0, 30.0]}
    assert absolute_threshold(calibration, "b", 0.5) == quantile_threshold(calibration["b"], 0.5) == 20.0
    with pytest.raises(CertError, match="model 'c': expected one with calibration certificates: a, b"):
        absolute_threshold(calibration, "c", 0.5)


def test_decisions():
    plain, patient = Gate(0.3), Gate(0.3, escalate_to=0.5)
    assert [plain.decide(c) for c in (0.0, 0.3, 0.300001, 9.0)] == ["answer", "answer", "recompute", "recompute"]
    assert [patient.decide(c) for c in (0.3, 0.31)] == ["answer", "escalate"]
    assert [patient.decide(c, escalated=True) for c in (0.3, 0.31)] == ["answer", "recompute"]


@pytest.mark.parametrize("certificate", [None, nan, inf])
@pytest.mark.parametrize("gate", [Gate(inf), Gate(inf, 0.5), Gate(0.3, 0.5), Gate(-inf)])
def test_an_undefined_certificate_is_never_answered(gate, certificate):
    assert gate.decide(certificate) == gate.decide(certificate, escalated=True) == "recompute"


def test_always_and_never():
    for certificate in (0.0, 1e-300, 1.0, 1e300):
        assert Gate(-1.0).decide(certificate) == "recompute" and Gate(inf).decide(certificate) == "answer"


@pytest.mark.parametrize("budget", [0.0, -0.1, 1.5, nan])
def test_no_other_threshold_or_escalation(budget):
    with pytest.raises(CertError, match=r"threshold nan: expected a number"):
        Gate(nan)
    with pytest.raises(CertError, match=r"escalate_to .*: expected a budget above 0 and at most 1, or None"):
        Gate(0.3, budget)


def test_the_gate_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Gate(0.3).threshold = 0.5


WRONG = """
import sys
from cert.errors import CertError
from cert.gate import Gate, quantile_threshold

for call in (
    lambda: Gate(None), lambda: Gate("0.3"), lambda: Gate(True), lambda: Gate([0.3]), lambda: Gate(0.3, "0.5"),
    lambda: Gate(0.3, True), lambda: Gate(0.3).decide("0.1"), lambda: Gate(0.3).decide({"value": 0.1}),
    lambda: Gate(0.3).decide(True), lambda: quantile_threshold(["0.3"], 0.2), lambda: quantile_threshold([[0.1]], 0.2),
    lambda: quantile_threshold([0.1], "0.2"), lambda: quantile_threshold([0.1], None),
):
    try:
        call()
    except CertError as error:
        assert "expected a" in str(error) and "\\n" not in str(error)
    else:
        sys.exit("accepted")
assert Gate(1, 1).decide(1) == "answer" and "torch" not in sys.modules
"""


def test_wrong_types_are_one_line_and_no_torch_is_needed():
    """As a user has it: without the typechecker of these tests."""
    done = subprocess.run([sys.executable, "-c", WRONG], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
