"""Refused by name, before any work; each of these would otherwise go wrong silently."""

import inspect
from threading import Barrier, Thread
from time import sleep

import pytest
import torch
from oracle import KEYWORD, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from cert.errors import CertError
from cert.hf import CertifiedCache, certified, checks
from cert.hf.cache import CertifiedLayer
from cert.policy import Policy

POLICY = Policy.preset("certified", budget=0.4)
IDS = tokens(80)


LATENT = {"num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1,
          "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip


def other(kind: str, **changes: object) -> torch.nn.Module:
    small = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**small, **changes})).eval()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: other("mistral", sliding_window=16), "every layer is sliding"),
        (lambda: other("gpt_oss", num_local_experts=2, num_experts_per_tok=1), "sink"),
        (lambda: other("jetmoe", kv_channels=8, num_local_experts=2, num_experts_per_tok=1), "other keys or values"),
        (lambda: other("deepseek_v3", **LATENT), "latent attention"),
        (lambda: other("bloom", hidden_size=32, n_head=4, n_layer=2), "attention interface"),
        (lambda: tiny("gemma3_text", use_bidirectional_attention=True), "bidirectional"),
    ],
)
def test_models(build: object, message: str) -> None:
    model = build()
    with pytest.raises(CertError, match=message), certified(model, POLICY):
        raise AssertionError("the block ran")
    assert "generate" not in model.__dict__ and not model._forward_pre_hooks


def test_layers_that_share_their_keys_and_values() -> None:
    model = tiny()
    model.config.num_kv_shared_layers = 1
    with pytest.raises(CertError, match="KV sharing"), certified(model, POLICY):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"prompt_lookup_num_tokens": 3}, "generation mode"),
        ({"assistant_model": object()}, "assisted"),
        ({"cache_implementation": "static"}, "static"),
        ({"cache_implementation": "offloaded"}, "offloaded"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"use_cache": False}, "no cache"),
        ({"attention_mask": torch.tensor([[0] * 3 + [1] * 77])}, "padding"),
        ({"custom_generate": lambda *a, **k: None}, "custom"),
    ],
)  # fmt: skip
def test_generation_modes(arguments: dict[str, object], message: str) -> None:
    model = tiny()
    with certified(model, POLICY) as session:
        with pytest.raises(CertError, match=message):
            model.generate(IDS, max_new_tokens=3, **arguments)
        assert session.cache is None and session.prefill_tokens == 0
        assert model.generate(IDS, max_new_tokens=3).shape == (1, 83)


def test_inputs_and_caches_of_a_forward() -> None:
    model = tiny()
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS, **{KEYWORD: full})
    refused = [
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds"),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 1, 80, 80)}, "4-D"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1] * 79 + [0]])}, "padding"),
        ({"input_ids": IDS, KEYWORD: StaticCache(config=model.config, max_cache_len=90)}, "StaticCache"),
        ({"input_ids": IDS, KEYWORD: full}, "a cache of 80 tokens"),
        ({"input_ids": IDS, KEYWORD: CertifiedCache(model.config, POLICY)}, "another session"),
    ]
    with certified(model, POLICY) as session, torch.no_grad():
        for inputs, message in refused:
            with pytest.raises(CertError, match=message):
                model(**inputs)
        assert session.cache is None


def test_a_left_padded_batch_and_a_document_for_two() -> None:
    model, mask = tiny(), torch.ones(2, 80, dtype=torch.long)
    mask[0, :7] = 0
    with certified(model, POLICY, document="one") as session:
        with pytest.raises(CertError, match="padding"):
            model.generate(IDS.expand(2, -1), attention_mask=mask, max_new_tokens=3)
        with pytest.raises(CertError, match="batch of 2"):
            session.prefill(IDS.expand(2, -1))
        assert session.cache is None and session.prefill_tokens == 0


def test_the_cache_cannot_be_rolled_back_nor_reordered() -> None:
    model = tiny()
    with certified(model, POLICY) as session:
        model.generate(IDS, max_new_tokens=3)
        cache = session.cache
        assert cache.is_croppable is False and cache.is_compileable is False
        calls = {"crop": -1, "reorder_cache": torch.tensor([0]), "batch_repeat_interleave": 2,
                 "batch_select_indices": torch.tensor([0])}  # fmt: skip
        for name, argument in calls.items():
            for thing in (cache, cache.layers[0]):
                with pytest.raises(CertError, match=name):
                    getattr(thing, name)(argument)
        assert cache.get_seq_length() == 82 == cache.get_seq_length(1)
        one = 1 if "query_length" in inspect.signature(cache.get_mask_sizes).parameters else torch.arange(1)
        assert cache.get_mask_sizes(one, 0) == (83, 0)  # before transformers 5.4: the places themselves


def test_bad_options() -> None:
    for wrong in ({"delta": 0.0}, {"delta": 1.5}, {"compress_every": 0}):
        with pytest.raises(CertError, match=next(iter(wrong))), certified(tiny(), POLICY, **wrong):
            pass
    with certified(tiny(), POLICY) as session:
        for call in (session.recompute, lambda: session.escalate(budget=0.5)):
            with pytest.raises(CertError, match="no generate"):
                call()


def test_a_session_that_has_ended_changes_nothing_any_more() -> None:
    model = tiny()
    before = model.config._attn_implementation
    with certified(model, POLICY) as session:
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    for act in (session.recompute, session.compress, session.fork, lambda: session.escalate(0.8)):
        with pytest.raises(CertError, match="has ended"):
            act()
    with pytest.raises(CertError, match="has ended"):
        session.prefill(IDS)
    assert model.config._attn_implementation == before
    model.generate(IDS, max_new_tokens=2, do_sample=False)


def test_a_cache_of_the_callers_own_in_a_loop() -> None:
    model, mine = tiny(), DynamicCache()
    with certified(model, POLICY), torch.no_grad(), pytest.raises(CertError, match="of your own"):
        model(IDS, past_key_values=mine, use_cache=True)


def test_another_attention_set_inside_the_block() -> None:
    model = tiny()
    with certified(model, POLICY) as session, torch.no_grad():
        session.prefill(IDS)
        session.compress()
        model.set_attn_implementation("eager")
        with pytest.raises(CertError, match="changed inside the block"):
            model(IDS[:, :1], **session.cache_kwargs)


def test_classifier_free_guidance() -> None:
    model = tiny()
    with certified(model, POLICY), pytest.raises(CertError, match="guidance_scale"):
        model.generate(IDS, max_new_tokens=3, guidance_scale=1.5)


def test_values_that_are_not_the_cache_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """What families.py does not know by name is refused in the first forward."""
    model, update = tiny(), CertifiedLayer.update
    monkeypatch.setattr(CertifiedLayer, "update", lambda *rows, **more: tuple(x.clone() for x in update(*rows, **more)))
    with torch.no_grad(), certified(model, POLICY), pytest.raises(CertError, match="keys or values"):
        model.generate(IDS, max_new_tokens=3, do_sample=False)


def test_a_generate_that_another_tool_took_away() -> None:
    model = tiny()
    before = model.config._attn_implementation
    with certified(model, POLICY):
        del model.generate
    assert model.config._attn_implementation == before


def test_of_two_threads_that_open_a_session_on_one_model_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were both let in, what they restore in the end would be each other's: the model would stay as it is inside."""
    model, check = tiny(), checks.check_model
    before, together, tried, found = model.config._attn_implementation, Barrier(2), Barrier(2), []

    def slowly(asked: object) -> None:
        check(asked)
        sleep(0.1)  # long enough for the other one to look as well

    def opens() -> None:
        together.wait()
        try:
            with certified(model, Policy.preset("certified", budget=0.5)):
                found.append("opened")
                tried.wait()
        except CertError as error:
            found.append(str(error))
            tried.wait()

    monkeypatch.setattr(checks, "check_model", slowly)
    threads = [Thread(target=opens) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["opened", f"{type(model).__name__}: is in another certified() session"]
    assert model.config._attn_implementation == before and "generate" not in vars(model)
