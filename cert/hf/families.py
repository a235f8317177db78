"""Which decoders are served, by the model type of their config: the tested ones, and those refused with the reason."""

# Each passes the oracle of tests/cert/hf/test_hf_families.py in every mode; docs/models.md says what they are.
TESTED = frozenset(
    """apertus arcee bitnet cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt_neox granite
    granitemoe helium hunyuan_v1_dense internlm3 llama llama4_text ministral mistral mixtral nemotron olmo olmo2 olmo3
    olmoe opt phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma""".split()
)
_STATE, _SINKS = "layers that keep a state instead of keys and values", "learned sink logits"
_INTERFACE, _SHARED = "does not follow transformers' attention interface", "layers share their keys and values (KV sharing)"
REFUSED = {
    "bloom": _INTERFACE,
    "deepseek_v3": "compressed keys and values (MLA), which the bytes of the cache would misstate",
    "diffllama": "attends twice, to keys or values other than those in the cache",
    "doge": "a learned mask of its own, which evicted layers would not see",
    "falcon_h1": _STATE,
    "gemma3n_text": _SHARED,
    "gpt_oss": _SINKS,
    "jamba": _STATE,
    "lfm2": _STATE,
    "mamba": _STATE,
    "mimo_v2_flash": _SINKS,
    "mpt": _INTERFACE,
    "qwen3_next": _STATE,
}
