"""escalate() retains a superset at every event, and its probabilities are those of the draw."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import FAMILIES, kept_sets, tiny, tokens

from cert import draw
from cert.certificate import anticipated_variance
from cert.hf import certified, compress, serve
from cert.hf.cache import CertifiedLayer, Terms
from cert.policy import Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
GENERATE = {"max_new_tokens": 3, "do_sample": False}


def planted(layer: CertifiedLayer, policy: Policy) -> torch.Tensor:
    """A dominant score that is certain at the larger budget alone, sixty medium ones, and a tail; of position only."""
    n = layer.length
    by_position = torch.full((n,), 1e-6)
    by_position[20:80], by_position[15] = 1.0, 1e5
    if layer.position is None:
        return by_position.expand(layer.stored[0].shape[:-1])
    return by_position[layer.position.long().clamp(min=0)] * layer.real


def nested(small: dict[int, list], large: dict[int, list], n: int) -> bool:
    """Whether each KV head of each row of each layer retains, below n, what it did before, and some head more."""
    pairs = [
        ({x for x in few if x < n}, {x for x in many if x < n})
        for index in small
        for rows in zip(small[index], large[index], strict=True)
        for few, many in zip(*rows, strict=True)
    ]
    return all(few <= many for few, many in pairs) and any(few < many for few, many in pairs)


def of_layer(policy: Policy, score: torch.Tensor, coins: torch.Tensor, least: torch.Tensor) -> tuple:
    """One first event with planted scores: (kept, what was decided, the layer)."""
    layer = CertifiedLayer(Terms(policy))
    n = score.shape[-1]
    v = torch.linspace(-1, 1, 2 * n * 4).reshape(1, 2, n, 4)
    layer.update(v, v)
    layer.mass = score
    plan = compress.first_event(layer, policy, coins, least, (0, 1))
    if layer.position is None:
        return set(range(n)), plan, layer
    return set(layer.position[0, 0][layer.real[0, 0]].tolist()), plan, layer


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20), spread=st.floats(0, 12), budget=st.floats(0.15, 0.9), more=st.floats(0.0, 0.5),
    dominant=st.booleans(), design=st.sampled_from(["poisson", "topk"]),
)  # fmt: skip
@example(seed=0, spread=1.5, budget=0.25, more=0.15, dominant=True, design="poisson")  # own < smaller's for many
def test_prob_is_the_maximum_and_the_kept_set_grows(seed, spread, budget, more, dominant, design) -> None:
    n = 120
    composed = Policy("h2o", design, "uniform", "hajek" if design == "poisson" else "none", budget, **SMALL)
    score = (spread * torch.randn(1, 2, n, generator=torch.Generator().manual_seed(seed))).exp()
    score[..., 7] *= 1e6 if dominant else 1
    coins = draw.uniforms(seed, "d", 0, 2, n)[None]
    zero = torch.zeros(1, 2, n)
    few, plan, _ = of_layer(composed, score, coins, zero)
    larger = composed.with_budget(min(1.0, budget + more))
    alone, own, _ = of_layer(larger, score, coins, zero)
    many, both, layer = of_layer(larger, score, coins, plan.prob)
    assert few <= many and alone <= many
    if (seed, spread, more) == (0, 1.5, 0.15):
        assert int((own.prob < 0.9 * plan.prob).sum()) > 50
    assert torch.equal(both.prob, torch.maximum(plan.prob, own.prob))
    assert both.expected == pytest.approx(float(both.prob.double().sum())) and both.expected >= own.expected - 1e-9
    if layer.position is not None:
        stored = both.prob.gather(-1, layer.position.long().clamp(min=0))
        assert torch.allclose(layer.prob[layer.real], stored[layer.real], rtol=1e-6)
        if design == "poisson":
            torch.testing.assert_close(
                layer.anticipated, anticipated_variance(score, both.prob, layer_values(n)), rtol=1e-4, atol=0
            )


def layer_values(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * n * 4).reshape(1, 2, n, 4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("agnostic", [False, True])
def test_a_dominant_score_loses_nobody(family: str, agnostic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seeds; alone, the larger budget would lose tokens (it does, in some seed), escalated it loses none."""
    monkeypatch.setattr(compress, "token_scores", planted)
    model, full, lost = tiny(family), tokens(170), 0
    small, large = (Policy.preset("certified", budget=b, **SMALL) for b in (0.25, 0.35))
    for seed in range(10):
        with certified(model, small, seed=seed, document="d") as session:
            if agnostic:
                session.prefill(full[:, :160])
                session.compress()
            model.generate(full, **(session.cache_kwargs if agnostic else {}), **GENERATE)
            few, base = kept_sets(session.cache), session.summary()
            session.escalate(budget=0.35)
            n, many, summary = 160 if agnostic else 170, kept_sets(session.cache), session.summary()
            assert nested(few, many, n)
            prob = {i: plan.prob for i, plan in session.cache.plans[n].items()}
        expected = sum(float(x.double().sum()) for x in prob.values()) / sum(x.numel() for x in prob.values())
        assert summary["expected_budget"] == pytest.approx(expected) and summary["expected_budget"] > 0.35 + 0.02
        assert summary["certificate"]["value"] is not None and base["expected_budget"] == pytest.approx(0.25, abs=0.01)
        with certified(model, large, seed=seed, document="d") as session:
            session.prefill(full[:, :n])
            session.compress()
            lost += not nested(few, kept_sets(session.cache), n)
            own = {i: plan.prob for i, plan in session.cache.plans[n].items()}
        assert all((prob[i] >= own[i]).all() and (prob[i] > own[i]).any() for i in own)
    assert lost > 5


def at_each_event(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What every compression retains, in order: {"n": length, "kept": sets}."""
    found, real = [], compress.compress

    def noted(cache, *rest) -> None:
        real(cache, *rest)
        found.append({"n": cache.length, "kept": kept_sets(cache), "prob": [x.prob for x in cache.layers[-1:]]})

    monkeypatch.setattr(serve, "compress", noted)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["certified", "certified_value", "uniform", "h2o", "snapkv", "streaming_llm", "merge"])
def test_every_event_of_a_stream_is_a_superset(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns compressed by hand, then every 6 tokens while generating; scores move with what is retained."""
    events, model = at_each_event(monkeypatch), tiny(family)
    turns = [tokens(110, 5), tokens(40, 6), tokens(3, 7)]
    with certified(model, Policy.preset(name, budget=0.3, **SMALL), compress_every=6) as session:
        for turn in turns[:2]:
            session.prefill(turn)
            session.compress()
        model.generate(torch.cat(turns, dim=1), **session.cache_kwargs, max_new_tokens=20, do_sample=False)
        base, found = events.copy(), {}
        for budget in (0.45, 0.6):
            events.clear()
            session.escalate(budget=budget)
            found[budget] = events.copy()
    assert [e["n"] for e in base] == [110, 150] + [e["n"] for e in base[2:]] and len(base) >= 5
    for before, now in ((base, found[0.45]), (found[0.45], found[0.6])):
        assert [e["n"] for e in now] == [e["n"] for e in before]
        assert all(nested(one["kept"], two["kept"], one["n"]) for one, two in zip(before, now, strict=True))


def wandering(layer: CertifiedLayer, policy: Policy) -> torch.Tensor:
    """Scores that are others at every event, of length and position only."""
    by_position = (4 * torch.randn(layer.length, generator=torch.Generator().manual_seed(layer.length))).exp()
    if layer.position is None:
        return by_position.expand(layer.stored[0].shape[:-1])
    return by_position[layer.position.long().clamp(min=0)] * layer.real


@pytest.mark.parametrize(("scores", "turns", "budget"), [(planted, 1, 0.5), (wandering, 3, 0.31)])
def test_the_weights_of_an_escalation_are_unbiased(scores, turns, budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 documents x 2 layers x 2 heads: weights 1/prob sum to the trials by token, and to n by head; 4.5 and 4 errors.

    For much of the tail the probability at the smaller budget is the larger one, at the first event or at later ones.
    """
    monkeypatch.setattr(compress, "token_scores", scores)
    raised, real = [], compress.streaming_probs

    def seen(size: torch.Tensor, *rest: object) -> torch.Tensor:
        raised.append(real(size, *rest))
        return raised[-1]

    monkeypatch.setattr(compress, "streaming_probs", seen)
    model, parts = tiny(), tokens(175, 21, rows=60).split([100, 25, 25, 25], dim=1)
    with certified(model, Policy.preset("certified", budget=0.3, **SMALL), delta=None) as session:
        for part in parts[:turns]:
            session.prefill(part)
            session.compress()
        small = session.cache.plans[100][0].prob
        model.generate(torch.cat(parts[: turns + 1], dim=1), **session.cache_kwargs, max_new_tokens=1)
        raised.clear()
        session.escalate(budget=budget)
        layers, plans, summary = list(session.cache.compressible.values()), session.cache.plans, session.summary()
    n = session.cache.events[-1]
    if turns == 1:
        assert (
            plans[100][0].expected / 12000 > budget + 0.03
            and (plans[100][0].prob[..., 82:90] == small[..., 82:90]).all()
        )
    else:
        own = sum(float(x.double().sum()) for x in raised)
        kept = sum(float(p.prob[p.position >= 0].double().sum()) for n in (125, 150) for p in plans[n].values())
        assert kept > 1.005 * own
    assert abs(summary["expected_budget"] - summary["realised_budget"]) < 0.01
    left, sums, totals = torch.zeros(n), torch.zeros(n), []
    for layer in layers:
        here = ~layer.log_weight.isinf() & (layer.position < n)
        left.index_add_(0, layer.position[here].long(), torch.ones(int(here.sum())))
        sums.index_add_(0, layer.position[here].long(), layer.log_weight[here].exp())
        totals.append((layer.log_weight.exp() * here).sum(-1).flatten())
    often = left >= 20
    p = left[often] / sums[often]
    assert often.sum() > 0.9 * n and float(left[21 : n - 10].mean()) < 200
    assert ((sums[often] / 240 - 1).abs() <= 4.5 * ((1 - p) / p / 240).sqrt() + 1e-6).all()
    total = torch.cat(totals)
    assert len(total) == 240 and abs(float(total.mean()) - n) < 4 * float(total.std()) / 240**0.5


def test_an_escalation_does_not_depend_on_one_to_a_larger_budget() -> None:
    model, ids = tiny(), tokens(200)
    with certified(model, Policy.preset("certified", budget=0.3, **SMALL)) as session:
        model.generate(ids, **GENERATE)
        found = []
        for budget in (0.5, 0.9, 0.5, 0.3):
            session.escalate(budget=budget)
            found.append((kept_sets(session.cache), session.summary()["certificate"], session.summary()["plan_bytes"]))
        assert found[0] == found[2] != found[1] and found[3][0] != found[0][0]
        assert found[0][2] == 2 * 2 * 200 * 4


def test_a_budget_in_tokens_escalates_to_a_fraction() -> None:
    model, ids = tiny(), tokens(200)
    with certified(model, Policy.preset("certified", budget_tokens=60, **SMALL)) as session:
        model.generate(ids, **GENERATE)
        few = kept_sets(session.cache)
        session.escalate(budget=0.5)
        assert nested(few, kept_sets(session.cache), 200)
