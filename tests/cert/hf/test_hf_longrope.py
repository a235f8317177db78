"""longrope rotates all keys otherwise beyond one length: texts that cross it are refused, on both sides served as ever."""

import pytest
import torch
import transformers
from oracle import Oracle, close, column_bias, tiny, tokens
from packaging.version import Version

from cert.errors import CertError
from cert.hf import certified
from cert.hf.families import longrope_length
from cert.policy import Policy

LENGTH = 128
OLD = Version(transformers.__version__) < Version("5.24")
CROSSES = r"longrope: beyond 128 tokens.*and {} are cached"
POLICY = Policy.preset("certified", budget=0.35, sinks=2, recent=8, window=8)
GENERATE = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0],
        "attention_factor": 1.2, "original_max_position_embeddings": LENGTH}  # fmt: skip
FAMILIES = {  # the first two drop their cache where the ids cross the length, the third goes on with keys of both kinds
    "phi3": {"rope_parameters": ROPE},
    "phimoe": {"rope_parameters": {**ROPE, "short_mscale": 1.1, "long_mscale": 1.3},
               "num_local_experts": 2, "num_experts_per_tok": 1},
    "llama": {"rope_parameters": ROPE},
}  # fmt: skip


def model_of(family: str, beyond: bool = False):
    """A model; where the text lies beyond the length, one that goes on there with the cache it has."""
    if OLD and (family == "phimoe" or (family == "phi3" and beyond)):
        pytest.skip(f"transformers {transformers.__version__}: phimoe was rewritten later; phi3 drops every cache")
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    return tiny(family, original_max_position_embeddings=LENGTH, **ids, **FAMILIES[family])


def test_the_length_of_a_config() -> None:
    assert [longrope_length(model_of(family).config) for family in ("phi3", "llama")] == [LENGTH, LENGTH]
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": LENGTH}  # fmt: skip
    assert longrope_length(tiny(rope_parameters=llama3).config) is None
    assert longrope_length(tiny().config) is None and longrope_length(tiny("gemma3_text").config) is None
    by_kind = type("Config", (), {"rope_parameters": {"sliding": {"rope_type": "default"}, "full": ROPE}})
    assert longrope_length(by_kind()) == LENGTH


def test_the_two_sides_are_two_models() -> None:
    """Else nothing here would show anything: the same text, its keys of the one kind and of both."""
    model, ids = model_of("phi3"), tokens(140)
    whole, parts = Oracle(model).feed(ids)[:, -1], Oracle(model)
    parts.feed(ids[:, :100])
    assert float((parts.feed(ids[:, 100:])[:, -1] - whole).abs().max()) > 0.01


@pytest.mark.parametrize("prompt", [LENGTH - 5, LENGTH + 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_question_aware_on_both_sides(family: str, prompt: int) -> None:
    """6 tokens, of which 5 are fed: up to the last one that fits, and from the first one beyond."""
    model, oracle, biases = model_of(family, prompt > LENGTH), Oracle(model_of(family)), []
    with certified(model, POLICY, callback=lambda _: biases.append(column_bias(session.cache))) as session:
        out = model.generate(tokens(prompt), max_new_tokens=6, **GENERATE)
        assert session.request == 0 and session.cache.length == prompt + 5 and session.cache.events == [prompt]
    close(out.logits[0], oracle.feed(tokens(prompt))[:, -1])
    for token, bias, found in zip(out.sequences[:, prompt:-1].split(1, dim=1), biases, out.logits[1:], strict=True):
        oracle.bias = {index: b[..., :-1] for index, b in bias.items()}
        close(found, oracle.feed(token)[:, -1])


@pytest.mark.skipif(not OLD, reason="repaired in later versions of transformers")
def test_where_every_step_drops_the_cache_the_second_is_refused() -> None:
    """It would be the model's answer to one token alone."""
    model = model_of("phi3")
    with certified(model, POLICY) as session:
        with pytest.raises(CertError, match="the model has dropped it"):
            model.generate(tokens(LENGTH + 1), max_new_tokens=3)
        assert session.request == 0 and session.cache.length == LENGTH + 1


@pytest.mark.parametrize("extra", [{}, {"prefill_chunk_size": 50}])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_crosses_is_refused_and_the_model_alone_gives_it(family: str, extra: dict[str, int]) -> None:
    model, ids = model_of(family), tokens(LENGTH - 4)
    with certified(model, POLICY) as session:
        for _ in range(2):
            with pytest.raises(CertError, match=CROSSES.format(LENGTH)):
                model.generate(ids, max_new_tokens=9, do_sample=False, **extra)
            assert session.cache.length == LENGTH and session.cache.events == [LENGTH - 4]
        assert session.request == 1 and session.summary(0)["certificate"]["steps"] == 4
        with pytest.raises(CertError, match=CROSSES.format(LENGTH)):
            session.escalate(0.6)
        plain = session.recompute()
        assert model.generate(ids, max_new_tokens=5, do_sample=False).shape == (1, LENGTH + 1)
    assert torch.equal(plain, model_of(family).generate(ids, max_new_tokens=9, do_sample=False, **extra))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_a_prompt_that_crosses(family: str) -> None:
    model = model_of(family)
    with certified(model, POLICY) as session:
        with pytest.raises(CertError, match=CROSSES.format(50)):
            model.generate(tokens(140), max_new_tokens=3, prefill_chunk_size=50)
        with pytest.raises(CertError, match=CROSSES.format(100)):
            session.prefill(tokens(140), chunk=50)
        assert session.cache.length == 100
        session.reset()
        session.prefill(tokens(140))
        assert session.cache.length == 140


@pytest.mark.parametrize(("context", "turn", "question"), [(60, 40, 28), (LENGTH + 1, 40, 30)])
@pytest.mark.parametrize("family", FAMILIES)
def test_agnostic_and_streaming_on_both_sides(family: str, context: int, turn: int, question: int) -> None:
    """The last question ends at the length, or the context lies beyond it: generate() goes on with its own cache."""
    model, oracle = model_of(family, context > LENGTH), Oracle(model_of(family))
    parts = [tokens(context), tokens(turn, 6), tokens(question, 2)]
    with certified(model, POLICY) as session:
        for part in parts[:2]:
            session.prefill(part)
            session.compress()
            oracle.feed(part)
            oracle.bias = column_bias(session.cache)
        out = model.generate(torch.cat(parts, dim=1), max_new_tokens=1, **session.cache_kwargs, **GENERATE)
        close(out.logits[0], oracle.feed(parts[2])[:, -1])
        assert session.request == 0 and session.cache.events == [context, context + turn]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_that_crosses_is_refused_before_any_work(family: str) -> None:
    """Never a fresh cache in place of the compressed one: agnostic would become aware."""
    model, oracle, context = model_of(family), Oracle(model_of(family)), tokens(100)
    with certified(model, POLICY) as session:
        session.prefill(context)
        session.compress()
        mine, kwargs = session.cache, session.cache_kwargs
        for _ in range(2):
            with pytest.raises(CertError, match=CROSSES.format(100)):
                model.generate(torch.cat([context, tokens(40, 3)], dim=1), max_new_tokens=3, **kwargs)
        assert session.cache is mine and mine.length == 100 and mine.events == [100]
        assert session.request == 0 and session.prefill_tokens == 100
        oracle.feed(context)
        oracle.bias = column_bias(mine)
        ids = torch.cat([context, tokens(20, 3)], dim=1)
        close(model.generate(ids, max_new_tokens=1, **kwargs, **GENERATE).logits[0], oracle.feed(ids[:, 100:])[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_a_loop_and_rows_together_that_cross(family: str) -> None:
    model = model_of(family)
    with certified(model, POLICY) as session, torch.no_grad():
        session.prefill(tokens(120))
        session.compress()
        with pytest.raises(CertError, match=CROSSES.format(120)):
            session.prefill(tokens(9, 2))
        with pytest.raises(CertError, match=CROSSES.format(120)):
            model(tokens(9, 2), use_cache=True, **session.cache_kwargs)
        rows = session.together([session.row()], size=2)
        model(tokens(8, 2).expand(2, -1), **rows)
        with pytest.raises(CertError, match=CROSSES.format(128)):
            model(tokens(1, 3).expand(2, -1), **rows)
        assert session.cache.length == 128 and session.cache.events == [120]
