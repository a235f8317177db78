"""Memory truly shrinks: storages, not views; KV heads, not query heads; every kind of byte counted once."""

import pytest
import torch
from oracle import kept_sets, tiny, tokens

from cert.hf import certified
from cert.policy import PRESETS, Policy


def storages(cache: object) -> int:
    """Bytes of every distinct storage reachable from the layers of a cache."""
    seen = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(seen.values())


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "full"])
def test_summary_counts_the_storages(name: str, audit: bool) -> None:
    model = tiny()
    with certified(model, Policy.preset(name, budget=0.4), audit=audit) as session:
        model.generate(tokens(200), max_new_tokens=4, do_sample=False)
        summary, cache = session.summary(), session.cache
        kept = sum(len(head) for rows in kept_sets(cache).values() for head in rows[0])
        assert summary["cache_bytes_after"] == 2 * kept * 8 * 4
        assert summary["cache_bytes_before"] == 2 * 2 * 2 * 203 * 8 * 4
        assert summary["audit_bytes"] == (summary["cache_bytes_before"] if audit else 0)
        kinds = ("cache_bytes_after", "padding_bytes", "scalar_bytes", "audit_bytes", "score_bytes", "sliding_bytes")
        assert sum(summary[kind] for kind in kinds) == storages(cache)
        assert all(x.keys.is_contiguous() and x.keys.shape[1] == 2 for x in cache.layers)
    assert summary["scalar_bytes"] > 0 and summary["padding_bytes"] < 0.5 * summary["cache_bytes_after"]


@pytest.mark.parametrize("budget", [0.125, 0.25, 0.5])
def test_a_prefix_of_two_thousand_tokens_takes_its_budget(budget: float) -> None:
    model, n = tiny(head_dim=64, max_position_embeddings=4096), 2000
    with certified(model, Policy.preset("certified", budget=budget)) as session:
        session.prefill(tokens(n), chunk=256)
        full = storages(session.cache)
        session.compress()
        summary = session.summary()
        now = storages(session.cache)
        assert summary["prefix_bytes_before"] == 2 * 2 * 2 * n * 64 * 4
        assert now <= (budget + 0.03) * summary["prefix_bytes_before"] < full
    assert abs(summary["realised_budget"] - budget) < 0.02 and summary["expected_budget"] == pytest.approx(
        budget, abs=1e-3
    )
    assert summary["nominal_budget"] == budget and not summary["budget_raised"]


def test_a_cache_is_freed_with_its_conversation() -> None:
    import gc
    import weakref

    model = tiny()
    with certified(model, Policy.preset("certified", budget=0.5)) as session:
        model.generate(tokens(100), max_new_tokens=3)
        first = weakref.ref(session.cache)
        gc.collect()
        gc.disable()
        try:
            model.generate(tokens(100, 2), max_new_tokens=3)
            assert first() is None
        finally:
            gc.enable()


def test_h2o_never_holds_n_by_n(monkeypatch: pytest.MonkeyPatch) -> None:
    from cert.hf import attention

    sizes = []
    real = attention.scores.attention_mass
    monkeypatch.setattr(attention.scores, "attention_mass", lambda q, *rest: sizes.append(q.shape[2]) or real(q, *rest))
    model = tiny(max_position_embeddings=2048)
    with certified(model, Policy.preset("h2o", budget=0.5)) as session:
        session.prefill(tokens(700))
    assert max(sizes) == 256 and sum(sizes) == 2 * 700
