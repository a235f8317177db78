"""Budgets as asked, as expected and as they came out; how often a token stays is its stored probability."""

import warnings

import pytest
import torch
from oracle import tiny, tokens

from cert.errors import CertError
from cert.hf import certified, compress
from cert.hf.report import budget_gap
from cert.policy import Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}


def test_three_budgets_and_arms_that_are_not_at_equal_budget() -> None:
    """Top-k realises its budget, a Poisson draw scatters about it: the comparison says by how much."""
    policies = {
        "topk": Policy.preset("topk", budget=0.35, **SMALL),
        "h2o": Policy.preset("h2o", budget=0.35, **SMALL),
        "poisson": Policy.preset("certified", budget=0.35, **SMALL),
    }
    model, found = tiny(), {}
    with certified(model, policies["topk"], arms=policies.values()) as session:
        session.prefill(tokens(160))
        snapshot, uncompressed = session.cache, session.summary()
        for name, policy in policies.items():
            session.fork(policy, of=snapshot)
            session.compress()
            found[name] = session.summary()
            rows = sum(int(layer.real.sum()) for layer in session.cache.compressible.values())
            assert found[name]["realised_budget"] == rows / (2 * 2 * 160) and found[name]["nominal_budget"] == 0.35
            assert found[name]["expected_budget"] == pytest.approx(0.35, abs=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert budget_gap(found["topk"], found["h2o"]) == 0
    a, b = found["topk"]["realised_budget"], found["poisson"]["realised_budget"]
    with pytest.warns(UserWarning, match=f"realised {a:.4f} and {b:.4f}"):
        gap = budget_gap(found["topk"], found["poisson"])
    assert gap == abs(a - b) / max(a, b) > 0.01 and budget_gap(*[found["poisson"]] * 2) == 0
    with pytest.raises(CertError, match="no realised budget"):
        budget_gap(found["topk"], uncompressed)


@pytest.mark.parametrize(("realised", "warned"), [(0.2524, False), (0.2526, True), (0.24, True)])
def test_above_one_per_cent(realised: float, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        budget_gap({"realised_budget": 0.25}, {"realised_budget": realised})
    assert len(caught) == warned


@pytest.mark.parametrize("name", ["certified", "certified_value", "uniform"])
def test_a_token_stays_as_often_as_its_probability_says(name: str) -> None:
    """600 seeds drawn from one prefill: frequency within 4 standard errors, weights 1/prob total to n, heads apart."""
    trials, policy = 600, Policy.preset(name, budget=0.4, **SMALL)
    model = tiny(num_hidden_layers=1)
    stays, prob, totals, counts = torch.zeros(2, 80), torch.zeros(2, 80), [], []
    with certified(model, policy, delta=None) as session:
        session.prefill(tokens(80))
        snapshot = session.cache
        for seed in range(trials):
            cache = snapshot.fork()
            compress.compress(cache, seed=seed, document="d")
            layer = cache.layers[0]
            for head in range(2):
                here = layer.real[0, head]
                places = layer.position[0, head, here].long()
                stays[head, places] += 1
                prob[head, places] = layer.prob[0, head, here]
            totals.append(layer.log_weight.exp().sum(-1)[0])
            counts.append(layer.real.sum(-1)[0].float())
    certain = prob > 1 - 1e-6
    assert (stays[certain] == trials).all() and certain[:, :2].all() and certain[:, -8:].all() and (prob > 0).all()
    error = (prob * (1 - prob) / trials).sqrt()
    z = ((stays / trials - prob) / error)[~certain]
    assert z.abs().max() <= 4 and len(z) > 80
    assert abs(float(z.square().mean()) - 1) < 4 * (2 / len(z)) ** 0.5
    total, count = torch.stack(totals), torch.stack(counts)
    assert ((total.mean(0) - 80).abs() <= 4 * total.std(0) / trials**0.5).all()
    assert ((count.mean(0) - prob.sum(1)).abs() <= 4 * count.std(0) / trials**0.5).all()
    assert abs(float(torch.corrcoef(count.T)[0, 1])) < 4 / trials**0.5
