"""What arms that are compared need of a session: equal counts, and self-signals."""

import pytest
import torch
from oracle import FAMILIES, kept_sets, tiny, tokens

from cert.design import protected_set, topk_set
from cert.errors import CertError
from cert.hf import attention, certified
from cert.hf.compress import token_scores
from cert.policy import Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
CONTEXT = tokens(160)
ARMS = {
    "full": Policy.preset("full"),
    "all": Policy.preset("certified", budget=1.0, **SMALL),
    "topk": Policy.preset("topk", budget=0.35, **SMALL),
    "poisson": Policy.preset("certified", budget=0.35, **SMALL),
    "h2o": Policy.preset("h2o", budget=0.35, **SMALL),
}


# ---------------------------------------------------------------- equal counts


@pytest.mark.parametrize("family", FAMILIES)
def test_topk_keeps_the_counts_of_another_cache_head_by_head(family: str) -> None:
    with certified(tiny(family), ARMS["full"], arms=ARMS.values()) as session:
        session.prefill(CONTEXT)
        snapshot = session.cache
        session.fork(ARMS["poisson"], of=snapshot)
        session.compress()
        drawn, realised = session.cache, session.summary()["realised_budget"]
        session.fork(ARMS["topk"], of=snapshot)
        wanted = {}
        for index, layer in session.cache.compressible.items():
            counts = drawn.compressible[index].real.sum(-1)
            chosen = topk_set(token_scores(layer, ARMS["topk"]), counts, protected_set(160, 2, 8))
            wanted[index] = [[head.nonzero().flatten().tolist() for head in row] for row in chosen]
        session.compress(like=drawn)
        assert kept_sets(session.cache) == wanted
        assert len({len(head) for rows in wanted.values() for row in rows for head in row}) > 1
        assert session.summary()["realised_budget"] == session.summary()["expected_budget"] == realised
        assert session.summary()["budget_tokens"] == 56


def test_counts_that_cannot_be_followed_are_refused() -> None:
    with certified(tiny(), ARMS["full"], arms=ARMS.values()) as session:
        session.prefill(CONTEXT)
        snapshot = session.cache
        session.fork(ARMS["poisson"], of=snapshot)
        with pytest.raises(CertError, match="'poisson': expected 'topk'"):
            session.compress(like=snapshot)
        session.compress()
        drawn = session.cache
        session.fork(ARMS["topk"], of=snapshot)
        with pytest.raises(CertError, match="compressed once, at its end, at 160 tokens"):
            session.compress(like=snapshot)
        assert not session.cache.events
        session.prefill(tokens(1))
        with pytest.raises(CertError, match="at 161 tokens"):
            session.compress(like=drawn)
        session.compress()
        session.prefill(tokens(1))
        with pytest.raises(CertError, match="not compressed before"):
            session.compress(like=drawn)


# ---------------------------------------------------------------- self-signals


def test_the_self_signals_of_a_request(monkeypatch) -> None:
    """Entropy of the weights that attention used, over layers, heads and steps; the margin at each head's boundary."""
    weights, recorded = [], attention.record

    def spied(state, index, layer, query, out, weight):
        weights.append(weight)
        recorded(state, index, layer, query, out, weight)

    monkeypatch.setattr(attention, "record", spied)
    model, margins = tiny(), []
    with certified(model, ARMS["topk"], signals=True) as session, torch.no_grad():
        session.prefill(CONTEXT)
        for layer in session.cache.compressible.values():
            score = token_scores(layer, ARMS["topk"])[0, :, 2:-8].sort(descending=True).values
            margins.append(score[:, 45] - score[:, 46])  # 56 tokens, 10 of them protected
        session.compress()
        weights.clear()
        for token in (5, 6, 7):
            model(input_ids=torch.tensor([[token]]), **session.cache_kwargs)
        summary = session.summary()
        each = [-(w.double() * w.double().log()).nan_to_num(0).sum(-1).mean() for w in weights]
        assert len(each) == 6
        assert summary["entropy"] == pytest.approx(float(torch.stack(each).mean()), rel=1e-6)
        assert summary["margin"] == pytest.approx(float(torch.stack(margins).mean()), rel=1e-6)
        assert summary["certificate"] is None
        session.fork()
        assert session.summary(0) == summary and session.summary()["entropy"] is None


def test_self_signals_are_undefined_where_nothing_is_evicted_and_absent_unless_asked_for() -> None:
    for policy, asked in (("all", True), ("full", True), ("topk", False)):
        with certified(tiny(), ARMS[policy], signals=asked) as session:
            session.model.generate(CONTEXT, max_new_tokens=3, do_sample=False)
            summary = session.summary()
            assert {"entropy", "margin"} & summary.keys() == ({"entropy", "margin"} if asked else set())
            assert summary.get("entropy") is summary.get("margin") is None
            assert bool(session.blocks) == (policy == "all")
