"""Where nothing is evicted the model is bit-equal to itself, and after the session it is as it was."""

import copy

import pytest
import torch
from oracle import FAMILIES, KEYWORD, tiny, tokens

from cert.errors import CertError
from cert.hf import certified
from cert.policy import Policy

GENERATE = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def same(one: object, other: object) -> bool:
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.logits, other.logits))


def fingerprint(model: torch.nn.Module) -> dict[str, object]:
    return {
        "attributes": sorted(model.__dict__),
        "hooks": len(model._forward_pre_hooks) + len(model._forward_hooks),
        "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "forward": [m.__dict__.get("forward") for m in model.modules()],
        "weights": {name: hash(x.numpy().tobytes()) for name, x in model.state_dict().items()},
        "generation": copy.deepcopy(model.generation_config.to_dict()),
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_budget_one_is_bit_equal_to_the_model_alone(family: str, attention: str) -> None:
    model, ids = tiny(family, attention), tokens(120)
    alone = model.generate(ids, **GENERATE)
    for policy in (Policy.preset("certified", budget=1.0), Policy.preset("h2o", budget=1.0), Policy.preset("full")):
        with certified(model, policy) as session:
            assert same(model.generate(ids, **GENERATE), alone)
            assert session.cache.compressible and all(x.log_weight is None for x in session.cache.compressible.values())
    assert same(model.generate(ids, **GENERATE), alone)


@pytest.mark.parametrize("n", [1, 2, 5, 36, 52])
@pytest.mark.parametrize("name", ["certified", "snapkv", "h2o", "merge", "ada"])
def test_short_contexts_evict_nothing(n: int, name: str) -> None:
    """Below the protected window and the spare tail, also where the scoring window is longer than the context."""
    model, ids = tiny(), tokens(n)
    alone = model.generate(ids, **GENERATE)
    with certified(model, Policy.preset(name, budget=0.1, window=64)) as session:
        assert same(model.generate(ids, **GENERATE), alone)
        summary = session.summary()
    assert summary["realised_budget"] == 1.0 and summary["budget_raised"] == (n > 5 or n * 0.1 + 0.5 < n)


def test_no_tokens_at_all_is_refused() -> None:
    model = tiny()
    with certified(model, Policy.preset("certified", budget=0.5)) as session:
        with pytest.raises(CertError, match="at least one token"):
            model.generate(torch.zeros(1, 0, dtype=torch.long))
        with pytest.raises(CertError, match="no cache yet"):
            session.compress()


@pytest.mark.parametrize("family", FAMILIES)
def test_after_the_session_the_model_is_as_before(family: str) -> None:
    model = tiny(family)
    before = fingerprint(model)
    with certified(model, Policy.preset("certified", budget=0.3)):
        assert model.config._attn_implementation == "certified"
        model.generate(tokens(100), **GENERATE)
    assert fingerprint(model) == before


def test_also_after_an_exception_at_any_point() -> None:
    model, ids = tiny(), tokens(100)
    before, alone = fingerprint(model), model.generate(ids, **GENERATE)

    def broken(token: dict[str, object]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), certified(model, Policy.preset("certified", budget=0.6), callback=broken):
        model.generate(ids, **GENERATE)
    assert fingerprint(model) == before and same(model.generate(ids, **GENERATE), alone)
    with pytest.raises(CertError, match="padding"), certified(model, Policy.preset("certified", budget=0.6)):
        model(input_ids=ids, attention_mask=torch.cat([torch.zeros(1, 1), torch.ones(1, 99)], dim=1))
    assert fingerprint(model) == before


def test_one_session_a_model() -> None:
    model, policy = tiny(), Policy.preset("certified", budget=0.5)
    with certified(model, policy):
        with pytest.raises(CertError, match="another certified"), certified(model, policy):
            pass
        model.generate(tokens(80), **GENERATE)
    with certified(model, policy):
        pass


def test_two_models_at_once_do_not_meet() -> None:
    one, other, ids = tiny(), tiny("qwen3"), tokens(120)
    policy = Policy.preset("certified", budget=0.5)
    with certified(one, policy):
        first = one.generate(ids, **GENERATE)
    with certified(one, policy), certified(other, policy):
        assert other.generate(ids, **GENERATE).sequences.shape == first.sequences.shape
        assert same(one.generate(ids, **GENERATE), first)


def test_recompute_is_the_plain_model_also_when_sampling() -> None:
    model, ids = tiny(), tokens(120)
    sampling = {**GENERATE, "do_sample": True, "temperature": 1.5}
    torch.manual_seed(5)
    alone = model.generate(ids, **sampling)
    torch.manual_seed(5)
    with certified(model, Policy.preset("certified", budget=0.45)) as session:
        served = model.generate(ids, **sampling)
        state = torch.get_rng_state()
        assert same(session.recompute(), alone) and not same(served, alone)
        assert torch.equal(torch.get_rng_state(), state)
        assert model.config._attn_implementation == "certified"
        assert session.summary()["rerun_prefill_tokens"] == 120 and session.summary()["prefill_tokens"] == 240
        session.prefill(ids)
        session.compress()
        full = torch.cat([ids, tokens(6, 3)], dim=1)
        model.generate(full, **session.cache_kwargs, **GENERATE)
        again = session.recompute()
    assert same(again, model.generate(full, **GENERATE))


def test_a_forward_without_a_cache_is_the_models_own() -> None:
    model, ids = tiny(), tokens(60)
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        with certified(model, Policy.preset("certified", budget=0.5)):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, alone)
            assert torch.equal(model(ids).logits, alone)


def test_a_compressed_cache_cannot_be_used_after_its_session() -> None:
    model, ids = tiny(), tokens(200)
    with certified(model, Policy.preset("certified", budget=0.4)) as session:
        session.prefill(ids)
        session.compress()
        cache = session.cache
    with pytest.raises(CertError, match="session has ended"), torch.no_grad():
        model(input_ids=tokens(1), **{KEYWORD: cache})


def test_half_precision_serves_with_float32_statistics() -> None:
    model, ids = tiny().to(torch.bfloat16), tokens(150)
    with certified(model, Policy.preset("certified", budget=0.4), audit=True) as session:
        out = model.generate(ids, **GENERATE)
        layer = session.cache.layers[0]
        assert layer.keys.dtype == torch.bfloat16 and layer.log_weight.dtype == torch.float32
        assert all(x.isfinite().all() for x in out.logits)
        assert all(block.radius.dtype == torch.float32 for block in session.blocks)


def test_a_generate_that_somebody_else_put_on_the_model_comes_back() -> None:
    model, plain = tiny(), tiny().generate
    model.generate = plain
    with certified(model, Policy.preset("certified", budget=0.5)):
        assert model.generate is not plain
    assert model.generate is plain


def test_a_loop_with_gradients_on_is_served_all_the_same() -> None:
    model, ids = tiny(), tokens(150)
    with certified(model, Policy.preset("certified", budget=0.4), audit=True) as session:
        out = model(input_ids=ids)
        for _ in range(2):
            out = model(input_ids=out.logits[:, -1:].argmax(-1), **{KEYWORD: out[KEYWORD]})
        assert out.logits.requires_grad and len(session.certificates["err"]) == 16
        assert session.summary()["certificate"]["value"] > 0


@pytest.mark.parametrize("name", ["certified", "snapkv", "h2o", "knorm"])
def test_scores_that_are_no_numbers_are_an_error_never_another_design(name: str) -> None:
    model = tiny()
    torch.nn.init.constant_(model.model.layers[0].self_attn.k_proj.weight, float("nan"))
    policy = Policy(score="knorm", budget=0.4) if name == "knorm" else Policy.preset(name, budget=0.4)
    with certified(model, policy) as session:
        session.prefill(tokens(150))
        with pytest.raises(CertError, match="NaN"):
            session.compress()
