"""Every family of models: the oracle in all modes, budget 1.0 bit-equal, or refused by name before any work."""

import re

import pytest
import torch
import transformers
from oracle import Oracle, close, column_bias, kept_sets, tiny, tokens
from packaging.version import Version

from cert import draw
from cert.errors import CertError
from cert.hf import certified
from cert.hf.cache import ids_sha256
from cert.hf.families import REFUSED, TESTED
from cert.policy import Policy

HYBRID = {"sliding_window": 24, "num_hidden_layers": 3,
          "layer_types": ["sliding_attention", "full_attention", "full_attention"]}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPECIAL = {
    "cohere": {"logit_scale": 1.0},
    "cohere2": {**HYBRID, "logit_scale": 1.0},
    "exaone4": HYBRID,
    "gemma2": {**HYBRID, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": HYBRID,
    "llama4_text": {**EXPERTS, "num_experts": 2, "attention_chunk_size": 32, "intermediate_size_mlp": 64,
                    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "ministral": HYBRID,
    "mistral": {"sliding_window": None},
    "mixtral": EXPERTS,
    "granitemoe": EXPERTS,
    "olmo3": HYBRID,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phimoe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "smollm3": {"no_rope_layers": [1, 0], "sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {**HYBRID, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
}  # fmt: skip
REFUSABLE = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "deepseek_v3": {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
                    "q_lora_rank": 8, "kv_lora_rank": 8, "first_k_dense_replace": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                     "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256,
                     "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_oss": {**EXPERTS, "max_position_embeddings": 131072},
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 2,
              "use_mamba_kernels": False},
    "jetmoe": {**EXPERTS, "kv_channels": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minicpm3": {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
                 "q_lora_rank": 8, "kv_lora_rank": 8},
    "qwen3_next": {**EXPERTS, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
}  # fmt: skip
# What the oldest version of transformers that pyproject.toml allows does not know, cannot configure, or wrote otherwise.
NEWER = {"cohere2", "ernie4_5", "internlm3", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phimoe",
         "diffllama", "falcon_h1", "mamba", "mimo_v2_flash", "minicpm3"}  # fmt: skip
OLD = Version(transformers.__version__) < Version("5.24")
CAPPED = ("gemma2", "vaultgemma")
CONTEXT, QUESTION = tokens(120), tokens(5, seed=2)
POLICY = Policy.preset("certified", budget=0.35, sinks=2, recent=8, window=8)
GENERATE = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def model_of(family: str, attention: str = "sdpa", **changes: object):
    if OLD and family in NEWER:
        pytest.skip(f"transformers {transformers.__version__}: {family} came or was rewritten later")
    if family in CAPPED:
        attention = "eager"
    return tiny(family, attention, **{**IDS, **SPECIAL.get(family, {}), **changes})


@pytest.mark.parametrize("family", sorted(TESTED))
def test_budget_one_is_bit_equal(family: str) -> None:
    for attention in ("sdpa", "eager"):
        model = model_of(family, attention)
        alone = model.generate(CONTEXT, max_new_tokens=4, **GENERATE)
        with certified(model, Policy.preset("certified", budget=1.0)) as session:
            served = model.generate(CONTEXT, max_new_tokens=4, **GENERATE)
            assert session.summary()["realised_budget"] == 1.0
        assert all(map(torch.equal, served.logits, alone.logits))


@pytest.mark.parametrize("family", sorted(TESTED))
def test_aware_and_while_generating(family: str) -> None:
    """Compressed at the end of the prompt and after every third token: each step equals the oracle's."""
    model, oracle, biases = model_of(family), Oracle(model_of(family)), []
    with certified(
        model, POLICY, compress_every=3, callback=lambda _: biases.append(column_bias(session.cache))
    ) as session:
        out = model.generate(CONTEXT, max_new_tokens=6, **GENERATE)
        assert session.summary()["compressions"] == 2
    close(out.logits[0], oracle.feed(CONTEXT)[:, -1])
    for token, bias, found in zip(out.sequences[:, 120:-1].split(1, dim=1), biases, out.logits[1:], strict=True):
        assert all(b.isinf().any() for b in bias.values())
        oracle.bias = {index: b[..., :-1] for index, b in bias.items()}
        close(found, oracle.feed(token)[:, -1])


@pytest.mark.parametrize("family", sorted(TESTED))
def test_agnostic_and_streaming(family: str) -> None:
    """Context, compress, a turn, compress, a question of 5 tokens at once and one token more."""
    model, oracle = model_of(family), Oracle(model_of(family))
    with certified(model, POLICY) as session, torch.no_grad():
        for turn in (CONTEXT, tokens(40, 6)):
            session.prefill(turn)
            session.compress()
            oracle.feed(turn)
            oracle.bias = column_bias(session.cache)
            assert all(b.isinf().any() for b in oracle.bias.values())
        for part in (QUESTION, tokens(1, 3)):
            close(model(input_ids=part, use_cache=True, **session.cache_kwargs).logits, oracle.feed(part))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (4, 4), (6, 3), (8, 2), (1, 1)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_groups_of_one_to_eight_and_a_head_dim_of_its_own(family: str, heads: int, kv_heads: int) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "hidden_size": 48}
    model, oracle = model_of(family, **shape), Oracle(model_of(family, **shape))
    with certified(model, POLICY) as session, torch.no_grad():
        session.prefill(CONTEXT)
        session.compress()
        kept = kept_sets(session.cache)
        oracle.feed(CONTEXT)
        oracle.bias = column_bias(session.cache)
        close(model(input_ids=QUESTION, use_cache=True, **session.cache_kwargs).logits, oracle.feed(QUESTION))
    assert all(len(heads_of) == kv_heads for rows in kept.values() for heads_of in rows)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_the_others_are_refused_by_name_with_the_reason(family: str) -> None:
    model = model_of(family, "eager", **REFUSABLE.get(family, {}))
    with (
        pytest.raises(CertError, match=f"{type(model).__name__}: {re.escape(REFUSED[family])}"),
        certified(model, POLICY),
    ):
        raise AssertionError("the block ran")
    assert "generate" not in model.__dict__ and not model._forward_pre_hooks


@pytest.mark.parametrize("family", ["mistral", "qwen2", "phi3", "starcoder2"])
def test_all_layers_sliding(family: str) -> None:
    model = model_of(family, sliding_window=24, use_sliding_window=True, max_window_layers=0)
    with pytest.raises(CertError, match="every layer is sliding"), certified(model, POLICY):
        pass


def test_a_type_that_nobody_tested_is_not_served() -> None:
    with pytest.raises(CertError, match="'biogpt' is not among the tested ones"), certified(tiny("biogpt"), POLICY):
        pass


@pytest.mark.parametrize("family", CAPPED)
def test_a_soft_cap_that_sdpa_would_leave_out(family: str) -> None:
    model = model_of(family)
    model.config._attn_implementation_internal = "sdpa"  # older versions of transformers let one ask for it
    with pytest.raises(CertError, match=r"attn_logit_softcapping.*eager"), certified(model, POLICY):
        pass


@pytest.mark.parametrize("score", ["snapkv", "h2o"])
def test_scores_and_served_errors_are_of_capped_logits(score: str) -> None:
    """Draw and error by hand: 2 tanh(l / 2), then the offset."""
    composed, family = Policy(score=score, budget=0.35, sinks=2, recent=8, window=8), "gemma2"
    model, oracle = model_of(family), Oracle(model_of(family))
    oracle.feed(CONTEXT)
    with certified(model, composed, audit=True) as session, torch.no_grad():
        session.prefill(CONTEXT)
        rows = dict(oracle.rows)
        session.compress()
        prob = {i: layer.prob for i, layer in session.cache.compressible.items()}
        oracle.bias = column_bias(session.cache)
        model(input_ids=QUESTION[:, :1], use_cache=True, **session.cache_kwargs)
        errors = torch.tensor(session.certificates["err"]).view(2, 4)
    oracle.feed(QUESTION[:, :1])
    for place, index in enumerate(session.cache.compressible):
        q, k, _ = (x[0] for x in rows[index])
        logit = 2 * torch.tanh(torch.einsum("hqd,hkd->hqk", q, k.repeat_interleave(2, 0)) * 8**-0.5 / 2)
        share = logit.masked_fill(torch.ones(120, 120).triu(1).bool(), -torch.inf).softmax(-1)
        share = share[:, -8:].mean(1) if score == "snapkv" else share.sum(1)
        u = draw.uniforms(0, ids_sha256(CONTEXT[0]), index, 2, 120)
        wanted, keep = composed.plan(share.view(2, 2, 120).mean(1), u, place, 2)
        assert kept_sets(session.cache)[index][0] == [[*row.nonzero().squeeze(-1).tolist(), 120] for row in keep]
        for head in range(2):
            close(prob[index][0, head, : int(keep[head].sum())], wanted[head, keep[head]])
        q, k, v = (x[0] for x in oracle.rows[index])
        for head in range(4):
            logit = 2 * torch.tanh(8**-0.5 * (k[head // 2] @ q[head, 0]) / 2)
            offset = torch.nn.functional.pad(oracle.bias[index][0, head // 2], (0, 1))
            err = ((logit + offset).softmax(0) @ v[head // 2] - logit.softmax(0) @ v[head // 2]).norm()
            assert float(errors[place, head]) == pytest.approx(float(err), abs=1e-5)
